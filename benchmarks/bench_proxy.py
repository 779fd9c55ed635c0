"""CPU time and added latency of the proxy per call, everything recorded: `python benchmarks/bench_proxy.py`.

A child process serves; this one asks, one call at a time, like a harness: each call's history holds the reply before.
The same bodies go, in turn, to an app that does nothing but read them: the latency above it is the proxy's. The engine
answers at once; the chat format is the real one, over a tiny tokenizer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from clawhpc.engine.client import SamplingParams
from clawhpc.engine.render import ChatRenderer
from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, Responder, ScriptedResponder
from clawhpc.proxy.server import serve
from clawhpc.proxy.stream import json_response
from clawhpc.records import CallRole, Conversation, Generation, Limits, Reply, ToolCall, VersionSpan
from tests.fakes.chat_tokenizer import write_tokenizer

SAID = 'Let me look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls -l"}}\n</tool_call>'
RESULT = "drwxr-xr-x 2 root root 4096 Nov 29 12:00 notes\n" * 12
SCHEMA = {
    "type": "object",
    "properties": {f"field{at}": {"type": "string", "description": "What it is for. " * 8} for at in range(12)},
}
TURNS = 20
"""Measured calls per session: each adds a reply and a tool result to the history."""


# ---------------------------------------------------------------------------------------------------------------------
# The child: an app that only reads, and the proxy
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class InstantEngine:
    """Draws the same ids for every prompt."""

    completion_ids: tuple[int, ...]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        """See `Engine`."""
        length = len(self.completion_ids)
        return Generation(
            completion_ids=self.completion_ids,
            sampling_logprobs=(-0.5,) * length,
            finish_reason="stop",
            weight_versions=(VersionSpan(version=0, start=0, end=length),),
        )

    async def check_drawing(self, *, within_s: float) -> None:
        """It always does."""


def classify(headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
    """Every call is the main loop's."""
    return CallRole.MAIN, {}


def say(conversation: Conversation) -> Reply:
    """What `InstantEngine` draws, as text."""
    call = ToolCall(id="call_0", name="Bash", arguments='{"command": "ls -l"}')
    return Reply(text="Let me look.", tool_calls=(call,), finish_reason="tool_calls")


def make_responder(kind: str, folder: Path) -> Responder:
    """`text`: without tokens, so that only wire, matching and recording count. `tokens`: rendering and parsing too."""
    if kind == "text":
        return ScriptedResponder(script=say)
    tokenizer = write_tokenizer(folder / "policy")
    return PolicyResponder(
        engine=InstantEngine(tuple(tokenizer.encode(SAID + "<|im_end|>").ids)),
        renderer=ChatRenderer(folder / "policy", renderer="qwen3", thinking=False),
        sampling=PolicySampling(context_window=10**7),
    )


async def read_only(scope: Scope, receive: Receive, send: Send) -> None:
    """The least that an app can do with a request."""
    body = await Request(scope, receive).body()
    await json_response({"bytes": len(body)})(scope, receive, send)


def serve_child(pipe: Connection, folder: Path, kind: str) -> None:
    """Open a session for each `open`; say the CPU seconds so far for each `cpu`."""
    anyio.run(serve_sessions, pipe, folder, kind)


async def serve_sessions(pipe: Connection, folder: Path, kind: str) -> None:
    """See `serve_child`."""
    responder = make_responder(kind, folder)
    limits = Limits(max_calls=10**6, max_sampled_tokens=10**9)
    async with serve(read_only, folder / "direct.sock", shutdown_s=1.0):
        while await anyio.to_thread.run_sync(pipe.recv) == "open":
            async with open_session(
                responder=responder,
                classify=classify,
                limits=limits,
                seed=0,
                socket=folder / "proxy.sock",
                model="policy",
            ) as session:
                pipe.send(session.base_path)
                while await anyio.to_thread.run_sync(pipe.recv) == "cpu":
                    pipe.send(time.process_time())


# ---------------------------------------------------------------------------------------------------------------------
# The harness
# ---------------------------------------------------------------------------------------------------------------------


