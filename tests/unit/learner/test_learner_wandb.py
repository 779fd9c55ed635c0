"""Weights & Biases: one run there for each of ours, and nothing of it outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.learner.callbacks import wandb_run
from clawhpc.ledger import Ledger
from clawhpc.ledger.reap import find_marked
from clawhpc.paths import RunPaths
from tests.fakes.learner_campaign import Campaign
from tests.fakes.wandb_server import KEY, WandbServer, wandb_server

KILLED_WITHIN_S = 15.0
"""The ledger's promise, and some more for a busy machine."""
SYNC_S = 120.0
"""Three seconds, and some more for a busy machine."""
SCRIPT = """
import sys, time
from pathlib import Path
from clawhpc.learner.callbacks import wandb_run
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths

with Ledger.open(Path(sys.argv[1])) as ledger, wandb_run(RunPaths(Path(sys.argv[2])), "offline", ledger):
    print(list(ledger.environment.values())[0], flush=True)
    time.sleep(60)
"""

CANCELLED = """import os, signal
    from clawhpc.ledger.reap import find_marked
    for pid in find_marked(list(ledger.environment.values())[0], set()):
        os.kill(pid, signal.SIGTERM)
    time.sleep(3)
    raise KeyboardInterrupt
"""
"""As scancel, which ends every process of a job."""


def sync(folder: Path, server: WandbServer, temporary: Path) -> None:
    """`wandb sync` as on a login node, for someone who has a key."""
    ours = {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": KEY,
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(temporary),
    }
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", str(folder)],
        env={**os.environ, **ours, "HOME": str(temporary), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=SYNC_S,
    )
    assert done.returncode == 0, done.stderr


def cut_short(file: Path) -> None:
    """As a kill leaves it."""
    with file.open("r+b") as written:
        written.truncate(file.stat().st_size - 5)


def test_a_run_is_one_run_there_with_its_name_and_number_after_a_kill_too_and_one_command_sends_all_of_it(
    policy: Path, tmp_path: Path, ledger: Ledger
) -> None:
    run, ids = RunPaths(tmp_path / "quickstart/003"), set()
    for num_steps in (1, 2):
        with wandb_run(run, "offline", ledger) as logger:
            assert logger
            assert logger.experiment.name == "quickstart/003"
            ids.add(logger.experiment.id)
            Campaign(run, num_steps=num_steps, logger=logger).train(policy)
        if num_steps == 1:
            cut_short(*run.metrics.glob("wandb/offline-run-*/*.wandb"))
    (run_id,) = ids
    assert [file.stem for file in (run.metrics / "wandb").glob("offline-run-*/*.wandb")] == [f"run-{run_id}"] * 2
    with wandb_server() as server:
        sync(run.metrics / "wandb", server, tmp_path / "login_node")
    assert len([*run.metrics.glob("wandb/offline-run-*/*.wandb.synced")]) == 2, "or they would be sent again"
    assert server.names == {run_id: "quickstart/003"}
    assert [row["_step"] for row in server.rows[run_id]] == [0, 1]
    assert all("train/loss" in row for row in server.rows[run_id])
    assert server.unknown == []


def test_runs_of_one_name_in_different_folders_are_different_runs_there(tmp_path: Path, ledger: Ledger) -> None:
    ids = []
    for folder in ("a", "b"):
        with wandb_run(RunPaths(tmp_path / folder / "quickstart/001"), "offline", ledger) as logger:
            assert logger
            ids.append(logger.experiment.id)
    assert ids[0] != ids[1]


def test_what_goes_wrong_in_a_run_is_not_told_by_it(
    tmp_path: Path, ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), wandb_run(RunPaths(tmp_path), "offline", ledger):
        raise KeyboardInterrupt
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_is_told_as_one_where_its_process_is_gone_too(tmp_path: Path, ledger_root: Path) -> None:
    cancelled = SCRIPT.replace("time.sleep(60)", CANCELLED)
    done = subprocess.run(
        [sys.executable, "-c", cancelled, str(ledger_root), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=SYNC_S,
    )
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt", done.stderr
    assert "ConnectionResetError" not in done.stderr
    assert "atexit" not in done.stderr


def test_without_a_key_it_says_so_in_one_line(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"learner\.wandb=online: .*learner\.wandb=offline"):
        wandb_run(RunPaths(tmp_path), "online", ledger).__enter__()


def test_its_process_and_its_temporary_files_are_gone_after_a_kill(tmp_path: Path, ledger_root: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(ledger_root), str(tmp_path / "run")],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    with owner:
        try:
            marker = owner.stdout.readline().strip()
            assert find_marked(marker, set())
        finally:
            owner.kill()
    deadline = time.monotonic() + KILLED_WITHIN_S
    while find_marked(marker, set()) or list(ledger_root.iterdir()):
        assert time.monotonic() < deadline, list(ledger_root.rglob("*"))
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []
