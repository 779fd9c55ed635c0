"""Every way in which a rollout can end gives one record, and leaves nothing behind (laws 5, 6 and 7)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from clawhpc.engine.client import EngineLost
from clawhpc.errors import EngineError, SandboxError
from clawhpc.proxy.respond import PolicySampling
from clawhpc.records import ExecResult, Limits, Outcome, RolloutRecord
from clawhpc.rollout.ending import check_machine
from clawhpc.rollout.run import run_rollout
from clawhpc.rollout.trace import Trace
from clawhpc.sandbox.base import SandboxCommand
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.records import make_task, reward_folder
from tests.fakes.rollout import OK, FakeSandbox, Program, ask, hang, one_call, parts_of, plan_of, roll

pytestmark = pytest.mark.anyio
TIMED_OUT = replace(OK, exit_code=124, timed_out=True)


def call_and_wait_in_vain(engine: FakeEngine, *, answered: int) -> Program:
    """The calls that are answered, and one that waits at the engine's gate when the time is up."""

    async def program(command: SandboxCommand) -> ExecResult:
        gate, engine.gate = engine.gate, None
        for number in range(answered):
            await ask(command, f"call {number}")
        engine.gate, engine.asked = gate, anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, command, "hello")
            await engine.asked.wait()
            tasks.cancel_scope.cancel()
        return TIMED_OUT

    return program


async def test_a_rollout_that_ends_well_has_its_calls_and_its_verdict(tmp_path: Path) -> None:
    record = await roll(tmp_path, FakeSandbox(one_call))
    assert record.outcome is Outcome.COMPLETED
    assert record.verdict is not None
    assert (record.verdict.reward, len(record.calls), record.trains) == (1.0, 1, True)
    assert record.rollout_id.endswith("-001")
    assert record.seed == 8
    assert record.temperature == 0.7


async def test_the_harness_gets_its_files_its_installs_and_the_workspace_as_cwd(tmp_path: Path) -> None:
    source = tmp_path / "inputs"
    source.mkdir()
    (source / "in.txt").write_text("data")
    seen: dict[str, str] = {}

    async def look(command: SandboxCommand) -> ExecResult:
        workspace = next(mount.source for mount in command.mounts if mount.target == command.cwd)
        seen["input"] = (workspace / "in.txt").read_text()
        assert command.home is not None
        seen["file"] = (command.home / ".config/agent.json").read_text()
        seen["install"] = next(str(mount.source) for mount in command.mounts if not mount.writable)
        return await one_call(command)

    scratch = tmp_path / "s"
    scratch.mkdir()
    task = replace(make_task(), input_dir=str(source))
    record = await run_rollout(plan_of(task), parts_of(scratch, FakeSandbox(look)))
    assert record.outcome is Outcome.COMPLETED
    assert seen == {"input": "data", "file": "policy", "install": "/nowhere"}


async def test_the_verifier_runs_in_a_sandbox_of_its_own_without_the_proxy(tmp_path: Path) -> None:
    sandbox = FakeSandbox(one_call)
    await roll(tmp_path, sandbox)
    harness, verifier = sandbox.commands
    assert harness.proxy_socket is not None
    assert verifier.proxy_socket is None
    reward_dir = reward_folder(make_task())
    assert not any(str(mount.source).startswith(reward_dir) for mount in harness.mounts)
    assert any(str(mount.source) == reward_dir for mount in verifier.mounts)


async def test_a_harness_that_times_out_is_still_verified(tmp_path: Path) -> None:
    async def call_and_hang(command: SandboxCommand) -> ExecResult:
        await one_call(command)
        return await hang(command)

    record = await roll(tmp_path, FakeSandbox(call_and_hang), deadline_s=10.0, reserve_s=8.5)
    assert record.outcome is Outcome.TIMEOUT
    assert record.trains


