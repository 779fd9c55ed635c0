"""What one host offers: scratch, memory, cores, clocks, and what the dead have left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clawhpc.checkup.files import GIB
from clawhpc.checkup.finding import State
from clawhpc.checkup.host import (
    bind_error,
    check_clocks,
    check_cores,
    check_memory,
    check_place,
    check_remains,
    check_scratch,
    free_memory,
    judge_clocks,
)
from clawhpc.checkup.machine import Answer
from clawhpc.ledger import Ledger, Remains
from clawhpc.sandbox.disk import Place
from tests.fakes.machine import FakeMachine

DISK_MOUNT = {"/proc/self/mounts": "/dev/sda1 / ext4 rw 0 0\n"}


def test_scratch_on_a_disk_works(ledger_root: Path) -> None:
    with Ledger.open(ledger_root) as ledger:
        scratch, _room = check_scratch(ledger_root, ledger, "", FakeMachine(files=DISK_MOUNT))
    assert (scratch.state, scratch.found) == (State.WORKS, f"{ledger_root}: ext4, sockets can be bound")


def test_scratch_that_cannot_be_is_missing_with_its_reason(tmp_path: Path) -> None:
    (row,) = check_scratch(tmp_path, None, "too long a path", FakeMachine())
    assert (row.state, row.found) == (State.MISSING, "too long a path")
    assert "scratch_dir=" in row.remedy


@pytest.mark.parametrize(
    ("kind", "failure", "state"),
    [
        ("xfs", "", State.WORKS),
        ("tmpfs", "", State.LIMITED),
        ("nfs4", "", State.LIMITED),
        ("xfs", "no socket can be bound there", State.MISSING),
    ],
)
def test_scratch_must_be_on_a_disk_of_the_host(kind: str, failure: str, state: State) -> None:
    row = check_place(Path("/scratch"), Place(kind), failure)
    assert row.state is state
    assert bool(row.remedy) == (state is not State.WORKS)


def test_a_socket_that_cannot_be_bound_is_said(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    assert "too long" in bind_error(deep)


def test_what_the_dead_have_left_is_counted() -> None:
    assert check_remains((), "clean").state is State.WORKS
    remains = Remains(
        owner="ab12",
        pid=7,
        command="python -m clawhpc.train",
        job="",
        processes=(8, 9),
        mounts=(),
        num_sockets=1,
        num_files=5,
    )
    row = check_remains((remains,), "clean")
    assert (row.state, row.remedy) == (State.LIMITED, "clean")
    assert row.found == ("ab12: process 7 (python -m clawhpc.train) has left 2 processes, 0 mounts, 1 sockets, 5 files")


@pytest.mark.parametrize(("num_cores", "state"), [(1, State.LIMITED), (2, State.WORKS), (64, State.WORKS)])
def test_cores(num_cores: int, state: State) -> None:
    assert check_cores(num_cores).state is state


@pytest.mark.parametrize(
    ("free_gib", "state", "remedy"),
    [
        (8, State.WORKS, ""),
        (5, State.LIMITED, "worker.concurrency=5"),
        (1, State.LIMITED, "srun --mem=16G, or more"),
    ],
)
def test_memory_is_for_the_engine_and_the_harnesses(free_gib: int, state: State, remedy: str) -> None:
    row = check_memory(free_gib * GIB, cache_gib=1.0, concurrency=12)
    assert (row.state, row.remedy) == (state, remedy)


MEMINFO = {"/proc/meminfo": "MemTotal:  99999999 kB\nMemAvailable:    8388608 kB\n"}
V2 = {
    "/proc/self/cgroup": "0::/job_7\n",
    "/sys/fs/cgroup/job_7/memory.max": "4294967296\n",
    "/sys/fs/cgroup/job_7/memory.current": "1073741824\n",
}
V1 = {
    "/proc/self/cgroup": "5:cpu:/\n4:memory:/slurm/job_7\n",
    "/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "2147483648\n",
    "/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": "0\n",
}


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        (MEMINFO, 8),
        (MEMINFO | V2, 3),
        (MEMINFO | V1, 2),
        (MEMINFO | V2 | {"/sys/fs/cgroup/job_7/memory.max": "max\n"}, 8),
        (MEMINFO | V1 | {"/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": str(2**63 - 4096)}, 8),
        (MEMINFO | V2 | {"/proc/self/cgroup": "0::/job_7/step_0/user/task_0\n"}, 3),
        ({}, 0),
    ],
)
def test_free_memory_is_that_of_the_job(files: dict[str, str], gib: int) -> None:
    assert free_memory(FakeMachine(files=files)) == gib * GIB


@pytest.mark.parametrize(
    ("ahead_s", "is_monotonic", "state"),
    [(0.4, True, State.WORKS), (-60.0, True, State.LIMITED), (0.0, False, State.MISSING)],
)
def test_clocks(ahead_s: float, is_monotonic: bool, state: State) -> None:
    row = judge_clocks({"Slurm": ahead_s}, is_monotonic=is_monotonic)
    assert row.state is state
    assert f"Slurm is {ahead_s:+} s from here" in row.found


def test_the_clock_of_slurm_is_what_its_controller_says(tmp_path: Path) -> None:
    sdiag = Answer(0, f"***\nsdiag output at Mon Nov 30 08:36:42 2026 ({int(time.time()) - 3600})\n")
    row = check_clocks(tmp_path, FakeMachine(answers={"sdiag": sdiag}), has_slurm=True)
    assert row.state is State.LIMITED
    assert "Slurm is -3" in row.found
    assert "Slurm" not in check_clocks(tmp_path, FakeMachine(answers={"sdiag": Answer(1)}), has_slurm=True).found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_has_no_clock() -> None:
    row = check_clocks(Path("/proc"), FakeMachine(), has_slurm=False)
    assert (row.state, row.found) == (State.WORKS, "none to compare with")
