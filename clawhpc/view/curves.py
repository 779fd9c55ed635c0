"""The series of a run as charts. Geometry only: the template draws them as inline SVG, stretched to its box.

Coordinates run from 0 to 1000 in both directions, y downwards; strokes do not scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from clawhpc.view.metrics import Points
from clawhpc.view.summary import PARTS, Row, by_step, mean_rewards, short_number

SIZE = 1000.0
NUM_COLOURS = 8
"""After so many series they come again."""
SMOOTH_FROM = 20
"""Points from which a line is also drawn smoothed."""
SMOOTH_SHARE = 0.1
"""Of a series, the span of the exponential moving average."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, one set of dots, or one band of a stack."""

    name: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One small picture."""

    title: str
    hint: str
    series: tuple[Series, ...]
    stacked: bool = False
    unit: str = ""
    from_zero: bool = False
    """The y axis starts at 0 even where no value comes near it."""


LEARNING = (
    ("train/loss", "Loss", "policy loss of the update"),
    ("train/entropy", "Entropy", "of the policy, nats per drawn token"),
    ("train/clip_share", "Clip share", "drawn tokens whose ratio was clipped"),
    ("credit/advantage_std", "Advantage spread", "standard deviation over the step"),
    ("train/no_credit_share", "Share without credit", "tokens that train whose advantage is 0"),
    ("train/sampling_gap_max", "Sampling gap", "largest |old − sampling log-prob|"),
    ("train/truncated_share", "Truncated share", "importance weights over the bound"),
    ("train/update_kl", "Update KL", "how far a step's updates go, mean per token"),
    ("train/sampling_kl", "Sampling KL", "of the learner's policy from the engine's"),
    ("train/reference_kl", "Reference KL", "of the policy from the first one"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("credit/explained_variance", "Explained variance", "of the returns, by the critic"),
    ("train/value_loss", "Value loss", "of the critic, in units of normalised return"),
)
"""Metric, title and meaning of the charts that are shown first."""
BY_HARNESS = {
    "reward": ("Reward", "mean over the rollouts that train"),
    "pass_rate": ("Pass rate", "share of full rewards among those"),
    "spread_share": ("Groups with spread", "share of groups whose rewards differ"),
    "advantage_std": ("Advantage spread", "standard deviation over the step"),
    "sampling_gap": ("Sampling gap", "mean |old − sampling log-prob|"),
    "calls": ("Calls", "mean per rollout"),
    "drawn_tokens": ("Tokens drawn", "mean per rollout"),
    "harness_exit_share": ("Harness exits", "share of rollouts"),
    "timeout_share": ("Timeouts", "share of rollouts"),
    "limit_share": ("Limits reached", "share of rollouts"),
    "left_out_share": ("Left out", "share of rollouts that failed or branched too much"),
}
"""Of `train/<harness>/<name>`: title and meaning of the chart in which each harness is a line."""
COMPUTED = {"tree/row_tokens": "as trees", "tree/path_tokens": "as paths"}
"""Metric -> its name in the chart of what sharing saves."""
STEP_TIME = {"time/collect_s": "collect", "time/build_s": "build", "time/learn_s": "learn"}
"""Metric -> its name in the chart of where a step's time goes."""


def learning_charts(rows: Sequence[Row], metrics: Mapping[str, Points]) -> list[Chart]:
    """Reward, and what the learner logged, in a fixed order; charts without points are left out."""
    reward = Chart(
        title="Reward",
        hint="mean over the rollouts that train",
        series=(
            Series(name="training", points=mean_rewards(rows, "train")),
            Series(name="evaluation", points=mean_rewards(rows, "eval"), dots=True),
        ),
        from_zero=True,
    )
    known = [
        Chart(title=title, hint=hint, series=(Series(name=name, points=metrics.get(name, [])),))
        for name, title, hint in LEARNING
    ]
    return with_points([reward, *known])


def harness_charts(metrics: Mapping[str, Points]) -> list[Chart]:
    """What the learner logged of each harness by itself: a chart for each kind, in which each harness is a line."""
    return with_points(
        [
            Chart(title=title, hint=hint, series=tuple(_of_harnesses(what, metrics)), from_zero=True)
            for what, (title, hint) in BY_HARNESS.items()
        ]
    )


