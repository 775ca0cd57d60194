"""`erpo-trl report`: what several runs did, side by side, in the shape of the ERPO paper's figures and its Table 3."""

import argparse
import importlib.util
import io
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..cli import InputError
from .analysis import SIGNS, Collapse, cross_lag_correlation, drift, find_collapses, tail_mean, train_eval_gaps
from .document import Picture, Section, as_html, as_markdown
from .runs import Run, groups, load_runs

TITLE = "Training report"
# By these files a folder is known as a report, which a new one may take the place of
FILES = ("report.html", "report.md", "report.json")
TRAIN_ACCURACY = "rewards/accuracy_reward/mean"  # other rewards are no share of right answers
# Longest lag of the cross-lag table, in logs, where the run is long enough
MAX_LAG = 10


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def _over_seeds(values: Sequence[float], digits: int = 4) -> str:
    """A mean over runs, and where they differ the lowest and highest."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "–"
    mean = _number(float(np.mean(values)), digits)
    return (
        mean
        if min(values) == max(values)
        else f"{mean} [{_number(min(values), digits)}, {_number(max(values), digits)}]"
    )


def runs_section(labelled: dict[str, list[Run]], notes: list[str]) -> Section:
    """Which runs these are, and what each lacks."""
    rows = [["run", "group", "steps", "seed", "α", "β", "weights", "trust region", "folder"]]
    for label, runs in labelled.items():
        for run in runs:
            a = run.args
            alpha = _number(a.get("query_kl_coef"))
            about = [alpha, _number(a.get("beta")), str(a.get("query_weight", "–")), str(a.get("trust_region", "–"))]
            seed = "–" if run.seed is None else str(run.seed)
            rows.append([run.name, label, f"{run.steps} of {run.max_steps}", seed, *about, str(run.path)])
    section = Section("Runs", [rows])
    section.missing = [f"{run.name}: {note}" for runs in labelled.values() for run in runs for note in run.notes]
    section.missing += notes
    return section


def numbers_section(labelled: dict[str, list[Run]]) -> tuple[Section, list[dict]]:
    """Table 3: drift and entropy at the end of the run."""
    from .figures import POLICY_KL, mean_accuracy

    head = ["", "Query-KL", "Policy-KL", "entropy", "reward", "evaluation accuracy", "Query-KL per 100 steps"]
    rows, data = [head], []
    for label, runs in labelled.items():
        kls = [run.series("query/kl") for run in runs]
        columns = {
            "query_kl": [tail_mean(values) for _, values in kls],
            "policy_kl": [tail_mean(run.series(*POLICY_KL)[1]) for run in runs],
            "entropy": [tail_mean(run.series("entropy")[1]) for run in runs],
            "reward": [tail_mean(run.series("reward")[1]) for run in runs],
            "accuracy": [float(v[-1]) if len(v) else math.nan for _, v in map(mean_accuracy, runs)],
            "query_kl_slope": [drift(*series).slope if len(series[1]) else math.nan for series in kls],
        }
        rows.append([label, *map(_over_seeds, columns.values())])
        data.append({"label": label} | {name: [_json(v) for v in values] for name, values in columns.items()})
    text = (
        "Means over the last tenth of the logs; KL in nats per token, entropy in nats per token, accuracy of the last checkpoint. "
        "Brackets: lowest and highest seed."
    )
    return Section("At the end of the run", [text, rows]), data


def gap_section(labelled: dict[str, list[Run]]) -> tuple[Section, list[dict]]:
    """Tables 4 and 5: training accuracy minus evaluation accuracy."""
    from .figures import mean_accuracy

    section = Section("Train–eval gap")
    rows, data = [["run", "checkpoints", "mean gap", "gap at the last checkpoint"]], []
    for runs in labelled.values():
        for run in runs:
            gaps = train_eval_gaps(*run.series(TRAIN_ACCURACY), *mean_accuracy(run))
            if not gaps:
                section.missing.append(
                    f"Gap: {run.name} has no evaluated checkpoint, or was not trained with accuracy_reward."
                )
                continue
            values = [gap for _, gap in gaps]
            rows.append([run.name, str(len(gaps)), f"{100 * np.mean(values):.2f}", f"{100 * values[-1]:.2f}"])
            data.append({"label": run.name, "gaps": gaps})
    if data:
        section.blocks = [
            "Training accuracy minus evaluation accuracy, in points of percent; the mean is over checkpoints.",
            rows,
        ]
    return section, data


def cross_lag_section(labelled: dict[str, list[Run]]) -> tuple[Section, list[dict]]:
    """At which lag Query-KL goes with entropy and with accuracy."""
    section = Section("Query-KL, entropy and accuracy: which comes first")
    rows, data = [["run", "Query-KL with", "correlation at lag 0", "strongest", "at a lag of (steps)"]], []
    for runs in labelled.values():
        for run in runs:
            x = dict(zip(*run.series("query/kl")))
            for name, series in (("entropy", run.series("entropy")), ("accuracy", run.series(TRAIN_ACCURACY))):
                y = dict(zip(*series))
                steps = sorted(x.keys() & y.keys())
                lags = min(MAX_LAG, len(steps) // 3)
                curve = cross_lag_correlation([x[s] for s in steps], [y[s] for s in steps], lags)
                finite = [(lag, r) for lag, r in curve if math.isfinite(r)]
                if not finite:
                    section.missing.append(f"Cross-lag: too few logs of Query-KL and {name} in {run.name}.")
                    continue
                spacing = float(np.median(np.diff(steps)))
                lag, strongest = max(finite, key=lambda pair: abs(pair[1]))
                at_zero = dict(curve)[0]
                rows.append([run.name, name, _number(at_zero, 3), _number(strongest, 3), f"{lag * spacing:+g}"])
                points = [[l * spacing, _json(r)] for l, r in curve]  # noqa: E741
                data.append({"label": run.name, "with": name, "curve": points})
    if data:
        text = (
            "Pearson's correlation between logs; at a positive lag Query-KL comes first. Curves that rise or fall throughout "
            "correlate at every lag. Accuracy is that of training."
        )
        section.blocks = [text, rows]
    return section, data


def collapses_of(run: Run) -> list[Collapse]:
    """Signs of collapse in a run's log."""
    return find_collapses({name: run.series(name) for name in SIGNS})


