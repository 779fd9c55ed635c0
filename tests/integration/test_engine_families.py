"""A policy of every family, as the learner publishes it, is one that transformers and real vLLM load as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawhpc.engine.client import SamplingParams
from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.serve.server import serve_policy
from tests.engine_parts import SETTINGS, TinyPolicy
from tests.fakes.chat_tokenizer import write_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("vllm")]
GAP = 1e-4
PROMPT = tuple(range(7, 107))


def make_model(family: str, num_rows: int) -> Any:
    """As the learner holds it: for trees, in training."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from clawhpc.learner.attention import use_tree_attention

    shape = {
        "vocab_size": num_rows,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": SETTINGS.max_model_len,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = AutoConfig.for_model(family, **shape, **(experts if family == "qwen3_moe" else {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    use_tree_attention(model)
    return model.train()


def publish(folder: Path, family: str) -> tuple[TinyPolicy, TinyPolicy]:
    """Two versions, the second of weights that one rank has gathered; each as transformers loads it."""
    import torch

    from clawhpc.learner.policy import save_policy

    write_tokenizer(folder / "tokenizer")
    num_token_ids = count_token_ids(folder / "tokenizer")
    model = make_model(family, num_token_ids + 64)

    def save(step: int, state_dict: dict[str, torch.Tensor] | None) -> TinyPolicy:
        version = save_policy(
            folder / f"step-{step}",
            model,
            folder / "tokenizer",
            step=step,
            renderer="qwen3",
            thinking=False,
            state_dict=state_dict,
        )
        return TinyPolicy(version=version, model=as_it_is(Path(version.path)), num_token_ids=num_token_ids)

    other = make_model(family, num_token_ids + 64).apply(shift)
    return save(1, None), save(2, other.state_dict())


def shift(module: Any) -> None:
    """Other weights, every one of them."""
    for parameter in module.parameters(recurse=False):
        parameter.data.add_(0.1 * parameter.data.roll(1))


def as_it_is(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
async def test_the_engine_draws_from_what_the_learner_has_published(
    family: str, short_folder: Path, engine_cache: Path
) -> None:
    first, second = publish(short_folder, family)
    params = SamplingParams(max_tokens=60, seed=1)
    async with serve_policy(
        SETTINGS,
        first.version,
        socket=short_folder / "e",
        log=short_folder / "engine.log",
        environment={},
        cache_dir=engine_cache,
    ) as server:
        drawn = await server.engine.generate(PROMPT, params, request_id="test")
        assert first.gap(PROMPT, drawn) < GAP < 0.1 < second.gap(PROMPT, drawn)
        await server.load(second.version)
        drawn = await server.engine.generate(PROMPT, params, request_id="test")
        assert second.gap(PROMPT, drawn) < GAP < 0.1 < first.gap(PROMPT, drawn)
