"""An sbatch that takes everything, and what it was given."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import submitit


def fake_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the last script is; beside it, with `.env`, the environment that it came with. Job ids are 41."""
    taken = folder / "taken"
    (folder / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {taken}; env >{taken}.env; echo Submitted batch job 41\n')
    (folder / "srun").touch()
    for name in ("sbatch", "srun"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(submitit.SlurmJob, "watcher", submitit.SlurmJob.watcher)
    return taken


def read_script(taken: Path, folder: Path) -> str:
    """The script of a job whose files are in `folder`, without what differs from machine to machine."""
    return taken.read_text().replace(shlex.quote(sys.executable), "PYTHON").replace(str(folder), "FOLDER")
