"""The results of benchmarks/tree.py, and the page that shows them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proxy.machine import Machine

AIM = 0.8
"""Of the ideal speed-up over per-path rows, from a sharing of one half on."""
SLOWER = 0.05
"""Than per-path rows, at most, where nothing is shared."""
PUBLISHED_SPEEDUP, PUBLISHED_RATIO = 3.9, 5.7
"""Of Tree Training, over per-path rows, and the ratio of tokens there."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of forward and backward, without what padding costs."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All three."""
        return self.linear + self.attention + self.head


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one way to compute a shape."""

    tokens: int
    flops: Flops
    times_s: tuple[float, ...]
    """Of each turn."""
    peak_bytes: int

    @property
    def time_s(self) -> float:
        """Median."""
        return statistics.median(self.times_s)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape."""

    shape: str
    tree: Cost
    path: Cost
    call: Cost
    gap: float
    """Largest difference of a gradient, relative to the largest of its parameter."""
    build_s: float
    """To make the rows of the tree, once per step and not in its time."""

    @property
    def sharing(self) -> float:
        """Share of the per-path tokens that the tree does not compute."""
        return 1 - self.tree.tokens / self.path.tokens

    def token_ratio(self, rows: Cost) -> float:
        """Tokens of `rows` over those of the tree."""
        return rows.tokens / self.tree.tokens

    def ideal(self, rows: Cost) -> float:
        """FLOPs of `rows` over those of the tree."""
        return rows.flops.total / self.tree.flops.total

    def speedup(self, rows: Cost) -> float:
        """Median over the turns of the times' ratio."""
        return statistics.median(a / b for a, b in zip(rows.times_s, self.tree.times_s, strict=True))

    def line(self) -> str:
        """For the terminal."""
        parts = [
            f"{self.shape:28} sharing {self.sharing:4.0%}  tree {self.tree.tokens:6} tokens {self.tree.time_s:7.3f} s"
        ]
        for name, rows in (("path", self.path), ("call", self.call)):
            share = self.speedup(rows) / self.ideal(rows)
            parts.append(
                f"{name}: x{self.token_ratio(rows):5.2f} tokens, ideal {self.ideal(rows):5.2f}, "
                f"measured {self.speedup(rows):5.2f} ({share:4.0%})"
            )
        return "  ".join([*parts, f"gap {self.gap:.0e}"])


@dataclass(frozen=True, kw_only=True)
class Results:
    """Of one run."""

    machine: Machine
    load: float
    """Processes that wanted a core, in the mean of a minute, as the run began."""
    device: str
    model: str
    threads: int
    scale: float
    repeats: int
    cells: tuple[Cell, ...]
    kept: Cost
    """The tree of a harness that forks at every turn, with its layers kept for the backward pass."""
    recomputed: Cost
    """With its layers computed again."""


def write_page(results: Results, path: Path) -> None:
    """The page, and its plot beside it."""
    plot(results, path.with_suffix(".png"))
    path.write_text("\n".join(_lines(results)) + "\n")


def _lines(results: Results) -> list[str]:
    kept, recomputed = results.kept, results.recomputed
    return [
        *_head(results),
        "## Against per-path rows",
        "",
        "Sharing: tokens of the paths that the tree does not compute again.",
        "",
        "| shape | sharing | tokens: paths, tree | ratio | ideal | measured | of the ideal | paths s | tree s | peak MiB: paths, tree |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_against(cell, cell.path) for cell in results.cells),
        "",
        *_verdict(results),
        "",
        "## Against per-call rows",
        "",
        "| shape | sharing | tokens: calls, tree | ratio | ideal | measured | of the ideal | calls s | tree s | peak MiB: calls, tree |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_against(cell, cell.call) for cell in results.cells),
        "",
        "## FLOPs",
        "",
        "10⁹, forward and backward. A sampled token reaches the output head once in all three.",
        "",
        "| shape | linear: calls, paths, tree | attention: calls, paths, tree | head |",
        "|---|---|---|---|",
        *(_flops(cell) for cell in results.cells),
        "",
        "## Layers computed again in the backward pass",
        "",
        "`gradient_checkpointing=true`, on the tree with a fork at every turn: "
        f"{recomputed.peak_bytes / 2**20:.0f} MiB in place of {kept.peak_bytes / 2**20:.0f}, "
        f"{recomputed.time_s:.2f} s in place of {kept.time_s:.2f}.",
        "",
        "## How",
        "",
        "- Rows of paths and calls: causal, through transformers' own SDPA, sorted by length and put side by side where padding "
        "is at most 2 % of a micro-batch, within the budget of the tree's rows. A drawn token trains in one of them, and only "
        "states that predict a trained token reach the output head.",
        f"- The gradients of all three differ by {max(cell.gap for cell in results.cells):.0e} of a parameter's largest at most.",
        "- Where a tree has one call on each path, rows of calls are rows of paths.",
        "- Peak: what the process holds at most (a GPU: what torch has allocated at most) beyond what it held before the update. "
        "It grows with the budget of a micro-batch, which is the same for all.",
        f"- Making the rows of the tree is no part of its time: {max(cell.build_s for cell in results.cells):.2f} s at most, once a step.",
        "- FLOPs: three forward passes' worth for the layers, 3.5 for attention, which computes its scores again, four for the head.",
        _published(results),
    ]


