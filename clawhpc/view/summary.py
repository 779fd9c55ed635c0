"""One row per rollout, and what the rows say together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from clawhpc.records import POLICY_OUTCOMES, Outcome, Phase, RolloutRecord, Timings
from clawhpc.tree.drift import count_reencoded

PARTS = ("boot", "run", "settle", "verify", "teardown")
"""The phases of a rollout, in order of time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the table shows of one rollout."""

    rollout_id: str
    phase: Phase
    step: int
    task_id: str
    harness: str
    sample: int
    outcome: Outcome
    reward: float | None
    """What trains; of an evaluation what the verifier said, before any shaping, as in its tables."""
    num_calls: int
    num_drawn: int
    """Tokens that the policy drew."""
    peak_context: int
    """Tokens of the longest prompt."""
    seconds: float
    parts: tuple[float, ...]
    """Seconds of each of `PARTS`."""
    reencoded: int
    """Replies that stand in later prompts in other ids than were drawn."""
    unlisted: dict[str, int]
    """Request field that no table lists -> calls that had it."""
    dropped: dict[str, int]
    failed_attempts: tuple[Outcome, ...]
    """How those before this one ended."""
    started_at: float
    trains: bool
    """Its reward enters a baseline."""


def summarise(record: RolloutRecord) -> Row:
    """The row of one rollout."""
    parts = seconds_of_parts(record.timings)
    return Row(
        rollout_id=record.rollout_id,
        phase=record.key.phase,
        step=record.key.step,
        task_id=record.key.task_id,
        harness=record.key.harness,
        sample=record.sample,
        outcome=record.outcome,
        reward=_reward(record),
        num_calls=len(record.calls),
        num_drawn=sum(call.usage.output_tokens for call in record.calls),
        peak_context=max((call.usage.input_tokens for call in record.calls), default=0),
        seconds=sum(parts),
        parts=parts,
        reencoded=count_reencoded(record.calls),
        unlisted=dict(record.unlisted),
        dropped=record.dropped_leaves,
        failed_attempts=tuple(failed.outcome for failed in record.failed_attempts),
        started_at=record.timings.started_at,
        trains=record.trains,
    )


def _reward(record: RolloutRecord) -> float | None:
    if record.verdict is None:
        return None
    return record.verdict.raw_reward if record.key.phase == "eval" else record.verdict.reward


def seconds_of_parts(timings: Timings) -> tuple[float, ...]:
    """Aligned with `PARTS`."""
    return timings.boot_s, timings.run_s, timings.settle_s, timings.verify_s, timings.teardown_s


def choose_embedded(rows: Sequence[Row], count: int) -> frozenset[str]:
    """Whose trees the page holds: half the latest, then by turns the worst, the best, the failed; later ones first."""
    latest = sorted(rows, key=lambda row: (row.started_at, row.rollout_id), reverse=True)
    judged = [row for row in latest if row.reward is not None]
    worst = sorted(judged, key=lambda row: row.reward or 0.0)
    best = sorted(judged, key=lambda row: -(row.reward or 0.0))
    failed = [row for row in latest if row.outcome not in POLICY_OUTCOMES]
    chosen = {row.rollout_id for row in latest[: (count + 1) // 2]}
    queues = [iter(worst), iter(best), iter(failed), iter(latest)]
    while len(chosen) < min(count, len(rows)):
        for queue in queues:
            fresh = next((row for row in queue if row.rollout_id not in chosen), None)
            if fresh is not None and len(chosen) < count:
                chosen.add(fresh.rollout_id)
    return frozenset(chosen)


def by_step(rows: Iterable[Row], phase: Phase) -> dict[int, list[Row]]:
    """The rows of one phase, by step, ascending."""
    steps: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.phase == phase:
            steps[row.step].append(row)
    return dict(sorted(steps.items()))


def mean_rewards(rows: Iterable[Row], phase: Phase) -> list[tuple[float, float]]:
    """(step, mean reward over the rollouts that train), for the steps that have one."""
    steps = by_step(rows, phase).items()
    judged = {step: [row.reward for row in members if row.trains and row.reward is not None] for step, members in steps}
    return [(float(step), fmean(rewards)) for step, rewards in judged.items() if rewards]


def count_outcomes(rows: Iterable[Row]) -> list[tuple[Outcome, int]]:
    """Outcome -> rollouts, the policy's own first, those that occur."""
    counts = Counter(row.outcome for row in rows)
    return [(outcome, counts[outcome]) for outcome in Outcome if counts[outcome]]


