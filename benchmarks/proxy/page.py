"""docs/results/proxy.md and its plot, from the figures of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.proxy.growth import RESULT_BYTES, Growth
from benchmarks.proxy.machine import Machine
from benchmarks.proxy.measure import Cell, CellFigures, LaneFigures

DOCS = Path(__file__).parents[2] / "docs/results"
OURS = "clawhpc"
MANY = 16
"""Sessions of the page's second table; where a worker of two cores ends."""
USUAL_TOKENS = 20_000
"""A history whose body has 80 to 120 kB."""
COLUMNS = "| sessions | engine | history | form | | added p50 | repeats | added p99 | first byte | CPU a call | calls |"


@dataclass(frozen=True, kw_only=True)
class Results:
    """One run."""

    date: str
    machine: Machine
    versions: list[str]
    records: dict[str, str]
    """What each lane keeps of a call."""
    absent: dict[str, str]
    """Peers that could not be measured, and why."""
    recorded: dict[str, dict[str, int]]
    """Calls that were recorded, of the lanes that can tell."""
    memory_mib: dict[str, float]
    """Resident at the end."""
    cells: list[CellFigures]
    growth: Growth


def write_page(results: Results, *, publish: bool) -> None:
    """Print the page; write it and its plot where they are to be published."""
    text = "\n".join(page(results)) + "\n"
    print(text)
    if publish:
        DOCS.mkdir(parents=True, exist_ok=True)
        (DOCS / "proxy.md").write_text(text)
        plot(results, DOCS / "proxy.png")


def cell_rows(figures: CellFigures) -> Iterator[str]:
    """A row for each lane."""
    cell = figures.cell
    where = f"| {cell.sessions} | {engine(cell)} | {tokens(cell.history_tokens)} | {form(cell)} |"
    for lane in figures.lanes:
        yield (
            f"{where} {lane.lane} | {milliseconds(lane)} | {lane.low_ms:.1f} – {lane.high_ms:.1f} | {lane.p99_ms:.1f} | "
            f"{lane.first_p50_ms:.1f} | {lane.cpu_ms:.2f} | {lane.calls} |"
        )
    for name, reason in figures.failed.items():
        yield f"{where} {name} | does not answer all: {reason} | | | | | |"


def page(results: Results) -> Iterator[str]:
    """The page, line by line."""
    machine = results.machine
    yield "# The proxy, measured"
    yield ""
    yield (
        f"{results.date}, {machine.cores} cores ({machine.processor}), {machine.memory_gib:.0f} GiB, Python "
        f"{machine.python}. Other processes used {machine.others:.0%} of the cores during the run"
        f"{': **a busy machine, not for comparison**' if machine.busy else ''}. Made by `python -m benchmarks.proxy`."
    )
    yield ""
    yield (
        "What a proxy adds to a call: its latency over that of the same client asking the engine stub directly with an equally big "
        "body, and the CPU time of its process. One client, one stub, one run: all proxies take turns, block by block, on "
        "the same conversations, whose history grows by a turn with every call. Milliseconds; p99 is over the direct "
        "median, so that it holds the machine's noise too (the `direct` rows show it), and is the maximum where there are fewer than 100 "
        "calls. \\* marks a saturated proxy, busy for more than 85 % of the time or asked by many at once without a pause: its latency is a queue. Client, stub and "
        "proxy share the cores."
    )
    yield ""
    yield from aims(results)
    yield from comparison(results)
    yield from growth_section(results)
    yield from conditions(results)
    yield "## Every cell"
    yield ""
    yield COLUMNS
    yield "|---" * 11 + "|"
    for figures in results.cells:
        yield from cell_rows(figures)


