"""The runs of the study of transfer: which there are, how they are made, and what their folders say."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec

from clawhpc.evaluation import lighten
from clawhpc.passrate import Estimate, paired_difference, tabulate
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from clawhpc.store import read_rollouts
from clawhpc.verify.shape import malformed_share

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
    """Run what has not finished yet, seed after seed."""
    for seed in study.seeds:
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


@dataclass(frozen=True)
class Replies:
    """How many, and how many of them a harness can do nothing with."""

    num: int = 0
    malformed: float = 0.0
    """Those whose tool call nobody could read, or was of a tool that nobody offered."""
    cut: int = 0
    """Those that ran into the limit of tokens."""

    def with_rollout(self, record: RolloutRecord) -> Replies:
        """Those of `record` too."""
        replies = [call.reply for call in record.calls if call.reply]
        return Replies(
            self.num + len(replies),
            self.malformed + len(replies) * malformed_share(record.calls),
            self.cut + sum(reply.finish_reason == "length" for reply in replies),
        )

    def __str__(self) -> str:
        return f"{self.malformed / self.num:.0%} malformed, {self.cut / self.num:.0%} cut" if self.num else "—"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the page is made of."""

    study: Study
    evaluations: dict[tuple[str, int], list[RolloutRecord]]
    """Arm and seed -> rollouts; task ids begin with the seed, for each has tasks of its own."""
    replies: defaultdict[tuple[str, str], Replies]
    """Arm and harness -> those of its evaluations, all seeds together."""
    steps: dict[tuple[str, int], list[dict[str, str]]]
    """Trained arm and seed -> rows of metrics.csv."""

    def rollouts(self, key: str, harness: str, seeds: Sequence[int]) -> list[RolloutRecord]:
        """Those of arm `key` in `harness`."""
        return [one for seed in seeds for one in self.evaluations[key, seed] if one.key.harness == harness]

    def rate(self, key: str, harness: str, *seeds: int) -> Estimate | None:
        """pass@1 over `seeds`, or over all; None where every rollout has failed."""
        return tabulate(self.rollouts(key, harness, seeds or self.study.seeds)).pass_at_1

    def gain(self, key: str, base: str, harness: str, *seeds: int) -> Estimate:
        """pass@1 of arm `key` minus that of arm `base`, paired by task."""
        seeds = seeds or self.study.seeds
        return paired_difference(self.rollouts(base, harness, seeds), self.rollouts(key, harness, seeds))

    def total(self, key: str, column: str) -> float:
        """Sum of a column of metrics.csv over steps and seeds."""
        return sum(float(row[column] or 0) for seed in self.study.seeds for row in self.steps[key, seed])

    @property
    def last_day(self) -> date:
        """On which the last run ended."""
        folders = (self.study.evaluations(seed) for seed in self.study.seeds)
        return date.fromtimestamp(max(finished_run(folder).finished.stat().st_mtime for folder in folders))


def read_findings(study: Study) -> Findings:
    """From the folders of the runs."""
    found = Findings(
        study=study,
        evaluations={},
        replies=defaultdict(Replies),
        steps={(arm.key, seed): read_steps(study, arm, seed) for arm in TRAINED for seed in study.seeds},
    )
    for seed in study.seeds:
        read_evaluation(found, seed)
    return found


def read_evaluation(found: Findings, seed: int) -> None:
    """Add what the evaluation of `seed` says."""
    paths = finished_run(found.study.evaluations(seed))
    cells = msgspec.json.decode(paths.finished.read_bytes())["cells"]  # as clawhpc.evaluation.Cell
    arms = {cell["step"]: cell["policy"] for cell in cells}
    found.evaluations.update({(arm, seed): [] for arm in arms.values()})
    for record in read_rollouts(paths, "eval"):
        arm, key = arms[record.key.step], dataclasses.replace(record.key, task_id=f"{seed}/{record.key.task_id}")
        found.evaluations[arm, seed].append(dataclasses.replace(lighten(record), key=key))
        found.replies[arm, key.harness] = found.replies[arm, key.harness].with_rollout(record)


def read_steps(study: Study, arm: Arm, seed: int) -> list[dict[str, str]]:
    """See `Findings.steps`."""
    with finished_run(study.runs(arm, seed)).metrics_csv.open(newline="") as file:
        return list(csv.DictReader(file))
