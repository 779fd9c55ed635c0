"""One run of one command in one container, from start to nothing left, whatever the backend."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Protocol

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, Process

from clawhpc.errors import SandboxError, UserError, boundary
from clawhpc.ledger import Ledger, discard, kill_marked
from clawhpc.records import SANDBOX_HOME, ExecResult
from clawhpc.sandbox import init, watch
from clawhpc.sandbox.base import PROXY_PORT, SANDBOX_PATH, Mount, SandboxCommand
from clawhpc.sandbox.root import Root
from clawhpc.sandbox.settings import SandboxLimits

SANDBOX_VARIABLE = "CLAWHPC_SANDBOX"
INIT_TARGET, WATCH_TARGET = "/run/clawhpc/init.py", "/run/clawhpc/clawhpc/sandbox/watch.py"
SOCKET_TARGET = "/run/clawhpc/proxy.sock"
LAYER_TARGET = "/run/clawhpc/layer"
COMMAND, REPORT, TMP, VAR_TMP, HOME, LAYER = "command", "report", "tmp", "var-tmp", "home", "layer"
"""What lies in the folder of one run."""
TAIL_BYTES = 65536
"""Kept of each output stream."""
REPORT_BYTES = 4096 + init.KEPT_BYTES
ERROR_CHARS = 400
"""Of what the container program printed, in an error."""
KILL_S = 8.0
"""For the processes of one container to be gone once they are killed; milliseconds, unless a disk hangs."""
QUIET_S = 0.2
"""For whatever a start that was cut off may have left to come out of an exec."""
END_S = 10.0
"""For all of that, and for the container program to be waited for. Cancellation cannot interrupt it."""
REMOVE_S = 1.0
"""For the folder of a run. A command may fill its /tmp; then the removal goes on in the background."""
KILLED = 128
"""Exit codes above are signals."""


class Backend(Protocol):
    """Writes command lines for one container program; does nothing else."""

    name: str
    remedy: str
    """What a person can do when it does not work."""

    def environment(self, markers: dict[str, str]) -> dict[str, str]:
        """Of the container program, which must carry `markers`."""
        ...

    def argv(self, root: Root, mounts: Sequence[Mount], inner: Sequence[str], layer: Path | None = None) -> list[str]:
        """The command line that runs `inner` on `root` with `mounts`; `layer` takes what is written on a root that is
        writable.
        """
        ...


@dataclass(frozen=True)
class Ending:
    """How the command ended, as far as it is known."""

    exit_code: int
    cpu_s: float = 0.0
    printed: bytes | None = None
    """The end of its standard output as init vouches for it."""
    exceeded: str = ""
    """See `ExecResult.exceeded`."""


TIMED_OUT = Ending(124)
GB, MB = 2**30, 2**20


class Container:
    """A `Sandbox`: one container per run. Its files lie in the ledger's scratch, its processes carry its marker."""

    def __init__(self, *, backend: Backend, root: Root, ledger: Ledger, limits: SandboxLimits | None = None) -> None:
        """`limits`: of each command; None for the defaults."""
        self.name = backend.name
        self.python = root.python
        self.backend = backend
        self._root = root
        self._ledger = ledger
        self._limits = limits or SandboxLimits()

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        """See `Sandbox.run`."""
        started_at = anyio.current_time()
        output, errors = Tail(self._limits.output_mb), Tail(self._limits.output_mb)
        with boundary(SandboxError, f"{command.sandbox_id}: {self.name}"):
            async with self._started(command) as (process, report):
                with anyio.CancelScope(deadline=started_at + timeout_s) as clock:
                    async with anyio.create_task_group() as group:
                        for tail, stream in ((output, process.stdout), (errors, process.stderr)):
                            group.start_soon(tail.fill, stream, clock)
                        await process.wait()
                if clock.cancelled_caught:
                    ending = output.flooded or errors.flooded or TIMED_OUT
                else:
                    ending = self._ending(command, process.returncode, report, errors.text)
        return ExecResult(
            exit_code=ending.exit_code,
            stdout_tail=output.text if ending.printed is None else text_of(ending.printed),
            stderr_tail=errors.text,
            wall_s=anyio.current_time() - started_at,
            cpu_s=ending.cpu_s,
            timed_out=ending is TIMED_OUT,
            exceeded=ending.exceeded,
        )

    def check_hidden(self, path: Path) -> None:
        """See `Sandbox.check_hidden`."""
        folder = self._root.shows(path)
        if folder is not None:
            raise UserError(
                f"{path}: a harness could read it, for its sandbox shows {folder}; "
                "choose a place outside, or set sandbox.image"
            )

    @asynccontextmanager
    async def _started(self, command: SandboxCommand) -> AsyncIterator[tuple[Process, Path]]:
        """The container while it lives, and the file of init's report; afterwards nothing of it is left."""
        marker = f"clawhpc-sandbox-{secrets.token_hex(8)}"
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self._ledger.scratch))
        process = None
        survivors: list[int] = []
        try:
            process = await self._open(command, marker, folder)
            yield process, folder / REPORT
        finally:
            with anyio.move_on_after(END_S, shield=True):
                survivors = await to_thread.run_sync(partial(_kill, marker, process))
                if process is not None:
                    await process.aclose()
            await discard(folder, within_s=REMOVE_S)
        if survivors:
            raise SandboxError(f"{command.sandbox_id}: processes {survivors} of its container cannot be killed")

    async def _open(self, command: SandboxCommand, marker: str, folder: Path) -> Process:
        """Start the container program; `folder` is this run's own."""
        markers = {**self._ledger.environment, SANDBOX_VARIABLE: marker}
        mounts = _mounts(self._root, command, folder)
        layer = folder / LAYER if self._root.writable else None
        (folder / COMMAND).write_text(_command_text(command, self._limits, [LAYER_TARGET] if layer else []))
        with (folder / COMMAND).open("rb") as stdin, (folder / REPORT).open("wb") as report:
            inner = (self._root.python, "-I", "-S", INIT_TARGET, str(report.fileno()), *markers.values())
            return await anyio.open_process(
                [*_priority(), *self.backend.argv(self._root, mounts, inner, layer)],
                stdin=stdin,
                env={"PATH": SANDBOX_PATH, **self.backend.environment(markers)},
                cwd="/",
                pass_fds=(report.fileno(),),
                start_new_session=True,
            )

    def _ending(self, command: SandboxCommand, returncode: int | None, report: Path, errors: str) -> Ending:
        """Read the report, which counts only when init itself ended well; else tell why there is none.

        The command has no part in that: no signal of it reaches the first process of its container. It may set limits
        of that process, though (prlimit(2)), and so bring it to its end.
        """
        assert returncode is not None, "the container program has been waited for"
        with report.open("rb") as file:
            text = file.read(REPORT_BYTES)
        if returncode == 0:
            line, _, printed = text.partition(b"\n")
            outcome = json.loads(line)
            if "error" in outcome:
                raise SandboxError(f"{command.sandbox_id}: cannot start {outcome['error']} (inside the sandbox)")
            return Ending(outcome["exit_code"], outcome["cpu_s"], printed, outcome["exceeded"])
        cause = f"{errors[-ERROR_CHARS:].strip()} (exit code {returncode})"
        if text:
            raise SandboxError(f"{command.sandbox_id}: {self.name}: its first process failed or was killed: {cause}")
        raise SandboxError(f"{command.sandbox_id}: {self.name} did not start: {cause}. {self.backend.remedy}")


