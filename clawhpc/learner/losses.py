"""Log-probs and objectives. Pure: tensors in, tensors out.

Every objective is a weighted sum over the trained tokens of a row. The weights carry the denominator of the whole step,
so that rows, and later ranks, add up to the loss of the step however it is split (law 3).

Shapes: N trained tokens of a row, D hidden size, V vocabulary of the output head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawhpc.learner.settings import Normaliser

Sums = dict[str, Tensor]
"""Name -> sum over the trained tokens of a row; means are taken over the step. Names that end in `_max` are maxima."""


def token_weights(num_tokens: Sequence[int], normaliser: Normaliser, constant_tokens: int) -> list[float]:
    """Aligned with the rollouts of a step: the weight of each trained token of theirs, given how many they have.

    `token`: every token weighs the same and all together 1. `rollout`: every rollout that has tokens weighs the same,
    and all together 1. `constant`: one over `constant_tokens` and the number of rollouts (Dr. GRPO, arXiv 2503.20783).
    """
    num_rollouts = max(1, sum(count > 0 for count in num_tokens))
    if normaliser == "token":
        return [1.0 / max(1, sum(num_tokens))] * len(num_tokens)
    if normaliser == "rollout":
        return [1.0 / (num_rollouts * max(1, count)) for count in num_tokens]
    return [1.0 / (num_rollouts * constant_tokens)] * len(num_tokens)


def chunked_logprobs(
    hidden_ND: Tensor,
    target_ids_N: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    num_token_ids: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and, without gradient, entropies, both (N,) in fp32 or wider.

    The distribution is the one that the engine draws from: logits over `temperature`, ids from `num_token_ids` on
    excluded (a head is padded beyond the tokenizer). Logits exist for `chunk` tokens at a time, in both directions.
    """

    def of_chunk(hidden_ND: Tensor, target_ids_N: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = head(hidden_ND)[:, :num_token_ids]
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
        lse_N = logits_NV.logsumexp(-1)
        logprobs_N = logits_NV.gather(-1, target_ids_N[:, None])[:, 0] - lse_N
        with torch.no_grad():
            entropy_N = lse_N - (logits_NV.sub(lse_N[:, None]).exp() * logits_NV).sum(-1)
        return logprobs_N, entropy_N

    chunks = zip(hidden_ND.split(chunk), target_ids_N.split(chunk), strict=True)
    parts = [checkpoint(of_chunk, hidden, targets, use_reentrant=False) for hidden, targets in chunks]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


@dataclass(frozen=True, kw_only=True)
class Clip:
    """How far a token may move the policy."""

    low: float
    high: float
    truncation: float
    """Largest importance weight old/sampling."""


def grpo_loss(
    learner_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampling_logprobs_N: Tensor,
    advantages_N: Tensor,
    token_weight_N: Tensor,
    clip: Clip,
) -> tuple[Tensor, Sums]:
    """The clipped policy-gradient loss of a row, corrected for what the engine's distribution differs by.

        sum over tokens of  - weight * min(old/sampling, truncation) * min(r A, clip(r, 1 - low, 1 + high) A)

    with r = learner/old. The first factor is a constant: it corrects for tokens drawn by other weights or numerics
    (truncated importance sampling), while r measures how far this update has gone. PPO (arXiv 1707.06347) eq. 7,
    clip-higher: DAPO (arXiv 2503.14476) eq. 8.
    """
    drift_N = old_logprobs_N - sampling_logprobs_N
    importance_N = drift_N.exp().clamp(max=clip.truncation)
    log_ratio_N = learner_logprobs_N - old_logprobs_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    gain_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    loss = -(token_weight_N * importance_N * gain_N).sum()
    with torch.no_grad():
        sums = {
            "loss": loss.detach(),
            "clip_share": (clipped_N * advantages_N < ratio_N * advantages_N).sum(),
            "update_kl": k3(log_ratio_N).sum(),
            "truncated_share": (drift_N.exp() > clip.truncation).sum(),
            "sampling_kl": k3(drift_N).sum(),
            "sampling_gap": drift_N.abs().sum(),
            "sampling_gap_max": drift_N.abs().max() if len(drift_N) else drift_N.new_zeros(()),
        }
    return loss, sums


def sft_loss(learner_logprobs_N: Tensor, token_weight_N: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of a row: minus the weighted sum of the log-probs."""
    loss = -(token_weight_N * learner_logprobs_N).sum()
    return loss, {"loss": loss.detach()}


def k3(log_ratio_N: Tensor) -> Tensor:
    """Per token, p/q - 1 - log(p/q) from `log p/q`: never negative; its mean over draws from q estimates KL(q || p)."""
    return log_ratio_N.expm1() - log_ratio_N
