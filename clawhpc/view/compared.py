"""What a run says beside others: read once, and kept small.

A run is any folder with a configuration: of a campaign, which has curves and an evaluation before and after, or of an
evaluation, which has only that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths
from clawhpc.records import Outcome, RolloutRecord
from clawhpc.store import read_rollouts, read_usage
from clawhpc.view.metrics import Points, read_metrics


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Over all rollouts of a run, those of its evaluations too."""

    rollouts: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    drawn_tokens: int = 0
    harness_cpu_s: float = 0.0
    judge_usd: float | None = None
    """What judges have cost, where they say it; None where none does."""
    began_at: float = 0.0
    """Seconds since the epoch; of the first rollout."""
    ended_at: float = 0.0
    """Of the last."""

    def with_record(self, record: RolloutRecord) -> Totals:
        """And one more."""
        times = record.timings
        return Totals(
            rollouts=self.rollouts + 1,
            calls=self.calls + len(record.calls),
            prompt_tokens=self.prompt_tokens + sum(call.usage.input_tokens for call in record.calls),
            drawn_tokens=self.drawn_tokens + sum(call.usage.output_tokens for call in record.calls),
            harness_cpu_s=self.harness_cpu_s + times.harness_cpu_s,
            judge_usd=_sum_known(self.judge_usd, _judge_usd(record)),
            began_at=min(self.began_at, times.started_at) if self.rollouts else times.started_at,
            ended_at=max(self.ended_at, times.started_at + times.wall_s),
        )


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs."""

    name: str
    """Differs from that of every other run."""
    root: Path
    config: Mapping[str, str]
    """Dotted key -> value, as text."""
    metrics: Mapping[str, Points]
    evaluations: Mapping[int, Sequence[RolloutRecord]]
    """Step -> the rollouts of its evaluation, without their calls, by tasks that no two runs confuse; ascending."""
    evaluated: Mapping[int, str]
    """Of a run of `clawhpc.evaluate`: step -> which policy that is, on which tasks. Empty for a campaign: its steps are
    those of one policy that learns.
    """
    outcomes: Mapping[Outcome, int]
    totals: Totals
    cpu_s: Mapping[str, float]
    """Part -> CPU seconds; that of the learner once the run has finished."""
    usd: Mapping[str, float]
    """`judge`, and `API` for models that stood in the policy's place -> what they cost, as far as that is known."""
    finished: bool


def read_run(name: str, paths: RunPaths) -> ComparedRun:
    """All that is compared of a run, as it stands now. UserError that names a file that cannot be read."""
    totals, outcomes = Totals(), Counter[Outcome]()
    evaluations: dict[int, list[RolloutRecord]] = {}
    for record in read_rollouts(paths):
        totals = totals.with_record(record)
        outcomes[record.outcome] += 1
        if record.key.phase == "eval":
            evaluations.setdefault(record.key.step, []).append(_without_calls(record))
    result = _read_result(paths)
    return ComparedRun(
        name=name,
        root=paths.root,
        config=dict(_flat(_read_yaml(paths.config))),
        metrics=read_metrics(paths.metrics) if paths.metrics.exists() else {},
        evaluations=dict(sorted(evaluations.items())),
        evaluated=_name_evaluated(paths, evaluations, result),
        outcomes=outcomes,
        totals=totals,
        cpu_s=_cpu_by_part(paths, totals, result),
        usd=_known_usd(totals, result),
        finished=paths.finished.exists(),
    )


def _without_calls(record: RolloutRecord) -> RolloutRecord:
    """Its task is known by id and instruction: of another seed, or in another set, another task may have the id."""
    return replace(record, calls=(), key=replace(record.key, task_id=f"{record.key.task_id}: {record.instruction}"))


def _judge_usd(record: RolloutRecord) -> float | None:
    judged = record.verdict.judgement if record.verdict else None
    return judged.cost_usd if judged else None


def _sum_known(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def _known_usd(totals: Totals, result: Mapping[str, Any]) -> dict[str, float]:
    asked = [cell["table"]["policy_usd"] for cell in result.get("cells", ())]
    known = {"judge": totals.judge_usd, "API": reduce(_sum_known, asked, None)}
    return {name: usd for name, usd in known.items() if usd is not None}


def _read_result(paths: RunPaths) -> dict[str, Any]:
    """What a run has left when it has finished; empty before."""
    try:
        return msgspec.json.decode(paths.finished.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise UserError(f"{paths.finished}: not what a run leaves: {error}") from error


def _name_evaluated(paths: RunPaths, steps: Iterable[int], result: Mapping[str, Any]) -> dict[int, str]:
    if not paths.policy_numbers.exists():
        return {}
    cells = result.get("cells", ())
    one_set = len({cell["set"] for cell in cells}) < 2
    names = {cell["step"]: cell["policy"] if one_set else f"{cell['policy']} on {cell['set']}" for cell in cells}
    return {step: names.get(step, f"evaluation {step}") for step in sorted(steps)}


def _cpu_by_part(paths: RunPaths, totals: Totals, result: Mapping[str, Any]) -> dict[str, float]:
    usage = read_usage(paths)
    known = {
        "harness": totals.harness_cpu_s,
        "engine": sum(worker.engine_cpu_s for worker in usage),
        "proxy": sum(worker.own_cpu_s for worker in usage),
    }
    learner_s = result.get("cpu_s", {}).get("learner")
    return known if learner_s is None else known | {"learner": learner_s}


def _read_yaml(path: Path) -> Any:
    try:
        return msgspec.yaml.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a configuration: {' '.join(str(error).split())}") from error


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested mappings."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, value if isinstance(value, str) else json.dumps(value)
