"""The order of a load, and what is trusted when one of its parts fails."""

from __future__ import annotations

import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from clawhpc.engine.client import SamplingParams, VllmEngine
from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion, Probe
from clawhpc.serve.log import EngineLog
from clawhpc.serve.server import NO_POLICY, PolicyServer, engine_folder, last_words, serve_policy
from clawhpc.serve.settings import EngineSettings

PROBE = Probe(token_ids=(1, 2), logprobs=(-1.0,), tolerance=1e-3)
ORDER = [
    "/pause?mode=wait",
    "/collective_rpc",
    "/update_weight_version",
    "/reset_prefix_cache?reset_running_requests=False",
    "/resume",
    "/inference/v1/generate",
]


@dataclass
class FakeProcess:
    """Lives as long as it has no exit code."""

    returncode: int | None = None


@dataclass
class Script:
    """Answers as vLLM does, but for the routes in `faults`."""

    faults: dict[str, Callable[[], Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    logprob: float = -1.0
    stale_copy: str = ""
    """One that still holds other weights."""
    deadlines: list[float] = field(default_factory=list)
    """Of each request, by the event loop's clock."""

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.deadlines.append(anyio.current_effective_deadline())
        self.asked.append(request.url.raw_path.decode())
        if request.url.path in self.faults:
            return await self.faults[request.url.path]()
        if request.url.path == "/inference/v1/generate":
            stale = request.headers["X-data-parallel-rank"] == self.stale_copy
            scored = [None, {"2": {"logprob": self.logprob - stale}}]
            choice = {"token_ids": [], "finish_reason": "stop"}
            return httpx2.Response(200, json={"choices": [choice], "usage": {}, "prompt_logprobs": scored})
        return httpx2.Response(200, json={"success": True})


def server(
    script: Script, tmp_path: Path, process: Any = None, *, num_copies: int = 1, on_cpu: bool = True, **settings: Any
) -> PolicyServer:
    transport = httpx2.MockTransport(script.answer)
    process, log = process or FakeProcess(), EngineLog(tmp_path / "log")
    log.path.write_text("ValueError: no memory\n")
    explain = partial(last_words, process, log)
    engines = [
        VllmEngine(Path("/run/e"), max_model_len=16, num_token_ids=10, rank=rank, transport=transport, explain=explain)
        for rank in range(num_copies)
    ]
    return PolicyServer(engines, process, EngineSettings(**settings), log, on_cpu=on_cpu)


@pytest.fixture
def policy(tmp_path: Path) -> PolicyVersion:
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return PolicyVersion(step=7, path=str(folder), digest="", renderer="qwen3", thinking=False, probe=PROBE)


async def failed() -> httpx2.Response:
    return httpx2.Response(500, json={"error": {"message": "shape mismatch"}})


async def not_emptied() -> httpx2.Response:
    return httpx2.Response(200, json={"success": False})


async def hangs() -> httpx2.Response:
    await anyio.sleep_forever()
    raise AssertionError


@pytest.mark.anyio
async def test_the_prefix_cache_is_emptied_before_calls_go_on(tmp_path: Path, policy: PolicyVersion) -> None:
    script = Script()
    running = server(script, tmp_path)
    await running.load(policy)
    assert script.asked == ORDER
    assert running.policy_step == 7


@pytest.mark.anyio
async def test_nothing_but_its_own_timeout_bounds_a_load_or_a_start(tmp_path: Path, policy: PolicyVersion) -> None:
    script = Script()
    running = server(script, tmp_path, load_timeout_s=5_000, startup_timeout_s=9_000)
    began = anyio.current_time()
    await running._start(policy)
    health, *starting = script.deadlines
    assert health < began + 60
    assert starting == pytest.approx([began + 9_000] * 2, abs=60)
    script.deadlines.clear()
    await running.load(policy)
    assert script.deadlines == pytest.approx([began + 5_000] * len(ORDER), abs=60)


@pytest.mark.anyio
async def test_an_engine_in_float32_on_a_gpu_is_trusted_though_it_rounds(tmp_path: Path, policy: PolicyVersion) -> None:
    on_gpu, on_cpu = (server(Script(logprob=-1.01), tmp_path, on_cpu=on_cpu) for on_cpu in (False, True))
    await on_gpu.load(policy)
    assert on_gpu.policy_step == 7
    with pytest.raises(EngineError, match=r"differ by 0\.01"):
        await on_cpu.load(policy)


@pytest.mark.anyio
async def test_calls_in_flight_that_go_on_have_their_prefix_computed_again(
    tmp_path: Path, policy: PolicyVersion
) -> None:
    script = Script()
    await server(script, tmp_path).load(policy, in_flight="keep")
    assert script.asked[0] == "/pause?mode=keep"
    assert "/reset_prefix_cache?reset_running_requests=True" in script.asked


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"/collective_rpc": failed}, "shape mismatch"),
        ({"/reset_prefix_cache": not_emptied}, "could not be emptied"),
        ({"/pause": hangs}, "did not load within 0.05 s"),
    ],
)
async def test_a_failed_load_lets_calls_go_on_and_refuses_what_they_drew(
    tmp_path: Path, policy: PolicyVersion, fault: dict[str, Any], told: str
) -> None:
    script = Script(faults=fault)
    running = server(script, tmp_path, load_timeout_s=0.05)
    with pytest.raises(EngineError, match=told):
        await running.load(policy)
    assert script.asked[-1] == "/resume"
    with pytest.raises(EngineError, match="step 7 did not load"):
        await running.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")


