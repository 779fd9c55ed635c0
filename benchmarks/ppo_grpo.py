"""Make docs/results/ppo_grpo.md: PPO beside GRPO over two hundred steps, from one cold start, in the open loop.

    python -m benchmarks.ppo_grpo                 # two to three hours on two cores; goes on where it was stopped
    python -m benchmarks.ppo_grpo --more-seeds    # and two more seeds of sixty steps, two hours more
    python -m benchmarks.ppo_grpo --only-write    # from what is kept of the runs, in a folder beside the page

GRPO is `algorithm=dapo`, the default of the GRPO family here. Every number in the page, and every word that judges, is
made from what is kept of the runs: one that is kept is not run again. What stands in it from the heading of the notes on
stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.kept import Rollout, describe, gain, pass_at_1
from benchmarks.page import bold, write_keeping_notes
from benchmarks.ppo_grpo_runs import (
    ALGORITHMS,
    FALL,
    MORE_SEEDS,
    MORE_STEPS,
    Arm,
    Result,
    Study,
    make_runs,
    read_result,
)

PANELS = {
    "train/reward": "mean reward of a step's rollouts",
    "train/entropy": "entropy, nats per token",
    "train/clip_share": "clip share",
    "train/truncated_share": "truncated share",
    "train/grad_norm": "gradient norm, before clipping",
    "train/update_kl": "KL of a step's updates",
    "credit/explained_variance": "explained variance of the returns",
}
"""Column -> what its panel shows."""


def plot(study: Study, results: Sequence[Result]) -> None:
    """A panel per curve, faint as logged and strong smoothed, and one with the evaluations."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 4, figsize=(14, 6), layout="constrained")
    for axes, (name, title) in zip(grid.flat, PANELS.items(), strict=False):
        for result in results:
            style = style_of(result.arm)
            axes.plot(*columns(result.curve(name)), **style | {"lw": 0.6, "alpha": 0.3})
            axes.plot(*columns(result.smooth(name)), **style, label=result.arm.name)
        axes.set(title=title, xlabel="step")
    grid.flat[0].legend(frameon=False, fontsize="small")
    last = grid.flat[-1]
    for place, result in enumerate(results):
        rates = [rate for rate in map(pass_at_1, (result.found.before, result.found.after)) if rate is not None]
        spread = [[rate.mean - rate.low for rate in rates], [rate.high - rate.mean for rate in rates]]
        last.errorbar(
            [place - 0.15, place + 0.15], [rate.mean for rate in rates], spread, marker="o", **style_of(result.arm)
        )
    last.set(title="pass@1 held out, before → after", ylim=(0, 1))
    last.set_xticks(range(len(results)), [result.arm.name.replace(", ", ",\n") for result in results])
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if axes is not grid.flat[len(PANELS) - 1]:
            axes.set_ylim(bottom=0)
    study.page.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(study.page.with_suffix(".png"), dpi=110)
    plt.close(figure)


def style_of(arm: Arm) -> dict[str, object]:
    """A colour for the algorithm, a stroke for the seed."""
    return {"color": f"C{list(ALGORITHMS).index(arm.algorithm)}", "ls": ("-", "--", ":")[arm.seed % 3], "lw": 1.8}


