"""Cells: how many sessions at once, how fast the engine, how long the history, which form of answer.

In each cell all lanes have the same sessions. They take turns, block by block: a block is one lane's sessions asking a
few calls each, all at the same time. So noise of the machine meets all lanes alike, and each repeat has a direct block of
its own to subtract.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.proxy.client import Connection, Conversation
from benchmarks.proxy.lanes import Direct, Lane

RESULT_BYTES = 600
"""Of a tool's result: with the reply before it, about 300 new tokens a call."""
TRAILING_S = 0.02
"""After a block, for what a proxy does after its answer has been read; it counts as CPU time."""
MUST_ANSWER = ("direct", "clawhpc")
SLOW_S = 0.2
FEW_SESSIONS = 16
"""Up to so many, each repeat has new sessions, so that a history stays near the wanted length. More sessions live through
all cells of their history length, which have fewer calls: filling hundreds of sessions takes longer than measuring them.
"""
SATURATED = 0.85
"""Of a core that a proxy keeps busy: from here on latency is the length of its queue."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting."""

    sessions: int
    history_tokens: int
    delay_s: float
    stream: bool
    calls: int
    """Of each session in a block."""
    repeats: int


@dataclass(kw_only=True)
class Block:
    """One lane's calls in one repeat."""

    last_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LaneFigures:
    """One lane in one cell; added times are over the median of the direct block of the same repeat."""

    lane: str
    calls: int
    p50_ms: float
    p99_ms: float
    low_ms: float
    """The smallest and the largest median of a repeat."""
    high_ms: float
    first_p50_ms: float
    """The first byte of the body, whole."""
    first_p99_ms: float
    cpu_ms: float
    """Of a call."""
    saturated: bool


