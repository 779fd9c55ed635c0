"""A rank of the learner other than the first, as rank 0 starts it: `python -m clawhpc.learner.follower JOB MEETING`."""

from __future__ import annotations

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


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
