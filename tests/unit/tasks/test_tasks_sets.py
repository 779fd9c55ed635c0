from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.tasks.families import FAMILIES, Family, SmallTask
from clawhpc.tasks.generate import GenerateSettings
from clawhpc.tasks.sets import TaskSettings, load_task_sets
from tests.fakes.task_sets import lay_harbor

SMALL = TaskSettings(generate=GenerateSettings(families=("create",), num_train=4, num_heldout=2))


def test_generated_tasks_are_made_once_and_found_again(tmp_path: Path) -> None:
    first = load_task_sets(SMALL, tmp_path)
    assert (len(first.train), len(first.heldout)) == (4, 2)
    assert load_task_sets(SMALL, tmp_path) == first
    assert len(list((tmp_path / "tasks").glob("[!.]*"))) == 1


def test_tasks_of_other_families_under_the_same_settings_are_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {task.instruction for task in load_task_sets(SMALL, tmp_path).train}
    create = FAMILIES["create"]

    def build(slots: dict[str, str]) -> SmallTask:
        return create.build({**slots, "line": "something new"})

    monkeypatch.setitem(FAMILIES, "create", Family(create.draw, build))
    after = {task.instruction for task in load_task_sets(SMALL, tmp_path).train}
    assert len(after) == 4
    assert not before & after


def test_a_held_out_folder_without_one_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tasks\.heldout: needs tasks\.folder too"):
        load_task_sets(TaskSettings(heldout=str(tmp_path)), tmp_path)


def test_tasks_that_are_left_out_are_named_in_the_log_by_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abc":
        lay_harbor(tmp_path / "set", name, instruction="")
    lay_harbor(tmp_path / "set", "d", toml="[surprise]\n")
    lay_harbor(tmp_path / "set", "sound")
    sets = load_task_sets(TaskSettings(folder=str(tmp_path / "set")), tmp_path / "cache")
    assert [task.task_id for task in sets.train] == ["ours/sound"]
    left_out = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert left_out == [
        f"task left out: {tmp_path}/set/a/instruction.md: the instruction is empty "
        f"(and 2 tasks like it: python -m clawhpc.check tasks={tmp_path}/set)",
        f"task left out: {tmp_path}/set/d/task.toml: Object contains unknown field `surprise`",
    ]


def test_no_generated_task_need_be_held_out(tmp_path: Path) -> None:
    sets = load_task_sets(TaskSettings(generate=GenerateSettings(num_train=4, num_heldout=0)), tmp_path)
    assert (len(sets.train), len(sets.heldout)) == (4, 0)