@dataclass(frozen=True, kw_only=True)
class CellFigures:
    """One cell."""

    cell: Cell
    body_kb: float
    """Of a request, on average."""
    lanes: list[LaneFigures]
    failed: dict[str, str]
    """Peers that left a call without its answer, and what was seen."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much is measured."""

    sessions: Sequence[int]
    history_tokens: Sequence[int]
    repeats: int

    def cells(self, sessions: int, history_tokens: int) -> Iterator[Cell]:
        """Engine at once and slow, plain and streamed."""
        for delay_s, stream in itertools.product((0.0, SLOW_S), (False, True)):
            if sessions == 1:
                calls, repeats = (8, 5 * self.repeats) if not delay_s else (4, self.repeats)
            else:
                calls, repeats = max(1, 48 // sessions), self.repeats
            if sessions > FEW_SESSIONS:
                calls, repeats = 1, 1 if sessions * history_tokens > 10**7 else min(2, self.repeats)
            yield Cell(
                sessions=sessions,
                history_tokens=history_tokens,
                delay_s=delay_s,
                stream=stream,
                calls=calls,
                repeats=repeats,
            )


class Sessions:
    """The open sessions of one lane."""

    def __init__(self, lane: Lane, members: list[tuple[Connection, Conversation]]) -> None:
        self.lane, self.members = lane, members

    @classmethod
    async def open(cls, lane: Lane, numbers: Sequence[int], text: str, num_bytes: int) -> Sessions:
        """With their history, which each proxy meets in a first call that is not measured."""
        endpoints = await lane.open_sessions(len(numbers))
        connections = [Connection(endpoint) for endpoint in endpoints]
        conversations = [Conversation(text, number=number, num_bytes=num_bytes) for number in numbers]
        sessions = cls(lane, list(zip(connections, conversations, strict=True)))
        await sessions.block(calls=1, delay_s=0.0, stream=False)
        return sessions

    async def block(self, *, calls: int, delay_s: float, stream: bool) -> Block:
        """Every session asks `calls` times. Over a slow engine they do not start all at once: rollouts never do."""
        block = Block()
        for connection, _ in self.members:
            await connection.connect()
        cpu, start = self.lane.process.cpu_s(), asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for at, member in enumerate(self.members):
                tasks.create_task(_ask(member, block, calls, delay_s * at / len(self.members), stream=stream))
        block.wall_s = asyncio.get_running_loop().time() - start
        await asyncio.sleep(TRAILING_S)
        block.cpu_s = self.lane.process.cpu_s() - cpu
        return block

    @property
    def body_kb(self) -> float:
        """Of the next request."""
        return len(self.members[0][1].body(stream=False)) / 1000

    def close(self) -> None:
        """Hang up."""
        for connection, _ in self.members:
            connection.close()


async def _ask(
    member: tuple[Connection, Conversation], block: Block, calls: int, wait_s: float, *, stream: bool
) -> None:
    connection, conversation = member
    await asyncio.sleep(wait_s)
    for _ in range(calls):
        answer = await connection.ask(conversation.body(stream=stream))
        block.first_s.append(answer.first_s)
        block.last_s.append(answer.last_s)
        conversation.add_turn(answer, RESULT_BYTES, stream=stream)


class Bench:
    """All lanes, and the text of which conversations are made."""

    def __init__(self, direct: Direct, proxies: Sequence[Lane], text: str, bytes_per_token: float) -> None:
        self.lanes: Sequence[Lane] = (direct, *proxies)
        self._direct, self._text, self._bytes_per_token = direct, text, bytes_per_token
        self._num_conversations = 0
        self._failed: dict[str, str] = {}
        self.recorded: dict[str, Counter[str]] = {lane.name: Counter() for lane in self.lanes}

    async def measure(self, cells: Iterable[Cell]) -> AsyncIterator[CellFigures]:
        """One after the other; they have the number of sessions and the length of the history in common."""
        opened: list[Sessions] = []
        for cell in cells:
            blocks: dict[str, list[Block]] = {lane.name: [] for lane in self.lanes}
            body_kb = []
            for repeat in range(cell.repeats):
                if not opened or cell.sessions <= FEW_SESSIONS:
                    await self.close(opened)
                    opened = await self.open_for(cell)
                await self.set_delay(cell.delay_s)
                first = repeat % len(opened)
                for sessions in (*opened[first:], *opened[:first]):
                    body_kb.append(sessions.body_kb)
                    with self._failures(sessions.lane):
                        block = await sessions.block(calls=cell.calls, delay_s=cell.delay_s, stream=cell.stream)
                        blocks[sessions.lane.name].append(block)
                        await sessions.lane.forget()
                opened = [each for each in opened if each.lane.name not in self._failed]
            yield CellFigures(
                cell=cell,
                body_kb=statistics.mean(body_kb),
                lanes=list(_figures(cell, {lane: own for lane, own in blocks.items() if lane not in self._failed})),
                failed=dict(self._failed),
            )
        await self.close(opened)

    async def set_delay(self, delay_s: float) -> None:
        """How long the engine draws from now on."""
        await self._direct.set_delay(delay_s)

    async def open_for(self, cell: Cell) -> list[Sessions]:
        """See `open`. Over an engine that answers at once."""
        await self.set_delay(0.0)
        return await self.open(cell.sessions, cell.history_tokens)

    async def open(self, num_sessions: int, history_tokens: int) -> list[Sessions]:
        """New conversations, the same for all lanes; no text comes a second time, or a cache would know it."""
        self._failed.clear()
        numbers = range(self._num_conversations, self._num_conversations + num_sessions)
        self._num_conversations += num_sessions
        num_bytes = int(history_tokens * self._bytes_per_token)
        opened = []
        for lane in self.lanes:
            with self._failures(lane):
                opened.append(await Sessions.open(lane, numbers, self._text, num_bytes))
        return opened

    @contextmanager
    def _failures(self, lane: Lane) -> Iterator[None]:
        """A peer that does not answer is left out until the next sessions are opened, and named in the results."""
        try:
            yield
        except (ExceptionGroup, RuntimeError, OSError) as error:
            if lane.name in MUST_ANSWER:
                raise
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._failed[lane.name] = f"{type(first).__name__}: {str(first)[:200]}".rstrip(": ")

    async def close(self, opened: Sequence[Sessions]) -> None:
        """Hang up, and count what was recorded."""
        for sessions in opened:
            self.recorded[sessions.lane.name].update(await sessions.lane.recorded())
            sessions.close()


def _figures(cell: Cell, blocks: dict[str, list[Block]]) -> Iterator[LaneFigures]:
    base = [statistics.median(block.last_s) for block in blocks["direct"]]
    queued = cell.sessions > 1 and not cell.delay_s  # nobody waits for anything but the proxy
    for lane, own in blocks.items():
        added = [[1000 * (one - start) for one in block.last_s] for block, start in zip(own, base, strict=True)]
        medians = [statistics.median(each) for each in added]
        every = sorted(itertools.chain(*added))
        first = sorted(1000 * one for block in own for one in block.first_s)
        yield LaneFigures(
            lane=lane,
            calls=len(every),
            p50_ms=statistics.median(medians),
            p99_ms=percentile(every, 0.99),
            low_ms=min(medians),
            high_ms=max(medians),
            first_p50_ms=statistics.median(first),
            first_p99_ms=percentile(first, 0.99),
            cpu_ms=1000 * sum(block.cpu_s for block in own) / len(every),
            saturated=queued or sum(block.cpu_s for block in own) > SATURATED * sum(block.wall_s for block in own),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
