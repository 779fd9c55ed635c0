"""vLLM's two model runners take our mask of the padding, each as it loads and calls one.

A CPU has the first alone, for the second needs Triton: there all other tests of the engine run. A GPU has the second.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from clawhpc.serve.command import engine_arguments
from clawhpc.serve.settings import EngineSettings

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("vllm")]
NUM_TOKEN_IDS, NUM_ROWS = 5, 8


def given(name: str) -> str:
    """The value of an argument on a GPU."""
    arguments = engine_arguments(
        EngineSettings(), Path("/policy"), Path("/run/e"), num_token_ids=NUM_TOKEN_IDS, num_rows=NUM_ROWS, cpu=False
    )
    return arguments[arguments.index(name) + 1]


def vllm_config() -> Any:
    """As much of it as loading a processor takes."""
    return SimpleNamespace(
        additional_config=json.loads(given("--additional-config")),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )


def logits() -> torch.Tensor:
    """Of two requests; the largest is in a padded row."""
    import torch

    return torch.arange(2.0 * NUM_ROWS).view(2, NUM_ROWS)


def masked_by_the_first() -> torch.Tensor:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import build_logitsprocs, validate_logits_processors_parameters

    names = (given("--logits-processors"),)
    validate_logits_processors_parameters(names, SamplingParams())
    loaded = build_logitsprocs(vllm_config(), torch.device("cpu"), False, False, names)
    masked = logits()
    for processor in loaded.non_argmax_invariant:
        processor.update_state(None)
        masked = processor.apply(masked)
    return masked


def masked_by_the_second() -> torch.Tensor:
    from dataclasses import fields

    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import (
        LogitsContext,
        LogitsProcRequestState,
        build_custom_logits_processors,
        build_custom_logits_processors_params_validator,
    )

    names = (given("--logits-processors"),)
    build_custom_logits_processors_params_validator(names)(SamplingParams())  # what the server does at its start
    requests: Any = SimpleNamespace(**{field.name: None for field in fields(LogitsProcRequestState)})
    (processor,) = build_custom_logits_processors(vllm_config(), requests, False, names)
    assert processor.add_request(0, SamplingParams()), "where it says no, logits are drawn from as they are"
    processor.apply_staged_writes()
    nothing: Any = {field.name: None for field in fields(LogitsContext)}
    return processor.apply(logits(), LogitsContext(**nothing))


def test_the_mask_serves_both_model_runners() -> None:
    """In a process of its own: importing vLLM changes torch for all that runs there."""
    program = f"from {__name__} import *; print([masked_by_the_first().tolist(), masked_by_the_second().tolist()])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    first, second = json.loads(run.stdout.splitlines()[-1].replace("-inf", "-Infinity"))
    padding = [-math.inf] * (NUM_ROWS - NUM_TOKEN_IDS)
    assert first == second == [[0.0, 1.0, 2.0, 3.0, 4.0, *padding], [8.0, 9.0, 10.0, 11.0, 12.0, *padding]]
