"""The whole loop as a user starts it: real harness, real sandbox, real engine, real learner."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from clawhpc.paths import RunPaths
from clawhpc.records import Outcome
from clawhpc.store import published_steps, read_plans, read_rollouts, rollout_files
from clawhpc.tree.build import build_tree
from tests.campaign_parts import Command, Desk, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.sandbox]

START_S = 400.0
"""For a campaign, engine included, on a busy machine with two cores."""
END_S = 10.0
"""What a person waits after Ctrl-C, and what may outlive a SIGKILL."""


def check_whole(paths: RunPaths) -> None:
    """Each planned rollout is in the store once, and is what a rollout should be."""
    planned = Counter(
        f"{group.key.name}/{sample}/{plan.phase}/{plan.step}"
        for plan in read_plans(paths)
        for group in plan.groups
        for sample in range(group.num_samples)
    )
    records = list(read_rollouts(paths))
    stored = Counter(f"{one.key.name}/{one.sample}/{one.key.phase}/{one.key.step}" for one in records)
    assert planned == stored
    assert len(planned) == 4 + 2 * 4 + 4
    assert published_steps(paths) == [0, 1, 2]
    for record in records:
        assert record.outcome in (Outcome.COMPLETED, Outcome.HARNESS_EXIT, Outcome.LIMIT), record.detail
        versions = {span.version for call in record.calls if call.tokens for span in call.tokens.weight_versions}
        assert versions == {record.key.step}
        assert build_tree(record.rollout_id, record.calls).num_sampled_tokens


def as_from_elsewhere(policy: Path, folder: Path) -> Path:
    """The same model as a hub has it: in bfloat16, with no word from us beside it."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(policy / name, folder / name)
    return folder


def test_a_campaign_runs_to_its_end_and_leaves_nothing_but_its_folder(desk: Desk) -> None:
    command = desk.start(algorithm="ppo")
    assert command.wait(START_S) == 0, command.text()
    assert desk.left() == []
    paths = desk.run_paths()
    check_whole(paths)
    assert json.loads(paths.finished.read_bytes())["steps"] == 2
    assert paths.metrics_csv.read_text().count("\n") == 3
    assert "credit/explained_variance" in paths.metrics_csv.read_text()
    model = as_from_elsewhere(paths.policy(2), desk.folder / "model")
    again = desk.start("evaluate", policy__folder=model, campaign__eval_samples=2, campaign__eval_tasks=2)
    assert again.wait(60) == 2
    assert "name its chat format" in again.text()
    again = desk.start(
        "evaluate", policy__folder=model, policy__renderer="qwen3", campaign__eval_samples=2, campaign__eval_tasks=2
    )
    assert again.wait(START_S) == 0, again.text()
    assert "pass@2" in again.text()


def few_rollouts(paths: RunPaths, phase: str, count: int) -> bool:
    return sum(path.name.startswith(phase) for path in rollout_files(paths)) >= count


def wandb_files(paths: RunPaths) -> list[Path]:
    """One per process, named by the run that they all go on with."""
    return list(paths.metrics.glob("wandb/offline-run-*/*.wandb"))


MOMENTS: dict[str, Callable[[RunPaths], bool]] = {
    "the engine starts": lambda paths: paths.plan("eval", 0).exists(),
    "it is evaluated": lambda paths: few_rollouts(paths, "eval-000000", 1),
    "a step is collected": lambda paths: few_rollouts(paths, "train-000000", 1),
    "a checkpoint was written": lambda paths: any(paths.checkpoints.glob("step-000000.ckpt")),
    "the last rollouts run": lambda paths: few_rollouts(paths, "eval-000002", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_campaign_killed_at_any_moment_goes_on_with_each_rollout_once(desk: Desk, moment: str) -> None:
    paths = desk.run_paths()
    killed = desk.start(learner__wandb="offline")
    wait_for(lambda: MOMENTS[moment](paths), killed, START_S)
    killed.process.kill()
    killed.wait(5)
    desk.wait_until_nothing_is_left(within_s=END_S)
    before = {path.name: path.stat().st_mtime_ns for path in rollout_files(paths)}
    again = desk.start(learner__wandb="offline")
    assert again.wait(START_S) == 0, again.text()
    check_whole(paths)
    assert len({file.name for file in wandb_files(paths)}) == 1
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in rollout_files(paths)}.items()


def ctrl_c(command: Command) -> None:
    """As a terminal does it: to everyone in the foreground."""
    os.killpg(command.process.pid, signal.SIGINT)


def terminate(command: Command) -> None:
    """As a batch system does it."""
    command.process.terminate()


@pytest.mark.parametrize("end", [ctrl_c, terminate])
def test_ctrl_c_or_a_terminate_ends_everything_within_ten_seconds(desk: Desk, end: Callable[[Command], None]) -> None:
    command = desk.start(learner__wandb="offline", campaign__eval_tasks=0)
    wait_for(lambda: few_rollouts(desk.run_paths(), "train", 1), command, START_S)
    assert wandb_files(desk.run_paths())
    end(command)
    began = time.monotonic()
    assert command.wait(END_S) == 130, command.text()
    desk.wait_until_nothing_is_left(within_s=END_S - (time.monotonic() - began))
    assert "Traceback" not in command.text()
    assert "the same command goes on" in command.text()


def test_a_second_campaign_in_the_same_folder_is_refused(desk: Desk) -> None:
    first = desk.start()
    wait_for(desk.run_paths().lock.exists, first, START_S)
    second = desk.start()
    assert second.wait(60) == 2
    assert f"is in use by process {first.process.pid}" in second.text()


def test_a_worker_that_cannot_start_its_engine_says_so_in_one_line(desk: Desk, tmp_path: Path) -> None:
    command = desk.start(engine__kv_cache_gib=100_000, worker__max_failed_starts=1)
    assert command.wait(START_S) == 1
    (line,) = [line for line in command.text().splitlines() if line.startswith("clawhpc: ")]
    assert "engine" in line
    assert "Traceback" not in command.text()
    assert desk.left() == []
