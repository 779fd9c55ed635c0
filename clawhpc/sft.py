"""Make the policy that training starts from: python -m clawhpc.sft experiment=quickstart"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.loop import cpu_by_part, make_plan
from clawhpc.campaign.run import find_run, open_run
from clawhpc.config import RunConfig, entry_point, former_turn_s
from clawhpc.job import as_campaign
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.turn import this_job
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, TaskSpec
from clawhpc.store import publish_plan, read_policy, read_step, unsealed_groups, write_atomic
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.generate import generate_tasks
from clawhpc.tasks.oracle import task_solution

log = logging.getLogger(__name__)


def sft(config: RunConfig) -> None:
    """Capture the oracle at work in each harness, teach a fresh policy, publish it in the policy folder.

    A policy that is there stays as it is. After a kill the same command goes on where it was.
    """
    output = config.policy_folder()
    runs, content = Path(config.run.root) / "cold_starts" / config.run.name, msgspec.yaml.encode(config)
    if output.exists() and find_run(runs, content) is None:
        log.info("the policy %s is there already", read_policy(output).path)
        return
    with open_run(runs, content, wait_s=former_turn_s()) as paths:
        began, cpu_began_s = time.monotonic(), time.process_time()
        tasks = capture_tasks(config, paths.root / "tasks")
        records = capture(config, paths, tasks)
        captured = time.monotonic()
        teach(config, paths, tasks, records, output)
        wall_s = {"capture": captured - began, "lessons": time.monotonic() - captured}
        result = {"policy": str(output), "wall_s": wall_s, "cpu_s": cpu_by_part(paths, cpu_began_s)}
        write_atomic(paths.finished, msgspec.json.format(msgspec.json.encode(result)))
    log.info("finished; the policy is %s", output)


def capture_tasks(config: RunConfig, folder: Path) -> tuple[TaskSpec, ...]:
    """The tasks that the oracle solves, as many of each family."""
    num_tasks = len(config.tasks.generate.families) * config.cold_start.traces_per_family
    settings = dataclasses.replace(config.tasks.generate, num_train=num_tasks, num_heldout=0)
    return load_tasks(generate_tasks(settings, folder).split("train")).tasks


def capture(config: RunConfig, paths: RunPaths, tasks: Sequence[TaskSpec]) -> list[RolloutRecord]:
    """One rollout of each task in each harness, with the oracle in the policy's place; those that are there stay."""
    pairs = [(task, harness) for task in tasks for harness in config.harness.names]
    plan = publish_plan(paths, make_plan("capture", 0, pairs, num_samples=1))
    if unsealed_groups(paths, plan):
        with (
            Ledger.open(config.scratch_root(), job=this_job()) as ledger,
            WorkerPool(config.launch, config.worker_spec(paths.root), ledger) as pool,
        ):
            Collector(paths, pool, config.campaign.stall_min).collect(plan)
    return read_step(paths, plan)


def teach(
    config: RunConfig, paths: RunPaths, tasks: Sequence[TaskSpec], records: Sequence[RolloutRecord], output: Path
) -> None:
    """From the captured conversations to a policy in `output`."""
    from clawhpc.learner.cold_start import make_policy  # torch: not before it is needed
    from clawhpc.learner.traces import read_book

    solutions = {task.task_id: task_solution(task) for task in tasks}
    book = read_book((record, solutions[record.key.task_id]) for record in records)
    learner = config.learner_settings()
    make_policy(config.cold_start, config.policy.shape, learner, book, folder=paths.root / "lessons", output=output)


main = entry_point(as_campaign(sft))

if __name__ == "__main__":
    main()
