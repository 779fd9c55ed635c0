"""Real vLLM behind the real desk and proxy: killed in mid-call, started again, and the harness only waits."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import pytest

from clawhpc.paths import RunPaths
from clawhpc.proxy.app import open_session
from clawhpc.records import Generation, Limits, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.store import publish_policy
from clawhpc.worker.desk import PolicyDesk
from clawhpc.worker.settings import WorkerSettings, WorkerSpec
from tests.engine_parts import SETTINGS, TinyPolicy, make_policy
from tests.fakes.caller import classify, user
from tests.fakes.prompts import rebuild_prompt_ids
from tests.fakes.records import make_group

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.usefixtures("vllm")]
GAP = 1e-4
LIMITS = Limits(deadline_s=600, reserve_s=20, engine_wait_s=300)
BODY = {"model": "policy", "max_tokens": 1500, "messages": [user("Go on and on.")], "stream": True}


def publish_tiny_policy(paths: RunPaths) -> TinyPolicy:
    part = paths.root / "part"
    policy = make_policy(part, step=0)
    publish_policy(part, replace(policy.version, path=str(paths.policy(0))))
    return policy


def spec_of(folder: Path, engine_cache: Path) -> WorkerSpec:
    return WorkerSpec(
        run_root=str(folder),
        cache_dir=str(engine_cache.parent),
        scratch_root=None,
        worker=WorkerSettings(max_output_tokens=1500),
        engine=SETTINGS,
        sandbox=SandboxSettings(),
        limits=LIMITS,
        harnesses={},
    )


async def test_an_engine_that_is_killed_in_mid_call_comes_back_and_the_call_is_answered(
    short_folder: Path, engine_cache: Path
) -> None:
    paths = RunPaths(short_folder)
    policy = publish_tiny_policy(paths)
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(make_group(),))
    ledger: Any = SimpleNamespace(scratch=short_folder, environment={})
    (paths.workers / "w0").mkdir(parents=True)
    async with anyio.create_task_group() as tasks:
        desk = PolicyDesk(spec_of(short_folder, engine_cache), paths, "w0", ledger, tasks)
        await desk.make_ready(plan)
        assert desk.server is not None
        engine = desk.server._process.pid
        os.kill(engine, signal.SIGSTOP)  # so that it cannot be done with the call before it is killed
        async with open_session(
            responder=desk.responder(plan, plan.groups[0]),
            classify=classify,
            limits=LIMITS,
            seed=7,
            socket=short_folder / "p",
            model="policy",
            keep_alive_s=0.2,
        ) as session:
            transport = httpx2.AsyncHTTPTransport(uds=str(short_folder / "p"))
            async with httpx2.AsyncClient(transport=transport, timeout=LIMITS.engine_wait_s) as client:
                seen, killed = "", False
                async with client.stream("POST", f"http://p{session.base_path}/v1/messages", json=BODY) as stream:
                    async for piece in stream.aiter_text():
                        seen += piece
                        if not killed and "event: ping" in seen:
                            os.kill(engine, signal.SIGKILL)
                            killed = True
        tasks.cancel_scope.cancel()
    assert seen.count("event: ping") > 10, "it was given signs of life while it waited"
    assert seen.endswith('data: {"type":"message_stop"}\n\n')
    (call,) = session.calls()
    assert (call.failure, call.delivered) == ("", True)
    lost, back = call.incidents
    assert lost.startswith("draw 1 was lost: the engine is gone")
    assert back.endswith("the whole reply was drawn again")
    assert call.tokens is not None
    generation = Generation(
        completion_ids=call.tokens.completion_ids,
        sampling_logprobs=call.tokens.sampling_logprobs,
        finish_reason="stop",
        weight_versions=call.tokens.weight_versions,
    )
    prompt_ids = rebuild_prompt_ids(session.calls(), call.call_id)
    assert policy.gap(prompt_ids, generation) < GAP
