"""Measure whether a model computes on a tree what it computes on each of the tree's paths.

       ┌─ 4..8                     the rows of one small tree, with a fork below a fork
0..4 ──┤
       └─ 8..11 ──┬─ 11..14
                  └─ 14..17
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clawhpc.errors import UserError
from clawhpc.learner.attention import Segment, TreeLayout, use_tree_attention

SEGMENTS = (Segment(0, 4, 17), Segment(4, 8, 8), Segment(8, 11, 17), Segment(11, 14, 14), Segment(14, 17, 17))
PATHS = ((0, 1), (0, 2, 3), (0, 2, 4))
"""As indices of segments."""
ROUNDING = 1e-3
"""Log-probs in float32 that differ by less are the same; those of a model that is wrong differ by 0.05 and more."""


@torch.no_grad()
def check_exactness(model: PreTrainedModel, num_token_ids: int) -> None:
    """UserError unless the learner's computation on a tree gives the log-probs of the model itself on each path.

    The model's own are those of transformers' plain attention in evaluation mode, through the whole model; those of the
    learner are in training mode, through backbone and output head alone. The model comes back for trees and training.
    """
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(num_token_ids, (SEGMENTS[-1].stop,), generator=generator)
    gaps_T = (_on_tree(model, ids_T) - _on_paths(model, ids_T)).abs().amax(-1)
    # Behind a branch a model that takes rows for paths errs. The median: rounding may send a token to other experts.
    gap = gaps_T[SEGMENTS[2].start :].median().item()
    if not gap < ROUNDING:
        raise UserError(
            f"model {type(model).__name__} ({model.config.model_type}) cannot train on trees: on a small one its "
            f"log-probs differ by {gap:.3g} from those of the paths by themselves"
        )


def _on_paths(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    """(T, V) log-probs of what follows each row, each path by itself."""
    model.set_attn_implementation("eager")
    model.eval()
    of_row: dict[int, Tensor] = {}
    for rows in map(_rows, PATHS):
        logits_BTV = model(input_ids=ids_T[rows][None], use_cache=False).logits
        of_row.update(zip(rows, logits_BTV[0].log_softmax(-1), strict=True))
    use_tree_attention(model)
    model.train()
    return torch.stack([of_row[row] for row in range(len(ids_T))])


def _on_tree(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    """The same from one row, in which every token stands once."""
    positions_T = torch.empty_like(ids_T)
    for rows in map(_rows, PATHS):
        positions_T[rows] = torch.arange(len(rows))
    hidden_BTD = model.base_model(
        input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, tree_layout=TreeLayout(SEGMENTS)
    ).last_hidden_state
    logits_BTV: Tensor = model.get_output_embeddings()(hidden_BTD)
    return logits_BTV[0].log_softmax(-1)


def _rows(path: tuple[int, ...]) -> list[int]:
    return [row for step in path for row in range(SEGMENTS[step].start, SEGMENTS[step].stop)]
