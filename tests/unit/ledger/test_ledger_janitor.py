"""What the dead have left is found, described and cleared; who lives, and what is not ours, is not touched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.ledger import Cleared, Ledger, clear_remains, find_remains
from clawhpc.ledger.janitor import MOST_FILES
from clawhpc.ledger.reap import owner_marker
from tests.fakes.trees import nest


def leave(root: Path, owner: str, note: str = "") -> Path:
    """What an owner leaves that dies at once: its lock, which nobody holds, and its folder."""
    (root / f"{owner}.lock").write_text(note)
    (root / owner).mkdir()
    return root / owner


def test_files_sockets_and_processes_are_counted_and_left_alone(ledger_root: Path) -> None:
    folder = leave(ledger_root, "ab12", '{"pid": 7, "command": ["python", "-m", "clawhpc.train"]}')
    (folder / "engine").mkdir()
    (folder / "engine/weights").write_text("w")
    (folder / "link").symlink_to("/")
    environment = {**os.environ, "CLAWHPC_OWNER": owner_marker("ab12")}
    with socket.socket(socket.AF_UNIX) as one, subprocess.Popen(["sleep", "60"], env=environment) as child:
        one.bind(str(folder / "proxy.sock"))
        (remains,) = find_remains(ledger_root)
        assert (remains.owner, remains.pid, remains.command) == ("ab12", 7, "python -m clawhpc.train")
        assert (remains.num_files, remains.num_sockets, remains.mounts) == (3, 1, ())
        assert remains.processes == (child.pid,)
        assert child.poll() is None
        assert clear_remains(ledger_root) == Cleared(owners=("ab12",), failures=())
        assert child.wait(5) == -signal.SIGKILL
    assert list(ledger_root.iterdir()) == []


@pytest.mark.parametrize("note", ["", "{", "[]", "7"])
def test_one_that_died_before_it_could_say_who_it_is_is_found(ledger_root: Path, note: str) -> None:
    leave(ledger_root, "ab12", note)
    (remains,) = find_remains(ledger_root)
    assert remains.pid is None
    assert remains.summary == "ab12: process unknown has left 0 processes, 0 mounts, 0 sockets, 0 files"
    assert clear_remains(ledger_root).owners == ("ab12",)


def test_a_living_owner_is_not_found(ledger_root: Path) -> None:
    with Ledger.open(ledger_root) as ledger:
        leave(ledger_root, "ab12")
        assert [one.owner for one in find_remains(ledger_root)] == ["ab12"]
        assert clear_remains(ledger_root).owners == ("ab12",)
        assert ledger.scratch.is_dir()


def test_who_opens_a_ledger_to_look_first_clears_nothing(ledger_root: Path) -> None:
    leave(ledger_root, "ab12")
    with Ledger.open(ledger_root, clear=False):
        assert len(find_remains(ledger_root)) == 1
    with Ledger.open(ledger_root):
        assert find_remains(ledger_root) == ()


def test_an_owner_of_another_host_is_neither_found_nor_cleared(ledger_root: Path) -> None:
    """Where hosts share a folder, against all advice, a lock that is held on one may look free on another."""
    folder = leave(ledger_root, "far1", '{"pid": 1, "host": "elsewhere", "command": []}')
    assert find_remains(ledger_root) == ()
    assert clear_remains(ledger_root) == Cleared(owners=(), failures=())
    assert folder.is_dir()


def test_a_root_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert find_remains(tmp_path / "none") == ()
    assert clear_remains(tmp_path / "none") == Cleared(owners=(), failures=())


@pytest.mark.parametrize("kind", ["open", "link"])
def test_what_others_may_have_put_there_is_not_reaped(ledger_root: Path, kind: str) -> None:
    folder = leave(ledger_root, "ab12")
    root = ledger_root
    if kind == "link":
        root = ledger_root / "link"
        root.symlink_to(ledger_root)
    else:
        ledger_root.chmod(0o777)
    for look in (find_remains, clear_remains):
        with pytest.raises(UserError, match="only you may enter"):
            look(root)
    assert folder.is_dir()
    ledger_root.chmod(0o700)


def test_a_tree_of_any_depth_is_counted_as_far_as_it_can_be_read(ledger_root: Path) -> None:
    nest(leave(ledger_root, "ab12"), 1100)  # Python's recursion ends at 1000
    (remains,) = find_remains(ledger_root)
    assert 0 <= remains.num_files < MOST_FILES
    assert clear_remains(ledger_root).owners == ("ab12",)