@pytest.mark.anyio
async def test_weights_that_the_probe_denies_draw_nothing_until_a_load_succeeds(
    tmp_path: Path, policy: PolicyVersion
) -> None:
    script = Script()
    running = server(script, tmp_path)
    await running.load(policy)
    script.logprob = -1.5
    with pytest.raises(EngineError, match=r"differ by 0\.5"):
        await running.load(replace(policy, step=8))
    assert running.policy_step == NO_POLICY
    with pytest.raises(EngineError, match="step 8 did not load"):
        await running.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")
    script.logprob = -1.0
    await running.load(replace(policy, step=9))
    await running.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")


@pytest.mark.anyio
@pytest.mark.parametrize("stale", ["0", "1"])
async def test_one_copy_that_still_holds_other_weights_is_enough_to_refuse_them_all(
    tmp_path: Path, policy: PolicyVersion, stale: str
) -> None:
    script = Script()
    running = server(script, tmp_path, num_copies=2)
    await running.load(policy)
    assert script.asked == [*ORDER, ORDER[-1]], "weights are loaded once for all, and each copy is asked"
    script.stale_copy = stale
    with pytest.raises(EngineError, match="differ by 1"):
        await running.load(replace(policy, step=8))
    for engine in running.engines:
        with pytest.raises(EngineError, match="step 8 did not load"):
            await engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")


@pytest.mark.anyio
async def test_the_same_step_loaded_again_in_vain_is_refused_too(tmp_path: Path, policy: PolicyVersion) -> None:
    script = Script()
    running = server(script, tmp_path)
    await running.load(policy)
    script.faults["/collective_rpc"] = failed
    with pytest.raises(EngineError):
        await running.load(policy)
    with pytest.raises(EngineError, match="did not load"):
        await running.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")


@pytest.mark.anyio
async def test_a_folder_without_weights_does_not_reach_the_engine(tmp_path: Path, policy: PolicyVersion) -> None:
    Path(policy.path, "model.safetensors").unlink()
    script = Script()
    with pytest.raises(UserError):
        await server(script, tmp_path).load(policy)
    assert script.asked == []


@pytest.mark.anyio
async def test_a_call_that_dies_with_the_engine_tells_the_cause_of_death(tmp_path: Path) -> None:
    async def cut_off() -> httpx2.Response:
        process.returncode = -9
        raise httpx2.ReadError("")

    process = FakeProcess()
    running = server(Script(faults={"/inference/v1/generate": cut_off}), tmp_path, process)
    assert running.alive
    with pytest.raises(
        EngineError, match=r"the engine is gone: ReadError .*exit code -9: ValueError: no memory \(log: "
    ):
        await running.engine.generate((1,), SamplingParams(max_tokens=1), request_id="r")
    assert not running.alive
    assert running.last_error() == f"it ended with exit code -9: ValueError: no memory (log: {tmp_path / 'log'})"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "no such policy folder"),
        ("{}", "no vocab_size"),
        ('{"vocab_size": 8, "max_position_embeddings": 64}', r"engine\.max_model_len=4096: .* 64 positions"),
    ],
)
async def test_a_policy_that_does_not_fit_is_told_before_anything_starts(
    tmp_path: Path, policy: PolicyVersion, config: str | None, told: str
) -> None:
    if config is None:
        policy = replace(policy, path=str(tmp_path / "none"))
    else:
        Path(policy.path, "config.json").write_text(config)
        Path(policy.path, "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(UserError, match=told):
        async with serve_policy(
            EngineSettings(), policy, socket=tmp_path / "e", log=tmp_path / "log", environment={}, cache_dir=tmp_path
        ):
            raise AssertionError("it started")


def test_a_socket_that_somebody_listens_on_is_told(short_folder: Path) -> None:
    path = short_folder / "e"
    with sockets.socket(sockets.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(UserError, match="another server listens here"), engine_folder(path):
            raise AssertionError("it was taken")
        assert path.exists()


def test_a_socket_that_a_dead_engine_left_is_taken_away(short_folder: Path) -> None:
    path = short_folder / "e"
    with sockets.socket(sockets.AF_UNIX) as other:
        other.bind(str(path))
    with engine_folder(path) as scratch:
        assert not path.exists()
        (scratch / "left").touch()
        path.touch()
    assert list(short_folder.iterdir()) == []


def test_a_path_too_long_for_sockets_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"too long for the engine's sockets by \d+"),
        engine_folder(tmp_path / ("e" * 100)),
    ):
        raise AssertionError("it was taken")
