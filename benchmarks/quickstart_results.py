"""Make docs/results/quickstart.md: three seeds, each with a cold start of its own, and a control that learns nothing.

    python -m benchmarks.quickstart_results            # hours on two cores; goes on where it was stopped
    python -m benchmarks.quickstart_results --only-write   # from the runs that are there

Every number in the page is read from the runs' folders.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from clawhpc.passrate import Estimate, PassTable, paired_difference, tabulate
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from clawhpc.store import published_steps, read_rollouts

EXPERIMENT = "quickstart_full"
SEEDS = (0, 1, 2)
CONTROL = ("learner.lr=0", "campaign.train_min=5")
RUNS = Path("runs") / EXPERIMENT
SET_UP = RUNS / "set_up.json"
COLD_STARTS = Path("runs/cold_starts") / EXPERIMENT
PAGE = Path("docs/results/quickstart.md")
PLOT = PAGE.with_suffix(".png")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One line of the table: a command, and the run that it made."""

    name: str
    seed: int
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """As a person types it."""
        return ["python", "-m", "clawhpc.train", f"experiment={EXPERIMENT}", f"seed={self.seed}", *self.overrides]

    def find_cold_start(self) -> dict[str, Any]:
        """What the newest finished cold start of this seed says of itself."""
        for root in sorted(COLD_STARTS.glob("[0-9]*"), reverse=True):
            paths = RunPaths(root)
            if paths.finished.exists() and msgspec.yaml.decode(paths.config.read_bytes())["seed"] == self.seed:
                return msgspec.json.decode(paths.finished.read_bytes())
        raise SystemExit(
            f"no finished cold start for seed {self.seed} in {COLD_STARTS}; "
            "its policy was made elsewhere: take it away from the cache, and start again"
        )

    def find(self) -> RunPaths:
        """The newest finished run of this arm."""
        wanted_lr = 0.0 if self.overrides else None
        for root in sorted(RUNS.glob("[0-9]*"), reverse=True):
            paths = RunPaths(root)
            config = msgspec.yaml.decode(paths.config.read_bytes())
            lr = config["learner"]["lr"]
            if paths.finished.exists() and config["seed"] == self.seed and (lr == 0) == (wanted_lr == 0.0):
                return paths
        raise SystemExit(f"no finished run for: {' '.join(self.command)}")


