from collections import Counter, defaultdict
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import UserError
from clawhpc.tasks.mix import Mix, check_mix, plan_groups, take_turns

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
    met: dict[str, Counter[str]] = defaultdict(Counter)
    tasks = {task for step in walk for task, _ in step}
    for step in walk:
        assert len(set(step)) == len(step) == len(walk[0])
        for task, harness in step:
            met[harness][task] += 1
        for times in met.values():
            assert max(times.values()) - min(times[task] for task in tasks) <= 1
    assert all(set(times) == tasks for times in met.values())


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
    tasks = [sorted(task for task, _ in pairs) for pairs in steps]
    assert tasks[::2] == tasks[1::2]
    assert sorted(task for step in tasks[::2] for task in step) == THIRTY_TWO


def test_with_one_a_step_has_no_more_groups_than_there_are_tasks() -> None:
    with pytest.raises(UserError, match=r"=8: .* 5 tasks to train on, with one harness a step .* only 5"):
        plan_groups(THIRTY_TWO[:5], ["codex", "pi"], "one", step=0, num_groups=8, seed=0)


@pytest.mark.parametrize("mix", get_args(Mix))
def test_a_steps_pairs_are_shuffled_together_in_an_order_of_its_own_that_is_the_same_at_any_time(mix: Mix) -> None:
    def of_step(step: int, seed: int = 0) -> tuple[tuple[str, str], ...]:
        return plan_groups(THIRTY_TWO, ["codex", "pi"], mix, step=step, num_groups=8, seed=seed)

    steps = [of_step(step) for step in range(8)]
    assert [of_step(step) for step in reversed(range(8))] == steps[::-1]
    patterns = {tuple(harness for _, harness in pairs) for pairs in steps}
    assert len(patterns) == 2 if mix == "one" else len(patterns) > 4
    if mix == "one":
        assert [task for task, _ in steps[0]] != [task for task, _ in steps[1]]


@given(
    tasks=TASKS,
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    num_groups=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_a_harness_has_as_many_groups_of_each_task_as_it_takes_turns(
    tasks: list[str], counts: list[int], num_groups: int, seed: int
) -> None:
    names = ["claude_code", "codex", "pi"][: len(counts)]
    turns = dict(zip(names, counts, strict=True))
    num_groups = min(num_groups, len(tasks))
    num_steps = len(tasks) * sum(counts)  # all of them together, so many times around
    walk = [
        plan_groups(tasks, names, "turns", step=step, num_groups=num_groups, seed=seed, turns=turns)
        for step in range(num_steps)
    ]
    assert all(len({task for task, _ in step}) == num_groups for step in walk)
    met = Counter(pair for step in walk for pair in step)
    assert met == {(task, name): num_groups * turns[name] for task in tasks for name in names}


def test_the_turns_of_a_harness_are_spread_out_and_one_turn_each_is_the_order_of_the_names() -> None:
    assert take_turns(["codex", "pi"], {"codex": 3}) == ["codex", "codex", "pi", "codex"]
    assert take_turns(["codex", "pi", "hermes"], {}) == ["codex", "pi", "hermes"]


def test_a_step_has_the_share_of_each_harness_that_its_turns_say() -> None:
    pairs = plan_groups(
        THIRTY_TWO, ["claude_code", "pi"], "turns", step=1, num_groups=12, seed=0, turns={"claude_code": 2}
    )
    assert Counter(harness for _, harness in pairs) == {"claude_code": 8, "pi": 4}


@pytest.mark.parametrize(("mix", "instead"), [("each", r"credit\.harness_weights"), ("one", r"tasks\.mix=turns")])
def test_turns_are_for_a_mix_in_which_they_are_taken(mix: Mix, instead: str) -> None:
    with pytest.raises(UserError, match=rf"tasks\.turns: with tasks\.mix={mix} .*{instead}"):
        check_mix(mix, 4, 32, 2, {"pi": 2})
    check_mix(mix, 4, 32, 2, {"pi": 1})


def test_with_turns_a_step_has_no_more_groups_than_tasks() -> None:
    with pytest.raises(UserError, match=r"groups_per_step=8: with tasks\.turns .* 5 tasks"):
        check_mix("turns", 8, 5, 2, {"pi": 2})


def test_another_seed_walks_in_another_order() -> None:
    first, second = (plan_groups(THIRTY_TWO, ["pi"], "turns", step=0, num_groups=8, seed=seed) for seed in (0, 1))
    assert first != second