def _kill(marker: str, process: Process | None) -> list[int]:
    """End all of a container; those that would not go."""
    if process is None:
        return kill_marked(marker, deadline_s=KILL_S, quiet_s=QUIET_S)
    return kill_marked(marker, session=process.pid, deadline_s=KILL_S)


@cache
def _priority() -> tuple[str, ...]:
    """What comes before a command line, so that init is scheduled first however many processes the command starts.

    Only root may have that, and only root needs it: whoever else it is, the kernel bounds their processes.
    """
    hurried = ("nice", "-n", "-20")
    allowed = os.getuid() == 0 and not subprocess.run((*hurried, "true"), capture_output=True).stderr
    return hurried if allowed else ()


class Tail:
    """The last TAIL_BYTES of a stream."""

    def __init__(self, most_mb: float) -> None:
        """`most_mb`: that may come."""
        self._most_mb = most_mb
        self._num_bytes = 0
        self._bytes = b""

    async def fill(self, stream: ByteReceiveStream | None, clock: anyio.CancelScope) -> None:
        """Read `stream` to its end; cancel `clock` where too much comes."""
        assert stream is not None, "the container program was started with pipes"
        async for chunk in stream:
            self._num_bytes += len(chunk)
            self._bytes = (self._bytes + chunk)[-TAIL_BYTES:]
            if self.flooded:
                clock.cancel()

    @property
    def flooded(self) -> Ending | None:
        """How the command ends, once too much has come."""
        if self._num_bytes <= self._most_mb * MB:
            return None
        told = f"output: {self._num_bytes / MB:.1f} MB were printed; the limit is {self._most_mb:g} MB"
        return Ending(KILLED + signal.SIGKILL, exceeded=told)

    @property
    def text(self) -> str:
        """What has come so far."""
        return text_of(self._bytes)


