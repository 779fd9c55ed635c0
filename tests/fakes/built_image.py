"""An image of a task's own as its build leaves it, without a build."""

from __future__ import annotations

from pathlib import Path

from clawhpc.sandbox.staging import fingerprint
from tests.fakes.task_sets import write_files


def lay_image(
    place: Path, *, env: str = "PATH=/usr/bin:/bin\0", python: str = "/usr/bin/python3", home: str = ""
) -> Path:
    """Nothing is in it but what loaders ask for."""
    write_files(place, {".clawhpc/env": env, ".clawhpc/python": f"{python}\n", ".clawhpc/home": home})
    place.with_name(f"{place.name}.whole").write_text(fingerprint(place))
    return place
