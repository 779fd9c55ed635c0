"""What a judge, or several, have said of a workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

from clawhpc.records.conversation import Usage


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """One judge's scores of one workspace."""

    model: str
    """As its endpoint calls it."""
    scores: dict[str, float]
    """Criterion -> score in [0, 1]; each criterion of the rubric once."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Criterion -> why, in the judge's words, shortened. For a person."""
    shown: float = 1.0
    """Share of the room that the settings give what the policy wrote; less than 1 where the judge's window is small."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All opinions on one workspace, and what they have cost (verify -> store)."""

    opinions: tuple[Opinion, ...]
    score: float
    """Mean over the opinions of the weighted mean of their scores, in [0, 1]."""
    agreement: float | None
    """1 minus the mean difference between the weighted means of two opinions, over all pairs; None for one opinion."""
    spread: dict[str, float]
    """Criterion -> the largest of its scores minus the smallest."""
    prompt_digest: str
    """SHA-256 of the template of the prompt and the rubric: equal for all workspaces that were asked about alike."""
    num_requests: int
    """Those that failed included."""
    usage: Usage
    """Of all requests together, as the endpoint counts."""
    cost_usd: float | None
    """None where an endpoint did not say what a request took, or its price is not set."""
