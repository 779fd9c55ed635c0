"""Steps, one after another, as Lightning asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule

from clawhpc.credit.settings import CreditSettings
from clawhpc.learner.batch import TreeBatch
from clawhpc.learner.ranks import Ranks
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.steps import StepBatch, build_rl_step, build_sft_step
from clawhpc.records import RolloutRecord
from clawhpc.tree.nodes import CallTree

StepSource = Callable[[int], StepBatch | None]
"""Step -> its batch, or None to end here. May block until it is collected; the same step gives the same batch."""


def rl_source(
    collect: Callable[[int], Sequence[RolloutRecord] | None],
    settings: LearnerSettings,
    credit: CreditSettings,
    *,
    by_harness: bool = False,
) -> StepSource:
    """Steps of reinforcement learning from the rollouts that `collect` returns."""

    def source(step: int) -> StepBatch | None:
        began = time.perf_counter()
        if (records := collect(step)) is None:
            return None
        collected = time.perf_counter()
        batch = build_rl_step(step, records, settings, credit, by_harness=by_harness)
        batch.metrics["time/collect_s"] = collected - began
        batch.metrics["time/build_s"] = time.perf_counter() - collected
        return batch

    return source


def sft_source(trees: Callable[[int], Sequence[CallTree] | None], settings: LearnerSettings) -> StepSource:
    """Steps of imitation of the sampled tokens of the trees that `trees` returns."""

    def source(step: int) -> StepBatch | None:
        examples = trees(step)
        return None if examples is None else build_sft_step(step, examples, settings)

    return source


def shared_source(source: StepSource | None, ranks: Ranks) -> StepSource:
    """Each rank's share of every step. Rank 0 alone has a `source`; the others wait for it."""

    def shared(step: int) -> StepBatch | None:
        batch = source(step) if source else None
        return ranks.scatter(share_step(batch, ranks.size) if ranks.first else None)

    return shared


def share_step(batch: StepBatch | None, size: int) -> list[StepBatch | None]:
    """The parts of `size` ranks, each with as many rows as any other; None, for the end, is for all.

    All ranks go through their rows together. So rows of one round, one for each rank, are as equal in size as can be,
    and in the last round ranks may have an empty one. Rank 0 keeps what nobody else needs.
    """
    if batch is None or size == 1:
        return [batch] * size
    rows = sorted(batch.rows, key=lambda row: row.num_tokens, reverse=True)
    rows += [TreeBatch.empty()] * (-len(rows) % size)
    shares = [replace(batch, rows=tuple(rows[rank::size])) for rank in range(size)]
    return [shares[0], *(replace(share, metrics={}, credit=None) for share in shares[1:])]


class StepStream:
    """Steps from the first that is not done to `num_steps - 1`, each when it is asked for and not before.

    That it has a length keeps Lightning from fetching a step ahead: step k + 1 is collected by the policy that step k
    publishes.
    """

    def __init__(self, source: StepSource, num_steps: int) -> None:
        self.source = source
        self.num_steps = num_steps
        self.next_step = 0
        self.first_step = 0

    def start_at(self, step: int) -> None:
        """The steps before are done."""
        self.next_step = self.first_step = step

    def __len__(self) -> int:
        return max(1, self.num_steps - self.first_step)  # of no length, Lightning would not start at all

    def __iter__(self) -> Iterator[StepBatch]:
        while self.next_step < self.num_steps and (batch := self.source(self.next_step)) is not None:
            self.next_step += 1
            yield batch


class StepData(LightningDataModule):
    """Feeds a `StepStream` to the Trainer as it is: batches are made already, and in this process."""

    def __init__(self, source: StepSource, num_steps: int) -> None:
        super().__init__()
        self.stream = StepStream(source, num_steps)

    def train_dataloader(self) -> StepStream:
        """The stream, from the first step that is not done."""
        return self.stream

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for the checkpoint."""
        return {"next_step": self.stream.next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position of a checkpoint."""
        self.stream.start_at(state_dict["next_step"])

    def transfer_batch_to_device(self, batch: StepBatch, device: Any, dataloader_idx: int) -> StepBatch:
        """Left on the CPU: the module moves one row at a time."""
        return batch
