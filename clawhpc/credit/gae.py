"""Generalised advantage estimation along the conversations of one rollout (arXiv 1506.02438, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}        the advantage of token t
    R_t     = A_t + V_t                             its return, TD(lambda): what V_t should have been

V_t is the critic's value of the state in which token t was drawn. Time counts sampled tokens alone: after the last
token of a reply comes the first of the turn that continues it, whatever context stands between. r is the rollout's
reward at the end of a conversation, and 0 before.

Where a conversation goes on in several ways, what comes after is a mean over them:

    path_gae   each counts as often as paths run through it
    tree_gae   each counts the same, however often it forks further on

A_t is linear in rewards and values. So the first is the mean, over the paths through a token, of what GAE on each path
by itself gives it (and the return likewise), although no token is looked at twice. The second is the expectation over
a walk that takes each continuation with the same chance. On a conversation without forks both are plain GAE.

Shapes: M tokens drawn in the tree, in the order of `CallTree.draws`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clawhpc.tree.conversation import Turn

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """What the tokens of one tree are worth."""

    advantages_M: Floats
    returns_M: Floats


class _Ahead(NamedTuple):
    """What comes after a token: the next token's value and advantage, or the reward of an end; or means of those."""

    reward: float
    value: float
    advantage: float


def path_gae(turns: Sequence[Turn], values_M: ArrayLike, reward: float, *, gamma: float, gae_lambda: float) -> Estimate:
    """GAE on each path by itself; a token that paths share has the mean over them of advantage and of return."""
    num_paths = [0] * len(turns)
    for index, turn in _backwards(turns):
        num_paths[index] = num_paths[index] or 1
        if turn.parent is not None:
            num_paths[turn.parent] += num_paths[index]
    return _estimate(turns, values_M, reward, num_paths, gamma, gae_lambda)


def tree_gae(turns: Sequence[Turn], values_M: ArrayLike, reward: float, *, gamma: float, gae_lambda: float) -> Estimate:
    """GAE on the tree: what comes after a fork is the mean over its continuations."""
    return _estimate(turns, values_M, reward, [1] * len(turns), gamma, gae_lambda)


def _estimate(
    turns: Sequence[Turn],
    values_M: ArrayLike,
    reward: float,
    weights: Sequence[int],
    gamma: float,
    gae_lambda: float,
) -> Estimate:
    """From the ends back; `weights` say how much each turn counts among the continuations of the one before it."""
    values = np.asarray(values_M, dtype=np.float64)
    assert values.shape == (sum(turn.stop - turn.start for turn in turns),), "one value for each token that was drawn"
    advantages = np.zeros_like(values)
    continued: list[list[tuple[int, _Ahead]]] = [[] for _ in turns]
    for index, turn in _backwards(turns):
        ahead = _mean(continued[index]) if continued[index] else _Ahead(reward, 0.0, 0.0)
        if turn.start < turn.stop:  # else what comes after it comes after the one before it
            at = slice(turn.start, turn.stop)
            advantages[at] = _along(values[at], ahead, gamma, gae_lambda)
            ahead = _Ahead(0.0, values[turn.start].item(), advantages[turn.start].item())
        if turn.parent is not None:
            continued[turn.parent].append((weights[index], ahead))
    return Estimate(advantages, advantages + values)


def _backwards(turns: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
    """Each turn after all that continue it."""
    return ((index, turns[index]) for index in reversed(range(len(turns))))


def _mean(continuations: Sequence[tuple[int, _Ahead]]) -> _Ahead:
    weights, ahead = zip(*continuations, strict=True)
    return _Ahead(*np.average(ahead, axis=0, weights=weights).tolist())


def _along(values: Floats, ahead: _Ahead, gamma: float, gae_lambda: float) -> Floats:
    """The advantages of the tokens of one turn."""
    deltas = gamma * np.append(values[1:], ahead.value) - values
    deltas[-1] += ahead.reward
    decay = gamma * gae_lambda
    backwards = accumulate(deltas[::-1].tolist(), lambda later, delta: delta + decay * later, initial=ahead.advantage)
    return np.array(list(backwards)[:0:-1])
