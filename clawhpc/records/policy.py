"""The policy, as the learner publishes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Ids and the learner's own log-probs for them, which `serve` compares with the engine's after each load."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Aligned with `token_ids[1:]`: log-prob of each token given those before it, temperature 1."""
    tolerance: float
    """Largest mean absolute difference at which an engine in the learner's own precision still holds the same weights.
    """
    bfloat16_tolerance: float = 0.2
    """The same for an engine that computes in bfloat16, or in anything finer than that. This is the least; a model of
    many layers or experts has more. Weights that are another policy's: 0.8 and more.
    """


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """One published set of weights (learner -> serve): a Hugging Face folder with `policy.json` beside the weights."""

    step: int
    path: str
    digest: str
    """SHA-256 over the weight files."""
    renderer: str
    """Name of the `renderers` configuration, e.g. `qwen3`."""
    thinking: bool
    """Whether the generation prompt leaves room for reasoning."""
    probe: Probe
