from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import UserError
from clawhpc.view.curves import (
    Chart,
    Series,
    draw,
    format_number,
    harness_charts,
    nice_ticks,
    other_charts,
    smoothed,
)
from clawhpc.view.metrics import read_metrics

values = st.lists(st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-99), min_size=1, max_size=20)
"""What is smaller is no number that anyone logs."""


@given(values, st.booleans())
def test_ticks_are_few_ascend_and_enclose_every_value(points: list[float], from_zero: bool) -> None:
    ticks = nice_ticks(points, from_zero=from_zero)
    slack = 1e-6 * max(map(abs, [*points, *ticks]))
    assert 2 <= len(ticks) <= 5
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= min(points) + slack
    assert ticks[-1] >= max(points) - slack
    assert not from_zero or ticks[0] <= 0 <= ticks[-1]
    assert len({format_number(tick) for tick in ticks}) == len(ticks)


@given(values)
def test_a_line_stays_in_its_box(points: list[float]) -> None:
    drawing = draw(Chart(title="t", hint="", series=(Series(name="a", points=list(enumerate([*points, 0.0]))),)))
    heights = [float(point.split()[1]) for point in drawing.shapes[0].path.removeprefix("M").split("L")]
    assert all(-1 <= height <= 1001 for height in heights)


def test_a_line_fills_its_box_and_a_single_step_is_a_dot() -> None:
    line = draw(Chart(title="t", hint="", series=(Series(name="a", points=[(0, 0), (4, 1)]),)))
    assert [shape.path for shape in line.shapes] == ["M0.0 1000.0L1000.0 0.0"]
    assert (line.first_x, line.last_x, line.latest) == ("0", "4", ((0, "a", "1"),))
    dot = draw(Chart(title="t", hint="", series=(Series(name="a", points=[(3, 5.0)]),)))
    assert dot.shapes[0].kind == "dots"
    assert dot.shapes[0].path.startswith("M500.0 ")


def test_a_series_without_points_keeps_the_colours_of_the_others() -> None:
    chart = Chart(title="t", hint="", series=(Series(name="a", points=[]), Series(name="b", points=[(0, 1.0)])))
    assert draw(chart).latest == ((1, "b", "1"),)
    assert {shape.slot for shape in draw(chart).shapes} == {1}


def test_bands_stand_on_one_another() -> None:
    below, above = [(0.0, 1.0), (1.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)]
    series = (Series(name="a", points=below), Series(name="b", points=above))
    drawing = draw(Chart(title="t", hint="", series=series, stacked=True, from_zero=True))
    assert [label for label, _ in drawing.ticks] == ["4", "3", "2", "1", "0"]
    assert drawing.shapes[1].path == "M0.0 0.0L1000.0 0.0L1000.0 750.0L0.0 750.0Z"


def test_a_band_that_lacks_a_step_adds_nothing_there() -> None:
    series = (Series(name="a", points=[(0.0, 1.0)]), Series(name="b", points=[(0.0, 1.0), (1.0, 1.0)]))
    drawing = draw(Chart(title="t", hint="", series=series, stacked=True, from_zero=True))
    assert drawing.shapes[1].path.startswith("M0.0 0.0L1000.0 500.0L")
    assert drawing.shapes[1].path.endswith("L1000.0 1000.0L0.0 500.0Z")


def test_smoothing_keeps_a_constant_and_starts_unbiased() -> None:
    assert [y for _, y in smoothed([(float(x), 2.0) for x in range(30)])] == pytest.approx([2.0] * 30)
    assert smoothed([(0.0, 5.0), (1.0, 0.0)])[0] == (0.0, 5.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25678, "0.257"), (1234.5678, "1235"), (3e-5, "3e-5"), (2.5e7, "25 M"), (-0.5, "-0.5")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def write_csv(folder: Path, text: str, at: int) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    os.utime(folder / "metrics.csv", (at, at))


def test_logs_of_a_resumed_run_are_one_curve_and_the_newest_value_of_a_step_wins(tmp_path: Path) -> None:
    write_csv(tmp_path / "version_9", "epoch,step,train/loss\n0,0,1.0\n0,1,2.0\n", at=1)
    write_csv(tmp_path / "version_10", "epoch,step,train/loss,train/lr\n0,1,3.0,0.1\n0,2,4.0,\n", at=2)
    assert read_metrics(tmp_path) == {
        "train/loss": [(0.0, 1.0), (1.0, 3.0), (2.0, 4.0)],
        "train/lr": [(1.0, 0.1)],
    }


def test_a_log_with_bytes_that_are_no_text_keeps_its_other_values(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"step,train/loss,\xff\xfe\n0,1.0,2.0\n1,\xff,\n")
    assert read_metrics(tmp_path)["train/loss"] == [(0.0, 1.0)]


def test_a_log_that_is_no_csv_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "a", 'step,train/loss\n0,"' + "1" * 200_000 + "\n", at=1)
    with pytest.raises(UserError, match=r"a/metrics\.csv: not a CSV log"):
        read_metrics(tmp_path)


def test_a_line_that_is_being_written_and_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write_csv(tmp_path / "a", "step,train/loss\n0,nan\n1,inf\n2,0.5\n3,0.12", at=1)
    assert read_metrics(tmp_path) == {"train/loss": [(2.0, 0.5)]}
    assert read_metrics(tmp_path / "nothing") == {}


def test_what_was_logged_of_each_harness_is_a_line_in_a_chart_of_its_kind_and_nowhere_else() -> None:
    points = [(0.0, 0.5)]
    metrics = dict.fromkeys(("train/loss", "train/pi/reward", "train/codex/reward", "train/pi/calls"), points)
    charts = harness_charts(metrics)
    assert [(chart.title, [one.name for one in chart.series]) for chart in charts] == [
        ("Reward", ["pi", "codex"]),
        ("Calls", ["pi"]),
    ]
    assert other_charts(metrics) == []
    assert harness_charts({"train/loss": points}) == []
    (own,) = other_charts({"train/pi/completed_share": points})
    assert own.title == "train/pi/completed_share"
