"""The plots of a report: what each shows, as plain numbers.

A plot's numbers are made by one function here and drawn by another in `drawing.py`, so that tests and readers have the numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..policy.trust_region import REGIONS, RegionParams
from .analysis import log_series, nll_correlation
from .drawing import COLOURS, as_pixels, draw_grid, draw_lines, draw_nll, draw_regions, draw_weights
from .runs import Run
from .trust_regions import gradient_weight_grids

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
    # A checkpoint may have been evaluated twice, with another seed or k
    cells: dict[int, dict[tuple, list[float]]] = {}
    for accuracy in run.accuracies:
        cell = (accuracy.benchmark, accuracy.temperature)
        cells.setdefault(accuracy.step, {}).setdefault(cell, []).append(accuracy.value)
    most = max(map(len, cells.values()), default=0)
    whole = {
        step: float(np.mean([np.mean(values) for values in found.values()]))
        for step, found in sorted(cells.items())
        if len(found) == most
    }
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


# --------------------------------------------------------------------------------------------------------------------- NLL
def nll_plot(groups: Groups) -> Plot:
    """Figure 9: prompt-NLL against response-NLL."""
    missing, panels = [], []
    for index, (label, runs) in enumerate(groups.items()):
        names = ("nll", "response_nll", "tokens", "response_tokens")
        columns = [np.concatenate([run.queries[name] for run in runs if run.queries] or [[]]) for name in names]
        known = np.isfinite(columns[0]) & np.isfinite(columns[1])
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
    if name == "ratio_clip" and "epsilon" not in args:
        return None  # DPO samples nothing
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
            name = runs[0].args.get("trust_region")
            missing.append(
                f"Trust region: {label} has none, as its trainer samples nothing."
                if name is None
                else f"Trust region: that of {label}, {name}, depends on tokens beside the sampled one and has no such picture."
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
        values = queries[name][np.isfinite(queries[name])]
        if len(values):
            edges = bin_edges([values])
            axis.stairs(histogram(values, edges), edges, fill=True, color=COLOURS[0])
        if len(values) < len(queries[name]):
            axis.set_title(f"{len(queries[name]) - len(values)} of {len(queries[name])} not finite", fontsize=9)
        axis.set(xlabel=label, ylabel="share of the queries")
        axis.grid(alpha=0.3)
    steps = queries["step"]
    figure.suptitle(f"Queries of steps {steps.min()} to {steps.max()}", fontsize=10)
    images["plots/queries"] = as_pixels(figure)
    return images
