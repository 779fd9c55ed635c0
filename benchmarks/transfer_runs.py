"""The runs of the study of transfer: which there are, how they are made, and what their folders say."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.kept import Machine, Rollout, gain, keep_rollout, machine_of, pass_at_1, read_kept, write_kept
from clawhpc.harness.registry import ADAPTERS
from clawhpc.passrate import Estimate
from clawhpc.paths import RunPaths
from clawhpc.store import read_plans, read_rollouts

EXPERIMENT = "transfer"
HARNESSES = {"whitebox": "whitebox", "claude_code": "Claude Code", "pi": "Pi"}
"""Those of the cold start and of every evaluation -> how the page calls them."""
REAL = ("claude_code", "pi")
START, OPEN_LOOP = "start", "whitebox"
"""The arms that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the tables: a policy for each seed."""

    key: str
    """In the names of its runs."""
    name: str
    harnesses: tuple[str, ...] = ()
    """In which it is trained; none: it is the start itself."""
    from_start: bool = True
    """Whether it begins with the start, or with the same shape and tokenizer and random weights."""


ARMS = (
    Arm(key=START, name="untrained start"),
    Arm(key=OPEN_LOOP, name="trained in whitebox", harnesses=("whitebox",)),
    *(Arm(key=key, name=f"trained in {HARNESSES[key]}", harnesses=(key,)) for key in REAL),
    Arm(key="mixed", name=f"trained in {' and '.join(HARNESSES[key] for key in REAL)}", harnesses=REAL),
    Arm(key="fresh", name="without cold start, in Claude Code", harnesses=("claude_code",), from_start=False),
)
TRAINED = [arm for arm in ARMS if arm.harnesses]
CHANGED = [arm for arm in TRAINED if arm.from_start]


@dataclass(frozen=True, kw_only=True)
class Study:
    """All runs, what they do, and where they lie."""

    seeds: tuple[int, ...] = (0, 1, 2)
    root: Path = Path("runs/transfer")
    page: Path = Path("docs/results/transfer.md")
    overrides: tuple[str, ...] = ()
    """Of every command, for a study in miniature."""

    def command(self, name: str, run: str, seed: int, *overrides: str) -> list[str]:
        """As a person types it."""
        common = (f"experiment={EXPERIMENT}", f"seed={seed}", f"run.root={self.root}", f"run.name={run}_{seed}")
        return ["python", "-m", f"clawhpc.{name}", *common, *overrides, *self.overrides]

    def sft(self, seed: int) -> list[str]:
        """Makes the start."""
        return self.command("sft", START, seed, f"policy.folder={self.start(seed)}")

    def train(self, arm: Arm, seed: int) -> list[str]:
        """Trains an arm."""
        start = self.start(seed) if arm.from_start else self.fresh(seed)
        names = f"harness.names=[{','.join(arm.harnesses)}]"
        return self.command("train", arm.key, seed, names, f"policy.folder={start}", "campaign.eval_tasks=0")

    def evaluate(self, seed: int) -> list[str]:
        """Evaluates what came of all arms in every harness; a run's folder stands for its last policy."""
        folders = {START: self.start(seed)} | {arm.key: finished_run(self.runs(arm, seed)).root for arm in TRAINED}
        policies = (f"evaluate.policies.{key}={folder}" for key, folder in folders.items())
        return self.command("evaluate", "arms", seed, *policies)

    def commands(self, seed: int) -> Iterator[tuple[Path, list[str]]]:
        """All of one seed, each with the folder of its runs; a command may name what those before it have made."""
        yield self.cold_starts(seed), self.sft(seed)
        for arm in TRAINED:
            yield self.runs(arm, seed), self.train(arm, seed)
        yield self.evaluations(seed), self.evaluate(seed)

    def start(self, seed: int) -> Path:
        """The policy that the cold start makes."""
        return self.root / "policies" / f"start-{seed}"

    def fresh(self, seed: int) -> Path:
        """The policy that the cold start began with."""
        return finished_run(self.cold_starts(seed)).root / "lessons" / "fresh"

    def cold_starts(self, seed: int) -> Path:
        """Folder of the runs of `sft`."""
        return self.root / "cold_starts" / f"{START}_{seed}"

    def runs(self, arm: Arm, seed: int) -> Path:
        """Folder of the runs of `train`."""
        return self.root / f"{arm.key}_{seed}"

    def evaluations(self, seed: int) -> Path:
        """Folder of the runs of `evaluate`."""
        return self.root / "evaluations" / f"arms_{seed}"

    def kept(self, seed: int) -> Path:
        """What the runs of a seed have found."""
        return self.page.with_suffix("") / f"seed_{seed}.json"


