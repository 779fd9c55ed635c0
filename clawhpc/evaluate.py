"""Compare policies: python -m clawhpc.evaluate evaluate.policies.start=FOLDER evaluate.policies.trained=RUN harness=pi

Each policy, with each harness, on each set of tasks. A run of its own holds all of it, whoever is compared: the same
command goes on after a kill, shows the tables again when nothing is missing, and with a policy more collects only that
one's rollouts. A model behind an API is a policy like any other: see docs/evaluation.md.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from pathlib import Path

import msgspec
from rich.console import Console

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import PolicySource, install_policy
from clawhpc.campaign.loop import choose_heldout, make_plan
from clawhpc.campaign.run import open_run
from clawhpc.campaign.settings import PolicyChoice
from clawhpc.config import RunConfig, check_tasks, entry_point, former_turn_s
from clawhpc.errors import UserError
from clawhpc.evaluation import (
    Cell,
    EngineShare,
    EvaluatedPolicy,
    EvaluatedSet,
    Evaluation,
    as_metrics,
    as_rows,
    as_tables,
    compare,
    lighten,
    make_cells,
)
from clawhpc.job import as_campaign
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.turn import this_job
from clawhpc.ledger import Ledger
from clawhpc.passrate import Price
from clawhpc.paths import RunPaths
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import EngineTime, RolloutRecord, StepPlan, TaskSpec, WorkerUsage
from clawhpc.store import (
    published_steps,
    read_policy,
    read_step,
    read_usage,
    restore_plan,
    unsealed_groups,
    weights_digest,
    withdraw_plans,
    write_atomic,
)
from clawhpc.tasks.sets import load_task_sets

log = logging.getLogger(__name__)

WIDTH = 120
"""Of tables in a file."""

Answerer = PolicySource | EndpointSettings
"""A policy in an engine of ours, or a model behind an API."""
TasksByName = dict[str, tuple[TaskSpec, ...]]
OpenPool = Callable[..., AbstractContextManager[WorkerPool]]
"""As `WorkerPool`."""


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """One policy on one set, with all harnesses."""

    policy: str
    set: str
    answerer: Answerer
    plan: StepPlan

    @property
    def endpoint(self) -> EndpointSettings:
        """Whom its workers ask; not set where they ask an engine of ours."""
        return self.answerer if isinstance(self.answerer, EndpointSettings) else EndpointSettings()


def evaluate(config: RunConfig, open_pool: OpenPool = WorkerPool) -> None:
    """Collect what is missing, and say what all of it says: tables here, JSON in the run's folder, W&B."""
    answerers, sets = choose_policies(config), choose_sets(config)
    with open_evaluation(config) as (paths, ledger):
        numbers = number_policies(paths, answerers)
        pairings = pair(config, answerers, numbers, sets)
        collect_missing(config, paths, partial(open_pool, ledger=ledger), pairings)
        evaluation = tell(config, paths, pairings, numbers, sets)
        Console(width=None if sys.stdout.isatty() else WIDTH).print(*as_tables(evaluation), sep="\n")
        for cell in evaluation.cells:
            if not cell.table.num_rollouts:
                log.warning("%s with %s on %s: every rollout has failed", cell.policy, cell.harness, cell.set)
        write_atomic(paths.finished, msgspec.json.format(msgspec.json.encode(evaluation)))
        log.info("as JSON: %s", paths.finished)
        if not paths.sent.exists():
            send(config, paths, ledger, evaluation)
            write_atomic(paths.sent, b"")


@contextmanager
def open_evaluation(config: RunConfig) -> Iterator[tuple[RunPaths, Ledger]]:
    """The run of this evaluation, the same one whoever is compared; within the block it is this process's alone."""
    folder = Path(config.run.root) / "evaluations" / config.run.name
    whoever = replace(config, policy=PolicyChoice(), evaluate=replace(config.evaluate, policies={}))
    with (
        open_run(folder, msgspec.yaml.encode(whoever), wait_s=former_turn_s(), reopen=True) as paths,
        Ledger.open(config.scratch_root(), job=this_job()) as ledger,
    ):
        log.info("run %s", paths.root)
        yield paths, ledger


