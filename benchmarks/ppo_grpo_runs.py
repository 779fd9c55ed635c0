"""The runs of `benchmarks.ppo_grpo`: which they are, and what each of them says."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.kept import Machine, Rollout, keep_rollout, machine_of, read_kept, write_kept
from benchmarks.transfer_runs import finished_run, run_unless_finished
from clawhpc.store import read_rollouts

EXPERIMENT = "ppo_grpo"
ALGORITHMS = {"grpo": "dapo", "ppo": "ppo"}
"""Arm -> what it is in conf/algorithm/."""
NAMES = {"grpo": "GRPO", "ppo": "PPO"}
LONG_SEED = 0
LONG_STEPS = 200
MORE_SEEDS = (1, 2)
MORE_STEPS = 60
FALL = 0.1
"""By which the smoothed reward may fall below an earlier one in a run that is called stable: about four standard errors
of a mean over twenty steps of eight tasks each, which are not all equally hard.
"""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run: an algorithm with a seed."""

    algorithm: str
    """A key of `ALGORITHMS`."""
    seed: int
    num_steps: int

    @property
    def name(self) -> str:
        """In tables and legends."""
        return f"{NAMES[self.algorithm]}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """All runs, what they do, and where they lie."""

    steps: tuple[tuple[int, int], ...] = ((LONG_SEED, LONG_STEPS),)
    """Of each seed, how many."""
    root: Path = Path("runs/ppo_grpo")
    page: Path = Path("docs/results/ppo_grpo.md")
    window: int = 20
    """Steps of which the smoothed curves and the judgements show the mean."""
    overrides: tuple[str, ...] = ()
    """Of every command, for a study in miniature."""

    @property
    def arms(self) -> list[Arm]:
        """In the order of the tables."""
        return [
            Arm(algorithm=algorithm, seed=seed, num_steps=num_steps)
            for seed, num_steps in self.steps
            for algorithm in ALGORITHMS
        ]

    def command(self, name: str, seed: int, run: str, *overrides: str) -> list[str]:
        """As a person types it."""
        common = (f"experiment={EXPERIMENT}", f"seed={seed}", f"run.root={self.root}", f"run.name={run}")
        return ["python", "-m", f"clawhpc.{name}", *common, *overrides, *self.overrides]

    def sft(self, seed: int) -> list[str]:
        """Makes the policy that both begin with."""
        return self.command("sft", seed, f"start_{seed}", f"policy.folder={self.start(seed)}")

    def train(self, arm: Arm) -> list[str]:
        """Trains and evaluates."""
        chosen = (f"algorithm={ALGORITHMS[arm.algorithm]}", f"campaign.num_steps={arm.num_steps}")
        return self.command("train", arm.seed, self.run_name(arm), *chosen, f"policy.folder={self.start(arm.seed)}")

    def run_name(self, arm: Arm) -> str:
        """Of its runs."""
        return f"{arm.algorithm}_{arm.seed}"

    def start(self, seed: int) -> Path:
        """The policy of the cold start."""
        return self.root / "policies" / f"start-{seed}"

    def cold_starts(self, seed: int) -> Path:
        """Folder of the runs of `sft`."""
        return self.root / "cold_starts" / f"start_{seed}"

    def runs(self, arm: Arm) -> Path:
        """Folder of the runs of `train`."""
        return self.root / self.run_name(arm)

    def kept(self, arm: Arm) -> Path:
        """What a run has found."""
        return self.page.with_suffix("") / f"{self.run_name(arm)}.json"


def make_runs(study: Study) -> None:
    """Run what has not finished yet, and keep what each run has found."""
    for arm in study.arms:
        if not study.kept(arm).exists():
            run_arm(study, arm)
            write_kept(study.kept(arm), find(study, arm))


def run_arm(study: Study, arm: Arm) -> None:
    """What has not finished yet of it."""
    run_unless_finished(study.cold_starts(arm.seed), study.sft(arm.seed))
    run_unless_finished(study.runs(arm), study.train(arm))


COLUMNS = (
    *("train/reward", "train/entropy", "train/clip_share", "train/truncated_share", "train/grad_norm"),
    *("train/update_kl", "train/no_credit_share", "train/skipped_updates", "train/sampling_gap_max"),
    *("credit/explained_variance", "time/collect_s", "time/learn_s"),
)
"""Of metrics.csv, that the page shows."""
NAMED = {"campaign": ("groups_per_step", "samples_per_group"), "learner": ("epochs", "lr", "schedule")}
"""Of the config, what the page names."""


@dataclass(frozen=True, kw_only=True)
class RunFindings:
    """What a finished run says, as it is kept beside the page."""

    machine: Machine
    commands: list[str]
    """The cold start's, and the run's own."""
    config: dict[str, Any]
    """The parts that the page names, as in the run's config.yaml."""
    columns: dict[str, list[float | None]]
    """Those of `COLUMNS` that the run has, a value for each step; None where a step has none: it taught nothing."""
    before: list[Rollout]
    """The evaluation before training."""
    after: list[Rollout]
    outcomes: dict[str, int]
    """Of all rollouts, those of training too."""


