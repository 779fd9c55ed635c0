"""Harnesses that break their connections, an engine that is killed, and what must hold of the records all the same.

The proxy, the desk that starts the engine again, the engine's client and the chat format are the real ones.
"""

from __future__ import annotations

import os
import random
import signal
import string
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteReceiveStream

from clawhpc.engine.client import VllmEngine
from clawhpc.engine.render import ChatRenderer
from clawhpc.paths import RunPaths
from clawhpc.proxy.app import open_session
from clawhpc.proxy.session import Session
from clawhpc.records import CallRecord, Limits, PolicyVersion, Probe, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.process import running
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import publish_policy
from clawhpc.tree.build import build_tree, whole_calls
from clawhpc.worker.desk import PolicyDesk
from clawhpc.worker.settings import WorkerSettings, WorkerSpec
from tests.fakes.caller import classify
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.engine_server import Line, digest
from tests.fakes.records import make_group
from tests.fakes.sockets import http_request

ROOT = Path(__file__).parents[2]
LIMITS = Limits(deadline_s=600, reserve_s=20, max_calls=1000, max_sampled_tokens=10**7)
CANCELLED_SHARE = 0.05
"""Of rollouts, in the middle of whatever they are doing."""
WORDS = [first + middle + last for first in "bdfklmnprst" for middle in ("a", "ee", "ou") for last in "mnrstx"]
"""Few, as in any language: a tokenizer remembers ten thousand words for good."""
FAULTS = {
    "none": 60,
    "vanish": 8,  # hangs up before the headers of a plain answer
    "cut": 10,  # hangs up when a stream has begun
    "twice": 6,  # sends the same again while the first is in flight
    "half": 6,  # hangs up in the middle of its own request
    "longer": 4,  # drops an answer and asks for a longer one: another request
    "again": 6,  # takes the answer and asks for another one on purpose
}


@dataclass(eq=False)
class FakeServer:
    """The engine's process, as a desk sees it."""

    engine: VllmEngine
    process: Any
    policy_step: int
    cpu_s: float = 0.0

    @property
    def engines(self) -> tuple[VllmEngine, ...]:
        return (self.engine,)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


@dataclass
class Soak:
    """What all rollouts share, and what they counted."""

    desk: PolicyDesk
    plan: StepPlan
    folder: Path
    journal: Path
    kill_every: int
    """Answers between two kills of the engine."""
    answers: int = 0
    """Whole replies that harnesses took."""
    kills: int = 0
    cancelled: int = 0
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    records: int = 0
    lost_draws: int = 0
    """Of which records tell."""
    drawn_again: int = 0
    """Answers that were written to an open connection, and not taken."""
    told: dict[str, dict[int, tuple[str, str, int]]] = field(default_factory=dict)
    """Rollout, as the engine knows it -> call -> what its record says: digests of prompt and completion, lost draws."""

    def note_answer(self) -> None:
        self.answers += 1
        server = self.desk.server
        if self.answers % self.kill_every == 0 and server is not None and server.alive:
            os.kill(server.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            self.kills += 1


@asynccontextmanager
async def soaking(folder: Path, *, kill_every: int) -> AsyncIterator[Soak]:
    """A desk whose engine is a process of ours. `folder` is short."""
    paths, policy_folder = RunPaths(folder), folder / "part"
    tokenizer = write_tokenizer(policy_folder)
    (policy_folder / "model.safetensors").write_bytes(b"w")
    policy = PolicyVersion(
        step=0,
        path=str(paths.policy(0)),
        digest="d",
        renderer="qwen3",
        thinking=False,
        probe=Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3),
    )
    publish_policy(policy_folder, policy)
    renderer = ChatRenderer(Path(policy.path), renderer="qwen3", thinking=False)
    letters = ",".join(str(tokenizer.encode(letter).ids[0]) for letter in string.ascii_lowercase + " ")
    arguments = (str(folder / "journal"), letters, str(renderer.stop_token_ids[0]))

    @asynccontextmanager
    async def serve(settings: EngineSettings, policy: PolicyVersion, **rest: Any) -> AsyncIterator[FakeServer]:
        socket = rest["socket"]
        command = [sys.executable, "-m", "tests.fakes.engine_server", str(socket), *arguments]
        async with (
            running(command, environment={}, folder=ROOT, log=folder / "log", stop_timeout_s=1) as process,
            VllmEngine(socket, max_model_len=10**6, num_token_ids=tokenizer.get_vocab_size(True)) as engine,
        ):
            with anyio.fail_after(60):
                while not socket.exists():
                    await anyio.sleep(0.01)
            yield FakeServer(engine, process, policy.step)

    (folder / "s").mkdir()
    spec = WorkerSpec(
        run_root=str(folder),
        cache_dir=str(folder),
        scratch_root=None,
        worker=WorkerSettings(max_engine_starts=1000),
        engine=EngineSettings(max_model_len=10**6),
        sandbox=SandboxSettings(),
        limits=LIMITS,
        harnesses={},
    )
    ledger: Any = SimpleNamespace(scratch=folder / "s", environment={})
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(make_group(),))
    async with anyio.create_task_group() as tasks:
        desk = PolicyDesk(spec, paths, "w0", ledger, tasks, serve=serve)
        await desk.make_ready(plan)
        yield Soak(desk, plan, folder, folder / "journal", kill_every)
        tasks.cancel_scope.cancel()


