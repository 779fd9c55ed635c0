"""GRPO and PPO solve a task that is rewarded at its end alone, from the same start, on trees with and without forks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clawhpc.credit.settings import CreditSettings
from clawhpc.learner.policy import create_policy
from clawhpc.learner.settings import CriticSettings, LearnerSettings, LossSettings, PolicySettings
from clawhpc.paths import RunPaths
from tests.fakes.learner_campaign import Campaign, equal, rows_of
from tests.fakes.tree_task import TreeTask, mean, teach_words

SHAPE = PolicySettings(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=64,
    tie_embeddings=False,
    initializer_range=0.4,
)
SETTINGS = LearnerSettings(lr=7e-3, warmup_steps=1, epochs=4, token_budget=4000, checkpoint_every=1000)
OWN, SHARED = (
    replace(SETTINGS, loss=LossSettings(clip_high=0.2), critic=CriticSettings(backbone=backbone, lr=7e-3))
    for backbone in ("own", "policy")
)
ALGORITHMS = {
    "grpo": (SETTINGS, CreditSettings()),
    "ppo": (OWN, CreditSettings(estimator="path_gae")),
    "tree ppo": (SHARED, CreditSettings(estimator="tree_gae", gae_lambda=0.95)),
}
NUM_STEPS = 20
AT_START = 0.25
"""More than the start solves; by chance alone it is 1 in 16."""
LEARNED = 0.6
"""Less than is solved after `NUM_STEPS`."""


@pytest.fixture(scope="module")
def start(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that all begin with."""
    folder = tmp_path_factory.mktemp("start")
    create_policy(folder / "fresh", policy, SHAPE, seed=0)
    return teach_words(folder / "fresh", folder)


@pytest.mark.parametrize("algorithm", ["grpo", "tree ppo"])
def test_the_task_is_learned_from_copies_of_what_was_said(start: Path, tmp_path: Path, algorithm: str) -> None:
    check_learning(start, tmp_path, algorithm, forks=True, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_task_is_learned_whatever_the_harness_and_the_seed(
    start: Path, tmp_path: Path, algorithm: str, forks: bool, seed: int
) -> None:
    check_learning(start, tmp_path, algorithm, forks=forks, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_policy_that_does_not_learn_stays_where_it_was(start: Path, tmp_path: Path, algorithm: str) -> None:
    settings, credit = ALGORITHMS[algorithm]
    task = train(start, tmp_path, replace(settings, lr=0.0), credit, forks=True)
    assert max(task.solved) < AT_START
    assert equal(load_file(task.run.policy(NUM_STEPS) / "model.safetensors"), load_file(start / "model.safetensors"))


def check_learning(start: Path, folder: Path, algorithm: str, *, forks: bool, seed: int) -> None:
    settings, credit = ALGORITHMS[algorithm]
    task = train(start, folder, settings, credit, forks=forks, seed=seed)
    rows = rows_of(task.run)
    assert task.solved[0] < AT_START
    assert mean(task.solved[-3:]) > LEARNED, task.solved
    assert max(float(row["train/sampling_gap_max"]) for row in rows) < 1e-4
    assert all((float(row["drift/copied"]) > 0) == forks for row in rows)
    if credit.needs_critic:
        foretold = [float(row["credit/explained_variance"]) for row in rows]
        assert mean(foretold[-5:]) > 0.2, foretold


def train(
    start: Path, folder: Path, settings: LearnerSettings, credit: CreditSettings, *, forks: bool, seed: int = 0
) -> TreeTask:
    task = TreeTask(RunPaths(folder), forks=forks, seed=seed)
    settings = replace(settings, seed=seed)
    Campaign(task.run, collect=task.collect, settings=settings, credit=credit, num_steps=NUM_STEPS).train(start)
    return task
