"""Read questions in the format of OfficeQA: a table, a corpus of documents, and the scorer that belongs to them.

    <folder>/*.csv         columns uid, question, answer, source_files; others are metadata
    <folder>/reward.py     score_answer(ground_truth, predicted, tolerance), as the benchmark publishes it
    <folder>/**/NAME       the documents that source_files name, anywhere below

Each question is a task whose workspace holds the documents that it names, not the whole corpus, which would be copied
for every rollout. The harness is told to write its answer to answer.txt, for a verifier sees a workspace and no reply.
"""

from __future__ import annotations

import ast
import csv
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from clawhpc.records import WORKSPACE_MOUNT, ScriptCheck, TaskSpec, Verifier
from clawhpc.tasks.faults import Fault, Gathering, LoadedTasks, check_path, check_text, parse_python, read_text, real
from clawhpc.tasks.layout import Layout

COLUMNS = ("uid", "question", "answer", "source_files")
SCORER, SCORE = "reward.py", "score_answer"
ANSWER_FILE = "answer.txt"
MAX_HEADER_CHARS = 1 << 16
MAX_ANSWER_CHARS = 1 << 20
"""That the scorer is asked about: one that ran out of memory would spare the policy its 0."""
TOLERANCE = 0.0
"""Relative, of numbers: the scorer's own default."""
ASK = f"\n\nThe documents are in your working directory. Write the answer, and nothing else, to the file {ANSWER_FILE}."
CHECK_MOUNT = "/tests"
REWARD_SH = """\
#!/bin/bash
exec python3 -B /tests/check.py
"""
CHECK_PY = f"""\
from pathlib import Path

from reward import {SCORE}

answer = Path("{WORKSPACE_MOUNT}/{ANSWER_FILE}")
said = answer.open(errors="replace").read({MAX_ANSWER_CHARS}).strip() if answer.is_file() else ""
expected = Path("/tests/expected").read_text()


def score(answer):
    return float({SCORE}(expected, answer, {TOLERANCE}))


try:
    reward = score(said) if said else 0.0
except Exception:
    score(expected)  # whoever fails on the right answer too is broken; else it is the answer that earns nothing
    reward = 0.0
print(reward)
"""


def load_tasks(folder: Path, layout: Layout) -> LoadedTasks:
    """Every sound question of the tables in `folder`, and a fault for every other."""
    found = Gathering("OfficeQA")
    scorer, documents = folder / SCORER, _documents(folder)
    for table in tables(folder):
        with found.one():
            check_path(folder)
            _check_scorer(scorer)
            for number, row in _rows(table):
                with found.one():
                    key = f"{table}:{number}"
                    found.add(_load_task(key, row, scorer, documents, layout), f"row {number}", f"{key}: uid")
    return found.loaded()


def tables(folder: Path) -> list[Path]:
    """The files in `folder` that are such tables."""
    return [path for path in sorted(folder.glob("*.csv")) if path.is_file() and is_table(path)]


def is_table(path: Path) -> bool:
    """Whether the first line names the columns."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = next(csv.reader([file.readline(MAX_HEADER_CHARS)]), [])
    return set(COLUMNS[:3]) <= set(header)


def _documents(folder: Path) -> dict[str, list[Path]]:
    """Name -> the files of that name anywhere below; links to files are followed. No table and no scorer is one."""
    found: dict[str, list[Path]] = defaultdict(list)
    hidden = {SCORER, *(path.name for path in folder.glob("*.csv"))}
    for here, _, names in os.walk(folder):
        for name in set(names) - hidden:
            found[name].append(Path(here, name))
    return found


def _check_scorer(path: Path) -> None:
    if not path.is_file():
        raise Fault(f"{path}: missing; take it from the benchmark's repository")
    tree = parse_python(str(path), read_text(path))
    if not any(isinstance(node, ast.FunctionDef) and node.name == SCORE for node in tree.body):
        raise Fault(f"{path}: no function {SCORE}")


def _rows(table: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line in the file, and row."""
    reader = csv.DictReader(io.StringIO(read_text(table), newline=""), strict=True)
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise Fault(f"{table}: no column {missing[0]}")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise Fault(f"{table}:{reader.reader.line_num}: {error}") from error


def _load_task(
    key: str, row: Mapping[str, str], scorer: Path, documents: Mapping[str, list[Path]], layout: Layout
) -> TaskSpec:
    if None in row or None in row.values():
        raise Fault(f"{key}: not as many fields as the first line has")
    for name in COLUMNS[:3]:
        check_text(f"{key}: {name}", row[name])
    names = row["source_files"].replace(",", " ").split()
    if not names:
        raise Fault(f"{key}: source_files is empty")
    for name in names:
        if len(documents.get(name, ())) != 1:
            raise Fault(f"{key}: source_files: below the folder there must be one file {name!r}, and there is not")
    inputs = {name: real(documents[name][0], scorer.parent) for name in names}
    check = layout.lay_out(
        key, {"reward.sh": REWARD_SH, "check.py": CHECK_PY, "expected": row["answer"], SCORER: read_text(scorer)}
    )
    return TaskSpec(
        task_id=row["uid"],
        instruction=row["question"] + ASK,
        input_dir=layout.lay_out(f"{key}: source_files", inputs),
        verifier=Verifier(script=ScriptCheck(folder=check, mount=CHECK_MOUNT)),
        metadata={name: value for name, value in row.items() if name not in ("uid", "question", "answer")},
    )
