"""All checks at once: none holds another, a broken one is a row, and the machine's programs are held to their time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawhpc.checkup import machine as machine_module
from clawhpc.checkup.finding import Check, Finding, State, of_other_hosts, run_checks
from clawhpc.checkup.machine import NOT_FOUND, TOO_LATE, Answer, ThisMachine
from tests.sandbox_parts import running

GOOD = Finding(what="good", state=State.WORKS, found="it")
BAD = Finding(what="bad", state=State.MISSING, found="no", remedy="buy one")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened when the test is over, so that no thread outlives it."""
    gate = threading.Event()
    yield gate
    gate.set()


def check(what: str, *findings: Finding, part: str = "one", needed: bool = True) -> Check:
    return Check(part=part, what=what, look=lambda: findings, needed=needed)


def test_findings_stand_by_part_and_in_order() -> None:
    findings, hanging = run_checks([check("a", GOOD, BAD), check("b", GOOD, part="two"), check("c", BAD)])
    assert findings == {"one": [GOOD, BAD, BAD], "two": [GOOD]}
    assert not hanging


@pytest.mark.parametrize(("needed", "state"), [(True, State.MISSING), (False, State.NOT_NEEDED)])
def test_a_check_that_hangs_is_a_row_and_holds_nobody(gate: threading.Event, needed: bool, state: State) -> None:
    def look() -> list[Finding]:
        gate.wait(60)
        return []

    stuck = [Check(part="one", what=f"stuck{n}", look=look, needed=needed, deadline_s=0.5) for n in range(5)]
    began = time.monotonic()
    findings, hanging = run_checks([*stuck, check("a", GOOD)])
    assert time.monotonic() - began < 2.0  # and not five times its time
    assert hanging
    *rows, last = findings["one"]
    assert [(row.what, row.state, row.found) for row in rows] == [
        (f"stuck{n}", state, "no answer within 0.5 s") for n in range(5)
    ]
    assert last == GOOD


def test_a_check_that_breaks_is_a_row_with_the_reason() -> None:
    def look() -> list[Finding]:
        raise KeyError("MaxArraySize")

    findings, hanging = run_checks([Check(part="one", what="broken", look=look), check("a", GOOD)])
    assert not hanging
    assert findings["one"][0].state is State.MISSING
    assert "KeyError: 'MaxArraySize'" in findings["one"][0].found
    assert findings["one"][1] == GOOD


def test_what_other_hosts_need_is_not_needed_here() -> None:
    idle = Finding(what="idle", state=State.NOT_NEEDED, found="nothing")
    elsewhere = of_other_hosts(check("a", GOOD, idle, BAD), "srun it")
    assert list(elsewhere.look()) == [
        GOOD,
        idle,
        Finding(what="bad", state=State.NOT_NEEDED, found="no", remedy="srun it"),
    ]
    assert not elsewhere.needed


def test_a_program_that_does_not_answer_is_killed_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, needle: str
) -> None:
    monkeypatch.setattr(machine_module, "ASK_S", 0.3)
    answer = ThisMachine(os.environ).ask("sh", "-c", f"sleep {needle} & wait")
    assert (answer.exit_code, answer.reason) == (TOO_LATE, "sh did not answer within 0.3 s")
    assert running(f"sleep {needle}") == []


def test_this_machine_says_what_there_is(tmp_path: Path) -> None:
    machine = ThisMachine({"PATH": os.environ["PATH"]})
    assert machine.ask("sh", "-c", "echo out; echo err >&2; exit 3") == Answer(3, "out\n", "err\n")
    assert machine.ask(str(tmp_path / "nothing")).exit_code == NOT_FOUND
    assert machine.find("sh") is not None
    assert ThisMachine({"PATH": str(tmp_path)}).find("sh") is None
    (tmp_path / "file").write_text("text")
    (tmp_path / "file").chmod(0o640)
    assert (machine.read(str(tmp_path / "file")), machine.read(str(tmp_path / "none"))) == ("text", "")
    assert (machine.mode(str(tmp_path / "file")), machine.mode(str(tmp_path / "none"))) == (0o640, None)
    assert machine.may_use(str(tmp_path / "file"))
