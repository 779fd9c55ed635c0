"""Read a run and fill the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawhpc.paths import RunPaths
from clawhpc.records import POLICY_OUTCOMES
from clawhpc.store import count_rollouts, open_plans, published_steps, read_plans, read_rollouts, write_atomic
from clawhpc.view.assets import render, to_json
from clawhpc.view.curves import Drawing, cost_charts, draw, harness_charts, learning_charts, other_charts
from clawhpc.view.detail import Decode, TextTable, describe_rollout
from clawhpc.view.metrics import Points, read_metrics
from clawhpc.view.summary import Row, choose_embedded, count_dropped, count_outcomes, figures, notices, summarise

SCRIPTS = ("base.js", "page.js", "tree.js", "rollout.js")
"""Joined in this order into the one script of the page."""


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """What the page holds."""

    num_trees: int = 60
    """Rollouts whose tree, messages and tails are on the page; the table and the curves hold all."""


def write_page(paths: RunPaths, decode: Decode, settings: ViewSettings) -> Path:
    """Write the page of a run, whole or not at all; returns where."""
    write_atomic(paths.page, build_page(paths, decode, settings).encode())
    return paths.page


def build_page(paths: RunPaths, decode: Decode, settings: ViewSettings) -> str:
    """The page of a run as it stands now, also of one that is empty or still growing."""
    rows = sorted((summarise(record) for record in read_rollouts(paths)), key=lambda row: row.started_at)
    chosen = choose_embedded(rows, settings.num_trees)
    texts = TextTable()
    details = {
        record.rollout_id: describe_rollout(record, texts, decode)
        for record in read_rollouts(paths)
        if record.rollout_id in chosen
    }
    metrics = read_metrics(paths.metrics) if paths.metrics.exists() else {}
    sections = draw_sections(rows, metrics)
    return render(
        "page.html.j2",
        SCRIPTS,
        name="/".join(paths.root.resolve().parts[-2:]),
        state=describe_state(paths),
        figures=figures(rows, sum(plan.num_rollouts for plan in read_plans(paths)), published_steps(paths)),
        notices=notices(rows, metrics),
        sections=sections,
        outcomes=count_outcomes(rows),
        policy_outcomes=POLICY_OUTCOMES,
        dropped=count_dropped(rows),
        num_rows=len(rows),
        num_details=len(details),
        num_shortened=texts.shortened,
        config=paths.config.read_text(encoding="utf-8", errors="replace") if paths.config.exists() else "",
        data={
            "rows": to_json([_row_values(row) for row in rows]),
            "hover": to_json([drawing.hover for section in sections for drawing in section.drawings]),
            "texts": to_json(texts.texts),
        },
        details=[(rollout_id, to_json(detail)) for rollout_id, detail in details.items()],
    )


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts under one heading."""

    title: str
    drawings: tuple[Drawing, ...]
    folded: bool = False


def draw_sections(rows: Sequence[Row], metrics: Mapping[str, Points]) -> list[Section]:
    """All curves of the page; a section may be empty."""
    return [
        Section(title="Learning", drawings=tuple(map(draw, learning_charts(rows, metrics)))),
        Section(title="By harness", drawings=tuple(map(draw, harness_charts(metrics)))),
        Section(title="Lengths and times", drawings=tuple(map(draw, cost_charts(rows, metrics)))),
        Section(title="Everything else that was logged", drawings=tuple(map(draw, other_charts(metrics))), folded=True),
    ]


def describe_state(paths: RunPaths) -> str:
    """One line: what the run is waiting for, or that nothing is open."""
    plans = open_plans(paths)
    if not plans:
        return "Every planned rollout has been collected." if read_plans(paths) else "Nothing has been planned yet."
    waits = (f"{plan.phase} step {plan.step}: {count_rollouts(paths, plan)} of {plan.num_rollouts}" for plan in plans)
    return f"In progress, or interrupted. Rollouts collected for {'; '.join(waits)}."


def _row_values(row: Row) -> Sequence[object]:
    """One row of the table, in the order that page.js reads."""
    return (
        row.rollout_id,
        row.phase,
        row.step,
        row.task_id,
        row.harness,
        row.sample,
        row.outcome,
        row.reward,
        row.num_calls,
        row.num_drawn,
        row.peak_context,
        round(row.seconds, 2),
    )
