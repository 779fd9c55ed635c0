"""What a plan takes for granted. None of it changes what a run does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clawhpc.errors import at_least

MADE_TASKS: Mapping[str, Any] = {"calls": 3, "reply_tokens": 30, "result_tokens": 30, "tool_s": 0.2}
"""How long rollouts on the tasks are that are made here, in place of those of middling length."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Assumptions of `python -m clawhpc.plan`, which prints them: measure yours, and set them.

    The defaults are an H100 with 80 GB, by its data sheet, used as well as one may hope for, and a task of middling
    length. Nobody has measured them with this code.
    """

    gpu_memory_gib: float = 79.0
    """Of each GPU, learner's and engines': what torch finds of the 80 GB."""
    gpu_tflops: float = 989.0
    """Of each GPU, dense, in bfloat16."""
    gpu_bandwidth_gb_s: float = 3350.0
    """Between each GPU and its memory."""
    cpu_tflops: float = 0.2
    """Of a host without GPUs. Chosen with the figures of docs/results/quickstart.md known."""
    cpu_bandwidth_gb_s: float = 10.0
    """Between a host without GPUs and its memory."""
    learner_efficiency: float = 0.25
    """Share of the operations per second that the learner makes use of, waiting for other ranks included."""
    prefill_efficiency: float = 0.4
    """The same of an engine that reads prompts."""
    draw_efficiency: float = 0.4
    """Share of the bandwidth that an engine makes use of when it draws."""
    disk_gb_s: float = 1.0
    """At which one process writes or reads weights on the shared file system, or makes their digest."""
    reserve_gib: float = 4.0
    """Of each GPU, in the hands of neither: CUDA itself, NCCL, what torch's allocator cannot use."""
    engine_gib: float = 4.0
    """Of each of an engine's GPUs, beside weights and cache: activations, compiled graphs."""
    calls: int = 20
    """Of the model, in one rollout."""
    reply_tokens: int = 300
    """Drawn in one call."""
    result_tokens: int = 500
    """Of what a tool says, between two calls."""
    tool_s: float = 2.0
    """For the tools and the harness, between two calls."""

    def __post_init__(self) -> None:
        at_least(self, gpu_memory_gib=0.1, gpu_tflops=0.1, gpu_bandwidth_gb_s=0.1, cpu_tflops=1e-6, disk_gb_s=1e-3)
        at_least(self, cpu_bandwidth_gb_s=1e-3, reserve_gib=0, engine_gib=0)
        at_least(self, calls=1, reply_tokens=1, result_tokens=0, tool_s=0)
        for key in ("learner_efficiency", "prefill_efficiency", "draw_efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be more than 0 and at most 1")

    def for_made_tasks(self) -> PlanSettings:
        """With rollouts as short as those on tasks that are made here, as far as nobody has set another length."""
        usual = PlanSettings()
        unset = {name: short for name, short in MADE_TASKS.items() if getattr(self, name) == getattr(usual, name)}
        return replace(self, **unset)
