"""The plots of a report: what each shows, as plain numbers, and how it is drawn.

A plot's numbers are made by one function and drawn by another, so that tests and readers have the numbers. All colours are
Okabe and Ito's, which the colour-blind tell apart; lines differ in dash as well.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..policy.trust_region import REGIONS, RegionParams
from .analysis import log_series, nll_correlation
from .runs import Run
from .trust_regions import draw_gradient_weights, gradient_weight_grids

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Policy-KL as it is measured every so many steps, else TRL's own, which beta > 0 brings
POLICY_KL = ("policy/kl", "kl")
BINS = 30
# More points than this are drawn from at random; correlations are over all
SHOWN_POINTS = 2000
ADVANTAGES = (1.0, -1.0)

Groups = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Plot:
    """A plot before it is drawn.

    Args: name: of its files; title; caption: what it shows, with units and sources; data: its numbers, JSON-able, None where there
    are none; missing: sentences on what is left out; draw: `data` -> matplotlib figure.
    """

    name: str
    title: str
    caption: str
    data: Any
    missing: list[str]
    draw: Callable[[Any], Figure]


def shown(label: str) -> str:
    """A label as matplotlib shows it as it is: a dollar is no formula, and an underscore at its beginning does not hide it."""
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


# ------------------------------------------------------------------------------------------------------------------- lines
def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]] | None:
    """Mean of several series, and the lowest and highest of them.

    Args: curves: (steps, values) per seed; empty ones are left out.
    Returns: "x", "y", "low" and "high" over the steps of any of them that lie inside all of them, values between two steps being
    read off a straight line; None where nothing is left.
    """
    curves = [(steps, values) for steps, values in curves if len(steps)]
    if not curves:
        return None
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    x = np.unique(np.concatenate([steps for steps, _ in curves]))
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        return None
    y = np.stack([np.interp(x, steps, values) for steps, values in curves])
    return {"x": x.tolist(), "y": y.mean(0).tolist(), "low": y.min(0).tolist(), "high": y.max(0).tolist()}


def panel(groups: Groups, title: str, unit: str, series: Callable[[Run], tuple], missing: list[str]) -> dict:
    """A panel of lines over optimizer steps, one per group; groups without it are named in `missing`."""
    lines = {label: band([series(run) for run in runs]) for label, runs in groups.items()}
    without = [run.name for runs in groups.values() for run in runs if not len(series(run)[0])]
    if without:
        missing.append(f"{title}: nothing known of {', '.join(without)}.")
    # The place in the list of groups decides the colour, whatever is missing
    return {
        "title": title,
        "unit": unit,
        "lines": [
            {"label": label, "colour": index, **line}
            for index, (label, line) in enumerate(lines.items())
            if line is not None
        ],
    }


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
    return figure, axes[:count]


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def drift_plot(groups: Groups) -> Plot:
    """Figure 1: Query-KL and Policy-KL."""
    missing: list[str] = []
    panels = [
        panel(groups, "Query-KL", "nats per prompt token", lambda run: run.series("query/kl"), missing),
        panel(groups, "Policy-KL", "nats per completion token", lambda run: run.series(*POLICY_KL), missing),
    ]
    return _lines(
        "drift",
        "Drift from the policy before training",
        "Query-KL: `query/kl`, by the run's estimator. Policy-KL: `policy/kl`, else TRL's `kl`, which only a run with beta > 0 has.",
        panels,
        missing,
    )


def mean_accuracy(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps and mean Avg@k over benchmarks and temperatures, of the checkpoints that were evaluated on as many of both as any."""
    cells: dict[int, list[float]] = {}
    for accuracy in run.accuracies:
        cells.setdefault(accuracy.step, []).append(accuracy.value)
    most = max(map(len, cells.values()), default=0)
    whole = {step: float(np.mean(values)) for step, values in sorted(cells.items()) if len(values) == most}
    return np.array(list(whole), dtype=int), np.array(list(whole.values()))


