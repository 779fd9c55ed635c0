"""The transfer study in miniature, as a user starts it: every command, and the page that comes of them."""

from __future__ import annotations

import re

import pytest

from benchmarks.transfer import write_page
from benchmarks.transfer_runs import ARMS, TRAINED, Study, make_runs
from tests.campaign_parts import Desk

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.sandbox, pytest.mark.slow]

MINIATURE = (
    *("cold_start.traces_per_family=1", "cold_start.headless_steps=1", "cold_start.steps=1", "cold_start.floor=0"),
    *("cold_start.tasks_per_check=1", "tasks.generate.num_train=8", "tasks.generate.num_heldout=8"),
    *("campaign.num_steps=1", "campaign.groups_per_step=2", "campaign.samples_per_group=2", "campaign.eval_tasks=2"),
    *("engine.kv_cache_gib=0.25", "learner.wandb=disabled"),
)
"""Nothing is learned: two groups of two rollouts for each arm, and two tasks."""


def test_the_study_in_miniature_runs_every_command_once_and_writes_its_page(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    study = Study(
        seeds=(0,),
        root=desk.folder / "runs",
        page=desk.folder / "docs" / "transfer.md",
        overrides=(*MINIATURE, f"scratch_dir={desk.scratch}"),
    )
    make_runs(study)
    write_page(study)
    text = study.page.read_text()
    for arm in TRAINED:
        assert re.search(rf"^\| {arm.name} \| 4 \| ", text, re.MULTILINE)
    for arm in ARMS:
        assert re.search(rf"^- {arm.name}: .*\d", text, re.MULTILINE)
    assert study.page.with_suffix(".png").stat().st_size > 0
    capfd.readouterr()
    make_runs(study)
    assert capfd.readouterr().out == "", "all has been done"
