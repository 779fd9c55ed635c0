"""How a check looks at the machine: its programs, what they say, files of the kernel. Tests have one of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ASK_S = 4.0
"""For one program to answer: less than a check has."""
NOT_FOUND, TOO_LATE = 127, 124
"""Exit codes, as of a shell and of timeout(1)."""


@dataclass(frozen=True)
class Answer:
    """What a program said."""

    exit_code: int
    output: str = ""
    errors: str = ""

    @property
    def ok(self) -> bool:
        """It ended well."""
        return self.exit_code == 0

    @property
    def reason(self) -> str:
        """Why it did not: the last line that it said."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else f"exit code {self.exit_code}"


class Machine(Protocol):
    """What checks may ask."""

    def find(self, program: str) -> str | None:
        """Where `program` is, as a shell finds it."""
        ...

    def ask(self, *command: str) -> Answer:
        """Run `command` without input. One that is not there or does not answer in time is an answer too."""
        ...

    def read(self, path: str) -> str:
        """The text of a file; empty where there is none to read."""
        ...

    def mode(self, path: str) -> int | None:
        """Permissions of `path`; None where there is none."""
        ...

    def may_use(self, path: str) -> bool:
        """Whether this user may read and write `path`."""
        ...


@dataclass(frozen=True)
class ThisMachine:
    """The machine that we run on."""

    environment: Mapping[str, str]
    """Of the programs that are asked."""

    def find(self, program: str) -> str | None:
        """See `Machine`."""
        return shutil.which(program, path=self.environment.get("PATH"))

    def ask(self, *command: str) -> Answer:
        """See `Machine`. Who is too late is killed, with all that it has started."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self.environment, "LC_ALL": "C"},
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Answer(NOT_FOUND, errors=f"{command[0]}: {error.strerror}")
        try:
            output, errors = process.communicate(timeout=ASK_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Answer(TOO_LATE, errors=f"{command[0]} did not answer within {ASK_S:g} s")
        return Answer(process.returncode, output, errors)

    def read(self, path: str) -> str:
        """See `Machine`."""
        with suppress(OSError):
            return Path(path).read_text(errors="replace")
        return ""

    def mode(self, path: str) -> int | None:
        """See `Machine`."""
        with suppress(OSError):
            return os.stat(path).st_mode & 0o777
        return None

    def may_use(self, path: str) -> bool:
        """See `Machine`."""
        return os.access(path, os.R_OK | os.W_OK)