def learning_plot(groups: Groups) -> Plot:
    """Figure 4: reward while training and accuracy on held-out problems."""
    missing: list[str] = []
    panels = [
        panel(groups, "Training reward", "mean reward", lambda run: run.series("reward"), missing),
        panel(groups, "Evaluation accuracy", "mean Avg@k, share", mean_accuracy, missing),
    ]
    return _lines(
        "learning",
        "Reward and evaluation accuracy",
        "Evaluation accuracy: mean over benchmarks and temperatures, from the evaluation folders of the checkpoints, else as logged "
        "by `EvaluationCallback`.",
        panels,
        missing,
    )


def entropy_plot(groups: Groups, jumps: Mapping[str, Sequence[int]]) -> Plot:
    """Figure 5: entropy; a cross where a run's entropy left its running band. Args: jumps: label -> steps."""
    missing: list[str] = []
    data = panel(groups, "Entropy", "nats per completion token", lambda run: run.series("entropy"), missing)
    for line in data["lines"]:
        line["marked"] = list(jumps.get(line["label"], ()))
    caption = "Mean entropy of the policy on its completions. A cross: the entropy jumped out of its running band."
    return _lines("entropy", "Entropy", caption, [data], missing)


def ess_panels(groups: Groups, missing: list[str]) -> list[dict]:
    """Effective sample size of the weights, over steps."""
    series = lambda run: run.series("query/weight_ess")  # noqa: E731
    return [panel(groups, "Effective sample size", "share of the queries", series, missing)]


def _lines(name: str, title: str, caption: str, panels: list[dict], missing: list[str]) -> Plot:
    if any(line["low"] != line["high"] for p in panels for line in p["lines"]):
        caption += " Line: mean over seeds; shaded: from the lowest to the highest seed."
    data = {"panels": panels} if any(p["lines"] for p in panels) else None
    return Plot(name, title, caption, data, missing, lambda data: draw_lines(data["panels"]))


# ----------------------------------------------------------------------------------------------------------------- weights
def histogram(values: np.ndarray, edges: np.ndarray) -> list[float]:
    """Share of (N,) values in each bin."""
    return (np.histogram(values, edges)[0] / len(values)).tolist()


def bin_edges(values: Sequence[np.ndarray], bins: int = BINS) -> np.ndarray:
    """(bins + 1,) edges that span all values; where they are all one, a bin's width around it."""
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-6):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


def weights_plot(groups: Groups) -> Plot:
    """Figure 7d: weights of the queries, and their effective sample size over steps."""
    missing: list[str] = []
    pooled = {
        label: np.concatenate(found)
        for label, runs in groups.items()
        if (found := [run.weights for run in runs if run.weights is not None and len(run.weights)])
    }
    for label in groups:
        if label not in pooled:
            missing.append(f"Weights of the queries: not known for {label}.")
    data = {"panels": ess_panels(groups, missing), "edges": [], "histograms": []}
    if pooled:
        edges = bin_edges(list(pooled.values()))
        data["edges"] = edges.tolist()
        data["histograms"] = [
            {"label": label, "colour": list(groups).index(label), "share": histogram(weights, edges)}
            for label, weights in pooled.items()
        ]
    if not pooled and not data["panels"][0]["lines"]:
        data = None
    return Plot(
        "weights",
        "Query weights",
        "Left: weight w(q) of the distinct queries. Right: effective sample size of a step's weights, (Σw)² / (N Σw²).",
        data,
        missing,
        draw_weights,
    )


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


