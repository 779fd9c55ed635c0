"""A rank that does what a test says: `python -m tests.fakes.rank SCRIPT MEETING`."""

from __future__ import annotations

import os
import sys

import msgspec
import torch

from clawhpc.learner.ranks import Meeting, join_ranks


def main() -> None:
    script, meeting = sys.argv[1:]
    with join_ranks(msgspec.json.decode(meeting, type=Meeting), cuda=False) as ranks:
        if script == "exchange":
            share = ranks.scatter(None)
            ranks.gather(share * 10)
            ranks.broadcast(None)
            ranks.gather(ranks.add(torch.tensor([0.0, float(ranks.rank)])))
        if script == "wait":
            ranks.gather(os.getpid())
            ranks.gather(None)
        if script == "fail":
            raise ValueError("a reason")


if __name__ == "__main__":
    main()
