"""Make docs/results/transfer.md: policies trained in one harness or in several, each evaluated in every one of them.

    python -m benchmarks.transfer               # hours on two cores; goes on where it was stopped
    python -m benchmarks.transfer --only-write  # from the runs that are there

All arms of a seed begin with one policy, which was taught in all three harnesses, and see as many rollouts. Every number
in the page is read from the runs' folders; what stands in it from the heading of the notes on is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.page import bold, write_keeping_notes
from benchmarks.transfer_runs import (
    ARMS,
    CHANGED,
    HARNESSES,
    OPEN_LOOP,
    REAL,
    START,
    TRAINED,
    Arm,
    Findings,
    Study,
    finished_run,
    make_runs,
    read_findings,
)
from clawhpc.harness.registry import ADAPTERS
from clawhpc.passrate import tabulate
from clawhpc.store import read_plans


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
    yield from replies(found)
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


def replies(found: Findings) -> Iterator[str]:
    """How many of them a harness can do nothing with."""
    yield "## Replies in the evaluations"
    yield ""
    yield "Malformed: with a tool call that cannot be read, or of a tool that the harness does not have. Cut: at the limit of tokens."
    yield ""
    yield from table(ARMS, lambda arm, harness: str(found.replies[arm.key, harness]))


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
    write_keeping_notes(study.page, page(found))


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
