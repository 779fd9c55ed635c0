"""Fill the page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence

from clawhpc.view.assets import render, to_json
from clawhpc.view.compare import compare_curves, compare_other_curves, compare_tables, config_table
from clawhpc.view.compared import ComparedRun
from clawhpc.view.curves import NUM_COLOURS, draw
from clawhpc.view.page import Section


def build_report(runs: Sequence[ComparedRun]) -> str:
    """One self-contained page for at least one run, whatever each of them has."""
    sections = [
        Section(title="Curves", drawings=tuple(map(draw, compare_curves(runs)))),
        Section(
            title="Everything else that was logged",
            drawings=tuple(map(draw, compare_other_curves(runs))),
            folded=True,
        ),
    ]
    return render(
        "report.html.j2",
        ("base.js",),
        names=[run.name for run in runs],
        legend=[(number % NUM_COLOURS, run.name, str(run.root)) for number, run in enumerate(runs)],
        tables=compare_tables(runs),
        config=config_table(runs),
        sections=sections,
        hover=to_json([drawing.hover for section in sections for drawing in section.drawings]),
    )