# ---------------------------------------------------------------------------------------------------------------------
# Who, and on what
# ---------------------------------------------------------------------------------------------------------------------


def choose_policies(config: RunConfig) -> dict[str, Answerer]:
    """Name -> who answers, in the order given. UserError when one is not there, is no policy, or has no key here."""
    given = [(f"evaluate.policies.{name}", name, choice) for name, choice in config.evaluate.policies.items()]
    return {
        name: answerer
        for setting, named, choice in given or [("policy", name_policy(config), config.policy)]
        for name, answerer in find_answerers(config, setting, named, choice)
    }


def name_policy(config: RunConfig) -> str:
    """That of the one that `policy` names."""
    return config.policy.endpoint.model or config.policy_folder().name


def find_answerers(
    config: RunConfig, setting: str, name: str, choice: str | PolicyChoice
) -> Iterator[tuple[str, Answerer]]:
    """What `setting` names: one policy or, where its folder has a `*`, each that matches, as `name/MATCH`."""
    if isinstance(choice, str):
        choice = PolicyChoice(folder=choice, renderer=config.policy.renderer, thinking=config.policy.thinking)
    if choice.endpoint.is_set:
        choice.endpoint.key(f"{setting}.endpoint", os.environ)  # which its workers need, and nobody is to wait for them
        yield name, choice.endpoint
    elif "*" in (choice.folder or ""):
        for match, folder in find_matches(setting, str(choice.folder)):
            yield f"{name}/{match}", find_policy(config, choice, folder)
    else:
        yield name, find_policy(config, choice, choice.folder)


def find_matches(setting: str, pattern: str) -> list[tuple[str, str]]:
    """What of a path the pattern left open, and the path. UserError when nothing matches."""
    matches = sorted(glob.glob(pattern))
    if not matches:
        raise UserError(f"{setting}: no folder matches {pattern}")
    fixed = pattern[: pattern.index("*")].rpartition("/")[0]
    return [(str(Path(match).relative_to(fixed)), match) for match in matches]


def find_policy(config: RunConfig, choice: PolicyChoice, folder: str | None) -> PolicySource:
    """The policy in `folder`; of a run's folder, the last one. UserError when there is none."""
    if folder is not None and (steps := published_steps(RunPaths(Path(folder)))):
        folder = str(RunPaths(Path(folder)).policy(steps[-1]))
    chosen = replace(choice, folder=folder, shape=config.policy.shape)
    return replace(config, policy=chosen).policy_source()


def choose_sets(config: RunConfig) -> TasksByName:
    """Name -> tasks. UserError when there are too few, or as `check_tasks`."""
    cache_dir, num_tasks = Path(config.cache_dir), config.campaign.eval_tasks
    if num_tasks == 0:
        raise UserError("campaign.eval_tasks=0: there is nothing to evaluate on")
    loaded = {
        name: load_task_sets(replace(config.tasks, folder=folder, heldout=None), cache_dir)
        for name, folder in config.evaluate.sets.items()
    }
    sets = {
        name: choose_heldout(replace(one, heldout=one.heldout or one.train), num_tasks)
        for name, one in (loaded or {"heldout": load_task_sets(config.tasks, cache_dir)}).items()
    }
    check_tasks(config, [task for tasks in sets.values() for task in tasks])
    return sets


# ---------------------------------------------------------------------------------------------------------------------
# What is to be collected
# ---------------------------------------------------------------------------------------------------------------------


