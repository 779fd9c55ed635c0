"""One process at a time, and a person who is told why not."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from threading import Event, Thread

import pytest

from clawhpc.campaign.run import open_run
from clawhpc.errors import UserError
from clawhpc.lock import alone
from tests.fakes.disk import largest_file


def test_a_lock_that_is_held_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    lock = tmp_path / "folder/x.lock"
    with alone(lock, "the run"), pytest.raises(UserError) as caught, alone(lock, "the run"):
        pass
    assert str(caught.value) == f"the run is in use by process {os.getpid()} on {os.uname().nodename}"
    with alone(lock, "the run"):
        pass


def test_who_waits_comes_in_when_the_other_has_left(tmp_path: Path) -> None:
    inside, come_in = Event(), []

    def wait() -> None:
        inside.set()
        with alone(tmp_path / "lock", "it", wait_s=30):
            come_in.append(True)

    with alone(tmp_path / "lock", "it"):
        waiting = Thread(target=wait)
        waiting.start()
        assert inside.wait(10)
        assert come_in == []
    waiting.join(30)
    assert come_in == [True]


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    with (
        alone(tmp_path / "lock", "it"),
        pytest.raises(UserError, match="in use"),
        alone(tmp_path / "lock", "it", wait_s=0.2),
    ):
        pass


def test_a_lock_that_does_not_fit_on_the_disk_is_named_and_free_again(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with largest_file(0), pytest.raises(OSError, match=r"File too large: '.*lock'"), alone(lock, "it"):
        pass
    with alone(lock, "it"):
        pass


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_with_the_run_that_lies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """Lustre mounted without `flock`, and some NFS: none of them is at hand in a test."""

    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError) as caught, open_run(tmp_path, b"a: 1"):
        pass
    assert str(caught.value).startswith(f"{tmp_path}/001 cannot be locked ({os.strerror(reason)}): choose")
