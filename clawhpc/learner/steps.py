"""From what a step collected to the rows that it trains on.

records -> pruned trees -> credit -> rows, and what is known of each of their draws

Shapes: M tokens of the step that train.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clawhpc.credit.gae import Floats
from clawhpc.credit.group import Credit, credit_roles, reward_of
from clawhpc.credit.settings import CreditSettings
from clawhpc.credit.values import RewardedTurns, ValueCredit, credit_values
from clawhpc.errors import UserError
from clawhpc.learner.batch import Draws, StepTree, TreeBatch, build_batches
from clawhpc.learner.by_harness import advantages_by_harness, harness_metrics
from clawhpc.learner.losses import token_weights
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.verdicts import verdict_metrics
from clawhpc.records import MACHINE_OUTCOMES, CallRole, RolloutRecord
from clawhpc.tree.conversation import conversation_turns
from clawhpc.tree.cut import refuse_large_roles, refuse_long_paths, split_roles
from clawhpc.tree.drift import measure_drift
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.prune import DropRule, PrunedTree, prune_tree

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All that one step trains on."""

    step: int
    rows: tuple[TreeBatch, ...]
    """Empty when there is nothing to learn from."""
    draws: Draws
    metrics: dict[str, float]
    """Of the rollouts, their trees and their credit; names as they are logged."""
    credit: Callable[[Floats], ValueCredit] | None = None
    """What the values of the draws, (M,) in units of reward, make of their rewards; None where values play no part."""
    harnesses: tuple[str, ...] = ()
    """Of its rollouts, where the log is to tell them apart."""


def build_rl_step(
    step: int,
    records: Sequence[RolloutRecord],
    settings: LearnerSettings,
    credit: CreditSettings,
    *,
    by_harness: bool = False,
) -> StepBatch:
    """Rows for the rollouts that have something to teach. Denominators count every rollout that trains.

    So leaving out rollouts whose advantage is 0 saves their computation and changes no number. A record whose tree
    cannot be built is left out before the baseline is taken; calls that fit into no row, and draws that are stale,
    before the denominators are. All are counted, and whole rollouts and calls named in the log. UserError where nothing
    but the budget keeps the step from training. Rows hold rollouts of one harness after those of another, for these
    share their head; the update is of all of them together. `by_harness`: each of these is told apart in the log.
    """
    pruned = {record.rollout_id: tree for record in records if (tree := _prune(record, credit)) is not None}
    sound = [record for record in records if record.rollout_id in pruned]
    training = [record for record in sound if record.trains]
    lessons = [_teach(step, record, pruned[record.rollout_id].tree, settings) for record in training]
    lessons = _weighed(lessons, settings, credit)
    credited = credit_roles(sound, credit, {lesson.whole.rollout_id: _roles(lesson.tree) for lesson in lessons})
    if not credit.needs_critic:
        lessons = _compared(lessons, credited)
    wanted = [lesson for lesson in lessons if _always(settings, credit) or _stands_out(lesson, credited)]
    taught = sorted((lesson for lesson in wanted if lesson.num_tokens), key=lambda lesson: lesson.harness)
    if not taught:
        _check_budget(wanted, settings)
    trains = any(lesson.weights.any() for lesson in taught)  # else all are stale: an update would be momentum alone
    rows = _rows([lesson.tree for lesson in taught] if trains else [], settings, _temperature(records))
    metrics = {
        **_credit_metrics(credited, lessons, credit),
        **_tree_metrics(step, lessons, taught, rows),
        **_drop_metrics([pruned[record.rollout_id] for record in training]),
        **_drift_metrics(training, pruned),
        **verdict_metrics(records),
        "tree/refused_rollouts": float(len(records) - len(sound)),
        "collect/retried_share": _share([record.num_attempts > 1 for record in records]),
        "collect/failed_share": _share([record.outcome in MACHINE_OUTCOMES for record in records]),
    }
    if by_harness:
        metrics |= harness_metrics(sound, credit)
    harnesses = tuple(sorted({lesson.harness for lesson in taught})) if by_harness else ()
    return StepBatch(
        step=step,
        rows=rows,
        draws=_draws(taught, harnesses),
        metrics=metrics,
        credit=_credit_of_values(taught, credit, by_harness=by_harness) if credit.needs_critic else None,
        harnesses=harnesses,
    )


