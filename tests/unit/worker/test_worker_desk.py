"""The engine behind a desk: started when it is needed, loaded when its plan changes, started again when it has died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from clawhpc.engine.client import EngineLost, SamplingParams
from clawhpc.errors import EngineError, HostError, UserError
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import PolicyResponder, ScriptedResponder
from clawhpc.proxy.session import MAX_DRAWS
from clawhpc.records import Conversation, Generation, Limits, Message, PolicyVersion, Probe, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import publish_policy
from clawhpc.worker.desk import PolicyDesk
from clawhpc.worker.settings import WorkerSettings, WorkerSpec
from tests.fakes.caller import open_call, policy, session_of, user
from tests.fakes.chat_tokenizer import Words, write_tokenizer
from tests.fakes.late_view import LateView
from tests.fakes.records import make_group, make_task
from tests.fakes.serve import FakeServe

pytestmark = pytest.mark.anyio


@dataclass
class PoisonedEngine:
    """Each draw kills the server."""

    desk: PolicyDesk
    serve: FakeServe
    num_draws: int = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        self.num_draws += 1
        self.serve.servers[-1].alive = False
        raise EngineLost("the engine is gone")

    async def recover(self) -> None:
        await self.desk.recover()

    async def check_drawing(self, *, within_s: float) -> None:
        raise AssertionError("nobody asks")


def write_policies(paths: RunPaths, *steps: int, words: Words = "gpt2", thinking: bool = False) -> None:
    for step in steps:
        part = paths.root / "part"
        part.mkdir(parents=True)
        write_tokenizer(part, words)
        (part / "model.safetensors").write_bytes(b"w")
        probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
        folder = str(paths.policy(step))
        publish_policy(
            part, PolicyVersion(step=step, path=folder, digest="d", renderer="qwen3", thinking=thinking, probe=probe)
        )


@asynccontextmanager
async def desk_of(
    tmp_path: Path, serve: FakeServe, engine: EngineSettings | None = None, **worker: Any
) -> AsyncIterator[PolicyDesk]:
    """A desk, and nothing left of its engine afterwards."""
    spec = WorkerSpec(
        run_root=str(tmp_path),
        cache_dir=str(tmp_path),
        scratch_root=None,
        worker=replace(WorkerSettings(), **worker),
        engine=engine or EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(deadline_s=60, reserve_s=10),
        harnesses={},
    )
    ledger: Any = SimpleNamespace(scratch=tmp_path / "scratch", environment={})
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            yield PolicyDesk(spec, RunPaths(tmp_path), "w0", ledger, tasks, serve=serve)
            tasks.cancel_scope.cancel()
    assert serve.open == 0


def plan_of(policy_step: int, phase: Any = "train", step: int = 0) -> StepPlan:
    group = make_group(phase=phase)
    return StepPlan(phase=phase, step=step, policy_step=policy_step, temperature=0.5, groups=(group,))


async def draw_by(desk: PolicyDesk) -> int:
    """The one token that a rollout's engine draws: the policy step of its weights."""
    responder = desk.responder(plan_of(0), plan_of(0).groups[0])
    assert isinstance(responder, PolicyResponder)
    generation = await responder.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")
    return generation.completion_ids[0]


async def test_the_engine_starts_once_and_then_loads_what_each_plan_names(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0, 1)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        for step in (0, 0, 1):
            await desk.make_ready(plan_of(step))
            assert [server.policy_step for server in serve.servers] == [step]
        assert desk.engine_cpu_s == 2.0
        assert desk.responder(plan_of(1), plan_of(1).groups[0]).sampling.temperature == 0.5  # type: ignore[attr-defined]
        assert await draw_by(desk) == 1


