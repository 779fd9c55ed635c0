"""Which families of models can train on trees: those that cannot are refused by name, those that can are measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from clawhpc.errors import UserError
from clawhpc.learner.attention import use_tree_attention
from clawhpc.learner.exactness import check_exactness
from clawhpc.learner.policy import describe_model
from clawhpc.learner.tokenizer import train_tokenizer

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
}
"""What most families call it; each takes the names that it knows."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Two small layers in which every weight counts: norms, biases and sinks are not left as they begin."""
    known = AutoConfig.for_model(family)
    shape = {name: value for name, value in SHAPE.items() if hasattr(known, name) or name == "vocab_size"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(shape | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


EXACT: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": NO_DROPOUT,
    "gpt_neox": {},
    "granite": {"logits_scaling": 1.0},
    "granitemoe": {"logits_scaling": 1.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "olmoe": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {},
}


@pytest.mark.parametrize("family", EXACT)
def test_a_family_that_is_accepted_computes_on_trees_what_it_computes_on_paths(family: str) -> None:
    model = tiny(family, **EXACT[family])
    use_tree_attention(model)
    check_exactness(model, VOCAB)
    assert model.training
    assert model.config._attn_implementation == "clawhpc_tree"


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", SOME_WINDOWS, "windowed"),
    ("qwen3", SOME_WINDOWS, "windowed"),
    ("mistral", {"sliding_window": 4}, "windowed"),
    ("mixtral", {"sliding_window": 4}, "windowed"),
    ("phi3", {"sliding_window": 4}, "windowed"),
    ("gemma2", {}, "windowed"),
    ("gemma3_text", {}, "windowed"),
    ("cohere2", {}, "windowed"),
    ("exaone4", {}, "windowed"),
    ("olmo3", {}, "windowed"),
    ("gpt_oss", {}, "windowed"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "sinks"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "attn_logit_softcapping"),
    ("qwen3_next", {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}, "recurrent"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "recurrent"),
    ("jamba", {"mamba_d_state": 8, "mamba_dt_rank": 4}, "recurrent"),
    ("mamba", {"state_size": 8}, "recurrent"),
    ("bloom", {}, "attention interface"),
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "attention interface"),
    ("gptj", {"rotary_dim": 8, **NO_DROPOUT}, "attention interface"),
    ("codegen", {"rotary_dim": 8, **NO_DROPOUT}, "attention interface"),
    ("qwen3", {"attention_dropout": 0.1}, "attention_dropout is not 0"),
    ("gpt2", {**NO_DROPOUT, "resid_pdrop": 0.1}, "resid_pdrop is not 0"),
    ("mixtral", {"sliding_window": None, "router_jitter_noise": 0.1}, "router_jitter_noise is not 0"),
    ("cohere", {"logit_scale": 0.0625}, "changes its logits"),
    ("granite", {"logits_scaling": 8.0}, "changes its logits"),
    ("nanochat", {}, "changes its logits"),
    ("llama", {"rope_parameters": DYNAMIC_ROPE}, "rope_type dynamic"),
    ("phi3", {"sliding_window": None, "rope_parameters": LONG_ROPE}, "rope_type longrope"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_a_family_that_cannot_be_exact_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    model = tiny(family, **changes)
    with pytest.raises(
        UserError, match=rf"model {type(model).__name__} \({family}\) cannot train on trees: .*{reason}"
    ):
        use_tree_attention(model)


UNFORESEEN: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},  # a deeper head
    "doge": {"keep_window_size": 4},  # a mask that depends on the values
}


@pytest.mark.parametrize("family", UNFORESEEN)
def test_what_no_name_tells_is_measured(family: str) -> None:
    model = tiny(family, **UNFORESEEN[family])
    use_tree_attention(model)
    with pytest.raises(UserError, match=rf"\({family}\) cannot train on trees: on a small one its log-probs differ by"):
        check_exactness(model, VOCAB)


def test_a_model_from_elsewhere_is_measured_before_it_trains(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["write kiwi"] * 3, tmp_path, vocab_size=280)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    tiny("doge", **UNFORESEEN["doge"], vocab_size=vocab_size).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"\(doge\) cannot train on trees"):
        describe_model(tmp_path, renderer="qwen3", thinking=False)


def test_a_model_that_leaves_the_layout_out_is_refused_in_one_line(tmp_path: Path) -> None:
    """Nemotron does not hand the arguments of its forward call on to its layers."""
    tokenizer = train_tokenizer(["write kiwi"] * 3, tmp_path, vocab_size=280)
    tiny("nemotron", vocab_size=tokenizer.get_vocab_size(with_added_tokens=True)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"NemotronForCausalLM \(nemotron\) cannot train on trees: .*tree_layout"):
        describe_model(tmp_path, renderer="qwen3", thinking=False)
