from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion, Probe
from clawhpc.serve.checks import check_parallel, check_policy_folder, check_probe, check_vllm, check_window, read_shape
from clawhpc.serve.settings import EngineSettings

PROBE = Probe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), tolerance=1e-3)


def policy(folder: Path) -> PolicyVersion:
    return PolicyVersion(step=4, path=str(folder), digest="", renderer="qwen3", thinking=False, probe=PROBE)


def test_a_probe_within_its_tolerance_agrees() -> None:
    check_probe(4, PROBE, (-1.0005, -2.0), "float32")


@pytest.mark.parametrize(
    ("logprobs", "told"),
    [
        ((-1.0, -2.5), "step 4: .* by 0.25 on average, over 0.001; that of token 2 is -2.5, the learner's -2"),
        ((-1.5, -2.002), "token 1 is -1.5"),
        ((math.nan, -2.0), "by inf on average"),
    ],
)
def test_other_weights_are_told_with_the_largest_difference(logprobs: tuple[float, ...], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        check_probe(4, PROBE, logprobs, "float32")


def test_an_engine_in_bfloat16_may_differ_from_a_float32_learner_by_what_its_arithmetic_does() -> None:
    rounded, other = (-1.06, -1.98), (-1.5, -2.5)
    check_probe(4, PROBE, rounded, "bfloat16")
    with pytest.raises(EngineError, match=r"by 0.04 on average, over 0.001"):
        check_probe(4, PROBE, rounded, "float32")
    with pytest.raises(EngineError, match=r"by 0.5 on average, over 0.2"):
        check_probe(4, PROBE, other, "bfloat16")


def test_an_engine_in_bfloat16_may_differ_as_far_as_the_learner_has_measured_that_this_policy_does() -> None:
    probe = replace(PROBE, bfloat16_tolerance=0.6)
    check_probe(4, probe, (-1.5, -2.5), "bfloat16")
    with pytest.raises(EngineError, match=r"by 0.5 on average, over 0.001"):
        check_probe(4, probe, (-1.5, -2.5), "float32")
    with pytest.raises(EngineError, match=r"by 0.8 on average, over 0.6"):
        check_probe(4, probe, (-1.8, -2.8), "bfloat16")


def test_float32_on_a_gpu_may_be_as_coarse_as_tf32_which_is_finer_than_bfloat16() -> None:
    check_probe(4, PROBE, (-1.03, -1.98), "float32", on_cpu=False)
    with pytest.raises(EngineError, match=r"by 0.5 on average, over 0.2"):
        check_probe(4, PROBE, (-1.5, -2.5), "float32", on_cpu=False)


def test_one_token_that_a_rounding_tips_does_not_deny_the_others() -> None:
    probe = Probe(token_ids=tuple(range(64)), logprobs=(-8.0,) * 63, tolerance=1e-4)
    check_probe(4, probe, (-9.7, *(-8.03,) * 62), "bfloat16")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_part_names_it(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"}:
        (tmp_path / name).touch()
    check_policy_folder(policy(tmp_path))
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=missing.replace("model", r"\*")):
        check_policy_folder(policy(tmp_path))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such policy folder"):
        check_policy_folder(policy(tmp_path / "none"))


@pytest.mark.parametrize("config", ["{}", "no json", '{"vocab_size": null}', "[]"])
def test_a_configuration_without_vocabulary_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"config\.json: no vocab_size"):
        read_shape(tmp_path)


def test_a_window_longer_than_the_policys_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "max_position_embeddings": 8192}))
    shape = read_shape(tmp_path)
    check_window(tmp_path, shape, 8192)
    with pytest.raises(UserError, match=r"engine\.max_model_len=32768: .* 8192 positions; set it to at most 8192"):
        check_window(tmp_path, shape, 32768)


@pytest.mark.parametrize("unknown", [{}, {"max_position_embeddings": 8, "rope_parameters": {"factor": 4.0}}])
def test_a_window_that_the_configuration_does_not_tell_is_the_engines_to_judge(
    tmp_path: Path, unknown: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, **unknown}))
    check_window(tmp_path, read_shape(tmp_path), 32768)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tensor_parallel_size": 3}, r"engine\.tensor_parallel_size=3: .* has 8 attention heads"),
        ({"data_parallel_size": 2}, r"engine\.data_parallel_size=2: .* has experts"),
    ],
)
def test_a_policy_that_cannot_be_spread_over_gpus_is_refused_with_the_key(
    tmp_path: Path, settings: dict[str, int], told: str
) -> None:
    shape = {"vocab_size": 8, "num_attention_heads": 8, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    check_parallel(tmp_path, read_shape(tmp_path), EngineSettings(tensor_parallel_size=4))
    with pytest.raises(UserError, match=told):
        check_parallel(tmp_path, read_shape(tmp_path), EngineSettings(**settings))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    check_parallel(tmp_path, read_shape(tmp_path), EngineSettings(**settings))


def test_a_missing_vllm_is_told_with_the_commands_of_the_makefile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError) as caught:
        check_vllm()
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    for pattern in (r"https://\S+/whl/cpu", r"-y (torchvision .*)"):
        found = re.search(pattern, makefile)
        assert found is not None
        assert found[0] in str(caught.value)
