"""Make a policy that can be reinforced out of a few captured conversations.

    traces ─▶ tokenizer, fresh policy ─▶ lessons without the head ─▶ lessons with it ─▶ policy

A tiny policy learns the form of a tool call at once, and late to copy names and words out of its prompt. The head of
system prompt and tools, ten times as long as the rest, teaches nothing and costs most, so copying is learned without it
first. When it is put before the conversations the policy fails at everything for some thirty updates, until it has
learned to look past it. What it is weak in is practised more.

Each stage ends at a pass rate, not after a number of updates: the rollouts of a policy that always passes, or never,
are all alike, and teach reinforcement learning nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import UserError
from clawhpc.learner.disk import disk_errors
from clawhpc.learner.exam import Exam, Gate, Rates, describe, weakest_harness
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.policy import create_policy
from clawhpc.learner.settings import ColdStartSettings, LearnerSettings, LossSettings, PolicySettings
from clawhpc.learner.tokenizer import train_tokenizer
from clawhpc.learner.traces import Example, TraceBook, encode_example
from clawhpc.learner.trainer import LearnerPaths, fit_sft
from clawhpc.tree.nodes import CallTree

log = logging.getLogger(__name__)

RENDERER = "qwen3"
"""The chat format of the policies that are made here."""
TEXTS_PER_SKILL = 100
"""For the tokenizer: enough for every name and word of the vocabulary to become one token."""
DAYS_PER_SKILL = 2
"""Of these texts, how many have the head, each of another day."""
BYTES_ONLY = 300
"""Room for all bytes and the chat's own tokens: a vocabulary without merges."""
LEAST_PRACTICE = 0.05
"""Weight of a skill that always passes, beside 1 for one that never does."""
CHECKPOINT_EVERY = 50
"""Updates, at least: some twenty seconds of work."""
ROUGH_CHECK_EVERY = 10
"""Updates between two looks at the pass rates in the first stage, whose end need not be exact."""
LOG_EVERY = 30
"""Updates between two lines about the pass rates."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the cold start."""

    name: str
    head: bool
    """Whether conversations have their system prompt and tools."""
    gate: Gate
    num_steps: int
    """At most."""
    check_every: int
    """Steps between two looks at the pass rates."""


def plan_stages(settings: ColdStartSettings) -> tuple[Stage, Stage]:
    """Without the head, then with it."""
    return (
        Stage(
            name="headless",
            head=False,
            gate=Gate(pass_rate=settings.headless_pass_rate, floor=settings.floor),
            num_steps=settings.headless_steps,
            check_every=ROUGH_CHECK_EVERY,
        ),
        Stage(
            name="whole",
            head=True,
            gate=Gate(pass_rate=settings.pass_rate, floor=settings.floor),
            num_steps=settings.steps,
            check_every=settings.check_every,
        ),
    )


def make_policy(
    settings: ColdStartSettings,
    shape: PolicySettings,
    learner: LearnerSettings,
    book: TraceBook,
    *,
    folder: Path,
    output: Path,
) -> None:
    """Teach a fresh policy the skills of `book`, and publish it in `output`.

    `folder` keeps what is done so far: each part is whole or not there, and is not made again. UserError, and nothing
    is published, when a skill stays below the floor.
    """
    tokenizer, policy = folder / "tokenizer", folder / "fresh"
    if not tokenizer.exists():
        write_tokenizer(sample_examples(book, settings.seed), tokenizer, vocab_size=shape.vocab_size)
    if not policy.exists():
        create_policy(policy, tokenizer, shape, seed=settings.seed, renderer=RENDERER)
    teaching = teaching_settings(settings, learner)
    stages = plan_stages(settings)
    for stage in stages:
        taught = output if stage is stages[-1] else folder / stage.name
        if not taught.exists():
            fit_sft(
                dataclasses.replace(teaching, checkpoint_every=checkpoint_interval(stage)),
                policy=policy,
                num_steps=stage.num_steps + 1,  # the last of which is a look only
                lessons=Lessons(stage, settings, book_of(stage, book), Classroom(tokenizer, teaching)),
                output=taught,
                paths=LearnerPaths(
                    checkpoints=folder / f"{stage.name}-checkpoints", metrics=folder / f"{stage.name}-metrics"
                ),
            )
        policy = taught


def book_of(stage: Stage, book: TraceBook) -> TraceBook:
    """What a stage teaches. Without its head no conversation says in which harness it is held, and so how the tools are
    called; to copy names and words is learned as well in one harness as in several.
    """
    return book if stage.head else book.of_one_harness


def teaching_settings(settings: ColdStartSettings, learner: LearnerSettings) -> LearnerSettings:
    """How the learner imitates: with the machine of `learner`, at the pace of `settings`."""
    return dataclasses.replace(
        learner,
        lr=settings.lr,
        warmup_steps=settings.warmup_steps,
        schedule="constant",
        weight_decay=0.0,
        loss=LossSettings(),
        seed=settings.seed,
    )


