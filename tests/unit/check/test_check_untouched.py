from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clawhpc.check.untouched import Bench, lacking, score_untouched
from clawhpc.errors import SandboxError
from clawhpc.records import ExecResult, TaskImage, TaskSpec
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.verify.judge import open_judge
from clawhpc.verify.settings import JudgeModel, JudgeSettings
from tests.fakes.judge_endpoint import RUBRIC, judge_endpoint, verdict
from tests.fakes.records import script_verifier
from tests.fakes.sandbox import HostSandbox, result
from tests.fakes.task_sets import write_files

pytestmark = pytest.mark.anyio


def lay_task(folder: Path, task_id: str, script: str, inputs: dict[str, str] | None = None) -> TaskSpec:
    write_files(folder / task_id, {"reward/reward.sh": script})
    input_dir = write_files(folder / task_id / "in", inputs) if inputs else None
    return TaskSpec(
        task_id=task_id,
        instruction="Do it.",
        input_dir=str(input_dir) if input_dir else None,
        verifier=script_verifier(folder / task_id / "reward"),
    )


def bench(folder: Path, **fields: object) -> Bench:
    scratch = folder / "scratch"
    scratch.mkdir()
    values = {
        "sandboxes": Sandboxes(HostSandbox(folder)),
        "judge": None,
        "scratch": scratch,
        "timeout_s": 20.0,
        "concurrency": 2,
    }
    return Bench(**{**values, **fields})  # type: ignore[arg-type]


async def test_each_task_has_its_own_workspace_and_its_own_failure(tmp_path: Path) -> None:
    look = 'cd "$(dirname "$0")/.." && [ -f a.txt ] && echo 0.5 || echo 0'
    tasks = [
        lay_task(tmp_path, "with", look, {"a.txt": "a"}),
        lay_task(tmp_path, "without", look),
        lay_task(tmp_path, "broken", "exit 3"),
    ]
    seen: list[int] = []
    made = bench(tmp_path)
    *scored, broken = await score_untouched(tasks, made, seen.append)
    assert [(one.task_id, one.reward) for one in scored] == [("with", 0.5), ("without", 0.0)]
    assert all(0 < one.verify_s < 20 for one in scored)
    assert (broken.task_id, broken.reward) == ("broken", None)
    assert "ended with exit code 3" in broken.failure
    assert seen == [1, 2, 3]
    assert list(made.scratch.iterdir()) == []


async def test_an_image_that_does_not_open_is_the_failure_of_its_task_alone(tmp_path: Path) -> None:
    def open_image(image: TaskImage) -> Sandbox:
        raise SandboxError(f"{image.folder} is gone")

    own = lay_task(tmp_path, "own", "echo 0")
    gone = replace(own, task_id="gone", image=TaskImage(folder="/images/a", python="/p"))
    made = bench(tmp_path, sandboxes=Sandboxes(HostSandbox(tmp_path), open_image))
    scored = await score_untouched([gone, own], made, lambda count: None)
    assert [(one.reward, one.failure) for one in scored] == [(None, "/images/a is gone"), (0.0, "")]
    assert list(made.scratch.iterdir()) == []


STOCK = """\
cd "$(dirname "$0")/.."
curl -LsSf https://astral.example/uv/install.sh | sh >/dev/null 2>&1
no-such-uvx -p 3.13 pytest test_outputs.py
if [ $? -eq 0 ]; then echo 1; else echo 0; fi
"""
"""How published tests end: whatever happens, there is a reward."""


async def test_what_a_verifier_looked_for_in_vain_is_kept_though_it_gave_a_reward(tmp_path: Path) -> None:
    tasks = [lay_task(tmp_path, "stock", STOCK), lay_task(tmp_path, "own", "echo 0")]
    stock, own = await score_untouched(tasks, bench(tmp_path), lambda count: None)
    assert (stock.reward, stock.lacking[0]) == (0.0, "no-such-uvx")
    assert (own.reward, own.lacking) == (0.0, ())


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ("/tests/test.sh: line 3: uvx: command not found\n" * 2, ("uvx",)),
        ("sh: 1: node: not found", ("node",)),
        ("bash: jq: command not found", ("jq",)),
        (
            "env: \u2018ruby\u2019: No such file or directory\n/usr/bin/env: 'go': No such file or directory",
            ("ruby", "go"),
        ),
        ("/usr/bin/python3: No module named pytest", ("No module named pytest",)),
        ("error: Failed to fetch: `https://index.example/simple/pytest/`\n  Caused by: dns error", ("a network",)),
        ("curl: (6) Could not resolve host: a.b", ("a network",)),
        ("cat: answer.txt: No such file or directory\nx.py: 3: key not found", ()),
        ("ModuleNotFoundError: No module named 'solution'", ()),
    ],
)
def test_what_is_lacking_is_read_from_what_a_verifier_printed(errors: str, expected: tuple[str, ...]) -> None:
    assert lacking(errors) == expected


async def test_inputs_that_cannot_be_copied_are_the_failure_of_their_task(tmp_path: Path) -> None:
    task = lay_task(tmp_path, "gone", "echo 0", {"a.txt": "a"})
    (tmp_path / "gone/in/a.txt").unlink()
    (tmp_path / "gone/in").rmdir()
    (found,) = await score_untouched([task], bench(tmp_path), lambda count: None)
    assert found.reward is None
    assert "its workspace: FileNotFoundError" in found.failure


class CountingSandbox(HostSandbox):
    """Knows how many commands run at once."""

    running = most = 0

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        self.running -= 1
        return result(stdout="0\n")


async def test_no_more_are_scored_at_once_than_was_said(tmp_path: Path) -> None:
    sandbox = CountingSandbox(tmp_path)
    tasks = [lay_task(tmp_path, f"t{number}", "") for number in range(9)]
    found = await score_untouched(tasks, bench(tmp_path, sandboxes=Sandboxes(sandbox)), lambda count: None)
    assert [one.task_id for one in found] == [task.task_id for task in tasks]
    assert 1 <= sandbox.most <= 2


async def test_with_a_judge_rubrics_are_asked_about_too(tmp_path: Path) -> None:
    scripted = lay_task(tmp_path, "both", "echo 0")
    both = replace(scripted, verifier=replace(scripted.verifier, rubric=RUBRIC))
    async with judge_endpoint(verdict(1, 0)) as endpoint:
        settings = JudgeSettings(models={"one": JudgeModel(name="one", base_url=endpoint.url)})
        async with open_judge(settings, {}) as judge:
            (found,) = await score_untouched([both], bench(tmp_path, judge=judge), lambda count: None)
    assert found.reward == pytest.approx(0.375), "half of what the judge gives, and nothing by the script"
    assert found.breakdown["script"] == 0.0
