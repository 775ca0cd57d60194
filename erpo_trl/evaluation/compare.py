"""`erpo-trl compare`: several evaluations side by side, in the shape of the ERPO paper's tables and figures.

Runs are compared at the temperatures that all of them have, problem by problem: differences come with the 95% interval of a
paired bootstrap, in which every run is measured on the same drawn problems.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from ..cli import InputError, check_folder
from .metrics import BAND_LABELS, band_values, bootstrap_means, in_band, train_eval_gap, with_errors
from .report import Values, escaped, markdown, plot_sweeps, read_values
from .results import ResultFolder, write_atomically

# Temperatures that the paper's Tables 2 and 6 show
SHOWN_TEMPERATURES = (0.1, 0.6, 1.0, 1.5)
# Settings that samples depend on, but for the seed, of which differences are made to be independent; the prompts' are seen in
# their tokens too, these say which
COMPARED_SETTINGS = (
    "max_new_tokens", "prompt_suffix", "system_prompt", "chat_template_kwargs", "backend", "tensor_parallel_size", "dtype",
)  # fmt: skip
INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Run:
    """An evaluation as it is compared.

    Args: name: its label; samples: k; values: per problem; golds, prompts: a digest per benchmark; settings: of `EvalConfig`.
    """

    name: str
    samples: int
    values: Values
    golds: dict[str, str]
    prompts: dict[str, str]
    settings: Mapping


def load_run(path: str | Path, name: str | None = None) -> Run:
    """The evaluation in a folder. Raises: ValueError when there is none, or an unfinished one."""
    path = Path(path)
    if not (path / "metrics.json").is_file():
        raise ValueError(
            f"{path} has no metrics.json: not an output folder of erpo-trl eval, or one that is not finished"
        )
    settings = _settings(path / "metrics.json")
    folder = ResultFolder(path)
    pairs = folder.stored_pairs()
    if not pairs:
        raise ValueError(
            f"{path} has no samples.parquet, or one without samples: run erpo-trl eval again, into that folder"
        )
    golds, prompts = ({pair.benchmark: getattr(pair, name) for pair in pairs} for name in ("golds", "prompts"))
    values, _ = read_values(folder, settings["samples"])
    return Run(name or path.resolve().name, settings["samples"], values, golds, prompts, settings)


def _settings(path: Path) -> dict:
    """Of an evaluation, from its metrics.json. Raises: ValueError that names the file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if not isinstance(settings["samples"], int):
            raise TypeError(f"samples is {settings['samples']!r}")
    except (ValueError, TypeError, KeyError) as error:
        why = f"without {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is not what erpo-trl eval writes, or not all of it ({why}): run erpo-trl eval again, into that folder"
        ) from error
    return settings


