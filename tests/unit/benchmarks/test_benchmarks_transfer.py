"""The transfer page from runs of a few rollouts, what is kept of them, and the order in which its commands are run."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import msgspec
import pytest

from benchmarks.page import NOTES
from benchmarks.transfer import write_page
from benchmarks.transfer_runs import ARMS, HARNESSES, START, TRAINED, Arm, Study, find_evaluations, make_runs, run_seed
from clawhpc.paths import RunPaths
from clawhpc.records import Reply, RolloutRecord, StepPlan
from clawhpc.store import publish_plan, publish_rollout, write_atomic
from tests.fakes.records import make_call, make_group, make_record

NUM_TASKS = 4
COLUMNS = ("step", "train/reward", "train/no_credit_share", "time/collect_s", "time/learn_s")


def finish(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(RunPaths(root).finished, b"{}")


def lay_evaluation(study: Study, seed: int, num_passed: dict[str, int]) -> None:
    """In each harness an arm has solved the first so many tasks."""
    paths, cells = RunPaths(study.evaluations(seed) / "001"), []
    for (step, (key, num)), harness in product(enumerate(num_passed.items()), HARNESSES):
        for task in range(NUM_TASKS):
            publish_rollout(paths, evaluated(f"t{task}", step, harness, task < num))
        cells.append({"policy": key, "harness": harness, "set": "heldout", "step": step})
    write_atomic(paths.finished, msgspec.json.encode({"cells": cells}))


def evaluated(task_id: str, step: int, harness: str, passed: bool) -> RolloutRecord:
    """Of two replies: where the task is not solved, one is malformed, and the other cut at the limit of tokens."""
    group = make_group(task_id, phase="eval", step=step, harness=harness, num_samples=1)
    replies = (Reply(), Reply()) if passed else (Reply(malformed_calls=1), Reply(finish_reason="length"))
    calls = tuple(make_call(index, reply) for index, reply in enumerate(replies))
    return make_record(group, reward=float(passed), calls=calls)


def lay_training(study: Study, arm: Arm, seed: int) -> None:
    paths = RunPaths(study.runs(arm, seed) / "001")
    groups = tuple(make_group(f"t{index}", num_samples=8) for index in range(2))
    publish_plan(paths, StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=groups))
    paths.metrics.mkdir(parents=True)
    with paths.metrics_csv.open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        rows.writerows(dict(zip(COLUMNS, (step, 0.25 + step / 2, 0.5, 90, 30), strict=True)) for step in range(2))
    finish(paths.root)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """The start solves one task of four, every other arm two, and the last none."""
    study = Study(seeds=(0, 1), root=tmp_path / "runs", page=tmp_path / "docs" / "transfer.md")
    for seed in study.seeds:
        finish(study.cold_starts(seed) / "001")
        lay_evaluation(study, seed, {arm.key: {START: 1, ARMS[-1].key: 0}.get(arm.key, 2) for arm in ARMS})
        for arm in TRAINED:
            lay_training(study, arm, seed)
    return study


def test_the_page_has_the_rates_the_gains_and_what_training_took(study: Study) -> None:
    make_runs(study)
    write_page(study)
    text = study.page.read_text()
    assert re.search(
        r"^\d{4}-\d\d-\d\d, \d+ cores \(\w+\), no GPU\. Made by `python -m benchmarks\.transfer`\.$", text, re.MULTILINE
    )
    assert study.page.with_suffix(".png").stat().st_size > 0
    assert "| untrained start | 0.250 [0.000, 0.625] | 0.250 " in text
    assert "| trained in Pi | 0.500 [0.125, 0.875] " in text
    before, against, each = (text.index(f"## {word}") for word in ("What training", "Against", "Each seed"))
    assert "| trained in Pi | 0.250 [0.000, 0.625] " in text[before:against]
    assert "| trained in Pi | 0.000 [0.000, 0.000] " in text[against:each]
    assert "| without cold start, in Claude Code | **-0.500 [-0.875, -0.125]** " in text[against:each]
    assert "| untrained start | 0.250, 0.250 | " in text[each:]
    assert "| trained in Pi | 32 | 0.25, 0.75 | 50% | 6.0 | 2.0 |" in text
    assert "- trained in Pi: completed 24" in text
    assert "| untrained start | 38% malformed, 38% cut | 38% " in text
    assert "| trained in Pi | 25% malformed, 25% cut | 25% " in text
    assert "Every arm has 2 steps" in text
    assert "2 seeds, each with a cold start and 4 held-out tasks" in text


def test_arms_that_learned_nothing_share_the_rollouts_of_their_start(study: Study) -> None:
    """As an evaluation has it: it draws for each policy once, and tells policies by their weights."""
    paths = RunPaths(study.evaluations(0) / "001")
    cells = [{"policy": arm, "harness": "pi", "set": "heldout", "step": 0} for arm in (START, "pi")]
    write_atomic(paths.finished, msgspec.json.encode({"cells": cells}))
    found = find_evaluations(paths)
    assert found[START] == found["pi"]
    assert len(found[START]) == NUM_TASKS * len(HARNESSES)


def test_the_page_is_made_from_what_is_kept_and_the_notes_of_a_person_stay(study: Study) -> None:
    make_runs(study)
    write_page(study)
    written = study.page.read_text()
    shutil.rmtree(study.root)
    study.page.write_text(f"{written}\n{NOTES}\n\nSeen.\n")
    make_runs(study)  # both seeds are kept: nothing is left to do
    write_page(study)
    assert study.page.read_text() == f"{written}\n{NOTES}\n\nSeen.\n"


def test_a_page_without_all_seeds_is_refused_by_name(study: Study) -> None:
    make_runs(study)
    study.kept(1).unlink()
    with pytest.raises(SystemExit, match=r"seed_1\.json: nothing is kept there yet"):
        write_page(study)


PROGRAM = """#!{python}
import sys
from pathlib import Path
given = dict(one.split("=", 1) for one in sys.argv[3:])
name = sys.argv[2].removeprefix("clawhpc.")
with open("{log}", "a") as log:
    print(name, given["run.name"], given.get("harness.names"), given.get("policy.folder"), file=log)
    print(*(value for key, value in given.items() if key.startswith("evaluate.policies.")), file=log)
within = {{"sft": "cold_starts", "train": "", "evaluate": "evaluations"}}[name]
run = Path(given["run.root"], within, given["run.name"], "001")
run.mkdir(parents=True)
(run / "finished.json").touch()
"""


def test_what_has_finished_is_not_run_again_and_every_arm_begins_with_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable, log=log))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    study = Study(seeds=(3,), root=tmp_path / "runs", page=tmp_path / "page.md")
    run_seed(study, 3)
    lines = [line for line in log.read_text().replace(f"{study.root}/", "").splitlines() if line]
    assert lines == [
        "sft start_3 None policies/start-3",
        "train whitebox_3 [whitebox] policies/start-3",
        "train claude_code_3 [claude_code] policies/start-3",
        "train pi_3 [pi] policies/start-3",
        "train mixed_3 [claude_code,pi] policies/start-3",
        "train fresh_3 [claude_code] cold_starts/start_3/001/lessons/fresh",
        "evaluate arms_3 None None",
        "policies/start-3 whitebox_3/001 claude_code_3/001 pi_3/001 mixed_3/001 fresh_3/001",
    ]
    written = log.read_text()
    run_seed(study, 3)
    assert log.read_text() == written
    RunPaths(study.evaluations(3) / "001").finished.unlink()
    with pytest.raises(subprocess.CalledProcessError):  # the program makes no folder twice
        run_seed(study, 3)
