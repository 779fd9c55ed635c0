"""What the commands do in a job of Slurm that is put back into the queue after they have finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawhpc.campaign.install import PolicySource
from clawhpc.campaign.loop import Campaign
from clawhpc.config import RunConfig, RunSettings
from clawhpc.learner.settings import SftSettings
from clawhpc.paths import RunPaths
from clawhpc.sft import sft
from clawhpc.store import publish_rollout
from clawhpc.tasks.generate import GenerateSettings
from clawhpc.tasks.sets import TaskSettings
from clawhpc.train import train
from tests.fakes.records import make_group, make_record


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs in which somebody has trained or imitated: here, that is noting it."""
    done: list[Path] = []

    @contextmanager
    def pool(*_: object) -> Iterator[None]:
        yield

    def run(campaign: Campaign, *_: object) -> None:
        done.append(campaign.paths.root)
        campaign.paths.finished.touch()

    def imitate(config: RunConfig, paths: RunPaths, *_: object) -> dict[str, Any]:
        done.append(paths.root)
        return {"policy": "p"}

    monkeypatch.setattr("clawhpc.config.WorkerPool", pool)
    monkeypatch.setattr(Campaign, "run", run)
    monkeypatch.setattr("clawhpc.sft.imitate_runs", imitate)
    monkeypatch.setattr("clawhpc.sft.install_policy", lambda *_: None)
    monkeypatch.setattr(RunConfig, "policy_source", lambda config: PolicySource(folder=Path("/policy")))
    return done


@pytest.mark.parametrize(("command", "folder"), [(train, "default"), (sft, "sft/default")])
def test_what_a_job_has_finished_its_next_turn_does_not_do_again(
    command: Callable[[RunConfig], None],
    folder: str,
    done: list[Path],
    tmp_path: Path,
    ledger_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = RunPaths(tmp_path / "recorded")
    publish_rollout(recorded, make_record(make_group(), 0))
    config = RunConfig(
        cache_dir=str(tmp_path / "cache"),
        scratch_dir=str(ledger_root),
        run=RunSettings(root=str(tmp_path / "runs")),
        tasks=TaskSettings(generate=GenerateSettings(num_train=1, num_heldout=0)),
        sft=SftSettings(runs=(str(recorded.root),)),
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    command(config)
    for count in ("1", "2"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        command(config)
    assert done == [tmp_path / "runs" / folder / "001"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    command(config)
    assert done[1:] == [tmp_path / "runs" / folder / "002"], "another job does"