def build_sft_step(step: int, trees: Sequence[CallTree], settings: LearnerSettings) -> StepBatch:
    """Rows for all trees that have a sampled token and fit into one. UserError where only the budget keeps them out."""
    lessons = [_Lesson.of(tree, settings, least_version=0) for tree in trees]
    lessons = _weighed(lessons, settings, CreditSettings())
    taught = [lesson for lesson in lessons if lesson.num_tokens]
    if not taught:
        _check_budget(lessons, settings)
    rows = _rows([lesson.tree for lesson in taught], settings)
    metrics = {"tree/row_tokens": _row_tokens(rows), "tree/over_budget": _over_budget(lessons)}
    return StepBatch(step=step, rows=rows, draws=_draws(taught), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """One rollout that trains; arrays are aligned with the tokens that were drawn, in the order of `CallTree.draws`."""

    whole: CallTree
    tree: CallTree
    """Of `whole`, the calls that fit into a row."""
    refused: tuple[int, ...]
    """call_id of those that do not."""
    roles: NDArray[np.str_]
    versions: NDArray[np.int64]
    """Policy step that drew each."""
    fresh: NDArray[np.bool_]
    """Drawn by a policy that is new enough."""
    weights: Floats
    """In the loss; 0 until it is weighed."""
    advantages: Floats
    """0 until it is compared; where values decide, it never is."""
    reward: float
    harness: str

    @classmethod
    def of(
        cls,
        whole: CallTree,
        settings: LearnerSettings,
        *,
        least_version: int,
        reward: float = 0.0,
        harness: str = "",
    ) -> _Lesson:
        """What of a rollout's tree can be taught: draws by `least_version` or newer, in paths that fit into a row."""
        tree, refused = _fit(whole, settings)
        drawn = [tree.nodes[draw.node_id] for draw in tree.draws]
        spans = [span for node in drawn for span in node.weight_versions]
        versions = np.repeat(
            np.array([span.version for span in spans], dtype=np.int64), [span.end - span.start for span in spans]
        )
        return cls(
            whole=whole,
            tree=tree,
            refused=refused,
            roles=np.repeat(np.array([node.role for node in drawn]), [len(node.token_ids) for node in drawn]),
            versions=versions,
            fresh=versions >= least_version,
            weights=np.zeros(len(versions)),
            advantages=np.zeros(len(versions)),
            reward=reward,
            harness=harness,
        )

    @property
    def num_tokens(self) -> int:
        """Drawn in it."""
        return len(self.versions)

    @property
    def trains(self) -> NDArray[np.bool_]:
        """What counts in the loss."""
        return self.weights > 0


def _teach(step: int, record: RolloutRecord, tree: CallTree, settings: LearnerSettings) -> _Lesson:
    least_version, harness = step - settings.max_staleness, record.key.harness
    return _Lesson.of(tree, settings, least_version=least_version, reward=reward_of(record), harness=harness)


def _weighed(lessons: Sequence[_Lesson], settings: LearnerSettings, credit: CreditSettings) -> list[_Lesson]:
    """With the weight of each token in the loss; the tokens of a role share their weights among themselves."""
    loss = settings.loss
    weights = [np.zeros(lesson.num_tokens) for lesson in lessons]
    times = [credit.harness_weight(lesson.harness) for lesson in lessons]
    for role in credit.trained_roles:
        trained = [lesson.fresh & (lesson.roles == role) for lesson in lessons]
        shares = token_weights([int(at.sum()) for at in trained], loss.normaliser, loss.constant_tokens, times)
        for of_lesson, at, share in zip(weights, trained, shares, strict=True):
            of_lesson[at] = share * credit.role_weight(role)
    return [replace(lesson, weights=of_lesson) for lesson, of_lesson in zip(lessons, weights, strict=True)]


def _roles(tree: CallTree) -> set[CallRole]:
    """For which its draws were made."""
    return {tree.nodes[draw.node_id].role for draw in tree.draws}


def _compared(lessons: Sequence[_Lesson], credited: Mapping[CallRole, Credit]) -> list[_Lesson]:
    """With the advantage of each token: its rollout's, among those that drew for its role."""
    return [replace(lesson, advantages=_advantages(lesson, credited)) for lesson in lessons]


def _advantages(lesson: _Lesson, credited: Mapping[CallRole, Credit]) -> Floats:
    advantages = np.zeros(lesson.num_tokens)
    for role, of_role in credited.items():
        advantages[lesson.roles == role] = of_role.advantages.get(lesson.tree.rollout_id, 0.0)
    return advantages


def _stands_out(lesson: _Lesson, credited: Mapping[CallRole, Credit]) -> bool:
    """The rollout did better or worse than the others of its group, in a role that it drew for."""
    return any(credited[role].advantages.get(lesson.tree.rollout_id) for role in _roles(lesson.whole))


def _credit_of_values(
    lessons: Sequence[_Lesson], credit: CreditSettings, *, by_harness: bool
) -> Callable[[Floats], ValueCredit]:
    rewarded = [RewardedTurns(turns=conversation_turns(lesson.tree), reward=lesson.reward) for lesson in lessons]
    trains_M = np.concatenate([np.zeros(0, dtype=bool), *(lesson.trains for lesson in lessons)])
    harness_M = [lesson.harness for lesson in lessons for _ in range(lesson.num_tokens)] if by_harness else []

    def of_values(values_M: Floats) -> ValueCredit:
        credited = credit_values(rewarded, values_M, trains_M, credit)
        if not by_harness:
            return credited
        return replace(credited, metrics=credited.metrics | advantages_by_harness(credited, harness_M, trains_M))

    return of_values


def _always(settings: LearnerSettings, credit: CreditSettings) -> bool:
    """A rollout teaches something, whatever its advantage."""
    return credit.needs_critic or settings.loss.kl_coef > 0


def _draws(lessons: Sequence[_Lesson], harnesses: Sequence[str] = ()) -> Draws:
    """What is known before the policy is asked."""
    drawn = (lesson.tree.nodes[draw.node_id] for lesson in lessons for draw in lesson.tree.draws)
    return Draws(
        sampling_logprobs=torch.tensor([value for node in drawn for value in node.sampling_logprobs]),
        token_weight=_joined([lesson.weights for lesson in lessons]),
        advantages=_joined([lesson.advantages for lesson in lessons]),
        rewards=_joined([np.full(lesson.num_tokens, lesson.reward) for lesson in lessons]),
        harness=torch.tensor(
            [number for lesson in lessons for number in [harnesses.index(lesson.harness)] * lesson.num_tokens]
        )
        if harnesses
        else None,
    )


def _joined(parts: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0), *parts])).float()


