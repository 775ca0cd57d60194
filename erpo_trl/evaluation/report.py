"""Numbers of an evaluation and how they are shown: metrics.json, table.md, plots."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .metrics import BAND_LABELS, band_values, with_errors
from .protocol import table_values
from .results import ResultFolder, read_pair, write_atomically

# Columns that metrics are made of: all but the texts
COLUMNS = ["temperature", "row", "sample", "tokens", "finish", "answer", "verdict", "format"]

# benchmark -> temperature -> metric -> (P,)
Values = dict[str, dict[float, dict[str, np.ndarray]]]


def read_values(folder: ResultFolder, samples: int) -> tuple[Values, dict[str, dict[str, int]]]:
    """Values per problem of everything in samples.parquet, and counts per benchmark: `rows`, `unreadable_golds` and
    `prompts_without_room`."""
    values: Values = {}
    counts: dict[str, dict[str, int]] = {}
    for pair in folder.stored_pairs():
        table = read_pair(folder.samples, pair, COLUMNS)
        values.setdefault(pair.benchmark, {})[pair.temperature] = table_values(table, samples)
        rows = np.array(table["row"].to_pylist())
        without_gold = np.array(table["verdict"].is_null().to_pylist())
        without_room = np.array(table["finish"].to_pylist()) == "no_room"
        counts[pair.benchmark] = {
            "rows": len(np.unique(rows)),
            "unreadable_golds": len(np.unique(rows[without_gold])),
            "prompts_without_room": len(np.unique(rows[without_room])),
        }
    return values, counts


def summarize(values: Values, replicates: int) -> dict:
    """Means and standard errors: per benchmark under "temperatures" and "bands", and over benchmarks under "average".

    The average is that of the benchmarks' means, each counted once; it stands only where all benchmarks have the entry.
    Returns: {"benchmarks": {name: {"temperatures": {...}, "bands": {...}}}, "average": {"temperatures": ..., "bands": ...}},
    each entry being metric -> {"value", "se"}.
    """
    benchmarks = {}
    for name, by_temperature in values.items():
        benchmarks[name] = {
            "temperatures": {f"{t:g}": with_errors(v, name, replicates) for t, v in by_temperature.items()},
            "bands": {band: with_errors(v, name, replicates) for band, v in band_values(by_temperature).items()},
        }
    average = {}
    same_sweep = len({tuple(sorted(by_temperature)) for by_temperature in values.values()}) == 1
    for kind in ("temperatures", "bands"):
        common = set.intersection(*(set(summary[kind]) for summary in benchmarks.values()))
        average[kind] = {
            key: _average([summary[kind][key] for summary in benchmarks.values()])
            for key in next(iter(benchmarks.values()))[kind]
            if key in common and (kind == "temperatures" or same_sweep)
        }
    return {"benchmarks": benchmarks, "average": average}


def _average(entries: list[dict]) -> dict[str, dict[str, float]]:
    # Benchmarks are independent: the variances of their means add
    count = len(entries)
    return {
        metric: {
            "value": sum(entry[metric]["value"] for entry in entries) / count,
            "se": sum(entry[metric]["se"] ** 2 for entry in entries) ** 0.5 / count,
        }
        for metric in entries[0]
    }


def write_json(path: Path, content: Mapping) -> None:
    """Writes a mapping as JSON, whole or not at all."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines
    )


def escaped(rows: list[list[str]]) -> list[list[str]]:
    """Cells in which a bar, as in a name that a user gave, ends no cell."""
    return [[cell.replace("|", "\\|") for cell in row] for row in rows]


def shown_metrics(entry: Mapping) -> list[str]:
    """The metrics of an entry that tables show: of Pass@k only the largest k and the draw of Pass@1."""
    passes = [name for name in entry if name.startswith("pass@") and name != "pass@1"]
    return [name for name in entry if name not in passes[:-1]]


def cell(metric: str, entry: Mapping[str, float]) -> str:
    """A value and its standard error: tokens as they are, shares in percent."""
    unit = 1 if metric == "tokens" else 100
    return f"{unit * entry['value']:.1f} ± {unit * entry['se']:.1f}"


def table(metrics: Mapping) -> str:
    """table.md: the sweep means of all benchmarks, then a table per benchmark with a row per temperature and band."""
    lines = [f"# {metrics['model']['adapter'] or metrics['model']['name']}", ""]
    lines += ["Shares in percent, tokens per completion; ± is the bootstrap standard error over problems.", ""]
    blocks = {name: metrics["benchmarks"][name] for name in metrics["benchmarks"]}
    if len(blocks) > 1:
        blocks["average of the benchmarks"] = metrics["average"]
    for name, block in blocks.items():
        entries = {"T=0 (greedy)" if t == "0" else f"T={t}": entry for t, entry in block["temperatures"].items()}
        if len(block["temperatures"]) > 1:
            entries |= {BAND_LABELS[band]: entry for band, entry in block["bands"].items()}
        if not entries:
            continue
        names = shown_metrics(next(iter(entries.values())))
        rows = [["", *names]] + [[label, *(cell(m, entry[m]) for m in names)] for label, entry in entries.items()]
        lines += [f"## {name}", "", *_notes(block), markdown(rows), ""]
    return "\n".join(lines)


def _notes(block: Mapping) -> list[str]:
    notes = []
    if "rows" in block:
        notes.append(f"{block['rows']} problems, {block['source']}.")
    if block.get("unreadable_golds"):
        notes.append(f"{block['unreadable_golds']} golds cannot be read; their problems count as wrong.")
    if block.get("prompts_without_room"):
        notes.append(f"{block['prompts_without_room']} prompts fill the model's context; they count as wrong.")
    return [" ".join(notes), ""] if notes else []


def plot_sweeps(curves: Mapping[str, Mapping[str, Mapping]], metric: str, path: Path) -> bool:
    """A metric against temperature as a PNG, a panel per benchmark; False without matplotlib.

    Args: curves: benchmark -> line's label -> temperature (text) -> metric -> {"value", "se"}.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    from ..report.drawing import shown  # which needs matplotlib

    columns = min(3, len(curves))
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, (benchmark, runs) in zip(axes, curves.items()):
        for label, by_temperature in runs.items():
            points = sorted((float(t), entry[metric]) for t, entry in by_temperature.items() if metric in entry)
            axis.errorbar(
                [t for t, _ in points], [p["value"] for _, p in points], yerr=[p["se"] for _, p in points],
                label=shown(label), marker="o", markersize=3, capsize=2,
            )  # fmt: skip
        axis.set(title=shown(benchmark), xlabel="sampling temperature", ylabel=metric)
        axis.grid(alpha=0.3)
        if len(runs) > 1:
            axis.legend(fontsize=8)
    for axis in list(axes)[len(curves) :]:
        axis.set_visible(False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
    return True