def number_policies(paths: RunPaths, answerers: Mapping[str, Answerer]) -> dict[str, int]:
    """Name -> number in this run, where each policy of ours is now; one that was there before keeps its number."""
    file = paths.policy_numbers
    numbers = msgspec.json.decode(file.read_bytes(), type=dict[str, int]) if file.exists() else {}
    digests = {name: digest_of(answerer) for name, answerer in answerers.items()}
    for digest in digests.values():
        numbers.setdefault(digest, len(numbers))
    write_atomic(file, msgspec.json.encode(numbers))
    for name, answerer in answerers.items():
        if isinstance(answerer, PolicySource):
            install_policy(paths, answerer, numbers[digests[name]])
    return {name: numbers[digest] for name, digest in digests.items()}


def digest_of(answerer: Answerer) -> str:
    """Equal for those that answer alike, whatever they are called: same weights and chat format, or same endpoint."""
    parts: tuple[object, ...]
    match answerer:
        case EndpointSettings():
            parts = (answerer.protocol, answerer.base_url, answerer.model, answerer.leave_out)
        case PolicySource(is_foreign=True):
            parts = (weights_digest(answerer.folder), answerer.renderer, answerer.thinking)
        case PolicySource():
            policy = read_policy(answerer.folder)
            parts = (policy.digest, policy.renderer, policy.thinking)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def pair(
    config: RunConfig, answerers: Mapping[str, Answerer], numbers: Mapping[str, int], sets: TasksByName
) -> list[Pairing]:
    """Every policy with every set. A policy's plans have the same steps in this run, whoever else is compared."""
    return [
        Pairing(
            policy=policy,
            set=name,
            answerer=answerer,
            plan=make_plan(
                "eval",
                numbers[policy] * len(sets) + index,
                [(task, harness) for task in tasks for harness in config.harness.names],
                num_samples=config.campaign.eval_samples,
                policy_step=numbers[policy],
                temperature=config.campaign.temperature,
                seed=config.campaign.seed,
            ),
        )
        for policy, answerer in answerers.items()
        for index, (name, tasks) in enumerate(sets.items())
    ]


def collect_missing(config: RunConfig, paths: RunPaths, open_pool: OpenPool, pairings: Sequence[Pairing]) -> None:
    """Have all plans collected: those of our own policies by one pool of workers, those of each endpoint by another."""
    for pairing in pairings:
        restore(paths, pairing)
    missing = [pairing for pairing in pairings if is_missing(paths, pairing.plan)]
    if missing:
        for told in (paths.finished, paths.sent):
            told.unlink(missing_ok=True)
    for endpoint in dict.fromkeys(pairing.endpoint for pairing in missing):
        asked = [pairing for pairing in missing if pairing.endpoint == endpoint]
        collect(replace(config, policy=PolicyChoice(endpoint=endpoint)), paths, open_pool, asked)


def is_missing(paths: RunPaths, plan: StepPlan) -> bool:
    """It has no file, or lacks a rollout."""
    return not paths.plan(plan.phase, plan.step).exists() or bool(unsealed_groups(paths, plan))


def restore(paths: RunPaths, pairing: Pairing) -> None:
    """Its plan, if it was ever begun, is there. UserError when it was made of other tasks."""
    before = restore_plan(paths, pairing.plan)
    if before is not None and before != pairing.plan:
        raise UserError(
            f"{paths.root}: {pairing.policy} was evaluated here on other tasks than those that the set {pairing.set} "
            "has now; to begin afresh, give it another run.name"
        )


def collect(config: RunConfig, paths: RunPaths, open_pool: OpenPool, pairings: Sequence[Pairing]) -> None:
    """Have the plans of `pairings` collected by workers as `config` wants them; no worker waits for the others."""
    withdraw_plans(paths, "eval")
    for pairing in pairings:
        restore(paths, pairing)
    theirs = frozenset(pairing.plan.policy_step for pairing in pairings)
    with open_pool(config.launch, replace(config.worker_spec(paths.root), policy_steps=theirs)) as pool:
        collector = Collector(paths, pool, config.campaign.stall_min)
        for pairing in pairings:
            collector.begin(pairing.plan)
        for pairing in pairings:
            cells = cells_of(config, pairing, collector.collect(pairing.plan))
            rates = ", ".join(f"{cell.table.pass_at_1} with {cell.harness}" for cell in cells)
            log.info("%s on %s: pass@1 %s", pairing.policy, pairing.set, rates)


