"""Runs side by side: charts in which each run is a line, and tables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawhpc.passrate import Estimate, by_pair, paired_difference, tabulate
from clawhpc.records import POLICY_OUTCOMES, Outcome, RolloutRecord
from clawhpc.view.compared import ComparedRun
from clawhpc.view.curves import LEARNING, STEP_TIME, Chart, Series, with_points
from clawhpc.view.metrics import Points
from clawhpc.view.summary import short_number

NONE = "–"


def pass_rates(run: ComparedRun) -> Points:
    """pass@1 of each evaluation of a policy that learns."""
    steps = {} if run.evaluated else run.evaluations
    found = ((float(step), tabulate(records).pass_at_1) for step, records in steps.items())
    return [(step, estimate.mean) for step, estimate in found if estimate is not None]


def step_times(run: ComparedRun) -> Points:
    """Seconds from plan to new policy."""
    parts = [dict(run.metrics.get(name, [])) for name in STEP_TIME]
    return [(step, sum(part.get(step, 0.0) for part in parts)) for step in sorted({x for part in parts for x in part})]


@dataclass(frozen=True)
class Curve:
    """What one chart shows of each run."""

    title: str
    hint: str
    metric: str = ""
    """Logged under this name; else `points_of` says."""
    points_of: Callable[[ComparedRun], Points] | None = None
    from_zero: bool = True
    dots: bool = False

    def line(self, run: ComparedRun) -> Series:
        """Of one run, also where it has no points: each run has the same colour in every chart."""
        points = self.points_of(run) if self.points_of else run.metrics.get(self.metric, [])
        return Series(name=run.name, points=points, dots=self.dots)


CURVES = (
    Curve("Reward", "mean over the training rollouts of a step", "train/reward"),
    Curve("Evaluation", "pass@1 on the held-out tasks", points_of=pass_rates, dots=True),
    *(Curve(title, hint, metric) for metric, title, hint in LEARNING),
    Curve("Time per step", "seconds, from plan to new policy", points_of=step_times),
    Curve("Tokens drawn", "per step", "tree/sampled_tokens"),
    Curve("Tokens computed", "per step, as trees", "tree/row_tokens"),
)
"""What is shown first."""


def compare_curves(runs: Sequence[ComparedRun]) -> list[Chart]:
    """The charts that are shown first; those without points are left out."""
    return _charts(CURVES, runs)


def compare_other_curves(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Every other metric that a run has logged."""
    shown = {*STEP_TIME, *(curve.metric for curve in CURVES)}
    names = sorted({name for run in runs for name in run.metrics} - shown)
    return _charts([Curve(name, "", name, from_zero=False) for name in names], runs)