async def test_a_harness_that_fails_is_verified_and_its_reward_trains(tmp_path: Path) -> None:
    async def crash(command: SandboxCommand) -> ExecResult:
        await one_call(command)
        return replace(OK, exit_code=1, stderr_tail="oh no")

    record = await roll(tmp_path, FakeSandbox(crash))
    assert record.outcome is Outcome.HARNESS_EXIT
    assert "oh no" in record.detail
    assert record.trains


async def test_a_harness_that_ends_before_its_first_call_is_a_failure_of_the_machine(tmp_path: Path) -> None:
    async def missing_library(command: SandboxCommand) -> ExecResult:
        return replace(OK, exit_code=127, stderr_tail="libfoo.so: not found")

    record = await roll(tmp_path, FakeSandbox(missing_library))
    assert record.outcome is Outcome.SANDBOX_FAILED
    assert "libfoo.so" in record.detail
    assert record.verdict is None


async def test_a_harness_whose_requests_are_all_refused_is_a_failure_of_the_machine(tmp_path: Path) -> None:
    async def repeat(command: SandboxCommand) -> ExecResult:
        while True:
            with anyio.CancelScope(shield=True):  # a client whose read is cancelled may fail
                await ask(command, "hello", max_tokens="no")
            await anyio.lowlevel.checkpoint()

    record = await roll(tmp_path, FakeSandbox(repeat), max_calls=1)
    assert record.outcome is Outcome.SANDBOX_FAILED
    assert record.detail == "the harness sent requests of which none was answered: requests: 21 for 0 calls"
    assert not record.trains


async def test_a_sandbox_that_does_not_start_is_an_outcome(tmp_path: Path) -> None:
    async def refuse(command: SandboxCommand) -> ExecResult:
        raise SandboxError("no user namespaces")

    record = await roll(tmp_path, FakeSandbox(refuse))
    assert (record.outcome, record.detail) == (Outcome.SANDBOX_FAILED, "no user namespaces")


async def test_an_engine_that_fails_is_the_cause_whatever_the_harness_then_does(tmp_path: Path) -> None:
    async def carry_on(command: SandboxCommand) -> ExecResult:
        assert await ask(command, "hello") >= 500
        return OK

    record = await roll(tmp_path, FakeSandbox(carry_on), policy(FakeEngine(replies(EngineError("out of memory")))))
    assert record.outcome is Outcome.ENGINE_FAILED
    assert "out of memory" in record.detail
    assert record.verdict is None


@pytest.mark.parametrize("answered", [0, 1])
async def test_an_engine_that_hangs_is_no_reward_of_the_policy(tmp_path: Path, answered: int) -> None:
    engine = FakeEngine(lambda prompt: "never", gate=anyio.Event(), hangs=True)
    sandbox = FakeSandbox(call_and_wait_in_vain(engine, answered=answered))
    record = await roll(tmp_path, sandbox, policy(engine))
    assert (record.outcome, record.detail) == (Outcome.ENGINE_FAILED, "the engine hangs")
    assert record.verdict is None


async def test_a_policy_that_does_not_come_to_an_end_has_its_timeout_and_trains(tmp_path: Path) -> None:
    engine = FakeEngine(lambda prompt: "endless", gate=anyio.Event())
    record = await roll(tmp_path, FakeSandbox(call_and_wait_in_vain(engine, answered=1)), policy(engine))
    assert record.outcome is Outcome.TIMEOUT
    assert [call.failure for call in record.calls] == ["", "cancelled"]
    assert record.trains


async def test_a_first_reply_without_end_is_the_policys_doing_if_it_had_most_of_the_time(tmp_path: Path) -> None:
    (answered,) = (await roll(tmp_path, FakeSandbox(one_call))).calls
    for open_s, told in ((14.0, None), (4.0, "ran out of time before a model call was answered: cancelled")):
        call = replace(answered, reply=None, tokens=None, failure="cancelled", duration_s=open_s)
        trace = Trace(calls=(call,), exec_result=TIMED_OUT)
        with pytest.raises(SandboxError, match=told) if told else nullcontext():
            check_machine(trace, 20.0)


