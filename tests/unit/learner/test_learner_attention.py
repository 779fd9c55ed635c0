import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from clawhpc.errors import UserError
from clawhpc.learner import attention
from clawhpc.learner.attention import (
    Segment,
    TreeLayout,
    block_attention,
    block_mask,
    rectangle_attention,
    use_tree_attention,
)
from tests.fakes.learner_trees import context, draw, pack, plant, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""The compiler looks at it."""
CPU = torch.device("cpu")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")(test))


def masked_attention(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float) -> Tensor:
    """The definition."""
    mask = layout.mask(query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


def random_layout(seed: int, *, num_runs: int = 12, longest: int = 5) -> TreeLayout:
    """A forest of any shape in preorder, its runs not joined."""
    rng = random.Random(seed)
    segments: list[Segment] = []
    depths: list[int] = []
    start = 0
    for _ in range(rng.randint(1, num_runs)):
        depths.append(rng.randint(0, depths[-1] + 1) if depths else 0)
        stop = start + rng.randint(1, longest)
        segments.append(Segment(start, stop, stop))
        start = stop
    ends = [max(segment.stop for segment, _ in below(segments[at:], depths[at:])) for at in range(len(segments))]
    return TreeLayout(tuple(Segment(s.start, s.stop, end) for s, end in zip(segments, ends, strict=True)))


def below(segments: list[Segment], depths: list[int]) -> list[tuple[Segment, int]]:
    """The first of them, and those after it until one is no deeper."""
    stop = next((at for at, depth in enumerate(depths) if at and depth <= depths[0]), len(depths))
    return list(zip(segments[:stop], depths[:stop], strict=True))


def forks(turns: int, context: int, draw: int) -> TreeLayout:
    """A trunk from which a draw leaves after each turn, the trunk first."""
    length = turns * (context + draw)
    trunk = [Segment(at * context, (at + 1) * context, length - at * draw) for at in range(turns)]
    leaves = [Segment(at, at + draw, at + draw) for at in range(turns * context, length, draw)]
    return TreeLayout((*trunk, *leaves))


def length_of(layout: TreeLayout) -> int:
    return layout.segments[-1].stop


def tensors(
    layout: TreeLayout, dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, size: int = 8, device: str = "cpu"
) -> list[Tensor]:
    """Query, key, value, and a direction for the gradient."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    made = [
        torch.randn(1, count, length_of(layout), size, dtype=torch.float64, generator=generator) for count in counts
    ]
    return [tensor.to(device, dtype) for tensor in made]


def output_and_gradients(attend: Callable[..., Tensor], layout: TreeLayout, inputs: list[Tensor]) -> list[Tensor]:
    *leaves, direction = [tensor.clone() for tensor in inputs]
    for leaf in leaves:
        leaf.requires_grad_()
    output = attend(*leaves, layout, 0.3)
    output.backward(direction)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def largest_gap(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(left, right, strict=True))


def test_a_row_attends_to_its_ancestors_and_itself_only() -> None:
    tree = plant(context(1, 2, below=[draw(3), draw(4, 5)]))
    row = pack([tree])
    assert row.layout.mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_trees_of_one_row_without_common_context_do_not_see_each_other() -> None:
    row = pack([plant(context(1, below=[draw(2)])), plant(context(5, below=[draw(6)]))])
    mask = row.layout.mask()
    assert not mask[2:, :2].any()
    assert not mask[:2, 2:].any()


@given(st.integers(0, 2**32))
def test_rectangles_hold_every_entry_of_the_mask_once(seed: int) -> None:
    layout = random_layout(seed)
    count = torch.zeros(length_of(layout), length_of(layout), dtype=torch.int)
    for at in layout.rectangles:
        part = count[at.queries, at.keys]
        part += part.new_ones(part.shape).tril() if at.causal else 1
    assert torch.equal(count, layout.mask().int())


@given(st.integers(0, 2**32))
def test_causal_rectangles_come_first_and_hold_every_row_once(seed: int) -> None:
    layout = random_layout(seed)
    causal = [at.queries for at in layout.rectangles if at.causal]
    assert list(layout.rectangles[: len(causal)]) == [at for at in layout.rectangles if at.causal]
    assert sorted(row for rows in causal for row in range(rows.start, rows.stop)) == list(range(length_of(layout)))


def test_a_row_without_a_fork_is_one_rectangle() -> None:
    assert len(TreeLayout((Segment(0, 3, 9), Segment(3, 9, 9))).rectangles) == 1


