"""Pair tasks with harnesses for a step.

What holds for every way: the pairs of a step differ, and stand in a seeded order of their own, whatever harness they
are of; a harness that takes one turn meets every task once before it meets one again; the same arguments give the same
pairs, so that a resume goes on where the run was.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, assert_never

from clawhpc.errors import UserError

Mix = Literal["turns", "each", "one"]
"""How the groups of a step are shared out among several harnesses, over one seeded order of the tasks.

`turns`: the next task with the next harness. As many different tasks in a step as there can be. A harness may take
several turns to another's one: over as many times around as there are turns, every task meets it so often.
`each`: a task with every harness, then the next task. In every step, harnesses are compared on the same tasks.
`one`: a step has one harness, and the next step the same tasks with the next one. An engine holds the prompt of one
harness at a time, and an update is by what one has taught.
"""


ONE_TURN_EACH: Mapping[str, int] = MappingProxyType({})
"""Harness -> its turns; one that is not named takes one."""


def plan_groups(
    task_ids: Sequence[str],
    harnesses: Sequence[str],
    mix: Mix,
    *,
    step: int,
    num_groups: int,
    seed: int,
    turns: Mapping[str, int] = ONE_TURN_EACH,
) -> tuple[tuple[str, str], ...]:
    """The (task_id, harness) pairs of step `step`, shuffled together."""
    check_mix(mix, num_groups, len(task_ids), len(harnesses), turns)
    order, taking = sorted(task_ids), take_turns(harnesses, turns)
    random.Random(seed).shuffle(order)
    places = range(step * num_groups, (step + 1) * num_groups)
    numbers = (_place(mix, place, num_groups, len(order), len(taking)) for place in places)
    pairs = [(order[task], taking[turn]) for task, turn in numbers]
    random.Random(f"{seed}/{step}").shuffle(pairs)
    return tuple(pairs)


def take_turns(harnesses: Sequence[str], turns: Mapping[str, int]) -> list[str]:
    """Whose turn it is, once around: each as often as `turns` says, those of one harness spread out evenly."""
    count = {name: turns.get(name, 1) for name in harnesses}
    due = [((2 * nth + 1) / (2 * count[name]), name) for name in harnesses for nth in range(count[name])]
    return [name for _, name in sorted(due, key=lambda turn: turn[0])]


def check_mix(
    mix: Mix, num_groups: int, num_tasks: int, num_harnesses: int, turns: Mapping[str, int] = ONE_TURN_EACH
) -> None:
    """UserError when a step of `num_groups` groups cannot be made of so many tasks and harnesses."""
    if any(count > 1 for count in turns.values()):
        _check_turns(mix, num_groups, num_tasks)
    num_pairs = num_tasks if mix == "one" else num_tasks * num_harnesses
    if num_groups > num_pairs:
        having = "with one harness a step (tasks.mix=one)" if mix == "one" else f"with {num_harnesses} harnesses"
        raise UserError(
            f"campaign.groups_per_step={num_groups}: needs as many (task, harness) pairs, but {num_tasks} tasks to "
            f"train on, {having}, give only {num_pairs}"
        )
    if mix == "each" and num_groups % num_harnesses:
        raise UserError(
            f"campaign.groups_per_step={num_groups}: with tasks.mix=each a task has a group with each of "
            f"{num_harnesses} harnesses in its step, so that it must be a multiple of {num_harnesses}"
        )


def _check_turns(mix: Mix, num_groups: int, num_tasks: int) -> None:
    if mix != "turns":
        instead = {
            "each": "credit.harness_weights says what they weigh",
            "one": "only with tasks.mix=turns do they differ",
        }
        raise UserError(
            f"tasks.turns: with tasks.mix={mix} all harnesses have as many groups as any other; {instead[mix]}"
        )
    if num_groups > num_tasks:
        raise UserError(
            f"campaign.groups_per_step={num_groups}: with tasks.turns a step has no more groups than the {num_tasks} "
            "tasks to train on, or one might come twice with a harness"
        )


def _place(mix: Mix, place: int, num_groups: int, num_tasks: int, num_harnesses: int) -> tuple[int, int]:
    """The numbers of the task and of the harness at `place` of a run, in which the groups of all steps are counted."""
    match mix:
        case "turns":  # the n-th time around, every task has the n-th harness after its first
            around, task = divmod(place, num_tasks)
            return task, (task + around) % num_harnesses
        case "each":
            return place // num_harnesses % num_tasks, place % num_harnesses
        case "one":
            step, group = divmod(place, num_groups)
            return (step // num_harnesses * num_groups + group) % num_tasks, step % num_harnesses
    assert_never(mix)