def aims(results: Results) -> Iterator[str]:
    """What we want of our proxy, and what it does."""
    yield "## Our proxy against its aims"
    yield ""
    yield "| everything recorded, 20 k tokens of history | aim | measured |"
    yield "|---|---|---|"
    one = found(results, sessions=1, slow=False, stream=False)
    many = found(results, sessions=MANY, slow=True, stream=False)
    first = found(results, sessions=1, slow=True, stream=True)
    rows: list[tuple[str, float, LaneFigures | None, Callable[[LaneFigures], float]]] = [
        ("one session: added p50", 3, one, lambda lane: lane.p50_ms),
        ("one session: added p99", 10, one, lambda lane: lane.p99_ms),
        ("one session: CPU a call", 3, one, lambda lane: lane.cpu_ms),
        (f"{MANY} sessions, engine 200 ms: added p50", 5, many, lambda lane: lane.p50_ms),
        ("first byte of a stream, p50", 5, first, lambda lane: lane.first_p50_ms),
    ]
    for name, aim, lane, value in rows:
        if lane is not None:
            met = "" if value(lane) <= aim else " (missed)"
            yield f"| {name} | ≤ {aim:g} ms | {value(lane):.2f} ms{met} |"
    yield ""


def comparison(results: Results) -> Iterator[str]:
    """All proxies, plain, by history."""
    histories = sorted({figures.cell.history_tokens for figures in results.cells})
    lanes = [lane for lane in results.records if lane != "direct"]
    for sessions, slow in ((1, False), (MANY, True)):
        if all(found(results, sessions=sessions, slow=slow, stream=False, history=one) is None for one in histories):
            continue
        named = (
            f"{sessions} session{'s' if sessions > 1 else ''}, engine {'after 200 ms' if slow else 'at once'}, plain"
        )
        yield f"## {named}: added p50 / p99, CPU a call"
        yield ""
        yield "| | " + " | ".join(tokens(each) for each in histories) + " | records |"
        yield "|---" * (len(histories) + 2) + "|"
        for lane in lanes:
            each = [
                found(results, lane=lane, sessions=sessions, slow=slow, stream=False, history=one) for one in histories
            ]
            told = [f"{milliseconds(one)} / {one.p99_ms:.1f}, {one.cpu_ms:.1f}" if one else "–" for one in each]
            yield f"| {lane} | {' | '.join(told)} | {results.records[lane]} |"
        yield ""
    for name, reason in results.absent.items():
        yield f"{name} could not be measured: {reason}"
        yield ""