def columns(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and values."""
    return [step for step, _ in curve], [value for _, value in curve]


def page(study: Study, results: Sequence[Result]) -> Iterator[str]:
    """The page, line by line."""
    yield "# PPO beside GRPO"
    yield ""
    machine = describe([result.found.machine for result in results])
    yield f"{machine} Made by `python -m benchmarks.ppo_grpo`."
    yield ""
    yield from introduction(results)
    yield f"![curves of both, smoothed over {study.window} steps]({study.page.stem}.png)"
    yield ""
    yield (
        f"Faint: as logged, step by step. Strong: the mean over the last {study.window} steps. Intervals are 95 %, by bootstrap over "
        "the held-out tasks, the difference paired by task, bold where it leaves out 0: they say what other tasks would have given, not what other seeds would."
    )
    yield ""
    yield "## What was learned"
    yield ""
    yield from rates(results)
    yield from between(results)
    yield "## Stability"
    yield ""
    yield from stability(study, results)
    yield f"## Curves in numbers: mean over the first {study.window} steps → over the last"
    yield ""
    yield from curves(results)
    yield from costs(results)
    yield "## Commands"
    yield ""
    yield f"What the runs have found is kept beside this page, in `{study.page.stem}/`."
    yield ""
    yield "```"
    yield from dict.fromkeys(command for result in results for command in result.found.commands)
    yield "```"


def introduction(results: Sequence[Result]) -> Iterator[str]:
    """What was done."""
    campaign, learner = (results[0].found.config[name] for name in ("campaign", "learner"))
    yield (
        "A policy of about a million parameters, cold-started on oracle traces, is trained in the open loop (`harness=whitebox`) by GRPO "
        "(`algorithm=dapo`, the default of the GRPO family: clip-higher, a mean over tokens, no KL term) and by PPO (`algorithm=ppo`: a critic "
        "of its own, GAE with gamma and lambda 1, whitened advantages). Both begin with the same policy and meet the same tasks in the same "
        f"order: {campaign['groups_per_step']} tasks × {campaign['samples_per_group']} rollouts a step, {learner['epochs']} updates, "
        f"learning rate {learner['lr']:g}, schedule {learner['schedule']}."
    )
    yield ""


def rates(results: Sequence[Result]) -> Iterator[str]:
    """pass@1 before and after, and the reward of training."""
    yield "| | steps | pass@1 before | after | difference | rollouts each | reward, first steps → last |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        before, after = result.found.before, result.found.after
        yield (
            f"| {result.arm.name} | {result.num_steps} | {pass_at_1(before)} | {pass_at_1(after)} | "
            f"{bold(gain(before, after))} | {num_judged(before)}, {num_judged(after)} | "
            f"{change(result, 'train/reward', '.3f')} |"
        )
    yield ""


def num_judged(rollouts: Sequence[Rollout]) -> int:
    """Those that have a verdict."""
    return sum(one.passed is not None for one in rollouts)


def between(results: Sequence[Result]) -> Iterator[str]:
    """One algorithm against the other, seed by seed."""
    of = {(result.arm.algorithm, result.arm.seed): result.found.after for result in results}
    for seed in dict.fromkeys(result.arm.seed for result in results):
        difference = gain(of["grpo", seed], of["ppo", seed])
        yield f"- Seed {seed}: pass@1 of PPO minus that of GRPO after training, paired by task: {bold(difference)}."
    yield ""


def stability(study: Study, results: Sequence[Result]) -> Iterator[str]:
    """The rule, and what each run comes to by it."""
    yield (
        f"A run is called stable here when its reward, as a mean over {study.window} steps, never falls by more than {FALL:g} below an "
        "earlier one, and no update is left out because its gradient is not finite."
    )
    yield ""
    yield "| | stable | largest fall | from step → to step | updates left out | largest gradient norm | largest truncated share | largest sampling gap |"
    yield "|---|---|---|---|---|---|---|---|"
    for result in results:
        fall, since, until = result.fall
        yield (
            f"| {result.arm.name} | {'yes' if result.stable else '**no**'} | {fall:.3f} | {f'{since} → {until}' if fall else '–'} | "
            f"{result.total('train/skipped_updates'):.0f} | {number(result.largest('train/grad_norm'), '.2f')} | "
            f"{number(result.largest('train/truncated_share'), '.2g')} | {number(result.largest('train/sampling_gap_max'), '.1e')} |"
        )
    yield ""


CHANGES: dict[str, tuple[str, str]] = {
    "train/entropy": ("entropy", ".3f"),
    "train/clip_share": ("clip share", ".4f"),
    "train/truncated_share": ("truncated share", ".2g"),
    "train/update_kl": ("KL of updates", ".2g"),
    "train/grad_norm": ("gradient norm", ".2f"),
    "train/no_credit_share": ("share without credit", ".2f"),
    "credit/explained_variance": ("explained variance", ".2f"),
}
"""Column -> its name, and how it is written."""


def curves(results: Sequence[Result]) -> Iterator[str]:
    """A line per run, a column per curve."""
    yield "| | " + " | ".join(name for name, _ in CHANGES.values()) + " |"
    yield "|---" * (len(CHANGES) + 1) + "|"
    for result in results:
        cells = (change(result, column, spec) for column, (_, spec) in CHANGES.items())
        yield f"| {result.arm.name} | " + " | ".join(cells) + " |"
    yield ""


def change(result: Result, column: str, spec: str) -> str:
    """First → last."""
    return " → ".join(number(value, spec) for value in (result.first(column), result.last(column)))


def number(value: float | None, spec: str) -> str:
    """Where there is one."""
    return "–" if value is None else f"{value:{spec}}"


def costs(results: Sequence[Result]) -> Iterator[str]:
    """Time of the steps, and how rollouts ended."""
    parts: dict[str, Callable[[Result], float]] = {
        "minutes collecting": lambda result: result.total("time/collect_s") / 60,
        "minutes learning": lambda result: result.total("time/learn_s") / 60,
        "seconds a step": lambda result: (
            (result.total("time/collect_s") + result.total("time/learn_s")) / result.num_steps
        ),
    }
    yield "## Time, and how rollouts ended"
    yield ""
    yield "| | " + " | ".join(parts) + " | outcomes |"
    yield "|---" * (len(parts) + 2) + "|"
    for result in results:
        outcomes = ", ".join(f"{name} {count}" for name, count in result.found.outcomes.items())
        yield f"| {result.arm.name} | " + " | ".join(f"{of(result):.1f}" for of in parts.values()) + f" | {outcomes} |"
    yield ""


def write_page(study: Study) -> None:
    """Page and picture, from what is kept of the runs."""
    results = [read_result(study, arm) for arm in study.arms]
    plot(study, results)
    write_keeping_notes(study.page, page(study, results))


def main() -> None:
    """Run, read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-write", action="store_true", help="from what is kept of the runs")
    parser.add_argument("--more-seeds", action="store_true", help=f"seeds {MORE_SEEDS} too, {MORE_STEPS} steps each")
    arguments = parser.parse_args()
    study = Study()
    if arguments.more_seeds:
        study = replace(study, steps=(*study.steps, *((seed, MORE_STEPS) for seed in MORE_SEEDS)))
    if not arguments.only_write:
        make_runs(study)
    write_page(study)


if __name__ == "__main__":
    main()
