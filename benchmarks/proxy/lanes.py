"""What is measured, each as processes of their own: the engine stub asked directly, our proxy, and its peers.

A lane opens sessions and says how much CPU its processes have used. Peers live in environments of their own, made from
the pins in benchmarks/peers; one that does not install or start is named in the results.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.proxy.client import Endpoint
from benchmarks.proxy.policy import Policy

PINS = Path(__file__).parents[1] / "peers"
START_S = 300.0
STOP_S = 5.0
LOOPBACK = "127.0.0.1"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every lane is started with."""

    folder: Path
    """For sockets, configurations and logs."""
    policy: Policy
    engine_socket: Path
    engine_port: int
    peers: Path
    """Environments of the peers, by name."""


class Process:
    """A process that answers lines of JSON with lines of JSON, if it `speaks`; all else that it says goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def start(
        cls, argv: list[str], log: Path, *, env: dict[str, str] | None = None, speaks: bool = True
    ) -> AsyncIterator[Process]:
        """Until the end of the block."""
        pipe = asyncio.subprocess.PIPE
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe if speaks else file, stderr=file, env=env, limit=2**24
            )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def ask(self, value: object) -> Any:
        """The answer to a line."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        return await self.read()

    async def read(self) -> Any:
        """The next line. RuntimeError when the process has ended."""
        assert self._process.stdout is not None, "a pipe"
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process has ended")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.returncode is None

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, to the nanosecond; no lane has processes below its own."""
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def memory_mib(self) -> float:
        """Resident now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Lane(ABC):
    """One way from the harness to the engine."""

    name: str
    records: str
    """What it keeps of a call."""
    process: Process

    @abstractmethod
    async def open_sessions(self, number: int) -> list[Endpoint]:
        """New sessions; the earlier ones are over."""

    async def recorded(self) -> dict[str, int]:
        """Calls that the open sessions have recorded, and how many of them completely; nothing where it cannot tell."""
        return {}

    async def forget(self) -> None:
        """Drop what was recorded, where a lane would otherwise fill the memory."""
        return


class Direct(Lane):
    """The engine stub itself."""

    name = "direct"
    records = "–"

    def __init__(self, process: Process, socket: Path, port: int) -> None:
        self.process, self._socket, self.port = process, socket, port

    async def open_sessions(self, number: int) -> list[Endpoint]:
        """Connections."""
        return [Endpoint(path=CHAT, socket=self._socket) for _ in range(number)]

    async def set_delay(self, delay_s: float) -> None:
        """How long the engine draws from now on."""
        await asyncio.to_thread(http, "GET", self.port, f"/delay/{delay_s}")


class Scripted(Lane):
    """A proxy that one of our scripts serves, and that tells what it has recorded."""

    def __init__(self, name: str, records: str, process: Process) -> None:
        self.name, self.records, self.process = name, records, process

    async def open_sessions(self, number: int) -> list[Endpoint]:
        """See `Lane`."""
        answered = await self.process.ask(number)
        return [Endpoint(**{**each, "socket": Path(each["socket"])} if "socket" in each else each) for each in answered]

    async def recorded(self) -> dict[str, int]:
        """See `Lane`."""
        return {name: value for name, value in (await self.process.ask(None)).items() if isinstance(value, int)}


class Gateway(Lane):
    """rllm-model-gateway: a session is a path, and comes to be when it is used."""

    name = "rllm-model-gateway"
    records = "ids, log-probs, request and answer whole, in memory"

    def __init__(self, process: Process, port: int) -> None:
        self.process, self._port = process, port
        self._number = 0
        self._open: list[str] = []

    async def open_sessions(self, number: int) -> list[Endpoint]:
        """See `Lane`."""
        await self.forget()
        self._open = [f"/sessions/{self._number + at}" for at in range(number)]
        self._number += number
        return [Endpoint(path=path + CHAT, port=self._port) for path in self._open]

    async def forget(self) -> None:
        """It keeps each body whole: gigabytes in a run."""
        for path in self._open:
            await asyncio.to_thread(http, "DELETE", self._port, path)


class LiteLLM(Lane):
    """LiteLLM's proxy: it knows no sessions."""

    name = "LiteLLM proxy"
    records = "nothing (no database is set up)"

    def __init__(self, process: Process, port: int) -> None:
        self.process, self._port = process, port

    async def open_sessions(self, number: int) -> list[Endpoint]:
        """Connections."""
        return [Endpoint(path=CHAT, port=self._port, headers={"authorization": "Bearer none"}) for _ in range(number)]