def finished_run(folder: Path) -> RunPaths:
    """The newest run in `folder` that has ended as planned. SystemExit where there is none."""
    for root in sorted(folder.glob("[0-9]*"), reverse=True):
        if RunPaths(root).finished.exists():
            return RunPaths(root)
    raise SystemExit(f"no finished run in {folder}")


# ---------------------------------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------------------------------


def make_runs(study: Study) -> None:
    """Run what has not finished yet, seed after seed, and keep what each seed has found."""
    for seed in study.seeds:
        if not study.kept(seed).exists():
            run_seed(study, seed)
            write_kept(study.kept(seed), find(study, seed))


def run_seed(study: Study, seed: int) -> None:
    """What has not finished yet of it."""
    for folder, command in study.commands(seed):
        run_unless_finished(folder, command)


def run_unless_finished(folder: Path, command: list[str]) -> None:
    """The output goes to the terminal; a command that fails ends us."""
    try:
        finished_run(folder)
    except SystemExit:
        print(" ".join(command), flush=True)
        began = time.monotonic()
        subprocess.run([sys.executable, *command[1:]], check=True)
        print(f"{folder.name}: {command[2]} took {time.monotonic() - began:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What they say
# ---------------------------------------------------------------------------------------------------------------------

COLUMNS = ("train/reward", "train/no_credit_share", "time/collect_s", "time/learn_s")
"""Of metrics.csv, that the page shows."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Of one arm with one seed."""

    num_rollouts: int
    columns: dict[str, list[float]]
    """Those of `COLUMNS`, a value for each step."""


@dataclass(frozen=True, kw_only=True)
class SeedFindings:
    """What the runs of one seed say, as it is kept beside the page."""

    machine: Machine
    versions: dict[str, str]
    """Of the real harnesses."""
    commands: list[str]
    evaluations: dict[str, list[Rollout]]
    """Arm -> its rollouts in all harnesses."""
    trainings: dict[str, Training]
    """Arm -> what its training took and gave."""


def find(study: Study, seed: int) -> SeedFindings:
    """From the runs' folders. SystemExit where a run has not finished."""
    evaluation = finished_run(study.evaluations(seed))
    return SeedFindings(
        machine=machine_of(evaluation),
        versions={name: ADAPTERS[name].version for name in REAL},
        commands=[" ".join(command) for _, command in study.commands(seed)],
        evaluations=find_evaluations(evaluation),
        trainings={arm.key: find_training(finished_run(study.runs(arm, seed))) for arm in TRAINED},
    )


def find_evaluations(paths: RunPaths) -> dict[str, list[Rollout]]:
    """See `SeedFindings.evaluations`. Arms with the same weights, where training had nothing to learn from, have the same
    rollouts.
    """
    cells = msgspec.json.decode(paths.finished.read_bytes())["cells"]  # as clawhpc.evaluation.Cell
    by_step: dict[int, list[Rollout]] = {}
    for record in read_rollouts(paths, "eval"):
        by_step.setdefault(record.key.step, []).append(keep_rollout(record))
    return {cell["policy"]: by_step.get(cell["step"], []) for cell in cells}


def find_training(paths: RunPaths) -> Training:
    """Of one run."""
    with paths.metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    groups = (group for plan in read_plans(paths) if plan.phase == "train" for group in plan.groups)
    return Training(
        num_rollouts=sum(group.num_samples for group in groups),
        columns={name: [float(row[name] or 0) for row in rows] for name in COLUMNS},
    )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the page is made of."""

    seeds: dict[int, SeedFindings]

    def rollouts(self, arm: str, harness: str | None = None, *seeds: int) -> list[Rollout]:
        """Those of the evaluations of `arm`: in `harness` or in all, of `seeds` or of all. Each seed has tasks of its own."""
        return [
            msgspec.structs.replace(one, task=f"{seed}/{one.task}")
            for seed in seeds or self.seeds
            for one in self.seeds[seed].evaluations[arm]
            if harness in (None, one.harness)
        ]

    def rate(self, arm: str, harness: str, *seeds: int) -> Estimate | None:
        """pass@1 over `seeds`, or over all; None where every rollout has failed."""
        return pass_at_1(self.rollouts(arm, harness, *seeds))

    def gain(self, arm: str, base: str, harness: str, *seeds: int) -> Estimate:
        """pass@1 of `arm` minus that of the arm `base`, paired by task."""
        return gain(self.rollouts(base, harness, *seeds), self.rollouts(arm, harness, *seeds))

    def trainings(self, arm: str) -> list[Training]:
        """One for each seed."""
        return [seed.trainings[arm] for seed in self.seeds.values()]


def read_findings(study: Study) -> Findings:
    """From what is kept. SystemExit where that of a seed is missing."""
    return Findings(seeds={seed: read_kept(study.kept(seed), SeedFindings) for seed in study.seeds})
