"""The arithmetic of opinions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from clawhpc.records import Opinion, Rubric


def weighted_mean(rubric: Rubric, scores: Mapping[str, float]) -> float:
    """The mean of the criteria's scores, each by its weight; in [0, 1]."""
    weights = [criterion.weight for criterion in rubric.criteria]
    mean = fmean((scores[criterion.name] for criterion in rubric.criteria), weights)
    return min(1.0, max(0.0, mean))  # rounding may leave the interval


def mean_scores(opinions: Sequence[Opinion]) -> dict[str, float]:
    """Criterion -> its mean over the opinions."""
    return {name: fmean(opinion.scores[name] for opinion in opinions) for name in opinions[0].scores}


def agreement(values: Sequence[float]) -> float | None:
    """1 minus the mean absolute difference of two of `values`, over all pairs; None where there is no pair.

    1: all say the same; 0: two judges, of whom one gives everything and the other nothing.
    """
    pairs = list(combinations(values, 2))
    return 1.0 - fmean(abs(one - other) for one, other in pairs) if pairs else None


def spread(opinions: Sequence[Opinion]) -> dict[str, float]:
    """Criterion -> the largest of its scores minus the smallest."""
    by_name = {name: [opinion.scores[name] for opinion in opinions] for name in opinions[0].scores}
    return {name: max(scores) - min(scores) for name, scores in by_name.items()}
