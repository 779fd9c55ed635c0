"""The policies that a run begins with, in the run's own folder."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths
from clawhpc.records import PolicyVersion
from clawhpc.store import POLICY_FILE, is_whole, named_errors, publish_policy, read_policy, weights_digest

POLICY_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What is copied; a model from a hub may lie beside the same weights in other formats."""


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A policy of ours, or the folder of any Hugging Face model that can learn on trees."""

    folder: Path
    renderer: str | None = None
    """Chat format of a model that is no policy of ours yet; a policy of ours has its own."""
    thinking: bool = False
    """Likewise, whether it may think before it answers; see `PolicyChoice.thinking`."""

    def check(self) -> None:
        """UserError when it is not there, has no weights, or lacks a word about its chat format."""
        if not self.folder.is_dir():
            if self.renderer:
                raise UserError(f"{self.folder}: no such folder; `hf download NAME --local-dir FOLDER` fetches a model")
            raise UserError(
                f"{self.folder}: no such policy folder; `python -m clawhpc.sft` with the same settings makes one"
            )
        for pattern, meaning in (
            ("*.safetensors", "weights"),
            ("config.json", "model"),
            ("tokenizer.json", "tokenizer"),
        ):
            if not any(self.folder.glob(pattern)):
                raise UserError(f"{self.folder}: no {pattern} here; the folder has no {meaning}")
        if self.is_foreign and self.renderer is None:
            raise UserError(
                f"{self.folder}: no {POLICY_FILE} here; for a model from elsewhere name its chat format, "
                "such as policy.renderer=qwen3"
            )

    @property
    def is_foreign(self) -> bool:
        """No policy of ours."""
        return not (self.folder / POLICY_FILE).exists()


def install_policy(paths: RunPaths, source: PolicySource, step: int = 0) -> PolicyVersion:
    """PolicyVersion `step` of the run: a copy of the policy in `source`.

    UserError when the run began with another, or when `source` has lost some of its weights.
    """
    source.check()
    target = paths.policy(step)
    digest = weights_digest(source.folder)
    if not source.is_foreign and read_policy(source.folder).digest != digest:
        raise UserError(f"{source.folder}: its weights are not those of its policy.json; copy it or make it again")
    if is_whole(target):
        installed = read_policy(target)
        if installed.digest != digest:
            raise UserError(
                f"{paths.root} began with another policy than {source.folder} now holds; give it another run.name"
            )
        return installed
    described = _describe(source)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with named_errors(part):
            _copy(source.folder, part)
            return publish_policy(part, dataclasses.replace(described, step=step, path=str(target)))
    finally:  # published, it is there no more
        shutil.rmtree(part, ignore_errors=True)


def _describe(source: PolicySource) -> PolicyVersion:
    if not source.is_foreign:
        return read_policy(source.folder)
    from clawhpc.learner.policy import describe_model  # torch: not before it is needed

    assert source.renderer is not None, "checked"
    return describe_model(source.folder, renderer=source.renderer, thinking=source.thinking)


def _copy(source: Path, target: Path) -> None:
    """By reading and writing, so that an error names the file that it is about; `shutil` names the source for both."""
    target.mkdir(parents=True)
    for pattern in POLICY_FILES:
        for file in source.glob(pattern):
            with file.open("rb") as read, named_errors(target / file.name), (target / file.name).open("wb") as written:
                shutil.copyfileobj(read, written)