def _rows(trees: Sequence[CallTree], settings: LearnerSettings, temperature: float = 1.0) -> tuple[TreeBatch, ...]:
    firsts = itertools.accumulate((tree.num_sampled_tokens for tree in trees), initial=0)
    step_trees = [StepTree.of(tree, first) for tree, first in zip(trees, firsts, strict=False)]
    with_paths = settings.loss.ratio == "path"
    if with_paths:  # all of a conversation in one row, and none crosses roles
        step_trees = [replace(whole, tree=part) for whole in step_trees for part in split_roles(whole.tree)]
    return tuple(
        build_batches(step_trees, token_budget=settings.row_tokens, temperature=temperature, with_paths=with_paths)
    )


def _prune(record: RolloutRecord, credit: CreditSettings) -> PrunedTree | None:
    try:
        # Over-branching was judged when the rollout was sealed: it is an outcome of the record.
        return prune_tree(
            record.rollout_id, record.calls, max_live_leaves=len(record.calls), trained_roles=credit.trained_roles
        )
    except ValueError as error:
        log.warning("rollout %s does not train: %s", record.rollout_id, error)
        return None


def _fit(tree: CallTree, settings: LearnerSettings) -> tuple[CallTree, tuple[int, ...]]:
    """What of a tree fits into rows, and the calls that do not, which are named in the log."""
    fitting, refused = refuse_long_paths(tree, settings.row_tokens)
    if settings.loss.ratio == "path":
        fitting, more = refuse_large_roles(fitting, settings.row_tokens)
        refused += more
    if refused:
        log.warning(
            "rollout %s: %d of its %d calls do not train: they are over token_budget=%d",
            tree.rollout_id,
            len(refused),
            len(tree.leaf_of_call),
            settings.row_tokens,
        )
    return fitting, refused