def test_no_row_is_in_many_rectangles_however_often_the_harness_forks() -> None:
    layout = forks(turns=64, context=5, draw=3)
    of_row = torch.zeros(length_of(layout), dtype=torch.int)
    for at in layout.rectangles:
        of_row[at.queries] += 1
    assert of_row.max() <= 2 + math.log2(64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize(
    "layout", [random_layout(1), forks(5, 4, 3), TreeLayout.chain(9)], ids=["random", "forks", "chain"]
)
def test_rectangle_attention_and_its_gradients_equal_the_definition(
    layout: TreeLayout, dtype: torch.dtype, tolerance: float
) -> None:
    expected = output_and_gradients(masked_attention, layout, tensors(layout, torch.float64))
    got = output_and_gradients(rectangle_attention, layout, tensors(layout, dtype))
    assert {tensor.dtype for tensor in got} == {dtype}
    assert largest_gap(got, expected) < 4 * tolerance


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
def test_the_block_mask_is_that_of_the_dense_mask(length: int) -> None:
    for layout in (TreeLayout.chain(length), random_layout(length, num_runs=20, longest=max(1, length // 5))):
        ends = layout.end_of_key()
        rows = len(ends)
        expected = create_block_mask(
            lambda _, __, query, key: (key <= query) & (query < ends[key]),  # noqa: B023
            B=None,
            H=None,
            Q_LEN=rows,
            KV_LEN=rows,
            device="cpu",
        )
        ours = block_mask(layout, CPU)
        assert ours.shape == expected.shape
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
            assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_rows_of_all_lengths_and_layouts_share_two_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with gradient and one without. What is compiled is run as torch's plain code, for which a CPU will do."""
    compiled = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    kernel = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=count)
    monkeypatch.setattr(attention, "_flex_kernel", lambda: kernel)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    chains = [TreeLayout.chain(length) for length in (300, 128, 100, 1)]
    for layout in (*chains, forks(2, 64, 1)):
        inputs = tensors(layout, torch.float32)
        expected = output_and_gradients(masked_attention, layout, inputs)
        assert largest_gap(output_and_gradients(block_attention, layout, inputs), expected) < 1e-5
        with torch.no_grad():
            assert largest_gap([block_attention(*inputs[:3], layout, 0.3)], expected[:1]) < 1e-5
    assert len(compiled) == 2


def gradients_and_saved_bytes(model: PreTrainedModel, layout: TreeLayout) -> tuple[list[Tensor], int]:
    """Of the sum of the hidden states of a row."""
    saved: dict[int, int] = {}

    def pack_tensor(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.arange(length_of(layout), device=model.device)[None] % 40
    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        hidden = model.base_model(input_ids=ids, use_cache=False, tree_layout=layout).last_hidden_state
    hidden.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], sum(saved.values())


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_layers_that_are_computed_again_give_the_same_gradients_and_keep_less(kind: str) -> None:
    layout = forks(6, 20, 10)
    models = [tiny_model(kind), tiny_model(kind)]
    for model in models:
        use_tree_attention(model)
    models[1].gradient_checkpointing_enable({"use_reentrant": False})
    (expected, kept), (got, kept_less) = (gradients_and_saved_bytes(model, layout) for model in models)
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    assert kept_less < kept / 3


def gpu_layouts() -> list[TreeLayout]:
    chains = [TreeLayout.chain(length) for length in (1024, 100, 1)]
    return [forks(20, 100, 60), forks(7, 90, 11), *chains, random_layout(5, num_runs=40, longest=200)]


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (16, 8), (12, 2)])
def test_block_attention_and_its_gradients_equal_the_definition(
    dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int
) -> None:
    for layout in gpu_layouts():
        shape = dict(heads=heads, kv_heads=kv_heads, size=64, device="cuda")
        expected = output_and_gradients(masked_attention, layout, tensors(layout, torch.float64, **shape))
        got = output_and_gradients(block_attention, layout, tensors(layout, dtype, **shape))
        for left, right in zip(got, expected, strict=True):
            assert (left.double() - right).abs().max() < tolerance * right.abs().max()


@needs_gpu
def test_block_attention_is_not_compiled_again_for_rows_of_other_lengths() -> None:
    torch._dynamo.reset()
    first, *others = gpu_layouts()
    output_and_gradients(block_attention, first, tensors(first, torch.bfloat16, size=64, device="cuda"))
    with torch.compiler.set_stance("fail_on_recompile"):
        for layout in others:
            output_and_gradients(block_attention, layout, tensors(layout, torch.bfloat16, size=64, device="cuda"))


@needs_gpu
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed_again"])
def test_a_model_on_a_gpu_in_bf16_has_the_gradients_of_the_cpu(again: bool) -> None:
    layout = forks(20, 20, 10)
    on_cpu, on_gpu = tiny_model(), tiny_model().cuda().bfloat16()
    for model in (on_cpu, on_gpu):
        use_tree_attention(model)
    if again:
        on_gpu.gradient_checkpointing_enable({"use_reentrant": False})
    expected, _ = gradients_and_saved_bytes(on_cpu, layout)
    got, _ = gradients_and_saved_bytes(on_gpu, layout)
    for left, right in zip(got, expected, strict=True):
        assert (left.cpu() - right).norm() < 0.05 * right.norm()


def test_a_windowed_model_is_refused_by_name_with_the_reason() -> None:
    shape = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    windowed = Qwen3Config(**shape, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM \(qwen3\).*window"):
        use_tree_attention(Qwen3ForCausalLM(windowed))
    with pytest.raises(UserError, match=r"MistralForCausalLM \(mistral\).*window"):
        use_tree_attention(MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=1, sliding_window=4)))


def test_a_recurrent_model_is_refused_by_name_with_the_reason() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    config = Qwen3NextConfig(
        **shape,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    with pytest.raises(UserError, match=r"qwen3_next.*recurrent"):
        use_tree_attention(Qwen3NextForCausalLM(config))


def test_attention_dropout_is_refused() -> None:
    shape = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(UserError, match="attention_dropout"):
        use_tree_attention(Qwen3ForCausalLM(Qwen3Config(**shape, attention_dropout=0.1)))
