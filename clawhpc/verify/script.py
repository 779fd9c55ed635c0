"""Run a task's reward.sh over the workspace that a harness left, in a sandbox of its own.

What the policy wrote is hostile until proven otherwise. So the verifier starts in a fresh sandbox with an empty HOME
and no way to the proxy; `<workspace>/reward` is the task's own folder, read-only, whatever the harness put there; links
that lead into it are gone, for they would pass the expected answer off as the harness's; what the harness locked is
opened, for a script that may not read an answer has no reward to give, where 0 is due; and the script starts in that
folder, not in the workspace, where a planted `json.py` would be the one that `python3 -c 'import json'` takes.

A script may run programs of the workspace. They share its user, so they can kill it, which is no reward; and where the
kernel lets a process trace others of its user (kernel.yama.ptrace_scope=0), they can make it print what they like.
What they cannot: open its standard output through /proc, or have the last word by outliving it (sandbox/init.py). A
script that judges such programs should not let them inherit its standard output, nor trust files that they may write.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from anyio import to_thread

from clawhpc.errors import VerifierError, boundary
from clawhpc.records import ExecResult, TaskSpec, Verdict
from clawhpc.sandbox.base import Mount, Sandbox, SandboxCommand
from clawhpc.tasks.clawgym import REWARD_FOLDER

RUN_REWARD = """\
find "$1" -path "$1/reward" -prune -o -type d ! -perm -700 -exec chmod u+rwx {} \\; \
    -o -type f ! -perm -400 -exec chmod u+r {} +
links() { find "$1" -path "$1/reward" -prune -o -type l -print0; }
mapfile -d '' names < <(links "$1")
mapfile -d '' targets < <(links "$1" | xargs -0r realpath -mz --)
[ ${#names[@]} = ${#targets[@]} ] || targets=()
for i in "${!names[@]}"; do
    case ${targets[i]-"$1/reward"} in "$1"/reward | "$1"/reward/*) printf '%s\\0' "${names[i]}" ;; esac
done | xargs -0r rm -f --
exec bash "$1/reward/reward.sh"
"""
"""`$1` is the workspace. The published format runs the script with bash, by its absolute path.

Links are resolved all at once, for a harness may leave a hundred thousand; if one cannot be, none is trusted.
"""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
TAIL_CHARS = 400
"""Of each output stream, what stands in an error: enough for a traceback's last lines."""


async def verify_workspace(
    task: TaskSpec, workspace: Path, sandbox: Sandbox, *, sandbox_id: str, timeout_s: float
) -> Verdict:
    """The verdict on `workspace`, a folder on the host in which no process of the harness runs any more.

    Raises `VerifierError` when the script fails, hangs, or gives no number in [0, 1].
    """
    with boundary(VerifierError, f"verifier of {task.task_id}"):
        await to_thread.run_sync(make_room, workspace)
        result = await sandbox.run(reward_command(task, workspace, sandbox_id), timeout_s=timeout_s)
    return Verdict(reward=read_reward(task.task_id, result))


def make_room(workspace: Path) -> None:
    """An empty `<workspace>/reward` to mount over. What the harness put there is moved beside the workspace.

    Moving needs no permission for anything inside, removing does.
    """
    workspace.chmod(0o700)
    reward = workspace / REWARD_FOLDER
    if reward.is_dir() and not reward.is_symlink():
        reward.chmod(0o700)
    if os.path.lexists(reward):
        reward.rename(Path(tempfile.mkdtemp(prefix="planted-", dir=workspace.parent)) / REWARD_FOLDER)
    reward.mkdir()


def reward_command(task: TaskSpec, workspace: Path, sandbox_id: str) -> SandboxCommand:
    """reward.sh over `workspace`, both at the paths that scripts know them by; no HOME that was used, no proxy."""
    mount = task.workspace_mount
    return SandboxCommand(
        sandbox_id=sandbox_id,
        argv=("bash", "-c", RUN_REWARD, "reward", mount),
        env={"LC_ALL": "C.UTF-8"},
        cwd=f"{mount}/{REWARD_FOLDER}",
        mounts=(
            Mount(source=workspace, target=mount, writable=True),
            Mount(source=Path(task.reward_dir), target=f"{mount}/{REWARD_FOLDER}"),
        ),
    )


def read_reward(task_id: str, result: ExecResult) -> float:
    """The number in [0, 1] on the last line of what reward.sh printed. Raises `VerifierError` where there is none."""
    lines = result.stdout_tail.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    fault = ""
    if result.timed_out:
        fault = f"was stopped after {result.wall_s:.0f} s"
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
