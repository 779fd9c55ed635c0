"""A worker between the store and its parts: what it takes, in which order, and what it leaves when a part fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from clawhpc.engine.client import EngineLost
from clawhpc.errors import (
    BoundaryError,
    ClawError,
    EngineError,
    HostError,
    ProxyError,
    SandboxError,
    VerifierError,
    ungrouped,
)
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder
from clawhpc.records import ExecResult, GroupPlan, Limits, McpServer, Outcome, StepPlan
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import (
    MANIFEST,
    claim_group,
    claim_owner,
    open_plans,
    publish_plan,
    publish_rollout,
    read_rollouts,
    read_usage,
    release_claims,
    rollout_files,
)
from clawhpc.worker.run import Worker
from clawhpc.worker.settings import READY_FILE, STOP_FILE, WorkerSettings, WorkerSpec
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine
from tests.fakes.late_view import LateView, naming_threads
from tests.fakes.records import make_group, make_record, make_task
from tests.fakes.rollout import OK, FakeHarness, FakeSandbox, ask, hang, one_call, workspace_of

pytestmark = pytest.mark.anyio


@dataclass
class FakeDesk:
    """An engine that remembers which weights it was asked for."""

    engine: FakeEngine = field(default_factory=lambda: FakeEngine(lambda prompt: "fine"))
    engine_cpu_s: float = 1.5
    starts: list[int] = field(default_factory=list)
    """Policy steps, one for each call of `make_ready`."""
    max_starts: int = 100
    end: ClawError = field(default_factory=lambda: EngineError("it has died too often"))
    recovers: list[ClawError | None] = field(default_factory=list)
    """How it ends to look after the engine, from the first time on; well where nothing is said."""
    num_recovered: int = 0

    async def make_ready(self, plan: StepPlan) -> None:
        self.starts.append(plan.policy_step)
        if len(self.starts) > self.max_starts:
            raise self.end

    async def recover(self) -> None:
        self.num_recovered += 1
        if self.recovers and (error := self.recovers.pop(0)) is not None:
            raise error

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        return policy(self.engine)


def plan_of(*tasks: str, step: int = 0, num_samples: int = 2) -> StepPlan:
    groups = tuple(make_group(task, step=step, num_samples=num_samples) for task in tasks)
    return StepPlan(phase="train", step=step, policy_step=step, temperature=0.5, groups=groups)


def worker_of(tmp_path: Path, desk: FakeDesk, sandbox: FakeSandbox | None = None, **settings: Any) -> Worker:
    spec = WorkerSpec(
        run_root=str(tmp_path / "run"),
        cache_dir=str(tmp_path),
        scratch_root=None,
        worker=replace(WorkerSettings(concurrency=2, poll_s=0.01, max_attempts=1), **settings),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(deadline_s=60.0, reserve_s=30.0, settle_s=0.1),
        harnesses={},
    )
    scratch = tmp_path / "s"
    scratch.mkdir(exist_ok=True)
    return Worker(
        spec,
        "w0",
        sandbox=sandbox or FakeSandbox(one_call),
        harnesses={"pi": FakeHarness()},
        desk=desk,
        scratch=scratch,
        environment={"CLAWHPC_OWNER": "this worker"},
    )


async def work_until(paths: RunPaths, worker: Worker, what: Callable[[], bool]) -> None:
    """Let the worker work until `what` is true, and then stop it as a campaign does."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.work)
            while not what():
                await anyio.sleep(0.01)
            stop = paths.workers / "w0" / STOP_FILE
            stop.parent.mkdir(parents=True, exist_ok=True)
            stop.touch()


async def work_through(paths: RunPaths, worker: Worker) -> None:
    await work_until(paths, worker, lambda: not open_plans(paths))


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


