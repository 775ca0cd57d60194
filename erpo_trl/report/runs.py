"""A run's folder, read for a report: its log, its settings, its queries and the evaluations of its checkpoints."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ..query.checkpoint import STATE_FILE, checkpoint_step
from ..query.table import ReferenceTable
from ..query.weights import Queries, WeightRule, of_means, query_weights
from .analysis import log_series
from .grouping import group_key
from .query_log import read_queries

LOG_FILE = "trainer_state.json"
_ACCURACY = re.compile(r"^eval/(?P<benchmark>.+)/avg@(?P<k>\d+)@T(?P<temperature>[\d.e+-]+)$")


@dataclass(frozen=True)
class Accuracy:
    """Avg@k of a checkpoint on a benchmark. Args: step; benchmark; temperature; value: in [0, 1]."""

    step: int
    benchmark: str
    temperature: float
    value: float


@dataclass
class Run:
    """What a report knows of a run.

    Args:
        path: its folder; name: its label, the same for runs that a user calls the same.
        log: `log_history`; steps: optimizer steps made; max_steps: to make.
        state: of `erpo_state.json`, {} where there is none; group: of its settings, None where they are not known.
        weights: (D,) weight of each distinct query, as the run saw them or else out of the reference table.
        queries: columns of its query files, {} without any.
        accuracies: of its checkpoints, from evaluation folders or else from the log.
        notes: sentences on what is missing.
    """

    path: Path
    name: str
    log: list[dict]
    steps: int
    max_steps: int
    state: dict = field(default_factory=dict)
    group: str | None = None
    weights: np.ndarray | None = None
    queries: dict[str, np.ndarray] = field(default_factory=dict)
    accuracies: list[Accuracy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int | None:
        return self.state.get("seed")

    @property
    def args(self) -> dict:
        """Its settings, {} where they are not known."""
        return self.state.get("args", {})

    def series(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the first of these metrics that the log holds."""
        for name in names:
            steps, values = log_series(self.log, name)
            if len(steps):
                return steps, values
        return np.empty(0, dtype=int), np.empty(0)


def read_json(path: Path) -> dict:
    """Raises: ValueError, with the file's name, for a file that holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(content).__name__}")
    return content


def load_run(path: str | Path, evaluations: Sequence[str | Path] = ()) -> Run:
    """A run, read from its folder or from a checkpoint.

    Args: path: an output folder of training, or one of its checkpoints; evaluations: output folders of `erpo-trl eval`, beside
    those that lie in the run's folder; those of other models are passed over.
    Raises: ValueError for a folder without a log and for a file that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder")
    states = _states(path)
    # A resumed run has a checkpoint past the end of the one before; another run's, left over, has another log
    one_run = len(states) < 2 or _of_one_run(*states.values())
    newest = (lambda folder: states[folder].get("global_step", 0)) if one_run else _last_changed
    folder, *others = sorted(states, key=newest, reverse=True)
    progress = states[folder]
    log = progress["log_history"]
    run = Run(path, path.resolve().name, log, progress.get("global_step", 0), progress.get("max_steps", 0))
    if not log:
        run.notes.append("The log is empty: logging_steps is longer than the run.")
    if not one_run:
        run.notes.append(f"{others[0] / LOG_FILE} is of another run in the same folder, and left out.")
    _read_state(run, [folder, *(others if one_run else [])])
    # Those of a checkpoint are beside it
    run.queries = read_queries(path if checkpoint_step(path) is None else path.parent, run.steps)
    if not run.queries:
        run.notes.append(
            "No query files: trained with query_log_steps=0, by another trainer, or by an earlier version; response NLLs are not "
            "known."
        )
    run.weights = _weights(run)
    _read_accuracies(run, evaluations)
    return run


def _states(run: Path) -> dict[Path, dict]:
    """Contents of the run's own `trainer_state.json` and of its last checkpoint's that is whole, by folder.

    Raises: ValueError without any, or where all that there is cannot be read.
    """
    states = {run: _read_progress(run)} if (run / LOG_FILE).is_file() else {}
    broken = None
    for folder in sorted(run.glob("checkpoint-*"), key=lambda folder: checkpoint_step(folder) or 0, reverse=True):
        if (folder / LOG_FILE).is_file():  # a run that is killed while it saves leaves a folder without
            try:
                return states | {folder: _read_progress(folder)}
            except ValueError as error:
                broken = broken or error
    if not states:
        raise broken or ValueError(
            f"{run} has no {LOG_FILE}, nor has a checkpoint in it: give the output folder of a training run. `erpo-trl train` "
            "writes one at its end; in a script call trainer.save_state()"
        )
    return states


