import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawhpc.records import WORKSPACE_MOUNT, Criterion, TaskSpec
from clawhpc.tasks import pinchbench
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.layout import Layout
from tests.fakes.task_sets import GRADE, RUBRIC, lay_pinchbench


def load(folder: Path) -> LoadedTasks:
    return pinchbench.load_tasks(folder / "set", Layout(folder / "cache"))


def only_task(folder: Path) -> TaskSpec:
    loaded = load(folder)
    assert loaded.faults == ()
    (task,) = loaded.tasks
    return task


def only_fault(folder: Path) -> str:
    lay_pinchbench(folder / "set", "task_zz_sound")
    loaded = load(folder)
    assert [task.task_id for task in loaded.tasks] == ["task_zz_sound"]
    (fault,) = loaded.faults
    return fault


def test_a_task_of_both_gradings(tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set", grading_weights={"automated": 0.6, "llm_judge": 0.2})
    task = only_task(tmp_path)
    script, rubric = task.verifier.script, task.verifier.rubric
    assert (task.task_id, task.instruction, task.run_s) == ("task_note", "Write a note.", 90.0)
    assert (task.input_dir, task.metadata) == (None, {"name": "Note", "category": "notes"})
    assert task.verifier.rubric_weight == pytest.approx(0.25)
    assert rubric is not None
    assert rubric.expected == "It writes note.txt."
    assert rubric.criteria == (
        Criterion(name="Tone", text="**Score 1.0**: kind.", weight=25.0),
        Criterion(name="Content", text="**Score 1.0**: names milk.", weight=75.0),
    )
    assert script is not None
    assert (script.mount, script.cwd, script.reward_folder) == ("/tests", WORKSPACE_MOUNT, "/logs/verifier")


def test_what_a_rubric_says_before_its_first_criterion_is_told_with_what_is_expected(tmp_path: Path) -> None:
    before = "Judge by note.txt alone.\n"
    lay_pinchbench(tmp_path / "set", rubric=f"{before}\n{RUBRIC}")
    rubric = only_task(tmp_path).verifier.rubric
    assert rubric is not None
    assert rubric.expected == "It writes note.txt.\n\nJudge by note.txt alone."
    assert [criterion.name for criterion in rubric.criteria] == ["Tone", "Content"]


@pytest.mark.parametrize(("kind", "parts"), [("automated", (True, False)), ("llm_judge", (False, True))])
def test_one_grading_alone_needs_not_the_other_section(tmp_path: Path, kind: str, parts: tuple[bool, bool]) -> None:
    lay_pinchbench(tmp_path / "set", grading_type=kind)
    verifier = only_task(tmp_path).verifier
    assert (verifier.script is not None, verifier.rubric is not None) == parts


def test_a_rubric_without_weights_is_one_question_and_without_a_rubric_the_list_of_criteria_is_it(
    tmp_path: Path,
) -> None:
    lay_pinchbench(tmp_path / "set", "task_a", rubric="Is it kind?")
    lay_pinchbench(tmp_path / "set", "task_b", rubric="")
    whole, listed = (task.verifier.rubric for task in load(tmp_path).tasks)
    assert whole is not None
    assert whole.criteria == (Criterion(name="rubric", text="Is it kind?"),)
    assert listed is not None
    assert [one.text for one in listed.criteria] == ["There is a note", "It names milk"]


def test_workspace_files_are_texts_or_assets_beside_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "set/assets/csv").mkdir(parents=True)
    (tmp_path / "set/assets/csv/a.csv").write_text("1\n")
    files = [{"source": "csv/a.csv", "dest": "in/b.csv"}, {"path": "c/d.txt", "content": "d"}]
    lay_pinchbench(tmp_path / "set/tasks", workspace_files=files)
    folder = only_task(tmp_path).input_dir
    assert folder is not None
    found = {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*") if path.is_file()}
    assert found == {"in/b.csv": "1\n", "c/d.txt": "d"}


def test_files_beside_a_folder_of_tasks_are_tasks_too(tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set", "task_a")
    lay_pinchbench(tmp_path / "set/tasks", "task_b")
    loaded = load(tmp_path)
    assert ([task.task_id for task in loaded.tasks], loaded.faults) == (["task_a", "task_b"], ())


def test_a_file_may_come_from_windows_and_have_spaces_after_its_headings(tmp_path: Path) -> None:
    path = lay_pinchbench(tmp_path / "set")
    expected = only_task(tmp_path)
    path.write_bytes(path.read_text().replace("## Prompt", "## Prompt ").replace("\n", "\r\n").encode("utf-8-sig"))
    assert only_task(tmp_path) == expected


def test_patterns_for_new_tasks_are_passed_over(tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set", "task_XX_name")
    lay_pinchbench(tmp_path / "set", "task_b")
    assert only_task(tmp_path).task_id == "task_b"


def test_dates_in_the_front_matter_can_be_recorded(tmp_path: Path) -> None:
    path = lay_pinchbench(tmp_path / "set")
    path.write_text(path.read_text().replace("category: notes", "category: notes\nmade: 2026-01-02\n1: one"))
    assert only_task(tmp_path).metadata == {"name": "Note", "category": "notes", "made": "2026-01-02", "1": "one"}


@pytest.mark.parametrize(
    ("front", "fault"),
    [
        ({"id": ""}, ": id is empty"),
        ({"id": 7}, "Expected `str`, got `int` - at `$.id`"),
        ({"grading_type": "vibes"}, "grading_type 'vibes': must be automated, llm_judge or hybrid"),
        ({"grading_weights": {"automated": 0, "llm_judge": 1}}, "grading_weights: both must be more than 0"),
        ({"timeout_seconds": -1}, "timeout_seconds -1.0: must be more than 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds inf: must be more than 0, and not infinite"),
        ({"sessions": [{"id": "a"}]}, "sessions: several sessions with one workspace: not supported"),
        ({"workspace_files": ["a.txt"]}, "Expected `object`, got `str` - at `$.workspace_files[0]`"),
        ({"workspace_files": [{"path": "a"}]}, "workspace_files[0]: needs path and content, or source and dest"),
        ({"workspace_files": [{"path": "../a", "content": ""}]}, "workspace_files[0].path '../a': must be a path"),
        ({"workspace_files": [{"source": "/etc/passwd", "dest": "a"}]}, "source '/etc/passwd': must be a path"),
        ({"workspace_files": [{"source": "a", "dest": "a"}]}, "assets/a: no such file"),
        ({"workspace_files": [{"source": "out", "dest": "a"}]}, "assets/out: no such file, or a link that leads out"),
    ],
)
def test_faulty_front_matter_names_file_and_key(tmp_path: Path, front: dict[str, Any], fault: str) -> None:
    path = lay_pinchbench(tmp_path / "set", **front)
    (tmp_path / "set/assets").mkdir()
    (tmp_path / "set/assets/out").symlink_to(path)
    found = only_fault(tmp_path)
    assert found.startswith(f"{path}: ")
    assert fault in found


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"prompt": ""}, "Prompt is empty"),
        ({"grade": "def grade(transcript, workspace_path"}, "Automated Checks: '(' was never closed"),
        ({"grade": "-" * 100_000 + "1"}, "Automated Checks: nested too deep"),
        ({"grade": "x = 1\n"}, "Automated Checks: no function grade"),
        ({"grade": "def grade(a):\n    pass\n"}, "grade must take transcript and workspace_path"),
        ({"grade": "def grade(t, w):\n    return {'a': len(t)}\n"}, "line 2: grade reads the transcript"),
        ({"rubric": "### A (Weight: 1%)\nx\n### A (Weight: 1%)\ny"}, "'A': names must differ"),
        ({"rubric": "### A (Weight: 0%)\nx"}, "'A': names must differ, weights be more than 0"),
        ({"rubric": "### A (Weight: 1.2.3%)\nx"}, "'A': names must differ, weights be more than 0"),
        ({"rubric": f"### A (Weight: {'9' * 400}%)\nx"}, "'A': names must differ, weights be more than 0"),
        ({"rubric": "### A (Weight: 1%)\n"}, "'A' is empty"),
    ],
)
def test_a_faulty_section_is_named(tmp_path: Path, sections: dict[str, str], fault: str) -> None:
    lay_pinchbench(tmp_path / "set", **sections)
    assert fault in only_fault(tmp_path)


