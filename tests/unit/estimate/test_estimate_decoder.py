"""Parameters are counted as the models have them: as they are published, and as transformers builds them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from clawhpc.errors import UserError
from clawhpc.estimate.decoder import KNOWN, Decoder, find_decoder, made_decoder, read_decoder
from clawhpc.learner.settings import PolicySettings
from clawhpc.serve.checks import read_shape

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
}
"""What the hub says of their weights."""


def config_of(decoder: Decoder) -> PreTrainedConfig:
    shape: dict[str, Any] = dict(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.ffn_size,
        num_hidden_layers=decoder.num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        max_position_embeddings=decoder.num_positions,
        tie_word_embeddings=decoder.tied,
    )
    if not decoder.num_experts:
        return Qwen3Config(**shape) if decoder.qk_norm else LlamaConfig(**shape)
    return Qwen3MoeConfig(
        **shape,
        num_experts=decoder.num_experts,
        num_experts_per_tok=decoder.num_chosen,
        moe_intermediate_size=decoder.ffn_size,
    )


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_a_known_model_has_as_many_parameters_as_its_makers_say(name: str, num_params: int) -> None:
    assert KNOWN[name].num_params == num_params


def test_of_a_mixture_the_active_ones_are_those_that_its_name_says() -> None:
    active = KNOWN["Qwen3-30B-A3B"].active_params
    assert 3.3e9 < active < 3.4e9  # its makers say 3.3 billion
    assert KNOWN["Qwen3-4B"].active_params == KNOWN["Qwen3-4B"].num_params


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.2-3B"])
def test_transformers_builds_a_known_shape_with_as_many_parameters_and_its_backbone_too(name: str) -> None:
    decoder = KNOWN[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(decoder))
    assert sum(parameter.numel() for parameter in model.parameters()) == decoder.num_params
    assert sum(parameter.numel() for parameter in model.base_model.parameters()) == decoder.backbone_params
    layer = sum(parameter.numel() for parameter in model.base_model.layers[0].parameters())
    assert layer == decoder.layer_params


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_shape_of_a_known_model_is_read_back_from_its_configuration(name: str, tmp_path: Path) -> None:
    config_of(KNOWN[name]).save_pretrained(tmp_path)
    assert read_decoder(tmp_path / "config.json") == KNOWN[name]


def test_a_folder_says_more_than_its_name_and_a_name_in_any_case_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-0.6b"
    assert find_decoder(folder) == KNOWN["Qwen3-0.6B"]
    smaller = dataclasses.replace(KNOWN["Qwen3-0.6B"], num_layers=2)
    config_of(smaller).save_pretrained(folder)
    assert find_decoder(folder) == smaller


def test_what_sft_makes_has_the_shape_of_its_settings(tmp_path: Path) -> None:
    assert find_decoder(tmp_path / "cold-start-0", PolicySettings(num_layers=7)).num_layers == 7
    assert made_decoder(PolicySettings()).tied


def test_a_model_that_nothing_is_known_of_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.folder=.*mystery.*Qwen3-0\.6B"):
        find_decoder(tmp_path / "mystery")


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        ({}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, None),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_plan_knows_of_as_many_positions_as_the_engine(
    change: dict[str, object], positions: int | None, tmp_path: Path
) -> None:
    config_of(KNOWN["Qwen3-0.6B"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": None} | change))
    assert read_decoder(path).num_positions == read_shape(tmp_path).num_positions == positions


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
        {"layer_types": ["full_attention", "linear_attention"] * 14},
    ],
)
def test_a_configuration_of_another_kind_is_refused_by_file(change: dict[str, object], tmp_path: Path) -> None:
    config_of(KNOWN["Qwen3-0.6B"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"config\.json: not the shape"):
        read_decoder(path)
