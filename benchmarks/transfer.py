"""Make docs/results/transfer.md: policies trained in one harness or in several, each evaluated in every one of them.

    python -m benchmarks.transfer               # hours on two cores; goes on where it was stopped
    python -m benchmarks.transfer --only-write  # from what is kept of the runs, in a folder beside the page

All arms of a seed begin with one policy, which was taught in all three harnesses, and see as many rollouts. Every number
in the page is made from what is kept of the runs: a seed that is kept is not run again. What stands in the page from the
heading of the notes on stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import fsum
from pathlib import Path
from statistics import fmean

from benchmarks.kept import Rollout, count_outcomes, describe
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
    make_runs,
    read_findings,
)


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
            ones = [found.gain(arm.key, START, harness, seed).mean for seed in found.seeds]
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
    yield "# Where a policy trains, and where it is used"
    yield ""
    machine = describe([seed.machine for seed in found.seeds.values()])
    yield f"{machine} Made by `python -m benchmarks.transfer`."
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
    yield f"## Each seed by itself: pass@1 of seeds {', '.join(map(str, found.seeds))}"
    yield ""
    yield from table(ARMS, lambda arm, harness: each_seed(found, arm, harness))
    yield from replies(found)
    yield from training(found)
    yield from outcomes(found)
    yield "## Commands"
    yield ""
    first, findings = next(iter(found.seeds.items()))
    yield f"Of seed {first}; the others likewise. What they have found is kept beside this page, in `transfer/`."
    yield ""
    yield "```"
    yield from findings.commands
    yield "```"


def introduction(found: Findings) -> Iterator[str]:
    """What was done."""
    seeds = list(found.seeds.values())
    num_steps = max(len(training.columns["train/reward"]) for seed in seeds for training in seed.trainings.values())
    num_tasks = max(len({one.task for one in rollouts}) for seed in seeds for rollouts in seed.evaluations.values())
    versions = " and ".join(f"{HARNESSES[name]} {seeds[0].versions[name]}" for name in REAL)
    yield (
        f"A policy of about a million parameters is taught the tools of three harnesses by imitation: {versions}, both real and "
        "unmodified, and `whitebox`, a small open tool loop of our own. From this one start it is trained by tree GRPO in the "
        "open loop, in one of the real harnesses, or in both of them, and then evaluated in all three, on the same held-out "
        f"tasks. Every arm has {num_steps} steps, all of as many rollouts: as much experience, not as much time. One arm begins "
        "without the cold start, with the same tokenizer and random weights."
    )
    yield ""
    yield (
        f"{len(seeds)} seeds, each with a cold start and {num_tasks} held-out tasks of its own; one rollout of each task in "
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
    rates = (found.rate(arm.key, harness, seed) for seed in found.seeds)
    return ", ".join(f"{rate.mean:.3f}" if rate else "—" for rate in rates)


def training(found: Findings) -> Iterator[str]:
    """What the training of each arm took and gave."""
    yield "## Training, all seeds together"
    yield ""
    yield "| | rollouts | reward of first and last step | tokens without credit | minutes collecting | learning |"
    yield "|---|---|---|---|---|---|"
    for arm in TRAINED:
        trainings = found.trainings(arm.key)
        rewards = [training.columns["train/reward"] for training in trainings]
        no_credit = [share for training in trainings for share in training.columns["train/no_credit_share"]]
        collecting, learning = (
            sum(fsum(training.columns[name]) for training in trainings) / 60
            for name in ("time/collect_s", "time/learn_s")
        )
        yield (
            f"| {arm.name} | {sum(training.num_rollouts for training in trainings)} | "
            f"{fmean(steps[0] for steps in rewards):.2f}, {fmean(steps[-1] for steps in rewards):.2f} | "
            f"{fmean(no_credit):.0%} | {collecting:.1f} | {learning:.1f} |"
        )
    yield ""


def replies(found: Findings) -> Iterator[str]:
    """How many of them a harness can do nothing with."""
    yield "## Replies in the evaluations"
    yield ""
    yield "Malformed: with a tool call that cannot be read, or of a tool that the harness does not have. Cut: at the limit of tokens."
    yield ""
    yield from table(ARMS, lambda arm, harness: useless(found.rollouts(arm.key, harness)))


def useless(rollouts: Sequence[Rollout]) -> str:
    """Shares of their replies."""
    num = sum(one.replies for one in rollouts)
    if not num:
        return "—"
    malformed, cut = fsum(one.malformed for one in rollouts), sum(one.cut for one in rollouts)
    return f"{malformed / num:.0%} malformed, {cut / num:.0%} cut"


def outcomes(found: Findings) -> Iterator[str]:
    """How the rollouts of the evaluations ended."""
    yield "## Outcomes of the evaluations"
    yield ""
    for arm in ARMS:
        yield f"- {arm.name}: {count_outcomes(found.rollouts(arm.key))}"
    yield ""


def write_page(study: Study) -> None:
    """Page and picture, from what is kept of the runs."""
    found = read_findings(study)
    plot(found, study.page.with_suffix(".png"))
    write_keeping_notes(study.page, page(found))


def main() -> None:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-write", action="store_true", help="from what is kept of the runs")
    study = Study()
    if not parser.parse_args().only_write:
        make_runs(study)
    write_page(study)


if __name__ == "__main__":
    main()
