"""The study's plots: curves with a band over seeds, accuracy by temperature, and differences with their intervals."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from ..report.drawing import COLOURS, DASHES, MARKERS, shown
from .statistics import Interval, log_interval, mean_interval


@dataclass(frozen=True)
class Line:
    """Args: label; index: its place among the variants, which decides its look; x; y: an interval per x."""

    label: str
    index: int
    x: Sequence[float]
    y: Sequence[Interval]

    @property
    def style(self) -> dict:
        return {"color": COLOURS[self.index % len(COLOURS)], "linestyle": DASHES[self.index % len(DASHES)]}


@dataclass(frozen=True)
class Panel:
    """Args: title; unit: of its vertical axis; lines; log: a logarithmic axis."""

    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False


def seed_line(
    label: str, index: int, curves: Sequence[tuple[np.ndarray, np.ndarray]], log: bool = False
) -> Line | None:
    """Mean and interval over seeds at the steps that all of them have; None where there are none.

    Args: curves: (steps, values) per seed, empty ones left out; log: intervals of the logarithms; steps where a value is not
    positive are left out.
    """
    curves = [(steps, values) for steps, values in curves if len(steps)]
    if not curves:
        return None
    common = curves[0][0]
    for steps, _ in curves[1:]:
        common = np.intersect1d(common, steps)
    table = np.stack([values[np.searchsorted(steps, common)] for steps, values in curves])
    keep = np.isfinite(table).all(0) & ((table > 0).all(0) if log else True)
    common, table = common[keep], table[:, keep]
    if not len(common):
        return None
    interval = log_interval if log else mean_interval
    return Line(label, index, common.tolist(), [interval(column) for column in table.T])


def limits(means: Sequence[float], log: bool) -> tuple[float, float]:
    """Of an axis: the means with a quarter of their range to each side. Intervals of few seeds may run out of it; they would
    press all curves flat.
    """
    values = np.log(means) if log else np.asarray(means)
    low, high = float(values.min()), float(values.max())
    room = (high - low) / 4 or 0.1
    ends = np.array([low - room, high + room])
    return tuple(np.exp(ends) if log else ends)


def draw_panels(panels: Sequence[Panel], xlabel: str, columns: int = 2) -> Figure:
    """Panels of lines with their bands, two to a row; empty ones are left out."""
    panels = [panel for panel in panels if panel.lines]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns + 1.6, 3.4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    handles: dict[str, object] = {}
    for axis, panel in zip(axes, panels):
        for line in panel.lines:
            few = {"marker": MARKERS[line.index % len(MARKERS)], "markersize": 4} if len(line.x) < 15 else {}
            [mean] = axis.plot(line.x, [y.mean for y in line.y], linewidth=1.6, **line.style, **few)
            low, high = ([getattr(y, end) for y in line.y] for end in ("low", "high"))
            axis.fill_between(line.x, low, high, color=line.style["color"], alpha=0.15, linewidth=0)
            handles.setdefault(line.label, mean)
        axis.set(title=panel.title, xlabel=xlabel, ylabel=panel.unit, yscale="log" if panel.log else "linear")
        axis.set_ylim(*limits([y.mean for line in panel.lines for y in line.y], panel.log))
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), map(shown, handles), loc="outside right upper", fontsize=8)
    return figure


def draw_intervals(rows: Mapping[str, Interval], xlabel: str, zero: bool) -> Figure:
    """A row per variant: its mean as a point, its interval as a line. Args: zero: mark 0, of differences."""
    figure = Figure(figsize=(6.4, 0.9 + 0.28 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, found in enumerate(rows.values()):
        colour = COLOURS[place % len(COLOURS)]
        axis.plot([found.low, found.high], [place, place], color=colour, linewidth=1.8)
        axis.plot(found.mean, place, MARKERS[place % len(MARKERS)], color=colour, markersize=5)
    axis.set_yticks(range(len(rows)), [shown(label) for label in rows], fontsize=8)
    axis.invert_yaxis()
    if zero:
        axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel=xlabel)
    axis.grid(alpha=0.3, axis="x")
    return figure


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version of matplotlib: the same numbers give the same file
    figure.savefig(buffer, dpi=110, format="png", metadata={"Software": None})
    return buffer.getvalue()
