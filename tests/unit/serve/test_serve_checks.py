from __future__ import annotations

import math
from pathlib import Path

import pytest

from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion, Probe
from clawhpc.serve.checks import check_policy_folder, check_probe, count_rows

PROBE = Probe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), tolerance=1e-3)


def policy(folder: Path) -> PolicyVersion:
    return PolicyVersion(step=4, path=str(folder), digest="", renderer="qwen3", thinking=False, probe=PROBE)


def test_a_probe_within_its_tolerance_agrees() -> None:
    check_probe(4, PROBE, (-1.0005, -2.0))


@pytest.mark.parametrize(
    ("logprobs", "told"),
    [
        ((-1.0, -2.5), "step 4: .* token 2 is -2.5, the learner's -2, a difference of 0.5, over 0.001"),
        ((-1.5, -2.002), "token 1 is -1.5"),
        ((math.nan, -2.0), "a difference of inf"),
    ],
)
def test_other_weights_are_told_with_the_largest_difference(logprobs: tuple[float, ...], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        check_probe(4, PROBE, logprobs)


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
        count_rows(tmp_path)
