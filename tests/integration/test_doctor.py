"""The doctor as a user calls it: on this machine, with a Slurm that hangs, with a real one, and to clean up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawhpc.errors import HostError
from clawhpc.harness.registry import ADAPTERS
from clawhpc.ledger import Ledger
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.settings import SandboxSettings
from tests.contract.test_conf import HEAVY
from tests.sandbox_parts import KINDS, running, seconds_until_gone
from tests.slurm_cluster import SlurmCluster

PROMISE_S = 10.0
"""For the whole command."""
STATES = {"works", "works with a limit", "missing", "not needed here"}

Doctor = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def doctor(tmp_path: Path, ledger_root: Path, cache_dir: Path) -> Doctor:
    """`python -m clawhpc.doctor` in a folder of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "clawhpc.doctor", f"scratch_dir={ledger_root}", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "CLAWHPC_CACHE": str(cache_dir), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@contextmanager
def in_time(doctor: Doctor) -> Iterator[None]:
    """Fails when the block takes longer than is promised, not counted what a busy machine takes for --help."""
    began = time.monotonic()
    doctor("--help")
    start_s = time.monotonic() - began
    yield
    assert time.monotonic() - began - start_s < PROMISE_S + start_s


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """By what they are about."""
    report: dict[str, Any] = json.loads(done.stdout)
    rows = [row for part in report["parts"].values() for row in part]
    assert all(row.keys() == {"what", "state", "found", "remedy"} and row["state"] in STATES for row in rows)
    assert report["works"] == all(row["state"] != "missing" for row in rows) == (done.returncode == 0)
    assert len({row["what"] for row in rows}) == len(rows)
    return {row["what"]: row for row in rows}


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_the_doctor_tells_what_is_really_here(
    doctor: Doctor, ledger: Ledger, ledger_root: Path, tmp_path: Path, cache_dir: Path
) -> None:
    with in_time(doctor):
        done = doctor("--json", "harness.names=[claude_code,pi]")
    assert done.stderr == ""
    rows = rows_of(done)
    for name, kind in (("Apptainer", "apptainer"), ("bubblewrap", "bubblewrap")):
        assert (rows[name]["state"] == "works") == await sandbox_works(kind, ledger, cache_dir), rows[name]
    for name in ("claude_code", "pi"):
        installed = (cache_dir / "harness" / f"{name}-{ADAPTERS[name].version}").is_dir()
        assert (rows[f"harness {name}"]["state"] != "missing") == installed, rows[f"harness {name}"]
    assert rows["cores"]["found"] == str(len(os.sched_getaffinity(0)))
    assert (rows["run folder"]["state"], rows["locks of runs"]["state"]) == ("works", "works")
    assert rows["scratch"]["found"].startswith(f"{ledger_root}: ")
    assert rows["Python packages"]["state"] == rows["torch and vLLM"]["state"] == "works"
    assert list(tmp_path.iterdir()) == []
    assert [path for path in ledger_root.iterdir() if ledger.scratch.name not in path.name] == []


async def sandbox_works(kind: str, ledger: Ledger, cache_dir: Path) -> bool:
    try:
        await open_sandbox(SandboxSettings(kind=kind), ledger=ledger, cache_dir=cache_dir)  # type: ignore[arg-type]
    except HostError:
        return False
    return True


@pytest.mark.parametrize("columns", ["100", "160"])
def test_the_table_fits_and_says_what_to_do(doctor: Doctor, tmp_path: Path, columns: str) -> None:
    done = doctor(f"cache_dir={tmp_path / 'empty'}", "sandbox=bubblewrap", COLUMNS=columns)
    assert done.returncode == 1
    commands = [line for line in done.stdout.splitlines() if line.startswith("    -> ")]
    assert max(len(line) for line in done.stdout.splitlines() if line not in commands) <= int(columns)
    assert any(line.endswith(f"install_harness.sh claude_code {tmp_path / 'empty'}") for line in commands)
    assert done.stdout.endswith("Missing for this configuration: harness claude_code\n")
    assert "Traceback" not in done.stdout + done.stderr


