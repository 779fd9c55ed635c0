"""What one host offers: scratch space, memory, cores, clocks."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from clawhpc.checkup.files import GIB, check_room, room_in
from clawhpc.checkup.finding import Finding, State, lacking
from clawhpc.checkup.machine import Machine
from clawhpc.ledger import Ledger, Remains
from clawhpc.sandbox.disk import Place, place_of

SOCKET = "engine99.d/" + "0" * 36
"""As long as the longest path of a socket below a ledger's scratch."""
NEAR = "scratch_dir=/tmp/NAME, or another folder on a disk of the host"
FEW_CORES = 2
MACHINE_GIB = 2.5
"""For an engine with a tiny policy (1.3 GiB), its cache apart, and a learner beside it."""
HARNESS_GIB = 0.3
"""Of one harness that is a Node or Bun program."""
UNLIMITED = 1 << 60
"""Bytes: control groups have such a limit when they have none."""
SKEW_S = 2.0
"""Between clocks; times in records and logs are compared by people."""


def check_scratch(root: Path, ledger: Ledger | None, failure: str, machine: Machine) -> list[Finding]:
    """Rows for the node-local folder in which rollouts live. `failure`: why there is no ledger on it."""
    if ledger is None:
        return [Finding(what="scratch", state=State.MISSING, found=failure, remedy=NEAR)]
    place = place_of(root.resolve(), machine.read("/proc/self/mounts"))
    room = check_room("room for scratch", *room_in(root), NEAR)
    return [check_place(root, place, bind_error(ledger.scratch)), room]


def bind_error(scratch: Path) -> str:
    """Why a socket cannot be bound where an engine's would be; empty when it can."""
    path = scratch / SOCKET
    path.parent.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    except OSError as error:
        return f"no socket can be bound there: {error.strerror or error}"
    return ""


def check_place(root: Path, place: Place, failure: str) -> Finding:
    """Whether scratch lies on a disk of this host."""
    found = f"{root}: {place.kind}"
    if failure:
        return Finding(what="scratch", state=State.MISSING, found=f"{found}; {failure}", remedy=NEAR)
    if place.is_network:
        return Finding(what="scratch", state=State.LIMITED, found=f"{found}, over the network", remedy=NEAR)
    if place.kind in ("tmpfs", "ramfs"):
        return Finding(what="scratch", state=State.LIMITED, found=f"{found}: files take memory", remedy=NEAR)
    return Finding(what="scratch", state=State.WORKS, found=f"{found}, sockets can be bound")


def check_remains(remains: tuple[Remains, ...], command: str) -> Finding:
    """What dead owners have left. The next worker here removes it, and so does `command`."""
    if not remains:
        return Finding(what="left over", state=State.WORKS, found="nothing of dead owners")
    found = "\n".join(one.summary for one in remains)
    return Finding(what="left over", state=State.LIMITED, found=found, remedy=command)


def check_cores(num_cores: int) -> Finding:
    """Whether this process may use enough of them."""
    if num_cores < FEW_CORES:
        remedy = f"srun --cpus-per-task={FEW_CORES}, or more"
        return Finding(what="cores", state=State.LIMITED, found=str(num_cores), remedy=remedy)
    return Finding(what="cores", state=State.WORKS, found=str(num_cores))


def check_memory(free_bytes: int, *, cache_gib: float, concurrency: int) -> Finding:
    """Whether an engine on CPU, with `cache_gib` of keys and values, a learner, and the harnesses fit."""
    free_gib, fixed_gib = free_bytes / GIB, MACHINE_GIB + cache_gib
    wanted_gib = fixed_gib + HARNESS_GIB * concurrency
    found = f"{free_gib:.1f} GiB free; {wanted_gib:.1f} are wanted with {concurrency} harnesses at once"
    if free_gib >= wanted_gib:
        return Finding(what="memory", state=State.WORKS, found=found)
    fit = int((free_gib - fixed_gib) / HARNESS_GIB)
    remedy = f"worker.concurrency={fit}" if fit >= 1 else "srun --mem=16G, or more"
    return Finding(what="memory", state=State.LIMITED, found=found, remedy=remedy)


def free_memory(machine: Machine) -> int:
    """Bytes that may still be taken: of the machine, or of the control group of ours that allows the least."""
    available = re.search(r"MemAvailable:\s+(\d+)", machine.read("/proc/meminfo"))
    free = [int(available[1]) * 1024 if available else 0]
    for line in machine.read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _free_in_groups(machine, f"/sys/fs/cgroup{path}", "memory.max", "memory.current")
        elif controllers == "memory":
            folder = f"/sys/fs/cgroup/memory{path}"
            free += _free_in_groups(machine, folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(free))


def _free_in_groups(machine: Machine, folder: str, limit: str, usage: str) -> list[int]:
    """Of a control group and those it lies in: a job's limit may stand some levels above its processes."""
    free = []
    for group in (folder, *map(str, Path(folder).parents)):
        most, used = machine.read(f"{group}/{limit}").strip(), machine.read(f"{group}/{usage}").strip()
        if most.isdecimal() and used.isdecimal() and int(most) < UNLIMITED:
            free.append(int(most) - int(used))
    return free


def check_clocks(folder: Path, machine: Machine, *, has_slurm: bool) -> Finding:
    """Whether the clocks of this host, of the file system of runs and of Slurm's controller agree."""
    differences = {}
    with suppress(OSError):  # the row of the run folder says so
        differences["the run folder"] = file_clock(folder) - time.time()
    if has_slurm:
        began = time.time()
        told = re.search(r"sdiag output at .*\((\d+)\)", machine.ask("sdiag").output)
        if told:
            differences["Slurm"] = int(told[1]) + 0.5 - (began + time.time()) / 2  # it tells whole seconds
    return judge_clocks(differences, is_monotonic=time.get_clock_info("monotonic").monotonic)


def file_clock(folder: Path) -> float:
    """What the file system takes for now."""
    with tempfile.TemporaryFile(prefix=".clawhpc-doctor-", dir=folder) as file:
        file.write(b"now")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def judge_clocks(differences: dict[str, float], *, is_monotonic: bool) -> Finding:
    """`differences` from the clock of this host, in seconds."""
    found = ", ".join(f"{name} is {round(ahead_s, 1) + 0.0:+} s from here" for name, ahead_s in differences.items())
    found = found or "none to compare with"
    if not is_monotonic:
        return Finding(what="clocks", state=lacking(True), found=f"{found}; no steady clock", remedy="another kernel")
    if any(abs(difference) > SKEW_S for difference in differences.values()):
        remedy = "ask for NTP (as root: chronyc makestep)"
        return Finding(what="clocks", state=State.LIMITED, found=found, remedy=remedy)
    return Finding(what="clocks", state=State.WORKS, found=found)
