"""Keep a number of workers alive, and know which of them are.

A worker is a submitit job. Its id is the pool's own, not the job's: process ids come round again. The pool never looks
into rollouts; who is alive is all that the campaign needs to free the claims of the dead.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import submitit
from submitit.helpers import DelayedSubmission

from clawhpc.errors import ClawError, LaunchError, UserError
from clawhpc.launch.executor import make_executor
from clawhpc.launch.settings import LaunchSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.store import write_atomic
from clawhpc.worker.settings import READY_FILE, STOP_FILE, WorkerSpec

log = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""From the wish to stop until the job is cancelled: an engine needs some seconds to end."""
CANCEL_S = 3.0
"""For a cancelled worker to end by itself; on this machine the ledger ends it then."""
HOUR_S = 3600.0
POLL_S = 0.1
"""A job's end can only be asked for: submitit has no call that waits for it with a deadline."""
FAILURE_FILE = "failure.txt"
"""In a worker's folder: one line for a person, written by a worker that gives up."""


@dataclass(frozen=True)
class WorkerJob:
    """What submitit runs: one worker. Preempted, it is submitted again as it was; the store has its work."""

    spec: WorkerSpec
    worker_id: str

    def __call__(self) -> None:
        """Run until told to stop. Why it had to give up is left as one line in the worker's folder, and raised."""
        from clawhpc.worker.run import run_worker  # only where it works: it imports the whole machine

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
        try:
            run_worker(self.spec, self.worker_id)
        except (ClawError, OSError) as error:
            kind = "user" if isinstance(error, UserError) else "machine"
            folder = RunPaths(Path(self.spec.run_root)).workers / self.worker_id
            with suppress(OSError):  # where the disk is full, `error` says so
                write_atomic(folder / FAILURE_FILE, f"{kind}\n{error}\n".encode())
            raise

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit at USR2: go on later with the same worker id, whose claims are still its own."""
        return DelayedSubmission(self)


class WorkerPool:
    """`with WorkerPool(settings, spec) as pool:` — workers run inside the block and are gone after it."""

    def __init__(self, settings: LaunchSettings, spec: WorkerSpec, ledger: Ledger) -> None:
        """`ledger` is the campaign's: what runs on this machine must not outlive it; batch jobs may."""
        self._settings = settings
        self._ledger = ledger
        self._spec = spec
        self._paths = RunPaths(Path(spec.run_root))
        self._executor = make_executor(settings, self._paths.workers / "submitit")
        self._jobs: dict[str, submitit.Job[None]] = {}
        self._deaths: list[float] = []

    def __enter__(self) -> WorkerPool:
        for _ in range(self._settings.num_workers):
            self._submit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=STOP_GRACE_S if kind is None else 0.0)

    def _submit(self) -> None:
        worker_id = f"w{uuid.uuid4().hex[:8]}"
        with self._local_jobs_are_ours():
            self._jobs[worker_id] = self._executor.submit(WorkerJob(self._spec, worker_id))
        log.info("worker %s is job %s, log %s", worker_id, self._jobs[worker_id].job_id, self.log_of(worker_id))

    @contextmanager
    def _local_jobs_are_ours(self) -> Iterator[None]:
        """What submitit starts on this machine within the block carries the ledger's marker and is deaf to Ctrl-C.

        submitit hands its environment on. Its local controller, in our foreground, would answer Ctrl-C with a traceback
        on our terminal; it is for us to end it. The worker itself listens again.
        """
        if self._settings.cluster != "local":
            yield
            return
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with self._ledger.lend_environment():
                yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def log_of(self, worker_id: str) -> Path:
        """The file into which a worker logs."""
        return Path(self._jobs[worker_id].paths.stderr)

    def logs(self) -> str:
        """Where to read what the workers do."""
        return "worker logs: " + ", ".join(str(self.log_of(worker_id)) for worker_id in self._jobs)

    def check(self) -> frozenset[str]:
        """Ids of the workers alive, the dead ones replaced. LaunchError when too many have died."""
        for worker_id, job in list(self._jobs.items()):
            if job.done():
                self._replace(worker_id)
        return frozenset(self._jobs)

    def _replace(self, worker_id: str) -> None:
        """Submit another worker for one that has ended, unless that cannot help."""
        log_file, job = self.log_of(worker_id), self._jobs.pop(worker_id)
        if job.paths.result_pickle.exists() and job.exception() is None:
            log.info("worker %s has ended, being idle; starting another", worker_id)
        else:
            self._count_death(*self._failure(worker_id, job), log_file)
            log.warning("worker %s has died, log %s; starting another", worker_id, log_file)
        self._submit()

    def _count_death(self, kind: str, reason: str, log_file: Path) -> None:
        """Raise UserError or LaunchError where another worker would die as well."""
        if kind == "user":
            raise UserError(reason)
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < HOUR_S] + [now]
        allowed = self._settings.max_restarts if self._any_ready() else self._settings.num_workers - 1
        if len(self._deaths) > allowed:
            raise LaunchError(f"{reason} ({len(self._deaths)} workers have died; the last one's log is {log_file})")

    def _any_ready(self) -> bool:
        """Some worker of this run has once started its parts: so they can be started."""
        return any(self._paths.workers.glob(f"*/{READY_FILE}"))

    def _failure(self, worker_id: str, job: submitit.Job[None]) -> tuple[str, str]:
        """Whose fault a worker's death is, and why it died, in one line."""
        note = self._paths.workers / worker_id / FAILURE_FILE
        if note.exists():
            kind, _, reason = note.read_text().partition("\n")
            return kind, reason.strip()
        return "machine", f"a worker ended without a word (job {job.job_id})"

    def close(self, grace_s: float) -> None:
        """Ask every worker to stop, wait up to `grace_s`, then cancel what is left, one that cannot be asked too."""
        for worker_id in self._jobs:
            with suppress(OSError):  # on a full disk, too, workers end, and why we close is what is told
                write_atomic(self._paths.workers / worker_id / STOP_FILE, b"")
        self._wait(grace_s)
        for job in self._jobs.values():
            if not job.done():
                with suppress(OSError):  # it ended just now, or the batch system cannot be asked
                    self._cancel(job)
        self._wait(CANCEL_S)
        self._jobs.clear()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(job.done() for job in self._jobs.values()):
            time.sleep(POLL_S)

    def _cancel(self, job: submitit.Job[None]) -> None:
        if self._settings.cluster == "local":
            os.kill(int(job.job_id), signal.SIGTERM)  # which the controller passes on; `cancel` would send SIGINT
        else:
            job.cancel(check=False)
