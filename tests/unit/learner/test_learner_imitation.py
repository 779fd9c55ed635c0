"""Imitation of recorded rollouts: what each update sees, what is kept apart, and that it teaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import UserError
from clawhpc.learner import imitation
from clawhpc.learner.imitation import Course, Lesson, imitate, loss_per_token, read_losses, split_by_task
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.policy import load_policy
from clawhpc.learner.settings import LearnerSettings, SftSettings
from clawhpc.learner.trainer import LearnerPaths
from clawhpc.store import read_policy
from clawhpc.tree.build import build_tree
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.sequence import sequence_tree
from tests.fakes.session import Session
from tests.fakes.workers import Killed

LEARNER = LearnerSettings(token_budget=2000, checkpoint_every=4)
SETTINGS = SftSettings(epochs=3, batch_size=4, lr=2e-2, warmup_steps=1, heldout_share=0.2)
NO_POLICY: Any = None


def answering(task: int) -> CallTree:
    """Whatever is asked, the answer is the same: what is learned on some tasks holds for the others."""
    return sequence_tree(str(task), [1, 2, 3, 10 + task, 4, 60, 5], [False] * 5 + [True] * 2)


def lessons(num_tasks: int = 10, samples: int = 2) -> list[Lesson]:
    return [Lesson(task_id=f"task-{task}", tree=answering(task)) for task in range(num_tasks) for _ in range(samples)]


def course_of(tmp_path: Path, taught: Sequence[Lesson], apart: Sequence[Lesson] = (), **changes: Any) -> Course:
    return Course(replace(SETTINGS, **changes), LEARNER, taught, apart, tmp_path / "losses.json")


def teach(policy: Path, folder: Path, **changes: Any) -> dict[int, float]:
    return imitate(
        replace(SETTINGS, **changes),
        LEARNER,
        lessons(),
        policy=policy,
        output=folder / "taught",
        step=1,
        paths=LearnerPaths(checkpoints=folder / "checkpoints", metrics=folder / "metrics"),
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "taught" / "model.safetensors")


def test_an_epoch_has_every_rollout_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    course = course_of(tmp_path, lessons(num_tasks=5))
    assert (course.steps_per_epoch, course.num_steps) == (3, 9)
    epochs = []
    for epoch in range(3):
        batches = [course(3 * epoch + at, NO_POLICY) for at in range(3)]
        assert [len(batch or ()) for batch in batches] == [4, 4, 2]
        epochs.append([tree.rollout_id for batch in batches for tree in batch or ()])
        assert Counter(epochs[-1]) == Counter({str(task): 2 for task in range(5)})
    assert epochs[0] != epochs[1]
    assert course(9, NO_POLICY) is None
    again = course_of(tmp_path, lessons(num_tasks=5))
    assert [tree.rollout_id for tree in again(4, NO_POLICY) or ()] == epochs[1][4:8]


def test_all_rollouts_of_a_task_are_on_one_side() -> None:
    taught, apart = split_by_task(lessons(), SETTINGS)
    assert len(apart) == 4
    assert not {lesson.task_id for lesson in taught} & {lesson.task_id for lesson in apart}
    assert {lesson.task_id for lesson in apart} != {
        lesson.task_id for lesson in split_by_task(lessons(), replace(SETTINGS, seed=2))[1]
    }
    assert split_by_task(lessons(num_tasks=1), SETTINGS)[1] == []
    assert split_by_task(lessons(), replace(SETTINGS, heldout_share=0.0))[1] == []
    assert len(split_by_task(lessons(num_tasks=2), replace(SETTINGS, heldout_share=0.99))[0]) == 2


def test_a_rollout_in_which_nothing_was_drawn_teaches_nothing() -> None:
    empty = Lesson(task_id="empty", tree=sequence_tree("empty", [1, 2], [False, False]))
    taught, apart = split_by_task([empty, *lessons()], SETTINGS)
    assert empty not in [*taught, *apart]
    with pytest.raises(UserError, match="no rollout to imitate"):
        imitate(
            SETTINGS,
            LEARNER,
            [empty],
            policy=Path("nowhere"),
            output=Path("nowhere"),
            step=1,
            paths=LearnerPaths(checkpoints=Path("nowhere"), metrics=Path("nowhere")),
        )


def test_the_loss_falls_on_tasks_that_were_kept_apart_and_the_policy_is_published(policy: Path, tmp_path: Path) -> None:
    losses = teach(policy, tmp_path)
    assert sorted(losses) == [0, 4, 8, 12]
    assert losses[12] < losses[0] - 1.0
    version = read_policy(tmp_path / "taught")
    assert (version.step, version.renderer) == (1, read_policy(policy).renderer)
    assert read_losses(tmp_path / "metrics" / imitation.HELDOUT_LOSS) == losses


def test_after_a_kill_the_same_bits_come_out_and_the_looks_before_it_are_kept(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = teach(policy, tmp_path / "whole")
    batch = Course.__call__

    def die(self: Course, step: int, policy: TreePolicy) -> list[CallTree] | None:
        if step == 7:
            raise Killed
        return batch(self, step, policy)

    monkeypatch.setattr(Course, "__call__", die)
    with pytest.raises(Killed):
        teach(policy, tmp_path / "killed")
    monkeypatch.setattr(Course, "__call__", batch)
    assert teach(policy, tmp_path / "killed") == whole
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert teach(policy, tmp_path / "killed") == whole, "what is there is not made again"


def test_a_learning_rate_of_zero_changes_no_weight(policy: Path, tmp_path: Path) -> None:
    losses = teach(policy, tmp_path, lr=0.0, epochs=1)
    before = load_file(policy / "model.safetensors")
    assert all(torch.equal(weights(tmp_path)[name], before[name]) for name in before)
    assert len({round(loss, 6) for loss in losses.values()}) == 1


def test_a_token_that_several_calls_share_counts_once_in_the_loss(policy: Path) -> None:
    """Two calls continue one draw: in their two sequences its tokens stand twice."""
    session = Session()
    first = session.call((1, 2, 3), reply=(30, 31, 32, 33))
    session.call((1, 2, 3), first, (8,), reply=(40,))
    session.call((1, 2, 3), first, (9,), reply=(41,))
    model = TreePolicy(
        load_policy(policy), num_token_ids=count_token_ids(policy), logit_chunk=7, with_values=False
    ).eval()

    def total(*ids: int, trained: int) -> float:
        """Of the last `trained` tokens of a sequence."""
        alone = sequence_tree("alone", ids, [at >= len(ids) - trained for at in range(len(ids))])
        return trained * loss_per_token(model, [alone], LEARNER)

    shared = (1, 2, 3, 30, 31, 32, 33)
    apart = total(*shared, trained=4) + total(*shared, 8, 40, trained=1) + total(*shared, 9, 41, trained=1)
    assert loss_per_token(model, [build_tree("r", session.calls)], LEARNER) == pytest.approx(apart / 6, rel=1e-5)
