"""A machine of which the test says what it has and what its programs answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clawhpc.checkup.machine import NOT_FOUND, Answer


@dataclass
class FakeMachine:
    """Knows the programs that are the first words of `answers`, and those in `programs`."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By the beginning of the command; the first that fits."""
    programs: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def find(self, program: str) -> str | None:
        known = {*self.programs, *(beginning.split()[0] for beginning in self.answers)}
        return f"/usr/bin/{program}" if program in known else None

    def ask(self, *command: str) -> Answer:
        self.asked.append(" ".join(command))
        fits = (answer for beginning, answer in self.answers.items() if self.asked[-1].startswith(beginning))
        return next(fits, Answer(NOT_FOUND, errors=f"{command[0]}: No such file or directory"))

    def read(self, path: str) -> str:
        return self.files.get(path, "")

    def mode(self, path: str) -> int | None:
        return self.modes.get(path)

    def may_use(self, path: str) -> bool:
        return self.modes.get(path, 0) & 0o006 == 0o006
