import subprocess
import sys
from pathlib import Path

import pytest

from clawhpc.tasks import officeqa
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.layout import Layout
from tests.fakes.records import reward_folder
from tests.fakes.task_sets import lay_officeqa, write_files

HEADER = "uid,question,answer,source_files\n"


def load(folder: Path) -> LoadedTasks:
    return officeqa.load_tasks(folder / "set", Layout(folder / "cache"))


def test_each_row_is_a_task_with_the_documents_that_it_names(tmp_path: Path) -> None:
    lay_officeqa(tmp_path / "set", rows=2)
    loaded = load(tmp_path)
    first, _ = loaded.tasks
    assert loaded.faults == ()
    assert first.task_id == "q0"
    assert first.instruction.startswith("How many, 0?\n\n")
    assert "answer.txt" in first.instruction
    assert first.metadata == {"difficulty": "easy", "source_files": "doc0.txt"}
    assert first.input_dir is not None
    assert [path.name for path in Path(first.input_dir).iterdir()] == ["doc0.txt"]


@pytest.mark.parametrize(
    ("said", "reward"), [("0\n", "1.0"), ("1", "0.0"), ("", "0.0"), (None, "0.0"), (" " * (1 << 20) + "0", "0.0")]
)
def test_the_scorer_of_the_set_is_asked_about_what_was_written(tmp_path: Path, said: str | None, reward: str) -> None:
    lay_officeqa(tmp_path / "set")
    assert scored(tmp_path, said).stdout == f"{reward}\n"


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [("return float(float(ground_truth) == float(predicted))", 0, "0.0\n"), ("raise ImportError('gone')", 1, "")],
)
def test_an_answer_that_the_scorer_fails_on_has_no_point_unless_it_fails_on_the_right_one_too(
    tmp_path: Path, line: str, code: int, printed: str
) -> None:
    root = lay_officeqa(tmp_path / "set")
    (root / "reward.py").write_text(f"def score_answer(ground_truth, predicted, tolerance):\n    {line}\n")
    found = scored(tmp_path, "many")
    assert (found.returncode, found.stdout) == (code, printed)


def scored(folder: Path, said: str | None) -> subprocess.CompletedProcess[str]:
    """The program of the set's one task, run on the host with host paths for those of the sandbox."""
    (task,) = load(folder).tasks
    check = reward_folder(task)
    if said is not None:
        (folder / "answer.txt").write_text(said)
    program = officeqa.CHECK_PY.replace("/tests", check).replace(f"{task.workspace_mount}/", f"{folder}/")
    return subprocess.run([sys.executable, "-c", program], cwd=check, capture_output=True, timeout=30, text=True)


def test_texts_over_several_lines_and_several_documents(tmp_path: Path) -> None:
    lay_officeqa(tmp_path / "set", rows=2, table=HEADER + '\nu,"One\n\nor ""two""?",a,"doc0.txt, doc1.txt"\n')
    (task,) = load(tmp_path).tasks
    assert task.instruction.startswith('One\n\nor "two"?\n\n')
    assert task.input_dir is not None
    assert sorted(path.name for path in Path(task.input_dir).iterdir()) == ["doc0.txt", "doc1.txt"]


def test_a_row_ends_where_a_line_of_the_file_does_and_nowhere_else(tmp_path: Path) -> None:
    lay_officeqa(tmp_path / "set", table=f"{HEADER}u,One\u2028two?,a\u0085,doc0.txt\r\nv,q,,doc0.txt\r\n")
    loaded = load(tmp_path)
    assert loaded.tasks[0].instruction.startswith("One\u2028two?")
    assert loaded.faults == (f"{tmp_path}/set/small.csv:3: answer is empty",)


def test_a_first_line_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    lay_officeqa(tmp_path / "set", table='uid,"a"b,question,answer,source_files\nu,x,q,a,doc0.txt\n')
    (fault,) = load(tmp_path).faults
    assert fault.startswith(f"{tmp_path}/set/small.csv:1: ")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (",q,a,doc0.txt", ":2: uid is empty"),
        ("u,,a,doc0.txt", ":2: question is empty"),
        ("u,q,,doc0.txt", ":2: answer is empty"),
        ("u,q,a,", ":2: source_files is empty"),
        ("u,q,a,gone.txt", ":2: source_files: below the folder there must be one file 'gone.txt'"),
        ("u,q,a,small.csv", ":2: source_files: below the folder there must be one file 'small.csv'"),
        ("u,q,a,doc1.txt", ":2: source_files: below the folder there must be one file 'doc1.txt'"),
        ("u,q,a", ":2: not as many fields as the first line has"),
        ("u,q,a,doc0.txt,more", ":2: not as many fields as the first line has"),
        ("sound,q,a,doc0.txt", ":3: uid 'sound' is that of 'row 2' already"),
        ('u,"q" x,a,doc0.txt', "expected after"),
    ],
)
def test_a_faulty_row_is_named_by_its_line(tmp_path: Path, row: str, fault: str) -> None:
    first = "sound,q,a,doc0.txt\n" if row.startswith("sound") else ""
    last = "" if first else "\nsound,q,a,doc0.txt\n"
    lay_officeqa(tmp_path / "set", table=f"{HEADER}{first}{row}{last}")
    for place in ("one", "two"):
        write_files(tmp_path / "set" / place, {"doc1.txt": place})
    (found,) = load(tmp_path).faults
    assert found.startswith(f"{tmp_path}/set/small.csv")
    assert fault in found


def test_a_link_to_a_document_is_followed_but_not_out_of_the_set(tmp_path: Path) -> None:
    root = lay_officeqa(tmp_path / "set")
    (root / "corpus/doc0.txt").rename(tmp_path / "elsewhere.txt")
    (root / "corpus/doc0.txt").symlink_to(tmp_path / "elsewhere.txt")
    (fault,) = load(tmp_path).faults
    assert fault.endswith(
        f"{root}/corpus/doc0.txt: is a link that leads out, to {tmp_path}/elsewhere.txt; copy what is there"
    )
    (tmp_path / "elsewhere.txt").rename(root / "elsewhere.txt")
    (root / "corpus/doc0.txt").unlink()
    (root / "corpus/doc0.txt").symlink_to("../elsewhere.txt")
    (task,) = load(tmp_path).tasks
    assert task.input_dir is not None
    assert not Path(task.input_dir, "doc0.txt").is_symlink()


def test_a_table_of_something_else_is_none(tmp_path: Path) -> None:
    write_files(tmp_path, {"long.csv": "x" * 300_000, "other.csv": "a,b\n", "empty.csv": ""})
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)))
    assert officeqa.tables(tmp_path) == []


def test_the_scorer_must_be_there(tmp_path: Path) -> None:
    root = lay_officeqa(tmp_path / "set")
    (root / "reward.py").write_text("def score():\n    pass\n")
    assert load(tmp_path).faults == (f"{root}/reward.py: no function score_answer",)
    (root / "reward.py").unlink()
    assert load(tmp_path).faults == (f"{root}/reward.py: missing; take it from the benchmark's repository",)
