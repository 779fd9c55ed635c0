"""Lightning's CSV logs of a run, merged."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

from clawhpc.errors import UserError

Points = list[tuple[float, float]]
"""(step, value), ascending."""


def read_metrics(folder: Path) -> dict[str, Points]:
    """Every metric below `folder`; of a step that was logged twice (a resume), the newest file's value.

    A line that is still being written, and values that are not finite numbers, are left out. UserError that names a
    file that is no CSV log.
    """
    values: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for path in sorted(folder.rglob("metrics.csv"), key=lambda path: (path.stat().st_mtime, path)):
        for row in _rows(path):
            step = _number(row.pop("step", None))
            for name, text in row.items():
                value = _number(text)
                if step is not None and value is not None and name not in (None, "epoch"):
                    values[name][step] = value
    return {name: sorted(points.items()) for name, points in sorted(values.items())}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(_whole_lines(path)))
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV log: {error}") from error


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def _number(text: object) -> float | None:
    try:
        value = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
