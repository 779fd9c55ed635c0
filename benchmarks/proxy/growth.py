"""How the cost of a call grows with its session: one session of 128 turns, up to 70 k tokens.

The CPU time of a call is fitted as `fixed + per kB of body + per new token`: tool results of changing length keep the new
tokens of a call apart from its bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.proxy.lanes import Scripted
from benchmarks.proxy.measure import TRAILING_S, Bench, Sessions

HEAD_TOKENS = 6_000
RESULT_BYTES = (300, 900, 2700, 1600)
"""Of the tools' results, in turn: on average 500 new tokens a turn, with the reply."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """CPU time of a call, least squares over the turns after the first."""

    fixed_ms: float
    per_kb_us: float
    """Of the request's body."""
    per_token_us: float
    """New: of the reply before, and of the tool's result."""
    r2: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """By turn, the first included."""

    body_kb: list[float]
    prompt_tokens: list[int]
    new_tokens: list[int]
    """Ids that our proxy stored for the call: those of its prompt that no earlier call had, and the reply's."""
    record_bytes: list[int]
    """Our record of the call, as it is written."""
    cpu_ms: dict[str, list[float]]
    """By lane: medians over the repeats."""
    fits: dict[str, Fit]
    repeats: int


async def measure_growth(bench: Bench, *, turns: int, repeats: int) -> Growth:
    """All lanes take turns, call by call."""
    cpu_ms: defaultdict[str, list[list[float]]] = defaultdict(list)
    body_kb: list[float] = []
    told: dict[str, list[int]] = {}
    for _ in range(repeats):
        await bench.set_delay(0.0)
        opened = await bench.open(1, HEAD_TOKENS)
        body_kb = await _play(opened, turns, cpu_ms)
        told = await _tell(opened)
        await bench.close(opened)
    medians = {lane: [statistics.median(turn) for turn in zip(*runs, strict=True)] for lane, runs in cpu_ms.items()}
    new_tokens = told["stored_ids"][1:]
    return Growth(
        body_kb=body_kb,
        prompt_tokens=told["prompt_ids"][1:],
        new_tokens=new_tokens,
        record_bytes=told["record_bytes"][1:],
        cpu_ms=medians,
        fits={lane: fit(body_kb, new_tokens, each) for lane, each in medians.items() if lane != "direct"},
        repeats=repeats,
    )


async def _play(opened: Sequence[Sessions], turns: int, cpu_ms: dict[str, list[list[float]]]) -> list[float]:
    """The conversation's bodies in kB. A call's CPU time reaches to the beginning of the lane's next."""
    clocks: dict[str, list[float]] = {sessions.lane.name: [] for sessions in opened}
    body_kb = []
    for turn in range(turns):
        body_kb.append(opened[0].body_kb)
        for sessions in opened:
            connection, conversation = sessions.members[0]
            await connection.connect()
            clocks[sessions.lane.name].append(sessions.lane.process.cpu_s())
            answer = await connection.ask(conversation.body(stream=False))
            conversation.add_turn(answer, RESULT_BYTES[turn % len(RESULT_BYTES)], stream=False)
    await asyncio.sleep(TRAILING_S)
    for sessions in opened:
        times = [*clocks[sessions.lane.name], sessions.lane.process.cpu_s()]
        cpu_ms[sessions.lane.name].append([1000 * (end - start) for start, end in itertools.pairwise(times)])
    return body_kb


async def _tell(opened: Sequence[Sessions]) -> dict[str, list[int]]:
    """What our proxy stored, by call; the first call was not measured."""
    ours = next(each.lane for each in opened if each.lane.name == "clawhpc")
    assert isinstance(ours, Scripted), "our proxy tells what it has recorded"
    return {name: value for name, value in (await ours.process.ask(None)).items() if isinstance(value, list)}


def fit(body_kb: Sequence[float], new_tokens: Sequence[int], cpu_ms: Sequence[float]) -> Fit:
    """See `Fit`."""
    columns = np.stack([np.ones(len(body_kb)), np.array(body_kb), np.array(new_tokens)], axis=1)
    measured = np.array(cpu_ms)
    coefficients, *_ = np.linalg.lstsq(columns, measured, rcond=None)
    rest = measured - columns @ coefficients
    fixed_ms, per_kb_ms, per_token_ms = map(float, coefficients)
    return Fit(
        fixed_ms=fixed_ms,
        per_kb_us=1000 * per_kb_ms,
        per_token_us=1000 * per_token_ms,
        r2=float(1 - rest.var() / measured.var()),
    )
