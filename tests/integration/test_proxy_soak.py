"""Thousands of calls with faults injected: dropped connections, a killed engine, cancelled rollouts, retries.

Over real unix sockets, through the real proxy, the real desk that starts the engine again, and the real chat format;
the engine is a process that speaks vLLM's protocol and keeps a journal of what it drew.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest

from clawhpc.wire.body import KNOWN
from tests.fakes.soak import Soak, check_journal, run_rollouts, soaking

pytestmark = pytest.mark.anyio
MEMO_BYTES = 2**20
"""For what the host remembers of texts and bodies, in place of 350 MiB in all, which so few calls would never fill."""
GROWTH_MIB = 12
"""Of the process's memory after the first quarter. What keeps a record for each call (4 kB and more) would show as
30 MiB and more, what keeps a rollout's whole memory as hundreds; the allocator's holes take a few.
"""


@pytest.fixture(autouse=True)
def many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is killed so often here that one reply may be lost twice, which is more than a rollout bears."""
    monkeypatch.setattr("clawhpc.proxy.session.MAX_DRAWS", 10)


@pytest.fixture
def small_memos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN, "_half", MEMO_BYTES // 2)
    monkeypatch.setattr("clawhpc.engine.render.KEPT_BYTES", MEMO_BYTES)
    monkeypatch.setattr("clawhpc.engine.tokenizer.KEPT_BYTES", MEMO_BYTES)


def memory_mib() -> float:
    """Resident now, when everything that can go has gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_open_files() -> int:
    """Those of garbage apart, which an earlier test in this process may have left."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def soak_in_waves(folder: Path, *, waves: int, rollouts: int, turns: int, kill_every: int) -> tuple[Soak, float]:
    """`rollouts` at once, `waves` times; the growth of memory after the first wave."""
    files, tasks = num_open_files(), len(asyncio.all_tasks())
    memory: list[float] = []
    start, cpu = time.monotonic(), time.process_time()
    async with soaking(folder, kill_every=kill_every) as soak:
        for wave in range(waves):
            seeds = range(wave * rollouts, (wave + 1) * rollouts)
            await run_rollouts(soak, seeds, turns=turns, at_once=rollouts)
            check_journal(soak)
            memory.append(memory_mib())
            print(f"wave {wave}: {soak.records} calls after {time.monotonic() - start:.0f} s, {memory[-1]:.0f} MiB")
    seconds = time.monotonic() - start
    print(
        f"\n{soak.records} calls, {soak.answers} replies taken, {soak.records / seconds:.0f} calls/s, "
        f"{1e3 * (time.process_time() - cpu) / soak.records:.1f} ms of CPU a call, harnesses and checks included\n"
        f"engine killed {soak.kills} times, {soak.lost_draws} draws lost, {soak.cancelled} rollouts cancelled, "
        f"{soak.drawn_again} answers written and not taken; harness faults {dict(soak.faults)}\n"
        f"memory after each wave of {rollouts} rollouts: {', '.join(f'{one:.0f}' for one in memory)} MiB"
    )
    assert num_open_files() == files, "sockets or pipes are left open"
    assert len(asyncio.all_tasks()) == tasks, "tasks are left running"
    return soak, memory[-1] - memory[0]


async def test_whatever_breaks_on_the_way_each_reply_is_recorded_once_and_exactly(short_folder: Path) -> None:
    soak, _ = await soak_in_waves(short_folder, waves=2, rollouts=12, turns=10, kill_every=60)
    assert soak.records > 200
    assert soak.kills >= 3
    assert soak.lost_draws > 10


@pytest.mark.slow
@pytest.mark.usefixtures("small_memos")
async def test_ten_thousand_calls_over_256_rollouts_leave_nothing_behind(short_folder: Path) -> None:
    soak, growth_mib = await soak_in_waves(short_folder, waves=4, rollouts=64, turns=40, kill_every=500)
    assert soak.records > 10_000
    assert soak.kills >= 15
    assert soak.cancelled >= 5
    assert growth_mib < GROWTH_MIB
