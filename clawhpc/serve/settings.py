"""Settings of the engine, with their defaults. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine of one host runs."""

    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """`auto` is vLLM's choice: what the checkpoint has, but bfloat16 where it has float32."""
    max_model_len: int = 4096
    """Tokens of prompt and completion together."""
    max_num_seqs: int = 32
    """Completions that are drawn at the same time; the others wait."""
    kv_cache_gib: float = 1.0
    enforce_eager: bool = True
    """False compiles the model: on CPU 1.4 times the speed, for half a minute more at every start."""
    cpu_threads: int = 1
    """On CPU only. Where harnesses use the cores too, one thread is faster than two, which wait for each other."""
    startup_timeout_s: float = 300.0
    """From the start of the process to the first answer; 20 s on two idle cores, several times that on busy ones."""
    request_timeout_s: float = 600.0
    """For one completion."""
    load_timeout_s: float = 300.0
    """For new weights, the wait for completions in flight included."""
    stop_timeout_s: float = 5.0
    """Between the request to end and the kill."""
