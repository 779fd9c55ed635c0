"""Exact attention over a packed forest: every token stands once and attends to its ancestors and itself.

A row holds the tokens of a forest in preorder, so what is below a segment is the contiguous range of rows after it.
That gives both kernels their structure:

- on CPU the mask is cut into rectangles, each one call of torch's flash kernel, with nothing computed that is masked.
  Partial results are combined by their log-sum-exp, and the backward pass runs rectangle by rectangle with the combined
  output and log-sum-exp, as in ring attention (arXiv 2310.01889);
- on a GPU it is FlexAttention (arXiv 2412.05496) with a block mask that follows from the layout without a (T, T) mask.

Shapes: B rows (1), H heads, K key-value heads, T tokens, D head dimension, N blocks of a block mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from clawhpc.errors import UserError
from clawhpc.learner.models import unfit_reason

TREE_ATTENTION = "clawhpc_tree"
"""Name in transformers' attention interface."""
BLOCK = 128
"""Rows of a block on a GPU; the kernel's own default."""


@dataclass(frozen=True)
class Segment:
    """A run of rows without a fork inside."""

    start: int
    stop: int
    """Row after its last token."""
    end: int
    """Row after the last token below it; `stop` for a leaf."""


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Who attends to whom: row i to row j when `j <= i < end` of the segment of j.

    Compared by identity: all layers of a row ask with the same layout for what follows from it.
    """

    segments: tuple[Segment, ...]
    """In preorder, covering the row without gaps."""

    @classmethod
    def chain(cls, length: int) -> TreeLayout:
        """One plain sequence: causal attention."""
        return cls((Segment(0, length, length),))

    def end_of_key(self, device: torch.device | str = "cpu") -> Tensor:
        """(T,) int32: the row after the last one that attends to each row."""
        lengths = torch.tensor([segment.stop - segment.start for segment in self.segments])
        ends = torch.tensor([segment.end for segment in self.segments], dtype=torch.int32)
        return ends.repeat_interleave(lengths).to(device)

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """(T, T) bool: True where the query (row) attends to the key (column). The definition; no kernel needs it."""
        end_of_key = self.end_of_key(device)
        rows = torch.arange(len(end_of_key), device=device)
        return (rows[None, :] <= rows[:, None]) & (rows[:, None] < end_of_key[None, :])

    @functools.cached_property
    def in_blocks(self) -> TreeLayout:
        """The same with rows of no tree behind it, up to a whole number of blocks, which is two or more.

        A tensor with one of anything, and a length that is no multiple, would each have a kernel compiled for itself.
        """
        length = self.segments[-1].stop
        stop = max(2, -(-length // BLOCK)) * BLOCK
        return self if stop == length else TreeLayout((*self.segments, Segment(length, stop, stop)))

    @functools.cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """The mask in parts that do not overlap; the causal ones come first, and hold every row once."""
        chains = _chains(self.segments)
        causal = (Rectangle(slice(chain.start, chain.stop), slice(chain.start, chain.stop), True) for chain in chains)
        return (*causal, *(rectangle for chain in chains for rectangle in _staircase(chain)))


@dataclass(frozen=True)
class Rectangle:
    """Queries that attend to keys: all to all, or, where both are the same rows, causally."""

    queries: slice
    keys: slice
    causal: bool


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
    attend = rectangle_attention if query_BHTD.device.type == "cpu" else block_attention
    return attend(query_BHTD, key_BKTD, value_BKTD, tree_layout, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)


# ---- on a GPU


def block_attention(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """FlexAttention under the block mask of the layout."""
    grouped = query_BHTD.shape[1] != key_BKTD.shape[1]
    length, mask = query_BHTD.shape[2], block_mask(layout.in_blocks, query_BHTD.device)
    room = (0, 0, 0, mask.seq_lengths[0] - length)
    query_BHTD, key_BKTD, value_BKTD = (
        torch.nn.functional.pad(tensor, room) for tensor in (query_BHTD, key_BKTD, value_BKTD)
    )
    out_BHTD = _flex_kernel()(query_BHTD, key_BKTD, value_BKTD, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out_BHTD[:, :, :length]


@functools.cache
def _flex_kernel() -> Callable[..., Tensor]:
    """Compiled for rows of any length and layout at once, with gradient and without.

    With `fullgraph`, a kernel that is compiled again too often is an error. Without, torch would go on with an
    implementation that holds all T² scores. No `score_mod`: with one, the gradient is NaN in rows of some lengths
    (pytorch issue 153799).
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.lru_cache(maxsize=1)  # every layer of one row asks for the same
def block_mask(layout: TreeLayout, device: torch.device) -> BlockMask:
    """What `create_block_mask` gives for the mask of the layout, without the T² entries from which that counts.

    A block of keys is seen by a later block of queries in part if its last end is beyond their first row, and
    in full if its first end is beyond their last row. The blocks on the diagonal are seen in part.
    """
    end_of_key = layout.end_of_key(device)
    length = len(end_of_key)
    num_blocks = -(-length // BLOCK)
    ends_NB = torch.nn.functional.pad(end_of_key, (0, num_blocks * BLOCK - length)).view(num_blocks, BLOCK)
    block_N = torch.arange(num_blocks, device=device)
    first_row_N = block_N * BLOCK
    below_NN = block_N[:, None] > block_N[None, :]
    full_NN = below_NN & (first_row_N[:, None] + BLOCK <= ends_NB.amin(1)[None, :])
    seen_NN = below_NN & (first_row_N[:, None] < ends_NB.amax(1)[None, :])
    part_NN = (seen_NN & ~full_NN) | torch.eye(num_blocks, dtype=torch.bool, device=device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_of_key[key])

    return BlockMask.from_kv_blocks(
        *_listed(part_NN), *_listed(full_NN), BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(length, length)
    )


def _listed(blocks_NN: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys, and which come first in the list of all."""
    counts_N = blocks_NN.sum(-1, dtype=torch.int32)
    order_NN = blocks_NN.byte().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts_N[None, None], order_NN[None, None]


# ---- on CPU


def rectangle_attention(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """One flash kernel for each rectangle of the layout."""
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    if groups > 1:
        key_BKTD, value_BKTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BKTD, value_BKTD))
    return _RectangleAttention.apply(query_BHTD, key_BKTD, value_BKTD, layout.rectangles, scale)


@dataclass
class _Chain:
    """A segment, its first child, that one's first child, and so on: their rows follow one another."""

    start: int
    stop: int
    forks: list[_Fork] = field(default_factory=list)
    """Deepest first, so that their queries follow one another."""


@dataclass(frozen=True)
class _Fork:
    """All children of a segment but the first: rows that see the chain up to there."""

    keys_stop: int
    start: int
    end: int


def _chains(segments: Sequence[Segment]) -> list[_Chain]:
    chains: list[_Chain] = []
    above: list[tuple[Segment, _Chain]] = []
    for segment in segments:
        while above and above[-1][0].end <= segment.start:
            above.pop()
        if above and above[-1][0].stop == segment.start:
            chain = above[-1][1]
            chain.stop = segment.stop
        else:
            if above:
                _add_fork(*above[-1], segment.start)
            chain = _Chain(segment.start, segment.stop)
            chains.append(chain)
        above.append((segment, chain))
    return chains


def _add_fork(parent: Segment, chain: _Chain, start: int) -> None:
    """At the second child of `parent`; those after it are of the same fork."""
    if not chain.forks or chain.forks[-1].keys_stop != parent.stop:
        chain.forks.append(_Fork(parent.stop, start, parent.end))


def _staircase(chain: _Chain) -> Iterator[Rectangle]:
    """What the rows below the forks of a chain see of it, the largest rectangle first.

    The deeper the fork, the more they see, and the earlier they stand: a staircase. Cut like this, no row is in many
    rectangles and few of them are narrow, which would cost more in combining results than in computing them.
    """
    todo = [(chain.start, chain.forks)]
    while todo:
        first_key, forks = todo.pop()
        if not forks:
            continue
        areas = [(fork.end - forks[0].start) * (fork.keys_stop - first_key) for fork in forks]
        at = areas.index(max(areas))
        step = forks[at]
        yield Rectangle(slice(forks[0].start, step.end), slice(first_key, step.keys_stop), False)
        todo += [(step.keys_stop, forks[:at]), (first_key, forks[at + 1 :])]


class _RectangleAttention(torch.autograd.Function):
    """Sums are kept in fp32 or wider. A row without a fork is one call, and nothing is combined or copied."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: Tensor,
        key_BHTD: Tensor,
        value_BHTD: Tensor,
        rectangles: tuple[Rectangle, ...],
        scale: float,
    ) -> Tensor:
        out_BHTD, lse_BHT = _attend_all(query_BHTD, key_BHTD, value_BHTD, rectangles, scale)
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD, out_BHTD, lse_BHT)
        ctx.rectangles, ctx.scale = rectangles, scale
        return out_BHTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BHTD, value_BHTD, out_BHTD, lse_BHT = ctx.saved_tensors

        def of_rectangle(at: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[0][:, :, at.queries],
                query_BHTD[:, :, at.queries],
                key_BHTD[:, :, at.keys],
                value_BHTD[:, :, at.keys],
                out_BHTD[:, :, at.queries],
                lse_BHT[:, :, at.queries],
                0.0,
                at.causal,
                scale=ctx.scale,
            )

        if len(ctx.rectangles) == 1:
            return *of_rectangle(ctx.rectangles[0]), None, None
        totals = [_room(query_BHTD, lse_BHT.dtype) for _ in range(3)]
        for at in ctx.rectangles:
            for total, rows, part in zip(totals, (at.queries, at.keys, at.keys), of_rectangle(at), strict=True):
                if at.causal:
                    total[:, :, rows] = part
                else:
                    total[:, :, rows] += part
        return *(total.to(query_BHTD.dtype) for total in totals), None, None


def _attend_all(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, rectangles: Sequence[Rectangle], scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""

    def of_rectangle(at: Rectangle) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHTD[:, :, at.queries],
            key_BHTD[:, :, at.keys],
            value_BHTD[:, :, at.keys],
            0.0,
            at.causal,
            scale=scale,
        )

    if len(rectangles) == 1:
        return of_rectangle(rectangles[0])
    wide = torch.promote_types(query_BHTD.dtype, torch.float32)
    out_BHTD, lse_BHT = _room(query_BHTD, wide), _room(query_BHTD[..., :1], wide)[..., 0]
    for at in rectangles:
        out, lse = of_rectangle(at)
        if at.causal:
            out_BHTD[:, :, at.queries], lse_BHT[:, :, at.queries] = out, lse
        else:
            _merge_partial(out_BHTD[:, :, at.queries], lse_BHT[:, :, at.queries], out, lse)
    return out_BHTD.to(query_BHTD.dtype), lse_BHT


def _room(like_BHTD: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, of that shape, in memory as (B, T, H, D), as the layers around it want it."""
    batch, heads, length, size = like_BHTD.shape
    return like_BHTD.new_empty((batch, length, heads, size), dtype=dtype).transpose(1, 2)


def _merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Fold attention over further keys into `out` and `lse`, in place."""
    merged = torch.logaddexp(lse, new_lse)
    out.mul_((lse - merged).exp_()[..., None]).addcmul_((new_lse - merged).exp_()[..., None], new_out)
    lse.copy_(merged)
