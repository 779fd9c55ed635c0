"""Pair tasks with harnesses for a step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from clawhpc.errors import UserError


def plan_groups(
    task_ids: Sequence[str], harnesses: Sequence[str], *, step: int, num_groups: int, seed: int
) -> tuple[tuple[str, str], ...]:
    """The (task_id, harness) pairs of step `step`, all different; the same for the same arguments, after a resume too.

    Steps walk through one seeded order of the tasks. Every task comes once before one comes again, with the next of the
    harnesses each time, and the harnesses take turns within a step.
    """
    if num_groups > len(task_ids) * len(harnesses):
        raise UserError(
            f"a step of {num_groups} groups needs as many pairs, but {len(task_ids)} tasks with {len(harnesses)} "
            f"harnesses give {len(task_ids) * len(harnesses)}: lower the groups per step, or add tasks"
        )
    order = sorted(task_ids)
    random.Random(seed).shuffle(order)
    pairs = []
    for position in range(step * num_groups, (step + 1) * num_groups):
        epoch, rank = divmod(position, len(order))
        pairs.append((order[rank], harnesses[(rank + epoch) % len(harnesses)]))
    return tuple(pairs)