def text_of(tail: bytes) -> str:
    """As text; what is not UTF-8, or cut at the front, is replaced."""
    return tail.decode(errors="replace")


def _mounts(root: Root, command: SandboxCommand, folder: Path) -> list[Mount]:
    """All that is laid over the root, each after those that it lies in."""
    for name in (TMP, VAR_TMP, HOME):
        (folder / name).mkdir()
    own = [
        Mount(source=folder / TMP, target="/tmp", writable=True),  # on disk: a tmpfs would take the learner's memory
        Mount(source=folder / VAR_TMP, target="/var/tmp", writable=True),
        Mount(source=command.home or folder / HOME, target=SANDBOX_HOME, writable=True),
        Mount(source=Path(init.__file__), target=INIT_TARGET),
        Mount(source=Path(watch.__file__), target=WATCH_TARGET),
    ]
    if root.writable:
        (folder / LAYER).mkdir()
        own.append(Mount(source=folder / LAYER, target=LAYER_TARGET))  # for init to see what is written there
    if command.proxy_socket is not None:
        own.append(Mount(source=command.proxy_socket, target=SOCKET_TARGET, writable=True))
    return sorted([*root.mounts, *own, *command.mounts], key=lambda mount: len(PurePosixPath(mount.target).parts))


def _command_text(command: SandboxCommand, limits: SandboxLimits, layers: Sequence[str] = ()) -> str:
    """For init.py: what to start, what that may take, and the namespaces that it must not find itself in.

    `layers`: where init sees what is written on the root.
    """
    targets = {"/tmp", "/var/tmp", SANDBOX_HOME, *layers, *(mount.target for mount in command.mounts if mount.writable)}
    return json.dumps(
        {
            "argv": command.argv,
            "env": {"HOME": SANDBOX_HOME, "PATH": SANDBOX_PATH, **command.env},
            "cwd": command.cwd,
            "proxy_port": PROXY_PORT,
            "proxy_socket": None if command.proxy_socket is None else SOCKET_TARGET,
            "host_namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt", "user")},
            "writable": [path for path in targets if targets.isdisjoint(map(str, PurePosixPath(path).parents))],
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "limits": {
                "memory_bytes": int(limits.memory_gb * GB),
                "max_processes": limits.max_processes,
                "disk_bytes": int(limits.disk_gb * GB),
                "max_open_files": limits.max_open_files,
            },
        }
    )
