"""The folder of runs: real files and locks, and what is said of file systems that are not here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clawhpc.checkup.files import (
    GIB,
    HELD,
    NO_LOCKS,
    check_locks,
    check_quota,
    check_room,
    check_run_folder,
    check_writing,
)
from clawhpc.checkup.finding import State
from clawhpc.checkup.machine import Answer, ThisMachine
from clawhpc.sandbox.disk import Place, place_of
from tests.fakes.machine import FakeMachine

MOUNTS = """/dev/sda1 / ext4 rw,relatime 0 0
home:/export /home nfs4 rw,local_lock=none 0 0
mds@tcp:/big /big\\040disk lustre rw,localflock 0 0
tmpfs /home/ann/tmp tmpfs rw 0 0
"""
DISK, NFS = Place("ext4"), Place("nfs4")


@pytest.mark.parametrize(
    ("folder", "kind", "is_network"),
    [
        ("/var/runs", "ext4", False),
        ("/home/ann/runs", "nfs4", True),
        ("/home/ann/tmp/runs", "tmpfs", False),
        ("/homeless", "ext4", False),
        ("/big disk/runs", "lustre", True),
    ],
)
def test_a_folder_lies_on_the_nearest_mount(folder: str, kind: str, is_network: bool) -> None:
    place = place_of(Path(folder), MOUNTS)
    assert (place.kind, place.is_network) == (kind, is_network)


def test_the_run_folder_of_this_machine_works_and_nothing_stays_in_it(tmp_path: Path) -> None:
    rows = check_run_folder(tmp_path / "runs" / "of" / "mine", ThisMachine(os.environ), shared=False)
    assert [row.what for row in rows] == ["run folder", "locks of runs", "room for runs"]
    assert [row.state for row in rows[:2]] == [State.WORKS, State.WORKS]
    assert str(tmp_path) in rows[0].found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_missing() -> None:
    (row,) = check_run_folder(Path("/proc/runs"), ThisMachine(os.environ), shared=False)
    assert row.state is State.MISSING
    assert row.found.startswith("/proc: ")
    assert "run.root=" in row.remedy


@pytest.mark.parametrize(
    ("place", "shared", "state"),
    [(DISK, False, State.WORKS), (DISK, True, State.LIMITED), (NFS, True, State.WORKS), (NFS, False, State.WORKS)],
)
def test_runs_that_hosts_share_must_lie_where_they_see_them(
    tmp_path: Path, place: Place, shared: bool, state: State
) -> None:
    assert check_writing(tmp_path, tmp_path, place, shared=shared).state is state


@pytest.mark.parametrize(
    ("seen", "place", "state"),
    [
        ((HELD, 0), NFS, State.WORKS),
        ((HELD, 0), Place("lustre", ("rw", "localflock")), State.LIMITED),
        ((0, 0), NFS, State.MISSING),
        ((HELD, HELD), NFS, State.MISSING),
        ((NO_LOCKS, NO_LOCKS), NFS, State.MISSING),
    ],
)
def test_locks_keep_one_process_out_and_let_it_in(
    tmp_path: Path, seen: tuple[int, int], place: Place, state: State
) -> None:
    answers = iter(seen)

    class Other(FakeMachine):
        def ask(self, *command: str) -> Answer:
            assert command[0] == sys.executable
            return Answer(next(answers))

    assert check_locks(tmp_path / "lock", Other(), place).state is state


@pytest.mark.parametrize(
    ("free_gib", "free_files", "state"),
    [
        (100, None, State.WORKS),
        (100, 10**6, State.WORKS),
        (5, 10**6, State.LIMITED),
        (100, 500, State.LIMITED),
        (0.5, 10**6, State.MISSING),
        (100, 0, State.MISSING),
    ],
)
def test_room(free_gib: float, free_files: int | None, state: State) -> None:
    row = check_room("room", int(free_gib * GIB), free_files, "elsewhere")
    assert row.state is state
    assert bool(row.remedy) == (state is not State.WORKS)


QUOTA = """Disk quotas for user ann (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
   home:/export  {blocks}  100000  200000           10       0       0
"""


@pytest.mark.parametrize(
    ("machine", "state", "found"),
    [
        (FakeMachine(), State.NOT_NEEDED, "no quota program"),
        (FakeMachine(answers={"quota": Answer(0, "Disk quotas for user ann (uid 1000): none\n")}), State.WORKS, "none"),
        (FakeMachine(answers={"quota": Answer(124, errors="too late")}), State.NOT_NEEDED, "too late"),
        (FakeMachine(answers={"quota": Answer(0, QUOTA.format(blocks="900"))}), State.WORKS, "not used up"),
        (FakeMachine(answers={"quota": Answer(1, QUOTA.format(blocks="150000*"))}), State.LIMITED, "home:/export"),
    ],
)
def test_quota(machine: FakeMachine, state: State, found: str) -> None:
    row = check_quota(machine)
    assert row.state is state
    assert found in row.found
