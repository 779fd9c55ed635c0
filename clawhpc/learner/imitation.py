"""Imitate recorded rollouts: the sampled tokens of their trees, each once, by the learner of reinforcement learning.

An epoch goes through the rollouts in an order of its own. Some tasks are kept apart; the loss on their rollouts, before
every epoch and after the last, says whether the policy has learned how to act or only these rollouts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from clawhpc.errors import UserError
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.settings import LearnerSettings, LossSettings, SftSettings
from clawhpc.learner.steps import build_sft_step
from clawhpc.learner.trainer import LearnerPaths, fit_sft
from clawhpc.store import is_whole, write_atomic
from clawhpc.tree.nodes import CallTree

log = logging.getLogger(__name__)

HELDOUT_LOSS = "heldout_loss.json"
"""Step -> loss per token on the rollouts that are kept apart."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One rollout."""

    task_id: str
    tree: CallTree


def imitate(
    settings: SftSettings,
    learner: LearnerSettings,
    lessons: Sequence[Lesson],
    *,
    policy: Path,
    output: Path,
    step: int,
    paths: LearnerPaths,
) -> dict[int, float]:
    """Teach the policy in folder `policy` the `lessons`, and publish it in `output` as policy of `step`.

    Returns the loss on the rollouts that are kept apart, by update; empty where none are. After a kill it goes on from
    the newest checkpoint. UserError without a lesson.
    """
    taught, kept_apart = split_by_task(lessons, settings)
    if not taught:
        raise UserError("sft: there is no rollout to imitate")
    course = Course(settings, learner, taught, kept_apart, paths.metrics / HELDOUT_LOSS)
    if not is_whole(output):
        log.info("%d rollouts to imitate in %d updates, %d kept apart", len(taught), course.num_steps, len(kept_apart))
        fit_sft(
            imitating_settings(settings, learner),
            policy=policy,
            num_steps=course.num_steps + 1,  # the last of which is a look only
            lessons=course,
            output=output,
            step=step,
            paths=paths,
        )
    return course.losses


def imitating_settings(settings: SftSettings, learner: LearnerSettings) -> LearnerSettings:
    """How the learner imitates: with the machine of `learner`, at the pace of `settings`."""
    return dataclasses.replace(
        learner,
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        schedule="linear",
        loss=LossSettings(normaliser=settings.normaliser),
        seed=settings.seed,
    )


def split_by_task(lessons: Iterable[Lesson], settings: SftSettings) -> tuple[list[Lesson], list[Lesson]]:
    """Those to imitate, and those kept apart: all of a task on one side, chosen by its name and the seed."""
    lessons = [lesson for lesson in lessons if lesson.tree.num_sampled_tokens]
    tasks = sorted({lesson.task_id for lesson in lessons}, key=lambda task: _shuffled(f"{settings.seed}/{task}"))
    apart = set(tasks[: min(math.ceil(settings.heldout_share * len(tasks)), len(tasks) - 1)]) if tasks else set()
    return (
        [lesson for lesson in lessons if lesson.task_id not in apart],
        [lesson for lesson in lessons if lesson.task_id in apart],
    )


def _shuffled(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


class Course:
    """The batches of all epochs, the same whenever they are asked for, and the looks between them."""

    def __init__(
        self,
        settings: SftSettings,
        learner: LearnerSettings,
        taught: Sequence[Lesson],
        kept_apart: Sequence[Lesson],
        losses: Path,
    ) -> None:
        """`losses`: a file that outlives a kill."""
        self._settings, self._learner = settings, learner
        self._taught = [lesson.tree for lesson in taught]
        self._kept_apart = [lesson.tree for lesson in kept_apart]
        self._losses_file = losses
        self.losses: dict[int, float] = read_losses(losses)
        """On the rollouts that are kept apart, by update."""

    @property
    def steps_per_epoch(self) -> int:
        """Updates that go through all rollouts once."""
        return math.ceil(len(self._taught) / self._settings.batch_size)

    @property
    def num_steps(self) -> int:
        """Updates in all."""
        return self._settings.epochs * self.steps_per_epoch

    def __call__(self, step: int, policy: TreePolicy) -> list[CallTree] | None:
        """What to imitate in update `step`; None after the last."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if at == 0 and self._kept_apart:
            self._look(step, policy)
        if step >= self.num_steps:
            return None
        order = list(self._taught)
        random.Random(f"{self._settings.seed} epoch {epoch}").shuffle(order)
        size = self._settings.batch_size
        return order[at * size : (at + 1) * size]

    def _look(self, step: int, policy: TreePolicy) -> None:
        self.losses[step] = loss_per_token(policy, self._kept_apart, self._learner)
        log.info("update %d of %d: loss on the tasks kept apart %.4f", step, self.num_steps, self.losses[step])
        write_atomic(self._losses_file, msgspec.json.format(msgspec.json.encode(self.losses)))


def read_losses(file: Path) -> dict[int, float]:
    """What an earlier turn has noted; nothing where there was none."""
    return msgspec.json.decode(file.read_bytes(), type=dict[int, float]) if file.exists() else {}


@torch.no_grad()
def loss_per_token(policy: TreePolicy, trees: Sequence[CallTree], settings: LearnerSettings) -> float:
    """Mean negative log-likelihood of the sampled tokens that fit into rows, each counted once."""
    step = build_sft_step(0, trees, settings)
    logprobs = [policy(row.to(policy.model.device)).logprobs_N.double().cpu() for row in step.rows]
    return -float(torch.cat(logprobs).mean())
