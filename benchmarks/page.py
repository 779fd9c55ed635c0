"""What the pages in docs/results have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clawhpc.passrate import Estimate

NOTES = "## Notes to these runs"
"""The heading from which on a page is a person's."""


def write_keeping_notes(page: Path, lines: Iterable[str]) -> None:
    """Write `lines`, and after them the notes that `page` has; say where it is."""
    written = page.read_text() if page.exists() else ""
    _, heading, notes = written.partition(f"\n{NOTES}\n")
    page.write_text("\n".join(lines) + "\n" + heading + notes)
    print(page)


def bold(estimate: Estimate) -> str:
    """A difference; in bold where its interval leaves out 0."""
    return f"**{estimate}**" if estimate.low > 0 or estimate.high < 0 else str(estimate)
