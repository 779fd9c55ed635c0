"""`sft` on recorded runs, from its settings to the policy: only what runs in this process."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clawhpc.campaign.settings import PolicyChoice
from clawhpc.config import RunConfig, RunSettings
from clawhpc.errors import UserError
from clawhpc.learner.settings import LearnerSettings, SftSettings
from clawhpc.paths import RunPaths
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import RolloutRecord
from clawhpc.sft import sft
from clawhpc.store import publish_rollout, read_policy
from clawhpc.tasks.families import draw_task
from clawhpc.tasks.generate import GenerateSettings
from clawhpc.tasks.sets import TaskSettings, load_task_sets
from clawhpc.verify.settings import JudgeModel, JudgeSettings, VerifySettings
from clawhpc.worker.settings import WorkerSpec
from tests.fakes.traces import capture
from tests.fakes.workers import Killed

TASKS = TaskSettings(generate=GenerateSettings(num_train=8, num_heldout=8))


def rollout(number: int, reward: float = 1.0) -> RolloutRecord:
    """Of a model behind an API: text."""
    record = capture(draw_task("create", random.Random(number), "train"))
    key = replace(record.key, task_id=f"task-{number}")
    assert record.verdict is not None
    return replace(record, key=key, rollout_id=f"r{number}", verdict=replace(record.verdict, reward=reward))


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for number in range(6):
        publish_rollout(paths, rollout(number, reward=1.0 if number else 0.0))
    return paths


def config_of(tmp_path: Path, run: RunPaths, policy: Path, **changes: Any) -> RunConfig:
    settings = {"runs": (str(run.root),), "epochs": 2, "batch_size": 2, "lr": 1e-2, "warmup_steps": 1} | changes
    return RunConfig(
        cache_dir=str(tmp_path / "cache"),
        run=RunSettings(root=str(tmp_path / "runs")),
        tasks=TASKS,
        policy=PolicyChoice(folder=str(policy)),
        learner=LearnerSettings(accelerator="cpu", num_threads=1),
        sft=SftSettings(**settings),
    )


def result_of(tmp_path: Path, number: int = 1) -> dict[str, Any]:
    return json.loads((tmp_path / f"runs/sft/default/{number:03d}/finished.json").read_bytes())


def test_the_good_rollouts_of_a_run_make_policy_version_1_of_a_new_one(
    tmp_path: Path, run: RunPaths, babbler: Path
) -> None:
    config = config_of(tmp_path, run, babbler)
    sft(config)
    result = result_of(tmp_path)
    assert (result["rollouts"], result["encoded_from_text"], result["left_out"]) == (5, 5, {"reward": 1})
    losses = {int(step): loss for step, loss in result["heldout_loss"].items()}
    assert sorted(losses) == [0, 2, 4]
    assert losses[4] < losses[0]
    taught = read_policy(Path(result["policy"]))
    assert taught.step == 1
    assert taught.digest != read_policy(babbler).digest
    assert Path(result["policy"]) == RunPaths(tmp_path / "runs/sft/default/001").policy(1)
    sft(config)
    assert result_of(tmp_path, 2)["heldout_loss"] == result["heldout_loss"], "the same command, the same result"


def test_what_is_held_out_for_evaluation_is_not_imitated(tmp_path: Path, run: RunPaths, babbler: Path) -> None:
    heldout = load_task_sets(TASKS, tmp_path / "cache").heldout[0]
    record = rollout(9)
    publish_rollout(
        run, replace(record, instruction=heldout.instruction, key=replace(record.key, task_id=heldout.task_id))
    )
    sft(config_of(tmp_path, run, babbler, epochs=1, heldout_share=0.0))
    assert result_of(tmp_path)["left_out"] == {"reward": 1, "heldout": 1}
    assert result_of(tmp_path)["heldout_loss"] == {}


def test_a_run_without_rollouts_and_one_without_good_ones_are_named(
    tmp_path: Path, run: RunPaths, babbler: Path
) -> None:
    with pytest.raises(UserError, match="nowhere holds no rollouts"):
        sft(config_of(tmp_path, RunPaths(tmp_path / "nowhere"), babbler))
    for number in range(1, 6):
        (run.group(rollout(number).key) / f"r{number}.json").unlink()
    with pytest.raises(UserError, match=r"sft\.min_reward=1\.0: 0 rollouts to imitate.*'reward': 1"):
        sft(config_of(tmp_path, run, babbler))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_model_behind_an_api_cannot_be_taught(recorded: bool, tmp_path: Path, run: RunPaths, babbler: Path) -> None:
    endpoint = EndpointSettings(base_url="http://endpoint/v1", model="large")
    config = config_of(tmp_path, run, babbler, **({} if recorded else {"runs": ()}))
    with pytest.raises(UserError, match=r"policy\.endpoint\.model=large"):
        sft(replace(config, policy=PolicyChoice(endpoint=endpoint)))
    assert not (tmp_path / "runs").exists()


def test_a_cold_start_makes_no_model_that_comes_from_elsewhere(tmp_path: Path, run: RunPaths, babbler: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    config = replace(
        config_of(tmp_path, run, babbler, runs=()), policy=PolicyChoice(folder=str(folder), renderer="qwen3")
    )
    with pytest.raises(UserError, match=r"policy\.renderer=qwen3.*tiny policy"):
        sft(config)
    assert not folder.exists()


def test_a_cold_start_wants_no_key_of_those_that_judge_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[WorkerSpec] = []

    def begin(launch: object, spec: WorkerSpec, ledger: object) -> NoReturn:
        told.append(spec)
        raise Killed

    monkeypatch.setattr("clawhpc.sft.WorkerPool", begin)
    judge = JudgeModel(name="m", base_url="http://127.0.0.1:1/v1", api_key_env="JUDGE_KEY")
    config = RunConfig(
        cache_dir=str(tmp_path / "cache"),
        run=RunSettings(root=str(tmp_path / "runs")),
        tasks=TaskSettings(generate=GenerateSettings(families=("count",))),
        verify=VerifySettings(judge=JudgeSettings(models={"mine": judge})),
    )
    with pytest.raises(Killed):
        sft(config)
    assert [spec.verify for spec in told] == [VerifySettings()]