@pytest.mark.parametrize(
    ("ended", "outcome"), [(OK, Outcome.COMPLETED), (TIMED_OUT, Outcome.ENGINE_FAILED)], ids=["in time", "too late"]
)
async def test_an_engine_that_was_lost_and_came_back_is_no_reward_of_the_policy_where_time_ran_out(
    tmp_path: Path, ended: ExecResult, outcome: Outcome
) -> None:
    async def call_once(command: SandboxCommand) -> ExecResult:
        assert await ask(command, "hello") == 200
        return ended

    engine = FakeEngine(replies(EngineLost("the engine is gone"), "late"))
    record = await roll(tmp_path, FakeSandbox(call_once), policy(engine))
    assert record.outcome is outcome
    assert len(record.calls[0].incidents) == 2
    assert record.trains == (outcome is Outcome.COMPLETED)


@pytest.mark.parametrize("patience", [1, 3])
async def test_a_window_too_small_for_the_first_prompt_is_a_failure_of_the_machine(
    tmp_path: Path, patience: int
) -> None:
    async def give_up(command: SandboxCommand) -> ExecResult:
        for _ in range(patience):
            with anyio.CancelScope(shield=True):
                assert await ask(command, "x" * 100) == 400
        return replace(OK, exit_code=1, stderr_tail="Prompt is too long")

    small = policy(FakeEngine(replies()), PolicySampling(context_window=40))
    record = await roll(tmp_path, FakeSandbox(give_up), small)
    assert record.outcome is Outcome.ENGINE_FAILED
    assert (
        "engine.max_model_len is too small for the first prompt of the harness: prompt of 119 tokens" in record.detail
    )
    assert record.verdict is None


async def test_a_failed_engine_ends_the_harness_early(tmp_path: Path) -> None:
    async def wait_for_ever(command: SandboxCommand) -> ExecResult:
        await ask(command, "hello")
        return await hang(command)

    responder = policy(FakeEngine(replies(EngineError("dead"))))
    record = await roll(tmp_path, FakeSandbox(wait_for_ever), responder, deadline_s=60.0)
    assert record.outcome is Outcome.ENGINE_FAILED


async def test_a_limit_ends_the_harness_and_the_workspace_is_verified(tmp_path: Path) -> None:
    async def loop(command: SandboxCommand) -> ExecResult:
        words: list[str] = []
        while True:
            words.append("again")
            with anyio.CancelScope(shield=True):  # anyio's unix streams do not like to be cancelled while they read
                await ask(command, *words)
            await anyio.lowlevel.checkpoint()

    record = await roll(tmp_path, FakeSandbox(loop), max_calls=2, deadline_s=60.0)
    assert (record.outcome, record.detail) == (Outcome.LIMIT, "calls: all 2 were made")
    assert len(record.calls) == 2
    assert record.trains


TOO_MUCH = replace(OK, exit_code=137, exceeded="memory: 4.02 GB; the limit is 4.00 GB")
"""How a sandbox ends that took more of the host than it may."""


@pytest.mark.parametrize("answered", [False, True])
async def test_a_harness_that_takes_too_much_of_the_host_has_reached_a_limit_if_the_policy_had_a_say(
    tmp_path: Path, answered: bool
) -> None:
    async def take_too_much(command: SandboxCommand) -> ExecResult:
        if answered:
            await one_call(command)
        return TOO_MUCH

    record = await roll(tmp_path, FakeSandbox(take_too_much))
    assert record.outcome is (Outcome.LIMIT if answered else Outcome.SANDBOX_FAILED)
    assert "memory: 4.02 GB; the limit is 4.00 GB" in record.detail
    assert record.trains == answered


async def test_a_verifier_that_takes_too_much_of_the_host_gives_no_reward(tmp_path: Path) -> None:
    async def explode(command: SandboxCommand) -> ExecResult:
        return replace(TOO_MUCH, stdout_tail="1\n")

    record = await roll(tmp_path, FakeSandbox(one_call, explode))
    assert record.outcome is Outcome.VERIFIER_FAILED
    assert "took more of the host than a sandbox may: memory" in record.detail
    assert record.verdict is None


