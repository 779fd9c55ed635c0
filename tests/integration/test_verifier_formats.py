"""Verifiers of the formats that are read, in each real sandbox, against workspaces that are right, wrong, and cheat."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import TaskSpec, Verdict
from clawhpc.sandbox.base import Sandbox
from clawhpc.tasks.load import LoadOptions, load_tasks
from clawhpc.verify.script import verify_workspace
from tests.fakes.task_sets import lay_harbor, lay_officeqa, lay_pinchbench, write_files

pytestmark = pytest.mark.anyio


class Bench:
    """The one task of a set, and workspaces to score by it."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox = sandbox
        self.folder = folder
        self.set = folder / "set"
        self.workspace = folder / "rollout" / "workspace"
        self.workspace.mkdir(parents=True)

    @property
    def task(self) -> TaskSpec:
        loaded = load_tasks(self.set, LoadOptions(cache_dir=self.folder / "cache"))
        assert loaded.faults == ()
        (task,) = loaded.tasks
        return task

    async def verdict(self, **files: str) -> Verdict:
        write_files(self.workspace, {name.replace("__", "."): content for name, content in files.items()})
        return await verify_workspace(self.task, self.workspace, self.sandbox, sandbox_id="verify", timeout_s=30.0)


@pytest.fixture
def bench(sandbox: Sandbox, tmp_path: Path) -> Bench:
    return Bench(sandbox, tmp_path)


CHECK_PY = """\
import json
from helper import EXPECTED
said = open("sum.txt").read().strip() if __import__("os").path.exists("sum.txt") else ""
json.dump({"there": float(bool(said)), "reward": float(said == EXPECTED)}, open("/logs/verifier/reward.json", "w"))
"""


def lay_summed(folder: Path, script: str) -> None:
    """A Harbor task whose test has a helper and looks at relative paths, as it starts in the workspace."""
    root = lay_harbor(folder, script=script)
    write_files(root / "tests", {"check.py": CHECK_PY, "helper.py": 'EXPECTED = "3"\n', "expected": "3\n"})


async def test_a_harbor_task_is_scored_at_its_own_paths_by_its_own_file(bench: Bench) -> None:
    lay_summed(bench.set, "python3 /tests/check.py\n")
    assert await bench.verdict() == Verdict(reward=0.0, breakdown={"there": 0.0})
    assert await bench.verdict(sum__txt="3\n") == Verdict(reward=1.0, breakdown={"there": 1.0})


async def test_modules_of_the_workspace_are_not_those_of_the_test_though_it_starts_there(bench: Bench) -> None:
    lay_summed(
        bench.set,
        "python3 /tests/check.py && python3 -c 'import json' && python3 -m json.tool < /logs/verifier/reward.json\n",
    )
    planted = "import os; open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}'); os._exit(0)\n"
    assert (await bench.verdict(json__py=planted, helper__py=planted, os__py=planted)).reward == 0.0


RUN_PY = """\
import subprocess, sys
ways = (["main.py"], ["/app/main.py"], ["-m", "adder"], ["-c", "from tools import add; print(add(1, 2))"])
runs = [subprocess.run([sys.executable, *way], stdout=subprocess.PIPE, text=True) for way in ways]
open("/logs/verifier/reward.txt", "w").write(str(float(all(run.stdout == "3\\n" for run in runs))))
"""
"""Runs what the task was to write, as published tests do."""


@pytest.mark.parametrize(
    "script",
    [
        "python3 /tests/run.py\n",
        "python3 main.py && python3 -m adder && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
        "cd src && python3 ../main.py && ../main.py && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    ],
    ids=["a Python", "the shell", "the shell elsewhere"],
)
async def test_a_program_of_the_workspace_that_a_test_runs_finds_its_own_modules(bench: Bench, script: str) -> None:
    root = lay_harbor(bench.set, script=script)
    write_files(root / "tests", {"run.py": RUN_PY, "tools.py": "raise SystemExit('this is that of the tests')\n"})
    program = "#!/usr/bin/env python3\nfrom tools import add\nprint(add(1, 2))\n"
    files = {"main.py": program, "tools.py": "def add(a, b):\n    return a + b\n", "adder/__main__.py": program}
    write_files(bench.workspace, files | {"src/nothing": ""})
    (bench.workspace / "main.py").chmod(0o755)
    assert (await bench.verdict()).reward == 1.0
    (bench.workspace / "tools.py").unlink()
    assert (await bench.verdict()).reward == 0.0


async def test_a_grade_that_runs_a_program_of_the_workspace_lets_it_find_its_own_modules(bench: Bench) -> None:
    grade = """\
def grade(transcript, workspace_path):
    import subprocess, sys
    run = subprocess.run([sys.executable, f"{workspace_path}/main.py"], stdout=subprocess.PIPE, text=True)
    return {"right": run.stdout == "3\\n"}
"""
    lay_pinchbench(bench.set, grading_type="automated", grade=grade)
    assert (await bench.verdict(main__py="from tools import three; print(three)\n")).reward == 0.0
    assert (await bench.verdict(tools__py="three = 3\n")).reward == 1.0


PLANTING = """\
echo '{"reward": 1}' > /logs/verifier/reward.json
(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &) > /dev/null 2>&1
"""


async def test_a_program_that_the_test_runs_has_no_reward_of_its_own(bench: Bench) -> None:
    lay_harbor(bench.set, script="sh main.sh\nkill -9 -1\necho 0 > /logs/verifier/reward.txt\nsleep 0.5\n")
    assert (await bench.verdict(main__sh=PLANTING)).reward == 0.0


async def test_a_link_to_the_answer_is_gone_and_the_tests_cannot_be_changed(bench: Bench) -> None:
    lay_summed(
        bench.set,
        "! touch /tests/x || exit 1\ncmp -s sum.txt /tests/expected; [ $? = 0 ] && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
    )
    (bench.workspace / "sum.txt").symlink_to("/tests/expected")
    assert (await bench.verdict()).reward == 0.0
    assert not (bench.workspace / "sum.txt").is_symlink()


async def test_a_test_that_writes_no_reward_has_none(bench: Bench) -> None:
    lay_harbor(bench.set, script="echo oh >&2\nln -s /etc/passwd /logs/verifier/reward.txt\n")
    with pytest.raises(VerifierError, match=r"test\.sh of ours/sum .*symbolic link.*stderr: 'oh"):
        await bench.verdict()


async def test_a_pinchbench_grade_is_the_mean_of_its_named_numbers(bench: Bench) -> None:
    lay_pinchbench(bench.set, grading_type="automated")
    assert await bench.verdict() == Verdict(reward=0.0, breakdown={"written": 0.0, "right": 0.0})
    assert await bench.verdict(note__txt="water") == Verdict(reward=0.75, breakdown={"written": 1.0, "right": 0.5})


async def test_an_officeqa_answer_is_scored_by_the_scorer_of_the_set(bench: Bench) -> None:
    lay_officeqa(bench.set)
    assert (await bench.verdict()).reward == 0.0
    assert (await bench.verdict(answer__txt="0\n")).reward == 1.0