# -------------------------------------------------------------------------------------------------------------------- grid
def grid_plot(groups: Groups) -> Plot:
    """Figure 6: accuracy by checkpoint and sampling temperature, a map per group."""
    missing, maps = [], []
    for label, runs in groups.items():
        cells: dict[tuple[int, float], list[float]] = {}
        for run in runs:
            own: dict[tuple[int, float], list[float]] = {}
            for a in run.accuracies:
                own.setdefault((a.step, a.temperature), []).append(a.value)
            for cell, values in own.items():
                cells.setdefault(cell, []).append(float(np.mean(values)))
        without = [run.name for run in runs if not run.accuracies]
        if without:
            missing.append(
                f"No evaluations of {', '.join(without)}: run erpo-trl eval on its checkpoints, or train with EvaluationCallback."
            )
        if not cells:
            continue
        steps, temperatures = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
        values = [[float(np.mean(cells[s, t])) if (s, t) in cells else None for t in temperatures] for s in steps]
        maps.append({"label": label, "steps": steps, "temperatures": temperatures, "values": values})
    caption = (
        "Mean Avg@k over benchmarks (and seeds), in percent, by checkpoint and sampling temperature. T=0 is greedy."
    )
    return Plot("grid", "Checkpoint × temperature", caption, {"maps": maps} if maps else None, missing, draw_grid)


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


