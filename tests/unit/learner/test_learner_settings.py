import math
import subprocess
import sys

import pytest

from clawhpc.learner.settings import (
    LEAST_VOCABULARY,
    ColdStartSettings,
    CriticSettings,
    LearnerSettings,
    LossSettings,
    PolicySettings,
)
from clawhpc.learner.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS


def test_settings_import_no_torch() -> None:
    heavy = "{'torch', 'lightning', 'transformers', 'tokenizers'}"
    code = f"import sys, clawhpc.learner.settings; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "16-true"}, "precision"),
        ({"accelerator": "gpuu"}, "accelerator='gpuu': allowed are auto, cpu, cuda"),
        ({"epochs": 0}, "epochs=0: must be at least 1"),
        ({"token_budget": 0}, "token_budget=0: must be at least 1"),
        ({"devices": 0}, "devices=0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
        ({"lr": -1.0}, "lr=-1.0: must be at least 0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"num_threads": -1}, "num_threads"),
        ({"keep_policies": 1}, "keep_policies=1: must be at least 2"),
        ({"keep_policy_every": -1}, "keep_policy_every=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296: must be less than"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_is_allowed(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"normaliser": "words"}, "normaliser='words': allowed are token, rollout, constant"),
        ({"objective": "reinforce"}, "objective='reinforce': allowed are clip, cispo"),
        ({"clip_high": -1.0}, "clip_high=-1.0"),
        ({"importance_low": 2.0}, "importance_high=2.0: must be more than importance_low"),
        ({"importance_high": math.nan}, "importance_high"),
        ({"kl_coef": -0.1}, "kl_coef"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"backbone": "mine"}, {"value_clip": math.nan}, {"warmup_steps": -1}])
def test_a_critic_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CriticSettings(**wrong)


def test_a_row_holds_any_conversation_of_the_engine_unless_it_is_told_otherwise() -> None:
    assert LearnerSettings().row_tokens == LearnerSettings().for_context(2048).row_tokens == 16_384
    assert LearnerSettings().for_context(65_536).row_tokens == 65_536
    assert LearnerSettings(token_budget=4096).for_context(65_536).row_tokens == 4096


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
        ({"vocab_size": 10}, "vocab_size=10: must be at least 265"),
        ({"head_dim": 31}, "head_dim=31: must be even"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"initializer_range": 0.0}, "initializer_range"),
    ],
)
def test_a_shape_that_no_policy_can_have_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicySettings(**wrong)


def test_the_least_vocabulary_is_all_bytes_and_the_tokens_of_the_chat() -> None:
    assert 256 + len(CONTROL_TOKENS) + len(MARKUP_TOKENS) == LEAST_VOCABULARY


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"warmup_steps": -1}, {"steps": 0}, {"floor": 1.0}, {"seed": -1}])
def test_a_cold_start_that_cannot_be_made_is_refused(wrong: dict[str, float]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{key}={value}"):
        ColdStartSettings(**wrong)
