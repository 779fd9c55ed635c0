"""Make docs/results/transfer.md: policies trained in one harness or in several, each evaluated in every one of them.

    python -m benchmarks.transfer               # hours on two cores; goes on where it was stopped
    python -m benchmarks.transfer --only-write  # from the runs that are there

All arms of a seed begin with one policy, which was taught in all three harnesses, and see as many rollouts. Every number
in the page is read from the runs' folders; what stands in it from the heading of the notes on is kept.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec

from clawhpc.evaluation import lighten
from clawhpc.harness.registry import ADAPTERS
from clawhpc.passrate import Estimate, paired_difference, tabulate
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from clawhpc.store import read_plans, read_rollouts

EXPERIMENT = "transfer"
HARNESSES = {"whitebox": "whitebox", "claude_code": "Claude Code", "pi": "Pi"}
"""Those of the cold start and of every evaluation -> how the page calls them."""
REAL = ("claude_code", "pi")
START, OPEN_LOOP = "start", "whitebox"
"""The arms that the others are compared with."""
NOTES = "## Notes to these runs"


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


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the page is made of."""

    study: Study
    evaluations: dict[tuple[str, int], list[RolloutRecord]]
    """Arm and seed -> rollouts; task ids begin with the seed, for each has tasks of its own."""
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
    return Findings(
        study=study,
        evaluations={
            (key, seed): records for seed in study.seeds for key, records in read_evaluation(study, seed).items()
        },
        steps={(arm.key, seed): read_steps(study, arm, seed) for arm in TRAINED for seed in study.seeds},
    )


def read_evaluation(study: Study, seed: int) -> dict[str, list[RolloutRecord]]:
    """Arm -> rollouts. See `Findings.evaluations`."""
    paths = finished_run(study.evaluations(seed))
    cells = msgspec.json.decode(paths.finished.read_bytes())["cells"]  # as clawhpc.evaluation.Cell
    by_step: defaultdict[int, list[RolloutRecord]] = defaultdict(list)
    for record in map(lighten, read_rollouts(paths, "eval")):
        key = dataclasses.replace(record.key, task_id=f"{seed}/{record.key.task_id}")
        by_step[record.key.step].append(dataclasses.replace(record, key=key))
    return {cell["policy"]: by_step[cell["step"]] for cell in cells}


