"""The verifier in each real sandbox, against a workspace that cheats."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import WORKSPACE_MOUNT, TaskSpec
from clawhpc.sandbox.base import Sandbox
from clawhpc.verify.script import verify_workspace
from tests.fakes.records import script_verifier

pytestmark = pytest.mark.anyio

PUBLISHED_WRAPPER = f"""\
#!/usr/bin/env bash
set -euo pipefail
python3 {WORKSPACE_MOUNT}/reward/check.py {WORKSPACE_MOUNT} | python3 -c 'import json, sys
scores = json.loads(sys.stdin.read())
print(sum(map(float, scores.values())) / len(scores))'
"""
"""The form that published tasks have: absolute paths, a helper, and Python reading its JSON."""
CHECK = """\
import json, sys
from pathlib import Path
answers = [path.read_text() for path in Path(sys.argv[1]).glob("answer*") if path.is_file()]
expected = Path(__file__).with_name("expected").read_text()
print(json.dumps({"there": bool(answers), "right": expected in answers}))
"""
"""One right answer of several is enough, so that a test can try many ways to cheat at once."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def lay_reward(tmp_path: Path, script: str) -> TaskSpec:
    reward = tmp_path / "reward"
    reward.mkdir()
    (reward / "reward.sh").write_text(script)
    (reward / "check.py").write_text(CHECK)
    (reward / "expected").write_text("42\n")
    return TaskSpec(task_id="t", instruction="Do it.", input_dir=None, verifier=script_verifier(reward))


async def verify(task: TaskSpec, workspace: Path, sandbox: Sandbox, timeout_s: float = 30.0) -> float:
    verdict = await verify_workspace(task, workspace, sandbox, sandbox_id="verify", timeout_s=timeout_s)
    return verdict.reward


