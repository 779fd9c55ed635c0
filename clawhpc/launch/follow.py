"""Show what a job writes, from outside, until it ends.

Its log lies on a file system that hosts share, and its state is Slurm's to say: both can only be looked at again and
again.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from clawhpc.errors import LaunchError
from clawhpc.launch.campaign import SubmittedCampaign
from clawhpc.launch.states import JobStatus, look_up

log = logging.getLogger(__name__)

POLL_S = 0.3
"""Between two looks at the log."""
BACK_BYTES = 8192
"""Of what a job has written before, so much is shown to who comes back to it."""
OF_SLURM = ("srun: ", "slurmstepd: ")
"""Lines that Slurm adds to a job's log."""


def follow(job: SubmittedCampaign, watch_s: float) -> tuple[JobStatus, str]:
    """How it ended, and the last line that it wrote. Slurm is asked once in `watch_s`."""
    tail = Tail(job.log, back_bytes=None if job.is_new else BACK_BYTES)
    shown = ""
    while True:
        status = _ask(job.job_id)
        show(tail.read())
        if status is not None and str(status) != shown:
            shown = str(status)
            log.info("job %s: %s", job.job_id, shown)
        if status is not None and status.ended:
            show(tail.read(to_the_end=True))
            return status, tail.last_line
        until = time.monotonic() + watch_s
        while time.monotonic() < until:
            time.sleep(min(POLL_S, watch_s))
            show(tail.read())


def _ask(job_id: str) -> JobStatus | None:
    """Its status; None while Slurm does not answer."""
    try:
        return look_up(job_id)
    except LaunchError as error:
        log.warning("%s", error)
        return None


def show(text: str) -> None:
    """On standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Tail:
    """What is added to a file, by whole lines."""

    def __init__(self, path: Path, back_bytes: int | None = None) -> None:
        """Of what is there already, only the last `back_bytes`; None for all. `path` may come later."""
        self._path = path
        self._position = 0
        self._rest = b""
        self.last_line = ""
        """That is not Slurm's."""
        if back_bytes is not None and path.exists() and path.stat().st_size > back_bytes:
            self._position = path.stat().st_size - back_bytes
            self._read()
            self._rest = self._rest.partition(b"\n")[2]

    def read(self, *, to_the_end: bool = False) -> str:
        """The lines since the last look. `to_the_end`: also one that is not whole."""
        self._read()
        end = len(self._rest) if to_the_end else self._rest.rfind(b"\n") + 1
        lines, self._rest = self._rest[:end].decode(errors="replace"), self._rest[end:]
        own = [line for line in lines.splitlines() if line.strip() and not line.startswith(OF_SLURM)]
        self.last_line = own[-1] if own else self.last_line
        return lines

    def _read(self) -> None:
        """Open it anew: only then does NFS look for what another host has written."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            return
        self._position += len(added)
        self._rest += added
