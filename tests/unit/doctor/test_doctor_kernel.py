"""User namespaces, subordinate ids, FUSE: each state, and what to do about it."""

from __future__ import annotations

import pytest

from clawhpc.checkup.finding import State
from clawhpc.checkup.kernel import check_fuse, check_subordinate_ids, check_user_namespaces
from clawhpc.checkup.machine import Answer
from tests.fakes.machine import FakeMachine

DENIED = Answer(1, errors="unshare: unshare failed: Operation not permitted")
LIMIT = "/proc/sys/user/max_user_namespaces"


def test_user_namespaces_that_can_be_made_work() -> None:
    found = check_user_namespaces(FakeMachine(answers={"unshare": Answer(0)}, files={LIMIT: "15000\n"}))
    assert (found.state, found.found, found.remedy) == (State.WORKS, "up to 15000", "")


@pytest.mark.parametrize(
    ("file", "value", "state", "remedy"),
    [
        (LIMIT, "0", State.MISSING, "sysctl -w user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", State.MISSING, "kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            State.LIMITED,
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ],
)
def test_what_forbids_user_namespaces_is_named(file: str, value: str, state: State, remedy: str) -> None:
    found = check_user_namespaces(FakeMachine(answers={"unshare": DENIED}, files={file: f"{value}\n"}))
    assert found.state is state
    assert remedy in found.remedy


def test_user_namespaces_that_nobody_knows_who_forbids_are_missing() -> None:
    found = check_user_namespaces(FakeMachine(answers={"unshare": DENIED}, files={LIMIT: "15000\n"}))
    assert (found.state, found.found) == (State.MISSING, DENIED.errors)


def test_without_unshare_the_containers_have_to_tell() -> None:
    assert check_user_namespaces(FakeMachine()).state is State.LIMITED


RANGES = {"/etc/subuid": "ann:100000:65536\n", "/etc/subgid": "1000:100000:65536\n"}


@pytest.mark.parametrize(
    ("machine", "needed", "state", "words"),
    [
        (FakeMachine(programs=("newuidmap",), files=RANGES), True, State.WORKS, "name ann"),
        (FakeMachine(files=RANGES), True, State.LIMITED, "no newuidmap"),
        (FakeMachine(programs=("newuidmap",)), True, State.LIMITED, "/etc/subuid and /etc/subgid"),
        (FakeMachine(programs=("newuidmap",)), False, State.NOT_NEEDED, "no line for ann"),
        (
            FakeMachine(programs=("newuidmap",), files={"/etc/subuid": "joann:1:1\n", "/etc/subgid": "ann:1:1"}),
            True,
            State.LIMITED,
            "no line for ann in /etc/subuid",
        ),
    ],
)
def test_subordinate_ids(machine: FakeMachine, needed: bool, state: State, words: str) -> None:
    found = check_subordinate_ids(machine, user="ann", uid=1000, needed=needed)
    assert found.state is state
    assert words in found.found
    assert bool(found.remedy) == (state is State.LIMITED)


def test_root_needs_no_subordinate_ids() -> None:
    assert check_subordinate_ids(FakeMachine(), user="root", uid=0, needed=True).state is State.NOT_NEEDED


@pytest.mark.parametrize(
    ("mode", "programs", "needed", "state", "words"),
    [
        (0o666, ("squashfuse", "fuse-overlayfs"), True, State.WORKS, "squashfuse, fuse-overlayfs"),
        (0o666, ("squashfuse",), True, State.LIMITED, "squashfuse"),
        (0o666, (), False, State.NOT_NEEDED, "no program"),
        (0o600, ("squashfuse",), True, State.MISSING, "mode 0600"),
        (None, (), True, State.MISSING, "no /dev/fuse"),
        (None, (), False, State.NOT_NEEDED, "no /dev/fuse"),
    ],
)
def test_fuse(mode: int | None, programs: tuple[str, ...], needed: bool, state: State, words: str) -> None:
    modes = {} if mode is None else {"/dev/fuse": mode}
    found = check_fuse(FakeMachine(programs=programs, modes=modes), needed=needed)
    assert found.state is state
    assert words in found.found
    assert bool(found.remedy) == (state in (State.LIMITED, State.MISSING))