# --------------------------------------------------------------------------------------------------------------------- NLL
def nll_plot(groups: Groups) -> Plot:
    """Figure 9: prompt-NLL against response-NLL."""
    missing, panels = [], []
    for index, (label, runs) in enumerate(groups.items()):
        names = ("nll", "response_nll", "tokens", "response_tokens")
        columns = [np.concatenate([run.queries[name] for run in runs if run.queries] or [[]]) for name in names]
        known = np.isfinite(columns[1])
        prompt, response, tokens, response_tokens = (column[known].astype(float) for column in columns)
        if not len(prompt):
            missing.append(f"Prompt-NLL against response-NLL: {label} kept no queries with responses.")
            continue
        found = nll_correlation(prompt, response, tokens, response_tokens)
        chosen = np.arange(len(prompt))
        if len(chosen) > SHOWN_POINTS:
            chosen = np.sort(np.random.default_rng(0).choice(chosen, SHOWN_POINTS, replace=False))
        panels.append(
            {
                "label": label,
                "colour": index,
                "points": found.points,
                **{n: _finite(getattr(found, n)) for n in ("pearson", "spearman", "partial")},
                "x": prompt[chosen].tolist(),
                "y": response[chosen].tolist(),
            }
        )
    caption = (
        "A point is a query at an optimizer step: its NLL against the mean NLL of its responses in the step, both under the policy "
        "in training and at its temperature. r: Pearson; ρ: Spearman; r|len: Pearson given both lengths in tokens. Queries that "
        "come again count again."
    )
    return Plot(
        "nll", "Prompt-NLL against response-NLL", caption, {"panels": panels} if panels else None, missing, draw_nll
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


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


# ------------------------------------------------------------------------------------------------------------ trust regions
def ratio_clip_grid(advantage: float, low: float, high: float, points: int = 101) -> np.ndarray:
    """Gradient weight of TRL's ratio clip over (μ, π): 0 where the clip holds, else 1.

    Args: advantage: A; low, high: ε, how far r may fall and rise; points: per axis.
    Returns: (points, points), laid out as `gradient_weight_grid`.
    """
    grid = (np.arange(points) + 0.5) / points
    ratio = grid[:, None] / grid[None, :]
    held = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return np.where(held, 0.0, 1.0)


def region_of(args: Mapping) -> tuple[str, list[np.ndarray]] | None:
    """Title and gradient weights of a run's trust region; None where it has no picture. Args: args: the run's settings."""
    name = args.get("trust_region", "ratio_clip")  # RLOO has only the clip
    if name == "ratio_clip":
        low, high = args["epsilon"], args["epsilon_high"] if args.get("epsilon_high") is not None else args["epsilon"]
        title = f"ratio_clip, ε={low:g}" + (f"/{high:g}" if high != low else "")
        return title, [ratio_clip_grid(advantage, low, high) for advantage in ADVANTAGES]
    if REGIONS[name].over == "topk":
        return None
    delta = args["trust_region_delta"]
    params = RegionParams(
        delta=delta or np.inf,
        delta_low=args["trust_region_delta_low"],
        delta_high=args["trust_region_delta_high"],
        ratio_cap=args["trust_region_ratio_cap"],
        epsilon=args["spo_epsilon"],
        coef=args["trust_region_coef"],
    )
    radius = f", ε={params.epsilon:g}" if name == "spo" else f", δ={delta:g}" if delta else ""
    return name + radius, gradient_weight_grids(name, params, ADVANTAGES)


def region_plot(groups: Groups) -> Plot:
    """Gradient weights of the trust regions that the runs trained with."""
    missing, columns = [], {}
    for label, runs in groups.items():
        if not runs[0].args:
            missing.append(f"Trust region: the settings of {label} are not known.")
            continue
        found = region_of(runs[0].args)
        if found is None:
            missing.append(
                f"Trust region: that of {label}, {runs[0].args['trust_region']}, depends on tokens beside the sampled one and has "
                "no such picture."
            )
            continue
        title, grids = found
        columns.setdefault(title, (grids, []))[1].append(label)
    data = None
    if columns:
        data = {
            "regions": [
                {
                    "title": title,
                    "runs": labels,
                    "advantages": list(ADVANTAGES),
                    "weights": np.round(grids, 6).tolist(),
                }
                for title, (grids, labels) in columns.items()
            ]
        }
    caption = (
        "Weight on the policy gradient A·∇r of a token that the rollout sampled with probability μ and the policy now gives π. "
        "Blue: against the advantage; colours end at ±2. "
        + "; ".join(f"{title}: {', '.join(labels)}" for title, (_, labels) in columns.items())
        + "."
    )
    return Plot("trust_region", "Trust regions", caption, data, missing, draw_regions)


def draw_regions(data: dict) -> Figure:
    """Heat maps, a column per region."""
    columns = [(entry["title"], [np.array(grid) for grid in entry["weights"]]) for entry in data["regions"]]
    return draw_gradient_weights(columns, ADVANTAGES)


# -------------------------------------------------------------------------------------------------------- while it trains
def live_images(log_history: Sequence[dict], queries: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Images for a tracker: the run's curves so far, and histograms of its latest queries.

    Args: log_history: of the trainer's state; queries: columns of the latest query file.
    Returns: name -> (H, W, 3) uint8.
    """
    images = {}
    panels = []
    for title, unit, names in (
        ("Query-KL", "nats per prompt token", ("query/kl",)),
        ("Policy-KL", "nats per completion token", POLICY_KL),
        ("Entropy", "nats per completion token", ("entropy",)),
        ("Reward", "mean reward", ("reward",)),
    ):
        steps, values = next((s for s in (log_series(log_history, name) for name in names) if len(s[0])), ([], []))
        line = band([(steps, values)])
        panels.append({"title": title, "unit": unit, "lines": [{"label": title, "colour": 0, **line}] if line else []})
    if any(p["lines"] for p in panels):
        images["plots/curves"] = as_pixels(draw_lines(panels, legend=False))
    figure = Figure(figsize=(13.5, 3.3), layout="constrained")
    labels = {"weight": "weight w(q)", "kl": "Query-KL (nats per token)", "nll_drift": "NLL drift (nats per query)"}
    for axis, (name, label) in zip(figure.subplots(1, 3), labels.items()):
        edges = bin_edges([queries[name]])
        axis.stairs(histogram(queries[name], edges), edges, fill=True, color=COLOURS[0])
        axis.set(xlabel=label, ylabel="share of the queries")
        axis.grid(alpha=0.3)
    steps = queries["step"]
    figure.suptitle(f"Queries of steps {steps.min()} to {steps.max()}", fontsize=10)
    images["plots/queries"] = as_pixels(figure)
    return images


def as_pixels(figure: Figure) -> np.ndarray:
    """(H, W, 3) uint8 of a figure."""
    from matplotlib.image import imread

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, format="png")
    buffer.seek(0)
    return (imread(buffer)[..., :3] * 255).round().astype(np.uint8)
