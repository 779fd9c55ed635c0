import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.records import Criterion
from clawhpc.tasks import jobbench
from tests.fakes.task_sets import lay_jobbench


def only_fault(folder: Path) -> str:
    lay_jobbench(folder, "zz_sound")
    loaded = jobbench.load_tasks(folder)
    assert [task.task_id for task in loaded.tasks] == ["zz_sound__task1"]
    (fault,) = loaded.faults
    return fault


def test_a_task_as_the_data_set_has_it(tmp_path: Path) -> None:
    root = lay_jobbench(tmp_path)
    loaded = jobbench.load_tasks(tmp_path)
    (task,) = loaded.tasks
    assert loaded.faults == ()
    assert (task.task_id, task.instruction) == ("bakers__task1", "Work out the cost of flour.\n")
    assert task.input_dir == str(root / "task_folder")
    assert task.metadata == {"occupation": "bakers"}
    assert task.verifier.script is None
    assert task.verifier.rubric is not None
    flour = f"Is the cost of flour right?\n{jobbench.ALL_OR_NOTHING}\n- It is 12\n- It is in euros"
    signed = f"Is it signed?\n{jobbench.ALL_OR_NOTHING}\n- Is it signed?"
    assert task.verifier.rubric.criteria == (
        Criterion(name="rubric 1", text=flour, weight=3.0),
        Criterion(name="rubric 2", text=signed, weight=1.0),
    )


def test_tasks_go_by_number_and_other_folders_are_none(tmp_path: Path) -> None:
    for number in (10, 2):
        lay_jobbench(tmp_path, number=number)
    lay_jobbench(tmp_path, number=1).rename(tmp_path / "bakers/task1_old")
    assert [task.task_id for task in jobbench.load_tasks(tmp_path).tasks] == ["bakers__task2", "bakers__task10"]


def test_either_name_of_the_list_is_read(tmp_path: Path) -> None:
    path = lay_jobbench(tmp_path) / "RUBRICS.json"
    path.write_text(json.dumps({"evaluation_rubrics": [{"rubric": "Is it?", "weight": 2}]}))
    (task,) = jobbench.load_tasks(tmp_path).tasks
    assert task.verifier.rubric is not None
    assert [one.weight for one in task.verifier.rubric.criteria] == [2.0]


def test_what_is_to_be_found_on_the_web_is_a_fault(tmp_path: Path) -> None:
    root = lay_jobbench(tmp_path)
    (root / "files_required_to_search").mkdir()
    assert only_fault(tmp_path).startswith(f"{root}/files_required_to_search: to be found on the web")


@pytest.mark.parametrize(
    ("rubrics", "fault"),
    [
        ([{"rubric": "", "weight": 1}], "rubrics[0].rubric is empty"),
        ([{"rubric": "a", "weight": 1}, {"rubric": "b", "weight": 0}], "rubrics[1].weight 0: must be more than 0"),
        ([{"rubric": "a"}], "missing required field `weight` - at `$.rubrics[0]`"),
        ({"rubric": "a"}, "Expected `array`, got `object` - at `$.rubrics`"),
    ],
)
def test_a_faulty_rubric_names_file_and_key(tmp_path: Path, rubrics: Any, fault: str) -> None:
    root = lay_jobbench(tmp_path, rubrics=rubrics)
    found = only_fault(tmp_path)
    assert found.startswith(f"{root}/RUBRICS.json: ")
    assert fault in found


def test_an_empty_list_a_missing_list_and_missing_instructions_are_faults(tmp_path: Path) -> None:
    (lay_jobbench(tmp_path, "a") / "RUBRICS.json").write_text("{}")
    (lay_jobbench(tmp_path, "b") / "RUBRICS.json").unlink()
    (lay_jobbench(tmp_path, "c") / "task_folder/TASK_INSTRUCTIONS.txt").unlink()
    loaded = jobbench.load_tasks(tmp_path)
    assert loaded.faults == (
        f"{tmp_path}/a/task1/RUBRICS.json: rubrics is empty",
        f"{tmp_path}/b/task1/RUBRICS.json: No such file or directory",
        f"{tmp_path}/c/task1/task_folder/TASK_INSTRUCTIONS.txt: No such file or directory",
    )
