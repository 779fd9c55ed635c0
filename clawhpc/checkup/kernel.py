"""What containers without root stand on: user namespaces, subordinate ids, FUSE."""

from __future__ import annotations

from clawhpc.checkup.finding import Finding, State, lacking
from clawhpc.checkup.machine import NOT_FOUND, Machine

APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
KNOBS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    (APPARMOR, "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Below /proc/sys: what forbids namespaces, with which value, and what allows them."""
FUSE = "/dev/fuse"
SQUASHFUSE = ("squashfuse_ll", "squashfuse")
OVERLAY = "fuse-overlayfs"


def check_user_namespaces(machine: Machine) -> Finding:
    """Whether a program without privileges may make them, seen by trying."""
    what, tried = "user namespaces", machine.ask("unshare", "--user", "--map-root-user", "true")
    if tried.ok:
        limit = machine.read("/proc/sys/user/max_user_namespaces").strip() or "any number"
        return Finding(what=what, state=State.WORKS, found=f"up to {limit}")
    for knob, forbids, allows in KNOBS:
        if machine.read(f"/proc/sys/{knob}").strip() == forbids:
            # AppArmor lets programs through that it has a profile for: the rows of the containers say which.
            state = State.LIMITED if knob == APPARMOR else State.MISSING
            return Finding(what=what, state=state, found=f"forbidden by {knob}", remedy=f"as root: sysctl -w {allows}")
    if tried.exit_code == NOT_FOUND:
        return Finding(what=what, state=State.LIMITED, found="no unshare to try it with: see Apptainer, bubblewrap")
    return Finding(what=what, state=State.MISSING, found=tried.reason, remedy="ask for it: unshare --user true")


def check_subordinate_ids(machine: Machine, *, user: str, uid: int, needed: bool) -> Finding:
    """Whether `user` has ids beside its own, which the build of an image gives to the users in it."""
    what = "subordinate ids"
    if uid == 0:
        return Finding(what=what, state=State.NOT_NEEDED, found="root builds images without")
    have = [name for name in ("subuid", "subgid") if _has_range(machine.read(f"/etc/{name}"), user, uid)]
    if len(have) == 2 and machine.find("newuidmap"):
        return Finding(what=what, state=State.WORKS, found=f"/etc/subuid and /etc/subgid name {user}; newuidmap")
    lacks = [f"/etc/{name}" for name in ("subuid", "subgid") if name not in have]
    found = f"no line for {user} in {' and '.join(lacks)}" if lacks else "no newuidmap"
    give = f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
    remedy = give if lacks else "as root: apt-get install uidmap (or shadow-utils)"
    state = State.LIMITED if needed else State.NOT_NEEDED
    return Finding(what=what, state=state, found=found, remedy=remedy if needed else "")


def _has_range(text: str, user: str, uid: int) -> bool:
    return any(line.split(":")[0] in (user, str(uid)) for line in text.splitlines())


def check_fuse(machine: Machine, *, needed: bool) -> Finding:
    """Whether Apptainer can mount an image that is one file."""
    mode = machine.mode(FUSE)
    if mode is None or not machine.may_use(FUSE):
        found = f"no {FUSE}" if mode is None else f"{FUSE} has mode {mode:04o}"
        remedy = "as root: chmod 666 /dev/fuse; or apptainer build --sandbox FOLDER IMAGE, and sandbox.image=FOLDER"
        return Finding(what="FUSE", state=lacking(needed), found=found, remedy=remedy if needed else "")
    programs = [name for name in SQUASHFUSE if machine.find(name)][:1] + [OVERLAY] * bool(machine.find(OVERLAY))
    found = f"{FUSE} has mode {mode:04o}; " + (", ".join(programs) or "no program to mount with")
    if len(programs) == 2:
        return Finding(what="FUSE", state=State.WORKS, found=found)
    remedy = f"as root: apt-get install squashfuse {OVERLAY} (Apptainer may bring its own)"
    state = State.LIMITED if needed else State.NOT_NEEDED
    return Finding(what="FUSE", state=state, found=found, remedy=remedy if needed else "")