def collapse_section(labelled: dict[str, list[Run]]) -> tuple[Section, list[dict]]:
    """Entropy jumps and reward falls."""
    lines, data = [], []
    for runs in labelled.values():
        for run in runs:
            found = collapses_of(run)
            lines += [f"{run.name}: {collapse}." for collapse in found] or [f"{run.name}: none found."]
            data += [{"label": run.name, "kind": c.kind, "step": c.step, "noticed": c.noticed} for c in found]
    return Section("Signs of collapse", lines), data


def build(runs: Sequence[Run], notes: list[str]) -> tuple[list[Section], dict, dict[str, bytes]]:
    """Everything that a report consists of.

    Returns: its sections; the numbers behind them, JSON-able; and the SVG of each plot by name.
    """
    from . import figures

    labelled = groups(runs)
    jumps = {
        label: [c.step for run in members for c in collapses_of(run) if c.kind == SIGNS["entropy"][0]]
        for label, members in labelled.items()
    }
    plots = [
        figures.drift_plot(labelled),
        figures.learning_plot(labelled),
        figures.entropy_plot(labelled, jumps),
        figures.grid_plot(labelled),
        figures.weights_plot(labelled),
        figures.nll_plot(labelled),
        figures.region_plot(labelled),
    ]
    sections, pictures, data = [], {}, {"plots": {}}
    for plot in plots:
        data["plots"][plot.name] = plot.data
        section = Section(plot.title, missing=plot.missing)
        if plot.data is not None:
            png, svg = rendered(plot)
            section.blocks = [Picture(plot.name, png, plot.caption)]
            pictures[f"{plot.name}.png"], pictures[f"{plot.name}.svg"] = png, svg
        sections.append(section)
    numbers, data["numbers"] = numbers_section(labelled)
    gap, data["gaps"] = gap_section(labelled)
    lag, data["cross_lag"] = cross_lag_section(labelled)
    collapse, data["collapses"] = collapse_section(labelled)
    return [runs_section(labelled, notes), numbers, *sections, gap, lag, collapse], data, pictures


