from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import UserError
from clawhpc.tasks.mix import plan_groups

TASKS = st.lists(st.text(min_size=1), min_size=1, max_size=12, unique=True)
HARNESSES = st.lists(st.sampled_from(["claude_code", "codex", "openclaw", "pi"]), min_size=1, max_size=4, unique=True)


@given(tasks=TASKS, harnesses=HARNESSES, num_groups=st.integers(1, 12), seed=st.integers(0, 5), data=st.data())
def test_the_pairs_of_a_step_differ_and_do_not_depend_on_the_order_of_the_tasks(
    tasks: list[str], harnesses: list[str], num_groups: int, seed: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, 50))
    if num_groups > len(tasks) * len(harnesses):
        with pytest.raises(UserError, match="lower the groups per step"):
            plan_groups(tasks, harnesses, step=step, num_groups=num_groups, seed=seed)
        return
    pairs = plan_groups(tasks, harnesses, step=step, num_groups=num_groups, seed=seed)
    assert len(set(pairs)) == num_groups
    assert pairs == plan_groups(tasks[::-1], harnesses, step=step, num_groups=num_groups, seed=seed)


@given(tasks=TASKS, harnesses=HARNESSES, seed=st.integers(0, 5))
def test_every_task_comes_once_before_one_comes_again_and_meets_every_harness(
    tasks: list[str], harnesses: list[str], seed: int
) -> None:
    walk = [
        plan_groups(tasks, harnesses, step=step, num_groups=1, seed=seed)[0]
        for step in range(len(tasks) * len(harnesses))
    ]
    for epoch in range(len(harnesses)):
        met = walk[epoch * len(tasks) : (epoch + 1) * len(tasks)]
        assert {task for task, _ in met} == set(tasks)
    assert set(walk) == {(task, harness) for task in tasks for harness in harnesses}


def test_the_harnesses_take_turns_within_a_step() -> None:
    tasks = [f"task-{index}" for index in range(32)]
    pairs = plan_groups(tasks, ["claude_code", "pi"], step=1, num_groups=8, seed=0)
    assert Counter(harness for _, harness in pairs) == {"claude_code": 4, "pi": 4}


def test_another_seed_walks_in_another_order() -> None:
    tasks = [f"task-{index}" for index in range(32)]
    first, second = (plan_groups(tasks, ["pi"], step=0, num_groups=8, seed=seed) for seed in (0, 1))
    assert first != second