ARMS = (
    *(Arm(name=f"seed {seed}", seed=seed) for seed in SEEDS),
    Arm(name="control, lr = 0", seed=0, overrides=CONTROL),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run says."""

    arm: Arm
    paths: RunPaths
    steps: list[dict[str, str]]
    """Rows of metrics.csv."""
    before: PassTable
    after: PassTable
    difference: Estimate
    outcomes: Counter[str]
    rollout_s: dict[str, float]
    """Part -> mean wall seconds of a rollout."""
    evaluation_s: float
    """Wall time of both evaluations, from their first rollout's start to the last one's end."""
    cpu_s: dict[str, float]
    cold_start: dict[str, Any]

    @property
    def largest_gap(self) -> float:
        """Between sampling and old log-probs of the same policy, over all steps."""
        return max((float(row["train/sampling_gap_max"] or 0) for row in self.steps), default=0.0)

    def seconds(self, name: str) -> float:
        """Sum of a column over the steps."""
        return sum(float(row[name] or 0) for row in self.steps)


def read_result(arm: Arm) -> Result:
    """Everything that the page needs of one arm."""
    paths = arm.find()
    with paths.metrics_csv.open(newline="") as file:
        steps = list(csv.DictReader(file))
    records = list(read_rollouts(paths))
    evaluations: dict[int, list[RolloutRecord]] = {}
    for record in records:
        if record.key.phase == "eval":
            evaluations.setdefault(record.key.step, []).append(record)
    first, last = min(evaluations), max(published_steps(paths))
    finished: dict[str, Any] = msgspec.json.decode(paths.finished.read_bytes())
    return Result(
        arm=arm,
        paths=paths,
        steps=steps,
        before=tabulate(evaluations[first]),
        after=tabulate(evaluations[last]),
        difference=paired_difference(evaluations[first], evaluations[last]),
        outcomes=Counter(str(record.outcome) for record in records),
        rollout_s=seconds_by_part(records),
        evaluation_s=sum(wall_seconds(evaluations[step]) for step in (first, last)),
        cpu_s=finished["cpu_s"],
        cold_start=arm.find_cold_start(),
    )


def seconds_by_part(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Of a rollout, on average. The harness has what of its run is not the proxy's, the proxy what is not the engine's.

    Calls of a harness that overlap count once each, so its own share is then too small.
    """
    times = [record.timings for record in records]
    engine_s = sum(call.engine_s for record in records for call in record.calls)
    calls_s = sum(call.duration_s for record in records for call in record.calls)
    total = {
        "sandbox": sum(one.boot_s + one.teardown_s for one in times),
        "harness": sum(one.run_s for one in times) - calls_s,
        "proxy": calls_s - engine_s,
        "engine": engine_s,
        "settling": sum(one.settle_s for one in times),
        "verifier": sum(one.verify_s for one in times),
    }
    return {part: seconds / len(records) for part, seconds in total.items()}


def wall_seconds(records: Iterable[RolloutRecord]) -> float:
    """From the first start to the last end."""
    times = [record.timings for record in records]
    ends = (one.started_at + one.boot_s + one.run_s + one.settle_s + one.verify_s + one.teardown_s for one in times)
    return max(ends) - min(one.started_at for one in times)


def measure_set_up() -> None:
    """What `make quickstart` does before its first own work, in a clean clone with an empty cache."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", ".", f"{folder}/clone"], check=True)
        environment = {**os.environ, "CLAWHPC_CACHE": f"{folder}/cache"}
        for name, command in {
            "packages": ["make", ".stamps/venv-cpu"],
            "harness": ["containers/install_harness.sh", "claude_code", f"{folder}/cache"],
        }.items():
            began = time.monotonic()
            subprocess.run(command, cwd=f"{folder}/clone", env=environment, check=True)
            seconds[name] = time.monotonic() - began
    SET_UP.parent.mkdir(parents=True, exist_ok=True)
    SET_UP.write_bytes(msgspec.json.encode(seconds))


def make_runs() -> None:
    """Run what has not finished yet; the output goes to the terminal."""
    if not SET_UP.exists():
        measure_set_up()
    for arm in ARMS:
        try:
            arm.find()
        except SystemExit:
            for name in ("sft", "train"):
                command = [sys.executable, "-m", f"clawhpc.{name}", f"experiment={EXPERIMENT}", f"seed={arm.seed}"]
                began = time.monotonic()
                subprocess.run([*command, *(arm.overrides if name == "train" else ())], check=True)
                print(f"{name} of {arm.name}: {time.monotonic() - began:.0f} s", flush=True)
                arm.find_cold_start()  # fails now rather than hours later


def plot(results: list[Result]) -> None:
    """Mean reward of each step's rollouts over minutes of training, and the evaluations before and after."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    for index, result in enumerate(results):
        control = bool(result.arm.overrides)
        style = {"color": "0.5" if control else f"C{index}", "ls": "--" if control else "-", "label": result.arm.name}
        minutes, elapsed = [], 0.0
        for row in result.steps:
            elapsed += float(row["time/collect_s"]) + float(row["time/learn_s"])
            minutes.append(elapsed / 60)
        left.plot(minutes, [float(row["train/reward"]) for row in result.steps], marker=".", **style)
        means = (result.before.pass_at_1, result.after.pass_at_1)
        error = [[one.mean - one.low for one in means], [one.high - one.mean for one in means]]
        right.errorbar([index - 0.15, index + 0.15], [one.mean for one in means], error, fmt="o-", color=style["color"])
    left.set(xlabel="minutes of training", ylabel="mean reward of a step's rollouts", ylim=(0, 1))
    left.legend(frameon=False)
    right.set(ylabel="pass@1 on held-out tasks, before → after", ylim=(0, 1))
    right.set_xticks(range(len(results)), [result.arm.name.replace(", ", ",\n") for result in results])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)


