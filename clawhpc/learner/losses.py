"""Log-probs and objectives. Pure: tensors in, tensors out.

Every objective is a weighted sum over the trained tokens of a row. The weights carry the denominator of the whole step,
so that rows and ranks add up to the loss of the step however it is split (law 3).

Shapes: N trained tokens of a row, K their places on conversation paths, P such paths, D hidden size, V vocabulary of
the output head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawhpc.learner.settings import LossSettings, Normaliser

Sums = dict[str, Tensor]
"""Name -> sum over the tokens of a row whose weight is above 0; means are taken over the step. Names that end in `_max`
are maxima.
"""


def token_weights(
    num_tokens: Sequence[int], normaliser: Normaliser, constant_tokens: int, times: Sequence[float] | None = None
) -> list[float]:
    """Aligned with the rollouts of a step: the weight of each trained token of theirs, given how many they have.

    `token`: every token weighs the same and all together 1. `rollout`: every rollout that has tokens weighs the same,
    and all together 1. `constant`: one over `constant_tokens` and the number of rollouts (Dr. GRPO, arXiv 2503.20783).
    With `times`, aligned too, a rollout counts as if it stood there so many times, in the denominators as well.
    """
    times = [1.0] * len(num_tokens) if times is None else times
    num_rollouts = sum(often for often, count in zip(times, num_tokens, strict=True) if count) or 1.0
    if normaliser == "token":
        total = sum(often * count for often, count in zip(times, num_tokens, strict=True)) or 1.0
        return [often / total for often in times]
    if normaliser == "rollout":
        return [often / (num_rollouts * max(1, count)) for often, count in zip(times, num_tokens, strict=True)]
    return [often / (num_rollouts * constant_tokens) for often in times]


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
class Paths:
    """The conversation paths through the N tokens of a row: K pairs of a path and a token on it.

    Every token that trains is on one path at least, and no pair comes twice.
    """

    path_K: Tensor
    """Which path, from 0 to `num_paths` - 1."""
    token_K: Tensor
    """Which of the N tokens."""
    num_paths: int


def policy_loss(
    learner_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampling_logprobs_N: Tensor,
    advantages_N: Tensor,
    token_weight_N: Tensor,
    settings: LossSettings,
    *,
    paths: Paths | None = None,
    reference_logprobs_N: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """The policy-gradient loss of a row: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and PPO are settings of it.

        clip     - sum of w c min(r A, clip(r, 1 - low, 1 + high) A)     PPO, arXiv 1707.06347, eq. 7
        cispo    - sum of w c clip(r, 1 - low, 1 + high) A learner       r is a constant; arXiv 2506.13585, eq. 4
        and      + kl_coef * sum of w k3(reference - learner)            GRPO, arXiv 2402.03300, eq. 4

    with w the token's weight, A its advantage, c its importance weight old/sampling, bounded and constant, and r how
    far this update has gone: learner/old of the token, or of a whole path (`paths`), as `path_log_ratios` says. A
    token on n paths enters each with weight w/n. `reference_logprobs_N` is given where there is a KL term.

    Only tokens of weight above 0 count, in the loss and in every sum; means for the log are over those. One that
    says nothing (weight, advantage or importance weight 0) has loss and gradient 0 however extreme its ratios.
    In `clip_share`, a token that is clipped on some of its paths counts in part.
    """
    trains_N = token_weight_N > 0
    log_ratio_N = _only(trains_N, learner_logprobs_N - old_logprobs_N)
    drift_N = _only(trains_N, old_logprobs_N - sampling_logprobs_N).detach()
    importance_N, outside_N = importance_weights(drift_N, settings)
    credit_N = token_weight_N * advantages_N
    credit_N = _only(credit_N != 0, credit_N * importance_N)
    token_K, log_ratio_K, share_K = _ratios(log_ratio_N, trains_N, settings, paths)
    credit_K = credit_N[token_K] * share_K
    gain_K, clipped_K = bounded_gains(log_ratio_K, learner_logprobs_N[token_K], credit_K, settings)
    loss = -gain_K.sum()
    sums = {
        "clip_share": (clipped_K * share_K).sum(),
        "update_kl": k3(log_ratio_N.detach()).sum(),
        "truncated_share": (outside_N & trains_N).sum(),
        "sampling_kl": k3(drift_N).sum(),
        "sampling_gap": drift_N.abs().sum(),
        "sampling_gap_max": drift_N.abs().max() if len(drift_N) else drift_N.sum(),
    }
    if reference_logprobs_N is not None:
        kl_N = k3(_only(trains_N, reference_logprobs_N - learner_logprobs_N))
        loss = loss + settings.kl_coef * (token_weight_N * kl_N).sum()
        sums["reference_kl"] = kl_N.detach().sum()
    return loss, {"loss": loss.detach(), **sums}


def importance_weights(drift_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """From log old/sampling: the weight that corrects for draws by other weights or numerics; whether it was bounded.

    Out of its bounds, `truncate` takes the bound (truncated importance sampling), `mask` takes 0 (masked importance
    sampling; IcePop, where there is a lower bound too). A masked token keeps its place in the denominators.
    """
    weight_N = drift_N.exp()
    bounded_N = weight_N.clamp(settings.importance_low, settings.importance_high)
    outside_N = bounded_N != weight_N
    return (bounded_N if settings.importance == "truncate" else _only(~outside_N, weight_N)), outside_N


def bounded_gains(
    log_ratio_K: Tensor, learner_logprobs_K: Tensor, credit_K: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """What each term adds to the objective, and whether the bounds of its ratio changed it.

    Where credit is above 0, min(rA, clip(r)A) has only the upper bound; below 0, only the lower one. So it is the log
    of the ratio that is bounded: a ratio beyond is never computed, and cannot overflow into inf * 0.
    """
    low = math.log1p(-settings.clip_low) if settings.clip_low < 1 else -math.inf
    high = math.log1p(settings.clip_high)
    log_ratio_K = _only(credit_K != 0, log_ratio_K)
    if settings.objective == "cispo":
        log_ratio_K = log_ratio_K.detach()
        bounded_K = log_ratio_K.clamp(low, high)
        return bounded_K.exp() * credit_K * learner_logprobs_K, bounded_K != log_ratio_K
    bounded_K = torch.where(credit_K > 0, log_ratio_K.clamp(max=high), log_ratio_K.clamp(min=low))
    return bounded_K.exp() * credit_K, bounded_K != log_ratio_K


def path_log_ratios(log_ratio_N: Tensor, trains_N: Tensor, paths: Paths) -> Tensor:
    """(K,): for each token on a path, the mean log-ratio of the path's tokens that train, with its own gradient.

    GSPO-token (arXiv 2507.18071, section 4.3). Where a rollout has no fork and one advantage, loss and gradient are
    those of GSPO (section 4.1). The gradient of the mean itself would hand weight from the tokens of one path to those
    that it shares with others, which law 3 forbids.
    """
    own_K = log_ratio_N[paths.token_K]
    with torch.no_grad():
        trains_K = trains_N[paths.token_K].double()
        length_P = trains_K.new_zeros(paths.num_paths).index_add(0, paths.path_K, trains_K)
        total_P = trains_K.new_zeros(paths.num_paths).index_add(0, paths.path_K, own_K.double())
        mean_K = (total_P / length_P.clamp(min=1))[paths.path_K].to(own_K)
    return mean_K + (own_K - own_K.detach())


def _ratios(
    log_ratio_N: Tensor, trains_N: Tensor, settings: LossSettings, paths: Paths | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the loss: which token, its log-ratio, its share of the token's weight."""
    if settings.ratio == "token":
        return torch.arange(len(trains_N), device=trains_N.device), log_ratio_N, torch.ones_like(log_ratio_N)
    assert paths is not None, "a ratio of paths needs to know them"
    ones_K = torch.ones_like(paths.token_K, dtype=log_ratio_N.dtype)
    copies_N = torch.zeros_like(log_ratio_N).index_add(0, paths.token_K, ones_K)
    assert bool((copies_N[trains_N] > 0).all()), "a token that trains is on a path"
    return paths.token_K, path_log_ratios(log_ratio_N, trains_N, paths), 1 / copies_N[paths.token_K]


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, token_weight_N: Tensor, clip: float
) -> tuple[Tensor, Sums]:
    """Half the critic's weighted squared error; a value gains nothing by going further than `clip` from its old one.

        sum of w/2 max((v - R)^2, (old + clip(v - old, -clip, clip) - R)^2)

    A clip of 0 leaves it out. From PPO's code (arXiv 2005.12729, section 3); `clip` has the unit of the values.
    """
    trains_N = token_weight_N > 0
    error_N = _only(trains_N, values_N - returns_N).square()
    clipped_N = error_N
    if clip:
        clipped_N = _only(trains_N, old_values_N + (values_N - old_values_N).clamp(-clip, clip) - returns_N).square()
    loss = 0.5 * (token_weight_N * torch.maximum(error_N, clipped_N)).sum()
    return loss, {"value_loss": loss.detach(), "value_clip_share": (clipped_N > error_N).sum()}


def _only(where: Tensor, value: Tensor) -> Tensor:
    """`value` there, elsewhere 0 with gradient 0, whatever stands there: multiplying by 0 would make NaN of inf."""
    return value.where(where, value.new_zeros(()))


def sft_loss(learner_logprobs_N: Tensor, token_weight_N: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of a row: minus the weighted sum of the log-probs."""
    loss = -(token_weight_N * learner_logprobs_N).sum()
    return loss, {"loss": loss.detach()}


def k3(log_ratio_N: Tensor) -> Tensor:
    """Per token, p/q - 1 - log(p/q) from `log p/q`: never negative; its mean over draws from q estimates KL(q || p)."""
    return log_ratio_N.expm1() - log_ratio_N
