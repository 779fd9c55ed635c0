import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.tasks.generate import GenerateSettings, draw_tasks, write_task
from clawhpc.tasks.load import LoadOptions, load_tasks, read_tasks
from tests.fakes.task_sets import TASK_TOML, lay_harbor, lay_jobbench, lay_officeqa, lay_pinchbench


def lay_clawgym(folder: Path, count: int) -> None:
    settings = GenerateSettings(families=("create", "append"), num_train=count, num_heldout=0)
    for number, task in enumerate(draw_tasks(settings, "train", count)):
        write_task(task, f"task_{number:04d}", folder)


def lay_many_harbor(folder: Path, count: int) -> None:
    """The first is whole, the others share its folders."""
    first = lay_harbor(folder, "t0")
    for number in range(1, count):
        root = folder / f"t{number}"
        root.mkdir()
        (root / "task.toml").write_text(TASK_TOML.replace("{name}", root.name))
        for name in ("instruction.md", "environment", "tests"):
            (root / name).symlink_to(first / name)


FORMATS: dict[str, Callable[[Path, int], object]] = {
    "ClawGym": lay_clawgym,
    "Harbor": lay_many_harbor,
    "PinchBench": lambda folder, count: [
        lay_pinchbench(folder, f"task_{number}", workspace_files=[{"path": "a", "content": f"{number}"}])
        for number in range(count)
    ],
    "JobBench": lambda folder, count: [lay_jobbench(folder, number=number) for number in range(count)],
    "OfficeQA": lay_officeqa,
}


def options(folder: Path) -> LoadOptions:
    return LoadOptions(cache_dir=folder / "cache")


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found_by_what_is_there(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / "set", 2)
    loaded = load_tasks(tmp_path / "set", options(tmp_path))
    assert (loaded.format, len(loaded.tasks), loaded.faults) == (name, 2, ())


@pytest.mark.parametrize(
    ("name", "count"), [("Harbor", 2000), ("PinchBench", 200), ("JobBench", 200), ("OfficeQA", 200)]
)
def test_two_thousand_tasks_load_in_seconds(tmp_path: Path, name: str, count: int) -> None:
    """As time of this process: the machine may have other work."""
    FORMATS[name](tmp_path / "set", count)
    started = time.process_time()
    assert len(load_tasks(tmp_path / "set", options(tmp_path)).tasks) == count
    assert time.process_time() - started < 10 * count / 2000


def test_two_formats_in_one_folder_are_refused(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set")
    lay_pinchbench(tmp_path / "set")
    with pytest.raises(UserError, match=r"has tasks of Harbor \(\*/task\.toml\) and PinchBench \(task_\*\.md\)"):
        read_tasks(tmp_path / "set", options(tmp_path))


def test_no_format_at_all_is_a_user_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_tasks(tmp_path / "missing", options(tmp_path))
    with pytest.raises(UserError, match=r"no task in .*ClawGym: \*/data_entry.json; Harbor: \*/task.toml; .*OfficeQA"):
        read_tasks(tmp_path, options(tmp_path))


def test_a_set_without_a_sound_task_can_be_read_but_not_run(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "set", instruction="")
    assert len(read_tasks(tmp_path / "set", options(tmp_path)).faults) == 1
    with pytest.raises(
        UserError, match=r"\(Harbor\); the first of 1 faults: .*/sum/instruction.md: the instruction is empty"
    ):
        load_tasks(tmp_path / "set", options(tmp_path))