async def test_a_policy_of_another_chat_format_is_rendered_in_its_own(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    write_policies(RunPaths(tmp_path), 1, thinking=True)
    serve, prompts = FakeServe(), []
    async with desk_of(tmp_path, serve) as desk:
        for step in (0, 1, 0):
            await desk.make_ready(plan_of(step))
            responder = desk.responder(plan_of(step), plan_of(step).groups[0])
            conversation = Conversation(model="policy", messages=(Message(role="user", text="hi"),))
            prompts.append(tuple(responder.prepare(conversation, {}).rendered.ids))  # type: ignore[union-attr]
    assert len(serve.servers) == 1, "the weights fit"
    assert prompts[0] == prompts[2] != prompts[1]


async def test_a_policy_with_another_tokenizer_has_an_engine_of_its_own(tmp_path: Path) -> None:
    """What an engine masks, it was told when it was started."""
    write_policies(RunPaths(tmp_path), 0)
    write_policies(RunPaths(tmp_path), 1, words="qwen")
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        for step in (0, 1, 1, 0):
            await desk.make_ready(plan_of(step, step=step))
            assert await draw_by(desk) == step
        assert desk.engine_cpu_s == 3 * 2.0
    assert [server.policy_step for server in serve.servers] == [0, 1, 0]


async def test_a_policy_that_is_seen_later_than_the_plan_that_names_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign would end where it was taken for missing."""
    write_policies(RunPaths(tmp_path), 0)
    view = LateView(monkeypatch, lambda path: path == RunPaths(tmp_path).policy(0), num_looks=3)
    async with desk_of(tmp_path, FakeServe(), poll_s=0.01) as desk:
        await desk.make_ready(plan_of(0))
        assert await draw_by(desk) == 0
    assert view.looks.total() > 3


async def test_an_engine_that_died_is_started_again_until_it_has_died_too_often(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve, max_engine_starts=2) as desk:
        await desk.make_ready(plan_of(0))
        serve.servers[0].alive = False
        await desk.make_ready(plan_of(0))
        serve.servers[1].alive = False
        for ask_again in (partial(desk.make_ready, plan_of(0)), desk.recover):
            with pytest.raises(EngineError, match=r"has died 2 times.*engine\.log"):
                await ask_again()


async def test_a_prompt_that_the_engine_dies_of_fails_its_call_and_not_the_worker(tmp_path: Path) -> None:
    """By the defaults of both, in every plan anew."""
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        for step in range(3):
            await desk.make_ready(plan_of(0, step=step))
            engine = PoisonedEngine(desk, serve)
            async with session_of(policy(engine)) as session:
                await (await open_call(session, user("hi"))).done.wait()
                assert isinstance(session.failure, EngineError)
            assert engine.num_draws == MAX_DRAWS
            await desk.make_ready(plan_of(0, step=step))
            assert await draw_by(desk) == 0


@pytest.mark.parametrize("end", ["alive", "well"])
async def test_calls_that_lost_their_engine_wait_for_one_new_one_with_the_same_weights(
    tmp_path: Path, end: str
) -> None:
    write_policies(RunPaths(tmp_path), 0, 1)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        await desk.make_ready(plan_of(1))
        setattr(serve.servers[0], end, False)
        serve.gate = anyio.Event()
        drawn: list[int] = []

        async def recover() -> None:
            await desk.recover()
            drawn.append(await draw_by(desk))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(recover)
            await anyio.wait_all_tasks_blocked()
            assert drawn == []
            with pytest.raises(EngineLost, match="started again"):
                await draw_by(desk)
            serve.gate.set()
        assert drawn == [1, 1, 1]
        assert len(serve.servers) == 2


async def test_what_is_known_of_texts_outlives_an_engine_as_long_as_the_chat_format_is_the_same(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_policies(paths, 0, 1)
    renderers: list[object] = []
    async with desk_of(tmp_path, FakeServe()) as desk:
        for step, changed in ((0, ""), (0, ""), (1, " ")):
            tokenizer = paths.policy(step) / "tokenizer.json"
            tokenizer.write_text(tokenizer.read_text() + changed)
            await desk.make_ready(plan_of(step, step=len(renderers)))
            responder = desk.responder(plan_of(step), plan_of(step).groups[0])
            assert isinstance(responder, PolicyResponder)
            renderers.append(responder.renderer)
            assert desk.server is not None
            desk.server.alive = False  # type: ignore[misc]
    assert renderers[0] is renderers[1]
    assert renderers[1] is not renderers[2]


async def test_an_engine_that_is_well_is_not_replaced(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        await desk.make_ready(plan_of(0))
        await desk.recover()
        assert len(serve.servers) == 1


async def test_an_engine_that_dies_of_new_weights_is_started_again_with_them(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0, 1)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        await desk.make_ready(plan_of(0))
        serve.servers[0].loads = False
        await desk.make_ready(plan_of(1, step=1))
        assert [server.policy_step for server in serve.servers] == [0, 1]
        assert await draw_by(desk) == 1


async def test_a_caller_that_is_cancelled_does_not_take_the_coming_engine_along(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve, max_engine_starts=2) as desk:
        await desk.make_ready(plan_of(0))
        serve.servers[0].alive = False
        serve.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.recover)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        serve.gate.set()
        await desk.make_ready(plan_of(0))
        assert len(serve.servers) == 2
        assert await draw_by(desk) == 0


async def test_an_engine_that_does_not_come_back_is_told_to_those_who_wait(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        await desk.make_ready(plan_of(0))
        serve.servers[0].alive = False
        serve.num_failures = 3
        responder = desk.responder(plan_of(0), plan_of(0).groups[0])
        with pytest.raises(EngineError, match="did not start again: the engine has failed to start 3 times"):
            await responder.recover()
        with pytest.raises(HostError):
            await desk.recover()


async def test_an_engine_of_which_one_copy_hangs_is_started_again_once_somebody_has_noticed(tmp_path: Path) -> None:
    """Its process lives, and says that it is well."""
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve, EngineSettings(data_parallel_size=2)) as desk:
        await desk.make_ready(plan_of(0))
        serve.servers[0].hanging.add(1)
        await desk.recover()
        assert len(serve.servers) == 2
        assert await draw_by(desk) == 0


async def test_an_engine_that_fails_to_start_is_tried_again(tmp_path: Path) -> None:
    """And what has failed counts in a row only."""
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve) as desk:
        for step in range(3):
            serve.num_failures = 2
            await desk.make_ready(plan_of(0, step=step))
            assert await draw_by(desk) == 0
            serve.servers[-1].alive = False


async def test_a_host_on_which_the_engine_fails_to_start_three_times_is_bad_and_stays_so(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe(num_failures=3)
    async with desk_of(tmp_path, serve) as desk:
        for _ in range(2):
            with pytest.raises(HostError, match="failed to start 3 times in a row: it did not start"):
                await desk.make_ready(plan_of(0))
        assert serve.servers == []


async def test_a_start_that_a_person_must_mend_is_not_tried_again(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe(num_failures=1, failure=UserError("engine.max_model_len=9"))
    async with desk_of(tmp_path, serve) as desk:
        with pytest.raises(UserError, match="max_model_len"):
            await desk.make_ready(plan_of(0))
        assert serve.servers == []


async def test_starts_that_nobody_waits_for_count_too(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe(num_failures=3)
    async with desk_of(tmp_path, serve, max_failed_starts=2) as desk:
        serve.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.make_ready, plan_of(0))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        serve.gate.set()
        with pytest.raises(HostError, match="2 times"):
            await desk.make_ready(plan_of(0))


async def test_a_rollout_stays_with_one_copy_of_the_policy_and_the_next_takes_the_next(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with desk_of(tmp_path, serve, EngineSettings(data_parallel_size=2)) as desk:
        await desk.make_ready(plan_of(0))
        rollouts = [desk.responder(plan_of(0), plan_of(0).groups[0]) for _ in range(3)]
        for responder in rollouts * 2:
            assert isinstance(responder, PolicyResponder)
            await responder.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")
    assert serve.servers[0].asked == [0, 1, 0] * 2


async def test_the_oracle_answers_a_capture_and_no_engine_starts(tmp_path: Path) -> None:
    serve = FakeServe()
    solved = {"family": "create", "slots": {"file": "a.txt", "line": "red"}}
    group = make_group(phase="capture", task=replace(make_task(), metadata=solved))
    async with desk_of(tmp_path, serve) as desk:
        await desk.make_ready(plan_of(0, "capture"))
        assert isinstance(desk.responder(plan_of(0, "capture"), group), ScriptedResponder)
    assert serve.servers == []
