"""Whose fault it is that a worker ends, and what follows for the others."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clawhpc.errors import EngineError, HostError, LaunchError, UserError
from clawhpc.launch.failure import FAILURE_FILE, Fault, fault_of, note_failure, read_failure
from clawhpc.launch.job import WorkerJob
from clawhpc.launch.pool import HOUR_S, MAX_BAD_HOSTS, WorkerPool
from clawhpc.launch.settings import LaunchSettings, SlurmSettings
from clawhpc.ledger import Ledger
from clawhpc.sandbox.settings import SandboxSettings
from tests.fakes.disk import largest_file
from tests.fakes.slurm_worker import stub_spec

RUN = Path("/runs/a/001")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (UserError("a harness is not installed"), "user"),
        (HostError("three times"), "host"),
        (EngineError("it died too often"), "machine"),
        (OSError(errno.ENOSPC, "No space", str(RUN / "rollouts/x.json")), "store"),
        (OSError(errno.EROFS, "Read-only", str(RUN / "workers/w0/ready")), "store"),
        (OSError(errno.ENOSPC, "No space", "/tmp/clawhpc-0/engine1.d"), "host"),
        (OSError(errno.ENOSPC, "No space", str(RUN / "policies/a"), None, "/tmp/policy"), "host"),
        (OSError(errno.ENOSPC, "No space", "/home/policy", None, str(RUN / "policies/a")), "store"),
        (OSError(errno.ENOSPC, "No space"), "host"),
        (OSError(errno.ECONNRESET, "Reset"), "machine"),
    ],
    ids=str,
)
def test_what_every_other_worker_would_meet_is_told_from_what_is_wrong_with_one_host(
    error: Exception, fault: Fault
) -> None:
    assert fault_of(error, RUN) == fault


def test_a_note_is_read_as_it_was_written_with_the_hosts_name_in_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    note_failure(tmp_path, OSError(errno.ENOSPC, "No space", "/tmp/x"), RUN)
    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.fault, failure.host, failure.reason) == ("host", "n7", "No space left on device: /tmp/x")


def test_a_worker_without_a_word_may_have_had_no_room_for_one(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    with largest_file(0):
        note_failure(tmp_path, EngineError("it died"), RUN)
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
            read_failure(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / FAILURE_FILE).write_text("{half")
    assert read_failure(tmp_path) is None


def test_a_host_on_which_no_sandbox_starts_is_bad(
    tmp_path: Path, ledger_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox = SandboxSettings(kind="apptainer")
    spec = replace(stub_spec(tmp_path / "run"), sandbox=sandbox, scratch_root=str(ledger_root))
    with pytest.raises(HostError, match="no sandbox works here"):
        WorkerJob(spec, "w0")()
    failure = read_failure(tmp_path / "run/workers/w0")
    assert failure is not None
    assert failure.fault == "host"


@pytest.fixture
def pool(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    """One on Slurm that has submitted nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    settings = LaunchSettings(cluster="slurm", num_workers=2, slurm=SlurmSettings(exclude="n0"))
    return WorkerPool(settings, stub_spec(tmp_path / "run"), ledger)


def excluded(pool: WorkerPool) -> str | None:
    return pool._executor._executor.parameters.get("exclude")


def die(
    pool: WorkerPool,
    tmp_path: Path,
    error: Exception,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
    worker_id: str = "w0",
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", host)
    note_failure(tmp_path / "run/workers/w0", error, tmp_path / "run")
    failure = read_failure(tmp_path / "run/workers/w0")
    assert failure is not None
    pool._count_death(worker_id, failure, tmp_path / "log")


@dataclass
class Job:
    """A job of submitit, as the pool sees it."""

    job_id: str
    state: str

    def done(self) -> bool:
        return False


def test_new_workers_keep_away_from_a_host_on_which_one_could_not_work(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert excluded(pool) == "n0"
    die(pool, tmp_path, HostError("three times"), "n7", monkeypatch)
    assert excluded(pool) == "n0,n7"
    assert "new workers keep away from n7" in caplog.text


def test_a_worker_in_the_queue_is_told_of_a_bad_host_once_and_the_death_of_one_that_was_not_does_not_count(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol, told = tmp_path / "bin/scontrol", tmp_path / "told"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {told}\ntest -e {told}.ready\n')
    scontrol.chmod(0o755)
    pool._jobs = {"w0": Job("7_0", "RUNNING"), "w1": Job("7_1", "PENDING")}  # type: ignore[dict-item]
    die(pool, tmp_path, HostError("three times"), "n7", monkeypatch)
    for _ in range(3):
        pool._looked_at = -1e9
        assert pool.check() == {"w0"}
        Path(f"{told}.ready").touch()
    assert told.read_text() == "update JobId=7_1 ExcNodeList=n0,n7\n" * 2, "until Slurm has taken it"
    die(pool, tmp_path, HostError("three times"), "n7", monkeypatch)
    with pytest.raises(LaunchError, match="2 workers have died"):
        die(pool, tmp_path, HostError("three times"), "n7", monkeypatch, worker_id="w1")


def test_bad_hosts_are_bounded_and_forgiven_where_slurm_has_no_others(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_BAD_HOSTS + 1):
        pool._keep_away_from((*pool._bad_hosts, f"n{number + 1}"))
    assert pool._bad_hosts[0] == "n2"

    def refuse() -> None:
        raise LaunchError("sbatch: Requested node configuration is not available")

    monkeypatch.setattr(pool, "_submit", refuse)
    for _ in range(MAX_BAD_HOSTS + 1):
        pool._replace()
    assert excluded(pool) == "n0"


def test_deaths_of_more_than_an_hour_ago_do_not_count(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool._deaths = [time.monotonic() - HOUR_S - 1] * 2
    die(pool, tmp_path, OSError("of any kind"), "n7", monkeypatch)
    with pytest.raises(LaunchError, match="2 workers have died"):
        die(pool, tmp_path, OSError("of any kind"), "n7", monkeypatch)


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_store_that_cannot_be_written_ends_the_campaign_with_the_first_worker(
    pool: WorkerPool, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool._on_slurm = cluster == "slurm"
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run/rollouts/a.json"))
    with pytest.raises(LaunchError, match=r"^No space left on device: .*a\.json \(worker log: .*log\)"):
        die(pool, tmp_path, error, "n7", monkeypatch)


def test_a_bad_host_ends_a_campaign_that_has_no_other(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool._on_slurm = False
    with pytest.raises(LaunchError, match="three times"):
        die(pool, tmp_path, HostError("three times"), "", monkeypatch)
