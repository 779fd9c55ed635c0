"""Keep a number of workers alive, and know which of them are.

A worker is a submitit job; on Slurm, an element of one array. Its id is the pool's own, not the job's: process ids come
round again. The pool never looks into rollouts; who is alive is all that the campaign needs to free the claims of the
dead, and on Slurm that is for Slurm to say.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import submitit

from clawhpc.errors import LaunchError, UserError
from clawhpc.launch.executor import JOB_NAME, make_executor, submit
from clawhpc.launch.failure import Failure, read_failure
from clawhpc.launch.job import LEASE_FILE, Lease, WorkerJob
from clawhpc.launch.lease import hold_lease
from clawhpc.launch.settings import LaunchSettings
from clawhpc.launch.states import TAKEN, WAITING, is_in, run
from clawhpc.launch.turn import script_end
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.store import named_errors, write_atomic
from clawhpc.worker.settings import READY_FILE, STOP_FILE, WorkerSpec

log = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""From the wish to stop until the job is cancelled: an engine needs some seconds to end."""
CANCEL_S = 3.0
"""For a cancelled worker to end by itself; on this machine the ledger ends it then, on Slurm Slurm does."""
HOUR_S = 3600.0
MAX_BAD_HOSTS = 16
"""That new workers keep away from; of more, those that were bad longest ago get another chance."""
POLL_S = 0.1
"""A job's end can only be asked for: submitit has no call that waits for it with a deadline."""