# ---------------------------------------------------------------------------------------------------------------------
# What it says
# ---------------------------------------------------------------------------------------------------------------------


def tell(
    config: RunConfig, paths: RunPaths, pairings: Sequence[Pairing], numbers: Mapping[str, int], sets: TasksByName
) -> Evaluation:
    """Everything that the rollouts of all `pairings` say."""
    records = {(one.policy, one.set): [*map(lighten, read_step(paths, one.plan))] for one in pairings}
    first, *others = dict.fromkeys(one.policy for one in pairings)
    usage, engine = read_usage(paths), config.engine
    num_devices = engine.tensor_parallel_size * engine.data_parallel_size
    return Evaluation(
        run=str(paths.root),
        num_samples=config.campaign.eval_samples,
        temperature=config.campaign.temperature,
        policies=tuple(
            EvaluatedPolicy(name=name, source=spell_source(answerer), policy_step=numbers[name])
            for name, answerer in {one.policy: one.answerer for one in pairings}.items()
        ),
        sets=tuple(EvaluatedSet(name=name, num_tasks=len(tasks)) for name, tasks in sets.items()),
        harnesses=tuple(config.harness.names),
        cells=tuple(cell for one in pairings for cell in cells_of(config, one, records[one.policy, one.set])),
        differences=tuple(
            difference
            for other in others
            for name in sets
            for difference in compare(
                (first, other), name, config.harness.names, records[first, name], records[other, name]
            )
        ),
        engines=tuple(
            EngineShare(policy=one.policy, set=one.set, time=engine_time(usage, one.plan), num_devices=num_devices)
            for one in pairings
            if not one.endpoint.is_set
        ),
        cpu_s={
            "harness": fsum(record.timings.harness_cpu_s for some in records.values() for record in some),
            "engine": fsum(worker.engine_cpu_s for worker in usage),
            "proxy": fsum(worker.own_cpu_s for worker in usage),
        },
    )


def engine_time(usage: Sequence[WorkerUsage], plan: StepPlan) -> EngineTime:
    """What all workers together have spent on `plan`."""
    return sum((worker.engine_by_plan.get(plan.name, EngineTime()) for worker in usage), EngineTime())


def cells_of(config: RunConfig, pairing: Pairing, records: Sequence[RolloutRecord]) -> tuple[Cell, ...]:
    """Of one policy on one set."""
    price = price_of(pairing.answerer)
    return make_cells(pairing.policy, pairing.set, pairing.plan.step, config.harness.names, records, price)


def price_of(answerer: Answerer) -> Price | None:
    """Of a model behind an API, where its prices are set. What a policy of ours costs is no matter of dollars here."""
    if not isinstance(answerer, EndpointSettings):
        return None
    return answerer.cost_usd if answerer.are_known else None


def spell_source(answerer: Answerer) -> str:
    """For a person."""
    if isinstance(answerer, EndpointSettings):
        return f"{answerer.model} at {answerer.base_url}"
    return str(answerer.folder)


def send(config: RunConfig, paths: RunPaths, ledger: Ledger, evaluation: Evaluation) -> None:
    """To Weights & Biases: a table with a row for each cell, and each number by its name."""
    if config.learner.wandb == "disabled":
        return
    from clawhpc.learner.callbacks import wandb_run  # torch: not before it is needed

    columns, rows = as_rows(evaluation)
    with wandb_run(paths, config.learner.wandb, ledger) as logger:
        if logger:
            logger.log_table("cells", columns=columns, data=rows)
            logger.log_metrics(as_metrics(evaluation))


main = entry_point(as_campaign(evaluate))

if __name__ == "__main__":
    main()