def align(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs with the benchmarks and temperatures that all of them have, and notes on what that leaves out.

    Raises: ValueError when the runs cannot be compared.
    """
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(
            f"two runs are called alike ({', '.join(run.name for run in runs)}); tell them apart with --names"
        )
    ks = {run.name: run.samples for run in runs}
    if len(set(ks.values())) > 1:
        raise ValueError(f"the runs have different numbers of samples, so their metrics differ: {ks}")
    notes, common = [], {}
    for benchmark in dict.fromkeys(name for run in runs for name in run.values):
        if not all(benchmark in run.values for run in runs):
            notes.append(f"{benchmark} is left out: not every run has it.")
            continue
        if len({run.golds[benchmark] for run in runs}) > 1:
            raise ValueError(f"{benchmark}: the runs were scored on different problems, so they cannot be compared")
        temperatures = set.intersection(*(set(run.values[benchmark]) for run in runs))
        every = set.union(*(set(run.values[benchmark]) for run in runs))
        if not temperatures:
            notes.append(f"{benchmark} is left out: the runs share no temperature.")
            continue
        if temperatures != every:
            left = ", ".join(f"{t:g}" for t in sorted(every - temperatures))
            notes.append(f"{benchmark}: not every run has T={left}; left out.")
        common[benchmark] = sorted(temperatures)
    if not common:
        raise ValueError("the runs share no benchmark and temperature: " + " ".join(notes))
    aligned = [replace(run, values={b: {t: run.values[b][t] for t in ts} for b, ts in common.items()}) for run in runs]
    return aligned, [*notes, *differing(aligned)]


def differing(runs: Sequence[Run]) -> list[str]:
    """Sentences on what the samples of the runs depend on beside the model, where it is not the same in all."""
    notes = []
    for name in COMPARED_SETTINGS:
        found = {run.name: run.settings.get(name) for run in runs}
        if len({json.dumps(value, sort_keys=True) for value in found.values()}) > 1:
            each = ", ".join(f"{run}: {value!r}" for run, value in found.items())
            notes.append(f"The runs have different {name} ({each}): their differences may come from that.")
    others = [b for b in runs[0].values if len({run.prompts[b] for run in runs}) > 1]
    if others:
        notes.append(
            f"{', '.join(others)}: the runs' prompts differ in their tokens (text, chat template or its date, tokenizer): their "
            "differences may come from that."
        )
    return notes


def interval(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], replicates: int = 1000
) -> tuple[float, float, float]:
    """Difference a - b of a metric, averaged over benchmarks, and its 95% interval by paired bootstrap over problems.

    Args: a, b: benchmark -> (P,) values of the same problems. Returns: difference, low, high.
    """
    differences = {name: a[name] - b[name] for name in a}
    means = np.mean([bootstrap_means(d, name, replicates) for name, d in differences.items()], axis=0)
    low, high = np.percentile(means, INTERVAL)
    return float(np.mean([d.mean() for d in differences.values()])), float(low), float(high)


def sweep_table(runs: Sequence[Run], metric: str, paper: Mapping | None) -> str:
    """Table 1's shape: the mean over the sweep, a column per benchmark and their average, in fractions; then each run's
    difference to the first. Paper's rows come first."""
    means = [
        {b: bands["mean"][metric] for b, v in run.values.items() if "mean" in (bands := band_values(v))}
        for run in runs
    ]
    benchmarks = list(means[0]) if runs else paper["benchmarks"][:-1]
    columns = {name: [name] for name in benchmarks}
    if len(benchmarks) > 1:
        columns["average"] = benchmarks
    rows = [[metric, *columns]]
    if paper is not None:
        rows += _printed_rows(paper, metric, columns)
    for run, values in zip(runs, means):
        rows.append([run.name, *(f"{np.mean([values[b].mean() for b in of]):.3f}" for of in columns.values())])
    for run, values in zip(runs[1:], means[1:]):
        triples = [interval({b: values[b] for b in of}, {b: means[0][b] for b in of}) for of in columns.values()]
        rows.append([f"{run.name} − {runs[0].name}", *("{:+.3f} [{:+.3f}, {:+.3f}]".format(*t) for t in triples)])
    return markdown(escaped(rows))


def _printed_rows(paper: Mapping, metric: str, columns: Mapping[str, list[str]]) -> list[list[str]]:
    """Table 1's rows of a metric; of one that counts another number of samples, with the paper's in the label."""
    kind = metric if metric == "pass@1" else metric.partition("@")[0]
    name = next(n for n in paper if n == kind or kind != "pass@1" and n != "pass@1" and n.startswith(f"{kind}@"))
    # The printed average is over the paper's benchmarks, so it stands only beside the same ones
    names = (
        paper["benchmarks"]
        if set(paper["benchmarks"][:-1]) == set(columns) - {"average"}
        else paper["benchmarks"][:-1]
    )
    rows = []
    for method, numbers in paper[name].items():
        printed = dict(zip(names, numbers))
        label = f"paper: {method}" + ("" if name == metric else f" ({name})")
        rows.append([label, *(f"{printed[c]:.3f}" if c in printed else "" for c in columns)])
    return rows


def temperature_table(runs: Sequence[Run], benchmark: str, paper: Mapping | None) -> str:
    """Tables 2's and 6's shape: Pass@1 of a benchmark in percent at a few temperatures and over the bands; then each run's
    difference to the first. The paper's rows come first."""
    columns: dict[str, list[dict[str, np.ndarray]]] = {}
    if runs:
        temperatures = list(runs[0].values[benchmark])
        shown = [t for t in temperatures if t in SHOWN_TEMPERATURES] or temperatures
        for t in shown:
            columns[f"T={t}"] = [run.values[benchmark][t] for run in runs]
        for band in ("mean_le_1.0", "mean_1.2_1.5"):
            if any(in_band(t, band) for t in temperatures):
                columns[band] = [band_values(run.values[benchmark])[band] for run in runs]
    names = list(columns) or list(paper["columns"])
    rows = [["Pass@1 in percent", *(BAND_LABELS.get(name, name) for name in names)]]
    for source in ("table2", "table6") if paper is not None else ():
        for label, numbers in paper[source].items():
            printed = dict(zip(paper["columns"], numbers))
            rows.append([f"paper: {label}", *(f"{printed[name]:g}" if name in printed else "" for name in names)])
    for index, run in enumerate(runs):
        rows.append([run.name, *(f"{100 * column[index]['pass@1'].mean():.1f}" for column in columns.values())])
    for index, run in enumerate(runs[1:], start=1):
        shown = [interval({benchmark: c[index]["pass@1"]}, {benchmark: c[0]["pass@1"]}) for c in columns.values()]
        cells = ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in triple)) for triple in shown]
        rows.append([f"{run.name} − {runs[0].name}", *cells])
    return markdown(escaped(rows))