def _of_harnesses(what: str, metrics: Mapping[str, Points]) -> list[Series]:
    split = ((name.split("/"), points) for name, points in metrics.items())
    return [
        Series(name=parts[1], points=points)
        for parts, points in split
        if len(parts) == 3 and parts[0] == "train" and parts[2] == what
    ]


def cost_charts(rows: Sequence[Row], metrics: Mapping[str, Points]) -> list[Chart]:
    """Lengths and times per training step: of the rollouts, and of the step as a whole."""
    parts = Chart(
        title="Time per part",
        hint="mean seconds per rollout",
        series=tuple(Series(name=part, points=_means(rows, partial(_seconds_of, part))) for part in PARTS),
        stacked=True,
        unit=" s",
        from_zero=True,
    )
    computed = Chart(
        title="Tokens computed",
        hint="per step; what sharing saves",
        series=_named_series(COMPUTED, metrics),
        from_zero=True,
    )
    steps = Chart(
        title="Time per step",
        hint="seconds, from plan to new policy",
        series=_named_series(STEP_TIME, metrics),
        stacked=True,
        unit=" s",
        from_zero=True,
    )
    return with_points(
        [
            _mean_chart("Tokens drawn", "mean per rollout", rows, lambda row: row.num_drawn),
            _mean_chart("Calls", "mean per rollout", rows, lambda row: row.num_calls),
            _mean_chart("Longest prompt", "mean tokens", rows, lambda row: row.peak_context),
            parts,
            computed,
            steps,
        ]
    )


def other_charts(metrics: Mapping[str, Points]) -> list[Chart]:
    """Every metric that no other chart shows."""
    shown = {name for name, _, _ in LEARNING} | {"train/reward", "credit/reward_mean", *COMPUTED, *STEP_TIME}
    shown |= {name for name in metrics if name.count("/") == 2 and name.split("/")[2] in BY_HARNESS}
    return [
        Chart(title=name, hint="", series=(Series(name=name, points=points),))
        for name, points in metrics.items()
        if name not in shown and points
    ]


def _named_series(names: Mapping[str, str], metrics: Mapping[str, Points]) -> tuple[Series, ...]:
    """Those of the metrics that have points."""
    return tuple(Series(name=name, points=metrics[metric]) for metric, name in names.items() if metrics.get(metric))


def _mean_chart(title: str, hint: str, rows: Sequence[Row], value: Callable[[Row], float]) -> Chart:
    return Chart(title=title, hint=hint, series=(Series(name="mean", points=_means(rows, value)),), from_zero=True)


def _seconds_of(part: str, row: Row) -> float:
    return row.parts[PARTS.index(part)]


def _means(rows: Sequence[Row], value: Callable[[Row], float]) -> Points:
    return [(float(step), fmean(value(row) for row in members)) for step, members in by_step(rows, "train").items()]


def with_points(charts: list[Chart]) -> list[Chart]:
    """Those that have a point to draw."""
    return [chart for chart in charts if any(series.points for series in chart.series)]


# ---------------------------------------------------------------------------------------------------------------------
# Geometry
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One drawn element of a series."""

    kind: str
    """`line`, `raw` (under a smoothed line), `dots` or `band`."""
    slot: int
    """Colour: by the position of its series in the chart."""
    path: str
    """SVG path data."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A chart, ready for the template."""

    chart: Chart
    shapes: tuple[Shape, ...]
    ticks: tuple[tuple[str, float], ...]
    """(label, y) of the grid lines, top first."""
    first_x: str
    last_x: str
    latest: tuple[tuple[int, str, str], ...]
    """(slot, series, last value) of the series that have points."""
    hover: dict[str, object]
    """For the script: x range, y range, and the points of each series."""


