"""What an owner started does not outlive it, whoever is killed. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.ledger import Ledger, kill_marked, remove_tree
from clawhpc.ledger.reap import read_processes, unmount_below
from tests.fakes.trees import nest
from tests.sandbox_parts import running, seconds_until_gone, traces

PROMISE_S = 10.0
"""From the owner's death until nothing is left."""
START_S = 30.0

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def needle() -> str:
    """An argument of `sleep` by which the processes of one test are known on the host."""
    return f"986{uuid.uuid4().int % 10**9}"


@pytest.fixture
def start(ledger_root: Path, needle: str, cache_dir: Path) -> Iterator[Start]:
    """Start an owner of the given kind, and wait until what it owns runs."""
    owners: list[subprocess.Popen[bytes]] = []

    def start_owner(kind: str, root: Path = ledger_root, needle: str = needle) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.fakes.owner", kind, str(root), needle, str(cache_dir)]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        owners.append(owner)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        wait_until(lambda: len(running(f"sleep {needle}")) >= 4 and (kind != "processes" or is_renamed(needle)))
        return owner

    yield start_owner
    for owner in owners:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


def wait_until(condition: Callable[[], bool], within_s: float = START_S) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def watchdogs(root: Path) -> list[int]:
    return running(f"reap.py {root}")


def is_renamed(needle: str) -> bool:
    """The process that writes over its own title has done so."""
    return len(running(f"sleep {needle} renamed sleep {needle}")) == 1


def is_empty(root: Path) -> bool:
    return list(root.iterdir()) == []


APPTAINER = [pytest.mark.sandbox, pytest.mark.apptainer]
SLOW = pytest.mark.slow
KILL, TERM = signal.SIGKILL, signal.SIGTERM
OWNERS = [
    ("processes", KILL),
    ("mcp", KILL),
    pytest.param("processes", TERM, marks=SLOW),
    pytest.param("bubblewrap", KILL, marks=pytest.mark.sandbox),
    pytest.param("bubblewrap", TERM, marks=[pytest.mark.sandbox, SLOW]),
    pytest.param("apptainer", KILL, marks=[*APPTAINER, SLOW]),
    pytest.param("apptainer", TERM, marks=[*APPTAINER, SLOW]),
    pytest.param("sif", KILL, marks=APPTAINER),
    pytest.param("sif", TERM, marks=[*APPTAINER, SLOW]),
    pytest.param("worker", KILL, marks=pytest.mark.sandbox),
    pytest.param("worker", TERM, marks=[pytest.mark.sandbox, SLOW]),
]


@pytest.mark.parametrize(("kind", "number"), OWNERS)
def test_nothing_is_left_soon_after_an_owner_is_killed(
    kind: str, number: signal.Signals, start: Start, ledger_root: Path, needle: str
) -> None:
    owner = start(kind)
    owner.send_signal(number)
    owner.wait(PROMISE_S)
    seconds_until_gone(f"sleep {needle}", within_s=PROMISE_S)
    wait_until(lambda: traces(ledger_root) == [], within_s=PROMISE_S)


@pytest.mark.parametrize("kind", ["processes", pytest.param("apptainer", marks=[*APPTAINER, SLOW])])
def test_where_the_watchdog_is_killed_too_the_next_owner_cleans_up(
    kind: str, start: Start, ledger_root: Path, needle: str
) -> None:
    owner = start(kind)
    (watchdog,) = watchdogs(ledger_root)
    os.kill(watchdog, signal.SIGKILL)
    kill(owner)
    assert len(running(f"sleep {needle}")) >= 3
    with Ledger.open(ledger_root) as ledger:
        assert running(f"sleep {needle}") == []
        assert [path.name for path in ledger_root.iterdir() if path.is_dir()] == [ledger.scratch.name]
    assert is_empty(ledger_root)


@pytest.mark.sandbox
def test_a_worker_whose_watchdog_is_killed_with_its_campaign_is_cleaned_up(
    start: Start, ledger_root: Path, needle: str
) -> None:
    campaign = start("worker")
    for watchdog in watchdogs(ledger_root):
        os.kill(watchdog, signal.SIGKILL)
    kill(campaign)
    with Ledger.open(ledger_root):
        assert running(f"sleep {needle}") == []
    seconds_until_gone(str(ledger_root), within_s=PROMISE_S)
    assert is_empty(ledger_root)


@pytest.mark.sandbox
def test_a_worker_whose_watchdog_is_killed_goes_with_its_campaign_when_that_ends(
    start: Start, ledger_root: Path, needle: str
) -> None:
    campaign = start("worker")
    for watchdog in watchdogs(ledger_root):
        os.kill(watchdog, signal.SIGKILL)
    os.kill(campaign.pid, signal.SIGINT)
    campaign.wait(2 * PROMISE_S)
    assert running(f"sleep {needle}") == []
    assert is_empty(ledger_root)


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", ["processes", "bubblewrap"])
def test_ctrl_c_leaves_nothing(kind: str, start: Start, ledger_root: Path, needle: str) -> None:
    owner = start(kind)
    os.killpg(owner.pid, signal.SIGINT)
    owner.wait(PROMISE_S)
    assert running(f"sleep {needle}") == []
    assert is_empty(ledger_root)


