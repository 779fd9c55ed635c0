"""What must hold of the store when a disturbed campaign has finished: each rollout is there once, and true."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clawhpc.paths import RunPaths
from clawhpc.proxy.session import derive_seed
from clawhpc.records import POLICY_OUTCOMES, CallRecord, GroupPlan, RolloutRecord, rollout_id
from clawhpc.store import MANIFEST, missing_samples, read_plans, read_rollouts, rollout_files
from clawhpc.tree.build import whole_calls
from tests.fakes.scripted_vllm import digest, read_journal


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What a campaign has collected."""

    groups: int
    rollouts: int
    outcomes: dict[str, int]
    failed: tuple[str, ...]
    """Details of infrastructure outcomes."""
    lost_draws: int
    """Replies that were drawn again, for their engine was lost."""
    tried_again: int
    """Attempts of a worker that failed, so that it made another one."""
    begun_again: int
    """Times that a rollout that had drawn something was begun anew: by another worker, or by the same."""


def check_store(paths: RunPaths, journal: Path) -> Tally:
    """Each planned rollout has one record, whole and true; each group its seal; and there is nothing else."""
    assert paths.finished.exists(), "its command has ended with 0"
    plans = {plan_id: (plan, group) for plan in read_plans(paths) for group in plan.groups for plan_id in ids_of(group)}
    records = {record.rollout_id: record for record in read_rollouts(paths)}
    assert Counter(path.stem for path in rollout_files(paths)) == Counter(plans.keys()), "one file for each"
    assert records.keys() == plans.keys()
    assert [str(path) for path in paths.root.rglob("*.part")] == []
    drawn = {(line.seed, line.received, line.drawn) for line in read_journal(journal)}
    for name, record in records.items():
        plan, group = plans[name]
        assert (record.key, record.seed) == (group.key, group.seed + record.sample)
        assert not missing_samples(paths, group)
        assert json.loads((paths.group(group.key) / MANIFEST).read_bytes()) == ids_of(group)
        check_draws(record, plan.policy_step, drawn)
    return Tally(
        groups=sum(len(plan.groups) for plan in read_plans(paths)),
        rollouts=len(records),
        outcomes=dict(Counter(str(record.outcome) for record in records.values())),
        failed=tuple(
            f"{one.outcome} in attempt {one.num_attempts}, the last: {one.detail}"
            for one in records.values()
            if one.outcome not in POLICY_OUTCOMES
        ),
        lost_draws=sum(
            "drawn again" in note for one in records.values() for call in one.calls for note in call.incidents
        ),
        tried_again=sum(len(record.failed_attempts) for record in records.values()),
        begun_again=sum(times_begun(records.values(), journal).values()) - len(records),
    )


def ids_of(group: GroupPlan) -> list[str]:
    return [rollout_id(group.key, sample) for sample in range(group.num_samples)]


def check_draws(record: RolloutRecord, policy_step: int, drawn: set[tuple[int, str, str]]) -> None:
    """Every reply is one that an engine drew, for that prompt, from that seed, with the weights that were planned."""
    whole = whole_calls(record.calls)
    for call in record.calls:
        if call.reply is None:
            continue
        assert call.tokens is not None
        assert {span.version for span in call.tokens.weight_versions} == {policy_step}
        assert told_of(record, call, tuple(whole[call.call_id].token_ids)) in drawn


def told_of(record: RolloutRecord, call: CallRecord, ids: tuple[int, ...]) -> tuple[int, str, str]:
    assert call.tokens is not None
    completion = call.tokens.completion_ids
    assert ids[-len(completion) :] == tuple(completion)
    return derive_seed(record.seed, call.call_id), digest(ids[: -len(completion)]), digest(completion)


def times_begun(records: Iterable[RolloutRecord], journal: Path) -> Counter[int]:
    """Seed of a rollout's first call -> sessions in which it was drawn; 1 where none was."""
    sessions: dict[int, set[str]] = {derive_seed(record.seed, 0): set() for record in records}
    for line in read_journal(journal):
        if line.seed in sessions:
            sessions[line.seed].add(line.request_id.partition("-")[0])
    return Counter({seed: max(1, len(found)) for seed, found in sessions.items()})
