from collections import Counter, defaultdict
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import UserError
from clawhpc.tasks.mix import Mix, check_mix, plan_groups

MIXES = st.sampled_from(get_args(Mix))
THIRTY_TWO = [f"task-{index:02}" for index in range(32)]
TASKS = st.integers(1, 12).map(lambda count: THIRTY_TWO[:count])
HARNESSES = st.sampled_from([["pi"], ["codex", "pi"], ["claude_code", "codex", "pi"]])

Walk = list[tuple[tuple[str, str], ...]]


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """The steps of a run, more than enough for all pairs to be met."""
    mix, tasks, harnesses = draw(MIXES), draw(TASKS), draw(HARNESSES)
    if mix == "each":
        num_groups = len(harnesses) * draw(st.integers(1, len(tasks)))
    else:
        num_groups = draw(st.integers(1, len(tasks) if mix == "one" else len(tasks) * len(harnesses)))
    num_steps = 2 * len(harnesses) * len(tasks) // num_groups + len(harnesses)
    return [plan_groups(tasks, harnesses, mix, step=step, num_groups=num_groups, seed=0) for step in range(num_steps)]


@given(walks())
def test_the_pairs_of_a_step_differ_and_a_harness_meets_every_task_once_before_it_meets_one_again(walk: Walk) -> None:
    met: dict[str, list[str]] = defaultdict(list)
    for step in walk:
        assert len(set(step)) == len(step) == len(walk[0])
        for task, harness in step:
            met[harness].append(task)
    tasks = {task for step in walk for task, _ in step}
    for order in met.values():
        assert set(order[: len(tasks)]) == tasks
        times = Counter[str]()
        for task in order:
            assert times[task] == min(times[one] for one in tasks)
            times[task] += 1


@given(mix=MIXES, tasks=TASKS, harnesses=HARNESSES, num_groups=st.integers(1, 40), step=st.integers(0, 50))
def test_a_step_is_planned_the_same_again_or_refused(
    mix: Mix, tasks: list[str], harnesses: list[str], num_groups: int, step: int
) -> None:
    try:
        check_mix(mix, num_groups, len(tasks), len(harnesses))
    except UserError:
        with pytest.raises(UserError):
            plan_groups(tasks, harnesses, mix, step=step, num_groups=num_groups, seed=0)
    else:
        pairs = plan_groups(tasks, harnesses, mix, step=step, num_groups=num_groups, seed=0)
        assert len(set(pairs)) == num_groups
        assert pairs == plan_groups(tasks[::-1], harnesses, mix, step=step, num_groups=num_groups, seed=0)


@given(tasks=TASKS, harnesses=HARNESSES)
def test_taking_turns_every_task_comes_once_before_one_comes_again(tasks: list[str], harnesses: list[str]) -> None:
    for around in range(len(harnesses)):
        pairs = plan_groups(tasks, harnesses, "turns", step=around, num_groups=len(tasks), seed=0)
        assert {task for task, _ in pairs} == {*tasks}


def test_taking_turns_the_harnesses_share_a_step() -> None:
    pairs = plan_groups(THIRTY_TWO, ["claude_code", "pi"], "turns", step=1, num_groups=8, seed=0)
    assert Counter(harness for _, harness in pairs) == {"claude_code": 4, "pi": 4}
    assert len({task for task, _ in pairs}) == 8


@given(tasks=TASKS, harnesses=HARNESSES, step=st.integers(0, 20), data=st.data())
def test_with_each_a_task_meets_every_harness_in_its_step(
    tasks: list[str], harnesses: list[str], step: int, data: st.DataObject
) -> None:
    num_tasks = data.draw(st.integers(1, len(tasks)))
    pairs = plan_groups(tasks, harnesses, "each", step=step, num_groups=num_tasks * len(harnesses), seed=0)
    assert Counter(task for task, _ in pairs) == dict.fromkeys({task for task, _ in pairs}, len(harnesses))
    assert len({task for task, _ in pairs}) == num_tasks


def test_with_each_a_step_that_would_part_a_task_from_a_harness_is_refused() -> None:
    with pytest.raises(UserError, match=r"groups_per_step=8: with tasks\.mix=each .* multiple of 3"):
        plan_groups(THIRTY_TWO, ["claude_code", "codex", "pi"], "each", step=0, num_groups=8, seed=0)


def test_with_one_a_step_has_one_harness_and_the_next_step_the_same_tasks_with_the_next() -> None:
    steps = [plan_groups(THIRTY_TWO, ["codex", "pi"], "one", step=step, num_groups=8, seed=0) for step in range(8)]
    assert [{harness for _, harness in pairs} for pairs in steps] == [{"codex"}, {"pi"}] * 4
    tasks = [[task for task, _ in pairs] for pairs in steps]
    assert tasks[::2] == tasks[1::2]
    assert sorted(task for step in tasks[::2] for task in step) == THIRTY_TWO


def test_with_one_a_step_has_no_more_groups_than_there_are_tasks() -> None:
    with pytest.raises(UserError, match=r"=8: .* 5 tasks to train on, with one harness a step .* only 5"):
        plan_groups(THIRTY_TWO[:5], ["codex", "pi"], "one", step=0, num_groups=8, seed=0)


def test_another_seed_walks_in_another_order() -> None:
    first, second = (plan_groups(THIRTY_TWO, ["pi"], "turns", step=0, num_groups=8, seed=seed) for seed in (0, 1))
    assert first != second
