"""A worker whose parts fail: what is run again, what is recorded, and what is given back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clawhpc.engine.client import EngineLost
from clawhpc.errors import (
    BoundaryError,
    EngineError,
    HostError,
    ProxyError,
    SandboxError,
    VerifierError,
    ungrouped,
)
from clawhpc.paths import RunPaths
from clawhpc.records import WORKSPACE_MOUNT, ExecResult, Outcome, TaskImage
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.store import claim_group, claim_owner, publish_plan, read_rollouts
from tests.fakes.records import make_group, make_task
from tests.fakes.rollout import FakeSandbox, hang, one_call, workspace_of
from tests.fakes.worker import FakeDesk, plan_of, work_through, worker_of

pytestmark = pytest.mark.anyio


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


async def test_a_worker_whose_host_sees_the_images_of_tasks_no_more_records_nothing(tmp_path: Path) -> None:
    paths, image = RunPaths(tmp_path / "run"), TaskImage(folder=f"{tmp_path}/images/a", python="/p")
    group = make_group("a", num_samples=1, task=replace(make_task(), image=image))
    publish_plan(paths, replace(plan_of(), groups=(group,)))
    sandboxes = Sandboxes(FakeSandbox(one_call), lambda image: FakeSandbox(one_call))
    with pytest.raises(HostError, match="images: no such folder here"), ungrouped(), anyio.fail_after(60):
        await worker_of(tmp_path, FakeDesk(), sandboxes, max_attempts=2).work()
    assert list(read_rollouts(paths)) == []
    assert claim_owner(paths, group.key) is None


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


async def test_an_image_of_a_task_that_does_not_start_fails_its_rollouts_and_no_others(tmp_path: Path) -> None:
    paths, good = RunPaths(tmp_path / "run"), TaskImage(folder=str(tmp_path / "good"), python="/p")
    bad = replace(good, folder=str(tmp_path / "bad"))
    for image in (good, bad):
        (Path(image.folder) / WORKSPACE_MOUNT.lstrip("/")).mkdir(parents=True)
    sandboxes = Sandboxes(
        FakeSandbox(one_call), lambda image: FakeSandbox(bad_sandbox if image == bad else one_call, python=image.folder)
    )
    groups = [
        make_group(name, num_samples=1, task=replace(make_task(name), image=image))
        for name, image in (("own", None), ("good", good), ("bad", bad))
    ]
    publish_plan(paths, replace(plan_of(), groups=tuple(groups)))
    await work_through(paths, worker_of(tmp_path, FakeDesk(), sandboxes, max_attempts=2))
    records = {record.key.task_id: record for record in read_rollouts(paths)}
    assert {name: record.outcome for name, record in records.items()} == {
        "own": Outcome.COMPLETED,
        "good": Outcome.COMPLETED,
        "bad": Outcome.SANDBOX_FAILED,
    }
    assert records["bad"].num_attempts == 2
