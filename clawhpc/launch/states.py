"""What Slurm says of our jobs.

The accounts (`sacct`) are asked where Slurm keeps some, for they know how each job ended. Where it keeps none, the
queue is (`squeue`): it forgets a job some minutes after its end, so one that it does not know has ended. One question
is for all jobs, however many.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass

from submitit.slurm.slurm import SlurmInfoWatcher

from clawhpc.errors import LaunchError

log = logging.getLogger(__name__)

ASK_S = 60.0
"""For Slurm to answer; its own commands give up sooner."""
NO_ACCOUNTS = "accounting storage is disabled"
"""What sacct says then."""
UNKNOWN_JOB = "invalid job id"
"""What scontrol says of a job that the controller has forgotten."""
GONE = "GONE"
"""Our word for the state of a job that the queue has forgotten."""
NO_MEMORY = "OUT_OF_MEMORY"
ENDED = (
    *("COMPLETED", "FAILED", NO_MEMORY, "CANCELLED"),
    *("TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
    GONE,
)
"""The states that no job comes back from. submitit's own rule has it the other way round, and takes a job that is
suspended for dead.
"""
TAKEN = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED")
"""Of these, the ones that are not the job's own doing."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
"""It has no allocation, so nothing of it runs."""


class SlurmStates(SlurmInfoWatcher):
    """What submitit asks for the state of a job."""

    def __init__(self, delay_s: float) -> None:
        """Slurm is asked once in `delay_s`, or whenever a job is new."""
        super().__init__(delay_s)  # type: ignore[arg-type] # it only compares it
        self._accounts = True

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """The job has ended, and does not come back."""
        return is_in(self.get_state(job_id, mode), ENDED)

    def update(self) -> None:
        """Ask Slurm. Where it does not answer, what it said last stands."""
        asked = self._registered - self._finished
        if not asked:
            return
        self._num_calls += 1
        try:
            self._info_dict |= self._ask(asked)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("Slurm does not say how our jobs are: %s", error)
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in asked if self.is_done(job_id, mode="cache")}

    def _ask(self, job_ids: Collection[str]) -> dict[str, dict[str, str]]:
        if self._accounts:
            arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
            command = ["sacct", "--parsable2", "--format=JobID,State,NodeList", f"--jobs={','.join(arrays)}"]
            answer = run(command)
            if answer.returncode == 0:
                return self._without_those_that_come_back(self._with_lack_of_memory(answer.stdout))
            if NO_ACCOUNTS not in answer.stderr.lower():
                raise subprocess.CalledProcessError(answer.returncode, "sacct", stderr=answer.stderr)
            log.info("Slurm keeps no accounts here: who lives is looked up in its queue, and why one died is not known")
            self._accounts = False
        return self._ask_queue(job_ids)

    def _with_lack_of_memory(self, told: str) -> dict[str, dict[str, str]]:
        """What sacct `told` of jobs; one that failed because a step of it was out of memory is so, too.

        Slurm itself calls only that a job's own doing which its script does, and ours starts the worker in a step.
        """
        found, short = self.read_info(told), re.findall(rf"^([^.|]+)\.[^|]*\|{NO_MEMORY}\b", told, re.MULTILINE)
        failed = [job_id for job_id in short if state_in(found, job_id) == "FAILED"]
        return found | {job_id: found[job_id] | {"State": NO_MEMORY} for job_id in failed}

    def _without_those_that_come_back(self, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """`found`, where for a job that Slurm has taken its allocation from, the queue says whether it gets another.

        The accounts count such a run as ended, and know of the next one only some seconds later.
        """
        taken = [job_id for job_id in self._registered - self._finished if is_in(state_in(found, job_id), TAKEN)]
        queued = self._ask_queue(taken) if taken else {}
        return found | {job_id: row for job_id, row in queued.items() if row["State"] != GONE}

    def _ask_queue(self, job_ids: Collection[str]) -> dict[str, dict[str, str]]:
        command = ["squeue", f"--user={os.getuid()}", "--states=all", "--array", "--format=%i|%T|%N"]
        answer = run(command)
        answer.check_returncode()
        rows = [line.split("|") for line in answer.stdout.splitlines()[1:]]
        known = {job_id: {"State": state, "NodeList": nodes} for job_id, state, nodes in rows}
        return {job_id: known.get(job_id, {"State": GONE, "NodeList": ""}) for job_id in job_ids}


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One job, by Slurm's word."""

    name: str = ""
    """Empty where only the accounts know it."""
    state: str = GONE
    reason: str = ""
    """Why it waits: `Priority`, `Resources`, `BeginTime`."""
    nodes: str = ""
    exit_code: int = 0
    """As a shell gives it: 128 + n for signal n."""
    restarts: int = 0
    """How often it was put back into the queue."""

    @property
    def ended(self) -> bool:
        """It does not come back."""
        return is_in(self.state, ENDED)

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes and not is_in(self.state, WAITING) else ""
        why = f" ({self.reason})" if self.reason and is_in(self.state, WAITING) else ""
        return f"{self.state}{where}{why}"


def look_up(job_id: str) -> JobStatus:
    """One job: what the controller says of it, or, when it has forgotten it, the accounts. LaunchError where no answer
    can be had.
    """
    try:
        answer = run(["scontrol", "show", "job", "--oneliner", job_id])
        if answer.returncode == 0:
            return _status(answer.stdout)
        if UNKNOWN_JOB in answer.stderr.lower():
            return _in_accounts(job_id)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"Slurm does not say how job {job_id} is: {error}") from error
    raise LaunchError(f"Slurm does not say how job {job_id} is: {answer.stderr.strip()}")


def _status(told: str) -> JobStatus:
    """From `scontrol show job`, a line of `Name=value`; what a user has given, a comment say, may look like others."""
    values: dict[str, str] = {}
    for name, value in re.findall(r"(?<!\S)(\w+)=(\S*)", told):
        values.setdefault(name, value)
    known = {name: value for name, value in values.items() if value not in ("(null)", "None")}
    return JobStatus(
        name=known.get("JobName", ""),
        state=known["JobState"],
        reason=known.get("Reason", ""),
        nodes=known.get("NodeList", ""),
        exit_code=_exit_code(known.get("ExitCode", "0:0")),
        restarts=int(known.get("Restarts", 0)),
    )


def _in_accounts(job_id: str) -> JobStatus:
    command = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State,ExitCode", f"--jobs={job_id}"]
    answer = run(command)
    rows = answer.stdout.split("\n")[0].split("|")
    if answer.returncode or len(rows) < 2:
        return JobStatus()  # nobody remembers it
    return JobStatus(state=rows[0], exit_code=_exit_code(rows[1]))


def _exit_code(told: str) -> int:
    code, _, signal = told.partition(":")
    return 128 + int(signal) if signal not in ("", "0") else int(code)


def state_in(found: dict[str, dict[str, str]], job_id: str) -> str:
    """The state of a job in what Slurm said; UNKNOWN of one that is too new."""
    return found.get(job_id, {}).get("State", "UNKNOWN")


def is_in(state: str, states: Collection[str]) -> bool:
    """`state`, as Slurm spells it (`CANCELLED by 1000`), is one of `states`."""
    return state.upper().partition(" ")[0] in states


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command of Slurm, and what it said."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False)
