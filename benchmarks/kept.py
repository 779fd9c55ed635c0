"""What a page keeps of its runs, in a folder beside it: enough to write the page again where the runs' folders are gone."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from clawhpc.passrate import PASS_THRESHOLD, Estimate, Pair, difference, estimate
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from clawhpc.store import write_atomic
from clawhpc.verify.shape import malformed_share

Kept = TypeVar("Kept")
MEASURE = "pass@1"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where runs were made, and when they ended."""

    day: date
    cores: int
    architecture: str


def machine_of(run: RunPaths) -> Machine:
    """This one, on the day on which `run` ended."""
    day = date.fromtimestamp(run.finished.stat().st_mtime)
    return Machine(day=day, cores=os.cpu_count() or 1, architecture=platform.machine())


def describe(machines: Collection[Machine]) -> str:
    """The days and the machine, as a page begins."""
    days = sorted({one.day.isoformat() for one in machines})
    shapes = sorted({f"{one.cores} cores ({one.architecture})" for one in machines})
    return f"{', '.join(days)}, {' and '.join(shapes)}, no GPU."


class Rollout(msgspec.Struct, frozen=True, array_like=True):
    """One of an evaluation; a list of seven in the file."""

    harness: str
    task: str
    outcome: str
    passed: bool | None
    """None: it has no verdict, for the machine has failed it."""
    replies: int
    """That it had from the policy."""
    malformed: float
    """How many of them have a tool call that nobody can read, or of a tool that nobody offered."""
    cut: int
    """How many of them ended at the limit of tokens."""


def keep_rollout(record: RolloutRecord) -> Rollout:
    """Of a whole record, with its calls."""
    replies = [call.reply for call in record.calls if call.reply]
    return Rollout(
        harness=record.key.harness,
        task=record.key.task_id,
        outcome=str(record.outcome),
        passed=None if record.verdict is None else record.verdict.raw_reward >= PASS_THRESHOLD,
        replies=len(replies),
        malformed=len(replies) * malformed_share(record.calls),
        cut=sum(reply.finish_reason == "length" for reply in replies),
    )


def pass_at_1(rollouts: Iterable[Rollout]) -> Estimate | None:
    """Over tasks; None where every rollout has failed."""
    return estimate(rates(rollouts)).get(MEASURE)


def gain(before: Iterable[Rollout], after: Iterable[Rollout]) -> Estimate:
    """pass@1 of `after` minus that of `before`, paired by task and harness."""
    return difference(rates(before), rates(after))[MEASURE]


def rates(rollouts: Iterable[Rollout]) -> dict[Pair, dict[str, float]]:
    """pass@1 of each task and harness."""
    passed: dict[Pair, list[bool]] = defaultdict(list)
    for one in rollouts:
        if one.passed is not None:
            passed[one.task, one.harness].append(one.passed)
    return {pair: {MEASURE: fmean(those)} for pair, those in passed.items()}


def count_outcomes(rollouts: Iterable[Rollout]) -> str:
    """The most frequent first."""
    counts = Counter(one.outcome for one in rollouts)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def write_kept(file: Path, kept: Any) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, msgspec.json.encode(kept) + b"\n")


def read_kept(file: Path, kind: type[Kept]) -> Kept:
    """SystemExit where there is none."""
    if not file.exists():
        raise SystemExit(f"{file}: nothing is kept there yet; without --only-write the command makes it")
    return msgspec.json.decode(file.read_bytes(), type=kind)
