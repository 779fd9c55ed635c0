"""A campaign as a job of Slurm: what it runs, how it is submitted, and how the same one is found again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import JobPaths
from submitit.helpers import DelayedSubmission

from clawhpc.launch.executor import CAMPAIGN_NAME, campaign_executor, submit
from clawhpc.launch.settings import CampaignJobSettings
from clawhpc.launch.states import look_up
from clawhpc.launch.turn import alone_in_job, go_back_if_warned, script_end, status_here, this_job
from clawhpc.ledger.parent import die_with_parent
from clawhpc.lock import alone

log = logging.getLogger(__name__)

SUBMIT_S = 120.0
"""For another command that is submitting the very same campaign to be done; sbatch itself gives up sooner."""
DEAF_TO_REQUEUE = ("sh", "-c", 'trap "" USR2; exec "$@"', "sh")
"""Before the command: Slurm sends the signal to every process of a job, and would end all but the one that knows it."""
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a command that was told to end, as Popen has them."""
DETACHING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal, or its loss, says to its commands."""
LOOK_S = 30.0
"""Between two questions of a job to Slurm whether it still has this one; less than its next turn waits."""
RETURN_POLL_S = 0.5
"""Between two looks for what a job has returned."""
KILL_S = 10.0
"""For the kernel to end a process."""


class CampaignJob:
    """What submitit runs: a command, until it ends, whose exit code is the job's.

    When Slurm wants its place back, the command is ended first, and with it all that it has started; then the job goes
    back into the queue, and its next turn begins the same command.
    """

    def __init__(self, command: Sequence[str], end_s: float, scratch_root: str | None = None) -> None:
        """`end_s`: for the command to end by itself when it is told to. `scratch_root`: of the ledger that it opens."""
        self._command = tuple(command)
        self._end_s = end_s
        self._scratch_root = scratch_root
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Return when the command has succeeded; else SystemExit, with its exit code."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout, force=True)
        die_with_parent()  # the daemon of this step: without it Slurm counts the job as gone
        with alone_in_job(self._scratch_root, this_job()):
            code = self._run()
        if code in INTERRUPTED:
            go_back_if_warned()
        if code:
            raise SystemExit(code if code > 0 else 128 - code)

    def _run(self) -> int:
        """The command's exit code, as Popen has it."""
        self._process = process = subprocess.Popen([*DEAF_TO_REQUEUE, *self._command])
        threading.Thread(target=self._end_when_lost, name="slurm", daemon=True).start()
        with suppress(ChildProcessError):  # Popen's `wait` is for `_end`, which may come in between
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process.wait()

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit at USR2, before it puts the job back into the queue."""
        log.info("Slurm wants its place back: the campaign ends, and goes on in the next turn of its job")
        self._end()
        return DelayedSubmission(CampaignJob(self._command, self._end_s, self._scratch_root))

    def _end_when_lost(self) -> None:
        """End the command when Slurm has given its job up here, and could not say so: its next turn waits for that."""
        while not ((here := status_here()) and here.ended):
            time.sleep(LOOK_S)
        log.warning("Slurm counts this job as ended here: so does the campaign end")
        self._end()

    def _end(self) -> None:
        """Of the command nothing is left."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            log.warning("the campaign has not ended in %.0f s, and is killed", self._end_s)
            self._process.kill()
            self._process.wait(KILL_S)


@dataclass(frozen=True, kw_only=True)
class SubmittedCampaign:
    """A campaign's job that is queued or runs."""

    job_id: str
    folder: Path
    is_new: bool
    """It was submitted just now."""

    @property
    def log(self) -> Path:
        """All that it says, in every one of its turns."""
        return Path(JobPaths(self.folder, self.job_id).stdout)

    def has_returned(self, *, within_s: float) -> bool:
        """Its command has succeeded: submitit has kept what it returned. Another host sees that some time later.

        Slurm's word is not enough: where the daemon of its step dies, srun ends with 0, and the job is COMPLETED.
        """
        end = time.monotonic() + within_s
        while (
            not (returned := Path(JobPaths(self.folder, self.job_id).result_pickle).exists()) and time.monotonic() < end
        ):
            time.sleep(RETURN_POLL_S)
        return returned


def submit_campaign(
    settings: CampaignJobSettings,
    num_nodes: int,
    folder: Path,
    command: Sequence[str],
    scratch_root: str | None = None,
) -> SubmittedCampaign:
    """The job that runs `command`: the one in `folder` that is still queued or runs, else a new one.

    `folder` is for this one command, on a file system that its nodes share. However many ask at once, one is submitted.
    `scratch_root`: of the ledger that the command opens.
    """
    with alone(folder / "submit.lock", folder, wait_s=SUBMIT_S):
        former = newest_job(folder)
        if former is not None and is_alive(former):
            return SubmittedCampaign(job_id=former, folder=folder, is_new=False)
        executor = campaign_executor(settings, num_nodes, folder, script_end(scratch_root))
        with deaf():
            (job,) = submit(executor, [CampaignJob(command, settings.signal_delay_s / 2, scratch_root)])
        return SubmittedCampaign(job_id=job.job_id, folder=folder, is_new=True)


def newest_job(folder: Path) -> str | None:
    """Id of the job that was submitted last: by time, for at some number ids begin anew."""
    scripts = sorted(folder.glob("[0-9]*_submission.sh"), key=lambda path: path.stat().st_mtime_ns)
    return scripts[-1].name.partition("_")[0] if scripts else None


def is_alive(job_id: str) -> bool:
    """A campaign with this id is queued or runs; ids come round again."""
    status = look_up(job_id)
    return status.name == CAMPAIGN_NAME and not status.ended


@contextmanager
def deaf() -> Iterator[None]:
    """Within the block, who would end us does not, nor what we start: nothing is half submitted."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in DETACHING}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
