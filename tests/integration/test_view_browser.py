"""The page in a real browser, where there is one: its script runs, and a hostile text does not."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from clawhpc.paths import RunPaths
from clawhpc.records import McpCall, StepPlan, Verdict
from clawhpc.report import write_report
from clawhpc.store import publish_plan, publish_rollout, read_rollouts, seal_group
from clawhpc.view.page import ViewSettings, write_page
from tests.fakes.records import make_group, make_judgement, make_record
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


def test_what_servers_on_the_host_and_judges_have_said_is_shown_as_text(tmp_path: Path) -> None:
    group = make_group(num_samples=1)
    call = McpCall(
        server="lab",
        connection=0,
        method="tools/call",
        name="add",
        arguments='{"a": 2}',
        result=HOSTILE,
        started_at=1.0,
        duration_s=0.5,
    )
    verdict = Verdict(reward=1.0, unshaped=0.75, judgement=make_judgement(HOSTILE))
    record = replace(make_record(group), verdict=verdict, mcp_calls=(call,), mcp_counts={"lab initialize": 1})
    paths = RunPaths(tmp_path / "run")
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(group,))
    publish_plan(paths, plan)
    publish_rollout(paths, record)
    seal_group(paths, group)
    page = write_page(paths, decode, ViewSettings())
    unguarded = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text()
    )  # its script is changed
    page.write_text(unguarded.replace("current = null, tab = 0", "current = null, tab = 2"))
    document = dump(page, f"/{quote(record.rollout_id)}", tmp_path / "profile")
    assert "MCP servers on the host" in document
    assert "lab initialize" in document
    assert "lab: add" in document
    assert "reward before shaping" in document
    assert "judge-2" in document
    assert "&lt;img src=x onerror=" in document
    assert "<img" not in document


def test_a_report_shows_under_the_pointer_what_each_run_had_at_a_step(page: Path, tmp_path: Path) -> None:
    runs = {"<b>one": RunPaths(page.parent), "two": write_run(tmp_path / "two", steps=3, seed=1)}
    report = tmp_path / "report.html"
    write_report(runs, report)
    document = dump(report, "", tmp_path / "profile")
    assert "Theme: system" in document, "its script runs"
    assert document.count('class="readout"') == document.count('class="chart"') > 5
    assert "&lt;b&gt;one" in document
    assert "<b>one" not in document
