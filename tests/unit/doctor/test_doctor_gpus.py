"""GPUs, their driver, and the CUDA that torch was built for."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.checkup.finding import Finding, State
from clawhpc.checkup.gpus import check_compiler, check_gpus, read_cuda
from clawhpc.checkup.machine import Answer
from tests.fakes.machine import FakeMachine

H200 = "NVIDIA H200, 143771, 580.95.05, 9.0"
T4 = "Tesla T4, 15360, 535.104.12, 7.5"
SHARED = "NVIDIA GB10, [N/A], 580.95.05, 12.1"
P100 = "Tesla P100-PCIE-16GB, 16384, 535.104.12, 6.0"
MISSING, NOT_NEEDED, LIMITED, WORKS = State.MISSING, State.NOT_NEEDED, State.LIMITED, State.WORKS


def rows(*lines: str, cuda: str | None = "12.8", dtype: str = "bfloat16", needed: bool = True) -> list[Finding]:
    machine = FakeMachine(answers={"nvidia-smi": Answer(0, "".join(f"{line}\n" for line in lines))})
    return check_gpus(machine, torch_cuda=cuda, dtype=dtype, needed=needed)


def test_gpus_of_one_kind_are_counted() -> None:
    gpus, driver = rows(H200, SHARED, H200, T4, cuda="12.8", dtype="float32")
    assert gpus.state is WORKS
    assert gpus.found.splitlines() == [
        "2 x NVIDIA H200, 140 GiB, capability 9.0",
        "1 x NVIDIA GB10, memory [N/A], capability 12.1",
        "1 x Tesla T4, 15 GiB, capability 7.5",
    ]
    assert (driver.state, driver.found) == (WORKS, "580.95.05; torch has CUDA 12.8")


@pytest.mark.parametrize(("needed", "state"), [(True, MISSING), (False, NOT_NEEDED)])
def test_where_there_is_no_gpu(needed: bool, state: State) -> None:
    silent = FakeMachine(answers={"nvidia-smi": Answer(9, "NVIDIA-SMI has failed because it couldn't communicate")})
    for machine in (FakeMachine(), silent, FakeMachine(answers={"nvidia-smi": Answer(0)})):
        (row,) = check_gpus(machine, torch_cuda="12.8", dtype="float32", needed=needed)
        assert row.state is state
        assert bool(row.remedy) == needed
    assert "couldn't communicate" in check_gpus(silent, torch_cuda=None, dtype="float32", needed=needed)[0].found


def test_gpus_that_the_engine_does_not_know_are_missing() -> None:
    assert rows(P100)[0].state is MISSING


def test_a_gpu_without_bfloat16_has_a_limit_that_is_named() -> None:
    assert (rows(T4)[0].state, rows(T4)[0].remedy) == (LIMITED, "engine.dtype=float32")


@pytest.mark.parametrize(("needed", "state", "remedy"), [(True, LIMITED, "engine=gpu"), (False, WORKS, "")])
def test_an_engine_in_float32_where_bfloat16_is_faster_is_a_limit(needed: bool, state: State, remedy: str) -> None:
    row = rows(H200, dtype="float32", needed=needed)[0]
    assert (row.state, row.remedy) == (state, remedy)


HEADERS = Path("/usr/include/python3.11")
HEADER = {"/usr/include/python3.11/Python.h": "#define PY"}


@pytest.mark.parametrize(
    ("programs", "files", "state", "words"),
    [
        (("clang",), HEADER, WORKS, "/usr/bin/clang; /usr/include/python3.11/Python.h"),
        ((), HEADER, MISSING, "no gcc or clang; /usr/include"),
        (("gcc",), {}, MISSING, "/usr/bin/gcc; no /usr/include/python3.11/Python.h"),
    ],
)
def test_gpus_want_a_compiler_with_pythons_headers(
    programs: tuple[str, ...], files: dict[str, str], state: State, words: str
) -> None:
    """Triton builds with them at its first kernel."""
    machine = FakeMachine(programs=programs, files=files)
    row = check_compiler(machine, ("gcc", "clang"), HEADERS, needed=True)
    assert (row.state, bool(row.remedy)) == (state, state is MISSING)
    assert words in row.found
    idle = check_compiler(machine, ("gcc", "clang"), HEADERS, needed=False)
    assert (idle.state, idle.remedy) == (WORKS if state is WORKS else NOT_NEEDED, "")


@pytest.mark.parametrize(
    ("line", "cuda", "needed", "state", "words"),
    [
        (H200, "13.0", True, WORKS, "CUDA 13.0"),
        (T4, "13.0", True, MISSING, "which wants 580.65"),
        (T4, "12.8", True, WORKS, "535.104.12"),
        (T4, "99.1", True, LIMITED, "no least driver"),
        (H200, None, True, MISSING, "torch is for CPUs"),
        (H200, None, False, NOT_NEEDED, "torch is for CPUs"),
    ],
)
def test_the_driver_must_be_new_enough_for_torch(
    line: str, cuda: str | None, needed: bool, state: State, words: str
) -> None:
    driver = rows(line, cuda=cuda, needed=needed)[1]
    assert driver.state is state
    assert words in driver.found


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("__all__ = ['cuda']\n", None),
    ],
)
def test_torchs_cuda_is_read_from_its_file(text: str, cuda: str | None) -> None:
    assert read_cuda(text) == cuda