async def run_rollouts(soak: Soak, seeds: range, *, turns: int, at_once: int) -> None:
    """One rollout for each seed, `at_once` at a time."""
    slots = anyio.Semaphore(at_once)

    async def run(seed: int) -> None:
        async with slots:
            await run_one(soak, seed, turns)

    async with anyio.create_task_group() as tasks:
        for seed in seeds:
            tasks.start_soon(run, seed)


async def run_one(soak: Soak, seed: int, turns: int) -> None:
    """A rollout and the checks of its records. Some are cancelled in the middle, and must leave nothing behind."""
    chance, socket = random.Random(seed), soak.folder / f"{seed}"
    responder = soak.desk.responder(soak.plan, soak.plan.groups[0])
    with anyio.CancelScope() as scope:
        async with open_session(
            responder=responder, classify=classify, limits=LIMITS, seed=seed, socket=socket, model="policy"
        ) as session:
            harness = FaultyHarness(soak, session, socket, chance)
            if chance.random() < CANCELLED_SHARE:
                scope.deadline = anyio.current_time() + chance.uniform(0, turns * 0.1)
            for turn in range(turns):
                await harness.take_turn(turn)
            await session.settle(5)
    assert not socket.exists()
    soak.cancelled += scope.cancelled_caught
    assert session.failure is None, session.failure
    assert session.limit is None, session.limit_detail
    check_records(soak, session, harness.taken, cancelled=scope.cancelled_caught)
    soak.told.update([fingerprints(session)])


