"""Run a task's script over the workspace that a harness left, in a sandbox of its own.

What the policy wrote is hostile until proven otherwise. So the verifier starts in a fresh sandbox with an empty HOME
and no way to the proxy; the task's own folder is read-only, and stands where the task says, whatever the harness put
there; links that could lead there are gone, but for the image's own to what is in it, for they would pass the expected
answer off as the harness's; what the
harness locked is opened, and what has no end is gone, for a script that cannot read an answer has no reward to give,
where 0 is due; the script starts in that folder, not in the workspace, where a planted `json.py` would be the one that
`python3 -c 'import json'` takes (or, where its format has it start there, with Pythons that look there last: guard.py);
and pytest and git take no orders from files of the workspace, though they look for some.

A script may run programs of the workspace. They share its user, so they can kill it, which is no reward; and where the
kernel lets a process trace others of its user (kernel.yama.ptrace_scope=0), they can make it print what they like.
What they cannot: open its standard output through /proc, or have the last word by outliving it (sandbox/init.py). A
script that judges such programs should not let them inherit its standard output, nor trust files that they may write.
A reward file is one: it should be written last, after the end of all that they have left in the background
(`kill -9 -1` spares the shell that says it), which could write over it until the script ends. It should not change into
the workspace either, nor ask a git that runs filters (`git add`, `git diff`): that is to run programs of the workspace.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path, PurePosixPath

from anyio import to_thread

from clawhpc.errors import VerifierError, boundary
from clawhpc.records import ScriptCheck, TaskSpec, Verdict
from clawhpc.sandbox.base import Mount, Sandbox, SandboxCommand
from clawhpc.verify import guard
from clawhpc.verify.reward import read_reward, read_reward_files
from clawhpc.verify.workspace import make_safe

PYTEST_SETTINGS = "pytest.ini"
"""Of the task's own tests; must stand in its folder."""
GUARD_FOLDER = "/run/clawhpc/guard"
"""In the verifier's sandbox, on PYTHONPATH; guard.py is all that lies there."""
GIT_ENVIRONMENT = {
    "GIT_CONFIG_COUNT": "2",
    **{"GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": "false"},
    **{"GIT_CONFIG_KEY_1": "core.hooksPath", "GIT_CONFIG_VALUE_1": os.devnull},
}
"""A repository may name programs that `git status`, `log` or `checkout` run; this wins over what it says."""


async def verify_workspace(
    task: TaskSpec, workspace: Path, sandbox: Sandbox, *, sandbox_id: str, timeout_s: float
) -> Verdict:
    """The verdict on `workspace`, a folder on the host in which no process of the harness runs any more.

    Raises `VerifierError` when the script fails, hangs, or gives no number in [0, 1].
    """
    check = script_check(task)
    most_s = timeout_s if check.timeout_s is None else min(timeout_s, check.timeout_s)
    image = Path(task.image.folder) if task.image is not None else None
    with boundary(VerifierError, f"verifier of {task.task_id}"):
        await to_thread.run_sync(make_safe, workspace, task.workspace_mount, check.mount, image, abandon_on_cancel=True)
        rewards = Path(tempfile.mkdtemp(prefix="reward-", dir=workspace.parent))
        result = await sandbox.run(reward_command(task, workspace, rewards, sandbox_id), timeout_s=most_s)
        if check.reward_folder is not None:
            return read_reward_files(rewards, check.script, task.task_id, result)
        return Verdict(reward=read_reward(check.script, task.task_id, result))


def reward_command(task: TaskSpec, workspace: Path, rewards: Path, sandbox_id: str) -> SandboxCommand:
    """The script over `workspace`, both at the paths that scripts know them by; no HOME that was used, no proxy.

    `rewards`: an empty folder on the host, for reward files. The published formats run the script with bash, by its
    absolute path.
    """
    check, mount = script_check(task), task.workspace_mount
    mounts = [
        Mount(source=workspace, target=mount, writable=True),
        Mount(source=Path(check.folder), target=check.mount),
    ]
    if check.cwd is not None:
        mounts.append(Mount(source=Path(guard.__file__), target=f"{GUARD_FOLDER}/{guard.NAME}.py"))
    if check.reward_folder is not None:
        mounts.append(Mount(source=rewards, target=check.reward_folder, writable=True))
    return SandboxCommand(
        sandbox_id=sandbox_id,
        argv=("bash", f"{check.mount}/{check.script}"),
        env=script_environment(task),
        cwd=check.cwd or check.mount,
        mounts=tuple(mounts),
    )


def script_environment(task: TaskSpec) -> dict[str, str]:
    """What the task sets, and over it what keeps programs from looking into the workspace for orders."""
    check = script_check(task)
    wanted = {"LC_ALL": "C.UTF-8"} | task.env | check.env
    if "PATH" in wanted:
        wanted["PATH"] = safe_path(wanted["PATH"], task.workspace_mount)
    if check.cwd is not None:  # Python would take the modules of the folder that it starts in
        modules = filter(None, (GUARD_FOLDER, wanted.get("PYTHONPATH")))
        wanted |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": ":".join(modules), guard.TESTS_VARIABLE: check.mount}
    return wanted | {"PYTEST_ADDOPTS": pytest_options(check), **GIT_ENVIRONMENT}


def safe_path(path: str, workspace: str) -> str:
    """`path` of an image, with what lies in the workspace last, where a planted `grep` is not the one that is found."""
    folders = [os.path.normpath(folder) for folder in path.split(":") if folder.startswith("/")]
    return ":".join(sorted(folders, key=lambda folder: PurePosixPath(folder).is_relative_to(workspace)))


def script_check(task: TaskSpec) -> ScriptCheck:
    """The task's script."""
    assert task.verifier.script is not None, f"{task.task_id} is scored by a script"
    return task.verifier.script


def pytest_options(check: ScriptCheck) -> str:
    """For a pytest in the task's folder: it would go up from there, to settings and a conftest.py of the workspace."""
    folder = check.mount
    settings = f"{folder}/{PYTEST_SETTINGS}" if Path(check.folder, PYTEST_SETTINGS).exists() else os.devnull
    return shlex.join(("-c", settings, f"--rootdir={folder}", f"--confcutdir={folder}"))
