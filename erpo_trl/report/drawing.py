"""How the plots of a report are drawn, from the numbers that `figures.py` makes.

All colours are Okabe and Ito's, which the colour-blind tell apart, and the maps' are made for them; lines differ in dash as well.
"""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from .trust_regions import draw_gradient_weights

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def shown(label: str) -> str:
    """A label as matplotlib shows it as it is: a dollar is no formula, and an underscore at its beginning does not hide it."""
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def draw_lines(panels: Sequence[dict], legend: bool = True) -> Figure:
    """Panels of [`panel`] side by side; empty ones are left out."""
    panels = [p for p in panels if p["lines"]]
    figure = Figure(figsize=(4.6 * len(panels), 3.5), layout="constrained")
    for axis, data in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        _draw_panel(axis, data, legend)
    return figure


def _draw_panel(axis, data: dict, legend: bool = True) -> None:
    for line in data["lines"]:
        index = line["colour"]
        style = _style(index)
        few = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4} if len(line["x"]) < 15 else {}
        axis.plot(line["x"], line["y"], label=shown(line["label"]), linewidth=1.6, **style, **few)
        if line["low"] != line["high"]:
            axis.fill_between(line["x"], line["low"], line["high"], color=style["color"], alpha=0.2, linewidth=0)
        for step in line.get("marked", ()):
            height = np.interp(step, line["x"], line["y"])
            axis.plot(step, height, "x", markersize=9, markeredgewidth=2.2, color=style["color"])
    axis.set(title=data["title"], xlabel="optimizer step", ylabel=data["unit"])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(x=0.02)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=8)


def _tiles(count: int, columns: int, width: float, height: float, **shared) -> tuple[Figure, list]:
    """A figure and its axes, so many to a row; width and height are an axis's, in inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns + 0.7, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    # Shared axes have their numbers in the last row, which may be hidden
    for axis in axes[max(0, count - columns) : count]:
        axis.tick_params(labelbottom=True)
    return figure, axes[:count]


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def draw_weights(data: dict) -> Figure:
    """Histogram of the weights beside the line of their effective sample size."""
    lines = [p for p in data["panels"] if p["lines"]]
    if not data["histograms"]:
        return draw_lines(lines)
    figure = Figure(figsize=(4.6 * (1 + len(lines)), 3.5), layout="constrained")
    axis, *others = figure.subplots(1, 1 + len(lines), squeeze=False)[0]
    for entry in data["histograms"]:
        axis.stairs(
            entry["share"], data["edges"], label=shown(entry["label"]), linewidth=1.6, **_style(entry["colour"])
        )
    axis.set(title="Weights", xlabel="weight w(q)", ylabel="share of the queries")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    for other, panel_data in zip(others, lines):
        _draw_panel(other, panel_data)
    return figure


def draw_grid(data: dict) -> Figure:
    """A heat map per group under one colour bar, with the numbers written in."""
    maps = data["maps"]
    rows, columns = max(len(m["steps"]) for m in maps), max(len(m["temperatures"]) for m in maps)
    width, height = max(3.0, 0.42 * columns + 1.2), max(2.6, 0.3 * rows + 1.2)
    figure, axes = _tiles(len(maps), 2, width, height)
    everything = [v for m in maps for row in m["values"] for v in row if v is not None]
    low, high = 100 * min(everything), 100 * max(everything)
    if low == high:
        low, high = low - 1, high + 1
    for axis, entry in zip(axes, maps):
        values = 100 * np.array([[np.nan if v is None else v for v in row] for row in entry["values"]])
        image = axis.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto", origin="lower")
        axis.set_xticks(range(len(entry["temperatures"])), [f"{t:g}" for t in entry["temperatures"]], fontsize=8)
        axis.set_yticks(range(len(entry["steps"])), [str(step) for step in entry["steps"]], fontsize=8)
        axis.set(title=shown(entry["label"]), xlabel="sampling temperature", ylabel="checkpoint (step)")
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "black" if value > (low + high) / 2 else "white"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=list(axes), label="accuracy (%)")
    return figure


def draw_nll(data: dict) -> Figure:
    """A scatter per group on shared axes."""
    panels = data["panels"]
    figure, axes = _tiles(len(panels), 3, 3.9, 3.7, sharex=True, sharey=True)
    for axis, entry in zip(axes, panels):
        colour = COLOURS[entry["colour"] % len(COLOURS)]
        # As pixels even in an SVG, which thousands of marks would make slow
        axis.scatter(entry["x"], entry["y"], s=8, alpha=0.4, color=colour, linewidths=0, rasterized=True)
        symbols = {"r": "pearson", "ρ": "spearman", "r|len": "partial"}
        numbers = ", ".join(
            f"{symbol} = " + ("–" if entry[name] is None else f"{entry[name]:.2f}") for symbol, name in symbols.items()
        )
        axis.set_title(f"{shown(entry['label'])}\n{numbers}, n = {entry['points']:,}", fontsize=9)
        axis.set(xlabel="prompt-NLL (nats)", ylabel="response-NLL (nats)")
        axis.grid(alpha=0.3)
    return figure


def draw_regions(data: dict) -> Figure:
    """Heat maps, a column per region."""
    columns = [(entry["title"], [np.array(grid) for grid in entry["weights"]]) for entry in data["regions"]]
    return draw_gradient_weights(columns, data["regions"][0]["advantages"])


def as_pixels(figure: Figure) -> np.ndarray:
    """(H, W, 3) uint8 of a figure."""
    from matplotlib.image import imread

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, format="png")
    buffer.seek(0)
    return (imread(buffer)[..., :3] * 255).round().astype(np.uint8)
