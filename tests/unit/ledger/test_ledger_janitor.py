"""What the dead have left is found, described and cleared; who lives, and what is not ours, is not touched."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.ledger import Cleared, Ledger, clear_remains, end_job, find_remains
from clawhpc.ledger.janitor import MOST_FILES
from clawhpc.ledger.reap import owner_marker, read_processes
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


OWNER = """
import subprocess, sys
from pathlib import Path
from clawhpc.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]), job=sys.argv[2])
child = subprocess.Popen(["sleep", "60"], env=ledger.environment, start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
ledger.close()
"""


@contextmanager
def owner_in(root: Path, job: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A living owner that belongs to `job`, and a process that it has started."""
    command = [sys.executable, "-c", OWNER, str(root), job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        yield owner, int(owner.stdout.readline())


def test_of_a_job_that_has_ended_nothing_is_left_and_another_job_on_the_same_node_lives_on(ledger_root: Path) -> None:
    with owner_in(ledger_root, "7.n1.0") as (ended, child), owner_in(ledger_root, "70.n1.0") as (other, others_child):
        with Ledger.open(ledger_root) as of_no_job:
            end_job(ledger_root, "7.n1.0")
            assert ended.wait(5) == -signal.SIGKILL
            assert child not in read_processes()
            assert other.poll() is None
            assert others_child in read_processes()
            assert of_no_job.scratch.is_dir()
        assert len(list(ledger_root.glob("*.lock"))) == 1


@pytest.mark.parametrize(("job", "ends"), [("7.n1.1", False), ("7.n1.2", True), ("7.n1.10", True)])
def test_the_end_of_a_turn_of_a_job_ends_earlier_ones_and_no_later_one(ledger_root: Path, job: str, ends: bool) -> None:
    """A script whose daemon was killed may come to its last line when the next turn is at work on the same node."""
    with owner_in(ledger_root, "7.n1.2") as (owner, _):
        end_job(ledger_root, job)
        assert (owner.poll() is None) is not ends


def test_a_process_that_is_known_by_the_files_of_a_container_only_is_found_and_ended(ledger_root: Path) -> None:
    """As what serves an image to a container: Apptainer gives it no environment, and it may outlive all others."""
    folder = leave(ledger_root, "ab12") / "run-x"
    folder.mkdir()
    with (folder / "report").open("wb") as report, (ledger_root / "ab12/other").open("wb") as other:
        server = subprocess.Popen(["sleep", "60"], env={}, pass_fds=[report.fileno()], start_new_session=True)
        bystander = subprocess.Popen(["sleep", "60"], env={}, pass_fds=[other.fileno()], start_new_session=True)
    assert find_remains(ledger_root)[0].processes == (server.pid,)
    clear_remains(ledger_root)
    assert server.wait(5) == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_killed(ledger_root: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        note = {"pid": bystander.pid, "host": os.uname().nodename, "command": [], "job": "7.n1.0"}
        leave(ledger_root, "ab12", json.dumps(note))
        assert find_remains(ledger_root)[0].job == "7.n1.0"
        assert end_job(ledger_root, "7.n1.0").owners == ("ab12",)
        assert bystander.poll() is None
        bystander.kill()


def test_the_last_line_of_a_jobs_script_removes_what_it_has_left(ledger_root: Path) -> None:
    with owner_in(ledger_root, "7.n1.0") as (owner, _):
        subprocess.run([sys.executable, "-m", "clawhpc.ledger", "7.n1.0", str(ledger_root)], check=True)
        assert owner.wait(5) == -signal.SIGKILL
    assert list(ledger_root.iterdir()) == []


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
