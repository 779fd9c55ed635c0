from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawhpc.serve.command import engine_arguments, engine_environment, engine_program
from clawhpc.serve.settings import EngineSettings

SETTINGS = EngineSettings(max_model_len=2048, max_num_seqs=8, kv_cache_gib=0.25)


def arguments(settings: EngineSettings = SETTINGS, *, rows: int = 100, cpu: bool = True) -> list[str]:
    return engine_arguments(settings, Path("/policy"), Path("/run/e"), num_token_ids=100, num_rows=rows, cpu=cpu)


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def environment(settings: EngineSettings = SETTINGS, *, cpu: bool = True) -> dict[str, str]:
    return engine_environment(settings, scratch=Path("/run/e.d"), cache_dir=Path("/cache"), cpu=cpu)


def test_logprobs_are_those_of_the_distribution_that_is_drawn_from() -> None:
    assert value(arguments(), "--logprobs-mode") == "processed_logprobs"
    assert value(arguments(), "--generation-config") == "vllm"


def test_settings_reach_the_engine() -> None:
    given = arguments()
    assert value(given, "--max-model-len") == "2048"
    assert value(given, "--max-num-seqs") == "8"
    assert value(given, "--dtype") == "float32"
    assert "--enforce-eager" in given
    assert "--enforce-eager" not in arguments(EngineSettings(enforce_eager=False))


@pytest.mark.parametrize("cpu", [True, False])
def test_gpus_are_shared_out_as_vllm_calls_it(cpu: bool) -> None:
    given = arguments(EngineSettings(tensor_parallel_size=2, data_parallel_size=4), cpu=cpu)
    assert value(given, "--tensor-parallel-size") == "2"
    assert value(given, "--data-parallel-size") == "4"


def test_an_engine_on_a_cpu_is_one_process_where_one_is_enough() -> None:
    assert value(arguments(), "--distributed-executor-backend") == "uni"
    assert value(arguments(EngineSettings(tensor_parallel_size=2)), "--distributed-executor-backend") == "mp"


def test_engines_on_one_host_do_not_look_for_the_same_ports() -> None:
    """The variable would name the first one; and what they open nobody else is to reach."""
    assert 'os.environ.pop("VLLM_PORT", None)' in engine_program(SETTINGS)
    given = environment()
    assert (given["VLLM_HOST_IP"], given["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_workers_that_share_memory_share_none_with_the_host() -> None:
    assert "have_own_shared_memory()" in engine_program(EngineSettings(tensor_parallel_size=2))
    assert "have_own_shared_memory" not in engine_program(SETTINGS)


def test_memory_is_a_number_of_bytes_on_a_cpu_and_a_share_on_a_gpu() -> None:
    on_cpu, on_gpu = arguments(), arguments(EngineSettings(gpu_memory_utilization=0.4), cpu=False)
    assert value(on_cpu, "--kv-cache-memory-bytes") == str(1 << 28)
    assert value(on_gpu, "--gpu-memory-utilization") == "0.4"
    assert "--kv-cache-memory-bytes" not in on_gpu
    assert "--gpu-memory-utilization" not in on_cpu


@pytest.mark.parametrize(
    "wrong", [{"max_model_len": 1}, {"kv_cache_gib": 0}, {"gpu_memory_utilization": 1.5}, {"data_parallel_size": 0}]
)
def test_a_wrong_setting_is_refused_with_its_key(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        EngineSettings(**wrong)


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(2048, 8), (16, 32)])
def test_no_prompt_comes_in_pieces_on_a_cpu(max_model_len: int, max_num_seqs: int) -> None:
    given = arguments(EngineSettings(max_model_len=max_model_len, max_num_seqs=max_num_seqs))
    assert "--no-enable-chunked-prefill" in given
    assert int(value(given, "--max-num-batched-tokens")) >= max(max_model_len, max_num_seqs)
    assert "--no-enable-chunked-prefill" not in arguments(cpu=False)


def test_padding_is_masked_where_there_is_some() -> None:
    assert "--logits-processors" not in arguments(rows=100)
    padded = arguments(rows=128)
    assert value(padded, "--logits-processors").endswith(":PaddingMask")
    assert json.loads(value(padded, "--additional-config")) == {"clawhpc_num_token_ids": 100}


def test_nothing_is_sent_out_and_temporary_files_stay_in_their_folder() -> None:
    given = environment()
    assert given["DO_NOT_TRACK"] == given["VLLM_NO_USAGE_STATS"] == given["HF_HUB_OFFLINE"] == "1"
    assert given["TMPDIR"] == given["VLLM_RPC_BASE_PATH"] == "/run/e.d"


def test_a_compiled_model_keeps_its_compiler_and_its_cache() -> None:
    assert environment()["TORCHDYNAMO_DISABLE"] == "1"
    compiled = environment(EngineSettings(enforce_eager=False))
    assert "TORCHDYNAMO_DISABLE" not in compiled
    assert compiled["TORCHINDUCTOR_CACHE_DIR"].startswith("/cache")


def test_threads_are_counted_on_a_cpu_only() -> None:
    assert environment(EngineSettings(cpu_threads=3))["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(cpu=False)