def _read_progress(folder: Path) -> dict:
    progress = read_json(folder / LOG_FILE)
    log = progress.get("log_history")
    if not isinstance(log, list) or not all(isinstance(entry, dict) and "step" in entry for entry in log):
        raise ValueError(f"{folder / LOG_FILE}: log_history must be a list of entries with a step")
    return progress


def _of_one_run(*states: dict) -> bool:
    """Whether their logs begin alike; seconds tell even runs of one seed apart. What sums up a run comes in its last log only."""
    logs = [[entry for entry in state["log_history"] if "train_runtime" not in entry] for state in states]
    return not all(logs) or len({json.dumps(log[0], sort_keys=True) for log in logs}) == 1


def _last_changed(folder: Path) -> int:
    return (folder / LOG_FILE).stat().st_mtime_ns


def _read_state(run: Run, folders: Sequence[Path]) -> None:
    path = next((folder / STATE_FILE for folder in folders if (folder / STATE_FILE).is_file()), None)
    if path is None:
        run.notes.append(
            f"No {STATE_FILE}: not a run of an ERPO trainer, so its settings and reference are not known."
        )
        return
    run.state = read_json(path)
    run.group = group_key(run.state)
    if run.group is None:
        run.notes.append(f"{STATE_FILE} holds no settings (written by an earlier version): the run stands alone.")


def _weights(run: Run) -> np.ndarray | None:
    if run.queries:
        weights = run.queries["weight"][np.unique(run.queries["key"], return_index=True)[1]]
        finite = np.isfinite(weights)
        if not finite.all():
            run.notes.append(
                f"Weights of {(~finite).sum()} of {len(weights)} queries are no finite numbers, and left out."
            )
        return weights[finite]
    if not run.args or run.state.get("mean_nll") is None:
        return None
    folder = Path(run.state["reference_cache_dir"]) / run.state["fingerprint"]
    nll = ReferenceTable(folder).all_nlls() if folder.is_dir() else np.empty(0)
    if not len(nll):
        run.notes.append(f"The reference table {folder} is gone: the weights of the queries are not known.")
        return None
    rule = WeightRule.of(SimpleNamespace(**run.args))
    plain = rule.scheme in ("nll_ratio", "uniform") and not rule.normalize
    if not plain or run.args["query_span"] != "prompt" or run.args["query_weight_source"] != "reference":
        run.notes.append(
            "Without query files the weights are not known: they rest on more than the NLL of whole prompts."
        )
        return None
    # The table may serve other data too, so these are the weights of all that it holds
    run.notes.append("Weights are those of every query in the reference table, which other runs may share.")
    queries = Queries(torch.from_numpy(nll), torch.ones(len(nll), dtype=torch.float64))
    return query_weights(queries, of_means(run.state["mean_nll"], float("nan")), rule).numpy()


def _read_accuracies(run: Run, evaluations: Sequence[str | Path]) -> None:
    inside = [path.parent for depth in ("*", "*/*") for path in run.path.glob(f"{depth}/metrics.json")]
    found = [accuracy for folder in inside for accuracy in _evaluation(run, folder, True)]
    found += [accuracy for folder in evaluations for accuracy in _evaluation(run, Path(folder), False)]
    if not found:
        for entry in run.log:
            for name, value in entry.items():
                match = _ACCURACY.match(name)
                if match and isinstance(value, (int, float)):
                    found.append(Accuracy(entry["step"], match["benchmark"], float(match["temperature"]), value))
    # The same folder may be given and found
    run.accuracies = sorted(set(found), key=lambda a: (a.step, a.benchmark, a.temperature))


def evaluated_model(folder: Path) -> Path:
    """Where the weights that an evaluation is of come from; raises ValueError where that is not to be read."""
    metrics = read_json(folder / "metrics.json") if (folder / "metrics.json").is_file() else {}
    model = metrics.get("model")
    if not isinstance(model, dict) or "benchmarks" not in metrics or "settings" not in metrics:
        raise ValueError(f"{folder} is not an output folder of erpo-trl eval, or one that is not finished")
    return Path(model["adapter"] or model["name"])


