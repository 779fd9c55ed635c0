"""A sandbox that contains nothing: it runs the command on the host, with host paths for the paths inside."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from clawhpc.records import ExecResult
from clawhpc.sandbox.base import SANDBOX_PATH, SandboxCommand


@dataclass
class HostSandbox:
    """Fakes mounts: the first is written in place, those that lie in it are copied there."""

    home: Path
    """Stands for the empty HOME of a fresh container."""
    commands: list[SandboxCommand] = field(default_factory=list)
    """What was run, in order."""
    name: str = "host"
    python: str = "/usr/bin/python3"

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        self.commands.append(command)
        outer, *inner = command.mounts
        for mount in inner:
            shutil.copytree(mount.source, mount.target.replace(outer.target, str(outer.source)), dirs_exist_ok=True)
        argv = [word.replace(outer.target, str(outer.source)) for word in command.argv]
        try:
            done = subprocess.run(
                argv,
                cwd=command.cwd.replace(outer.target, str(outer.source)),
                env={"HOME": str(self.home), "PATH": SANDBOX_PATH, **command.env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return result(exit_code=124, timed_out=True, wall_s=timeout_s)
        return result(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def check_hidden(self, path: Path) -> None:
        pass


@dataclass
class ScriptedSandbox:
    """Runs nothing and says what it was told to say."""

    says: ExecResult
    name: str = "scripted"
    python: str = "/usr/bin/python3"

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        return self.says

    def check_hidden(self, path: Path) -> None:
        pass


def result(
    *,
    exit_code: int = 0,
    stdout: str = "",
    stderr: str = "",
    timed_out: bool = False,
    wall_s: float = 0.1,
    exceeded: str = "",
) -> ExecResult:
    """How a command ended."""
    return ExecResult(
        exit_code=exit_code,
        stdout_tail=stdout,
        stderr_tail=stderr,
        wall_s=wall_s,
        cpu_s=0.0,
        timed_out=timed_out,
        exceeded=exceeded,
    )
