"""The loop.

    evaluate(0) → [ collect(k) → update → publish k+1 ] for each step k → evaluate(last)

By default step k is collected by PolicyVersion k, and workers rest while the learner learns. One step ahead, they have
the plan of step k+1 before the learner begins step k, and collect it meanwhile, by PolicyVersion k. A plan is a file,
so nothing else changes: no thread here, and what goes wrong with workers is met when their rollouts are needed.

Every stage leaves its result in files before the next begins, and looks for it first. So the same command after a kill
goes on where it was: plans that are there are taken as they are, rollouts that are there are not run again, the learner
continues from its newest checkpoint (law 8).
"""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

import msgspec

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.install import PolicySource, install_policy
from clawhpc.campaign.settings import CampaignSettings
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.hosts import THIS_HOST, Host
from clawhpc.learner.settings import LearnerSettings
from clawhpc.ledger import Ledger
from clawhpc.passrate import by_pair, paired_difference, tabulate
from clawhpc.paths import RunPaths
from clawhpc.records import GroupKey, GroupPlan, Phase, RolloutRecord, StepPlan, TaskSpec
from clawhpc.store import read_rollouts, read_usage, sweep_parts, write_atomic
from clawhpc.tasks.mix import ONE_TURN_EACH, Mix, check_mix, plan_groups
from clawhpc.tasks.sets import TaskSets

log = logging.getLogger(__name__)