def lies_in(model: Path, run: Path) -> bool:
    """Whether an evaluated model is a run's, or a checkpoint of it.

    A path that leads nowhere, as after the run was moved or from another working directory, is told by its last names.
    """
    place, root = model.resolve(), run.resolve()
    if place.exists():
        return place == root or root in place.parents
    return model.name == root.name or (checkpoint_step(model) is not None and model.parent.name == root.name)


def _evaluation(run: Run, folder: Path, inside: bool) -> list[Accuracy]:
    """Avg@k in an evaluation folder, if it is of this run's weights."""
    if inside and not (folder / "samples.parquet").is_file():
        return []  # some other metrics.json
    model = evaluated_model(folder)
    if not lies_in(model, run.path):
        return []
    step = next((s for place in (model, *model.parents) if (s := checkpoint_step(place)) is not None), run.steps)
    metrics = read_json(folder / "metrics.json")
    name = f"avg@{metrics['settings']['samples']}"
    return [
        Accuracy(step, benchmark, float(t), entry[name]["value"])
        for benchmark, block in metrics["benchmarks"].items()
        for t, entry in block["temperatures"].items()
        if name in entry
    ]


def load_runs(
    paths: Sequence[str | Path], names: Sequence[str] | None = None, evaluations: Sequence[str | Path] = ()
) -> tuple[list[Run], list[str]]:
    """Several runs, labelled; and notes on evaluations that are of none of them.

    Args: paths, evaluations: as for [`load_run`]; names: a label per run, the same for runs to be grouped. Default: the part of
    their paths that tells them apart, and runs that differ in nothing but the seed are grouped.
    """
    if names is not None and len(names) != len(paths):
        raise ValueError(f"names must be as many as runs: found {len(names)} and {len(paths)}")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(map(str, paths))}")
    runs = [load_run(path, evaluations) for path in paths]
    for run, name in zip(runs, names or distinct_names([run.path for run in runs])):
        run.name = name
        if names is not None:
            run.group = f"named {name}"
    notes = []
    for folder in map(Path, evaluations):
        model = evaluated_model(folder)
        if not any(lies_in(model, run.path) for run in runs):
            notes.append(f"The evaluation {folder} is left out: its model {model} lies in none of the runs.")
    return runs, notes


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Labels out of folders: what their paths do not share at the beginning and at the end."""
    parts = [path.resolve().parts for path in paths]
    if len(parts) == 1:
        return [parts[0][-1]]
    shortest = min(map(len, parts))
    start = 0
    while start < shortest - 1 and len({p[start] for p in parts}) == 1:
        start += 1
    end = 0
    while all(len(p) - end - 1 > start for p in parts) and len({p[-1 - end] for p in parts}) == 1:
        end += 1
    return ["/".join(p[start : len(p) - end]) or p[-1] for p in parts]


def shared_name(names: Sequence[str]) -> str:
    """What names of one run's seeds share: `erpo` of `erpo-seed10` and `erpo-seed11`, or of `a-erpo` and `b-erpo`; else ''."""
    start = os.path.commonprefix(names)
    if all(not name[len(start) :] or name[len(start)].isdigit() for name in names):
        start = start.rstrip("0123456789")  # of a number that goes on
    start = re.sub(r"(^|[-_./])(seed|s)[-_./=]*$|[-_./=]+$", "", start)
    end = os.path.commonprefix([name[::-1] for name in names])[::-1]
    return start or re.sub(r"^[-_./=\d]*", "", end)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by the label that plots give them, those that differ in their seed only together."""
    found: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        found.setdefault(run.group or f"alone {index}", []).append(run)
    labels: dict[str, list[Run]] = {}
    for members in found.values():
        label = members[0].name
        if len(members) > 1 and len({run.name for run in members}) > 1:
            # `erpo-seed0`, `erpo-seed1`: what they share
            label = shared_name([run.name for run in members]) or label
        if len(members) > 1:
            label += f" ({len(members)} seeds)"
        taken = [name for name in labels if name == label or name.startswith(f"{label} [")]
        labels[f"{label} [{len(taken) + 1}]" if taken else label] = members
    return labels
