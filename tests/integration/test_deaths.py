"""Whoever of a container dies first, by whichever signal, nothing of it is left; and of a job, nothing on its node.

Who owns the container dies in test_ledger.py.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import SandboxError
from clawhpc.launch.pool import WorkerPool
from clawhpc.ledger import Ledger
from clawhpc.ledger.owner import OWNER_VARIABLE
from clawhpc.ledger.reap import find_marked, owner_marker, read_processes
from clawhpc.sandbox.base import Sandbox
from tests.fakes.owner import HARNESS, OwningWorker, sandbox_of
from tests.fakes.slurm_worker import stub_spec
from tests.integration.test_slurm_pool import settings_of
from tests.sandbox_parts import known_to_the_kernel, run, running, shell, traces
from tests.slurm_cluster import SlurmCluster, until

APPTAINER = [pytest.mark.sandbox, pytest.mark.apptainer]
SLOW = pytest.mark.slow
KINDS = [
    pytest.param("bubblewrap", marks=pytest.mark.sandbox),
    pytest.param("apptainer", marks=[*APPTAINER, SLOW]),
    pytest.param("sif", marks=APPTAINER),
]
KILL, TERM = signal.SIGKILL, signal.SIGTERM
START_S = 60.0
"""For a container to start, on a machine that is busy."""
LIFE_S = 1.0
"""Of a container that a signal does not end."""
NUM_MATCHES = 4
"""Processes with the needle in it: the shell and three of its sleeps, wherever they are."""


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def up_to_us(pid: int) -> list[int]:
    """`pid`, its parent, and so on, down from the child of ours."""
    processes, line = read_processes(), []
    while pid in processes:
        line.append(pid)
        pid = processes[pid].parent
    return line


def harness(needle: str) -> int:
    """The first process of the command."""
    processes = read_processes()
    return next(pid for pid in running(needle) if name(pid) == "bash" and name(processes[pid].parent) != "bash")


def first_process(needle: str) -> int:
    """Of the container: init.py."""
    return next(pid for pid in up_to_us(harness(needle)) if name(pid).startswith("python"))


def program(needle: str) -> int:
    """bwrap, or what Apptainer has become."""
    return up_to_us(harness(needle))[-1]


def mounter(needle: str) -> int:
    """What serves a file as a file system."""
    processes = read_processes()
    session = processes[program(needle)].session
    return next(pid for pid, one in processes.items() if one.session == session and name(pid).startswith("squashfuse"))


async def lose(sandbox: Sandbox, victim: Callable[[str], int], number: signal.Signals) -> None:
    """A command runs, `victim` is sent a signal, and what that does not end is cancelled; no process is left then."""
    needle = f"985{uuid.uuid4().int % 10**9}"
    ended = anyio.Event()

    async def play() -> None:
        with suppress(SandboxError):  # where the container dies before its first process
            await run(sandbox, shell(HARNESS.format(needle=needle)), timeout_s=2 * START_S)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(play)
        with anyio.fail_after(START_S):
            while len(running(needle)) < NUM_MATCHES:
                await anyio.sleep(0.05)
        os.kill(victim(needle), number)
        with anyio.move_on_after(LIFE_S):
            await ended.wait()
        group.cancel_scope.cancel()
    assert running(needle) == []


@pytest.mark.anyio
@pytest.mark.parametrize("number", [KILL, pytest.param(TERM, marks=SLOW)])
@pytest.mark.parametrize("kind", KINDS)
async def test_whoever_of_a_container_dies_first_nothing_of_it_is_left(
    kind: str, number: signal.Signals, ledger: Ledger, cache_dir: Path
) -> None:
    """One container for each victim, all at once."""
    sandbox = await sandbox_of(kind, ledger, cache_dir)
    victims = [harness, first_process, program, *([mounter] if kind == "sif" else [])]
    async with anyio.create_task_group() as group:
        for victim in victims:
            group.start_soon(lose, sandbox, victim, number)
    assert find_marked(owner_marker(ledger.scratch.name), set()) == set()
    assert known_to_the_kernel(ledger.scratch) == []
    assert list(ledger.scratch.glob("run-*")) == []


def worker(needle: str) -> int:
    """What submitit runs."""
    line = up_to_us(harness(needle))
    return line[[name(pid) for pid in line].index("slurmstepd") - 1]


def step_daemon(needle: str) -> int:
    """The slurmstepd whose child the worker is."""
    return next(pid for pid in up_to_us(harness(needle)) if name(pid) == "slurmstepd")


def variable_of_worker(needle: str, name: str) -> str:
    environment = Path(f"/proc/{worker(needle)}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(f"{name}=".encode())).partition(b"=")[2].decode()


def script_daemon(needle: str) -> int:
    """The slurmstepd of the script of the worker's job."""
    job_id = variable_of_worker(needle, "SLURM_JOB_ID")
    cluster = os.environ[OWNER_VARIABLE]
    processes = read_processes()
    return next(pid for pid in running(f"slurmstepd: [{job_id}.batch]") if processes[pid].carries(cluster))


def node_daemon(needle: str) -> int:
    """The slurmd of the worker's node."""
    node = variable_of_worker(needle, "SLURMD_NODENAME")
    cluster = os.environ[OWNER_VARIABLE]
    processes = read_processes()
    return next(pid for pid in running(f"slurmd -D -N {node}") if processes[pid].carries(cluster))


DEATHS = [
    ("bubblewrap", step_daemon, KILL),
    *(
        pytest.param(kind, victim, number, marks=[SLOW, *(APPTAINER if kind == "sif" else [])])
        for kind in ("bubblewrap", "sif")
        for victim in (worker, step_daemon, script_daemon, node_daemon)
        for number in (KILL, TERM)
    ),
]


@pytest.mark.slurm
@pytest.mark.sandbox
@pytest.mark.parametrize(("kind", "victim", "number"), DEATHS)
def test_whoever_of_a_job_dies_first_nothing_of_it_is_left(
    kind: str,
    victim: Callable[[str], int],
    number: signal.Signals,
    slurm: SlurmCluster,
    tmp_path: Path,
    ledger: Ledger,
    ledger_root: Path,
    cache_dir: Path,
    needle: str,
) -> None:
    """At once where the worker dies with it; what goes on without its daemons ends when its campaign does."""
    scratch = ledger_root / "workers"
    spec = replace(stub_spec(tmp_path / "run"), scratch_root=str(scratch), cache_dir=str(cache_dir))
    with WorkerPool(settings_of(num_workers=1), spec, ledger, partial(OwningWorker, kind=kind, needle=needle)):
        until(lambda: len(running(needle)) >= NUM_MATCHES, START_S)
        first, (place,) = {*running(needle)}, (path for path in scratch.iterdir() if path.is_dir())
        os.kill(victim(needle), number)
        if number == KILL and victim in (worker, step_daemon):
            until(lambda: not first & {*running(needle)} and not place.exists(), START_S)
    try:
        until(lambda: running(needle) == traces(scratch) == [], START_S)
    finally:
        bring_back(slurm)


def bring_back(slurm: SlurmCluster) -> None:
    """The nodes whose daemon has ended."""
    for node in slurm.nodes:
        if slurm.daemons[node].poll() is not None:
            slurm.start_node(node)
