import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.tasks.families import FAMILIES, FILE_NAMES, WORDS, SmallTask, draw_task, small_task

ANY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def drawn(family: str, seed: int, split: str = "train") -> SmallTask:
    return draw_task(family, random.Random(seed), split)


@ANY_FAMILY
def test_the_steps_of_a_task_make_the_workspace_that_it_expects_and_print_what_it_says(
    family: str, tmp_path: Path
) -> None:
    for seed in range(8):
        task = drawn(family, seed)
        workspace = tmp_path / str(seed)
        workspace.mkdir()
        for name, content in task.inputs.items():
            (workspace / name).write_text(content)
        for step in task.steps:
            run = subprocess.run(
                step.command, shell=True, cwd=workspace, capture_output=True, text=True, check=True, timeout=10
            )
            assert run.stdout.removesuffix("\n") == step.output
        assert {path.name: path.read_text() for path in workspace.iterdir()} == task.expected
        shutil.rmtree(workspace)


@ANY_FAMILY
@given(seed=st.integers(0, 10_000))
def test_a_task_is_rebuilt_from_its_slots(family: str, seed: int) -> None:
    task = drawn(family, seed)
    assert small_task(task.family, dict(task.slots)) == task


@ANY_FAMILY
@given(seed=st.integers(0, 10_000))
def test_nothing_is_done_before_the_first_step(family: str, seed: int) -> None:
    task = drawn(family, seed)
    assert task.inputs != task.expected


@ANY_FAMILY
def test_no_instruction_lies_on_both_sides_of_the_split(family: str) -> None:
    train = {drawn(family, seed, "train").instruction for seed in range(300)}
    heldout = {drawn(family, seed, "heldout").instruction for seed in range(300)}
    assert len(train) > 100
    assert len(heldout) > 60
    assert not train & heldout


@given(seed=st.integers(0, 10_000))
def test_what_must_be_read_first_is_not_in_the_instruction(seed: int) -> None:
    task = drawn("relay", seed)
    assert task.slots["file"] not in task.instruction
    assert len(task.steps) == 2


def test_the_vocabulary_is_small_and_unambiguous() -> None:
    assert len(set(FILE_NAMES)) == 24
    assert len(set(WORDS)) == 24
    assert not {name.split(".")[0] for name in FILE_NAMES} & set(WORDS)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="task family 'juggle' is none of create, append, count, relay"):
        small_task("juggle", {})
