"""What an evaluation says, policies × harnesses × task sets: as JSON, as tables for a person, as numbers by name. Pure.

`Evaluation` is the shape of the `finished.json` of a run of `python -m clawhpc.evaluate`: see docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from clawhpc.passrate import Estimate, PassTable, Price, by_pair, paired_differences, tabulate
from clawhpc.records import EngineTime, RolloutRecord

FORMAT = 1
"""Of the JSON; another number where a name in it has changed its meaning."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """Who answered."""

    name: str
    source: str
    """Its folder, or its model and endpoint."""
    policy_step: int
    """Its number in the run: by which records say who drew a token, and of its folder in `policies/`, if it has one."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """What was asked."""

    name: str
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One policy with one harness on one set."""

    policy: str
    harness: str
    set: str
    step: int
    """Its rollouts are those in `rollouts/eval-STEP` with its harness."""
    table: PassTable


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a policy is better by than another, with the same harness on the tasks for which both have a verdict."""

    policy: str
    baseline: str
    """The first policy of the evaluation."""
    harness: str
    set: str
    num_tasks: int
    mean_reward: Estimate
    pass_at_1: Estimate


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """What engines of ours took for one policy on one set, with all harnesses; of a worker that was killed, nothing."""

    policy: str
    set: str
    time: EngineTime
    """Summed over workers."""
    num_devices: int
    """That an engine is spread over: on GPUs, `time.wall_s` times this is GPU seconds."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All cells, in the order of policies, sets and harnesses."""

    format: int = FORMAT
    run: str
    """Its folder."""
    num_samples: int
    """Planned rollouts of each task with each harness."""
    temperature: float
    """At which policies draw; a model behind an API is asked for it."""
    policies: tuple[EvaluatedPolicy, ...]
    sets: tuple[EvaluatedSet, ...]
    harnesses: tuple[str, ...]
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]
    """Of every policy but the first; without those for which the two share no task with a verdict."""
    engines: tuple[EngineShare, ...]
    """None of a model behind an API."""
    cpu_s: dict[str, float]
    """Part of the run -> CPU seconds, as far as is known: `harness` of these cells; `engine` and `proxy` of all workers
    that the run has had, whoever was compared.
    """


def lighten(record: RolloutRecord) -> RolloutRecord:
    """What a table needs of a rollout: whole, those of a large evaluation do not fit into memory."""
    calls = tuple(replace(call, new_messages=(), tools=(), reply=None, tokens=None) for call in record.calls)
    return replace(record, instruction="", calls=calls, exec_result=None, mcp_calls=())


def make_cells(
    policy: str, on: str, step: int, harnesses: Sequence[str], records: Sequence[RolloutRecord], price: Price | None
) -> tuple[Cell, ...]:
    """Those of `policy` on the set `on`: what its `records` say by themselves, whatever else is evaluated."""
    return tuple(
        Cell(policy=policy, harness=harness, set=on, step=step, table=tabulate(of_harness(records, harness), price))
        for harness in harnesses
    )


def compare(
    names: tuple[str, str],
    on: str,
    harnesses: Sequence[str],
    before: Sequence[RolloutRecord],
    after: Sequence[RolloutRecord],
) -> Iterator[Difference]:
    """What the second of `names`, with its rollouts `after`, is better by than the first on the set `on`."""
    for harness in harnesses:
        one, other = of_harness(before, harness), of_harness(after, harness)
        if shared := by_pair(one).keys() & by_pair(other).keys():
            better_by = paired_differences(one, other)
            yield Difference(
                baseline=names[0],
                policy=names[1],
                harness=harness,
                set=on,
                num_tasks=len(shared),
                mean_reward=better_by["reward"],
                pass_at_1=better_by["pass@1"],
            )


def of_harness(records: Sequence[RolloutRecord], harness: str) -> list[RolloutRecord]:
    """Those of `records` with `harness`."""
    return [record for record in records if record.key.harness == harness]


# ---------------------------------------------------------------------------------------------------------------------
# For a person
# ---------------------------------------------------------------------------------------------------------------------


def as_tables(evaluation: Evaluation) -> Iterator[Table]:
    """Of each set: rates, what a rollout took, how rollouts ended; and what policies differ by from the first."""
    for one in evaluation.sets:
        cells = [cell for cell in evaluation.cells if cell.set == one.name]
        yield rates_table(one, evaluation.num_samples, cells)
        yield effort_table(one, cells)
        if engines := [share for share in evaluation.engines if share.set == one.name]:
            yield engine_table(one, engines)
        if differences := [difference for difference in evaluation.differences if difference.set == one.name]:
            yield difference_table(one, differences)


