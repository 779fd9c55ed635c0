from pathlib import Path

import pytest

from clawhpc.check.__main__ import Asked, draw_tasks, examine, parse_arguments
from clawhpc.config import RunConfig
from clawhpc.errors import HostError, UserError
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.load import read_tasks
from clawhpc.tasks.sets import TaskSettings
from tests.fakes.built_image import lay_image
from tests.fakes.records import make_task
from tests.fakes.task_sets import lay_harbor, lay_jobbench, lay_pinchbench, write_files


def test_our_keys_are_taken_and_the_rest_is_hydra_s() -> None:
    asked, rest = parse_arguments(
        ["tasks=/a", "sandbox.kind=bubblewrap", "untouched=7", "tasks=b", "json=/out.json", "tasks.assume_image=true"]
    )
    assert asked == Asked(folders=(Path("/a"), Path.cwd() / "b"), most_untouched=7, json=Path("/out.json"))
    assert rest == ["sandbox.kind=bubblewrap", "tasks.assume_image=true"]


@pytest.mark.parametrize(("word", "most"), [("true", None), ("false", 0), ("0", 0), ("12", 12)])
def test_how_many_workspaces_to_score(word: str, most: int | None) -> None:
    assert parse_arguments([f"untouched={word}"])[0].most_untouched == most


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("untouched=some", "untouched=some: must be true, false, or a number of tasks"),
        ("tasks=", "tasks is empty"),
        ("json=/nowhere/out.json", "json=/nowhere/out.json: must be a file in a folder that is there"),
        (
            "json=~nobody-at-all/out.json",
            f"json={Path.cwd()}/~nobody-at-all/out.json: must be a file in a folder that is there",
        ),
        ("json=/usr", "json=/usr: must be a file in a folder that is there"),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(argument: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([argument])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"clawhpc: {why}\n"


def test_sets_are_looked_at_without_a_sandbox_where_nothing_is_to_be_scored(tmp_path: Path) -> None:
    lay_harbor(tmp_path / "h")
    lay_harbor(tmp_path / "h", "bad", instruction="")
    lay_pinchbench(tmp_path / "p")
    config = RunConfig(cache_dir=str(tmp_path / "cache"))
    found = examine(config, Asked(folders=(tmp_path / "h", tmp_path / "p"), most_untouched=0))
    assert [(one.format, one.num_tasks) for one in found.sets] == [("Harbor", 1), ("PinchBench", 1)]
    assert found.problems == (f"{tmp_path}/h/bad/instruction.md: the instruction is empty",)
    assert (found.untouched, found.rubrics_not_asked) == ((), 0)


def test_an_image_that_is_not_as_it_was_built_is_as_good_as_not_built(tmp_path: Path) -> None:
    settings = TaskSettings(folder=str(tmp_path / "h"), images=str(tmp_path / "images"))
    for name in ("a", "b"):
        lay_harbor(tmp_path / "h", name, dockerfile="FROM x\nWORKDIR /app\nRUN make\n")
    options = settings.load_options(tmp_path)
    read_tasks(tmp_path / "h", options)
    assert options.images is not None
    (digest,) = options.images.wanted
    image = lay_image(tmp_path / "images" / digest)
    config = RunConfig(cache_dir=str(tmp_path), tasks=settings)
    assert examine(config, Asked(most_untouched=0)).sets[0].num_images == 1
    write_files(image, {"more": ""})
    (found,) = examine(config, Asked(most_untouched=0)).sets
    assert [len(found.faults), found.num_images] == [2, 0]


def test_where_no_sandbox_works_it_is_said_how_to_do_without(
    tmp_path: Path, ledger_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_harbor(tmp_path / "h")
    monkeypatch.setenv("PATH", str(tmp_path))
    apptainer = SandboxSettings(kind="apptainer")  # which no package of Python's brings
    config = RunConfig(cache_dir=str(tmp_path / "cache"), scratch_dir=str(ledger_root), sandbox=apptainer)
    with pytest.raises(HostError, match=r"no sandbox works here.*; untouched=false does without"):
        examine(config, Asked(folders=(tmp_path / "h",)))


def test_the_sets_of_the_configuration_are_looked_at_where_none_is_named(tmp_path: Path) -> None:
    lay_jobbench(tmp_path / "j")
    config = RunConfig(cache_dir=str(tmp_path / "cache"), tasks=TaskSettings(folder=str(tmp_path / "j")))
    found = examine(config, Asked())
    assert found.sets[0].format == "JobBench"
    assert found.rubrics_not_asked == 1
    with pytest.raises(UserError, match="no set of tasks to check"):
        examine(RunConfig(cache_dir=str(tmp_path)), Asked())


def test_a_sample_is_drawn_from_each_set_and_is_the_same_for_the_same_seed() -> None:
    sets = [
        LoadedTasks(format="Ours", faults=(), tasks=tuple(make_task(f"{name}{number}") for number in range(9)))
        for name in "ab"
    ]
    drawn = [task.task_id for task in draw_tasks(sets, 3, seed=1)]
    assert [name[0] for name in drawn] == ["a"] * 3 + ["b"] * 3
    assert drawn == [task.task_id for task in draw_tasks(sets, 3, seed=1)]
    assert len(draw_tasks(sets, None, seed=1)) == 18
