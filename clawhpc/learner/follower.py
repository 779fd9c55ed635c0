"""A rank of the learner other than the first, as rank 0 starts it: `python -m clawhpc.learner.follower JOB MEETING`."""

from __future__ import annotations

import signal
import sys

import msgspec

from clawhpc.learner.ranks import Meeting, join_ranks
from clawhpc.learner.trainer import RankJob, follow_rl
from clawhpc.ledger.parent import die_with_parent


def main(job: str, meeting: str) -> None:
    """Join, and share the work until it is done."""
    task = msgspec.json.decode(job, type=RankJob)
    with join_ranks(msgspec.json.decode(meeting, type=Meeting), cuda=task.cuda) as ranks:
        follow_rl(task, ranks)


def leave_signals_to_first() -> None:
    """What a batch system tells a job, it tells each of its processes; rank 0 alone answers, and ends the others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    die_with_parent()
    leave_signals_to_first()
    main(*sys.argv[1:])