def test_help_names_the_flags_and_imports_nothing_heavy(doctor: Doctor) -> None:
    done = doctor("--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "--clean" in done.stdout
    assert "== Config ==" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "clawhpc" in imported
    assert not imported.intersection(HEAVY)


def test_an_error_in_the_configuration_is_one_line(doctor: Doctor) -> None:
    done = doctor("--json", "sandbox.kind=docker")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "clawhpc: sandbox.kind=docker: must be one of apptainer, auto, bubblewrap\n"


def test_a_scratch_folder_that_cannot_be_is_a_row(doctor: Doctor, tmp_path: Path) -> None:
    done = doctor("--json", f"scratch_dir={tmp_path / ('x' * 80)}")
    rows = rows_of(done)
    assert (rows["scratch"]["state"], "too long a path" in rows["scratch"]["found"]) == ("missing", True)
    assert rows["run folder"]["state"] == "works"


def test_a_slurm_that_hangs_is_a_row_and_nothing_of_the_question_stays(
    doctor: Doctor, tmp_path: Path, needle: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun", "squeue", "sacct", "sinfo", "scontrol", "scancel"):
        (programs / name).write_text(f"#!/bin/sh\nsleep {needle}\n")
        (programs / name).chmod(0o755)
    with in_time(doctor):
        done = doctor("--json", "launch=slurm", PATH=f"{programs}:{os.environ['PATH']}")
    slurm = rows_of(done)["Slurm"]
    assert (slurm["state"], slurm["found"]) == (
        "missing",
        "the controller does not answer: scontrol did not answer within 4 s",
    )
    assert running(f"sleep {needle}") == []


@pytest.mark.sandbox
def test_an_apptainer_that_hangs_does_not_hide_bubblewrap(doctor: Doctor, tmp_path: Path, needle: str) -> None:
    (tmp_path / "apptainer").write_text(f"#!/bin/sh\nsleep {needle}\n")
    (tmp_path / "apptainer").chmod(0o755)
    with in_time(doctor):
        rows = rows_of(doctor("--json", PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert (rows["Apptainer"]["state"], rows["Apptainer"]["found"]) == ("not needed here", "no answer within 5 s")
    assert "is what workers take" in rows["bubblewrap"]["found"]
    assert running(f"sleep {needle}") == []


@pytest.mark.slurm
def test_a_real_slurm_is_told_with_its_partitions(doctor: Doctor, slurm: SlurmCluster) -> None:
    small = ("launch=slurm", "launch.slurm.cpus_per_task=2", "launch.slurm.mem_gb=1")
    rows = rows_of(doctor("--json", *small, "launch.slurm.partition=low"))
    assert {rows[what]["state"] for what in ("Slurm", "Slurm accounting", "Slurm requeue", "Slurm arrays")} == {"works"}
    assert rows["partition low"]["state"] == "works"
    assert "3 nodes of 8 cores, 7.8 GiB, gres gpu:h200:4, time infinite" in rows["partition low"]["found"]
    assert "main: up" in rows["other partitions"]["found"]
    assert "Slurm is" in rows["clocks"]["found"]
    absent = rows_of(doctor("--json", *small, "launch.slurm.partition=nowhere"))
    assert absent["partition"]["remedy"].endswith("main, low, low_warned, high")
    too_large = rows_of(doctor("--json", "launch=slurm"))["partition main"]
    assert (too_large["state"], too_large["remedy"]) == (
        "missing",
        "launch.slurm.cpus_per_task=8 launch.slurm.mem_gb=7",
    )


Start = Callable[[str, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(ledger_root: Path, cache_dir: Path) -> Iterator[Start]:
    """Start an owner of the given kind, with `sleep NEEDLE` in what it owns, and wait until that runs."""
    owners: list[subprocess.Popen[bytes]] = []

    def start_owner(kind: str, needle: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fakes.owner", kind, str(ledger_root), needle, str(cache_dir)]
        owners.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        assert owners[-1].stdout is not None
        assert owners[-1].stdout.readline() == b"ready\n"
        until = time.monotonic() + 30
        while len(running(f"sleep {needle}")) < 4:
            assert time.monotonic() < until, "what it owns does not start"
            time.sleep(0.02)
        return owners[-1]

    yield start_owner
    for owner in owners:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


@pytest.mark.parametrize("kind", KINDS)
def test_clean_removes_what_a_killed_owner_left_and_touches_no_living_one(
    kind: str, doctor: Doctor, start: Start, ledger_root: Path, needle: str
) -> None:
    """Also where its watchdog died with it, as when a job is ended by its control group."""
    living = start("processes", f"1{needle}")
    (others,) = ledger_root.glob("*.lock")
    dead = start(kind, f"2{needle}")
    (lock,) = (path for path in ledger_root.glob("*.lock") if path != others)
    for watchdog in running(f"reap.py {ledger_root} {lock.stem}"):
        os.kill(watchdog, signal.SIGKILL)
    dead.kill()
    dead.wait()

    left = rows_of(doctor("--json"))["left over"]
    assert (left["state"], left["remedy"]) == (
        "works with a limit",
        f"python -m clawhpc.doctor --clean scratch_dir={ledger_root}",
    )
    assert left["found"].startswith(f"{lock.stem}: process {dead.pid} (")
    assert lock.exists()

    said = doctor("--clean")
    assert said.returncode == 0, said.stderr
    found, removed = said.stdout.splitlines()
    assert found == f"found {left['found']}"
    assert removed == f"removed all of {lock.stem}"
    assert running(f"sleep 2{needle}") == []
    assert sorted(path.name for path in ledger_root.iterdir()) == [others.stem, others.name]
    assert living.poll() is None
    assert len(running(f"sleep 1{needle}")) >= 4

    again = doctor("--clean")
    assert (again.returncode, again.stdout) == (0, f"nothing of dead owners in {ledger_root}\n")
    living.kill()
    living.wait()
    seconds_until_gone(f"sleep 1{needle}", within_s=PROMISE_S)


def test_clean_in_json_says_what_it_could_not_remove(doctor: Doctor, ledger_root: Path) -> None:
    (ledger_root / "dead.lock").mkdir()  # no lock can be taken on it
    done = doctor("--clean", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert (report["found"], report["removed"]) == ([], [])
    assert "dead.lock: left by an owner that died" in report["left"][0]


def test_clean_touches_nothing_in_a_folder_of_somebody_else(doctor: Doctor, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir(mode=0o755)
    (trap / "precious").mkdir()
    (trap / "precious.lock").touch()
    done = doctor("--clean", f"scratch_dir={trap}")
    assert done.returncode == 2
    assert "only you may enter" in done.stderr
    assert (trap / "precious").is_dir()


def test_an_owner_of_another_host_is_its_own(doctor: Doctor, ledger_root: Path) -> None:
    (ledger_root / "far.lock").write_text('{"pid": 1, "host": "elsewhere", "command": ["train"]}')
    (ledger_root / "far").mkdir()
    assert doctor("--clean").returncode == 0
    assert (ledger_root / "far").is_dir()
