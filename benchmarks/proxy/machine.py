"""The machine of a run, and whether it was ours alone."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proxy.lanes import Lane

BUSY = 0.05
"""Of all cores, used by others: figures are then not for publishing."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the figures depend on."""

    cores: int
    memory_gib: float
    processor: str
    python: str
    others: float
    """Share of all cores that processes other than the benchmark's used during the run."""

    @property
    def busy(self) -> bool:
        """Too busy for figures that others shall believe."""
        return self.others > BUSY


class Neighbours:
    """Watches from its creation on."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._start = (time.monotonic(), _machine_s(), self._own_s())

    def machine(self) -> Machine:
        """The machine, and its use by others so far."""
        wall_s, machine_s, own_s = (
            now - start for now, start in zip((time.monotonic(), _machine_s(), self._own_s()), self._start, strict=True)
        )
        cores = os.cpu_count() or 1
        return Machine(
            cores=cores,
            memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
            processor=_processor(),
            python=platform.python_version(),
            others=max(0.0, machine_s - own_s) / (wall_s * cores),
        )

    def _own_s(self) -> float:
        return time.process_time() + sum(lane.process.cpu_s() for lane in self._lanes)


def _machine_s() -> float:
    """Core seconds that were not idle since boot; interrupts included, which are partly ours."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
