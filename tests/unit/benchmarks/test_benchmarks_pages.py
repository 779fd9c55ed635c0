"""The published pages that are made from what is kept of their runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import ppo_grpo, ppo_grpo_runs, transfer, transfer_runs

RESULTS = Path(__file__).parents[3] / "docs/results"
WRITERS: dict[str, Callable[[Path], None]] = {
    "ppo_grpo": lambda page: ppo_grpo.write_page(ppo_grpo_runs.Study(page=page)),
    "transfer": lambda page: transfer.write_page(transfer_runs.Study(page=page)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_published_page_says_what_its_runs_have_found(name: str, tmp_path: Path) -> None:
    page = tmp_path / f"{name}.md"
    shutil.copytree(RESULTS / name, tmp_path / name)
    shutil.copy(RESULTS / page.name, page)
    WRITERS[name](page)
    assert page.read_text() == (RESULTS / page.name).read_text()
