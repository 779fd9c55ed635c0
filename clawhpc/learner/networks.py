"""The policy and the critic as networks over packed rows.

Each computes everything from a row to the numbers of its trained tokens in one forward call, so that one shard of the
whole can be gathered around it (FSDP).

Shapes: B rows (1), T tokens of the row, N tokens of the row that train, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.learner.batch import TreeBatch
from clawhpc.learner.losses import chunked_logprobs
from clawhpc.learner.policy import empty_policy, load_policy
from clawhpc.learner.settings import LearnerSettings


class RowOutput(NamedTuple):
    """What the policy says of a row's trained tokens; (N,) tensors in fp32 or wider. A tuple: FSDP looks into those."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """Without gradient."""
    values_N: Tensor | None
    """In units of normalised return; None for a policy without a value head."""


class TreePolicy(nn.Module):
    """A causal language model over rows, with a value head beside its output head where the critic shares it."""

    def __init__(self, model: PreTrainedModel, *, num_token_ids: int, logit_chunk: int, with_values: bool) -> None:
        """`num_token_ids`: ids that can be drawn; the output head may have more."""
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.config.hidden_size) if with_values else None
        self._num_token_ids = num_token_ids
        self._logit_chunk = logit_chunk

    def forward(self, row: TreeBatch) -> RowOutput:
        """Each trained token is predicted from the token before it on its path.

        A token before a fork is read once for every child's first token. Hidden states that predict no trained token
        do not reach a head.
        """
        hidden_ND = predicting_states(self.model.base_model, row)
        logprobs_N, entropy_N = chunked_logprobs(
            hidden_ND,
            row.targets_N,
            self.model.get_output_embeddings(),
            temperature=row.temperature,
            num_token_ids=self._num_token_ids,
            chunk=self._logit_chunk,
        )
        values_N = None if self.value_head is None else self.value_head(hidden_ND)
        return RowOutput(logprobs_N=logprobs_N, entropy_N=entropy_N, values_N=values_N)


class TreeCritic(nn.Module):
    """A critic with a backbone of its own."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        """`backbone`: a model without output head."""
        super().__init__()
        self.backbone = backbone
        self.value_head = ValueHead(backbone.config.hidden_size)

    def forward(self, row: TreeBatch) -> Tensor:
        """(N,): the value of the state in which each trained token was drawn, in units of normalised return."""
        return self.value_head(predicting_states(self.backbone, row))


class ValueHead(nn.Module):
    """From a hidden state to a value; says 0, the mean of the returns, until it has learned.

    It has no bias: of normalised returns its first gradient would be rounding alone, which AdamW makes a whole step of.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """(N,) in fp32 or wider, also where all else computes in bf16, whose 8 bits are too few for a return."""
        values_N = self.linear(hidden_ND.to(self.linear.weight.dtype))[:, 0]
        return values_N.clone()  # FSDP hands on no view of another tensor


def predicting_states(backbone: nn.Module, row: TreeBatch) -> Tensor:
    """(N, D): the last hidden states from which the row's trained tokens are predicted."""
    hidden_BTD = backbone(
        input_ids=row.input_ids_BT, position_ids=row.positions_BT, use_cache=False, tree_layout=row.layout
    ).last_hidden_state
    return hidden_BTD[0, row.predecessor_N]


def load_tree_policy(
    folder: Path, settings: LearnerSettings, *, with_values: bool = False, empty: bool = False
) -> TreePolicy:
    """The policy in a folder, as it trains; `empty`: without its weights, on the meta device."""
    model = _load_model(folder, settings, empty=empty)
    num_token_ids = count_token_ids(folder)
    return TreePolicy(model, num_token_ids=num_token_ids, logit_chunk=settings.logit_chunk, with_values=with_values)


def load_tree_critic(folder: Path, settings: LearnerSettings, *, empty: bool = False) -> TreeCritic:
    """A critic that has learned nothing yet, on a backbone that begins as that of the policy in `folder`.

    `empty`: without its weights, on the meta device.
    """
    backbone = _load_model(folder, settings, empty=empty).base_model
    assert isinstance(backbone, PreTrainedModel), "a model without its output head is a model"
    return TreeCritic(backbone)


def _load_model(folder: Path, settings: LearnerSettings, *, empty: bool) -> PreTrainedModel:
    model = empty_policy(folder) if empty else load_policy(folder)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
