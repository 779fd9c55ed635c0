"""The command line and the environment of the engine's process. Pure."""

from __future__ import annotations

import json
from pathlib import Path

from clawhpc.serve.settings import EngineSettings

EXTENSION = "clawhpc.serve.extension"
PROGRAM = f"""
import gc, os
os.environ.pop("VLLM_PORT", None)
from clawhpc.ledger.parent import die_with_parent
die_with_parent()
gc.disable()
from {EXTENSION} import main
main()
"""
"""Importing vLLM takes 10 s and makes a million objects: a fifth less without the collector.

With `VLLM_PORT`, two engines on one host would look for free ports from the same one on. Without it vLLM listens on
unix sockets in the engine's own folder, and on ports that the kernel chooses as they are bound: none can clash.
"""
OWN_MEMORY = """
from clawhpc.serve.memory import have_own_shared_memory
have_own_shared_memory()
"""
NUM_TOKEN_IDS_KEY = "clawhpc_num_token_ids"
"""In vLLM's `additional_config`: ids from here on are padding."""
GIB = 1 << 30


def engine_program(settings: EngineSettings) -> str:
    """For `python -c`. Workers of one copy of the policy share memory."""
    return (OWN_MEMORY if settings.tensor_parallel_size > 1 else "") + PROGRAM


def engine_arguments(
    settings: EngineSettings, folder: Path, socket: Path, *, num_token_ids: int, num_rows: int, cpu: bool
) -> list[str]:
    """Arguments of vLLM's server. `num_rows`: of the output head, which may be padded beyond the tokenizer."""
    arguments = [
        *("--model", str(folder)),
        *("--served-model-name", "policy"),
        *("--uds", str(socket)),
        "--tokens-only",
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", f"{EXTENSION}.PolicyLoader"),
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *("--data-parallel-size", str(settings.data_parallel_size)),
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]
    if settings.enforce_eager:
        arguments += ["--enforce-eager"]
    if num_token_ids < num_rows:
        arguments += ["--logits-processors", f"{EXTENSION}:PaddingMask"]
        arguments += ["--additional-config", json.dumps({NUM_TOKEN_IDS_KEY: num_token_ids})]
    if cpu:
        return arguments + _cpu_arguments(settings)
    return [*arguments, "--gpu-memory-utilization", str(settings.gpu_memory_utilization)]


def _cpu_arguments(settings: EngineSettings) -> list[str]:
    """One process less to start, where one is enough; and no prompt in pieces, for a seeded one kills vLLM on CPU."""
    return [
        *("--kv-cache-memory-bytes", str(int(settings.kv_cache_gib * GIB))),
        *("--distributed-executor-backend", "uni" if settings.tensor_parallel_size == 1 else "mp"),
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", str(max(settings.max_model_len, settings.max_num_seqs))),
    ]


def engine_environment(settings: EngineSettings, *, scratch: Path, cache_dir: Path, cpu: bool) -> dict[str, str]:
    """What the engine's process has in its environment beyond ours. `scratch` is its folder for temporary files."""
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache_dir),
        "VLLM_CONFIG_ROOT": str(cache_dir),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_HOST_IP": "127.0.0.1",  # the processes of one engine are on one host: they need no other network
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(scratch),
    }
    if cpu:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what lets the executor be `uni`
        environment["OMP_NUM_THREADS"] = str(settings.cpu_threads)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else several workers want cores of their own, and more
        if settings.enforce_eager:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # else the sampler alone is compiled for 30 s at the first request
    return environment
