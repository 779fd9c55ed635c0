"""Who has a lease is seen by others, and that nobody has it too."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from clawhpc.launch.lease import hold_lease, wait_for_end

LONG_S = 3600.0
"""Longer than any test."""
SHORT_S = 0.4


class Waiter:
    """A worker that waits in a thread for the end of its campaign."""

    def __init__(self, path: Path, holder: str, lease_s: float) -> None:
        self.thread = threading.Thread(target=wait_for_end, args=(path, holder, lease_s), daemon=True)
        self.thread.start()

    def has_ended(self, within_s: float) -> bool:
        self.thread.join(within_s)
        return not self.thread.is_alive()


def test_a_lease_that_is_given_up_ends_who_relies_on_it_at_the_next_look(tmp_path: Path) -> None:
    with hold_lease(tmp_path / "lease", "c1", SHORT_S):
        waiter = Waiter(tmp_path / "lease", "c1", SHORT_S)
        assert not waiter.has_ended(3 * SHORT_S), "signs come as long as it is held"
    assert waiter.has_ended(60)


def test_a_lease_that_another_has_taken_ends_who_relies_on_the_first(tmp_path: Path) -> None:
    with hold_lease(tmp_path / "lease", "c1", LONG_S), hold_lease(tmp_path / "lease", "c2", LONG_S):
        wait_for_end(tmp_path / "lease", "c1", LONG_S)


@pytest.mark.parametrize("left", [None, b"", b"c1               000000000007\n"], ids=["no file", "empty", "stale"])
def test_a_holder_that_gives_no_sign_has_ended(tmp_path: Path, left: bytes | None) -> None:
    if left is not None:
        (tmp_path / "lease").write_bytes(left)
    waiter = Waiter(tmp_path / "lease", "c1", SHORT_S)
    assert waiter.has_ended(60)


def test_a_lease_that_cannot_be_renewed_says_so_and_ends_no_campaign(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hold_lease(tmp_path / "lease", "c1", SHORT_S):
        (tmp_path / "lease").unlink()
        waiter = Waiter(tmp_path / "lease", "c1", SHORT_S)
        assert waiter.has_ended(60)
    assert "workers will end if this goes on" in caplog.text


def test_a_file_system_that_hangs_for_longer_than_a_lease_ends_nobody(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    os.mkfifo(lease)  # who reads it hangs until somebody writes
    waiter = Waiter(lease, "c1", SHORT_S)
    for seconds, sign in [(0.0, b"c1 1"), (2 * SHORT_S, b"c1 1"), (2 * SHORT_S, b"c1 1"), (0.0, b"c1 2")]:
        time.sleep(seconds)
        assert not waiter.has_ended(0), "the hang is not the campaign's silence"
        lease.write_bytes(sign)
    assert not waiter.has_ended(SHORT_S)
    lease.write_bytes(b"nobody")
    assert waiter.has_ended(60)