def rates_table(on: EvaluatedSet, num_samples: int, cells: Sequence[Cell]) -> Table:
    """One row per policy and harness; every number with its 95 % interval over tasks."""
    most = max((k for cell in cells for k in cell.table.pass_at_k), default=None)
    title = f"{on.name}: {on.num_tasks} tasks, {num_samples} rollouts of each; 95 % intervals over tasks"
    rows = [
        (
            *(cell.policy, cell.harness, f"{cell.table.num_rollouts}", f"{cell.table.num_failed}"),
            *map(spell, (cell.table.mean_reward, cell.table.pass_at_1)),
            *((spell(cell.table.pass_at_k.get(most)),) if most else ()),
        )
        for cell in cells
    ]
    columns = ("policy", "harness", "judged", "failed", "reward", "pass@1", *((f"pass@{most}",) if most else ()))
    return make_table(title, columns, rows)


EFFORT_COLUMNS = {
    "calls": "calls",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "sampled": "sampled_tokens",
    "wall s": "wall_s",
    "cpu s": "harness_cpu_s",
    "USD": "policy_usd",
    "judge USD": "judge_usd",
}
"""Column -> what of `PassTable.per_rollout` it shows; one that no cell has is left out."""


def effort_table(on: EvaluatedSet, cells: Sequence[Cell]) -> Table:
    """What a rollout took on average, and how rollouts ended."""
    shown = {
        column: name for column, name in EFFORT_COLUMNS.items() if any(name in cell.table.per_rollout for cell in cells)
    }
    rows = [
        (
            *(cell.policy, cell.harness),
            *(spell_mean(cell.table.per_rollout.get(name)) for name in shown.values()),
            ", ".join(f"{count} {outcome}" for outcome, count in cell.table.outcomes.items()),
        )
        for cell in cells
    ]
    return make_table(f"{on.name}: a rollout on average", ("policy", "harness", *shown, "outcomes"), rows)


def engine_table(on: EvaluatedSet, engines: Sequence[EngineShare]) -> Table:
    """One row per policy."""
    rows = [(one.policy, f"{one.time.wall_s:,.0f}", f"{one.time.cpu_s:,.0f}", f"{one.num_devices}") for one in engines]
    return make_table(f"{on.name}: engines, all harnesses together", ("policy", "wall s", "cpu s", "devices"), rows)


def difference_table(on: EvaluatedSet, differences: Sequence[Difference]) -> Table:
    """One row per policy and harness."""
    rows = [
        (one.policy, one.harness, f"{one.num_tasks}", *map(spell, (one.mean_reward, one.pass_at_1)))
        for one in differences
    ]
    title = f"{on.name}: better than {differences[0].baseline} by, paired by task; 95 % intervals"
    return make_table(title, ("policy", "harness", "tasks", "reward", "pass@1"), rows)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Names are folded where there is no room; numbers are not."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_name = column in ("policy", "harness", "outcomes")
        table.add_column(column, overflow="fold", no_wrap=not is_name, justify="left" if is_name else "right")
    for row in rows:
        table.add_row(*row)
    return table


def spell(estimate: Estimate | None) -> str:
    """To the second digit: the third is noise where there are fewer than ten thousand tasks."""
    return "" if estimate is None else f"{estimate.mean:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def spell_mean(estimate: Estimate | None) -> str:
    """To three digits."""
    return "" if estimate is None else f"{estimate.mean:.3g}" if abs(estimate.mean) < 100 else f"{estimate.mean:,.0f}"


# ---------------------------------------------------------------------------------------------------------------------
# For Weights & Biases
# ---------------------------------------------------------------------------------------------------------------------


def as_rows(evaluation: Evaluation) -> tuple[list[str], list[list[str | float | None]]]:
    """Columns, and one row per cell: every mean, and the bounds of the rates."""
    rows: list[dict[str, str | float | None]] = [
        {"policy": cell.policy, "harness": cell.harness, "set": cell.set, **numbers(cell.table)}
        for cell in evaluation.cells
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def as_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`SET/HARNESS/POLICY/name` -> number."""
    return {
        f"{cell.set}/{cell.harness}/{cell.policy}/{name}": value
        for cell in evaluation.cells
        for name, value in numbers(cell.table).items()
    }


def numbers(table: PassTable) -> dict[str, float]:
    """Name -> number, of those that there are."""
    rates = {"reward": table.mean_reward, "pass@1": table.pass_at_1}
    rates |= {f"pass@{k}": estimate for k, estimate in table.pass_at_k.items()}
    known = {name: estimate for name, estimate in rates.items() if estimate is not None}
    counts = {"tasks": table.num_tasks, "rollouts": table.num_rollouts, "failed": table.num_failed}
    counts |= {f"outcome/{outcome}": count for outcome, count in table.outcomes.items()}
    bounds = {f"{name}/{end}": getattr(one, end) for name, one in known.items() for end in ("low", "high")}
    return {
        **{name: estimate.mean for name, estimate in (known | table.per_rollout).items()},
        **bounds,
        **{name: float(count) for name, count in counts.items()},
    }
