"""A learner whose run lies on a small disk: whichever file does not fit any more, it stops there, and goes on later."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from clawhpc.command import one_line_errors
from clawhpc.learner.policy import create_policy
from clawhpc.learner.tokenizer import train_tokenizer
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from tests.fakes.learner_campaign import SMALL, Campaign, equal, rollouts
from tests.fakes.small_disk import SmallDisk, run_scenario

NUM_STEPS = 3
STRIDE = 40 << 10
"""Less than a policy has: so that each of its files is once the one that does not fit."""


def fill_more_and_more(disk: SmallDisk) -> None:
    """In the middle of a run, with no room left, then with a little more every time, until there is enough."""
    with tempfile.TemporaryDirectory(prefix="disk-") as name:
        elsewhere = Path(name)
        train_tokenizer(["write kiwi to apple.txt"] * 3, elsewhere / "tokenizer", vocab_size=280)
        policy = Path(create_policy(elsewhere / "policy", elsewhere / "tokenizer", SMALL, seed=0).path)
        whole = Campaign(RunPaths(elsewhere / "run"), num_steps=NUM_STEPS).train(policy)
        leave_bytes = 0
        while stops(disk, paths := RunPaths(disk.folder / str(leave_bytes)), policy, leave_bytes):
            assert not list(paths.root.rglob("*.part")), "half-written"
            assert equal(Campaign(paths, num_steps=NUM_STEPS).train(policy), whole)
            leave_bytes += STRIDE


def stops(disk: SmallDisk, paths: RunPaths, policy: Path, leave_bytes: int) -> bool:
    """The run stops because the disk is full once step 1 has been collected."""

    def collect(step: int) -> Sequence[RolloutRecord]:
        if step == 1:
            disk.fill(leave_bytes=leave_bytes)
        return rollouts(step)

    try:
        with one_line_errors():
            Campaign(paths, collect=collect, num_steps=NUM_STEPS).train(policy)
    except SystemExit as end:
        return end.code == 1
    finally:
        disk.mend()
    return False


if __name__ == "__main__":
    run_scenario({"full": fill_more_and_more})
