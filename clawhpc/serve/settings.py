"""Settings of the engine, with their defaults. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clawhpc.errors import at_least

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine of one host runs."""

    dtype: Dtype = "float32"
    """Of its weights and arithmetic, whatever the learner's."""
    max_model_len: int = 4096
    """Tokens of prompt and completion together; at most the positions that the policy has."""
    max_num_seqs: int = 32
    """Completions that are drawn at the same time; the others wait."""
    kv_cache_gib: float = 1.0
    """On CPU only: for the keys and values of prompts and completions."""
    gpu_memory_utilization: float = 0.5
    """On GPU only: the engine's share of its memory, for all that it keeps there. A learner beside it has the rest."""
    tensor_parallel_size: int = 1
    """GPUs that hold one copy of the policy together: as many as it needs to fit, with room for what it draws."""
    data_parallel_size: int = 1
    """Copies of the policy, each on GPUs of its own, behind one server; a rollout stays with one of them, where the
    beginning of its prompts is known. Refused for a policy with experts: vLLM computes those in step over all copies.
    """
    enforce_eager: bool = True
    """False compiles the model: on CPU 1.4 times the speed, for half a minute more at every start."""
    cpu_threads: int = 1
    """On CPU only. Where harnesses use the cores too, one thread is faster than two, which wait for each other."""
    startup_timeout_s: float = 300.0
    """From the start of the process to the first answer; 20 s on two idle cores, several times that on busy ones."""
    load_timeout_s: float = 300.0
    """For new weights, the wait for completions in flight included."""
    stop_timeout_s: float = 5.0
    """Between the request to end and the kill."""

    def __post_init__(self) -> None:
        at_least(self, max_model_len=2, max_num_seqs=1, kv_cache_gib=0.01, gpu_memory_utilization=0.01, cpu_threads=1)
        at_least(self, tensor_parallel_size=1, data_parallel_size=1)
        at_least(self, startup_timeout_s=1, load_timeout_s=0, stop_timeout_s=0)
        if self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be at most 1")