class FaultyHarness:
    """One conversation, over connections that break."""

    def __init__(self, soak: Soak, session: Session, socket: Path, chance: random.Random) -> None:
        self._soak, self._session, self._socket, self._chance = soak, session, socket, chance
        self._messages: list[dict[str, str]] = []
        self._chat = chance.random() < 0.5
        self.taken: dict[str, list[str]] = defaultdict(list)
        """What was asked last -> the replies that were taken whole, in order."""

    async def take_turn(self, turn: int) -> None:
        asked = f"turn {turn} " + " ".join(self._chance.choices(WORDS, k=self._chance.randrange(40)))
        self._messages.append({"role": "user", "content": asked})
        fault = self._chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        self._soak.faults[fault] += 1
        stream = self._chance.random() < 0.7
        if fault == "vanish":
            await self._send_and_leave(stream=False, at="sent")
        elif fault == "cut":
            await self._send_and_leave(stream=True, at="begun")
        elif fault == "half":
            await self._send_and_leave(stream=stream, at="half")
        elif fault == "longer":
            await self._send_and_leave(stream=False, at="sent", max_tokens=5)
        replies = [await self._ask(stream)] if fault != "twice" else await self._ask_twice()
        if fault == "again":
            replies.append(await self._ask(stream))
        for reply in replies:
            self.taken[asked].append(reply)
            self._soak.note_answer()
        self._messages.append({"role": "assistant", "content": self.taken[asked][-1]})

    async def _ask_twice(self) -> list[str]:
        """At the same time; one answer, unless the second came when the first was there."""
        replies: list[str] = []

        async def ask(stream: bool) -> None:
            replies.append(await self._ask(stream))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, True)
            tasks.start_soon(ask, False)
        return list(dict.fromkeys(replies))

    async def _ask(self, stream: bool) -> str:
        async with await anyio.connect_unix(self._socket) as connection:
            await connection.send(self._request(stream))
            answer = await read_answer(connection)
        assert self._session.failure is None, self._session.failure
        return reply_text(answer, stream)

    async def _send_and_leave(self, stream: bool, at: str, max_tokens: int = 100) -> None:
        request = self._request(stream, max_tokens)
        async with await anyio.connect_unix(self._socket) as connection:
            await connection.send(request[: len(request) // 2] if at == "half" else request)
            if at == "begun":
                await connection.receive()
            if at == "sent":
                await anyio.sleep(self._chance.choice([0, 0.01]))

    def _request(self, stream: bool, max_tokens: int = 100) -> bytes:
        fields = {"model": "policy", "max_tokens": max_tokens, "messages": self._messages, "stream": stream}
        path = "chat/completions" if self._chat else "messages"
        return http_request(f"{self._session.base_path}/v1/{path}", msgspec.json.encode(fields))


async def read_answer(connection: ByteReceiveStream) -> bytes:
    """A whole response, plain or in chunks."""
    received = b""
    while True:
        received += await connection.receive()
        head, found, body = received.partition(b"\r\n\r\n")
        if not found:
            continue
        assert head.startswith(b"HTTP/1.1 200"), received
        if b"chunked" in head and body.endswith(b"0\r\n\r\n"):
            return body
        if b"content-length" in head and len(body) == int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return body


def reply_text(body: bytes, stream: bool) -> str:
    """What the model said, by either protocol."""
    if not stream:
        whole = msgspec.json.decode(body)
        if "choices" in whole:
            return whole["choices"][0]["message"]["content"] or ""
        return "".join(block["text"] for block in whole["content"])
    events = [msgspec.json.decode(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert not any("error" in event for event in events), events
    deltas = [event.get("delta") or event["choices"][0]["delta"] for event in events if said(event)]
    return "".join(delta.get("text") or delta.get("content") or "" for delta in deltas)


def said(event: dict[str, Any]) -> bool:
    return event.get("type") == "content_block_delta" or bool(event.get("choices"))


# ---------------------------------------------------------------------------------------------------------------------
# What must hold
# ---------------------------------------------------------------------------------------------------------------------


def check_records(soak: Soak, session: Session, taken: dict[str, list[str]], *, cancelled: bool) -> None:
    """Of one rollout: every reply that a harness took has its record, laws 1 and 2 hold, nothing is paid for twice."""
    calls = session.calls()
    soak.records += len(calls)
    by_request: defaultdict[tuple[str, int | None], list[CallRecord]] = defaultdict(list)
    for call in calls:
        assert (call.reply is None) == bool(call.failure), call
        assert call.reply is not None or (cancelled and call.failure == "cancelled"), call.failure
        if call.reply is not None:
            by_request[call.new_messages[-1].text, call.requested.max_tokens].append(call)
    for asked, replies in taken.items():
        recorded = [call.reply.text for call in by_request[asked, 100] if call.delivered and call.reply]
        assert [reply for reply in replies if reply not in recorded] == [], (replies, recorded)
    for same in by_request.values():
        undelivered = [call.call_id for call in same[:-1] if not call.delivered]
        assert undelivered == [], f"drawn again although {undelivered} waited to be delivered"
        soak.drawn_again += max(0, len(same) - max(1, len(taken.get(same[0].new_messages[-1].text, ()))))
    check_tokens(soak, session, calls)


def check_tokens(soak: Soak, session: Session, calls: tuple[CallRecord, ...]) -> None:
    """The engine's own journal says the same, token by token; and each draw that was lost is told of."""
    whole = whole_calls(calls)
    tree = build_tree("soak", calls)
    paths = {node.call_id: tree.path_token_ids(node.node_id) for node in tree.nodes if node.sampled}
    for call in calls:
        soak.lost_draws += sum("was lost" in incident for incident in call.incidents)
        if call.reply is None:
            continue
        assert call.tokens is not None
        assert len(call.tokens.completion_ids) == len(call.tokens.sampling_logprobs) > 0
        assert call.tokens.reencoded_replies == 0
        assert tuple(paths[call.call_id]) == tuple(whole[call.call_id].token_ids), "law 2"


def check_journal(soak: Soak) -> None:
    """Every whole draw of the engine was recorded once, or its call says that it was lost. Forgets what it checked."""
    lines = msgspec.json.Decoder(Line).decode_lines(soak.journal.read_bytes())
    draws: defaultdict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        if line.request_id.startswith("check-"):  # whether the engine draws at all: nobody's call
            continue
        prefix, call_id, _ = line.request_id.split("-")
        draws[prefix, int(call_id)].append(line)
    for prefix, calls in soak.told.items():
        for call_id, (received, drawn, lost) in calls.items():
            found = draws[prefix, call_id]
            assert len(found) <= 1 + lost, (found, lost)
            assert (found[-1].received, found[-1].drawn) == (received, drawn)
    soak.told.clear()


def fingerprints(session: Session) -> tuple[str, dict[int, tuple[str, str, int]]]:
    """What a rollout's records say that the engine received and drew, and how often it was lost on the way."""
    whole = whole_calls(session.calls())
    incidents = {call.call_id: sum("was lost" in one for one in call.incidents) for call in session.calls()}
    return session._request_prefix, {
        call_id: (digest(call.prompt_ids), digest(call.tokens.completion_ids), incidents[call_id])
        for call_id, call in whole.items()
    }
