"""A process that owns things, for tests that kill it: `python -m tests.fakes.owner KIND ROOT NEEDLE CACHE_DIR`.

It opens a ledger on ROOT, starts what KIND says, with `sleep NEEDLE` in it, prints "ready", and waits to be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import anyio

from clawhpc.launch.job import WorkerJob
from clawhpc.ledger import Ledger
from clawhpc.mcp.host import open_servers
from clawhpc.records import McpServer
from clawhpc.sandbox.apptainer import Apptainer, find_apptainer
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from clawhpc.sandbox.container import Container
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.root import Root, host_root
from clawhpc.sandbox.settings import SandboxSettings

LIFE_S = 120
"""No test lasts as long; nobody is left for ever should one break."""
SCRIPTS = (
    "exec sleep {needle}",
    "setsid sleep {needle} & exit",
    "trap '' HUP INT TERM; sleep {needle}; sleep {needle}",
)
"""A child, an orphan in a session of its own, and one that ignores signals."""
HARNESS = "setsid sleep {needle} & (setsid nohup sleep {needle} &) ; trap '' TERM HUP; sleep {needle}; sleep {needle}"
"""In a sandbox: sleeps in sessions of their own, and a shell that ignores signals."""
RENAMED = "import setproctitle, time; setproctitle.setproctitle('renamed sleep {needle} ' * 99); time.sleep(120)"


def own(kind: str, root: Path, needle: str, cache_dir: Path) -> None:
    with Ledger.open(root) as ledger:
        (ledger.scratch / "file").write_text("something")
        if kind == "processes":
            own_processes(ledger, needle)
        elif kind == "mcp":
            anyio.run(own_mcp, ledger, needle)
        elif kind == "worker":
            own_worker(ledger, root, needle, cache_dir)
        else:
            anyio.run(own_sandbox, kind, ledger, needle, cache_dir)


def own_processes(ledger: Ledger, needle: str) -> None:
    environment = {**os.environ, **ledger.environment}
    commands = [["/bin/sh", "-c", script.format(needle=needle)] for script in SCRIPTS]
    commands.append([sys.executable, "-c", RENAMED.format(needle=needle)])
    children = [subprocess.Popen(command, env=environment, start_new_session=True) for command in commands]
    children[1].wait(10)
    say_ready()


def own_worker(ledger: Ledger, root: Path, needle: str, cache_dir: Path) -> None:
    """As a campaign does on one machine: submitit starts a worker, which opens a ledger of its own."""
    import submitit

    os.environ.update(ledger.environment)
    executor = submitit.LocalExecutor(folder=ledger.scratch / "jobs")
    executor.update_parameters(timeout_min=2)
    executor.submit(own, "bubblewrap", root, needle, cache_dir)
    say_ready()


async def own_sandbox(kind: str, ledger: Ledger, needle: str, cache_dir: Path) -> None:
    sandbox = await sandbox_of(kind, ledger, cache_dir)
    script = HARNESS.format(needle=needle)
    command = SandboxCommand(sandbox_id="owned", argv=("/bin/bash", "-c", script), env={}, cwd="/")
    print("ready", flush=True)
    await sandbox.run(command, timeout_s=LIFE_S)


async def own_mcp(ledger: Ledger, needle: str) -> None:
    """A server on the host, with somebody who has connected to it."""
    server = McpServer(name="lab", argv=("/bin/bash", "-c", HARNESS.format(needle=needle)), on_host=True)
    async with (
        open_servers(
            (server,), folder=ledger.scratch, environment=ledger.environment, fail=print, now=time.time
        ) as servers,
        await anyio.connect_unix(servers.sockets["lab"]),
    ):
        print("ready", flush=True)
        await anyio.sleep(LIFE_S)


async def sandbox_of(kind: str, ledger: Ledger, cache_dir: Path) -> Sandbox:
    """`bubblewrap`; `apptainer`, on a folder; or `sif`: Apptainer on a file, which it mounts through a FUSE process."""
    if kind != "sif":
        return await open_sandbox(SandboxSettings(kind=kind), ledger=ledger, cache_dir=cache_dir)  # type: ignore[arg-type]
    program, host = find_apptainer(cache_dir), host_root(ledger.scratch / "top")
    assert program is not None, "the caller has looked for it"
    file = ledger.scratch / "top.sqfs"
    subprocess.run(["mksquashfs", str(host.base), str(file), "-quiet", "-no-progress"], check=True, capture_output=True)
    backend = Apptainer(program=program, config_dir=ledger.scratch / "apptainer")
    return Container(backend=backend, root=Root(base=file, mounts=host.mounts, python=host.python), ledger=ledger)


@dataclass(frozen=True)
class OwningWorker(WorkerJob):
    """In place of a worker on Slurm: it has one sandbox, for ever."""

    kind: str = "sif"
    needle: str = ""

    def _work(self) -> signal.Signals | None:
        assert self.spec.scratch_root is not None, "the test gives it one of its own"
        with Ledger.open(Path(self.spec.scratch_root), job=self._slurm_job) as ledger:
            anyio.run(own_sandbox, self.kind, ledger, self.needle, Path(self.spec.cache_dir))
        return None


def say_ready() -> None:
    print("ready", flush=True)
    time.sleep(LIFE_S)


if __name__ == "__main__":
    own(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