def _head(results: Results) -> list[str]:
    machine = results.machine
    return [
        "# Computing every token once, measured",
        "",
        f"{time.strftime('%Y-%m-%d')}, {results.device}: {machine.cores} cores ({machine.processor}), "
        f"{machine.memory_gib:.0f} GiB, {results.threads} threads; load {results.load:.2f} at the start, and other processes "
        f"used {machine.others:.0%} of the cores during the run. {results.model} "
        "Made by `python -m benchmarks.tree --write`.",
        "",
        *(["**The machine was busy: these figures are not to be relied on.**", ""] if machine.busy else []),
        "Forward and backward of one step's policy gradient, on the tree and on the rows that others make of it: one for each "
        "root-to-leaf path, or one for each call. "
        f"All lengths are those of real runs times {results.scale:g}. The ideal is the ratio of FLOPs; attention grows with "
        "the square of a path, so it differs from the ratio of tokens. Medians of "
        f"{results.repeats} turns, in which all three are computed one after the other.",
        "",
        "![speed-up and peak memory by sharing](tree.png)",
        "",
    ]


def _published(results: Results) -> str:
    near = min(results.cells, key=lambda cell: abs(cell.token_ratio(cell.path) - PUBLISHED_RATIO))
    ratio, speedup = near.token_ratio(near.path), near.speedup(near.path)
    return (
        f"- Tree Training (arXiv 2511.00413) reports a speed-up of {PUBLISHED_SPEEDUP} where the ratio of tokens was "
        f"{PUBLISHED_RATIO}, on models and machines of its own: {PUBLISHED_SPEEDUP / PUBLISHED_RATIO:.0%} of the ratio. Of the "
        f"shapes above, the nearest is {near.shape}: {speedup:.2f} of {ratio:.2f}, {speedup / ratio:.0%}."
    )


def _against(cell: Cell, rows: Cost) -> str:
    speedup, ideal = cell.speedup(rows), cell.ideal(rows)
    return (
        f"| {cell.shape} | {cell.sharing:.0%} | {rows.tokens}, {cell.tree.tokens} | {cell.token_ratio(rows):.2f} | {ideal:.2f} "
        f"| {speedup:.2f} | {speedup / ideal:.0%} | {rows.time_s:.2f} | {cell.tree.time_s:.2f} "
        f"| {rows.peak_bytes / 2**20:.0f}, {cell.tree.peak_bytes / 2**20:.0f} |"
    )


def _verdict(results: Results) -> list[str]:
    shared = [cell for cell in results.cells if cell.sharing >= 0.495]
    alone = [cell for cell in results.cells if cell.sharing < 0.005]
    shares = [cell.speedup(cell.path) / cell.ideal(cell.path) for cell in shared]
    lines = []
    if shares:
        lines.append(
            f"Aim: {AIM:.0%} of the ideal from a sharing of one half on. Reached by {sum(share >= AIM for share in shares)} of "
            f"{len(shares)} shapes; the least is {min(shares):.0%}."
        )
    if alone:
        slowest = max(1 / cell.speedup(cell.path) - 1 for cell in alone)
        lines.append(
            f"Where nothing is shared: {slowest:+.1%} time against per-path rows at most; the aim is {SLOWER:.0%}."
        )
    return lines


def _flops(cell: Cell) -> str:
    costs = (cell.call, cell.path, cell.tree)
    linear = ", ".join(f"{cost.flops.linear / 1e9:.0f}" for cost in costs)
    attention = ", ".join(f"{cost.flops.attention / 1e9:.0f}" for cost in costs)
    return f"| {cell.shape} | {linear} | {attention} | {cell.tree.flops.head / 1e9:.0f} |"


def plot(results: Results, path: Path) -> None:
    """Speed-up over per-path rows, and peak memory, by sharing."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    cells = sorted(results.cells, key=lambda cell: cell.ideal(cell.path))
    ideals = [cell.ideal(cell.path) for cell in cells]
    left.plot(ideals, ideals, color="0.5", lw=1, label="ideal: ratio of FLOPs")
    left.plot(ideals, [AIM * ideal for ideal in ideals], color="0.5", lw=1, ls=":", label=f"{AIM:.0%} of it")
    left.plot(ideals, [cell.speedup(cell.path) for cell in cells], "o", ms=5, color="C0", label="measured")
    left.plot(ideals, [cell.token_ratio(cell.path) for cell in cells], "x", ms=5, color="C1", label="ratio of tokens")
    left.set(
        xlabel="FLOPs of per-path rows / FLOPs of the tree",
        ylabel="speed-up over per-path rows",
        xscale="log",
        yscale="log",
    )
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 40) if tick <= 1.2 * max(ideals)]
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    left.legend(frameon=False)
    cells = sorted(results.cells, key=lambda cell: cell.sharing)
    for name, color in (("path", "C1"), ("tree", "C0")):
        peaks = [getattr(cell, name).peak_bytes / 2**20 for cell in cells]
        label = "per-path rows" if name == "path" else "tree"
        right.plot([100 * cell.sharing for cell in cells], peaks, "o", ms=5, color=color, label=label)
    right.set(xlabel="sharing, %", ylabel="peak memory of forward and backward, MiB", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)