@pytest.mark.parametrize("strict", [False, True])
async def test_a_field_that_no_table_lists_is_counted_and_refused_under_strict(tmp_path: Path, strict: bool) -> None:
    async def ask_oddly(command: SandboxCommand) -> ExecResult:
        assert await ask(command, "hello") == 200
        with anyio.CancelScope(shield=True):  # a client whose read is cancelled may fail
            assert await ask(command, "hello", top_a=0.5, temperature=0.1) == (400 if strict else 200)
        return OK

    parts = parts_of(tmp_path, FakeSandbox(ask_oddly), strict_fields=strict)
    with anyio.fail_after(60):
        record = await run_rollout(plan_of(), parts)
    assert record.outcome is (Outcome.PROXY_FAILED if strict else Outcome.COMPLETED)
    assert ("top_a" in record.detail) == strict
    assert record.trains != strict
    assert dict(record.unlisted) == ({} if strict else {"top_a": 1})
    assert dict(record.overridden) == ({} if strict else {"temperature": 1})


async def test_a_verifier_that_says_nonsense_is_an_outcome_and_no_reward(tmp_path: Path) -> None:
    async def nonsense(command: SandboxCommand) -> ExecResult:
        return replace(OK, stdout_tail="nan\n")

    record = await roll(tmp_path, FakeSandbox(one_call, nonsense))
    assert record.outcome is Outcome.VERIFIER_FAILED
    assert record.verdict is None
    assert not record.trains


async def test_a_verifier_that_hangs_is_stopped_within_the_deadline(tmp_path: Path) -> None:
    record = await roll(tmp_path, FakeSandbox(one_call, hang), deadline_s=10.2, reserve_s=8.2)
    assert record.outcome is Outcome.VERIFIER_FAILED


async def test_calls_that_are_open_when_the_harness_ends_are_recorded_as_cancelled(tmp_path: Path) -> None:
    engine = FakeEngine(replies("late"), gate=anyio.Event())

    async def ask_and_leave(command: SandboxCommand) -> ExecResult:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, command, "hello")
            await engine.asked.wait()
            tasks.cancel_scope.cancel()
        return OK

    record = await roll(tmp_path, FakeSandbox(ask_and_leave), policy(engine))
    (call,) = record.calls
    assert "cancelled" in call.failure
    assert call.tokens is None
    assert len(engine.cancelled) == 1


async def test_a_cancelled_rollout_leaves_neither_a_record_nor_a_file(tmp_path: Path) -> None:
    started = anyio.Event()

    async def start_and_hang(command: SandboxCommand) -> ExecResult:
        started.set()
        return await hang(command)

    records: list[RolloutRecord] = []

    async def collect() -> None:
        records.append(await run_rollout(plan_of(), parts_of(tmp_path, FakeSandbox(start_and_hang))))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect)
            await started.wait()
            tasks.cancel_scope.cancel()
    assert records == []
    assert list(tmp_path.iterdir()) == []


async def test_too_many_live_leaves_discard_the_rollout_but_keep_its_reward(tmp_path: Path) -> None:
    async def branch(command: SandboxCommand) -> ExecResult:
        for word in ("a", "b", "c"):
            await ask(command, word)
        return OK

    record = await roll(tmp_path, FakeSandbox(branch), max_live_leaves=0)
    assert record.outcome is Outcome.OVER_BRANCHED
    assert record.verdict is not None
    assert not record.trains


@pytest.mark.parametrize(("reserve_s", "settle_s"), [(0, 2), (5, 0), (8.5, 1), (float("nan"), 1)])
def test_a_reserve_that_leaves_the_verifier_no_time_is_refused(reserve_s: float, settle_s: float) -> None:
    with pytest.raises(ValueError, match=r"reserve_s=.*: must be at least .*settle_s="):
        Limits(deadline_s=60, reserve_s=reserve_s, settle_s=settle_s)
    Limits(deadline_s=60, reserve_s=10, settle_s=2)
