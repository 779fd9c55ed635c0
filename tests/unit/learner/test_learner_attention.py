import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from clawhpc.errors import UserError
from clawhpc.learner.attention import TreeLayout, _blockwise_attention, masked_attention, use_tree_attention
from tests.fakes.learner_trees import context, draw, pack, plant, random_tree


def layout_of_trees(num: int, depth: int) -> TreeLayout:
    return pack([random_tree(seed, depth=depth) for seed in range(num)]).layout


def length_of(layout: TreeLayout) -> int:
    return layout.segments[-1].stop


def test_a_row_attends_to_its_ancestors_and_itself_only() -> None:
    tree = plant(context(1, 2, below=[draw(3), draw(4, 5)]))
    row = pack([tree])
    assert row.layout.mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_trees_of_one_row_without_common_context_do_not_see_each_other() -> None:
    row = pack([plant(context(1, below=[draw(2)])), plant(context(5, below=[draw(6)]))])
    mask = row.layout.mask()
    assert not mask[2:, :2].any()
    assert not mask[:2, 2:].any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_blockwise_attention_and_its_gradients_equal_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    layout = layout_of_trees(3, depth=4)
    shape = (1, 2, length_of(layout), 8)
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ours = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    direction = torch.randn(shape, dtype=torch.float64)
    expected = masked_attention(*exact, layout, 0.3)
    got = _blockwise_attention(*ours, layout, 0.3)
    expected.backward(direction)
    got.backward(direction.to(dtype))
    assert torch.allclose(got.double(), expected, atol=tolerance)
    for left, right in zip(ours, exact, strict=True):
        assert torch.allclose(left.grad.double(), right.grad, atol=4 * tolerance)


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
