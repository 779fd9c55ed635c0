"""Run a task's reward.sh over the workspace that a harness left, in a sandbox of its own.

What the policy wrote is hostile until proven otherwise. So the verifier starts in a fresh sandbox with an empty HOME
and no way to the proxy; `<workspace>/reward` is the task's own folder, read-only, whatever the harness put there; links
that could lead there are gone, for they would pass the expected answer off as the harness's; what the harness locked is
opened, and what has no end is gone, for a script that cannot read an answer has no reward to give, where 0 is due; the
script starts in that folder, not in the workspace, where a planted `json.py` would be the one that `python3 -c 'import
json'` takes; and pytest and git take no orders from files of the workspace, though they look for some.

A script may run programs of the workspace. They share its user, so they can kill it, which is no reward; and where the
kernel lets a process trace others of its user (kernel.yama.ptrace_scope=0), they can make it print what they like.
What they cannot: open its standard output through /proc, or have the last word by outliving it (sandbox/init.py). A
script that judges such programs should not let them inherit its standard output, nor trust files that they may write.
It should not change into the workspace either, nor ask a git that runs filters (`git add`, `git diff`): that is to run
programs of the workspace.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from anyio import to_thread

from clawhpc.errors import VerifierError, boundary
from clawhpc.records import ExecResult, ScriptCheck, TaskSpec, Verdict
from clawhpc.sandbox.base import Mount, Sandbox, SandboxCommand
from clawhpc.verify.workspace import make_safe

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
PYTEST_SETTINGS = "pytest.ini"
"""Of the task's own tests; must stand in its folder."""
GIT_ENVIRONMENT = {
    "GIT_CONFIG_COUNT": "2",
    **{"GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": "false"},
    **{"GIT_CONFIG_KEY_1": "core.hooksPath", "GIT_CONFIG_VALUE_1": os.devnull},
}
"""A repository may name programs that `git status`, `log` or `checkout` run; this wins over what it says."""
TAIL_CHARS = 400
"""Of each output stream, what stands in an error: enough for a traceback's last lines."""


async def verify_workspace(
    task: TaskSpec, workspace: Path, sandbox: Sandbox, *, sandbox_id: str, timeout_s: float
) -> Verdict:
    """The verdict on `workspace`, a folder on the host in which no process of the harness runs any more.

    Raises `VerifierError` when the script fails, hangs, or gives no number in [0, 1].
    """
    with boundary(VerifierError, f"verifier of {task.task_id}"):
        await to_thread.run_sync(make_safe, workspace, task.workspace_mount, abandon_on_cancel=True)
        result = await sandbox.run(reward_command(task, workspace, sandbox_id), timeout_s=timeout_s)
    return Verdict(reward=read_reward(task.task_id, result))


def reward_command(task: TaskSpec, workspace: Path, sandbox_id: str) -> SandboxCommand:
    """The script over `workspace`, both at the paths that scripts know them by; no HOME that was used, no proxy.

    The published format runs the script with bash, by its absolute path.
    """
    check, mount = script_check(task), task.workspace_mount
    return SandboxCommand(
        sandbox_id=sandbox_id,
        argv=("bash", f"{check.mount}/{check.script}"),
        env={"LC_ALL": "C.UTF-8", "PYTEST_ADDOPTS": pytest_options(check), **GIT_ENVIRONMENT},
        cwd=check.mount,
        mounts=(
            Mount(source=workspace, target=mount, writable=True),
            Mount(source=Path(check.folder), target=check.mount),
        ),
    )


def script_check(task: TaskSpec) -> ScriptCheck:
    """The task's script."""
    assert task.verifier.script is not None, f"{task.task_id} is scored by a script"
    return task.verifier.script


def pytest_options(check: ScriptCheck) -> str:
    """For a pytest in the task's folder: it would go up from there, to settings and a conftest.py of the workspace."""
    folder = check.mount
    settings = f"{folder}/{PYTEST_SETTINGS}" if Path(check.folder, PYTEST_SETTINGS).exists() else os.devnull
    return shlex.join(("-c", settings, f"--rootdir={folder}", f"--confcutdir={folder}"))


def read_reward(task_id: str, result: ExecResult) -> float:
    """The number in [0, 1] on the last line of what reward.sh printed. Raises `VerifierError` where there is none."""
    lines = result.stdout_tail.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    fault = ""
    if result.timed_out:
        fault = f"was stopped after {result.wall_s:.0f} s"
    elif result.exceeded:
        fault = f"took more of the host than a sandbox may: {result.exceeded}"
    elif result.exit_code:
        fault = f"ended with exit code {result.exit_code}"
    elif not lines:
        fault = "printed nothing"
    elif not NUMBER.fullmatch(last) or not 0.0 <= float(last) <= 1.0:
        fault = f"printed {last[:TAIL_CHARS]!r} on its last line, not a number in [0, 1]"
    if fault:
        tails = (result.stdout_tail[-TAIL_CHARS:], result.stderr_tail[-TAIL_CHARS:])
        raise VerifierError(f"reward.sh of {task_id} {fault}; stdout: {tails[0]!r}; stderr: {tails[1]!r}")
    return float(last)
