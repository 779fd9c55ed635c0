"""Small tasks of our own in each format that is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TASK_TOML = """\
schema_version = "1.1"
[task]
name = "ours/{name}"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 60.0
[environment]
cpus = 1
memory_mb = 2048
allow_internet = false
"""
DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY numbers.txt .\n"
TEST_SH = "#!/bin/bash\n[ -f sum.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
FILES = {
    "instruction.md": "Write the sum of numbers.txt to sum.txt.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/numbers.txt": "1\n2\n",
    "tests/test.sh": TEST_SH,
    "solution/solve.sh": "echo 3 > sum.txt\n",
}


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def lay_harbor(folder: Path, name: str = "sum", *, toml: str = TASK_TOML, **files: str) -> Path:
    """A sound task, but for `files`: `instruction`, `dockerfile`, `script`."""
    paths = {"instruction": "instruction.md", "dockerfile": "environment/Dockerfile", "script": "tests/test.sh"}
    changed = {paths[key]: content for key, content in files.items()}
    return write_files(folder / name, {"task.toml": toml.replace("{name}", name), **FILES, **changed})


GRADE = '''\
def grade(transcript: list, workspace_path: str) -> dict:
    """Whether there is a note, and what it says."""
    from pathlib import Path

    note = Path(workspace_path) / "note.txt"
    scores = {"written": float(note.exists()), "right": 0.0}
    if note.exists():
        scores["right"] = 1.0 if "milk" in note.read_text() else 0.5
    return scores
'''
RUBRIC = """\
### Criterion 1: Tone (Weight: 25%)

**Score 1.0**: kind.

### Criterion 2: Content (Weight: 75%)

**Score 1.0**: names milk.
"""


def lay_pinchbench(
    folder: Path, name: str = "task_note", *, grade: str = GRADE, rubric: str = RUBRIC, prompt: str = "Write a note.",
    **front: Any,
) -> Path:  # fmt: skip
    """A sound task of both gradings, but for the keys of its front matter in `front`."""
    keys = {"id": name, "name": "Note", "category": "notes", "grading_type": "hybrid", "timeout_seconds": 90} | front
    sections = {
        "Prompt": prompt,
        "Expected Behavior": "It writes note.txt.",
        "Grading Criteria": "- [ ] There is a note\n- [x] It names milk",
        "Automated Checks": f"```python\n{grade}```",
        "LLM Judge Rubric": rubric,
    }
    body = "".join(f"## {title}\n\n{text}\n\n" for title, text in sections.items() if text)
    path = folder / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\n{yaml.safe_dump(keys)}---\n\n# Note\n\n{body}")
    return path


def lay_jobbench(folder: Path, occupation: str = "bakers", number: int = 1, rubrics: Any = None) -> Path:
    rubrics = rubrics or [
        {"rubric": "Is the cost of flour right?", "weight": 3, "criterion": ["It is 12", "It is in euros"]},
        {"rubric": "Is it signed?", "weight": 1},
    ]
    return write_files(
        folder / occupation / f"task{number}",
        {
            "RUBRICS.json": json.dumps({"rubrics": rubrics}),
            "task_card.md": "# For people\n",
            "task_folder/TASK_INSTRUCTIONS.txt": "Work out the cost of flour.\n",
            "task_folder/prices.csv": "flour,12\n",
        },
    )


SCORER = """\
def score_answer(ground_truth, predicted, tolerance=0.0):
    return 1.0 if ground_truth == predicted else 0.0
"""


def lay_officeqa(folder: Path, rows: int = 1, table: str | None = None) -> Path:
    lines = (f'q{row},"How many, {row}?",{row},easy,doc{row}.txt\n' for row in range(rows))
    documents = {f"corpus/doc{row}.txt": f"There are {row}.\n" for row in range(rows)}
    header = "uid,question,answer,difficulty,source_files\n"
    return write_files(folder, {"small.csv": table or header + "".join(lines), "reward.py": SCORER, **documents})