def http(method: str, port: int, path: str) -> bytes:
    """The body of the answer; an OSError where there is none."""
    request = urllib.request.Request(f"http://{LOOPBACK}:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


# ---------------------------------------------------------------------------------------------------------------------
# Starting them
# ---------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def start_stub(folder: Path, policy: Policy) -> AsyncIterator[Direct]:
    """The engine of all lanes."""
    socket = folder / "engine.sock"
    arguments = [str(policy.folder), str(socket), str(policy.bytes_per_token), json.dumps(policy.reply_ids)]
    argv = [sys.executable, "-m", "benchmarks.proxy.stub", *arguments]
    async with Process.start(argv, folder / "stub.log") as process:
        yield Direct(process, socket, (await process.read())["port"])


async def start_ours(setting: Setting, stack: AsyncExitStack) -> Lane:
    """Real responder, real engine client, real renderer."""
    sockets = setting.folder / "s"
    sockets.mkdir()
    arguments = [setting.policy.folder, setting.engine_socket, sockets, setting.policy.num_token_ids]
    argv = [sys.executable, "-m", "benchmarks.proxy.serve_clawhpc", *map(str, arguments)]
    process = await stack.enter_async_context(Process.start(argv, setting.folder / "clawhpc.log"))
    lane = Scripted("clawhpc", "ids, log-probs, weight versions, new messages, in memory", process)
    await lane.open_sessions(1)
    return lane


async def start_verifiers(setting: Setting, stack: AsyncExitStack) -> Lane:
    """The training client, which renders and records ids; the relay for evaluations would record none."""
    python = environment(setting.peers, "verifiers")
    arguments = [Path(__file__).with_name("serve_verifiers.py"), setting.policy.folder, setting.engine_port]
    argv = [str(python), *map(str, arguments)]
    log = setting.folder / "verifiers.log"
    process = await stack.enter_async_context(Process.start(argv, log, env=peer_env(setting, HF_HUB_OFFLINE="1")))
    lane = Scripted("verifiers", "ids, log-probs, messages, in memory", process)
    await lane.open_sessions(1)
    return lane


async def start_gateway(setting: Setting, stack: AsyncExitStack) -> Lane:
    """With its store in memory, which costs it less than its usual SQLite file."""
    python = environment(setting.peers, "rllm-model-gateway")
    port = free_port()
    given = ["--worker", f"http://{LOOPBACK}:{setting.engine_port}/v1", "--store", "memory", "--log-level", "warning"]
    argv = [str(python), "-m", "rllm_model_gateway", "--host", LOOPBACK, "--port", str(port), *given]
    log = setting.folder / "rllm-model-gateway.log"
    process = await stack.enter_async_context(Process.start(argv, log, env=peer_env(setting), speaks=False))
    await until_healthy(process, port, "/health")
    return Gateway(process, port)


async def start_litellm(setting: Setting, stack: AsyncExitStack) -> Lane:
    """One worker, no database, no callbacks, no telemetry."""
    python = environment(setting.peers, "litellm")
    port = free_port()
    engine = {"model": "hosted_vllm/policy", "api_base": f"http://{LOOPBACK}:{setting.engine_port}/v1", "api_key": "-"}
    config = setting.folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": engine}]}))
    given = ["--host", LOOPBACK, "--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    argv = [str(python.with_name("litellm")), "--config", str(config), *given]
    env = peer_env(
        setting,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_LOG="ERROR",
        LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
    )
    log = setting.folder / "litellm.log"
    process = await stack.enter_async_context(Process.start(argv, log, env=env, speaks=False))
    await until_healthy(process, port, "/health/liveliness")
    return LiteLLM(process, port)


PEERS = {"verifiers": start_verifiers, "rllm-model-gateway": start_gateway, "litellm": start_litellm}


def environment(peers: Path, name: str) -> Path:
    """The Python of a peer's own environment, which is made where it is missing."""
    python = peers / name / "bin/python"
    ready = peers / name / "ready"
    if not ready.exists():
        print(f"installing {name} into {peers / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(peers / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(PINS / f"{name}.txt")], check=True)
        ready.touch()
    return python


def peer_env(setting: Setting, **more: str) -> dict[str, str]:
    """Nothing of ours: neither settings nor keys."""
    home = {"HOME": str(setting.folder), "PATH": os.defpath, "DO_NOT_TRACK": "1", "PYTHONWARNINGS": "ignore"}
    return home | {name: value for name, value in os.environ.items() if name in ("TMPDIR", "LANG")} | more


def free_port() -> int:
    """Free a moment ago: peers take a number only."""
    import socket

    with socket.socket() as made:
        made.bind((LOOPBACK, 0))
        return int(made.getsockname()[1])


async def until_healthy(process: Process, port: int, path: str) -> None:
    """RuntimeError when it has ended, TimeoutError when it takes too long."""
    async with asyncio.timeout(START_S):
        while process.alive:
            try:
                await asyncio.to_thread(http, "GET", port, path)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                return
    raise RuntimeError("the process has ended")