async def test_a_published_script_finds_workspace_and_helpers_at_the_paths_that_it_names(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    (workspace / "answer.txt").write_text("41\n")
    assert await verify(lay_reward(tmp_path, PUBLISHED_WRAPPER), workspace, sandbox) == 0.5


@pytest.mark.parametrize("way", [f"{WORKSPACE_MOUNT}/reward/expected", "/proc/self/cwd/expected"])
async def test_a_workspace_that_cheats_gets_nothing(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, way: str
) -> None:
    (workspace / "answer.txt").symlink_to(way)
    (workspace / "json.py").write_text("print(1); raise SystemExit")
    (workspace / "reward").mkdir()
    (workspace / "reward" / "expected").write_text("41\n")
    assert await verify(lay_reward(tmp_path, PUBLISHED_WRAPPER), workspace, sandbox) == 0.0


async def test_a_link_through_a_process_that_is_not_there_yet_gets_nothing(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    """A fresh process table numbers the script's programs alike every time, so the number can be known beforehand."""
    for pid in range(2, 61):
        (workspace / f"answer-{pid}-cwd").symlink_to(f"/proc/{pid}/cwd/expected")
        (workspace / f"answer-{pid}-root").symlink_to(f"/proc/{pid}/root{WORKSPACE_MOUNT}/reward/expected")
    assert await verify(lay_reward(tmp_path, PUBLISHED_WRAPPER), workspace, sandbox) == 0.0


async def test_a_link_that_leads_elsewhere_once_the_script_runs_gets_nothing(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    """Where the script changes its folder and its input: before, these lead to harmless files that are there."""
    ways = ("/dev/stdin", "/proc/self/fd/0", "/proc/self/cwd/../expected", "process/fd/0")
    for number, way in enumerate(ways):
        (workspace / f"answer-{number}").symlink_to(way)
    (workspace / "process").symlink_to("/proc/self")
    (workspace / "expected").write_text("41\n")
    task = lay_reward(
        tmp_path,
        f"""
mkdir /tmp/tests && cp {WORKSPACE_MOUNT}/reward/* /tmp && cd /tmp/tests
python3 {WORKSPACE_MOUNT}/reward/check.py {WORKSPACE_MOUNT} < ../expected | grep -c '"right": true' || [ $? = 1 ]
""",
    )
    assert await verify(task, workspace, sandbox) == 0.0


async def test_what_the_harness_locked_is_open_to_the_script_and_hides_nothing_from_it(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    """Inside, root has no capabilities either."""
    for name in ("mine", "linked"):
        (workspace / name).mkdir()
    (workspace / "mine" / "answer.txt").write_text("41\n")
    (workspace / "linked" / "answer.txt").symlink_to(f"{WORKSPACE_MOUNT}/reward/expected")
    for path, mode in (("mine/answer.txt", 0), ("mine", 0), ("linked", 0o500)):
        (workspace / path).chmod(mode)
    script = f"cd {WORKSPACE_MOUNT} && grep -q 41 mine/answer.txt && [ ! -e linked/answer.txt ] && echo 1"
    assert await verify(lay_reward(tmp_path, script), workspace, sandbox) == 1.0


async def test_the_script_has_an_empty_home_no_proxy_and_cannot_change_its_own_folder(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    script = f"""
cd "$HOME" && [ "$(find . ! -path './.openclaw*')" = . ] || echo "HOME is not empty" >&2
[ ! -e /run/clawhpc/proxy.sock ] || echo "there is a proxy" >&2
! touch {WORKSPACE_MOUNT}/reward/changed || echo "reward can be changed" >&2
echo 1; exit 3
"""
    with pytest.raises(VerifierError) as caught:
        await verify(lay_reward(tmp_path, script), workspace, sandbox)
    for complaint in ("HOME is not empty", "there is a proxy", "reward can be changed"):
        assert complaint not in str(caught.value)
    assert "ended with exit code 3" in str(caught.value)


async def test_a_script_that_hangs_is_stopped(sandbox: Sandbox, workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"was stopped after \d s"):
        await verify(lay_reward(tmp_path, "sleep 600"), workspace, sandbox, timeout_s=2.0)


FORGER = """
import os, sys, time

def field(pid, number):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[number]

def is_script(pid):
    return b"reward.sh" in open(f"/proc/{pid}/cmdline", "rb").read()

way, when = sys.argv[1:]
script = os.getppid()
while not is_script(script) or is_script(int(field(script, 1))):  # the outermost: $(...) is a fork of it
    script = int(field(script, 1))
if os.fork():
    sys.exit()
os.setsid()
if way == "proc":
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)
    os.dup2(os.open(f"/proc/{script}/fd/1", os.O_WRONLY), 1)
if when == "before":
    time.sleep(0.2)
else:
    while field(script, 0) != "Z":
        pass
os.write(1, b"1\\n")
time.sleep(0 if when == "before" else 60)
"""
"""A program of the workspace that leaves a process, which prints a reward on the script's standard output: as soon as
the script has ended, or just before. It gets at the output through /proc, or inherits it."""


@pytest.mark.parametrize(("way", "when"), [("proc", "before"), ("proc", "after"), ("inherited", "after")])
async def test_a_program_of_the_workspace_that_the_script_runs_has_not_the_last_word(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, way: str, when: str
) -> None:
    (workspace / "solve.py").write_text(FORGER)
    command = f"python3 {WORKSPACE_MOUNT}/solve.py {way} {when}"
    script = f"out=$({command} 2>&1)" if way == "proc" else command
    task = lay_reward(tmp_path, f"{script}\necho 0\n{'sleep 0.4' if when == 'before' else ''}\n")
    for _ in range(4 if when == "after" else 1):
        assert await verify(task, workspace, sandbox) == 0.0


async def test_a_process_that_the_script_leaves_is_no_failure(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    script = "python3 -m http.server 8000 2>&1 &\n(sleep 60; echo 0) &\necho noise\nsh -c 'echo 0.5'"
    assert await verify(lay_reward(tmp_path, script), workspace, sandbox) == 0.5