def count_dropped(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Rule -> leaves that it dropped, the most first."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.dropped)
    return total.most_common()


def notices(rows: Sequence[Row], metrics: dict[str, list[tuple[float, float]]]) -> list[str]:
    """What a person should look at before trusting the curves; empty when nothing stands out."""
    found = [
        _failures(rows),
        _retries(rows),
        _reencodings(rows),
        _unlisted(rows),
        *(_always_zero(name, metrics) for name in MUST_MOVE),
    ]
    return [notice for notice in found if notice]


MUST_MOVE = {
    "train/clip_share": "No update was ever clipped: the ratio of learner to old log-probs may not be what it should.",
    "credit/advantage_std": "No step had any spread of advantages: nothing was learned from.",
}
"""Metrics that are 0 for a whole run only when something is wrong, and how to say so."""
MIN_STEPS_TO_JUDGE = 5
"""Fewer steps may be 0 by chance."""
FAILURE_SHARE = 0.05
"""More infrastructure failures than this, or attempts that were made up for, are worth a word."""


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if row.outcome not in POLICY_OUTCOMES]
    if not rows or len(failed) / len(rows) <= FAILURE_SHARE:
        return ""
    kinds = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in count_outcomes(failed))
    return f"{len(failed):,} of {len(rows):,} rollouts ended without training: {kinds}."


def _retries(rows: Sequence[Row]) -> str:
    retried = [row for row in rows if row.failed_attempts]
    if not rows or len(retried) / len(rows) <= FAILURE_SHARE:
        return ""
    counts = Counter(outcome for row in retried for outcome in row.failed_attempts)
    kinds = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in counts.most_common())
    return f"{len(retried):,} of {len(rows):,} rollouts were run again, because the machine had failed them: {kinds}."


def _reencodings(rows: Sequence[Row]) -> str:
    hit = [row for row in rows if row.reencoded]
    if not hit:
        return ""
    total = sum(row.reencoded for row in hit)
    return f"{total:,} replies in {len(hit):,} rollouts were encoded again instead of repeated by their ids."


def _unlisted(rows: Sequence[Row]) -> str:
    names = sorted({name for row in rows for name in row.unlisted})
    if not names:
        return ""
    return f"Requests had fields of which no table says what they mean here, and they were ignored: {', '.join(names)}."


def _always_zero(name: str, metrics: dict[str, list[tuple[float, float]]]) -> str:
    values = [value for _, value in metrics.get(name, [])]
    return MUST_MOVE[name] if len(values) >= MIN_STEPS_TO_JUDGE and not any(values) else ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number in the head of the page."""

    label: str
    value: str
    note: str = ""


def figures(rows: Sequence[Row], planned: int, published_steps: Sequence[int]) -> list[Figure]:
    """The run in a handful of numbers."""
    drawn = sum(row.num_drawn for row in rows)
    usual = median(row.seconds for row in rows) if rows else 0.0
    return [
        Figure(label="Rollouts", value=f"{len(rows):,}", note=f"of {planned:,} planned" if planned else ""),
        Figure(label="Latest policy", value=f"step {max(published_steps)}" if published_steps else "–"),
        _change("Training reward", mean_rewards(rows, "train")),
        _change("Evaluation reward", mean_rewards(rows, "eval")),
        Figure(label="Tokens drawn", value=short_number(drawn), note=f"{drawn:,}" if drawn >= 10_000 else ""),
        Figure(label="Rollout time", value=f"{usual:.1f} s" if rows else "–", note="median" if rows else ""),
    ]


def _change(label: str, points: list[tuple[float, float]]) -> Figure:
    if not points:
        return Figure(label=label, value="–")
    first, last = points[0], points[-1]
    note = f"from {first[1]:.2f} at step {first[0]:.0f}" if len(points) > 1 else f"step {first[0]:.0f}"
    return Figure(label=label, value=f"{last[1]:.2f}", note=note)


def short_number(value: float) -> str:
    """Three digits and a unit: 1.24 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
