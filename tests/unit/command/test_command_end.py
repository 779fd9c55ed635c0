"""How a command ends: by one line and a code that says whose affair it is; where nobody reads it, without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from clawhpc.command import one_line_errors
from clawhpc.errors import HostError, UserError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("run.name is\nempty"), 2, "run.name is empty"),
        (HostError("no sandbox starts"), 1, "no sandbox starts"),
        (OSError(28, "No space left on device", "/full/a"), 1, "No space left on device: /full/a"),
        (OSError(13, "Permission denied", "/from", None, "/to"), 1, "Permission denied: /to"),
        (BrokenPipeError(32, "Broken pipe", "/run/socket"), 1, "Broken pipe: /run/socket"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on"),
    ],
    ids=str,
)
def test_what_a_person_can_mend_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    assert (ended.value.code, capfd.readouterr().err) == (code, f"clawhpc: {line}\n")


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("name")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [("plan", "--help"), ("train", "--cfg", "job")])
def test_where_nobody_reads_it_a_command_ends_as_other_programs_do(command: tuple[str, ...], unbuffered: str) -> None:
    assert ended(*command, PYTHONUNBUFFERED=unbuffered) == (-signal.SIGPIPE, b"")


def test_so_does_one_with_arguments_of_its_own() -> None:
    assert ended("view", "--help", PYTHONUNBUFFERED="") == (-signal.SIGPIPE, b"")
    assert ended("report", "/nowhere", PYTHONUNBUFFERED="") == (2, b"clawhpc: /nowhere: no such run folder\n")


def ended(name: str, *arguments: str, **environment: str) -> tuple[int, bytes]:
    """Exit code and standard error of a command whose standard output nobody holds the other end of."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", f"clawhpc.{name}", *arguments]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=os.environ | environment, timeout=120)
    finally:
        os.close(writer)
    return done.returncode, done.stderr
