"""Real vLLM on several devices: one copy of the policy that two hold together, and two copies behind one server."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clawhpc.engine.client import SamplingParams, VllmEngine
from clawhpc.errors import EngineError
from clawhpc.records import Generation, VersionSpan
from clawhpc.serve.server import PolicyServer, serve_policy
from clawhpc.serve.settings import EngineSettings
from tests.engine_parts import LOOPBACK, SETTINGS, Kind, TinyPolicy, listening, make_policy, session_of

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]
PROMPT = tuple(range(7, 357))
GAP = 1e-4
"""Log-probs of the engine and of transformers agree within it, in fp32."""
SHARED_MEMORY = Path("/dev/shm")
ANYWHERE = "0" * 32
"""As `/proc/net/tcp6` spells it. Copies meet at a store of torch, which listens everywhere."""


@asynccontextmanager
async def serving(
    settings: EngineSettings, policy: TinyPolicy, folder: Path, cache: Path
) -> AsyncIterator[PolicyServer]:
    """An engine of its own; whatever becomes of it, no shared memory of its is left."""
    before = set(SHARED_MEMORY.iterdir())
    async with serve_policy(
        settings, policy.version, socket=folder / "e", log=folder / "log", environment={}, cache_dir=cache
    ) as server:
        yield server
    assert set(SHARED_MEMORY.iterdir()) <= before


async def draw(engine: VllmEngine, *, tokens: int = 40, seed: int = 1) -> Generation:
    return await engine.generate(PROMPT, SamplingParams(max_tokens=tokens, seed=seed), request_id=f"test-{seed}")


@pytest.mark.parametrize(
    ("spread", "kind"),
    [("tensor_parallel_size", "tied"), ("tensor_parallel_size", "moe"), ("data_parallel_size", "tied")],
)
async def test_every_device_draws_from_the_weights_that_were_loaded_last(
    vllm: None, engine_cache: Path, short_folder: Path, spread: str, kind: Kind
) -> None:
    first, second = (make_policy(short_folder / f"step-{step}", step=step, kind=kind) for step in (1, 2))
    async with serving(replace(SETTINGS, **{spread: 2}), first, short_folder, engine_cache) as server:
        assert len(server.engines) == (2 if spread == "data_parallel_size" else 1)
        for policy in (first, second, first):
            if server.policy_step != policy.version.step:
                await server.load(policy.version)
            for engine in server.engines:
                drawn = await draw(engine)
                assert policy.gap(PROMPT, drawn) < GAP
                assert drawn.weight_versions == (VersionSpan(version=policy.version.step, start=0, end=40),)
                assert (await draw(engine)).cached_tokens >= 256
        found = listening(session_of(server._process.pid))
        assert found.count(ANYWHERE) == len(server.engines) - 1
        assert set(found) <= {LOOPBACK, ANYWHERE}


async def test_weights_that_change_in_the_middle_of_a_call_do_so_in_the_copy_that_draws_it(
    vllm: None, engine_cache: Path, short_folder: Path
) -> None:
    """And a copy that dies takes the server along: what is behind it is either whole or gone."""
    first, second = (make_policy(short_folder / f"step-{step}", step=step) for step in (1, 2))
    drawn: list[Generation] = []

    async def add(engine: VllmEngine, seed: int) -> None:
        drawn.append(await draw(engine, tokens=600, seed=seed))

    async with serving(replace(SETTINGS, data_parallel_size=2), first, short_folder, engine_cache) as server:
        async with anyio.create_task_group() as tasks:
            for seed, engine in enumerate(server.engines):
                tasks.start_soon(add, engine, seed)
            await anyio.sleep(1.0)  # so that both draw; the assertion below says whether they did
            await server.load(second.version, in_flight="keep")
        for generation in drawn:
            old, new = generation.weight_versions
            assert (old.version, new.version) == (1, 2)
            assert first.gap_between(PROMPT, generation, 0, old.end) < GAP
            assert second.gap_between(PROMPT, generation, new.start, 600) < GAP
        os.kill(max(session_of(server._process.pid)), signal.SIGKILL)
        with anyio.fail_after(30):
            while server.alive:
                await anyio.sleep(0.1)
        for engine in server.engines:
            with pytest.raises(EngineError, match="the engine is gone"):
                await draw(engine)
