"""The gap between log-probs of each harness is that of its own tokens, those that train."""

from __future__ import annotations

import pytest
import torch

from clawhpc.learner.batch import Draws
from clawhpc.learner.by_harness import add_gaps
from clawhpc.learner.means import StepMeans

DRAWS = Draws(
    sampling_logprobs=torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]),
    old_logprobs=torch.tensor([-1.5, -1.25, -0.5, -3.0, -9.0]),
    token_weight=torch.tensor([0.5, 0.5, 0.25, 0.25, 0.0]),
    advantages=torch.zeros(5),
    harness=torch.tensor([0, 0, 1, 1, 1]),
)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[0, 2, 4], [1, 3]], [[0, 1], [2, 3, 4], []]], ids=str)
def test_each_harness_has_the_gap_of_its_own_tokens_however_ranks_share_them(parts: list[list[int]]) -> None:
    total = StepMeans()
    for part in parts:
        of_rank = StepMeans()
        add_gaps(of_rank, DRAWS, torch.tensor(part, dtype=torch.long), ("pi", "codex"))
        total.join(of_rank)
    means = total.means()
    assert means["pi/sampling_gap"] == pytest.approx((0.5 + 0.25) / 2)
    assert means["codex/sampling_gap"] == pytest.approx((0.5 + 2.0) / 2)
    assert (means["pi/sampling_gap_max"], means["codex/sampling_gap_max"]) == (0.5, 2.0)
