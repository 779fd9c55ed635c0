"""A task of several turns that a tiny policy learns in seconds, in a harness that keeps its history or forks it.

A rollout is a conversation of three turns. Its reward is known only at the end, and asks for the right first reply and
the right last reply at once. What is right is the same for both tasks: else one policy in three does in both what is
right in one, solves half, and stays there. But one pays less than the other, for a critic to find out. Every second
rollout has a subagent after the first turn, whose help is worth half of the reward. All rollouts of a step are drawn
together, in this process.

Shapes: R rollouts, T tokens of a prompt, C tokens of a reply, V ids that can be drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.policy import load_policy
from clawhpc.learner.trainer import LearnerPaths, fit_sft
from clawhpc.paths import RunPaths
from clawhpc.records import CallRole, RolloutRecord
from clawhpc.tree.build import build_tree
from clawhpc.tree.nodes import CallTree
from tests.fakes.learner_campaign import SETTINGS, with_logprobs
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session

Ids = tuple[int, ...]
Draw = Callable[[list[Ids]], list[tuple[Ids, tuple[float, ...]]]]
"""Prompts of one length -> for each the reply, and its log-probs."""

HEAD: Ids = (1, 2, 3)
TASKS = (20, 30)
"""The token that tells a task; words of its parity are right in the first reply."""
PAYS = dict(zip(TASKS, (1.0, 0.5), strict=True))
"""What a rollout that does everything right is worth."""
ASKING: Ids = (4,)
"""Before the task, in the message that asks for it, which a harness that forks moves to the end of each prompt."""
RESULT: Ids = (5,)
"""What the harness says after a turn, before how it went."""
GOOD, BAD = 6, 7
NUM_TURNS = 3
HELPING: Ids = (10, 11)
"""Before the task, in the prompt of a subagent."""
WORDS = range(40, 48)
"""The ids that a reply is made of; the policy that training begins with draws them all alike. Those of the second half
are right in the last reply.
"""
REPLY_TOKENS = 2
NUM_SAMPLES = 16
"""Rollouts of a group."""
PARTIAL = 0.1
"""For each of the two replies that is right by itself."""


@dataclass
class Attempt:
    """One rollout as it goes on."""

    task: int
    has_helper: bool
    """A subagent."""
    session: Session = field(default_factory=Session)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)
    """Of each call."""
    kept: tuple[Ids | int, ...] = ()
    """What every later prompt repeats."""

    def replies(self, role: CallRole) -> list[Ids]:
        calls = (call for call in self.session.calls if call.role is role and call.tokens)
        return [call.tokens.completion_ids for call in calls]

    def prompt_ids(self, history: Sequence[Ids | int]) -> Ids:
        replies = [call.tokens.completion_ids for call in self.session.calls]
        return tuple(token for piece in history for token in (replies[piece] if isinstance(piece, int) else piece))

    @property
    def first_right(self) -> bool:
        return is_of_task(self.replies(CallRole.MAIN)[0], self.task)

    @property
    def last_right(self) -> bool:
        return all(token in WORDS[len(WORDS) // 2 :] for token in self.replies(CallRole.MAIN)[-1])

    @property
    def help_right(self) -> bool:
        """So it is where there is no subagent."""
        return all(is_of_task(reply, self.task) for reply in self.replies(CallRole.SUBAGENT))

    @property
    def result(self) -> Ids:
        """What the harness says of the first turn and of the help, and asks again."""
        return (*RESULT, GOOD if self.first_right else BAD, GOOD if self.help_right else BAD, self.task)

    @property
    def reward(self) -> float:
        first, last = self.first_right, self.last_right
        reward = PAYS[self.task] * (PARTIAL * (first + last) + (1 - 2 * PARTIAL) * (first and last))
        return reward if self.help_right else reward / 2

    def record(self, step: int, sample: int) -> RolloutRecord:
        group = make_group(str(self.task), step=step, num_samples=NUM_SAMPLES)
        calls = tuple(map(with_logprobs, self.session.calls, self.logprobs))
        return make_record(group, sample, self.reward, calls=calls)


def is_of_task(reply: Ids, task: int) -> bool:
    """Words of the task's parity."""
    return all(token in WORDS and token % 2 == task % 2 for token in reply)