def page(results: list[Result]) -> Iterator[str]:
    """The page, line by line."""
    cores = os.cpu_count()
    yield "# The quickstart, measured"
    yield ""
    last = max(result.paths.finished.stat().st_mtime for result in results)
    yield f"{date.fromtimestamp(last).isoformat()}, {cores} cores ({platform.machine()}), no GPU. Made by `python -m benchmarks.quickstart_results`."
    yield ""
    yield (
        "A policy of about a million parameters, cold-started on oracle traces, learns by tree GRPO inside Claude Code 2.1.328 "
        "(`--bare`), unmodified, in a sandbox. pass@1 at temperature 1 on the same held-out tasks before and after; 95 % "
        "intervals by bootstrap over tasks, the difference paired by task. Every seed has a cold start of its own; the "
        "control shares that of seed 0 and trains with a learning rate of 0, for a shorter time, which changes nothing."
    )
    yield ""
    yield "![reward curves and pass rates](quickstart.png)"
    yield ""
    yield "| | before | after | difference | rollouts each | steps | minutes of training | largest log-prob gap |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        minutes = (result.seconds("time/collect_s") + result.seconds("time/learn_s")) / 60
        yield (
            f"| {result.arm.name} | {result.before.pass_at_1} | {result.after.pass_at_1} | **{result.difference}** | "
            f"{result.before.num_rollouts}, {result.after.num_rollouts} | {len(result.steps)} | {minutes:.1f} | "
            f"{result.largest_gap:.1e} |"
        )
    yield ""
    yield (
        "The gap is the largest difference between the log-prob that vLLM gave when it drew a token and the one that the "
        "learner computes for it with the same weights (fp32), over every sampled token that trained: those of groups "
        "whose rewards differ."
    )
    yield ""
    yield "## Where the time goes"
    yield ""
    yield from time_table(
        results,
        "Wall seconds",
        {
            "cold start: traces": lambda result: result.cold_start["wall_s"]["capture"],
            "cold start: lessons": lambda result: result.cold_start["wall_s"]["lessons"],
            "both evaluations": lambda result: result.evaluation_s,
            "training: collecting": lambda result: result.seconds("time/collect_s"),
            "training: learning": lambda result: result.seconds("time/learn_s"),
        },
    )
    set_up_s = msgspec.json.decode(SET_UP.read_bytes())
    yield f"Set-up of a clean clone, once: packages {set_up_s['packages']:.0f} s, harness {set_up_s['harness']:.0f} s."
    yield ""
    yield from time_table(
        results,
        "Wall seconds of a rollout, mean",
        {part: lambda result, part=part: result.rollout_s[part] for part in results[0].rollout_s},
        digits=2,
    )
    config = msgspec.yaml.decode(results[0].paths.config.read_bytes())
    yield f"{config['worker']['concurrency']} rollouts run at once on {cores} cores: most of this is waiting for a core."
    yield ""
    yield from time_table(
        results,
        "CPU seconds",
        {
            "cold start": lambda result: sum(result.cold_start["cpu_s"].values()),
            "harness": lambda result: result.cpu_s["harness"],
            "engine": lambda result: result.cpu_s["engine"],
            "proxy and worker": lambda result: result.cpu_s["proxy"],
            "learner and campaign": lambda result: result.cpu_s["learner"],
        },
    )
    yield "CPU seconds of the parts are those of the whole `train` command, evaluations included."
    yield ""
    yield "## Outcomes of all rollouts"
    yield ""
    for result in results:
        counts = ", ".join(f"{name} {count}" for name, count in result.outcomes.most_common())
        yield f"- {result.arm.name}: {counts}"
    yield ""
    yield "## Commands"
    yield ""
    yield "```"
    for result in results:
        yield f"python -m clawhpc.sft experiment={EXPERIMENT} seed={result.arm.seed}"
        yield " ".join(result.arm.command)
    yield "```"


def time_table(
    results: list[Result], title: str, columns: dict[str, Callable[[Result], float]], *, digits: int = 0
) -> Iterator[str]:
    """A line for each arm."""
    yield f"| {title} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for result in results:
        yield (
            f"| {result.arm.name} | "
            + " | ".join(f"{seconds(result):.{digits}f}" for seconds in columns.values())
            + " |"
        )
    yield ""


def main() -> None:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-write", action="store_true", help="from the runs that are there")
    if not parser.parse_args().only_write:
        make_runs()
    results = [read_result(arm) for arm in ARMS]
    plot(results)
    PAGE.write_text("\n".join(page(results)) + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()
