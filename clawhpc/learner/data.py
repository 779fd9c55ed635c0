"""From what a step collected to the rows that it trains on.

source(step) -> records -> pruned trees -> credit -> rows
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule

from clawhpc.credit.group import credit_groups
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.batch import CreditedTree, TreeBatch, build_batches
from clawhpc.learner.losses import token_weights
from clawhpc.learner.settings import LearnerSettings
from clawhpc.records import RolloutRecord, VersionSpan
from clawhpc.tree.drift import measure_drift
from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prune import DropRule, PrunedTree, prune_tree

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All that one step trains on."""

    step: int
    rows: tuple[TreeBatch, ...]
    """Empty when there is nothing to learn from."""
    metrics: dict[str, float]
    """Of the rollouts, their trees and their credit; names as they are logged."""


StepSource = Callable[[int], StepBatch | None]
"""Step -> its batch, or None to end here. May block until it is collected; the same step gives the same batch."""


def rl_source(
    collect: Callable[[int], Sequence[RolloutRecord] | None], settings: LearnerSettings, credit: CreditSettings
) -> StepSource:
    """Steps of reinforcement learning from the rollouts that `collect` returns."""

    def source(step: int) -> StepBatch | None:
        began = time.perf_counter()
        if (records := collect(step)) is None:
            return None
        collected = time.perf_counter()
        batch = build_rl_step(step, records, settings, credit)
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


def build_rl_step(
    step: int, records: Sequence[RolloutRecord], settings: LearnerSettings, credit: CreditSettings
) -> StepBatch:
    """Rows for the rollouts that have an advantage. Denominators count every rollout that trains.

    So leaving out rollouts whose advantage is 0 saves their computation and changes no number. A record whose tree
    cannot be built is left out before the baseline is taken, one whose tree is over `token_budget` before the
    denominators are; both are named in the log, and counted. UserError where nothing but the budget keeps the step from
    training. ValueError for rollouts that were drawn at different temperatures.
    """
    pruned = {record.rollout_id: tree for record in records if (tree := _prune(record)) is not None}
    sound = [record for record in records if record.rollout_id in pruned]
    credited = credit_groups(sound, credit)
    training = {record.rollout_id: pruned[record.rollout_id].tree for record in sound if record.trains}
    trained = [rollout_id for rollout_id, tree in training.items() if _fits(tree, settings)]
    trees = [
        CreditedTree(tree=training[rollout_id], rollout=index, advantage=advantage, token_weight=weight)
        for index, (rollout_id, weight) in enumerate(
            zip(trained, _weights([training[rollout_id] for rollout_id in trained], settings), strict=True)
        )
        if (advantage := credited.advantages.get(rollout_id, 0.0)) and training[rollout_id].num_sampled_tokens
    ]
    if not trees:
        _check_budget([tree for rollout_id, tree in training.items() if credited.advantages.get(rollout_id)], settings)
    rows = _rows(trees, settings, _temperature(records))
    metrics = {
        "train/reward": credited.reward_mean,
        **credited.log_values(),
        **_tree_metrics([pruned[rollout_id] for rollout_id in trained], trees, rows),
        **_drift_metrics([record for record in sound if record.trains], pruned),
        "train/staleness_max": float(max((step - _oldest_version(row) for row in rows), default=0)),
        "tree/refused_rollouts": float(len(records) - len(sound)),
        "tree/over_budget": float(len(training) - len(trained)),
    }
    return StepBatch(step=step, rows=rows, metrics=metrics)


def build_sft_step(step: int, trees: Sequence[CallTree], settings: LearnerSettings) -> StepBatch:
    """Rows for all trees that have a sampled token and fit into one. UserError where only the budget keeps them out."""
    trained = [tree for tree in trees if _fits(tree, settings)]
    credited = [
        CreditedTree(tree=tree, rollout=index, advantage=0.0, token_weight=weight)
        for index, (tree, weight) in enumerate(zip(trained, _weights(trained, settings), strict=True))
        if tree.num_sampled_tokens
    ]
    if not credited:
        _check_budget(trees, settings)
    rows = _rows(credited, settings)
    metrics = {"tree/row_tokens": _row_tokens(rows), "tree/over_budget": float(len(trees) - len(trained))}
    return StepBatch(step=step, rows=rows, metrics=metrics)


def sequence_tree(name: str, token_ids: Sequence[int], trained: Sequence[bool]) -> CallTree:
    """One plain sequence as a tree without forks: runs of `trained` tokens are its draws (for imitation only)."""
    nodes: list[Node] = []
    start = 0
    for stop in range(1, len(token_ids) + 1):
        if stop == len(token_ids) or trained[stop] != trained[start]:
            nodes.append(_sequence_node(len(nodes), start, tuple(token_ids[start:stop]), trained[start]))
            start = stop
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id=name, nodes=tuple(nodes), leaf_of_call=leaf_of_call)