def read_steps(study: Study, arm: Arm, seed: int) -> list[dict[str, str]]:
    """See `Findings.steps`."""
    with finished_run(study.runs(arm, seed)).metrics_csv.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def plot(found: Findings, file: Path) -> None:
    """A panel for each harness of the evaluations: what the start has gained there, over all seeds and in each."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(HARNESSES), figsize=(11, 3.2), sharex=True, sharey=True, layout="constrained")
    for axes, (harness, name) in zip(panels, HARNESSES.items(), strict=True):
        for place, arm in enumerate(CHANGED):
            gain = found.gain(arm.key, START, harness)
            spread = [[gain.mean - gain.low], [gain.high - gain.mean]]
            met = harness in arm.harnesses
            axes.errorbar(gain.mean, place, xerr=spread, fmt="o", color="C0" if met else "C1", capsize=3)
            ones = [found.gain(arm.key, START, harness, seed).mean for seed in found.study.seeds]
            axes.plot(ones, [place + 0.22] * len(ones), "|", color="0.5")
        axes.axvline(0, color="0.5", lw=1)
        axes.set(title=f"evaluated in {name}", xlabel="gain in pass@1 over the start")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    panels[0].set_yticks(range(len(CHANGED)), [arm.name for arm in CHANGED])
    panels[0].invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def page(found: Findings) -> Iterator[str]:
    """The page, line by line."""
    study = found.study
    yield "# Where a policy trains, and where it is used"
    yield ""
    yield (
        f"{found.last_day.isoformat()}, {os.cpu_count()} cores ({platform.machine()}), no GPU. "
        "Made by `python -m benchmarks.transfer`."
    )
    yield ""
    yield from introduction(found)
    yield "![gain of each arm in each harness](transfer.png)"
    yield ""
    yield (
        "Blue: evaluated where it was trained; orange: elsewhere. Bars are 95 % intervals over tasks; "
        "a grey stroke is one seed."
    )
    yield ""
    yield "## pass@1"
    yield ""
    yield from table(ARMS, lambda arm, harness: str(found.rate(arm.key, harness) or "—"))
    yield "## What training has changed: pass@1 minus that of the start"
    yield ""
    yield from table(CHANGED, lambda arm, harness: bold(found.gain(arm.key, START, harness)))
    yield "## Against training in the open loop: pass@1 minus that of the arm trained in whitebox"
    yield ""
    others = [arm for arm in TRAINED if arm.key != OPEN_LOOP]
    yield from table(others, lambda arm, harness: bold(found.gain(arm.key, OPEN_LOOP, harness)))
    yield f"## Each seed by itself: pass@1 of seeds {', '.join(map(str, study.seeds))}"
    yield ""
    yield from table(ARMS, lambda arm, harness: each_seed(found, arm, harness))
    yield from training(found)
    yield from outcomes(found)
    yield "## Commands"
    yield ""
    yield f"Of seed {study.seeds[0]}; the others likewise."
    yield ""
    yield "```"
    yield from (" ".join(command) for _, command in study.commands(study.seeds[0]))
    yield "```"


def introduction(found: Findings) -> Iterator[str]:
    """What was done."""
    study = found.study
    num_steps = max(len(rows) for rows in found.steps.values())
    num_tasks = max(tabulate(records).num_tasks for records in found.evaluations.values())
    versions = " and ".join(f"{HARNESSES[name]} {ADAPTERS[name].version}" for name in REAL)
    yield (
        f"A policy of about a million parameters is taught the tools of three harnesses by imitation: {versions}, both real and "
        "unmodified, and `whitebox`, a small open tool loop of our own. From this one start it is trained by tree GRPO in the "
        "open loop, in one of the real harnesses, or in both of them, and then evaluated in all three, on the same held-out "
        f"tasks. Every arm has {num_steps} steps, all of as many rollouts: as much experience, not as much time. One arm begins "
        "without the cold start, with the same tokenizer and random weights."
    )
    yield ""
    yield (
        f"{len(study.seeds)} seeds, each with a cold start and {num_tasks} held-out tasks of its own; one rollout of each task in "
        "each harness, at temperature 1. Intervals are 95 %, by bootstrap over the tasks of all seeds, differences paired by "
        "task: they say what other tasks would have given, not what other seeds would."
    )
    yield ""


def table(arms: Iterable[Arm], cell: Callable[[Arm, str], str]) -> Iterator[str]:
    """A line for each arm, a column for each harness of the evaluations."""
    yield "| | " + " | ".join(f"in {name}" for name in HARNESSES.values()) + " |"
    yield "|---" * (len(HARNESSES) + 1) + "|"
    for arm in arms:
        yield f"| {arm.name} | " + " | ".join(cell(arm, harness) for harness in HARNESSES) + " |"
    yield ""


def bold(estimate: Estimate) -> str:
    """A difference; in bold where its interval leaves out 0."""
    return f"**{estimate}**" if estimate.low > 0 or estimate.high < 0 else str(estimate)


def each_seed(found: Findings, arm: Arm, harness: str) -> str:
    """Means, without intervals."""
    rates = (found.rate(arm.key, harness, seed) for seed in found.study.seeds)
    return ", ".join(f"{rate.mean:.3f}" if rate else "—" for rate in rates)


def training(found: Findings) -> Iterator[str]:
    """What the training of each arm took and gave."""
    yield "## Training, all seeds together"
    yield ""
    yield "| | rollouts | reward of first and last step | tokens without credit | minutes collecting | learning |"
    yield "|---|---|---|---|---|---|"
    seeds = found.study.seeds
    for arm in TRAINED:
        num_rollouts = sum(count_rollouts(found.study, arm, seed) for seed in seeds)
        first, last = (
            sum(float(found.steps[arm.key, seed][place]["train/reward"]) for seed in seeds) / len(seeds)
            for place in (0, -1)
        )
        num_steps = sum(len(found.steps[arm.key, seed]) for seed in seeds)
        yield (
            f"| {arm.name} | {num_rollouts} | {first:.2f}, {last:.2f} | "
            f"{found.total(arm.key, 'train/no_credit_share') / num_steps:.0%} | "
            f"{found.total(arm.key, 'time/collect_s') / 60:.1f} | {found.total(arm.key, 'time/learn_s') / 60:.1f} |"
        )
    yield ""


def count_rollouts(study: Study, arm: Arm, seed: int) -> int:
    """Of training."""
    plans = read_plans(finished_run(study.runs(arm, seed)))
    return sum(group.num_samples for plan in plans if plan.phase == "train" for group in plan.groups)


def outcomes(found: Findings) -> Iterator[str]:
    """How the rollouts of the evaluations ended."""
    yield "## Outcomes of the evaluations"
    yield ""
    for arm in ARMS:
        counts = Counter(str(one.outcome) for seed in found.study.seeds for one in found.evaluations[arm.key, seed])
        yield f"- {arm.name}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())
    yield ""


def write_page(study: Study) -> None:
    """Page and picture, from the runs that are there."""
    found = read_findings(study)
    plot(found, study.page.with_suffix(".png"))
    written = study.page.read_text() if study.page.exists() else ""
    _, heading, notes = written.partition(f"\n{NOTES}\n")
    study.page.write_text("\n".join(page(found)) + "\n" + heading + notes)
    print(study.page)


def main() -> None:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-write", action="store_true", help="from the runs that are there")
    study = Study()
    if not parser.parse_args().only_write:
        make_runs(study)
    write_page(study)


if __name__ == "__main__":
    main()
