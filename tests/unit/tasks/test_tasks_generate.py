import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.generate import GenerateSettings, generate_tasks
from clawhpc.tasks.oracle import task_solution
from tests.fakes.records import reward_folder

SMALL = GenerateSettings(num_train=12, num_heldout=8, seed=3)


def every_file(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def reward(workspace: Path) -> str:
    script = workspace / "reward" / "reward.sh"
    run = subprocess.run(["sh", script], cwd="/", capture_output=True, text=True, check=True, timeout=10)
    return run.stdout.splitlines()[-1]


def test_the_default_splits_are_large_enough_balanced_and_disjoint(tmp_path: Path) -> None:
    tasks = generate_tasks(GenerateSettings(), tmp_path / "tasks")
    train, heldout = (load_tasks(tasks.split(split)) for split in ("train", "heldout"))
    assert (len(train.tasks), len(heldout.tasks)) == (512, 256)
    assert train.faults == heldout.faults == ()
    assert set(Counter(task.metadata["family"] for task in heldout.tasks).values()) == {64}
    instructions = [task.instruction for task in train.tasks + heldout.tasks]
    assert len(set(instructions)) == len(instructions)


def test_the_same_settings_make_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    first = generate_tasks(SMALL, tmp_path / "first").root
    again = generate_tasks(SMALL, tmp_path / "again").root
    other = generate_tasks(GenerateSettings(num_train=12, num_heldout=8, seed=4), tmp_path / "other").root
    assert every_file(first) == every_file(again)
    assert every_file(first) != every_file(other)


def test_a_folder_that_is_there_is_left_alone_and_one_of_other_settings_is_refused(tmp_path: Path) -> None:
    root = generate_tasks(SMALL, tmp_path / "tasks").root
    marker = root / "train" / "marker"
    marker.touch()
    generate_tasks(SMALL, root)
    assert marker.exists()
    with pytest.raises(UserError, match="something other than the tasks of these settings"):
        generate_tasks(GenerateSettings(), root)


def test_a_half_written_folder_is_made_anew(tmp_path: Path) -> None:
    half = tmp_path / ".tasks.partial" / "train" / "train-00000-create"
    half.mkdir(parents=True)
    root = generate_tasks(SMALL, tmp_path / "tasks").root
    assert every_file(root) == every_file(generate_tasks(SMALL, tmp_path / "whole").root)
    assert not half.exists()


def test_too_few_instructions_are_a_user_error_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'count' has too few heldout instructions for num_heldout"):
        generate_tasks(GenerateSettings(families=("count",), num_train=1, num_heldout=400), tmp_path / "tasks")
    assert not (tmp_path / "tasks").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write tasks to .*/file/tasks: File exists"):
        generate_tasks(SMALL, tmp_path / "file" / "tasks")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    assert len(load_tasks(generate_tasks(SMALL, tmp_path / "tasks").split("heldout")).tasks) == 8


@pytest.mark.parametrize("families", [("juggle",), ()])
def test_an_unknown_family_is_refused_by_the_settings_which_name_the_known_ones(families: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="allowed are create, append, count, relay"):
        GenerateSettings(families=families)


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """The workspace of a solved task of the family `append`, as the verifier sees it."""
    tasks = load_tasks(generate_tasks(SMALL, tmp_path / "tasks").split("train")).tasks
    task = next(task for task in tasks if task.metadata["family"] == "append")
    workspace = tmp_path / "workspace"
    assert task.input_dir is not None
    shutil.copytree(task.input_dir, workspace)
    shutil.copytree(reward_folder(task), workspace / "reward")
    assert reward(workspace) == "0"
    for step in task_solution(task).steps:
        subprocess.run(step.command, shell=True, cwd=workspace, check=True, timeout=10)
    return workspace


def test_the_solved_workspace_gets_the_whole_reward(solved: Path) -> None:
    assert reward(solved) == "1"


@pytest.mark.parametrize(
    "spoil", ["one more file", "one more folder", "one more byte", "a missing file", "a link", "a pipe"]
)
def test_a_workspace_that_differs_anywhere_gets_none(solved: Path, spoil: str) -> None:
    target = next(path for path in solved.iterdir() if path.is_file() and path.name != "reward")
    match spoil:
        case "one more file":
            (solved / "extra").touch()
        case "one more folder":
            (solved / "extra").mkdir()
        case "one more byte":
            target.write_text(target.read_text() + " ")
        case "a missing file":
            target.unlink()
        case "a link":
            target.unlink()
            target.symlink_to(f"reward/expected/{target.name}")
        case "a pipe":
            target.unlink()
            subprocess.run(["mkfifo", target], check=True)
    assert reward(solved) == "0"


def test_two_processes_that_make_the_same_tasks_at_once_both_have_them(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: generate_tasks(SMALL, tmp_path / "tasks"), range(4)))
    assert {tasks.root for tasks in made} == {tmp_path / "tasks"}