@pytest.mark.parametrize(
    ("end", "failed"), [(EngineLost("killed"), 0), (EngineError("it draws nonsense"), 1)], ids=["lost", "failed"]
)
async def test_an_engine_that_ends_in_mid_plan_costs_no_rollout_but_what_it_spoiled(
    tmp_path: Path, end: EngineError, failed: int
) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    publish_plan(paths, plan_of("a", "b", "c", num_samples=2))
    desk.engine.script = lambda prompt: end if len(desk.engine.requests) == 1 else "fine"
    await work_through(paths, worker_of(tmp_path, desk, concurrency=1))
    outcomes = [record.outcome for record in read_rollouts(paths)]
    assert sorted(outcomes) == [Outcome.COMPLETED] * (6 - failed) + [Outcome.ENGINE_FAILED] * failed


async def test_an_engine_that_dies_too_often_ends_the_worker(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk(max_starts=3)
    publish_plan(paths, plan_of("a", "b"))
    with pytest.RaisesGroup(EngineError), anyio.fail_after(60):
        await worker_of(tmp_path, desk).work()


FAILURES: dict[Outcome, BoundaryError] = {
    Outcome.SANDBOX_FAILED: SandboxError("no more user namespaces"),
    Outcome.ENGINE_FAILED: EngineError("it draws nonsense"),
    Outcome.PROXY_FAILED: ProxyError("it cannot record"),
    Outcome.VERIFIER_FAILED: VerifierError("it hangs"),
}


def failing(times: int, error: BoundaryError) -> FakeSandbox:
    """A machine that fails so many rollouts, after what was drawn in them."""
    num_failed = 0

    async def fail_or_not(command: SandboxCommand) -> ExecResult:
        nonlocal num_failed
        result = await one_call(command)
        assert not list(workspace_of(command).rglob("*.left")), "what an earlier attempt has left"
        (workspace_of(command) / "a.left").touch()
        if num_failed < times:
            num_failed += 1
            raise error
        return result

    return FakeSandbox(fail_or_not)


@pytest.mark.parametrize("outcome", FAILURES)
async def test_a_rollout_that_the_machine_failed_is_run_again_as_if_it_had_never_been(
    tmp_path: Path, outcome: Outcome
) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    plan = publish_plan(paths, plan_of("a", num_samples=1))
    await work_through(paths, worker_of(tmp_path, desk, failing(1, FAILURES[outcome]), max_attempts=3))
    (record,) = read_rollouts(paths)
    assert (record.outcome, record.detail, record.num_attempts) == (Outcome.COMPLETED, "", 2)
    assert len(desk.starts) == 3, "the engine is looked at before the group, and before each attempt"
    (failed,) = record.failed_attempts
    assert (failed.outcome, failed.detail) == (outcome, str(FAILURES[outcome]))
    assert failed.seconds > 0
    assert len(record.calls) == 1
    first, second = desk.engine.requests
    again = replace(second, request_id=first.request_id)
    assert first == again, "with the same seed: what made the machine fail is not left out of the sample"
    assert record.seed == plan.groups[0].seed
    assert list((tmp_path / "s").iterdir()) == []


async def test_a_rollout_that_the_machine_fails_too_often_is_recorded_with_what_failed_it(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk()
    publish_plan(paths, plan_of("a", num_samples=2))
    await work_through(paths, worker_of(tmp_path, desk, failing(4, SandboxError("no room")), max_attempts=2))
    records = list(read_rollouts(paths))
    assert [(record.outcome, record.num_attempts) for record in records] == [(Outcome.SANDBOX_FAILED, 2)] * 2
    assert {failed.detail for record in records for failed in record.failed_attempts} == {"no room"}


async def test_what_the_policy_does_wrong_is_not_run_again(tmp_path: Path) -> None:
    async def fail(command: SandboxCommand) -> ExecResult:
        return replace(await one_call(command), exit_code=1)

    paths = RunPaths(tmp_path / "run")
    publish_plan(paths, plan_of("a"))
    await work_through(paths, worker_of(tmp_path, FakeDesk(), FakeSandbox(fail), max_attempts=3))
    assert [(record.outcome, record.num_attempts) for record in read_rollouts(paths)] == [(Outcome.HARNESS_EXIT, 1)] * 2


async def bad_sandbox(command: SandboxCommand) -> ExecResult:
    raise SandboxError("no more user namespaces")


async def test_a_worker_whose_host_starts_no_sandbox_any_more_records_nothing_and_gives_its_groups_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would go through all that is planned, and fail it faster than others can do it."""
    paths = RunPaths(tmp_path / "run")
    plan = publish_plan(paths, plan_of("a", "b"))
    with pytest.raises(HostError), ungrouped(), anyio.fail_after(60):
        await worker_of(tmp_path, FakeDesk(), FakeSandbox(bad_sandbox, bad_sandbox), max_attempts=2).work()
    assert list(read_rollouts(paths)) == []
    assert [claim_owner(paths, group.key) for group in plan.groups] == [None, None]
    assert f"worker w0 on {os.uname().nodename} gives 2 groups back" in caplog.text


async def test_a_worker_whose_host_starts_no_engine_keeps_what_is_done_and_gives_the_rest_back(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk(max_starts=5, end=HostError("three times"))
    plan = publish_plan(paths, plan_of("a", "b"))
    claim_group(paths, plan.groups[1].key, "other")
    with pytest.RaisesGroup(HostError), anyio.fail_after(60):
        publish_plan(paths, plan_of("c", step=1, num_samples=3))
        await worker_of(tmp_path, desk, concurrency=1).work()
    assert {record.key.task_id for record in read_rollouts(paths)} == {"a", "c"}
    assert [claim_owner(paths, group.key) for group in plan.groups] == ["w0", "other"]
    assert claim_owner(paths, plan_of("c", step=1).groups[0].key) is None


@pytest.mark.parametrize("num_failed", [1, 2])
async def test_a_rollout_whose_engine_starts_no_more_is_given_back_at_whatever_attempt(
    tmp_path: Path, num_failed: int
) -> None:
    error = HostError("three times")
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk(recovers=[None, error][2 - num_failed :])
    plan = publish_plan(paths, plan_of("a", num_samples=1))
    sandbox = failing(num_failed, FAILURES[Outcome.ENGINE_FAILED])
    with pytest.raises(HostError, match="three times"), ungrouped(), anyio.fail_after(60):
        await worker_of(tmp_path, desk, sandbox, max_attempts=2).work()
    assert list(read_rollouts(paths)) == []
    assert claim_owner(paths, plan.groups[0].key) is None


async def test_an_engine_that_has_died_too_often_costs_no_record(tmp_path: Path) -> None:
    paths, desk = RunPaths(tmp_path / "run"), FakeDesk(recovers=[EngineError("it has died too often")])
    publish_plan(paths, plan_of("a", num_samples=1))
    await work_through(paths, worker_of(tmp_path, desk, failing(1, FAILURES[Outcome.ENGINE_FAILED])))
    (record,) = read_rollouts(paths)
    assert (record.outcome, desk.num_recovered) == (Outcome.ENGINE_FAILED, 1)


async def test_a_worker_that_is_told_to_end_in_mid_rollout_leaves_no_record_and_no_file_and_gives_its_groups_back(
    tmp_path: Path,
) -> None:
    started = anyio.Event()

    async def start_and_hang(command: SandboxCommand) -> ExecResult:
        started.set()
        return await hang(command)

    paths = RunPaths(tmp_path / "run")
    plan = publish_plan(paths, plan_of("a"))
    worker = worker_of(tmp_path, FakeDesk(), FakeSandbox(start_and_hang))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.work)
            await started.wait()
            tasks.cancel_scope.cancel()
    assert claim_owner(paths, plan.groups[0].key) is None
    assert list(read_rollouts(paths)) == []
    assert list((tmp_path / "s").iterdir()) == []


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
    running, most = 0, 0

    async def count(command: SandboxCommand) -> ExecResult:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await ask(command, "hello")
        await anyio.sleep(0.05)
        running -= 1
        return await one_call(command)

    paths = RunPaths(tmp_path / "run")
    publish_plan(paths, plan_of("a", "b"))
    await work_through(paths, worker_of(tmp_path, FakeDesk(), FakeSandbox(count), concurrency=3))
    assert most == 3


async def test_a_worker_without_work_ends_by_itself(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        await worker_of(tmp_path, FakeDesk(), idle_min=0.001).work()