def attempt_tasks(draw: Draw, *, forks: bool, version: int, num_samples: int = NUM_SAMPLES) -> list[Attempt]:
    """All rollouts of a step, turn by turn."""
    attempts = [Attempt(task, has_helper=bool(sample % 2)) for task in TASKS for sample in range(num_samples)]

    def ask(asked: list[Attempt], histories: list[tuple[Ids | int, ...]], role: CallRole) -> list[int]:
        prompts = [attempt.prompt_ids(history) for attempt, history in zip(asked, histories, strict=True)]
        call_ids = []
        for attempt, history, (reply, logprobs) in zip(asked, histories, draw(prompts), strict=True):
            call_ids.append(attempt.session.call(*history, reply=reply, role=role, version=version))
            attempt.logprobs.append(logprobs)
        return call_ids

    for attempt in attempts:
        attempt.kept = (HEAD,) if forks else (HEAD, (*ASKING, attempt.task))
    for turn in range(NUM_TURNS):
        histories = [(*attempt.kept, (*ASKING, attempt.task)) if forks else attempt.kept for attempt in attempts]
        call_ids = ask(attempts, histories, CallRole.MAIN)
        if not turn:
            helped = [attempt for attempt in attempts if attempt.has_helper]
            ask(helped, [((*HELPING, attempt.task),) for attempt in helped], CallRole.SUBAGENT)
        for attempt, call_id in zip(attempts, call_ids, strict=True):
            attempt.kept += (call_id, attempt.result)
    return attempts


@dataclass
class TreeTask:
    """Collects steps by the policy that is published for each; what they were worth is kept, step after step."""

    run: RunPaths
    forks: bool
    """The harness moves its last message at every turn, so that each reply is a leaf and its repetition a copy."""
    seed: int = 0
    solved: list[float] = field(default_factory=list)
    """Share of rollouts whose first and last reply are right."""
    helped: list[float] = field(default_factory=list)
    """Share of subagents that are right."""
    rewards: list[float] = field(default_factory=list)

    def collect(self, step: int) -> list[RolloutRecord]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        attempts = attempt_tasks(draw_from(self.run.policy(step), generator), forks=self.forks, version=step)
        self.solved.append(mean([attempt.first_right and attempt.last_right for attempt in attempts]))
        self.helped.append(mean([attempt.help_right for attempt in attempts if attempt.has_helper]))
        self.rewards.append(mean([attempt.reward for attempt in attempts]))
        return [attempt.record(step, number % NUM_SAMPLES) for number, attempt in enumerate(attempts)]


def draw_from(folder: Path, generator: torch.Generator) -> Draw:
    """Draws at temperature 1 from the policy in `folder`."""
    model, num_token_ids = load_policy(folder), count_token_ids(folder)

    def draw(prompts: list[Ids]) -> list[tuple[Ids, tuple[float, ...]]]:
        replies_RC, logprobs_RC = _sample(model, torch.tensor(prompts), num_token_ids, generator)
        return list(zip(map(tuple, replies_RC.tolist()), map(tuple, logprobs_RC.tolist()), strict=True))

    return draw


@torch.no_grad()
def _sample(
    model: PreTrainedModel, ids_RT: Tensor, num_token_ids: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    logprobs = []
    for _ in range(REPLY_TOKENS):
        layout = TreeLayout.chain(ids_RT.shape[1])
        logits_RV = model(input_ids=ids_RT, use_cache=False, tree_layout=layout, logits_to_keep=1).logits[:, -1]
        logprobs_RV = logits_RV[:, :num_token_ids].log_softmax(-1)
        token_R1 = torch.multinomial(logprobs_RV.exp(), 1, generator=generator)
        logprobs.append(logprobs_RV.gather(-1, token_R1))
        ids_RT = torch.cat([ids_RT, token_R1], dim=1)
    return ids_RT[:, -REPLY_TOKENS:], torch.cat(logprobs, dim=1)


def teach_words(policy: Path, folder: Path, *, num_steps: int = 50) -> Path:
    """The policy that training begins with: it imitates conversations whose replies are words, any of them."""

    def lessons(step: int, _: object) -> list[CallTree]:
        rng = random.Random(step)

        def draw(prompts: list[Ids]) -> list[tuple[Ids, tuple[float, ...]]]:
            return [(tuple(rng.choices(WORDS, k=REPLY_TOKENS)), (0.0,) * REPLY_TOKENS) for _ in prompts]

        attempts = attempt_tasks(draw, forks=bool(step % 2), version=0, num_samples=4)
        return [build_tree(str(number), attempt.session.calls) for number, attempt in enumerate(attempts)]

    version = fit_sft(
        replace(SETTINGS, lr=1e-2, schedule="linear", token_budget=1000, checkpoint_every=num_steps),
        policy=policy,
        num_steps=num_steps,
        lessons=lessons,
        output=folder / "start",
        paths=LearnerPaths(checkpoints=folder / "checkpoints", metrics=folder / "metrics"),
    )
    return Path(version.path)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
