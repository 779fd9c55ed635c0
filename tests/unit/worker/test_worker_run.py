"""A worker between the store and its parts: what it takes, in which order, and what it leaves when a part fails."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest

from clawhpc.paths import RunPaths
from clawhpc.records import ExecResult, McpServer, Outcome, StepPlan
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.store import (
    MANIFEST,
    claim_group,
    claim_owner,
    publish_plan,
    publish_rollout,
    read_rollouts,
    read_usage,
    release_claims,
    rollout_files,
)
from clawhpc.worker.settings import READY_FILE, STOP_FILE
from tests.fakes.late_view import LateView, naming_threads
from tests.fakes.records import make_group, make_record, make_task
from tests.fakes.rollout import OK, FakeSandbox, one_call
from tests.fakes.worker import FakeDesk, plan_of, work_through, work_until, worker_of

pytestmark = pytest.mark.anyio


async def test_plans_are_worked_through_in_order_each_with_its_own_weights(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    for step in (1, 0):
        publish_plan(paths, plan_of("a", "b", step=step))
    await work_through(paths, worker_of(tmp_path, desk))
    assert desk.starts == [0] * 6 + [1] * 6, "before each group and each of its samples"
    records = list(read_rollouts(paths))
    assert len(records) == 8
    assert {record.temperature for record in records} == {0.5}
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert (paths.workers / "w0" / READY_FILE).exists()


@dataclass
class WorkingDesk(FakeDesk):
    """Its engine takes a second for whatever it is asked."""

    async def make_ready(self, plan: StepPlan) -> None:
        await super().make_ready(plan)
        self.engine_cpu_s += 1.0


async def test_what_the_engine_takes_is_counted_for_each_plan(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for step, tasks in enumerate([("a",), ("a", "b")]):
        publish_plan(paths, plan_of(*tasks, step=step))
    await work_through(paths, worker_of(tmp_path, WorkingDesk()))
    (usage,) = read_usage(paths)
    spent = {name: time.cpu_s for name, time in usage.engine_by_plan.items()}
    assert spent == {"train-000000": 3.0, "train-000001": 6.0}
    assert usage.engine_cpu_s == 1.5 + 9.0
    assert all(time.wall_s > 0 for time in usage.engine_by_plan.values())


async def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    plan = publish_plan(paths, plan_of("a"))
    there = make_record(plan.groups[0], 0, reward=0.25)
    publish_rollout(paths, there)
    await work_through(paths, worker_of(tmp_path, desk))
    assert len(desk.engine.requests) == 1
    assert there in list(read_rollouts(paths))


async def test_a_group_whose_worker_died_before_sealing_it_is_sealed(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    plan = publish_plan(paths, plan_of("a"))
    for sample in (0, 1):
        publish_rollout(paths, make_record(plan.groups[0], sample))
    await work_through(paths, worker_of(tmp_path, desk))
    assert desk.engine.requests == []


async def test_a_server_on_the_host_is_known_as_the_workers_own(tmp_path: Path) -> None:
    paths, seen = RunPaths(tmp_path / "run"), []

    async def listen(command: SandboxCommand) -> ExecResult:
        (socket,) = (mount.source for mount in command.mounts if mount.target.endswith("/lab.sock"))
        await one_call(command)  # before it, a server that ends at once ends the rollout
        async with await anyio.connect_unix(socket) as server:
            seen.append(b"".join([piece async for piece in server]))
        return OK

    lab = McpServer(name="lab", argv=("/usr/bin/env",), on_host=True)
    group = make_group(task=replace(make_task(), mcp_servers=(lab,)), num_samples=1)
    publish_plan(paths, replace(plan_of(), groups=(group,)))
    await work_through(paths, worker_of(tmp_path, FakeDesk(), FakeSandbox(listen)))
    assert b"CLAWHPC_OWNER=this worker\n" in seen[0]


@pytest.mark.parametrize("num_looks", [1, 5])
async def test_what_other_hosts_wrote_and_is_seen_late_here_is_never_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_looks: int
) -> None:
    """At worst a rollout is run in vain: of two records of the same the first stays."""
    paths = RunPaths(tmp_path / "run")
    plan = publish_plan(paths, plan_of("a", "b", "c"))
    there = make_record(plan.groups[0], 0, reward=0.25)
    publish_rollout(paths, there)
    for sample in (0, 1):
        publish_rollout(paths, make_record(plan.groups[1], sample))
    claim_group(paths, plan.groups[2].key, "other")
    foreign = {*rollout_files(paths), paths.group(plan.groups[2].key) / "claim"}
    LateView(monkeypatch, lambda path: path in foreign, num_looks=num_looks)
    manifests = [str(paths.group(group.key) / MANIFEST) for group in plan.groups]
    await work_until(paths, worker_of(tmp_path, FakeDesk()), lambda: all(map(os.path.exists, manifests[:2])))
    monkeypatch.undo()
    assert claim_owner(paths, plan.groups[2].key) == "other"
    records = list(read_rollouts(paths))
    assert len({record.rollout_id for record in records}) == len(records) == 4
    assert there in records


async def test_no_rollout_waits_for_a_store_on_which_names_are_given_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a record is published, the proxies of the others answer: nothing gets its name in the event loop."""
    paths = RunPaths(tmp_path / "run")
    publish_plan(paths, plan_of("a"))
    threads = naming_threads(monkeypatch)
    await work_through(paths, worker_of(tmp_path, FakeDesk()))
    assert len(threads) >= len(["claim", "ready", "rollout 0", "rollout 1", "manifest", "usage"])
    assert threading.current_thread() not in threads


async def test_groups_of_a_living_worker_are_left_to_it_and_taken_over_when_they_are_free(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    plan = publish_plan(paths, plan_of("a", "b"))
    claim_group(paths, plan.groups[0].key, "other")
    worker = worker_of(tmp_path, desk)
    await work_until(paths, worker, lambda: len(list(read_rollouts(paths))) == 2)
    assert {record.key.task_id for record in read_rollouts(paths)} == {"b"}
    (paths.workers / "w0" / STOP_FILE).unlink()
    assert release_claims(paths, plan, alive=frozenset({"w0"})) == 1
    await work_through(paths, worker)
    assert len(list(read_rollouts(paths))) == 4


async def test_no_more_rollouts_run_at_once_than_there_are_slots(tmp_path: Path) -> None:
    running, most, full = 0, 0, anyio.Event()

    async def count(command: SandboxCommand) -> ExecResult:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        if running == 3:
            full.set()
        await full.wait()
        await anyio.sleep(0.05)  # room for one more to begin
        running -= 1
        return await one_call(command)

    paths = RunPaths(tmp_path / "run")
    publish_plan(paths, plan_of("a", "b"))
    await work_through(paths, worker_of(tmp_path, FakeDesk(), FakeSandbox(count), concurrency=3))
    assert most == 3


async def test_a_worker_without_work_ends_by_itself(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        await worker_of(tmp_path, FakeDesk(), idle_min=0.001).work()
