"""A whole campaign with the real learner and store: each token is as old as was planned, and a kill changes no bit."""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import PolicySource
from clawhpc.campaign.loop import Campaign
from clawhpc.campaign.settings import CampaignSettings
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.settings import Accelerator, LearnerSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, RolloutRecord, StepPlan
from clawhpc.store import read_policy
from clawhpc.tasks.mix import Mix
from clawhpc.tasks.sets import TaskSets
from tests.fakes.records import make_record, make_task
from tests.fakes.session import Session
from tests.fakes.workers import FakeWorkers, Fate, Killed

SETTINGS = CampaignSettings(num_steps=3, groups_per_step=2, samples_per_group=2)
TASKS = TaskSets(train=tuple(make_task(f"t{index}") for index in range(4)), heldout=())


def run(
    paths: RunPaths,
    policy: Path,
    max_staleness: int,
    moment: Callable[[], None] = lambda: None,
    accelerator: Accelerator = "auto",
    harnesses: tuple[str, ...] = ("pi",),
    mix: Mix = "turns",
) -> bytes:
    """Train from `policy`; the weights at the end."""

    def draw(plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
        """Other weights draw other tokens."""
        chance = random.Random(f"{read_policy(paths.policy(plan.policy_step)).digest} {group.key.name} {sample}")
        session = Session()
        session.call((1, 2, 3), reply=(chance.randrange(250), chance.randrange(250)), version=plan.policy_step)
        return make_record(group, sample, float(sample), calls=tuple(session.calls))

    collector = Collector(paths, FakeWorkers(paths, draw, moment), stall_min=1, poll_s=0.0)  # type: ignore[arg-type]
    learner = LearnerSettings(lr=1e-2, epochs=2, max_staleness=max_staleness, wandb="disabled", accelerator=accelerator)
    with tempfile.TemporaryDirectory(prefix="claw-", dir="/tmp") as root, Ledger.open(Path(root)) as ledger:
        campaign = Campaign(
            SETTINGS, paths=paths, collector=collector, ledger=ledger, tasks=TASKS, harnesses=harnesses, mix=mix
        )
        campaign.run(learner, CreditSettings(), PolicySource(folder=policy))
    return (paths.policy(3) / "model.safetensors").read_bytes()


def column(paths: RunPaths, name: str) -> list[float]:
    with paths.metrics_csv.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("max_staleness", "ages"), [(0, [0, 0, 0]), (1, [0, 1, 1])], ids=str)
def test_tokens_are_as_old_as_was_planned_and_all_of_them_train(
    tmp_path: Path, babbler: Path, max_staleness: int, ages: list[float]
) -> None:
    paths = RunPaths(tmp_path)
    run(paths, babbler, max_staleness)
    assert column(paths, "train/staleness_max") == ages
    assert column(paths, "train/stale_tokens") == [0, 0, 0]
    assert all(loss for loss in column(paths, "train/grad_norm"))


@pytest.mark.parametrize("kill_at", [1, 6, 11])
def test_a_campaign_one_step_ahead_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, babbler: Path, kill_at: int
) -> None:
    killed = RunPaths(tmp_path / "killed")
    with pytest.raises(Killed):
        run(killed, babbler, 1, Fate(kill_at))
    assert run(killed, babbler, 1) == run(RunPaths(tmp_path / "whole"), babbler, 1)


def test_a_run_of_two_harnesses_logs_what_each_has_given_and_a_run_of_one_does_not(
    tmp_path: Path, babbler: Path
) -> None:
    both, turns, one = (RunPaths(tmp_path / name) for name in ("both", "turns", "one"))
    run(both, babbler, 0, harnesses=("codex", "pi"), mix="each")
    for name in ("codex", "pi"):
        assert column(both, f"train/{name}/reward") == [0.5] * 3
        assert all(gap > 0 for gap in column(both, f"train/{name}/sampling_gap"))
    run(turns, babbler, 0, harnesses=("codex", "pi"), mix="one")
    with turns.metrics_csv.open(newline="") as file:
        rewards = [(row["train/codex/reward"], row["train/pi/reward"]) for row in csv.DictReader(file)]
    assert rewards == [("0.5", ""), ("", "0.5"), ("0.5", "")]
    run(one, babbler, 0)
    assert "train/pi/" not in one.metrics_csv.read_text()


@pytest.mark.parametrize("kill_at", [2, 7])
def test_a_campaign_of_shuffled_harnesses_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, babbler: Path, kill_at: int
) -> None:
    killed, whole = RunPaths(tmp_path / "killed"), RunPaths(tmp_path / "whole")
    with pytest.raises(Killed):
        run(killed, babbler, 0, Fate(kill_at), harnesses=("codex", "pi"))
    assert run(killed, babbler, 0, harnesses=("codex", "pi")) == run(whole, babbler, 0, harnesses=("codex", "pi"))
    plans = [[path.read_bytes() for path in sorted(paths.plans.glob("*.json"))] for paths in (killed, whole)]
    assert plans[0] == plans[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_learner_that_lacks_its_gpu_is_told_before_anything_is_collected(tmp_path: Path, babbler: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(UserError, match=r"learner\.accelerator=cuda: torch finds no GPU"):
        run(paths, babbler, 0, accelerator="cuda")
    assert not paths.policies.exists()