def draw(chart: Chart) -> Drawing:
    """Lay a chart with at least one point out in its box."""
    xs = [x for series in chart.series for x, _ in series.points]
    low_x, high_x = min(xs), max(xs)
    series = _stack(chart.series) if chart.stacked else chart.series
    ticks = nice_ticks([y for one in series for _, y in one.points], from_zero=chart.from_zero)
    frame = Frame(low_x=low_x, high_x=high_x, low_y=ticks[0], high_y=ticks[-1])
    return Drawing(
        chart=chart,
        shapes=tuple(_bands(series, frame) if chart.stacked else _lines(series, frame)),
        ticks=tuple((format_number(tick), frame.y(tick)) for tick in reversed(ticks)),
        first_x=f"{low_x:.0f}",
        last_x=f"{high_x:.0f}",
        latest=tuple(
            (slot % NUM_COLOURS, one.name, format_number(one.points[-1][1]))
            for slot, one in enumerate(chart.series)
            if one.points
        ),
        hover={
            "x": [low_x, high_x],
            "y": [ticks[0], ticks[-1]],
            "stacked": chart.stacked,
            "unit": chart.unit,
            "series": [{"name": one.name, "points": one.points} for one in chart.series],
        },
    )


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The range of values that a box shows."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        """A single step stands in the middle."""
        span = self.high_x - self.low_x
        return SIZE * (value - self.low_x) / span if span else SIZE / 2

    def y(self, value: float) -> float:
        """Downwards."""
        return SIZE * (self.high_y - value) / (self.high_y - self.low_y)

    def path(self, points: Points) -> str:
        """The points joined by straight lines."""
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def _lines(series: Sequence[Series], frame: Frame) -> list[Shape]:
    shapes: list[Shape] = []
    for number, one in enumerate(series):
        if not one.points:
            continue
        slot = number % NUM_COLOURS
        if one.dots or len(one.points) == 1:
            dots = "".join(f"M{frame.x(x):.1f} {frame.y(y):.1f}h0" for x, y in one.points)
            shapes.append(Shape(kind="dots", slot=slot, path=dots))
        smooth = len(one.points) >= SMOOTH_FROM and not one.dots
        shapes.append(Shape(kind="raw" if smooth else "line", slot=slot, path=frame.path(one.points)))
        if smooth:
            shapes.append(Shape(kind="line", slot=slot, path=frame.path(smoothed(one.points))))
    return shapes


def _stack(series: Sequence[Series]) -> tuple[Series, ...]:
    """Each series on top of those before it; where one has no value, it adds nothing."""
    height = dict.fromkeys(sorted({x for one in series for x, _ in one.points}), 0.0)
    stacked = []
    for one in series:
        height = height | {x: height[x] + y for x, y in one.points}
        stacked.append(Series(name=one.name, points=list(height.items())))
    return tuple(stacked)


def _bands(stacked: Sequence[Series], frame: Frame) -> list[Shape]:
    """The area between each series and the one below it; a single step is widened to the whole box."""
    floor = Series(name="", points=[(x, 0.0) for x, _ in stacked[0].points])
    shapes = []
    for slot, (below, above) in enumerate(pairwise([floor, *stacked])):
        upper, lower = _widened(above.points, frame), _widened(below.points, frame)
        outline = [*upper, *reversed(lower)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + "Z"
        shapes.append(Shape(kind="band", slot=slot, path=path))
    return shapes


def _widened(points: Points, frame: Frame) -> list[tuple[float, float]]:
    placed = [(frame.x(x), frame.y(y)) for x, y in points]
    return placed if len(placed) > 1 else [(0.0, placed[0][1]), (SIZE, placed[0][1])]


def smoothed(points: Points) -> Points:
    """Exponential moving average over a tenth of the series, unbiased at its start."""
    keep = 1.0 - 2.0 / (max(SMOOTH_SHARE * len(points), 3.0) + 1.0)
    total = weight = 0.0
    line: Points = []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1.0
        line.append((x, total / weight))
    return line


FLAT_SHARE = 0.03
"""Of a value: a smaller spread is drawn flat, for its ticks would all have the same three digits."""


def nice_ticks(values: Sequence[float], *, from_zero: bool = False) -> list[float]:
    """Three to five round numbers that enclose the values, ascending."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= FLAT_SHARE * max(abs(low), abs(high)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low, high + margin) if from_zero and low >= 0 else (low - margin, high + margin)
    unit = 10.0 ** math.floor(math.log10((high - low) / 3))
    steps = (unit * factor for factor in (1, 2, 5, 10))
    step = next(step for step in steps if _num_ticks(low, high, step) <= 5)
    first = math.floor(low / step + 1e-9)
    return [float(f"{step * (first + at):.12g}") for at in range(_num_ticks(low, high, step))]


def _num_ticks(low: float, high: float, step: float) -> int:
    return math.ceil(high / step - 1e-9) - math.floor(low / step + 1e-9) + 1


def format_number(value: float) -> str:
    """Short: three digits, with a unit from 10,000 on, an exponent below 0.001."""
    if abs(value) >= 10_000:
        return short_number(value)
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}".replace("e-0", "e-")