def growth_section(results: Results) -> Iterator[str]:
    """How the cost grows in a long session."""
    growth = results.growth
    turns = len(growth.body_kb)
    yield f"## One session of {turns} turns, up to {tokens(growth.prompt_tokens[-1])} tokens"
    yield ""
    yield "![CPU time of a call by turn, and added latency](proxy.png)"
    yield ""
    yield (
        f"Engine at once, plain, medians of {growth.repeats} sessions. CPU time of a call = fixed + per kB of its body "
        "(reading, parsing, matching, and sending the prompt's ids to the engine) + per new token (the reply before, the tool's "
        "result)."
    )
    yield ""
    yield "| | fixed, ms | µs per kB of body | µs per new token | R² |"
    yield "|---|---|---|---|---|"
    for lane, fit in growth.fits.items():
        yield f"| {lane} | {fit.fixed_ms:.2f} | {fit.per_kb_us:.1f} | {fit.per_token_us:.2f} | {fit.r2:.2f} |"
    yield ""
    yield (
        "| turn | body, kB | prompt, tokens | new tokens stored | our record, bytes | "
        + " | ".join(f"{lane}, CPU ms" for lane in growth.fits)
        + " |"
    )
    yield "|---" * (5 + len(growth.fits)) + "|"
    for turn in sorted({0, turns // 8, turns // 4, turns // 2, 3 * turns // 4, turns - 1}):
        start = min(max(0, turn - len(RESULT_BYTES) // 2), turns - len(RESULT_BYTES))
        near = slice(start, start + len(RESULT_BYTES))
        cpu = [f"{mean(each[near]):.1f}" for lane, each in growth.cpu_ms.items() if lane != "direct"]
        stored = growth.record_bytes[turn]
        yield (
            f"| {turn + 1} | {growth.body_kb[turn]:.0f} | {growth.prompt_tokens[turn]} | {growth.new_tokens[turn]} | "
            f"{stored} | {' | '.join(cpu)} |"
        )
    yield ""
    yield "CPU of a turn is the mean of the four around it, because tool results have four lengths in turn."
    yield ""


def conditions(results: Results) -> Iterator[str]:
    """What ran."""
    yield "## What ran"
    yield ""
    yield (
        "All proxies answer OpenAI chat completions. Ours runs as in a worker: one process, a unix socket a session, the real "
        "renderer (Qwen3's format over a tokenizer of 24 k entries, trained on the standard library), the real engine client. The "
        "stub draws the same 138 tokens, a text and a tool call, for everybody; to those who send messages it streams an "
        "event for eight tokens, and it returns the prompt's ids to those who ask for them. Conversations begin "
        "with tools, a system prompt and a task of the wanted length; their first call, which a proxy reads and tokenises "
        "whole, is not counted."
    )
    yield ""
    for lane, counts in results.recorded.items():
        if counts:
            others = f", {counts['reencoded']} replies encoded again" if "reencoded" in counts else ""
            yield f"- {lane} recorded {counts['complete']} of {counts['calls']} calls with ids and log-probs{others}."
    for lane, memory in results.memory_mib.items():
        if lane == "direct":
            continue
        yield f"- {lane}: {memory:.0f} MiB resident at the end."
    yield f"- {', '.join(results.versions)}."
    yield ""


def found(
    results: Results, *, sessions: int, slow: bool, stream: bool, lane: str = OURS, history: int = USUAL_TOKENS
) -> LaneFigures | None:
    """A lane in a cell, if that was measured."""
    for figures in results.cells:
        cell = figures.cell
        if (cell.sessions, cell.delay_s > 0, cell.stream, cell.history_tokens) == (sessions, slow, stream, history):
            return next((each for each in figures.lanes if each.lane == lane), None)
    return None


def milliseconds(lane: LaneFigures) -> str:
    """The median, marked where it is a queue."""
    mark = "\\*" if lane.saturated and lane.lane != "direct" else ""
    return f"{lane.p50_ms:.1f}{mark}"


def engine(cell: Cell) -> str:
    """In words."""
    return f"{1000 * cell.delay_s:.0f} ms" if cell.delay_s else "at once"


def form(cell: Cell) -> str:
    """In words."""
    return "stream" if cell.stream else "plain"


def tokens(number: int) -> str:
    """Such as 20 k."""
    return f"{number / 1000:.0f} k"


def plot(results: Results, path: Path) -> None:
    """CPU time by turn; added latency and CPU by history."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    growth = results.growth
    lanes = list(growth.fits)
    for at, lane in enumerate(lanes):
        left.plot(growth.body_kb[1:], growth.cpu_ms[lane][1:], ".", ms=4, color=f"C{at}", label=lane)
        fit = growth.fits[lane]
        ends = [growth.body_kb[1], growth.body_kb[-1]]
        fixed = fit.fixed_ms + fit.per_token_us * mean(growth.new_tokens) / 1000
        left.plot(ends, [fixed + fit.per_kb_us * each / 1000 for each in ends], color=f"C{at}", lw=1)
    left.set(xlabel="body of the call, kB (one session)", ylabel="CPU time of the call, ms", ylim=(0, None))
    left.legend(frameon=False)
    histories = sorted({figures.cell.history_tokens for figures in results.cells})
    width = 0.8 / len(lanes)
    for at, lane in enumerate(lanes):
        each = [found(results, lane=lane, sessions=1, slow=False, stream=False, history=one) for one in histories]
        places = [place + width * (at - (len(lanes) - 1) / 2) for place in range(len(histories))]
        heights = [one.p50_ms if one else 0.0 for one in each]
        low = [max(0.0, one.p50_ms - one.low_ms) if one else 0.0 for one in each]
        high = [max(0.0, one.high_ms - one.p50_ms) if one else 0.0 for one in each]
        right.bar(places, heights, width, color=f"C{at}", yerr=(low, high), ecolor="0.4")
    right.set_xticks(range(len(histories)), [tokens(one) for one in histories])
    right.set(xlabel="tokens of history", ylabel="added latency of one session, p50, ms")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)
