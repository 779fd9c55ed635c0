"""What a run begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.campaign.install import PolicySource, install_policy
from clawhpc.errors import UserError
from clawhpc.paths import RunPaths
from clawhpc.records import PolicyVersion, Probe
from clawhpc.store import POLICY_FILE, publish_policy, read_policy, weights_digest
from tests.fakes.disk import largest_file


def write_policy(folder: Path, weights: bytes) -> PolicySource:
    part = folder.with_name("part")
    part.mkdir()
    (part / "model.safetensors").write_bytes(weights)
    for name in ("config.json", "tokenizer.json"):
        (part / name).write_text("{}")
    probe = Probe(token_ids=(1, 2), logprobs=(-0.5,), tolerance=1e-3)
    version = PolicyVersion(
        step=5, path=str(folder), digest=weights_digest(part), renderer="qwen3", thinking=False, probe=probe
    )
    publish_policy(part, version)
    return PolicySource(folder=folder)


def test_a_run_begins_with_a_copy_of_the_policy_as_its_step_zero(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    source = write_policy(tmp_path / "source", b"one")
    assert install_policy(paths, source).step == 0
    assert read_policy(paths.policy(0)).digest == read_policy(source.folder).digest
    assert install_policy(paths, source) == read_policy(paths.policy(0))
    other = write_policy(tmp_path / "other", b"two")
    with pytest.raises(UserError, match="began with another policy"):
        install_policy(paths, other)


def test_a_run_may_begin_with_several(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for step, weights in enumerate([b"one", b"two"]):
        source = write_policy(tmp_path / f"source{step}", weights)
        installed = install_policy(paths, source, step)
        assert (installed.step, installed.path) == (step, str(paths.policy(step)))
        assert (paths.policy(step) / "model.safetensors").read_bytes() == weights


def test_a_policy_that_was_cut_short_is_copied_again_and_one_that_is_no_longer_whole_is_refused(tmp_path: Path) -> None:
    paths, source = RunPaths(tmp_path / "run"), write_policy(tmp_path / "source", b"one")
    install_policy(paths, source)
    (paths.policy(0) / "model.safetensors").write_bytes(b"o")
    install_policy(paths, source)
    assert (paths.policy(0) / "model.safetensors").read_bytes() == b"one"
    (source.folder / "model.safetensors").write_bytes(b"o")
    with pytest.raises(UserError, match=r"source: its weights are not those of its policy\.json"):
        install_policy(paths, source)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model.safetensors", r"source: no \*\.safetensors here; the folder has no weights"),
        ("config.json", r"source: no config\.json here; the folder has no model"),
        ("tokenizer.json", r"source: no tokenizer\.json here; the folder has no tokenizer"),
        (POLICY_FILE, r"source: no policy\.json here; .* name its chat format, such as policy\.renderer=qwen3"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, lost: str, message: str) -> None:
    source = write_policy(tmp_path / "source", b"one")
    (source.folder / lost).unlink()
    with pytest.raises(UserError, match=message):
        source.check()


def test_a_folder_that_is_not_there_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such policy folder; `python -m clawhpc\.sft` with the same"):
        PolicySource(folder=tmp_path / "nowhere").check()


def test_a_model_from_elsewhere_that_is_not_there_is_to_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Qwen3-0\.6B: no such folder; .*`hf download"):
        PolicySource(folder=tmp_path / "Qwen3-0.6B", renderer="qwen3").check()


def test_a_full_disk_is_told_by_the_file_that_it_could_not_take(tmp_path: Path) -> None:
    paths, source = RunPaths(tmp_path / "run"), write_policy(tmp_path / "source", b"x" * 100_000)
    with largest_file(10_000), pytest.raises(OSError, match="File too large") as caught:
        install_policy(paths, source)
    assert caught.value.filename == str(paths.policies / ".step-000000.part/model.safetensors")
    assert list(paths.policies.iterdir()) == []
