from pathlib import Path

from clawhpc.check.survey import Spread, shared_ids, spread, survey_set
from clawhpc.records import Criterion, McpServer, Rubric, ScriptCheck, TaskSpec, Verifier
from clawhpc.tasks.faults import LoadedTasks
from tests.fakes.task_sets import write_files

SCRIPT = ScriptCheck(folder="/reward")
RUBRIC = Rubric(criteria=(Criterion(name="a", text="b"),))


def task(task_id: str, instruction: str = "Do it.", inputs: Path | None = None, **fields: object) -> TaskSpec:
    return TaskSpec(
        task_id=task_id,
        instruction=instruction,
        input_dir=str(inputs) if inputs else None,
        **{"verifier": Verifier(script=SCRIPT), **fields},  # type: ignore[arg-type]
    )


def loaded(*tasks: TaskSpec, faults: tuple[str, ...] = ()) -> LoadedTasks:
    return LoadedTasks(format="Ours", tasks=tasks, faults=faults, notes={"a note": 1})


def test_what_is_in_a_set_is_counted(tmp_path: Path) -> None:
    inputs = write_files(tmp_path / "in", {"a": "123", "b/c": "4"})
    survey = survey_set(
        tmp_path,
        loaded(
            task("a", "One", inputs, run_s=10.0),
            task("b", "Three", inputs, verifier=Verifier(rubric=RUBRIC), run_s=30.0),
            task("c", "Eleven chars", verifier=Verifier(script=SCRIPT, rubric=RUBRIC)),
            task("d", "Two", mcp_servers=(McpServer(name="lab", argv=("lab",)),)),
            task("e", "Six", mcp_servers=(McpServer(name="web", argv=("web",), on_host=True),)),
            faults=("a fault",),
        ),
    )
    assert (survey.folder, survey.format, survey.num_tasks) == (str(tmp_path), "Ours", 5)
    assert (survey.faults, survey.notes) == (("a fault",), {"a note": 1})
    assert survey.verifiers == {"script": 3, "rubric": 1, "script and rubric": 1}
    assert (survey.with_inputs, survey.input_files, survey.input_bytes, survey.with_mcp) == (2, 4, 8, 2)
    assert survey.with_mcp_host == 1
    assert survey.instruction_chars == Spread(least=3, median=3, most=12)
    assert survey.run_s == Spread(least=10.0, median=20.0, most=30.0)
    assert survey.duplicates == ()


def test_tasks_that_ask_the_same_of_the_same_workspace_are_named_together(tmp_path: Path) -> None:
    first = write_files(tmp_path / "one", {"a": "1"})
    same = write_files(tmp_path / "two", {"a": "2"})
    other = write_files(tmp_path / "three", {"a": "22"})
    tasks = [task(name, inputs=folder) for name, folder in (("a", first), ("b", same), ("c", other), ("d", None))]
    survey = survey_set(tmp_path, loaded(*tasks, task("e"), task("f", "Do more.")))
    assert survey.duplicates == (("a", "b"), ("d", "e"))


def test_a_set_without_tasks_has_no_spread(tmp_path: Path) -> None:
    survey = survey_set(tmp_path, loaded())
    assert (survey.num_tasks, survey.instruction_chars, survey.run_s) == (0, None, None)
    assert spread([]) is None


def test_ids_in_two_sets_are_found() -> None:
    assert shared_ids([loaded(task("a"), task("b")), loaded(task("b"), task("c"))]) == ("b",)