def _check_budget(lessons: Sequence[_Lesson], settings: LearnerSettings) -> None:
    """UserError where the budget keeps all of `lessons` from training: such steps would change nothing."""
    refused = [lesson.whole.nodes[lesson.whole.leaf_of_call[call]].end for lesson in lessons for call in lesson.refused]
    if refused:
        raise UserError(
            f"learner.token_budget={settings.row_tokens}: too small for every path of this step that has something to "
            f"teach; the shortest has {min(refused)} tokens"
        )


def _temperature(records: Sequence[RolloutRecord]) -> float:
    found = {record.temperature for record in records} or {1.0}
    assert len(found) == 1, f"the rollouts of one step were drawn at different temperatures: {sorted(found)}"
    return found.pop()


def _tree_metrics(
    step: int, lessons: Sequence[_Lesson], taught: Sequence[_Lesson], rows: Sequence[TreeBatch]
) -> dict[str, float]:
    return {
        "train/staleness_max": float(step - min((lesson.versions.min() for lesson in taught), default=step)),
        "train/stale_tokens": float(sum((~lesson.fresh).sum() for lesson in lessons)),
        "tree/sampled_tokens": float(sum(lesson.num_tokens for lesson in lessons)),
        "tree/row_tokens": _row_tokens(rows),
        "tree/path_tokens": float(sum(_path_tokens(lesson.tree) for lesson in taught)),
        "tree/without_draws": float(sum(not lesson.num_tokens for lesson in lessons)),
        "tree/over_budget": _over_budget(lessons),
    }


def _credit_metrics(
    credited: Mapping[CallRole, Credit], lessons: Sequence[_Lesson], credit: CreditSettings
) -> dict[str, float]:
    """What there is to say of rewards; of baselines too, where advantages do not come from values."""
    metrics = {"train/reward": credited[CallRole.MAIN].reward_mean}
    for role, of_role in credited.items():
        metrics |= of_role.reward_values(role) if credit.needs_critic else of_role.log_values(role)
    return metrics if credit.needs_critic else metrics | {"train/no_credit_share": _no_credit_share(lessons)}


def _no_credit_share(lessons: Sequence[_Lesson]) -> float:
    """Of the tokens that train, those whose advantage is 0."""
    num_tokens = sum(int(lesson.trains.sum()) for lesson in lessons)
    with_credit = sum(int(np.count_nonzero(lesson.advantages[lesson.trains])) for lesson in lessons)
    return 1.0 - with_credit / num_tokens if num_tokens else 0.0


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _drop_metrics(pruned: Sequence[PrunedTree]) -> dict[str, float]:
    dropped = [tree.dropped_leaves for tree in pruned]
    return {f"tree/dropped_{rule}": float(sum(leaves.get(rule, 0) for leaves in dropped)) for rule in DropRule}


def _over_budget(lessons: Sequence[_Lesson]) -> float:
    """Calls that fit into no row."""
    return float(sum(len(lesson.refused) for lesson in lessons))


def _row_tokens(rows: Sequence[TreeBatch]) -> float:
    return float(sum(row.num_tokens for row in rows))


def _path_tokens(tree: CallTree) -> int:
    """Tokens of all root-to-leaf paths, each path by itself: what the rows save shows against this."""
    return sum(tree.nodes[leaf].end for leaf in tree.leaves)


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