def _sequence_node(node_id: int, start: int, token_ids: tuple[int, ...], trained: bool) -> Node:
    length = len(token_ids)
    return Node(
        node_id=node_id,
        parent_id=node_id - 1 if node_id else None,
        start=start,
        token_ids=token_ids,
        sampled=trained,
        sampling_logprobs=(0.0,) * length if trained else (),
        weight_versions=(VersionSpan(version=0, start=0, end=length),) if trained else (),
        call_id=node_id if trained else None,
    )


def _prune(record: RolloutRecord) -> PrunedTree | None:
    try:
        # Over-branching was judged when the rollout was sealed: it is an outcome of the record.
        return prune_tree(record.rollout_id, record.calls, max_live_leaves=len(record.calls))
    except ValueError as error:
        log.warning("rollout %s does not train: %s", record.rollout_id, error)
        return None


def _weights(trees: Sequence[CallTree], settings: LearnerSettings) -> list[float]:
    num_tokens = [tree.num_sampled_tokens for tree in trees]
    return token_weights(num_tokens, settings.normaliser, settings.constant_tokens)


def _temperature(records: Sequence[RolloutRecord]) -> float:
    found = {record.temperature for record in records} or {1.0}
    if len(found) > 1:
        raise ValueError(f"the rollouts of one step were drawn at different temperatures: {sorted(found)}")
    return found.pop()


def _fits(tree: CallTree, settings: LearnerSettings) -> bool:
    """Into one row, by itself; if not, it is named in the log."""
    if tree.num_tokens <= settings.token_budget:
        return True
    log.warning(
        "rollout %s does not train: its tree of %d tokens is over token_budget=%d",
        tree.rollout_id,
        tree.num_tokens,
        settings.token_budget,
    )
    return False


def _check_budget(wanted: Sequence[CallTree], settings: LearnerSettings) -> None:
    """UserError where the budget keeps all of `wanted` from training: such steps would change nothing."""
    sizes = [tree.num_tokens for tree in wanted if tree.num_sampled_tokens]
    if sizes and min(sizes) > settings.token_budget:
        raise UserError(
            f"learner.token_budget={settings.token_budget}: too small for every tree of this step that has "
            f"something to teach; the smallest has {min(sizes)} tokens"
        )


def _rows(trees: Sequence[CreditedTree], settings: LearnerSettings, temperature: float = 1.0) -> tuple[TreeBatch, ...]:
    return tuple(build_batches(trees, token_budget=settings.token_budget, temperature=temperature))


def _tree_metrics(
    pruned: Sequence[PrunedTree], credited: Sequence[CreditedTree], rows: Sequence[TreeBatch]
) -> dict[str, float]:
    sampled = sum(tree.tree.num_sampled_tokens for tree in pruned)
    with_credit = sum(tree.tree.num_sampled_tokens for tree in credited)
    dropped = [tree.dropped_leaves for tree in pruned]
    return {
        "train/no_credit_share": 1.0 - with_credit / sampled if sampled else 0.0,
        "tree/sampled_tokens": float(sampled),
        "tree/row_tokens": _row_tokens(rows),
        "tree/path_tokens": float(sum(_path_tokens(tree.tree) for tree in credited)),
        "tree/without_draws": float(sum(not tree.tree.num_sampled_tokens for tree in pruned)),
        **{f"tree/dropped_{rule}": float(sum(leaves.get(rule, 0) for leaves in dropped)) for rule in DropRule},
    }


def _drift_metrics(records: Sequence[RolloutRecord], pruned: Mapping[str, PrunedTree]) -> dict[str, float]:
    drifts = {record.rollout_id: measure_drift(record.calls, pruned[record.rollout_id]) for record in records}
    for rollout_id, drift in drifts.items():
        if drift.alarm:
            log.warning(
                "rollout %s: %d replies are leaves of its tree although later calls repeat them",
                rollout_id,
                drift.unexplained_leaves,
            )
    return {
        "drift/copied": float(sum(drift.copied for drift in drifts.values())),
        "drift/reencoded": float(sum(drift.reencoded for drift in drifts.values())),
        "drift/reencoded_replies": float(sum(drift.reencoded_replies for drift in drifts.values())),
        "drift/unexplained_leaves": float(sum(drift.unexplained_leaves for drift in drifts.values())),
    }


def _oldest_version(row: TreeBatch) -> int:
    return int(row.weight_version_BT[row.sampled_BT].min())


def _row_tokens(rows: Sequence[TreeBatch]) -> float:
    return float(sum(row.num_tokens for row in rows))


def _path_tokens(tree: CallTree) -> int:
    """Tokens of all root-to-leaf paths, each path by itself: what the rows save shows against this."""
    return sum(tree.nodes[leaf].end for leaf in tree.leaves)


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
