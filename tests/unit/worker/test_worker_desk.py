"""The engine behind a desk: started when it is needed, loaded when its plan changes, started again when it has died."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clawhpc.errors import EngineError
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.records import Limits, PolicyVersion, Probe, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import publish_policy
from clawhpc.worker.desk import PolicyDesk
from clawhpc.worker.settings import WorkerSettings, WorkerSpec
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.records import make_group, make_task

pytestmark = pytest.mark.anyio


@dataclass
class FakeServer:
    """Holds one policy, and dies when it is told to."""

    policy_step: int
    alive: bool = True
    cpu_s: float = 2.0
    engine: object = None

    async def load(self, policy: PolicyVersion) -> None:
        self.policy_step = policy.step


@dataclass
class FakeServe:
    """In place of `serve_policy`: remembers the servers that it started."""

    servers: list[FakeServer] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(self, settings: EngineSettings, policy: PolicyVersion, **rest: Any) -> AsyncIterator[FakeServer]:
        self.servers.append(FakeServer(policy.step))
        yield self.servers[-1]


def write_policies(paths: RunPaths, *steps: int) -> None:
    for step in steps:
        part = paths.root / "part"
        part.mkdir(parents=True)
        write_tokenizer(part)
        (part / "model.safetensors").write_bytes(b"w")
        probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
        folder = str(paths.policy(step))
        publish_policy(
            part, PolicyVersion(step=step, path=folder, digest="d", renderer="qwen3", thinking=False, probe=probe)
        )


def desk_of(tmp_path: Path, stack: AsyncExitStack, serve: FakeServe, **worker: Any) -> PolicyDesk:
    spec = WorkerSpec(
        run_root=str(tmp_path),
        cache_dir=str(tmp_path),
        scratch_root=None,
        worker=replace(WorkerSettings(), **worker),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(deadline_s=60, reserve_s=10),
        harnesses={},
    )
    ledger: Any = SimpleNamespace(scratch=tmp_path / "scratch", environment={})
    return PolicyDesk(spec, RunPaths(tmp_path), "w0", ledger, stack, serve=serve)


def plan_of(policy_step: int, phase: Any = "train") -> StepPlan:
    group = make_group(phase=phase)
    return StepPlan(phase=phase, step=0, policy_step=policy_step, temperature=0.5, groups=(group,))


async def test_the_engine_starts_once_and_then_loads_what_each_plan_names(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0, 1)
    serve = FakeServe()
    async with AsyncExitStack() as stack:
        desk = desk_of(tmp_path, stack, serve)
        for step in (0, 0, 1):
            await desk.make_ready(plan_of(step))
            assert [server.policy_step for server in serve.servers] == [step]
        assert desk.engine_cpu_s == 2.0
        assert desk.responder(plan_of(1), plan_of(1).groups[0]).sampling.temperature == 0.5  # type: ignore[attr-defined]


async def test_an_engine_that_died_is_started_again_until_it_has_died_too_often(tmp_path: Path) -> None:
    write_policies(RunPaths(tmp_path), 0)
    serve = FakeServe()
    async with AsyncExitStack() as stack:
        desk = desk_of(tmp_path, stack, serve, max_engine_starts=2)
        await desk.make_ready(plan_of(0))
        serve.servers[0].alive = False
        assert desk.broken
        await desk.make_ready(plan_of(0))
        assert not desk.broken
        serve.servers[1].alive = False
        with pytest.raises(EngineError, match=r"has died 2 times.*engine\.log"):
            await desk.make_ready(plan_of(0))


async def test_the_oracle_answers_a_capture_and_no_engine_starts(tmp_path: Path) -> None:
    serve = FakeServe()
    solved = {"family": "create", "slots": {"file": "a.txt", "line": "red"}}
    group = make_group(phase="capture", task=replace(make_task(), metadata=solved))
    async with AsyncExitStack() as stack:
        desk = desk_of(tmp_path, stack, serve)
        await desk.make_ready(plan_of(0, "capture"))
        assert isinstance(desk.responder(plan_of(0, "capture"), group), ScriptedResponder)
    assert serve.servers == []
