"""Real vLLM: engines that do not come up, that die, and that are stopped. Each test has an engine of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest

from clawhpc.engine.client import SamplingParams
from clawhpc.errors import EngineError
from clawhpc.serve.checks import check_probe
from clawhpc.serve.server import NO_POLICY, PolicyServer, serve_policy
from clawhpc.serve.settings import EngineSettings
from tests.engine_parts import SETTINGS, Kind, TinyPolicy, make_policy

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.usefixtures("vllm")]
GAP = 1e-4
BF16_GAP = 0.2
"""Weights of another step differ by more than 1."""
GONE_S = 10.0
"""How soon the end of an engine must be known."""
PROMPT = tuple(range(7, 107))


@dataclass
class OwnEngine:
    """An engine of one test, and how to find its processes."""

    server: PolicyServer
    first: TinyPolicy
    second: TinyPolicy
    marker: str

    def process(self, part: str) -> int:
        (pid,) = (pid for pid, command in marked_processes(self.marker).items() if part in command)
        return pid

    async def gap(self, policy: TinyPolicy) -> float:
        params = SamplingParams(max_tokens=60, seed=1)
        return policy.gap(PROMPT, await self.server.engine.generate(PROMPT, params, request_id="test"))


def marked_processes(marker: str) -> dict[int, str]:
    """Command lines of the living processes that have `marker` in their environment."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            if command and marker.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = command
    return found


@asynccontextmanager
async def own_engine(
    folder: Path, cache: Path, *, kind: Kind = "untied", settings: EngineSettings = SETTINGS
) -> AsyncIterator[OwnEngine]:
    """`folder` is short: pytest's own are too long for a socket."""
    first, second = (make_policy(folder / f"step-{step}", step=step, kind=kind) for step in (1, 2))
    marker = f"test-{folder.name}"
    async with serve_policy(
        settings,
        first.version,
        socket=folder / "e",
        log=folder / "engine.log",
        environment={"CLAWHPC_OWNER": marker, "SPT_NOENV": "1"},
        cache_dir=cache,
    ) as server:
        yield OwnEngine(server=server, first=first, second=second, marker=marker)
    assert marked_processes(marker) == {}
    assert {path.name for path in folder.iterdir()} == {"step-1", "step-2", "engine.log"}


async def test_an_untied_head_is_loaded_and_the_death_of_the_core_is_noticed(
    short_folder: Path, engine_cache: Path
) -> None:
    async with own_engine(short_folder, engine_cache) as own:
        assert await own.gap(own.first) < GAP
        await own.server.load(own.second.version)
        assert await own.gap(own.second) < GAP
        await kill_while_drawing(own, own.process("EngineCore"))


async def kill_while_drawing(own: OwnEngine, pid: int) -> None:
    """The call in flight and later calls learn of it, and soon also how the engine ended."""
    engine = own.server.engine

    async def kill() -> None:
        await engine.generate(PROMPT, SamplingParams(max_tokens=5), request_id="first")
        os.kill(pid, signal.SIGKILL)

    with anyio.fail_after(GONE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(EngineError):
                await engine.generate(PROMPT, SamplingParams(max_tokens=1900), request_id="second")
        while own.server.alive:
            await anyio.sleep(0.05)
    assert "ended with exit code" in own.server.last_error()
    with pytest.raises(EngineError, match=r"the engine is gone: .*; it ended with exit code -?\d+: .*engine\.log\)"):
        await engine.generate(PROMPT, SamplingParams(max_tokens=1), request_id="third")


async def test_an_engine_in_bfloat16_draws_for_a_float32_learner(short_folder: Path, engine_cache: Path) -> None:
    """As the GPU preset does. Weights that are not the learner's are denied here too."""
    settings = replace(SETTINGS, dtype="bfloat16")
    async with own_engine(short_folder, engine_cache, kind="tied", settings=settings) as own:
        assert GAP < await own.gap(own.first) < BF16_GAP
        await own.server.load(own.second.version)
        assert GAP < await own.gap(own.second) < BF16_GAP
        with pytest.raises(EngineError, match="does not hold the weights"):
            await own.server.load(replace(own.second.version, probe=own.first.version.probe))


async def test_an_engine_that_does_not_come_up_says_why(short_folder: Path, engine_cache: Path) -> None:
    greedy = replace(SETTINGS, kv_cache_gib=1e5)
    with pytest.raises(EngineError, match=r"did not start: .*memory.* \(log: .*engine\.log\)"):
        async with own_engine(short_folder, engine_cache, settings=greedy):
            raise AssertionError("it came up")


@pytest.mark.slow
async def test_experts_are_packed_again_and_the_death_of_the_server_takes_its_core_along(
    short_folder: Path, engine_cache: Path
) -> None:
    async with own_engine(short_folder, engine_cache, kind="moe") as own:
        assert await own.gap(own.first) < GAP
        await own.server.load(own.second.version)
        assert await own.gap(own.second) < GAP
        await own.server.load(own.first.version)
        assert await own.gap(own.first) < GAP
        reload = {"method": "reload_weights", "kwargs": {"weights_path": own.first.version.path}}
        await own.server.engine.post("/collective_rpc", body=reload)
        probe = own.first.version.probe
        with pytest.raises(EngineError, match="does not hold the weights"):
            check_probe(1, probe, await own.server.engine.score(probe.token_ids), SETTINGS.dtype)
        await kill_while_drawing(own, own.process("clawhpc.serve.extension"))
        with anyio.fail_after(GONE_S):
            while marked_processes(own.marker):
                await anyio.sleep(0.05)


@pytest.mark.slow
async def test_weights_that_cannot_be_read_are_told_and_not_drawn_from(short_folder: Path, engine_cache: Path) -> None:
    async with own_engine(short_folder, engine_cache) as own:
        Path(own.second.version.path, "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(EngineError, match=r"/collective_rpc: .*header too small"):
            await own.server.load(own.second.version)
        assert own.server.policy_step == NO_POLICY
        with pytest.raises(EngineError):
            await own.gap(own.first)