def gap_table(paper: Mapping) -> str:
    """Table 4 from Table 5: the mean gap between training and evaluation accuracy, step 0 counted."""
    rows = [["Train–eval gap in points", "TP1", "TP2", "mean"]]
    for method in ("grpo", "erpo"):
        gaps = [train_eval_gap(paper["table5"][method]["train"], paper["table5"][method][tp]) for tp in ("tp1", "tp2")]
        rows.append([f"paper: {method}", *(f"{gap:.2f}" for gap in [*gaps, sum(gaps) / 2])])
    return markdown(rows)


def paper_tables() -> dict:
    """The paper's numbers as printed; the file says which."""
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))


def compare(
    folders: Sequence[str | Path], names: Sequence[str] | None = None, paper: bool = False
) -> tuple[str, dict]:
    """Tables of several evaluations, the first being the one that the others are compared with.

    Args: folders: output folders of `evaluate`; names: their labels, by default the folders' names; paper: set the paper's
    numbers beside them.
    Returns: Markdown, and the curves for `plot_sweeps` by metric.
    """
    if names and len(names) != len(folders):
        raise ValueError(f"names must be as many as folders: found {len(names)} and {len(folders)}")
    if not folders and not paper:
        raise ValueError("give output folders of erpo-trl eval, or --paper")
    runs = [load_run(folder, name) for folder, name in zip(folders, names or [None] * len(folders))]
    runs, notes = align(runs) if runs else ([], [])
    printed = paper_tables() if paper else None
    first = next(iter(next(iter(runs[0].values.values())).values())) if runs else ["avg@32", "pass@32", "pass@1"]
    passes = [name for name in first if name.startswith("pass@") and name != "pass@1"]
    metrics = [name for name in first if name.startswith("avg@")] + passes[-1:] + ["pass@1"]
    lines = [*notes, *([""] if notes else [])]
    sampled = not runs or any(t > 0 for v in runs[0].values.values() for t in v)
    if sampled:
        lines += ["## Mean over the sampling temperatures", ""]
        for metric in metrics:
            lines += [sweep_table(runs, metric, printed and printed["table1"]), ""]
    for benchmark in runs[0].values if runs else ["math500"]:
        rows = printed["pass_at_1_math500"] if printed and benchmark == "math500" else None
        lines += [f"## {benchmark} by temperature", "", temperature_table(runs, benchmark, rows), ""]
    if printed:
        lines += ["## Gap between training and evaluation", "", gap_table(printed), ""]
    curves = {metric: _curves(runs, metric) for metric in metrics} if runs else {}
    return "\n".join(lines), curves


def _curves(runs: Sequence[Run], metric: str) -> dict:
    return {
        benchmark: {
            run.name: {f"{t:g}": with_errors({metric: v[metric]}, benchmark) for t, v in run.values[benchmark].items()}
            for run in runs
        }
        for benchmark in runs[0].values
    }


def main(argv: Sequence[str]) -> None:
    """`erpo-trl compare`."""
    parser = argparse.ArgumentParser(
        prog="erpo-trl compare",
        description="Compare evaluations: tables in the shape of the paper's, differences to the first run with their 95% "
        "intervals (paired bootstrap over problems), and plots against temperature.",
    )
    parser.add_argument(
        "folders", nargs="*", metavar="DIR", help="output folders of erpo-trl eval; the first is the baseline"
    )
    parser.add_argument("--names", nargs="+", help="labels of the runs; default: the folders' names")
    parser.add_argument("--paper", action="store_true", help="set the paper's numbers beside the runs'")
    parser.add_argument("--output", type=Path, help="folder for compare.md and the plots; default: print only")
    options = parser.parse_args(argv)
    if options.output is not None:
        check_folder(options.output, "--output")
        if (options.output / "samples.parquet").exists():
            raise InputError(
                f"--output: {options.output} is the folder of an evaluation, whose plots would be overwritten; give another"
            )
    try:
        text, curves = compare(options.folders, options.names, options.paper)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    print(text)
    if options.output is not None:
        write_atomically(options.output / "compare.md", lambda temporary: temporary.write_text(text, encoding="utf-8"))
        for metric, by_benchmark in curves.items():
            plot_sweeps(by_benchmark, metric, options.output / f"{metric.replace('@', '_at_')}.png")
        print(f"Written to {options.output}")
