"""What a worker's job runs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from submitit.helpers import DelayedSubmission

from clawhpc.errors import ClawError
from clawhpc.launch.failure import note_failure
from clawhpc.launch.lease import wait_for_end
from clawhpc.launch.states import run
from clawhpc.launch.turn import alone_in_job, go_back_if_warned, this_job
from clawhpc.ledger.parent import die_with_parent
from clawhpc.paths import RunPaths
from clawhpc.worker.settings import WorkerSpec

log = logging.getLogger(__name__)

LEASE_FILE = "lease"
"""Among the workers' folders: the campaign's sign of life."""
END_S = 30.0
"""For a worker to end that has been asked to."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""In the environment: their numbers or names. Empty for none, not there for all of the machine."""


@dataclass(frozen=True)
class Lease:
    """Whose sign of life a worker looks for."""

    holder: str
    lease_s: float


@dataclass(frozen=True)
class WorkerJob:
    """What submitit runs: one worker. Preempted, it is submitted again as it was; the store has its work."""

    spec: WorkerSpec
    worker_id: str
    lease: Lease | None = None
    """None where the campaign's ledger ends its workers with it."""
    gpus: str | None = field(default_factory=lambda: os.environ.get(VISIBLE_GPUS))
    """Those that the campaign sees. A worker on its machine has the same, all that Slurm gives it on another."""

    def __call__(self) -> None:
        """Run until told to stop. Why it had to give up is noted in the worker's folder, and raised.

        A signal ends the process and leaves no result: whether the job is over then is for Slurm to say. A warning that
        it will be preempted puts it back into the queue.
        """
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
        campaign_ended = threading.Event()
        if self.lease is None:
            self._see_gpus()
        else:
            die_with_parent()  # the daemon of this step: without it Slurm counts the worker as gone
            told = (self.lease, campaign_ended)
            threading.Thread(target=self._end_with_campaign, args=told, name="lease", daemon=True).start()
        told_by = self._run()
        if told_by == signal.SIGTERM and self.lease is not None and not campaign_ended.is_set():
            go_back_if_warned()
        if told_by is not None:
            raise SystemExit(128 + told_by)

    def _run(self) -> signal.Signals | None:
        """Work, alone in this turn of its job; the signal that it was told by to end."""
        try:
            with sigterm_ends_it(), alone_in_job(self.spec.scratch_root, self._slurm_job):
                return self._work()
        except Told:
            return signal.SIGTERM
        except (ClawError, OSError) as error:
            note_failure(self._workers / self.worker_id, error, Path(self.spec.run_root))
            raise

    def _see_gpus(self) -> None:
        """submitit hides all of them from a job on this machine that asks for no number of them."""
        os.environ.pop(VISIBLE_GPUS, None)
        if self.gpus is not None:
            os.environ[VISIBLE_GPUS] = self.gpus

    def _work(self) -> signal.Signals | None:
        from clawhpc.worker.run import run_worker  # only where it works: it imports the whole machine

        return run_worker(self.spec, self.worker_id, self._slurm_job)

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit at USR2: go on later with the same worker id, whose claims are still its own."""
        return DelayedSubmission(self)

    @property
    def _slurm_job(self) -> str:
        """Empty for a worker that a campaign has started on its own machine."""
        return this_job() if self.lease is not None else ""

    @property
    def _workers(self) -> Path:
        return RunPaths(Path(self.spec.run_root)).workers

    def _end_with_campaign(self, lease: Lease, campaign_ended: threading.Event) -> None:
        """When the campaign is dead, end this process and take what waits behind it out of the queue."""
        wait_for_end(self._workers / LEASE_FILE, lease.holder, lease.lease_s)
        campaign_ended.set()
        log.warning("worker %s: its campaign has ended; so does it, and the rest of its job", self.worker_id)
        job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
        with suppress(OSError, subprocess.SubprocessError):
            run(["scancel", job_id])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # any other would leave it in its wait
        time.sleep(END_S)
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def sigterm_ends_it() -> Iterator[None]:
    """Also before a worker listens for it: submitit passes over it, and Slurm kills what does."""
    former = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


class Told(SystemExit):
    """The job is to end, and its worker does not listen yet, or no more. An event loop lets only such through."""


def _end(number: int, frame: FrameType | None) -> None:
    raise Told(128 + number)
