"""Make the policy that training starts from: python -m clawhpc.sft experiment=quickstart

Or imitate recorded rollouts, of any policy or model: python -m clawhpc.sft sft.runs=[RUN,...] policy.folder=FOLDER
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

import msgspec

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import install_policy
from clawhpc.campaign.loop import cpu_by_part, make_plan
from clawhpc.campaign.run import find_run, finished_before, open_run
from clawhpc.config import RunConfig, entry_point, former_turn_s
from clawhpc.errors import UserError
from clawhpc.job import as_campaign
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.turn import this_job, this_turn
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, TaskSpec
from clawhpc.store import (
    publish_plan,
    read_policy,
    read_rollouts,
    read_step,
    rollout_files,
    unsealed_groups,
    write_atomic,
)
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.generate import generate_tasks
from clawhpc.tasks.oracle import task_solution
from clawhpc.tasks.sets import load_task_sets
from clawhpc.verify.settings import VerifySettings

log = logging.getLogger(__name__)


def sft(config: RunConfig) -> None:
    """From recorded runs where `sft.runs` names some, else the cold start. After a kill the same command goes on."""
    if config.sft.runs:
        sft_recorded(config)
    else:
        cold_start(config)


def cold_start(config: RunConfig) -> None:
    """Capture the oracle at work in each harness, teach a fresh policy, publish it in the policy folder.

    A policy that is there stays as it is. UserError where the settings name a model from elsewhere.
    """
    output = config.policy_folder()
    if config.policy.renderer:
        raise UserError(
            f"policy.renderer={config.policy.renderer}: a cold start makes a tiny policy of its own, no model from "
            "elsewhere; what that one is to imitate stands in sft.runs"
        )
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
    """One rollout of each task in each harness, with the oracle in the policy's place; those that are there stay.

    Scripts verify these tasks, whoever judges others.
    """
    config = dataclasses.replace(config, verify=VerifySettings())
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


# ---------------------------------------------------------------------------------------------------------------------
# Recorded rollouts
# ---------------------------------------------------------------------------------------------------------------------


def sft_recorded(config: RunConfig) -> None:
    """Teach the policy that the settings name what the rollouts of `sft.runs` did well; PolicyVersion 1 of a new run.

    Rollouts on the tasks that are held out for evaluation are left out. UserError where a run has no rollouts, or none
    that is good enough.
    """
    folder, content = Path(config.run.root) / "sft" / config.run.name, msgspec.yaml.encode(config)
    if finished_before(folder, content, this_turn()):
        return
    source, runs = config.policy_source(), [recorded_run(Path(run)) for run in config.sft.runs]
    heldout = {
        (task.task_id, task.instruction) for task in load_task_sets(config.tasks, Path(config.cache_dir)).heldout
    }
    with open_run(folder, content, wait_s=former_turn_s(), turn=this_turn()) as paths:
        install_policy(paths, source)
        result = imitate_runs(config, paths, runs, heldout)
        write_atomic(paths.finished, msgspec.json.format(msgspec.json.encode(result)))
    log.info("finished; the policy is %s", result["policy"])


def recorded_run(root: Path) -> RunPaths:
    """A run that has rollouts."""
    paths = RunPaths(root)
    if not rollout_files(paths):
        raise UserError(f"sft.runs: {root} holds no rollouts; name the folder of a run, such as runs/default/001")
    return paths


def imitate_runs(
    config: RunConfig, paths: RunPaths, runs: Sequence[RunPaths], heldout: Container[tuple[str, str]]
) -> dict[str, object]:
    """What came of it. The policy to teach is PolicyVersion 0 of `paths`, and that which is taught 1."""
    from clawhpc.learner.imitation import Lesson, imitate  # torch: not before it is needed
    from clawhpc.learner.recorded import Student, choose
    from clawhpc.learner.trainer import LearnerPaths

    student, lessons, left_out = Student(paths.policy(0)), [], Counter[str]()
    for run in runs:
        choice = choose(read_rollouts(run), config.sft, heldout)
        left_out += choice.left_out
        for record in choice.records:
            tree = student.tree(run, record)
            if tree is None:
                left_out["no_tree"] += 1
            else:
                lessons.append(Lesson(task_id=record.key.task_id, tree=tree))
    said = (
        f"{len(lessons)} rollouts to imitate, {student.num_encoded} of them from their text; left out: {dict(left_out)}"
    )
    if not lessons:
        raise UserError(f"sft.min_reward={config.sft.min_reward}: {said}")
    log.info(said)
    losses = imitate(
        config.sft,
        config.learner_settings(),
        lessons,
        policy=paths.policy(0),
        output=paths.policy(1),
        step=1,
        paths=LearnerPaths(checkpoints=paths.checkpoints, metrics=paths.metrics),
    )
    return {
        "policy": str(paths.policy(1)),
        "rollouts": len(lessons),
        "encoded_from_text": student.num_encoded,
        "left_out": left_out,
        "heldout_loss": losses,
    }


main = entry_point(as_campaign(sft))

if __name__ == "__main__":
    main()
