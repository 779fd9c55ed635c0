"""The page in a real browser, where there is one: its script runs, and a hostile text does not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from clawhpc.paths import RunPaths
from clawhpc.store import read_rollouts
from clawhpc.view.page import ViewSettings, write_page
from tests.fakes.run import HOSTILE, decode, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to show the page in")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write_run(tmp_path_factory.mktemp("run"), steps=2), decode, ViewSettings(num_trees=1000))


def dump(page: Path, place: str, profile: Path) -> str:
    """The document after its script has run."""
    argv = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    argv += [f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", f"{page.as_uri()}#{place}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


def test_the_table_lists_the_rollouts(page: Path, tmp_path: Path) -> None:
    document = dump(page, "", tmp_path)
    assert document.count("<tr tabindex=") == 2 * 12 + 2 * 6
    assert "36 rollouts" in document


def test_a_rollout_shows_its_tree_and_a_hostile_text_stays_a_text(page: Path, tmp_path: Path) -> None:
    hostile = next(
        record
        for record in read_rollouts(RunPaths(page.parent))
        if any(HOSTILE in message.text for call in record.calls for message in call.new_messages)
    )
    document = dump(page, f"/{quote(hostile.rollout_id)}", tmp_path)
    assert 'id="node-0"' in document
    assert 'class="node drawn' in document
    assert "<title>owned" not in document
    assert "<img" not in document
    assert "&lt;img src=x onerror=" in document