def test_owners_do_not_touch_one_another(start: Start, ledger_root: Path, needle: str) -> None:
    other_needle = f"77{needle}"
    other = start("processes", needle=other_needle)  # type: ignore[call-arg]
    others = running(f"sleep {other_needle}")
    (scratch,) = (path for path in ledger_root.iterdir() if path.is_dir())
    kill(start("processes"))
    seconds_until_gone(f"sleep {needle}", within_s=PROMISE_S)
    with Ledger.open(ledger_root):
        pass
    assert running(f"sleep {other_needle}") == others
    assert (scratch / "file").read_text() == "something"
    assert other.poll() is None
    assert len(watchdogs(ledger_root)) == 1


def test_a_clean_close_ends_everything_and_the_watchdog(ledger_root: Path, needle: str) -> None:
    ledger = Ledger.open(ledger_root)
    child = subprocess.Popen(["sleep", needle], env={**os.environ, **ledger.environment})
    assert stat.S_IMODE(ledger.scratch.stat().st_mode) == 0o700
    ledger.close()
    assert child.wait(5) == -signal.SIGKILL
    seconds_until_gone(f"reap.py {ledger_root}", within_s=1)
    assert is_empty(ledger_root)
    ledger.close()


def test_a_clean_close_without_a_watchdog_ends_everything_too(ledger_root: Path, needle: str) -> None:
    with Ledger.open(ledger_root) as ledger:
        child = subprocess.Popen(["sleep", needle], env={**os.environ, **ledger.environment})
        (watchdog,) = watchdogs(ledger_root)
        os.kill(watchdog, signal.SIGKILL)
    assert child.wait(5) == -signal.SIGKILL
    assert is_empty(ledger_root)


def test_the_watchdog_stands_apart_from_its_owner(start: Start, ledger_root: Path, needle: str) -> None:
    """Not in its session nor among its descendants: neither Ctrl-C nor another owner's watchdog takes it along."""
    owner = start("processes")
    (watchdog,) = watchdogs(ledger_root)
    process = read_processes()[watchdog]
    assert process.session not in (os.getsid(owner.pid), os.getsid(0))
    assert process.parent != owner.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watchdog, number)
    assert watchdogs(ledger_root) == [watchdog]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount without FUSE")
def test_a_mount_below_scratch_is_detached_and_not_emptied(ledger_root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with Ledger.open(ledger_root) as ledger:
        point = ledger.scratch / "a mount"
        point.mkdir()
        subprocess.run(["mount", "--bind", str(tmp_path), str(point)], check=True)
    assert (tmp_path / "precious").exists()
    assert is_empty(ledger_root)
    unmount_below(ledger_root)


LEVELS = 3000
"""Of folders in folders: Python's recursion ends at 1000, a path at 4096 bytes."""


@pytest.mark.parametrize("mode", [0o755, 0o000])
def test_a_tree_of_any_depth_and_permissions_is_removed(tmp_path: Path, mode: int) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "-rf").write_text("x")
    (tmp_path / "tree" / "link").symlink_to(tmp_path)
    nest(tmp_path / "tree", LEVELS, mode=mode)
    (tmp_path / "tree").chmod(mode)
    (tmp_path / "precious").touch()
    remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_deep_tree_of_a_killed_owner_is_removed_by_the_next(start: Start, ledger_root: Path) -> None:
    owner = start("processes")
    (scratch,) = (path for path in ledger_root.iterdir() if path.is_dir())
    nest(scratch, LEVELS)
    (watchdog,) = watchdogs(ledger_root)
    os.kill(watchdog, signal.SIGKILL)
    kill(owner)
    with Ledger.open(ledger_root):
        assert not scratch.exists()
    assert is_empty(ledger_root)


def test_what_cannot_be_cleared_away_is_told_and_in_nobodys_way(
    ledger_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (ledger_root / "dead.lock").mkdir()  # no lock can be taken on it
    with Ledger.open(ledger_root) as ledger:
        assert ledger.scratch.is_dir()
    assert "dead.lock: left by an owner that died, and cannot be cleared away" in caplog.text


MAIN_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(20,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit: of this thread alone
"""


def test_a_process_whose_first_thread_has_ended_is_killed_too() -> None:
    """It looks dead. So does, for a moment, one of which another thread calls exec, as Apptainer does."""
    command = [sys.executable, "-c", MAIN_THREAD_ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        state = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
        assert kill_marked("nobody carries this", session=process.pid, deadline_s=5) == []
        assert process.wait(5) == -signal.SIGKILL


def test_a_root_that_others_may_enter_is_refused(ledger_root: Path) -> None:
    ledger_root.chmod(0o755)
    with pytest.raises(UserError, match="only you may enter"):
        Ledger.open(ledger_root)
    ledger_root.chmod(0o700)


def test_a_root_that_is_a_link_is_refused(ledger_root: Path) -> None:
    (ledger_root / "link").symlink_to(ledger_root)
    with pytest.raises(UserError, match="only you may enter"):
        Ledger.open(ledger_root / "link")


def test_a_root_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long"):
        Ledger.open(tmp_path / ("x" * 60))