@pytest.mark.parametrize("key", ["on", "~"])
def test_a_key_that_yaml_takes_for_no_text_is_a_fault(tmp_path: Path, key: str) -> None:
    path = lay_pinchbench(tmp_path / "set")
    path.write_text(path.read_text().replace("category: notes", f"{key}: notes"))
    assert only_fault(tmp_path) == f"{path}: Only dicts with str-like or number-like keys are supported"


def test_front_matter_that_would_grow_without_end_is_a_fault(tmp_path: Path) -> None:
    path = lay_pinchbench(tmp_path / "set")
    bomb = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    path.write_text(path.read_text().replace("---\n", f"---\n{bomb}", 1))
    assert load(tmp_path).faults[0].startswith(f"{path}: has aliases")
    path.write_text(path.read_text().replace(bomb, "motto: 'a &b *b'\n"))
    assert only_task(tmp_path).metadata["motto"] == "a &b *b"


def test_a_file_without_front_matter_or_with_broken_yaml_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/task_a.md").write_text("id: a\n\n## Prompt\n")
    (tmp_path / "set/task_b.md").write_text("---\nid: [\n---\n## Prompt\n")
    bare, broken = load(tmp_path).faults
    assert bare == f"{tmp_path}/set/task_a.md: no front matter between two lines of ---"
    assert broken.startswith(f"{tmp_path}/set/task_b.md: ")


@pytest.mark.parametrize(
    ("note", "grade", "numbers"),
    [
        ("milk", GRADE, '{"written": 1.0, "right": 1.0, "reward": 1.0}'),
        ("water", GRADE, '{"written": 1.0, "right": 0.5, "reward": 0.75}'),
        ("", "def grade(t, w):\n    return {'reward': True, 'why': 'x'}\n", '{"check reward": 1.0, "reward": 1.0}'),
        ("", "def grade(t, w):\n    return None\n", '{"reward": 0.0}'),
    ],
)
def test_the_reward_is_the_mean_of_the_numbers_that_grade_returns(
    tmp_path: Path, note: str, grade: str, numbers: str
) -> None:
    """Its program, run on the host with host paths for those of the sandbox."""
    (tmp_path / "note.txt").write_text(note)
    (tmp_path / "grade.py").write_text(grade)
    program = pinchbench.RUN_PY.replace("/tests/", f"{tmp_path}/").replace("/logs/verifier/", f"{tmp_path}/")
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=30)
    assert (tmp_path / "reward.json").read_text() == numbers