class Campaign:
    """One run of the loop, in one folder."""

    def __init__(
        self,
        settings: CampaignSettings,
        *,
        paths: RunPaths,
        collector: Collector,
        ledger: Ledger,
        tasks: TaskSets,
        harnesses: Sequence[str],
        mix: Mix,
        turns: Mapping[str, int] = ONE_TURN_EACH,
    ) -> None:
        """Evaluates on the held-out `tasks`, all of them: see `choose_heldout`."""
        self._cpu_began_s = time.process_time()
        self._settings = settings
        self.paths = paths
        self._collector = collector
        self._ledger = ledger
        self._tasks = {task.task_id: task for task in tasks.train}
        self._heldout = tasks.heldout
        self._harnesses = harnesses
        self._mix = mix
        self._turns = turns

    def run(
        self,
        learner: LearnerSettings,
        credit: CreditSettings,
        policy: PolicySource,
        hosts: Sequence[Host] = (THIS_HOST,),
    ) -> None:
        """Evaluate `policy`, train it on `hosts`, evaluate what came of it.

        UserError when there are too few tasks for a step, or not the GPUs that the learner is to have.
        """
        if self._settings.num_steps:
            check_mix(self._mix, self._settings.groups_per_step, len(self._tasks), len(self._harnesses), self._turns)
        from clawhpc.learner.callbacks import wandb_run  # torch: not before it is needed
        from clawhpc.learner.trainer import LearnerPaths, check_devices, fit_rl

        check_devices(learner)
        before = self.evaluate_policy(policy)
        minutes = f", {self._settings.train_min:g} minutes" if self._settings.train_min else ""
        log.info("training on %d tasks: at most %d steps%s", len(self._tasks), self._settings.num_steps, minutes)
        with wandb_run(self.paths, learner.wandb, self._ledger) as logger:
            last = fit_rl(
                learner,
                credit,
                policy=self.paths.policy(0),
                num_steps=self._settings.num_steps,
                collect=partial(self.collect, max_staleness=learner.max_staleness),
                policy_folder=self.paths.policy,
                paths=LearnerPaths(checkpoints=self.paths.checkpoints, metrics=self.paths.metrics),
                logger=logger,
                environment=self._ledger.environment,
                hosts=hosts,
                by_harness=len(self._harnesses) > 1,
            )
        self._finish(last, before, self.evaluate(last))

    def _finish(self, last: int, before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> None:
        """Say what training has changed, and mark the run as finished."""
        result: dict[str, object] = {
            "policy": str(self.paths.policy(last)),
            "steps": last,
            "cpu_s": cpu_by_part(self.paths, self._cpu_began_s),
        }
        if before and after:
            result |= {"before": tabulate(before), "after": tabulate(after)}
        if by_pair(before).keys() & by_pair(after).keys():
            difference = paired_difference(before, after)
            result["pass_at_1_difference"] = difference
            log.info("pass@1 has changed by %s (95 %% interval, paired by task) in %d steps", difference, last)
        sweep_parts(self.paths)
        write_atomic(self.paths.finished, msgspec.json.format(msgspec.json.encode(result)))
        log.info("finished; the trained policy is %s", self.paths.policy(last))

    def evaluate_policy(self, policy: PolicySource) -> list[RolloutRecord]:
        """Rollouts of a policy on the held-out tasks with each harness."""
        install_policy(self.paths, policy)
        return self.evaluate(0)

    def collect(self, step: int, max_staleness: int = 0) -> list[RolloutRecord] | None:
        """The rollouts of training step `step`; None when the time for training is over.

        They are drawn by the policy `max_staleness` steps before, and workers have the plans of so many further steps
        before this returns. A step that has a plan has begun, and is trained on, however late it has become: nothing is
        collected in vain, and a resume decides as the run did that was killed.
        """
        spent_s = seconds_trained(self.paths, step)
        if not self._begins(step, spent_s):
            log.info("%.1f minutes of training are over after %d steps", self._settings.train_min, step)
            return None
        records = self._collector.collect(self._plan(step, max_staleness))
        for ahead in range(step + 1, min(step + 1 + max_staleness, self._settings.num_steps)):
            if self._begins(ahead, spent_s):
                self._collector.begin(self._plan(ahead, max_staleness))
        return records

    def _begins(self, step: int, spent_s: float) -> bool:
        """There is time for training step `step`, or it has begun."""
        limit_s = 60 * self._settings.train_min
        return not limit_s or spent_s <= limit_s or self.paths.plan("train", step).exists()

    def _plan(self, step: int, max_staleness: int) -> StepPlan:
        """The plan of training step `step`, the same at any time."""
        pairs = plan_groups(
            list(self._tasks),
            self._harnesses,
            self._mix,
            step=step,
            num_groups=self._settings.groups_per_step,
            seed=self._settings.seed,
            turns=self._turns,
        )
        return make_plan(
            "train",
            step,
            [(self._tasks[task_id], harness) for task_id, harness in pairs],
            num_samples=self._settings.samples_per_group,
            policy_step=max(0, step - max_staleness),
            temperature=self._settings.temperature,
            seed=self._settings.seed,
        )

    def evaluate(self, policy_step: int) -> list[RolloutRecord]:
        """Rollouts of PolicyVersion `policy_step` on the held-out tasks with each harness."""
        pairs = [(task, harness) for task in self._heldout for harness in self._harnesses]
        if not pairs:
            return []
        plan = make_plan(
            "eval",
            policy_step,
            pairs,
            num_samples=self._settings.eval_samples,
            policy_step=policy_step,
            temperature=self._settings.temperature,
            seed=self._settings.seed,
        )
        records = self._collector.collect(plan)
        log.info(
            "after %d steps, pass@1 on %d held-out tasks with %s: %s",
            policy_step,
            len(self._heldout),
            " and ".join(self._harnesses),
            tabulate(records).pass_at_1,
        )
        return records


def cpu_by_part(paths: RunPaths, began_s: float) -> dict[str, float]:
    """CPU seconds of a run so far. `learner` is this process since its CPU time was `began_s`: not before a resume."""
    usage = read_usage(paths)
    return {
        "harness": sum(record.timings.harness_cpu_s for record in read_rollouts(paths)),
        "engine": sum(worker.engine_cpu_s for worker in usage),
        "proxy": sum(worker.own_cpu_s for worker in usage),
        "learner": time.process_time() - began_s,
    }


def seconds_trained(paths: RunPaths, step: int) -> float:
    """Wall time of the steps before `step` by the run's own log: waiting for rollouts, and learning.

    Rollouts that are collected while the learner learns cost no time of their own: no second counts twice.
    After a resume, which goes on from a checkpoint, the log has rows of steps that are made again.
    """
    if not paths.metrics_csv.exists():
        return 0.0
    with paths.metrics_csv.open(newline="") as file:
        done = [row for row in csv.DictReader(file) if int(row["step"]) < step]
    return sum(float(row["time/collect_s"]) + float(row["time/learn_s"]) for row in done)


def choose_heldout(tasks: TaskSets, num_tasks: int | None) -> tuple[TaskSpec, ...]:
    """The tasks to evaluate on: the first `num_tasks` that are held out, or all. UserError when there are fewer."""
    if num_tasks is not None and tasks.heldout and num_tasks > len(tasks.heldout):
        raise UserError(f"campaign.eval_tasks={num_tasks}: there are only {len(tasks.heldout)} to evaluate on")
    return tasks.heldout[:num_tasks]


def make_plan(
    phase: Phase,
    step: int,
    pairs: Sequence[tuple[TaskSpec, str]],
    *,
    num_samples: int,
    policy_step: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
) -> StepPlan:
    """The plan that collects `num_samples` rollouts of each (task, harness).

    Training draws differently at every step; evaluations of different steps draw with the same seeds.
    """
    draws = step if phase == "train" else 0
    groups = tuple(
        GroupPlan(
            key=GroupKey(phase=phase, step=step, task_id=task.task_id, harness=harness),
            task=task,
            num_samples=num_samples,
            seed=int.from_bytes(blake2b(f"{seed}/{phase}/{draws}/{index}".encode(), digest_size=4).digest()),
        )
        for index, (task, harness) in enumerate(pairs)
    )
    return StepPlan(phase=phase, step=step, policy_step=policy_step, temperature=temperature, groups=groups)
