"""Read tasks in the format of PinchBench: a markdown file each.

    <folder>/task_*.md, <folder>/tasks/task_*.md
    <folder>/assets/, or one beside <folder>         what `source` of a workspace file names

A file has front matter in YAML, and sections under `##`: Prompt, Expected Behavior, Grading Criteria, Automated Checks
(Python, with `grade(transcript, workspace_path)`), LLM Judge Rubric. `grading_type` says which of the last two count:
`automated`, `llm_judge`, or `hybrid`, with their `grading_weights`. The automated part is the mean of the numbers that
`grade` returns, each of which stands in the verdict's breakdown. There is no transcript in the form of one harness, so
that a `grade` which reads it is a fault.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import yaml

from clawhpc.records import WORKSPACE_MOUNT, Criterion, Rubric, ScriptCheck, TaskSpec, Verifier
from clawhpc.tasks.faults import (
    MAX_NESTING,
    Fault,
    Gathering,
    LoadedTasks,
    check_path,
    check_text,
    nesting,
    parse_python,
    read_text,
)
from clawhpc.tasks.layout import Layout

PATTERN, TASKS, ASSETS = "task_*.md", "tasks", "assets"
FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*\n(.*)", re.DOTALL)
HEADING = re.compile(r"##\s+(.+?)\s*")
CODE = re.compile(r"```python\s*(.*?)\s*```", re.DOTALL)
CHECKBOX = re.compile(r"-\s+\[[ x]\]\s+(.+)")
CRITERION = re.compile(r"^###\s+(?:Criterion\s+\d+\s*:\s*)?(.+?)\s*\(Weight:\s*([\d.]+)\s*%?\)\s*$", re.MULTILINE)
TEMPLATES = ("_XX_", "task_XX_name")
"""Parts of the ids of files that are patterns for new tasks; PinchBench skips them as well."""
UNSUPPORTED = {
    "sessions": "several sessions with one workspace",
    "multi_session": "several sessions with one workspace",
    "pre_setup": "commands before the start",
    "injected_skill_path": "skills for the harness",
    "prerequisites": "services or programs beside the harness",
}
"""Keys of front matter that some sets of this format have -> what they ask for."""
CHECK_MOUNT, REWARD_FOLDER = "/tests", "/logs/verifier"
REWARD_SH = """\
#!/bin/bash
exec python3 -B /tests/run.py "$PWD"
"""
RUN_PY = '''\
"""Call grade() on the workspace, and write the mean of its numbers, and each of them."""
import json, sys
from pathlib import Path

namespace = {"__name__": "grader"}
exec(compile(Path("/tests/grade.py").read_text(), "grade.py", "exec"), namespace)
scores = namespace["grade"]([], sys.argv[1])
scores = scores if isinstance(scores, dict) else {}
numbers = {str(name): float(score) for name, score in scores.items() if isinstance(score, (int, float))}
parts = {f"check {name}" if name == "reward" else name: score for name, score in numbers.items()}
reward = sum(numbers.values()) / len(numbers) if numbers else 0.0
Path("/logs/verifier/reward.json").write_text(json.dumps({**parts, "reward": reward}))
'''


class _Weights(msgspec.Struct):
    automated: float = 0.5
    llm_judge: float = 0.5


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """One of workspace_files: a text, or a file of the assets."""

    path: str | None = None
    content: str | None = None
    source: str | None = None
    dest: str | None = None


class _FrontMatter(msgspec.Struct):
    """Keys that are not listed are metadata, but for UNSUPPORTED."""

    id: str
    grading_type: str = "automated"
    timeout_seconds: float = 120.0
    workspace_files: list[_File] = []
    grading_weights: _Weights | None = None


def load_tasks(folder: Path, layout: Layout) -> LoadedTasks:
    """Every sound task in `folder`, and a fault for every other file of that name."""
    found = Gathering("PinchBench")
    for path in task_files(folder):
        with found.one():
            task = _load_task(path, layout)
            if task is not None:
                found.add(task, path.name, f"{path}: id")
    return found.loaded()


def task_files(folder: Path) -> list[Path]:
    """The files of tasks, by name, in both places."""
    return [*sorted(folder.glob(PATTERN)), *sorted((folder / TASKS).glob(PATTERN))]


def _load_task(path: Path, layout: Layout) -> TaskSpec | None:
    """None for a template."""
    check_path(path.parent)
    matter = FRONT_MATTER.fullmatch(read_text(path))
    if matter is None:
        raise Fault(f"{path}: no front matter between two lines of ---")
    front, metadata = _front_matter(path, matter[1])
    if any(mark in front.id for mark in TEMPLATES):
        return None
    sections = dict(_sections(matter[2]))
    prompt = sections.get("Prompt", "").strip()
    check_text(f"{path}: Prompt", prompt)
    files = dict(_workspace_files(path, front.workspace_files))
    return TaskSpec(
        task_id=front.id,
        instruction=prompt,
        input_dir=layout.lay_out(f"{path}: workspace_files", files) if files else None,
        verifier=_verifier(path, front, sections, layout),
        run_s=front.timeout_seconds,
        metadata=metadata,
    )


def _front_matter(path: Path, text: str) -> tuple[_FrontMatter, dict[str, Any]]:
    try:
        if "&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise Fault(f"{path}: has aliases (*name), by which a line can stand for gigabytes: write it out")
        values = msgspec.to_builtins(msgspec.yaml.decode(text), str_keys=True)
        front = msgspec.convert(values, _FrontMatter)
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError, TypeError) as error:
        raise Fault(f"{path}: {' '.join(str(error).split())}") from error
    for key, what in UNSUPPORTED.items():
        if values.get(key):
            raise Fault(f"{path}: {key}: {what}: not supported")
    check_text(f"{path}: id", front.id)
    if not 0 < front.timeout_seconds < math.inf:
        raise Fault(f"{path}: timeout_seconds {front.timeout_seconds}: must be more than 0, and not infinite")
    metadata = {key: value for key, value in values.items() if key not in _FrontMatter.__struct_fields__}
    if nesting(metadata) > MAX_NESTING:
        raise Fault(f"{path}: nested more than {MAX_NESTING} levels deep")
    return front, metadata


def _sections(body: str) -> Iterator[tuple[str, str]]:
    """Title and text of each, a line `## …` at a time, as PinchBench reads them: within a block of code, too."""
    title, lines = "", list[str]()
    for line in body.split("\n"):
        if heading := HEADING.fullmatch(line):
            yield title, "\n".join(lines).strip()
            title, lines = heading[1], []
        else:
            lines.append(line)
    yield title, "\n".join(lines).strip()


def _workspace_files(path: Path, files: list[_File]) -> Iterator[tuple[str, str | Path]]:
    root = path.parent
    assets = next((folder for folder in (root / ASSETS, root.parent / ASSETS) if folder.is_dir()), root.parent / ASSETS)
    for index, file in enumerate(files):
        key = f"{path}: workspace_files[{index}]"
        if file.content is not None and file.path is not None:
            yield _inner_path(f"{key}.path", file.path), file.content
        elif file.source is not None and file.dest is not None:
            source = assets / _inner_path(f"{key}.source", file.source)
            if not source.is_file() or not source.resolve().is_relative_to(assets.resolve()):
                raise Fault(f"{key}.source: {source}: no such file, or a link that leads out")
            yield _inner_path(f"{key}.dest", file.dest), source.resolve()
        else:
            raise Fault(f"{key}: needs path and content, or source and dest")


def _inner_path(key: str, text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise Fault(f"{key} {text!r}: must be a path below the folder")
    return str(path)


def _verifier(path: Path, front: _FrontMatter, sections: dict[str, str], layout: Layout) -> Verifier:
    match front.grading_type:
        case "automated":
            return Verifier(script=_script(path, sections, layout))
        case "llm_judge":
            return Verifier(rubric=_rubric(path, sections))
        case "hybrid":
            return Verifier(
                script=_script(path, sections, layout),
                rubric=_rubric(path, sections),
                rubric_weight=_rubric_weight(path, front.grading_weights or _Weights()),
            )
    raise Fault(f"{path}: grading_type {front.grading_type!r}: must be automated, llm_judge or hybrid")


def _rubric_weight(path: Path, weights: _Weights) -> float:
    total = weights.automated + weights.llm_judge
    if min(weights.automated, weights.llm_judge) <= 0 or not total < float("inf"):
        raise Fault(f"{path}: grading_weights: both must be more than 0")
    return weights.llm_judge / total


def _script(path: Path, sections: dict[str, str], layout: Layout) -> ScriptCheck:
    key = f"{path}: Automated Checks"
    code = CODE.search(sections.get("Automated Checks", ""))
    if code is None:
        raise Fault(f"{key}: no block of python")
    _check_grader(key, code[1])
    files = {"reward.sh": REWARD_SH, "run.py": RUN_PY, "grade.py": f"{code[1]}\n"}
    return ScriptCheck(
        folder=layout.lay_out(key, files),
        mount=CHECK_MOUNT,
        reward_folder=REWARD_FOLDER,
        cwd=WORKSPACE_MOUNT,
    )


def _check_grader(key: str, code: str) -> None:
    tree = parse_python(key, code)
    graders = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "grade"]
    if not graders:
        raise Fault(f"{key}: no function grade")
    positional = graders[-1].args.posonlyargs + graders[-1].args.args
    if len(positional) != 2:
        raise Fault(f"{key}: grade must take transcript and workspace_path")
    name = positional[0].arg
    reads = (node for node in ast.walk(graders[-1]) if isinstance(node, ast.Name) and node.id == name)
    if read := next(reads, None):
        raise Fault(f"{key}: line {read.lineno}: grade reads the transcript, which there is not for every harness")


def _rubric(path: Path, sections: dict[str, str]) -> Rubric:
    text = sections.get("LLM Judge Rubric", "")
    criteria = _weighted(text) or _whole(text) or _listed(sections.get("Grading Criteria", ""))
    if not criteria:
        raise Fault(f"{path}: neither LLM Judge Rubric nor Grading Criteria")
    names = [criterion.name for criterion in criteria]
    for criterion in criteria:
        check_text(f"{path}: LLM Judge Rubric: {criterion.name!r}", criterion.text)
        if names.count(criterion.name) > 1 or not 0 < criterion.weight < math.inf:
            raise Fault(f"{path}: LLM Judge Rubric: {criterion.name!r}: names must differ, weights be more than 0")
    first = CRITERION.search(text)
    told = (sections.get("Expected Behavior", ""), text[: first.start()].strip() if first else "")
    return Rubric(criteria=criteria, expected="\n\n".join(filter(None, told)))


def _weighted(text: str) -> tuple[Criterion, ...]:
    """A criterion for each heading `### Criterion 1: Name (Weight: 30%)`."""
    heads = list(CRITERION.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)] * bool(heads)
    return tuple(
        Criterion(name=head[1], text=text[head.end() : end].strip(), weight=_number(head[2]))
        for head, end in zip(heads, ends, strict=True)
    )


def _number(digits: str) -> float:
    """Not a number for several points, or a point alone."""
    try:
        return float(digits)
    except ValueError:
        return math.nan


def _whole(text: str) -> tuple[Criterion, ...]:
    return (Criterion(name="rubric", text=text),) if text else ()


def _listed(text: str) -> tuple[Criterion, ...]:
    """A criterion for each `- [ ]`."""
    found = filter(None, (CHECKBOX.fullmatch(line.strip()) for line in text.split("\n")))
    return tuple(Criterion(name=f"criterion {number}", text=one[1]) for number, one in enumerate(found, start=1))