class WorkerPool:
    """`with WorkerPool(settings, spec, ledger) as pool:` — workers run inside the block and are gone after it."""

    def __init__(
        self,
        settings: LaunchSettings,
        spec: WorkerSpec,
        ledger: Ledger,
        make_job: Callable[[WorkerSpec, str, Lease | None], WorkerJob] = WorkerJob,
    ) -> None:
        """`ledger` is the campaign's: what runs on this machine must not outlive it. Batch jobs see to that themselves,
        by its lease; those in the queue that have no worker yet to do so are cancelled when the run goes on.
        """
        self._settings = settings
        self._ledger = ledger
        self._spec = spec
        self._make_job = make_job
        self._paths = RunPaths(Path(spec.run_root))
        self._folder = self._paths.workers / "submitit"
        self._executor = make_executor(settings, self._folder, script_end(spec.scratch_root))
        self._on_slurm = settings.cluster == "slurm"
        self._lease = Lease(f"c{uuid.uuid4().hex[:8]}", settings.slurm.lease_s) if self._on_slurm else None
        self._jobs: dict[str, submitit.Job[None]] = {}
        self._running: frozenset[str] = frozenset()
        self._looked_at = -float("inf")
        self._deaths: list[float] = []
        self._bad_hosts: tuple[str, ...] = ()
        """On Slurm, those on which a worker could not work, the last one last."""
        self._untold: frozenset[str] = frozenset()
        """Workers that were submitted before these were known, and not told since: a job that runs cannot be."""
        self._block = ExitStack()

    def __enter__(self) -> WorkerPool:
        with ExitStack() as stack:
            if self._lease is not None:
                stack.enter_context(
                    hold_lease(self._paths.workers / LEASE_FILE, self._lease.holder, self._lease.lease_s)
                )
                self._cancel_former()
            self._submit()
            self._block = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._block:
            self.close(grace_s=STOP_GRACE_S if kind is None else 0.0)

    def _submit(self) -> None:
        """Submit as many workers as are missing."""
        worker_ids = [f"w{uuid.uuid4().hex[:8]}" for _ in range(self._settings.num_workers - len(self._jobs))]
        if not worker_ids:
            return
        with self._local_jobs_are_ours(), named_errors(self._folder):
            jobs = submit(self._executor, [self._make_job(self._spec, one, self._lease) for one in worker_ids])
        self._jobs |= zip(worker_ids, jobs, strict=True)
        self._looked_at = -float("inf")
        for worker_id in worker_ids:
            log.info("worker %s is job %s, log %s", worker_id, self._jobs[worker_id].job_id, self.log_of(worker_id))

    @contextmanager
    def _local_jobs_are_ours(self) -> Iterator[None]:
        """What submitit starts on this machine within the block carries the ledger's marker and is deaf to Ctrl-C.

        submitit hands its environment on. Its local controller, in our foreground, would answer Ctrl-C with a traceback
        on our terminal; it is for us to end it. The worker itself listens again.
        """
        if self._on_slurm:
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
        """Ids of the workers that may be at work, the dead ones replaced. LaunchError when too many have died.

        One that Slurm has put back into the queue keeps its id but is not at work: others may take what it had claimed.
        """
        if self._on_slurm and time.monotonic() - self._looked_at < self._settings.slurm.watch_s:
            return self._running
        for worker_id, job in list(self._jobs.items()):
            if job.done():
                self._bury(worker_id)
        self._replace()
        self._looked_at = time.monotonic()
        jobs = self._jobs.items() if self._on_slurm else ()
        waiting = frozenset(worker_id for worker_id, job in jobs if is_in(job.state, WAITING))
        self._tell(waiting & self._untold)
        self._running = frozenset(self._jobs.keys() - waiting)
        return self._running

    def _replace(self) -> None:
        """Submit a worker for each that is missing; what Slurm does not take now it may take at the next look."""
        try:
            self._submit()
        except LaunchError as error:
            log.warning("no worker can be submitted now: %s", error)
            self._keep_away_from(self._bad_hosts[1:])  # there may be no others

    def _bury(self, worker_id: str) -> None:
        """Give up a worker that has ended, unless another one would end like it."""
        log_file, job = self.log_of(worker_id), self._jobs.pop(worker_id)
        if job.paths.result_pickle.exists() and job.exception() is None:
            return log.info("worker %s has ended, being idle; starting another", worker_id)
        if self._on_slurm:
            cancel([job.job_id])  # if Slurm was wrong about it: two of a kind are one too many
            if is_in(job.state, TAKEN):
                return log.info("worker %s was taken by Slurm: job %s is %s", worker_id, job.job_id, job.state)
        failure = self._failure(worker_id, job)
        log.warning("worker %s has died: %s; its log is %s", worker_id, failure.reason, log_file)
        return self._count_death(worker_id, failure, log_file)

    def _count_death(self, worker_id: str, failure: Failure, log_file: Path) -> None:
        """Raise UserError or LaunchError where another worker would die as well."""
        fault, reason = failure.fault, failure.reason
        if fault == "user":
            raise UserError(reason)
        if fault == "store" or (fault == "host" and not self._on_slurm):  # all the others have the same
            raise LaunchError(f"{reason} (worker log: {log_file})")
        if fault == "host" and failure.host in self._bad_hosts and worker_id in self._untold:
            return  # that says nothing new
        if fault == "host":
            self._keep_away_from((*(host for host in self._bad_hosts if host != failure.host), failure.host))
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < HOUR_S] + [now]
        allowed = self._settings.max_restarts if self._any_ready() else self._settings.num_workers - 1
        if len(self._deaths) > allowed:
            raise LaunchError(f"{reason} ({len(self._deaths)} workers have died; the last one's log is {log_file})")

    def _any_ready(self) -> bool:
        """Some worker of this run has once started its parts: so they can be started."""
        return any(self._paths.workers.glob(f"*/{READY_FILE}"))

    def _keep_away_from(self, hosts: tuple[str, ...]) -> None:
        """Workers that start from now on do not go there, as far as these are not too many."""
        if hosts == self._bad_hosts:
            return
        self._bad_hosts = hosts[-MAX_BAD_HOSTS:]
        self._untold = frozenset(self._jobs)
        self._executor.update_parameters(slurm_exclude=self._excluded or None)
        log.warning("new workers keep away from %s", ", ".join(self._bad_hosts) or "no host any more")

    @property
    def _excluded(self) -> str:
        """Hosts to which no worker goes, as Slurm wants them."""
        configured = self._settings.slurm.exclude
        return ",".join([*([configured] if configured else []), *self._bad_hosts])

    def _tell(self, waiting: frozenset[str]) -> None:
        """Workers in the queue keep away, too: a bad host is soon free, and would take them one after the other."""
        if waiting:
            job_ids = ",".join(self._jobs[worker_id].job_id for worker_id in waiting)
            if order(["scontrol", "update", f"JobId={job_ids}", f"ExcNodeList={self._excluded}"]):
                self._untold -= waiting

    def _failure(self, worker_id: str, job: submitit.Job[None]) -> Failure:
        """Whose fault a worker's death is, and why it died, in one line. OSError where its folder cannot be written."""
        noted = read_failure(self._paths.workers / worker_id)
        if noted is not None:
            where = f" (job {job.job_id} on {noted.host})" if self._on_slurm else ""
            return replace(noted, reason=noted.reason + where)
        slurms_word = f", {job.state} on {job.get_info('cache').get('NodeList')}" if self._on_slurm else ""
        reason = f"a worker ended without a word (job {job.job_id}{slurms_word})"
        return Failure(fault="machine", host="", reason=reason)

    def close(self, grace_s: float) -> None:
        """Ask every worker to stop, wait up to `grace_s`, then cancel what is left, one that cannot be asked too."""
        for worker_id in self._jobs:
            with suppress(OSError):  # on a full disk, too, workers end, and why we close is what is told
                write_atomic(self._paths.workers / worker_id / STOP_FILE, b"")
        if self._on_slurm:
            cancel([job.job_id for job in self._jobs.values()], "--state=PENDING")  # they cannot be asked
        self._wait(grace_s)
        self._cancel_rest()
        self._wait(CANCEL_S)
        self._jobs.clear()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(job.done() for job in self._jobs.values()):
            time.sleep(POLL_S)

    def _cancel_rest(self) -> None:
        job_ids = [job.job_id for job in self._jobs.values() if not job.done()]
        if self._on_slurm:
            return cancel(job_ids)
        for job_id in job_ids:
            with suppress(OSError):  # it ended just now
                os.kill(int(job_id), signal.SIGTERM)  # which the controller passes on; `cancel` would send SIGINT

    def _cancel_former(self) -> None:
        """Take out of the queue what a campaign that was killed has left there. Once: ids come round again, and what
        Slurm cannot be told of now ends by the lease when its turn comes.
        """
        scripts = [*self._folder.glob("[0-9]*_submission.sh")]
        cancel([script.name.partition("_")[0] for script in scripts])
        for script in scripts:
            script.unlink()


def cancel(job_ids: list[str], *options: str) -> None:
    """Cancel jobs and array elements that are ours, those that there still are. Never in anyone's way."""
    if job_ids:
        order(["scancel", "--quiet", f"--name={JOB_NAME}", f"--user={os.getuid()}", *options, *job_ids])


def order(command: list[str]) -> bool:
    """Whether a command of Slurm has done all that it says: a job that it names may just have started, or ended."""
    try:
        answer = run(command)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: %s", shlex.join(command), error)
        return False
    if answer.returncode and answer.stderr.strip():
        log.warning("%s: %s", shlex.join(command), answer.stderr.strip())
    return answer.returncode == 0