def rendered(plot) -> tuple[bytes, bytes]:
    """A plot that has data as PNG and as SVG."""
    figure = plot.draw(plot.data)
    png, svg = io.BytesIO(), io.BytesIO()
    for buffer, kind in ((png, "png"), (svg, "svg")):
        # Tight: a layout that shares a colour bar lets long labels stand out of the figure
        figure.savefig(buffer, dpi=150, format=kind, bbox_inches="tight")
    return png.getvalue(), svg.getvalue()


def write_report(output: Path, sections: Sequence[Section], data: dict, pictures: dict[str, bytes]) -> None:
    """Writes the folder whole or not at all; an earlier report in its place goes, and what else lies there stays.

    Raises: ValueError where `output` holds something else.
    """
    check_output(output)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / "report.html").write_text(as_html(TITLE, sections), encoding="utf-8")
        (unfinished / "report.md").write_text(as_markdown(TITLE, sections), encoding="utf-8")
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        (unfinished / "report.json").write_text(text + "\n", encoding="utf-8")
        for name, content in pictures.items():
            (unfinished / name).write_bytes(content)
        if output.exists():
            os.replace(output, old)
        try:
            os.replace(unfinished, output)
        except OSError:
            if old.exists():
                os.replace(old, output)
            raise
        if old.exists():
            for path in _of_others(old):
                os.replace(path, output / path.name)
            shutil.rmtree(old)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _of_others(report: Path) -> list[Path]:
    """What lies in a report's folder that no report has written."""
    plots = json.loads((report / "report.json").read_text(encoding="utf-8")).get("plots", {})
    own = {*FILES, *(f"{name}.{ending}" for name in plots for ending in ("png", "svg"))}
    return [path for path in report.iterdir() if path.name not in own]


def check_output(output: Path) -> None:
    """Raises: ValueError where `output` is neither free nor an earlier report, or cannot be a folder."""
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{output} cannot be made: {above} is no folder")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not all((output / name).is_file() for name in FILES):
        raise ValueError(f"{output} exists and is no report: give --output a folder of its own")


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def make_report(
    runs: Sequence[str | Path],
    output: str | Path,
    names: Sequence[str] | None = None,
    evaluations: Sequence[str | Path] = (),
) -> dict:
    """Writes a report on training runs.

    Args: runs: output folders of training; output: folder to write; names: a label per run, the same for runs to be drawn as one
    with a band; evaluations: output folders of `erpo-trl eval` on the runs' checkpoints, beside those inside the runs' folders.
    Returns: the numbers behind the report, as in its `report.json`.
    Raises: ValueError for a run that cannot be read or an output that is something else; ImportError without matplotlib.
    """
    output = Path(os.path.abspath(output))
    check_output(output)
    sections, data, pictures = build(*load_runs(runs, names, evaluations))
    write_report(output, sections, data, pictures)
    return data


def main(argv: Sequence[str]) -> None:
    """`erpo-trl report`."""
    parser = argparse.ArgumentParser(
        prog="erpo-trl report",
        description="Compare training runs: drift, reward, entropy, query weights, evaluations of checkpoints, signs of collapse. "
        "Writes report.html (one file), report.md, the plots as PNG and SVG, and the numbers behind them as report.json.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folders of training, or checkpoints")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument(
        "--names",
        nargs="+",
        help="a label per run; runs of one name are drawn as one line with a band. Default: the folders, with runs that differ in "
        "nothing but the seed grouped",
    )
    parser.add_argument(
        "--evaluations",
        nargs="+",
        default=[],
        metavar="DIR",
        help="output folders of erpo-trl eval on the runs' checkpoints; those inside a run's folder are found",
    )
    options = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("the plots need matplotlib: pip install erpo-trl[plot]")
    try:
        make_report(options.runs, options.output, options.names, options.evaluations)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    print(f"Written to {options.output}: report.html, report.md, report.json and the plots")
