"""Evaluate a policy: python -m clawhpc.evaluate policy.folder=FOLDER harness=pi campaign.eval_samples=4"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from clawhpc.config import RunConfig, entry_point, open_campaign
from clawhpc.errors import UserError
from clawhpc.job import as_campaign
from clawhpc.passrate import PassTable, tabulate
from clawhpc.store import write_atomic
from clawhpc.tasks.sets import load_task_sets

log = logging.getLogger(__name__)


def evaluate(config: RunConfig) -> None:
    """pass@1 and pass@k with their intervals, for each harness, on the held-out tasks; of a user's own set, on all."""
    endpoint = config.policy.endpoint
    policy = None if endpoint.is_set else config.policy_source()
    tasks = load_task_sets(config.tasks, Path(config.cache_dir))
    tasks = dataclasses.replace(tasks, heldout=tasks.heldout or tasks.train)
    if config.campaign.eval_tasks == 0:
        raise UserError("campaign.eval_tasks=0: there is nothing to evaluate on")
    with open_campaign(config, tasks, Path(config.run.root) / "evaluations" / config.run.name) as campaign:
        records = campaign.evaluate_policy(policy) if policy is not None else campaign.evaluate(0)
        tables = {
            harness: tabulate(record for record in records if record.key.harness == harness)
            for harness in config.harness.names
            if any(record.verdict for record in records if record.key.harness == harness)
        }
        write_atomic(campaign.paths.finished, msgspec.json.format(msgspec.json.encode(tables)))
        Console().print(as_table(str(policy.folder if policy is not None else endpoint.model), tables))
        for harness in sorted(set(config.harness.names) - tables.keys()):
            log.warning("%s: every rollout has failed; see the log of the worker, or the run's page", harness)
        log.info("as JSON: %s", campaign.paths.finished)


def as_table(policy: str, tables: dict[str, PassTable]) -> Table:
    """One row per harness; every number with its 95 % interval over tasks."""
    table = Table(title=f"{policy} (95 % intervals over tasks)")
    ks = sorted({k for passed in tables.values() for k in passed.pass_at_k})
    for column in ("harness", "tasks", "rollouts", "failed", "retried", "reward", "pass@1", *(f"pass@{k}" for k in ks)):
        table.add_column(column)
    for harness, passed in tables.items():
        counts = (passed.num_tasks, passed.num_rollouts, passed.num_failed, passed.num_retried)
        rates = (passed.mean_reward, passed.pass_at_1, *(passed.pass_at_k.get(k, "") for k in ks))
        table.add_row(harness, *map(str, counts), *map(str, rates))
    return table


main = entry_point(as_campaign(evaluate))

if __name__ == "__main__":
    main()
