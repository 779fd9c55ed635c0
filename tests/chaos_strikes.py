"""What is done to a campaign in its chaos run. Each strike chooses among the processes of that campaign alone.

A strike returns whether it has struck: what lives for a moment only, such as a verifier, may not be there.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from clawhpc.ledger.reap import Process, find_marked, read_processes
from tests.chaos_parts import Chaos
from tests.sandbox_parts import running
from tests.slurm_cluster import COMMAND_S

Strike = Callable[[Chaos, random.Random], bool]
Victim = TypeVar("Victim", int, str)
LOOK_S = 120.0
"""For a victim to show itself: after a death, workers and engines take a while to be back."""
REFUSED_S = 120.0
"""For a second command to be refused, on a busy machine."""
FULL_S = 2.0
STANDSTILL_S = 3.0
DOWN_S = 1.0
"""Of a node, between its end and its return."""


# ---------------------------------------------------------------------------------------------------------------------
# Who is who
# ---------------------------------------------------------------------------------------------------------------------


def is_engine(arguments: list[str]) -> bool:
    return "--uds" in arguments


def is_init(arguments: list[str]) -> bool:
    """The first process within a sandbox."""
    return arguments[1:4] == ["-I", "-S", "/run/clawhpc/init.py"]


def is_container(arguments: list[str]) -> bool:
    """A process of bubblewrap or Apptainer, outside of its container."""
    name = Path(arguments[0]).name
    return name in ("bwrap", "apptainer", "squashfuse_ll", "appinit") or name.startswith("Apptainer runtime")


def is_worker(arguments: list[str]) -> bool:
    return "python" in arguments[0] and "submitit.core._submit" in arguments


def is_controller(arguments: list[str]) -> bool:
    """What submitit has between a campaign and its worker on the same machine."""
    return "submitit.local._local" in arguments


def campaign(chaos: Chaos) -> list[int]:
    """The process that holds the run."""
    pid = chaos.campaign_pid()
    return [] if pid is None else [pid]


def is_srun(arguments: list[str]) -> bool:
    return Path(arguments[0]).name == "srun"


def harnesses(chaos: Chaos) -> list[int]:
    """What init has started, verifiers aside."""
    processes, ours = read_processes(), chaos.processes()
    inits = {pid for pid, arguments in ours.items() if is_init(arguments)}
    started = [processes[pid] for pid in ours if pid in processes and processes[pid].parent in inits]
    return [process.pid for process in started if not is_verifier(process)]


def verifiers(chaos: Chaos) -> list[int]:
    """The script, which is over before it is seen, or what its sandbox is started with and held by."""
    processes, ours = read_processes(), chaos.processes()
    return [pid for pid in ours if pid in processes and is_verifier(processes[pid])]


def is_verifier(process: Process) -> bool:
    """It has a variable that no harness has; Apptainer's runtime keeps it in a text, bubblewrap in its arguments."""
    return process.carries("PYTEST_ADDOPTS") or b"reward.sh" in command_line(process.pid)


# ---------------------------------------------------------------------------------------------------------------------
# Kills
# ---------------------------------------------------------------------------------------------------------------------


def find_one(find: Callable[[Chaos], Sequence[Victim]], chaos: Chaos, chance: random.Random) -> Victim | None:
    """One of those that `find` finds, as soon as there is one; None where there is none until the campaign's end."""
    end = time.monotonic() + LOOK_S
    while time.monotonic() < end and chaos.go_on(0.05):
        if victims := sorted(find(chaos)):
            return chance.choice(victims)
    return None


def kill_any(find: Callable[[Chaos], list[int]], chaos: Chaos, chance: random.Random) -> bool:
    """SIGKILL."""
    victim = find_one(find, chaos, chance)
    if victim is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return True


def killing(find: Callable[[Chaos], list[int]]) -> Strike:
    return lambda chaos, chance: kill_any(find, chaos, chance)


def among(kind: Callable[[list[str]], bool]) -> Callable[[Chaos], list[int]]:
    return lambda chaos: [pid for pid, arguments in chaos.processes().items() if kind(arguments)]


def kill_campaign(chaos: Chaos, chance: random.Random) -> bool:
    """The process that plans, learns and publishes. The same command is given again."""
    return kill_any(campaign, chaos, chance)


def kill_watchdog(chaos: Chaos, chance: random.Random) -> bool:
    """Of one ledger; what its owner leaves is then the next one's to clear."""
    return kill_any(lambda chaos: running(f"reap.py {chaos.scratch} "), chaos, chance)


def stand_still(chaos: Chaos, chance: random.Random) -> bool:
    """A worker, as on a host that swaps."""
    victim = find_one(among(is_worker), chaos, chance)
    if victim is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STANDSTILL_S)
        os.kill(victim, signal.SIGCONT)
    return True


