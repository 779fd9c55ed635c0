"""The page of field tables is the one that the code prints."""

from __future__ import annotations

from pathlib import Path

from clawhpc.wire.protocols import render_page

PAGE = Path(__file__).parents[2] / "docs" / "protocols.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render_page(), "run: python -m clawhpc.wire.protocols > docs/protocols.md"