def _charts(curves: Sequence[Curve], runs: Sequence[ComparedRun]) -> list[Chart]:
    return with_points(
        [
            Chart(
                title=curve.title,
                hint=curve.hint,
                series=tuple(map(curve.line, runs)),
                from_zero=curve.from_zero,
            )
            for curve in curves
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under heads."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell of each says what it is of."""
    note: str = ""


def compare_tables(runs: Sequence[ComparedRun]) -> list[Table]:
    """Evaluations, differences, outcomes and cost; a table may have no rows."""
    return [evaluation_table(runs), difference_table(runs), outcome_table(runs), cost_table(runs)]


@dataclass(frozen=True, kw_only=True)
class _Entrant:
    """A policy that was evaluated: the last of a campaign, or each of an evaluation."""

    name: str
    step: str
    records: Sequence[RolloutRecord]
    before: Sequence[RolloutRecord] = ()
    """Of the policy that its campaign began with."""


def _entrants(runs: Sequence[ComparedRun]) -> list[_Entrant]:
    found = []
    for run in runs:
        steps = list(run.evaluations)
        if run.evaluated:
            found += [
                _Entrant(name=f"{run.name}: {name}", step=NONE, records=run.evaluations[step])
                for step, name in run.evaluated.items()
            ]
        elif steps:
            before = run.evaluations[steps[0]] if len(steps) > 1 else ()
            found.append(
                _Entrant(name=run.name, step=str(steps[-1]), records=run.evaluations[steps[-1]], before=before)
            )
    return found


def evaluation_table(runs: Sequence[ComparedRun]) -> Table:
    """The last evaluation of each campaign, and all policies of each evaluation; with each harness by itself too."""
    tables = [
        (entrant, harness, tabulate(records))
        for entrant in _entrants(runs)
        for harness, records in _by_harness(entrant.records)
    ]
    ks = sorted({k for _, _, table in tables for k in table.pass_at_k})
    return Table(
        title="Last evaluation",
        heads=(
            *("run", "harness", "after step", "tasks", "rollouts", "failed", "reward", "pass@1"),
            *(f"pass@{k}" for k in ks),
        ),
        rows=[
            (
                *(entrant.name, harness, entrant.step),
                *map(str, (table.num_tasks, table.num_rollouts, table.num_failed)),
                *map(_shown, (table.mean_reward, table.pass_at_1, *(table.pass_at_k.get(k) for k in ks))),
            )
            for entrant, harness, table in tables
        ],
        note="95 % intervals by bootstrap over tasks.",
    )


def _by_harness(records: Sequence[RolloutRecord]) -> list[tuple[str, Sequence[RolloutRecord]]]:
    names = sorted({record.key.harness for record in records})
    alone: list[tuple[str, Sequence[RolloutRecord]]] = [
        (name, [record for record in records if record.key.harness == name]) for name in names
    ]
    return [("all", records), *alone] if len(names) > 1 else alone


def difference_table(runs: Sequence[ComparedRun]) -> Table:
    """pass@1 since the first evaluation of a campaign, and against every policy that stands before it."""
    entrants = _entrants(runs)
    rows = [
        (
            *(entrant.name, _difference(entrant.before, entrant.records)),
            *(_difference(other.records, entrant.records) if at < number else "" for at, other in enumerate(entrants)),
        )[: len(entrants) + 1]
        for number, entrant in enumerate(entrants)
    ]
    return Table(
        title="Differences in pass@1",
        heads=("run", "since its first evaluation", *(f"against {entrant.name}" for entrant in entrants[:-1])),
        rows=[row for row in rows if any(cell not in ("", NONE) for cell in row[1:])],
        note="Paired by task and harness, over those that both evaluations have; 95 % intervals.",
    )


def _difference(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> str:
    if not by_pair(before).keys() & by_pair(after).keys():
        return NONE
    difference = paired_difference(before, after)
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def _shown(estimate: Estimate | None) -> str:
    return NONE if estimate is None else str(estimate)


def outcome_table(runs: Sequence[ComparedRun]) -> Table:
    """How the rollouts of each run have ended, those of evaluations too."""
    occurring = [outcome for outcome in Outcome if any(run.outcomes.get(outcome) for run in runs)]
    return Table(
        title="How rollouts ended",
        heads=("run", "rollouts", *(_words(outcome) for outcome in occurring)),
        rows=[
            (
                run.name,
                f"{run.totals.rollouts:,}",
                *(_share(run.outcomes.get(outcome, 0), run) for outcome in occurring),
            )
            for run in runs
            if run.totals.rollouts
        ],
        note="† left out of training." if set(occurring) - POLICY_OUTCOMES else "",
    )


def _words(outcome: Outcome) -> str:
    return outcome.replace("_", " ") + ("" if outcome in POLICY_OUTCOMES else " †")


def _share(count: int, run: ComparedRun) -> str:
    return f"{count:,} ({count / run.totals.rollouts:.1%})" if count else "0"


def cost_table(runs: Sequence[ComparedRun]) -> Table:
    """What each run took."""
    parts = list(dict.fromkeys(part for run in runs for part in run.cpu_s))
    paid = list(dict.fromkeys(name for run in runs for name in run.usd))
    return Table(
        title="Time and cost",
        heads=(
            *("run", "state", "steps", "minutes of training", "wall clock", "calls", "prompt tokens", "tokens drawn"),
            *(f"CPU, {part}" for part in parts),
            *(f"USD, {name}" for name in paid),
        ),
        rows=[
            (
                *(run.name, "finished" if run.finished else "not finished", str(len(step_times(run)))),
                f"{sum(seconds for _, seconds in step_times(run)) / 60:.1f}",
                _duration(run.totals.ended_at - run.totals.began_at),
                *map(short_number, (run.totals.calls, run.totals.prompt_tokens, run.totals.drawn_tokens)),
                *(_duration(run.cpu_s[part]) if part in run.cpu_s else NONE for part in parts),
                *(f"{run.usd[name]:.2f}" if name in run.usd else NONE for name in paid),
            )
            for run in runs
        ],
        note="Wall clock: from the first rollout's start to the last one's end, pauses included."
        + (" USD: as far as endpoints count and prices are set; there may be more." if paid else ""),
    )


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def config_table(runs: Sequence[ComparedRun]) -> Table:
    """The keys in which the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    return Table(
        title="Configuration: what differs",
        heads=("key", *(run.name for run in runs)),
        rows=[(key, *(run.config.get(key, NONE) for run in runs)) for key in differing],
    )
