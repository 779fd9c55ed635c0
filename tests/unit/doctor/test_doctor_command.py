"""Which checks a configuration calls for, and for which of them a login node does not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.checkup.finding import Finding, State, run_checks
from clawhpc.config import typed
from clawhpc.doctor import Desk, missing, parse_flags
from tests.contract.test_conf import compose_config
from tests.fakes.machine import FakeMachine

OVERRIDES = ("launch=slurm", "launch.slurm.partition=p", "launch.slurm.gpus_per_node=null", "launch.slurm.gres=gpu:2")


def rows_of(tmp_path: Path, *overrides: str) -> dict[str, Finding]:
    """Of a machine that has nothing at all."""
    config = typed(compose_config(f"cache_dir={tmp_path}", f"run.root={tmp_path}", *overrides))
    findings, hanging = run_checks(Desk(config, None, "too long a path", FakeMachine()).checks())
    assert not hanging
    return {row.what: row for rows in findings.values() for row in rows}


def test_on_a_login_node_what_workers_need_is_looked_at_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    rows = rows_of(tmp_path, *OVERRIDES)
    remedy = "srun --partition=p --gres=gpu:2 python -m clawhpc.doctor launch=slurm"
    for what in ("containers", "scratch", "memory"):
        assert (rows[what].state, rows[what].remedy) == (State.NOT_NEEDED, remedy)
    for what in ("Slurm", "harness claude_code"):
        assert rows[what].state is State.MISSING


def test_what_runs_on_gpus_is_looked_at_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert rows_of(tmp_path, *OVERRIDES, "engine=gpu")["memory"].remedy.endswith("launch=slurm engine=gpu")


def test_in_a_job_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    rows = rows_of(tmp_path, *OVERRIDES)
    assert (rows["containers"].state, rows["scratch"].state) == (State.MISSING, State.MISSING)


def test_on_one_machine_they_count_and_slurm_does_not(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert (rows["containers"].state, rows["scratch"].state) == (State.MISSING, State.MISSING)
    assert (rows["Slurm"].state, rows["Slurm"].remedy) == (State.NOT_NEEDED, "")


def test_a_learner_on_gpus_wants_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the environment names stands for any other, as it does for Triton."""
    monkeypatch.delenv("CC", raising=False)
    row = rows_of(tmp_path, "learner=gpu")["C compiler"]
    assert (row.state, row.found.startswith("no gcc or clang; no /")) == (State.MISSING, True)
    monkeypatch.setenv("CC", "icx")
    assert rows_of(tmp_path, "learner=gpu")["C compiler"].found.startswith("no icx; no /")


def test_only_what_is_missing_counts_against_a_configuration() -> None:
    rows = [Finding(what=state.name, state=state, found="") for state in State]
    assert missing({"one": rows}) == ["MISSING"]


def test_our_flags_are_ours_and_the_rest_is_hydras() -> None:
    flags, rest = parse_flags(["--json", "sandbox=bubblewrap", "--cfg", "job"])
    assert (flags.json, flags.clean) == (True, False)
    assert rest == ["sandbox=bubblewrap", "--cfg", "job"]
