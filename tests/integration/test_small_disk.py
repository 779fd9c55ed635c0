"""A disk that is full, or may not be written: one clear line, nothing half-written, and once mended it goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fakes.small_disk import on_small_disk
from tests.fakes.writers import WRITERS
from tests.sandbox_parts import missing

REASONS = {"full": "No space left on device", "read-only": "Read-only file system"}


@pytest.fixture(scope="session")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They can be had: in a user namespace."""
    tried = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        missing(f"user namespaces ({tried.stderr.strip()})")


def lines(done: subprocess.CompletedProcess[str], folder: Path) -> list[str]:
    """What a person is told; a scenario that went wrong says so by its traceback."""
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("clawhpc: ")]
    assert all(str(folder) in line for line in told), done.stderr
    return told


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_every_writer_says_in_one_line_what_it_could_not_write_and_leaves_nothing(
    tmp_path: Path, small_disks: None, how: str
) -> None:
    told = lines(on_small_disk(tmp_path, "tests.fakes.writers", how, size="256k"), tmp_path)
    assert len(told) == len(WRITERS)
    assert all(line.startswith(f"clawhpc: {REASONS[how]}") for line in told)


@pytest.mark.parametrize(
    "how",
    [
        "full",
        "full from the start",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("nearly full", "read-only")),
    ],
)
def test_a_campaign_whose_store_breaks_stops_with_one_line_and_once_it_is_mended_goes_on(
    tmp_path: Path, small_disks: None, how: str
) -> None:
    """With exactly one record per planned rollout, and those that were there unchanged."""
    (line,) = lines(on_small_disk(tmp_path, "tests.fakes.full_campaign", how, size="8m"), tmp_path)
    assert line.startswith(f"clawhpc: {REASONS['full' if 'full' in how else how]}: ")


@pytest.mark.slow
def test_a_learner_stops_at_whatever_does_not_fit_and_goes_on_bit_for_bit(tmp_path: Path, small_disks: None) -> None:
    told = lines(on_small_disk(tmp_path, "tests.fakes.full_learner", "full", size="32m"), tmp_path)
    assert all(line.startswith(f"clawhpc: {REASONS['full']}: ") for line in told)
    assert {Path(line).parent.name for line in told} == {"metrics", "checkpoints", "policies"}