def begin_another(chaos: Chaos, chance: random.Random) -> bool:
    """The same command while the first one runs, on Slurm as another job would run it: it is refused."""
    pid = find_one(campaign, chaos, chance)
    if pid is None:
        return False
    second = chaos.give_command(**({"SLURM_JOB_ID": "1"} if chaos.cluster else {}))
    end = time.monotonic() + REFUSED_S
    try:
        while second.process.poll() is None and chaos.campaign_pid() == pid:
            assert time.monotonic() < end, f"neither refused nor let in: {second.text()}"
            time.sleep(0.1)
        code = second.process.poll()
    finally:
        if second.process.poll() is None:  # the first has ended meanwhile, so that this one need not be refused
            os.killpg(second.process.pid, signal.SIGKILL)
            second.wait(10)
    refused = f"is in use by process {pid} " in second.text()
    assert code is None or (code == 2 and refused), second.text()
    return refused


def fill_disk(chaos: Chaos, chance: random.Random) -> bool:
    """The disk of the run is full for a moment, the logs in it included."""
    ballast = chaos.disk / "ballast"
    if not os.path.ismount(chaos.disk):
        return False
    try:
        end = time.monotonic() + FULL_S
        with ballast.open("ab", buffering=0) as file:
            while time.monotonic() < end:
                with suppress(OSError):
                    file.write(bytes(max(4096, shutil.disk_usage(chaos.disk).free)))
                time.sleep(0.05)
    finally:
        ballast.unlink()
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Slurm
# ---------------------------------------------------------------------------------------------------------------------


def elements(chaos: Chaos) -> list[str]:
    """Ids of the array elements that run."""
    assert chaos.cluster is not None
    return [job_id for job_id, state in chaos.cluster.queue().items() if state == "RUNNING" and "_" in job_id]


def on_element(*command: str) -> Strike:
    """A command of Slurm, given to one array element."""

    def strike(chaos: Chaos, chance: random.Random) -> bool:
        job_id = find_one(elements, chaos, chance)
        if job_id is None:
            return False
        done = subprocess.run([*command, job_id], env={**os.environ, **chaos.environment}, timeout=COMMAND_S)
        return done.returncode == 0

    return strike


def step_daemons(chaos: Chaos) -> list[int]:
    """The processes of Slurm that hold a step of a job: one for the batch script, one for each srun."""
    assert chaos.cluster is not None
    found = [pid for node in chaos.cluster.nodes for pid in find_marked(chaos.cluster._node_marker(node), set())]
    return [pid for pid in found if re.match(rb"slurmstepd: \[\d+\.", command_line(pid))]


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def restart_slurmd(chaos: Chaos, chance: random.Random) -> bool:
    """The daemon of one node dies and comes back; what runs there runs on."""
    assert chaos.cluster is not None
    node = chance.choice(chaos.cluster.nodes)
    daemon = chaos.cluster.daemons.pop(node)
    daemon.kill()
    daemon.wait(10)
    time.sleep(DOWN_S)
    chaos.cluster.start_node(node)
    return True


def cut_power(chaos: Chaos, chance: random.Random) -> bool:
    """Of one node: all that runs there is dead at once; it comes back."""
    assert chaos.cluster is not None
    node = chance.choice(chaos.cluster.nodes)
    chaos.cluster.kill_node(node)
    time.sleep(DOWN_S)
    chaos.cluster.start_node(node)
    return True


EVERYWHERE: dict[str, Strike] = {
    "harness": killing(harnesses),
    "sandbox": killing(among(lambda arguments: is_container(arguments) or is_init(arguments))),
    "verifier, with its sandbox": killing(verifiers),
    "engine": killing(among(is_engine)),
    "worker, with its proxy": killing(among(is_worker)),
    "watchdog of a ledger": kill_watchdog,
    "campaign, with its learner": kill_campaign,
    "second campaign, refused": begin_another,
    "disk full": fill_disk,
    "worker stands still": stand_still,
}
LOCAL: dict[str, Strike] = {**EVERYWHERE, "submitit's controller": killing(among(is_controller))}
SLURM: dict[str, Strike] = {
    **EVERYWHERE,
    "srun": killing(among(is_srun)),
    "step daemon": killing(step_daemons),
    "slurmd, and back": restart_slurmd,
    "node, and back": cut_power,
    "element cancelled": on_element("scancel"),
    "element put back into the queue": on_element("scontrol", "requeue"),
    "element told to make room": on_element("scancel", "--signal=USR2"),
}


def in_turns(strikes: dict[str, Strike], seed: int, rounds: int) -> Iterator[tuple[str, Strike]]:
    """Every one of `strikes`, `rounds` times, each time in another order."""
    chance = random.Random(seed)
    for _ in range(rounds):
        yield from chance.sample(sorted(strikes.items(), key=lambda item: item[0]), len(strikes))
