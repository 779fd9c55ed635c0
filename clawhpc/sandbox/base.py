"""What a sandbox is: one command, in a temporary container of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clawhpc.records import ExecResult

PROXY_PORT = 8377
PROXY_URL = f"http://127.0.0.1:{PROXY_PORT}"
"""Where a command inside reaches its proxy session, and nothing else: the loopback is the container's own."""
SANDBOX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH inside, unless the command brings its own."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or folder of the host that is visible inside."""

    source: Path
    target: str
    """An absolute path inside; made where it is missing."""
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class SandboxCommand:
    """One command and all that it may see of the host (rollout, verify -> sandbox)."""

    sandbox_id: str
    """For a person who reads an error or a log line: usually the rollout's id."""
    argv: tuple[str, ...]
    env: dict[str, str]
    """The whole environment inside, but for HOME and PATH, which are set where it does not name them."""
    cwd: str
    """An absolute path inside that exists there."""
    mounts: tuple[Mount, ...] = ()
    home: Path | None = None
    """Folder of the host that is writable HOME inside (/root); None for an empty one that vanishes."""
    proxy_socket: Path | None = None
    """Unix socket of the one proxy session that it may reach, at PROXY_URL; None for no network whatever."""


class Sandbox(Protocol):
    """Runs commands, each in a container that begins and ends with it."""

    name: str
    """Which kind: `apptainer` or `bubblewrap`."""
    python: str
    """An interpreter inside, 3.9 or newer, for programs of ours."""

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        """Run `command`; when this returns, raises or is cancelled, every process and mount of its container is gone.

        Standard input is empty. Inside there is a loopback network and no other, a process table of its own, a
        throwaway /tmp, a root file system that cannot be written, and of the host's files those in `mounts`. Standard
        output is a socket, and what those printed does not count who outlived the command.
        `timeout_s` counts from the call, the start of the container included; running out of it is a result
        (`timed_out`, exit code 124), not an error. Raises SandboxError when the container, or the program in it, does
        not start.
        """
        ...

    def check_hidden(self, path: Path) -> None:
        """Raise UserError if any command could read `path` of the host, though no mount of its own leads there.

        Without an image that is all that lies in the folders of the host's programs, /usr above all.
        """
        ...
