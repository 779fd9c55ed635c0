"""The ledger of one owner: a scratch folder, a marker for its processes, and a watchdog that outlives it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from clawhpc.errors import UserError
from clawhpc.ledger import reap
from clawhpc.ledger.janitor import check_private, clear_remains

log = logging.getLogger(__name__)

OWNER_VARIABLE = "CLAWHPC_OWNER"
MAX_SCRATCH_LENGTH = 107 - len("/engine99.d/") - 36
"""Of the bytes that the path of a unix socket may have; the longest below it is the engine's, whose name is a UUID."""
ARM_S = 20.0
"""For the watchdog to start, on a machine that is busy."""
END_S = 15.0
"""For the watchdog to reap and end: longer than it takes, unless there are a million files to remove."""


def default_root() -> Path:
    """Where the ledgers of this user lie: on this machine, and short."""
    return Path(f"/tmp/clawhpc-{os.getuid()}")


class Ledger:
    """What this process has started outside itself is gone when it closes, or within 10 s of its death by SIGKILL.

    A context manager. Whoever starts a process puts `environment` into that process's environment, and makes its
    temporary files in `scratch`; nothing else is to be noted down. Three things see to the rest, each when the one
    before it could not: `close`; a watchdog process, which reads a pipe whose other end only the owner holds; the next
    `Ledger` on the same root, for which an owner is dead when the lock on its file is free.

    Owners may be nested: a worker that belongs to a campaign's ledger opens one of its own. When the campaign dies, its
    watchdog kills the worker and everything below it; the worker's watchdog, which stands outside both trees, removes
    what is left of the worker's.
    """

    def __init__(self, *, root: Path, owner: str, lock: int, watchdog: subprocess.Popen[bytes], clear: bool) -> None:
        self.scratch = root / owner
        """A folder of this owner alone."""
        self._root = root
        self._owner = owner
        self._lock = lock
        self._watchdog = watchdog
        self._clear = clear

    @classmethod
    def open(cls, root: Path | None = None, *, clear: bool = True, job: str = "") -> Ledger:
        """Reap dead owners on `root`, and become a living one, which belongs to Slurm's job `job` (see `end_job`).

        `root`: a folder of this user's on a local file system; made if missing. Raises UserError where it is unusable.
        `clear=False` leaves what the dead have left, for who wants to look at it first.
        """
        root = root or default_root()
        owner = secrets.token_hex(4)
        if len(os.fsencode(root / owner)) > MAX_SCRATCH_LENGTH:
            raise UserError(f"{root}: too long a path for unix sockets below it; choose a folder nearer to /")
        _make_private(root)
        if clear:
            _clear_dead(root)
        lock = _lock_new(root, owner, job)
        (root / owner).mkdir(mode=0o700)
        return cls(root=root, owner=owner, lock=lock, watchdog=_start_watchdog(root, owner), clear=clear)

    @property
    def environment(self) -> dict[str, str]:
        """For every process that is started. SPT_NOENV: `setproctitle` (vLLM uses it) would write over the marker."""
        return {OWNER_VARIABLE: reap.owner_marker(self._owner), "SPT_NOENV": "1"}

    @contextmanager
    def lend_environment(self, **more: str) -> Iterator[None]:
        """`environment`, and `more`, are this process's own within the block: for what a library starts in it."""
        values = {**self.environment, **more}
        before = {key: os.environ.get(key) for key in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def close(self) -> None:
        """Let the watchdog do its work now, and do it here if it has been killed. A second call does nothing.

        Returns within END_S where the watchdog has more to remove; it goes on without us. What died with this owner and
        had lost its own watchdog before is cleared too: there may be no next owner to do so.
        """
        assert self._watchdog.stdin is not None
        assert self._watchdog.stdout is not None
        if self._watchdog.stdin.closed:
            return
        self._watchdog.stdin.close()
        ended = _read_within(self._watchdog, END_S) is not None
        self._watchdog.stdout.close()
        try:
            if ended and reap.lock_path(self._root, self._owner).exists():
                reap.reap(self._root, self._owner)
        finally:
            os.close(self._lock)
        if self._clear:
            _clear_dead(self._root)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clear_dead(root: Path) -> None:
    for failure in clear_remains(root).failures:
        log.warning(failure)


def _make_private(root: Path) -> None:
    """Make `root`, readable by this user alone; in /tmp, somebody else may have made it first."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(root)
    except OSError as error:
        raise UserError(f"{root}: no folder for temporary files can be made there: {error.strerror}") from error


def _lock_new(root: Path, owner: str, job: str) -> int:
    """The lock that says "this owner lives", on disk before anything is started. The kernel frees it when we die."""
    path = reap.lock_path(root, owner)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            break
        os.close(lock)  # another process took the new file for a dead owner's, and has removed it
    note = {"pid": os.getpid(), "host": os.uname().nodename, "command": sys.argv, "job": job}
    os.write(lock, json.dumps(note).encode())
    return lock


def _start_watchdog(root: Path, owner: str) -> subprocess.Popen[bytes]:
    """A watchdog that is armed. Its environment is empty: it carries nobody's marker."""
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", reap.__file__, str(root), owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        bufsize=0,
    )
    if _read_within(watchdog, ARM_S) != reap.ARMED:
        raise UserError(f"{root}: the watchdog process did not start within {ARM_S:.0f} s ({sys.executable})")
    watchdog.wait(ARM_S)  # it has forked itself away; this is what it came from
    return watchdog


def _read_within(watchdog: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """What the watchdog says next; nothing if it has ended; None if it says nothing in time."""
    assert watchdog.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(watchdog.stdout, selectors.EVENT_READ)
        return os.read(watchdog.stdout.fileno(), 100) if selector.select(seconds) else None
