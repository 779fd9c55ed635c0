"""Exact attention over a packed forest: every token stands once and attends to its ancestors and itself.

A row holds the tokens of a forest in preorder, so what is below a segment is the contiguous range of rows after it.
Seen from the keys, then, attention is rectangular: the keys of `[start, stop)` meet the queries of `[start, end)`,
causally in their own rows and fully below. Partial results are combined by their log-sum-exp, and the backward pass
runs block by block with the combined output and log-sum-exp, as in ring attention (arXiv 2310.01889).

Shapes: B rows (1), H heads, K key-value heads, T tokens, D head dimension.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from clawhpc.errors import UserError
from clawhpc.learner.models import unfit_reason

TREE_ATTENTION = "clawhpc_tree"
"""Name in transformers' attention interface."""


@dataclass(frozen=True)
class Segment:
    """A run of rows without a fork inside."""

    start: int
    stop: int
    """Row after its last token."""
    end: int
    """Row after the last token below it; `stop` for a leaf."""


@dataclass(frozen=True)
class TreeLayout:
    """Who attends to whom: row i to row j when `j <= i < end` of the segment of j."""

    segments: tuple[Segment, ...]
    """In preorder, covering the row without gaps."""

    @classmethod
    def chain(cls, length: int) -> TreeLayout:
        """One plain sequence: causal attention."""
        return cls((Segment(0, length, length),))

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """(T, T) bool: True where the query (row) attends to the key (column)."""
        lengths = torch.tensor([segment.stop - segment.start for segment in self.segments], device=device)
        ends = torch.tensor([segment.end for segment in self.segments], device=device)
        end_of_key = ends.repeat_interleave(lengths)
        rows = torch.arange(len(end_of_key), device=device)
        return (rows[None, :] <= rows[:, None]) & (rows[:, None] < end_of_key[None, :])


def use_tree_attention(model: PreTrainedModel) -> None:
    """Make `model` read `tree_layout` in its forward call. UserError for a model that cannot be exact on trees."""
    reason = unfit_reason(model)
    if reason:
        raise UserError(f"model {type(model).__name__} ({model.config.model_type}) cannot train on trees: {reason}")
    model.set_attn_implementation(TREE_ATTENTION)


def tree_attention_forward(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree_layout: TreeLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: returns (B, T, H, D). Query and key take the dtype of the value."""
    query_BHTD, key_BKTD = query_BHTD.to(value_BKTD.dtype), key_BKTD.to(value_BKTD.dtype)
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    if groups > 1:
        key_BKTD, value_BKTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BKTD, value_BKTD))
    attend = _blockwise_attention if query_BHTD.device.type == "cpu" else masked_attention
    return attend(query_BHTD, key_BKTD, value_BKTD, tree_layout, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)


def masked_attention(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """The definition: attention under the (T, T) mask. Runs on every device, in memory T² per row."""
    mask = _mask_of_row(layout, query_BHTD.device)
    return F.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, attn_mask=mask, scale=scale)


@functools.lru_cache(maxsize=1)  # every layer of one row asks for the same mask
def _mask_of_row(layout: TreeLayout, device: torch.device) -> Tensor:
    return layout.mask(device)


def _blockwise_attention(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """`masked_attention` on CPU without the mask: one flash kernel per segment, nothing computed that is masked."""
    return _BlockwiseAttention.apply(query_BHTD, key_BHTD, value_BHTD, layout, scale)


class _BlockwiseAttention(torch.autograd.Function):
    """The kernel's causal mask is aligned at the top left: queries after the keys' own rows see all of the keys."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, layout: TreeLayout, scale: float
    ) -> Tensor:
        wide = torch.promote_types(query_BHTD.dtype, torch.float32)
        out_BHTD = torch.zeros_like(query_BHTD, dtype=wide)
        lse_BHT = torch.full(query_BHTD.shape[:3], -torch.inf, dtype=wide)
        for segment in layout.segments:
            keys, queries = slice(segment.start, segment.stop), slice(segment.start, segment.end)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_BHTD[:, :, queries], key_BHTD[:, :, keys], value_BHTD[:, :, keys], 0.0, True, scale=scale
            )
            _merge_partial(out_BHTD[:, :, queries], lse_BHT[:, :, queries], out, lse)
        out_BHTD = out_BHTD.to(query_BHTD.dtype)
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD, out_BHTD, lse_BHT)
        ctx.layout, ctx.scale = layout, scale
        return out_BHTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BHTD, value_BHTD, out_BHTD, lse_BHT = ctx.saved_tensors
        grad_query = torch.zeros_like(query_BHTD, dtype=lse_BHT.dtype)
        grad_key, grad_value = torch.empty_like(key_BHTD), torch.empty_like(value_BHTD)
        for segment in ctx.layout.segments:
            keys, queries = slice(segment.start, segment.stop), slice(segment.start, segment.end)
            of_query, grad_key[:, :, keys], grad_value[:, :, keys] = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grads[0][:, :, queries],
                    query_BHTD[:, :, queries],
                    key_BHTD[:, :, keys],
                    value_BHTD[:, :, keys],
                    out_BHTD[:, :, queries],
                    lse_BHT[:, :, queries],
                    0.0,
                    True,
                    scale=ctx.scale,
                )
            )
            grad_query[:, :, queries] += of_query
        return grad_query.to(query_BHTD.dtype), grad_key, grad_value, None, None


def _merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Fold attention over further keys into `out` and `lse`, in place."""
    merged = torch.logaddexp(lse, new_lse)
    out.mul_((lse - merged).exp_()[..., None]).addcmul_((new_lse - merged).exp_()[..., None], new_out)
    lse.copy_(merged)
