"""What the verdicts of a step say beside the reward that trains: numbers of a training log. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from clawhpc.records import RolloutRecord, Verdict

PARTS = ("script", "rubric", "malformed_share")
"""Of a verdict's breakdown, those that mean the same for every task."""


def verdict_metrics(records: Iterable[RolloutRecord]) -> dict[str, float]:
    """Means over the verdicts that have each; what all judges together have cost, where that is known.

    Nothing where scripts alone give the rewards and nothing shapes them.
    """
    verdicts = [record.verdict for record in records if record.verdict is not None]
    judgements = [verdict.judgement for verdict in verdicts if verdict.judgement is not None]
    costs = [judgement.cost_usd for judgement in judgements if judgement.cost_usd is not None]
    metrics = {f"verify/{name}": fmean(values) for name, values in _means_of(verdicts) if values}
    if costs and len(costs) == len(judgements):
        metrics["verify/judge_usd"] = sum(costs)
    return metrics


def _means_of(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, list[float]]]:
    yield "raw_reward", [verdict.unshaped for verdict in verdicts if verdict.unshaped is not None]
    for part in PARTS:
        yield part, [verdict.breakdown[part] for verdict in verdicts if part in verdict.breakdown]
    agreed = (verdict.judgement.agreement for verdict in verdicts if verdict.judgement is not None)
    yield "agreement", [agreement for agreement in agreed if agreement is not None]