def checkpoint_interval(stage: Stage) -> int:
    """Updates between two checkpoints: who goes on from one looks at the pass rates, so it lies where all look (law 8).

    Which skills are practised depends on the rates of the last look, which a checkpoint does not hold.
    """
    return stage.check_every * -(-CHECKPOINT_EVERY // stage.check_every)


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def write_tokenizer(examples: Iterator[Example], folder: Path, *, vocab_size: int) -> None:
    """Train a tokenizer on conversations as the chat format writes them; in `folder`, whole or not at all."""
    with tempfile.TemporaryDirectory() as scratch:
        train_tokenizer((), Path(scratch), vocab_size=BYTES_ONLY)
        renderer = ChatRenderer(Path(scratch), renderer=RENDERER, thinking=False)
        texts = [renderer.decode(token_ids(encode_example(renderer, example, "text"))) for example in examples]
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with disk_errors(part):
        train_tokenizer(texts, part, vocab_size=vocab_size)
    part.replace(folder)


def token_ids(tree: CallTree) -> tuple[int, ...]:
    """All ids of a tree without forks, in order."""
    return tuple(token for node in tree.nodes for token in node.token_ids)


def sample_examples(book: TraceBook, seed: int) -> Iterator[Example]:
    """What the tokenizer is trained on."""
    rng = random.Random(f"{seed} tokenizer")
    for skill in book.skills:
        for index in range(TEXTS_PER_SKILL):
            example = book.draw(skill, rng, "train")
            yield example.on_day(random_day(rng)) if index < DAYS_PER_SKILL else example.without_head


def random_day(rng: random.Random) -> str:
    """An ISO date of these years."""
    return f"20{rng.randint(24, 35)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


# ---------------------------------------------------------------------------------------------------------------------
# Lessons
# ---------------------------------------------------------------------------------------------------------------------


class Classroom:
    """Turns examples into what the learner takes, for one tokenizer."""

    def __init__(self, tokenizer_folder: Path, learner: LearnerSettings) -> None:
        self._learner = learner
        self._renderer = ChatRenderer(tokenizer_folder, renderer=RENDERER, thinking=False)

    def encode(self, example: Example) -> CallTree:
        """An example to imitate."""
        return encode_example(self._renderer, example, "example")

    def exam(self, stage: Stage, book: TraceBook, rng: random.Random, num_tasks: int) -> Exam:
        """About `num_tasks` fresh tasks for each harness. Held-out ones are not looked at before the evaluation."""
        tasks_per_skill = max(1, num_tasks // len({skill.family for skill in book.skills}))
        trees = {}
        for skill in book.skills:
            examples = [book.draw(skill, rng, "train").up_to_last_command for _ in range(tasks_per_skill)]
            trees[skill] = [self.encode(example if stage.head else example.without_head) for example in examples]
        return Exam(trees=trees, settings=self._learner)


class Lessons:
    """The batches of one stage, chosen by what the policy is weak in, until its gate admits the policy."""

    def __init__(self, stage: Stage, settings: ColdStartSettings, book: TraceBook, classroom: Classroom) -> None:
        self._stage = stage
        self._settings = settings
        self._book = book
        self._classroom = classroom
        self._exam = classroom.exam(stage, book, random.Random(f"{settings.seed} exam"), settings.tasks_per_check)
        self._rates: Rates = {}

    def __call__(self, step: int, policy: TreePolicy) -> list[CallTree] | None:
        """What to imitate in `step`; None when `policy` is good enough, or after the last step of the stage."""
        is_over = step == self._stage.num_steps
        if is_over or not self._rates or step % self._stage.check_every == 0:
            self._rates = self._exam.pass_rates(policy)
            admitted = self._stage.gate.admits(self._rates)
            if admitted or is_over or step % LOG_EVERY == 0:
                log.info(
                    "cold start %s the system prompt, update %d: pass rate %s, until %.2f",
                    "with" if self._stage.head else "without",
                    step,
                    describe(self._rates),
                    self._stage.gate.pass_rate,
                )
            if admitted:
                return None
        if is_over:
            self._check_floor(step)
            return None
        return self._batch(random.Random(f"{self._settings.seed} {self._stage.name} {step}"))

    def _batch(self, rng: random.Random) -> list[CallTree]:
        """All of one harness, the weakest, and one day, so that they have their head in common."""
        harness, day = weakest_harness(self._rates), random_day(rng)
        rates = {skill: rate for skill, rate in self._rates.items() if skill.harness == harness}
        weights = [max(LEAST_PRACTICE, 1.0 - rate) for rate in rates.values()]
        skills = rng.choices(list(rates), weights, k=self._settings.batch_size)
        examples = (self._book.draw(skill, rng, "train") for skill in skills)
        return [self._classroom.encode(one.on_day(day) if self._stage.head else one.without_head) for one in examples]

    def _check_floor(self, step: int) -> None:
        if self._stage.gate.laggards(self._rates):
            raise UserError(
                f"cold_start: after {step} {self._stage.name} steps the pass rate is {describe(self._rates)}, with a "
                f"family below cold_start.floor={self._settings.floor}: allow more steps, or take another seed"
            )