def find(study: Study, arm: Arm) -> RunFindings:
    """From a run's folder. SystemExit where it has not finished."""
    paths = finished_run(study.runs(arm))
    config = msgspec.yaml.decode(paths.config.read_bytes())
    with paths.metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    outcomes = Counter[str]()
    evaluations: dict[int, list[Rollout]] = {}
    for record in read_rollouts(paths):
        outcomes[str(record.outcome)] += 1
        if record.key.phase == "eval":
            evaluations.setdefault(record.key.step, []).append(keep_rollout(record))
    return RunFindings(
        machine=machine_of(paths),
        commands=[" ".join(study.sft(arm.seed)), " ".join(study.train(arm))],
        config={name: {key: config[name][key] for key in keys} for name, keys in NAMED.items()},
        columns={
            name: [float(row[name]) if row[name] else None for row in rows] for name in COLUMNS if name in rows[0]
        },
        before=evaluations[min(evaluations)],
        after=evaluations[max(evaluations)],
        outcomes=dict(outcomes.most_common()),
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run, with what was made of its findings."""

    arm: Arm
    found: RunFindings
    window: int

    @property
    def num_steps(self) -> int:
        """Of training."""
        return len(self.found.columns["train/reward"])

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a column, where it has one: a step that teaches nothing has no update."""
        return [(step, value) for step, value in enumerate(self.found.columns.get(name, ())) if value is not None]

    def smooth(self, name: str) -> list[tuple[int, float]]:
        """Each the mean of the last `window` values; none before there are so many."""
        curve = self.curve(name)
        return [
            (step, fmean(value for _, value in curve[at + 1 - self.window : at + 1]))
            for at, (step, _) in enumerate(curve)
            if at + 1 >= self.window
        ]

    def first(self, name: str) -> float | None:
        """Mean over the first `window` values; None where the column is empty."""
        values = [value for _, value in self.curve(name)[: self.window]]
        return fmean(values) if values else None

    def last(self, name: str) -> float | None:
        """Mean over the last ones."""
        values = [value for _, value in self.curve(name)[-self.window :]]
        return fmean(values) if values else None

    def largest(self, name: str) -> float | None:
        """Over all steps."""
        return max((value for _, value in self.curve(name)), default=None)

    def total(self, name: str) -> float:
        """Over all steps."""
        return sum(value for _, value in self.curve(name))

    @property
    def fall(self) -> tuple[float, int, int]:
        """The most by which the smoothed reward fell below an earlier one, and the steps of both."""
        largest, best = (0.0, 0, 0), (float("-inf"), 0)
        for step, value in self.smooth("train/reward"):
            best = max(best, (value, -step))  # of equals the first
            largest = max(largest, (best[0] - value, -best[1], step), key=lambda fall: fall[0])
        return largest

    @property
    def stable(self) -> bool:
        """By the rule that the page states."""
        return self.fall[0] <= FALL and not self.total("train/skipped_updates")


def read_result(study: Study, arm: Arm) -> Result:
    """From what is kept. SystemExit where there is nothing."""
    return Result(arm=arm, found=read_kept(study.kept(arm), RunFindings), window=study.window)