def first_body(num_bytes: int, stream: bool) -> dict[str, Any]:
    """A request of about `num_bytes`: half of it tools and system prompt, as far as there is room for them."""
    tools: list[Any] = []
    while len(msgspec.json.encode(tools)) < num_bytes // 2 and len(tools) < 12:
        tools.append({"name": f"Tool{len(tools)}", "description": "Does a thing. " * 20, "input_schema": SCHEMA})
    body: dict[str, Any] = {"model": "policy", "max_tokens": 1000, "stream": stream, "tools": tools, "messages": []}
    body["system"] = [{"type": "text", "text": "You are a careful agent. " * 40}]
    body["messages"].append({"role": "user", "content": "List the files."})
    while len(msgspec.json.encode(body)) < num_bytes:
        add_turn(body, len(body["messages"]), "Before this session.")
    return body


def add_turn(body: dict[str, Any], number: int, said: str = "Let me look.") -> None:
    """A reply, as it is drawn if nothing else is said, and the result of its tool call."""
    call = {"type": "tool_use", "id": f"call_{number}", "name": "Bash", "input": {"command": "ls -l"}}
    result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": RESULT}
    body["messages"].append({"role": "assistant", "content": [{"type": "text", "text": said}, call]})
    body["messages"].append({"role": "user", "content": [result]})


@dataclass
class Figures:
    """Of one kind of call."""

    cpu_s: list[float] = field(default_factory=list)
    proxy_s: list[float] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Median CPU of the serving process per call, p50 and p99 of the added latency, number of calls."""
        added_ms = [1000 * (through - past) for through, past in zip(self.proxy_s, self.direct_s, strict=True)]
        cuts = statistics.quantiles(added_ms, n=100)
        return f"{1000 * statistics.median(self.cpu_s):8.2f} {cuts[49]:8.2f} {cuts[98]:8.2f} {len(added_ms):6d}"


@asynccontextmanager
async def client(socket: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """An HTTP client of a unix socket."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    async with httpx2.AsyncClient(transport=transport, base_url="http://proxy", timeout=60) as http:
        yield http


async def timed_post(http: httpx2.AsyncClient, path: str, content: bytes) -> float:
    """Seconds from the request to the last byte of the answer."""
    start = time.perf_counter()
    response = await http.post(path, content=content)
    took = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return took


async def measure(pipe: Connection, folder: Path, num_bytes: int, stream: bool, num_sessions: int) -> Figures:
    """Sessions of `TURNS` calls, each call beside a direct one of the same body."""
    figures = Figures()
    for _ in range(num_sessions):
        pipe.send("open")
        base = pipe.recv()
        body = first_body(num_bytes, stream)
        async with client(folder / "proxy.sock") as proxy, client(folder / "direct.sock") as direct:
            await timed_post(proxy, f"{base}/v1/messages", msgspec.json.encode(body))
            for turn in range(TURNS):
                add_turn(body, 10**6 + turn)
                content = msgspec.json.encode(body)
                figures.direct_s.append(await timed_post(direct, "/", content))
                before = ask_cpu(pipe)
                figures.proxy_s.append(await timed_post(proxy, f"{base}/v1/messages", content))
                figures.cpu_s.append(ask_cpu(pipe) - before)
        pipe.send("close")
    return figures


def ask_cpu(pipe: Connection) -> float:
    """CPU seconds that the serving process has used."""
    pipe.send("cpu")
    return float(pipe.recv())


async def print_figures(num_sessions: int) -> None:
    """Print a line per way of answering, size of body and form of answer."""
    print(f"{'answers':10}{'body kB':>8}{'form':>9}  CPU ms  added p50  p99 ms  calls")
    for kind in ("text", "tokens"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pipe, remote = multiprocessing.Pipe()
            child = multiprocessing.get_context("spawn").Process(target=serve_child, args=(remote, folder, kind))
            child.start()
            for kilobytes in (4, 20, 100):
                for stream in (True, False):
                    figures = await measure(pipe, folder, kilobytes * 1000, stream, num_sessions)
                    form = "stream" if stream else "plain"
                    print(f"{kind:10}{kilobytes:8}{form:>9}{figures.line()}", flush=True)
            pipe.send("end")
            child.join(10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10, help="sessions per line, of 20 measured calls each")
    anyio.run(print_figures, parser.parse_args().sessions)
