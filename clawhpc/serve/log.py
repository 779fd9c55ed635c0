"""What the engine's log says about its end."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 1 << 16
PREFIX = re.compile(r"^\([\w-]+ pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?")
"""`(EngineCore pid=7) ERROR 11-29 20:12:33 [core.py:1512] `"""
ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit): \S|^\S+: error: ")
CONSEQUENCE = re.compile(
    r"initialization failed|EngineDeadError|EngineCore encountered an issue|Tokenizer not available"
)
"""Errors that another has caused, or that cause nothing."""
MAX_LENGTH = 300


class EngineLog:
    """The log of one engine in a file that holds those of earlier ones too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._start = path.stat().st_size if path.exists() else 0

    def last_error(self) -> str:
        """The last error since this engine was started, and where to read more."""
        with self.path.open("rb") as file:
            file.seek(max(self._start, self.path.stat().st_size - TAIL_BYTES))
            return f"{last_error(file.read().decode(errors='replace'))} (log: {self.path})"


def last_error(log: str) -> str:
    """The last line that tells an error, else the last line; shortened, without vLLM's prefix. Pure."""
    lines = [line for line in (PREFIX.sub("", line).strip() for line in log.splitlines()) if line]
    errors = [line for line in lines if ERROR.search(line)]
    causes = [line for line in errors if not CONSEQUENCE.search(line)]
    found = (causes or errors or lines or ["nothing was logged"])[-1]
    return found[:MAX_LENGTH]
