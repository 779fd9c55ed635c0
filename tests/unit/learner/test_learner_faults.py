"""What must not reach a file, what a full disk leaves, and what is found after a kill or a crash."""

from __future__ import annotations

import csv
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.batch import Draws, TreeBatch
from clawhpc.learner.callbacks import WriteCsv, list_checkpoints
from clawhpc.learner.data import rl_source
from clawhpc.learner.means import StepMeans
from clawhpc.learner.policy import load_policy
from clawhpc.learner.rl_module import RlModule
from clawhpc.learner.trainer import fit
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from tests.fakes.disk import largest_file
from tests.fakes.learner_campaign import (
    NUM_STEPS,
    SETTINGS,
    Campaign,
    Killed,
    equal,
    rollouts,
    rows_of,
    with_logprobs,
)


class Faulty(RlModule):
    """The gradient of every update but the first is not a number."""

    def learn_row(self, step: int, row: TreeBatch, draws: Draws, total: StepMeans, *, first: bool) -> None:
        super().learn_row(step, row, draws, total, first=first)
        if not first:
            for parameter in self.parameters():
                parameter.grad *= math.nan


def test_an_update_whose_gradient_is_not_finite_leaves_no_trace_and_is_counted(policy: Path, tmp_path: Path) -> None:
    weights = []
    for module in (Faulty(SETTINGS, policy, 1), RlModule(replace(SETTINGS, epochs=1), policy, 1)):
        csv_log = WriteCsv(tmp_path / type(module).__name__ / "metrics.csv")
        fit(module, rl_source(rollouts, SETTINGS, CreditSettings()), [csv_log], [])
        weights.append(module.policy.model.state_dict())
    assert equal(*weights)
    with (tmp_path / "Faulty" / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (float(row["train/skipped_updates"]), math.isfinite(float(row["train/grad_norm"]))) == (1.0, True)


@pytest.mark.parametrize("credit", [CreditSettings(), CreditSettings(estimator="path_gae")])
def test_a_step_whose_draws_are_all_stale_leaves_the_policy_as_it_is(
    credit: CreditSettings, policy: Path, tmp_path: Path
) -> None:
    campaign = Campaign(
        RunPaths(tmp_path), collect=lambda step: rollouts(min(step, 2)), credit=credit, num_steps=NUM_STEPS
    )
    last = campaign.train(policy)
    before = load_file(campaign.run.policy(NUM_STEPS - 1) / "model.safetensors")
    stale, trained = (float(rows_of(campaign.run)[step]["train/stale_tokens"]) for step in (NUM_STEPS - 1, 0))
    assert (stale > 0, trained) == (True, 0.0)
    assert equal(last, before)
    assert not equal(before, load_file(campaign.run.policy(NUM_STEPS - 2) / "model.safetensors"))


def test_a_step_without_a_finite_gradient_ends_the_fit_before_anything_is_written(policy: Path, tmp_path: Path) -> None:
    def poisoned(step: int) -> list[RolloutRecord]:
        return [replace(record, calls=(with_logprobs(record.calls[0], (math.nan,) * 2),)) for record in rollouts(step)]

    campaign = Campaign(RunPaths(tmp_path), collect=lambda step: rollouts(step) if step < 2 else poisoned(step))
    with pytest.raises(UserError, match=r"step 2: none of its 2 updates has a finite gradient.*learner\.lr"):
        campaign.train(policy)
    assert list_checkpoints(campaign.run.checkpoints)[-1].name == "step-000001.ckpt"
    assert not campaign.run.policy(3).exists()
    assert [row["step"] for row in rows_of(campaign.run)] == ["0", "1"]
    campaign.collect = rollouts
    assert equal(campaign.train(policy), Campaign(RunPaths(tmp_path / "whole")).train(policy))


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_told_with_its_path_and_leaves_no_part(
    policy: Path, tmp_path: Path
) -> None:
    campaign, size = Campaign(RunPaths(tmp_path)), (policy / "model.safetensors").stat().st_size
    with largest_file(2 * size), pytest.raises(OSError, match=r"File too large: '.*step-000000\.ckpt'"):
        campaign.train(policy)  # a checkpoint also has the two moments of every weight
    assert list(campaign.run.checkpoints.iterdir()) == []
    assert campaign.run.policy(0).exists()


def test_a_checkpoint_is_written_nowhere_but_in_its_folder(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path / "run"), num_steps=1)
    tempfile_folder, tempfile.tempdir = tempfile.tempdir, str(tmp_path / "nowhere")
    try:
        campaign.train(policy)
    finally:
        tempfile.tempdir = tempfile_folder
    assert len(list_checkpoints(campaign.run.checkpoints)) == 1


def test_what_a_kill_has_left_is_removed_when_the_fit_goes_on(policy: Path, tmp_path: Path) -> None:
    campaign = Campaign(RunPaths(tmp_path), num_steps=1)
    half_policy = campaign.run.policies / ".step-000001.0123abcd.part"
    half_checkpoint = campaign.run.checkpoints / "step-000000.part"
    for path in (half_policy / "model.safetensors", half_checkpoint):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    campaign.train(policy)
    assert not half_policy.exists()
    assert not half_checkpoint.exists()


def test_a_policy_that_a_crash_has_cut_short_is_published_again(policy: Path, tmp_path: Path) -> None:
    whole = Campaign(RunPaths(tmp_path / "whole")).train(policy)
    killed = Campaign(RunPaths(tmp_path / "killed"), kill_when=lambda *now: now == ("collect", 2))
    with pytest.raises(Killed):
        killed.train(policy)
    (killed.run.policy(2) / "model.safetensors").write_bytes(b"half")
    killed.kill_when = lambda *now: False
    assert equal(killed.train(policy), whole)
    load_policy(killed.run.policy(2))
