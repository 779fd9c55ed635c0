"""What a check says, and how many checks are made at once, each within its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum

from clawhpc.errors import ClawError, boundary

CHECK_S = 5.0
"""For one check; what takes longer here, in peace, will fail under load."""


class State(StrEnum):
    """What a part is worth to this configuration."""

    WORKS = "works"
    LIMITED = "works with a limit"
    MISSING = "missing"
    NOT_NEEDED = "not needed here"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the table."""

    what: str
    state: State
    found: str
    """What is there, in a few words; several lines where there are several of a kind."""
    remedy: str = ""
    """What to do: a command wherever there is one. Empty where nothing is to be done."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One look at one part."""

    part: str
    """Rows of one part stand together."""
    what: str
    """The row that stands for it when it fails or does not end."""
    look: Callable[[], Iterable[Finding]]
    needed: bool = True
    """Whether the configuration needs the part."""
    deadline_s: float = CHECK_S


def lacking(needed: bool) -> State:
    """The state of a part that does not work."""
    return State.MISSING if needed else State.NOT_NEEDED


def run_checks(checks: Sequence[Check]) -> tuple[dict[str, list[Finding]], bool]:
    """The findings of all, by part and in order, and whether one still hangs. One that hangs or breaks has a row too.

    All look at once, each in a thread that nobody waits for longer than its deadline: what hangs in the kernel, such as
    a file system that has lost its server, cannot be interrupted.
    """
    started_at = time.monotonic()
    looks = [(check, _start(check)) for check in checks]
    findings: dict[str, list[Finding]] = {check.part: [] for check in checks}
    hanging = False
    for check, look in looks:
        try:
            findings[check.part] += look.result(max(0.0, started_at + check.deadline_s - time.monotonic()))
        except TimeoutError:
            hanging = True
            findings[check.part].append(_unanswered(check, f"no answer within {check.deadline_s:g} s"))
        except ClawError as error:
            findings[check.part].append(_unanswered(check, str(error)))
    return findings, hanging


def _start(check: Check) -> Future[list[Finding]]:
    future: Future[list[Finding]] = Future()

    def look() -> None:
        try:
            with boundary(ClawError, "cannot be checked"):
                future.set_result(list(check.look()))
        except ClawError as error:
            future.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    return future


def _unanswered(check: Check, found: str) -> Finding:
    return Finding(what=check.what, state=lacking(check.needed), found=found, remedy="look at it by hand")


def of_other_hosts(check: Check, remedy: str) -> Check:
    """A check whose part is not needed on this host; where it does not work here, `remedy` looks where it is needed."""

    def look() -> list[Finding]:
        return [
            replace(finding, state=State.NOT_NEEDED, remedy=remedy)
            if finding.state in (State.MISSING, State.LIMITED)
            else finding
            for finding in check.look()
        ]

    return replace(check, look=look, needed=False)
