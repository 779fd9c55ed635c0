"""Fixtures: tiny random policies, and one real vLLM for all tests that need one.

Starting vLLM costs 20 to 60 s, so that the server is shared: a test that needs certain weights asks `EngineHost.hold`
for them. It runs on a loop of its own in a thread; a test connects to it with a client on the test's loop.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from clawhpc.engine.client import SamplingParams, VllmEngine
from clawhpc.records import Generation, PolicyVersion, Probe
from clawhpc.serve.server import PolicyServer, serve_policy
from clawhpc.serve.settings import EngineSettings
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.sandbox_parts import missing

if TYPE_CHECKING:
    import torch

Kind = Literal["tied", "untied", "moe"]
SETTINGS = EngineSettings(max_model_len=2048, kv_cache_gib=0.25, max_num_seqs=16)
PADDING = 64
"""Rows of the head beyond the tokenizer, which a random policy would draw often."""
PROBE_TOKENS = 48
LISTENING, LOOPBACK = "0A", "0100007F"
"""As `/proc/net/tcp` spells them."""


@dataclass(frozen=True)
class TinyPolicy:
    """A policy folder and the same model in transformers, which stands for the learner."""

    version: PolicyVersion
    model: Any
    num_token_ids: int

    def logprobs(self, ids: tuple[int, ...], *, temperature: float = 1.0) -> torch.Tensor:
        """Of `ids[1:]`, each given those before it, over the ids that the tokenizer knows."""
        return token_logprobs(self.model, ids, num_rows=self.num_token_ids, temperature=temperature)

    def gap(self, prompt: tuple[int, ...], generation: Generation, *, temperature: float = 1.0) -> float:
        """The largest difference between the engine's log-probs and ours."""
        return self.gap_between(prompt, generation, 0, len(generation.completion_ids), temperature=temperature)

    def gap_between(
        self, prompt: tuple[int, ...], generation: Generation, start: int, end: int, *, temperature: float = 1.0
    ) -> float:
        """The same over `completion_ids[start:end]`."""
        import torch

        ours = self.logprobs(prompt + generation.completion_ids, temperature=temperature)
        ours = ours[len(prompt) - 1 :]
        return float((ours - torch.tensor(generation.sampling_logprobs))[start:end].abs().max())


def token_logprobs(model: Any, ids: tuple[int, ...], *, num_rows: int | None, temperature: float) -> torch.Tensor:
    import torch

    ids_BT = torch.tensor([ids])
    with torch.no_grad():
        logits_TV = model(input_ids=ids_BT).logits[0, :-1, :num_rows] / temperature
    return logits_TV.log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0]


def make_policy(folder: Path, *, step: int, kind: Kind = "tied") -> TinyPolicy:
    """Random weights that depend on `step`, so large that log-probs of two steps differ by several nats."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    num_token_ids = write_tokenizer(folder).get_vocab_size(with_added_tokens=True)
    shape = {
        "vocab_size": num_token_ids + PADDING,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": SETTINGS.max_model_len,
        "initializer_range": 0.1,
        "tie_word_embeddings": kind == "tied",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(**shape, **experts) if kind == "moe" else Qwen3Config(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    ids = tuple(torch.randint(num_token_ids, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist())
    logprobs = tuple(token_logprobs(model, ids, num_rows=None, temperature=1.0).tolist())
    version = PolicyVersion(
        step=step,
        path=str(folder),
        digest="",
        renderer="qwen3",
        thinking=False,
        probe=Probe(token_ids=ids, logprobs=logprobs, tolerance=1e-3),
    )
    return TinyPolicy(version=version, model=model, num_token_ids=num_token_ids)


@dataclass
class EngineHost:
    """A running engine, two policies for it, and the way to it from a test's own loop."""

    server: PolicyServer
    first: TinyPolicy
    second: TinyPolicy
    socket: Path
    portal: BlockingPortal

    def connect(self) -> VllmEngine:
        """A client on the caller's loop."""
        return connect(self.socket, self.first)

    async def hold(self, policy: TinyPolicy) -> None:
        """The engine draws from `policy`."""
        if self.server.policy_step != policy.version.step:
            await self.load(policy.version)

    async def load(self, version: PolicyVersion, in_flight: Literal["wait", "keep"] = "wait") -> None:
        """`PolicyServer.load` on the server's loop."""

        async def call() -> None:
            await self.server.load(version, in_flight=in_flight)

        await anyio.to_thread.run_sync(self.portal.call, call)

    async def generate(self, prompt: tuple[int, ...]) -> Generation:
        """One token, by the client of the server itself, which knows whether the engine is to be trusted."""
        params = SamplingParams(max_tokens=1)

        async def call() -> Generation:
            return await self.server.engine.generate(prompt, params, request_id="test")

        return await anyio.to_thread.run_sync(self.portal.call, call)


def connect(socket: Path, policy: TinyPolicy) -> VllmEngine:
    """A client of any server with `SETTINGS`."""
    return VllmEngine(socket, max_model_len=SETTINGS.max_model_len, num_token_ids=policy.num_token_ids)


def session_of(pid: int) -> list[int]:
    """The processes of an engine."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [one for one in pids if one == pid or _session(one) == pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def listening(pids: list[int]) -> list[str]:
    """Addresses on which processes listen for TCP connections. The kernel has chosen each of their ports."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(link).removeprefix("socket:[").rstrip("]") for link in links if link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == LISTENING and row[9] in sockets]
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(first <= int(port, 16) <= last for _, port in found), found
    return [address for address, _ in found]


@pytest.fixture(scope="session")
def vllm() -> None:
    """There is one to run."""
    if importlib.util.find_spec("vllm") is None:
        missing("vLLM is not installed")


@pytest.fixture(scope="session")
def engine_cache(cache_dir: Path) -> Path:
    """Where vLLM notes what it has found out about a model's code, so that a second start is faster."""
    return cache_dir / "vllm"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For sockets: pytest's own folders have too long a path."""
    with tempfile.TemporaryDirectory(prefix="engine-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def engine_host(vllm: None, engine_cache: Path) -> Iterator[EngineHost]:
    with tempfile.TemporaryDirectory(prefix="engine-") as name, start_blocking_portal() as portal:
        folder = Path(name)
        first, second = (make_policy(folder / f"step-{step}", step=step) for step in (1, 2))
        serving = serve_policy(
            SETTINGS,
            first.version,
            socket=folder / "e",
            log=folder / "engine.log",
            environment={},
            cache_dir=engine_cache,
        )
        with portal.wrap_async_context_manager(serving) as server:
            yield EngineHost(server=server, first=first, second=second, socket=folder / "e", portal=portal)
