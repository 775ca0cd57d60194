"""The record of a run: everything a figure needs and everything that says where it comes from, in one small JSON file.

Records are kept in version control, so that a study survives being run in pieces over days. They are written whole or not at all:
a record that is there is a run that is done.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..evaluation.results import digest, write_atomically
from ..report.analysis import log_series
from .recipe import Question, RunSpec

VERSION = 1
DIGITS = 5  # significant ones; more would be noise and swell the files
# What of a log is kept
LOGGED = (
    "reward", "entropy", "kl", "policy/kl", "grad_norm", "loss", "frac_reward_zero_std", "step_time", "query/kl", "query/nll",
    "query/nll_drift", "query/alpha", "query/weight_ess", "query/weight_max", "completions/mean_length",
    "clip_ratio/region_mean", "trust_region/shift_mean", "trust_region/shift_p99", "trust_region/violation_rate",
    "trust_region/weight_min", "trust_region/weight_max", "sampling/importance_sampling_ratio/mean",
)  # fmt: skip
FIELDS = (
    "version",
    "name",
    "hash",
    "seed",
    "questions",
    "settings",
    "commit",
    "versions",
    "seconds",
    "log",
    "evaluations",
    "drift",
)


class RecordError(ValueError):
    """A record that cannot be used; the message names the file and says why."""


def rounded(value):
    """JSON-able, floats at `DIGITS` significant digits, None where they are not finite."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return rounded(value.tolist())
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def thinned_log(log_history: Sequence[dict]) -> dict[str, dict[str, list]]:
    """The series of `LOGGED` that a log holds.

    Returns: {"steps": {id: steps}, "series": {name: [id, values]}}: series that have their steps in common share an id.
    """
    steps: dict[tuple[int, ...], str] = {}
    series = {}
    for name in LOGGED:
        at, values = log_series(log_history, name)
        if len(at):
            series[name] = [steps.setdefault(tuple(at.tolist()), str(len(steps))), values.tolist()]
    return {"steps": {key: list(at) for at, key in steps.items()}, "series": series}


def digits(counts: Iterable[int]) -> str:
    """Counts from 0 to 9 as one text, a digit each."""
    counts = [int(count) for count in counts]
    text = "".join(map(str, counts))
    if not text.isdigit() or len(text) != len(counts):
        raise ValueError(f"counts must be 0 to 9, found {text}")
    return text


@dataclass(frozen=True)
class Record:
    """A run that is done. Args: path: its file; content: as written by `write_record`."""

    path: Path
    content: Mapping

    @property
    def name(self) -> str:
        return self.content["name"]

    @property
    def seed(self) -> int:
        return self.content["seed"]

    @property
    def steps(self) -> int:
        return int(self.content["settings"]["train"]["max_steps"])

    def series(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the first of these metrics that the log holds; empty without any."""
        log = self.content["log"]
        for name in names:
            if name in log["series"]:
                key, values = log["series"][name]
                return np.array(log["steps"][key], dtype=int), np.array(values, dtype=float)
        return np.empty(0, dtype=int), np.empty(0)

    def right(self, temperature: float, step: int | None = None) -> np.ndarray:
        """(P,) share of each held-out problem's samples that are right. Args: step: of a checkpoint; default: the last."""
        found = [e for e in self.content["evaluations"] if step is None or e["step"] == step]
        entry = found[-1]["temperatures"][f"{temperature:g}"]
        return np.array([int(digit) for digit in entry["right"]]) / entry["samples"]

    @property
    def temperatures(self) -> list[float]:
        return [float(t) for t in self.content["evaluations"][-1]["temperatures"]]


def write_record(path: Path, content: Mapping) -> None:
    """One line per entry: a changed number shows as such in a diff."""
    content = rounded({"version": VERSION, **content})
    missing = [name for name in FIELDS if name not in content]
    if missing:
        raise ValueError(f"a record needs {', '.join(missing)}")
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_record(path: Path) -> Record:
    """Raises: RecordError for a file that is no record, or whose name does not say what is in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in FIELDS if name not in content]
    except (OSError, ValueError, TypeError) as error:
        raise RecordError(f"{path} is no record ({error}): not used; delete it to run it anew") from error
    if missing:
        raise RecordError(f"{path} is no record (without {', '.join(missing)}): not used; delete it to run it anew")
    run = RunSpec(content["name"], content["seed"], content["settings"])
    if content["version"] != VERSION:
        raise RecordError(f"{path} is a record of version {content['version']}, this is {VERSION}: not used")
    if not run.key == content["hash"] or path.stem != run.slug:
        raise RecordError(
            f"{path}: its settings are those of {run.slug}, not of its name: not used; was it changed or renamed by hand?"
        )
    return Record(path, content)


def changed_settings(record: Record, run: RunSpec) -> list[str]:
    """What differs between a record's settings and a run's, as "train.max_steps 2, now 3"."""
    before, now = (flat(settings) for settings in (record.content["settings"], run.settings))
    return [
        f"{key} {before.get(key, 'unset')}, now {now.get(key, 'unset')}"
        for key in [*now, *(key for key in before if key not in now)]
        if digest(before.get(key)) != digest(now.get(key))
    ]


def flat(settings: Mapping) -> dict:
    """Two levels of a mapping as one, names joined by a dot."""
    found = {}
    for key, value in settings.items():
        found |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def find_records(folder: Path, questions: Sequence[Question]) -> tuple[dict[str, Record], list[str]]:
    """The records of these questions' runs, by slug, and sentences on records of theirs that no longer are.

    Args: folder: of records; questions: that a study asks. Records of other questions are passed over.
    """
    wanted: dict[str, dict[str, RunSpec]] = {}
    for question in questions:
        wanted[question.name] = {run.slug: run for runs in question.runs.values() for run in runs}
    found, notes = {}, []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            record = read_record(path)
        except RecordError as error:
            notes.append(str(error))
            continue
        if any(path.stem in runs for runs in wanted.values()):
            found[path.stem] = record
            continue
        asked = [run for name in record.content["questions"] for run in wanted.get(name, {}).values()]
        if not asked:
            continue
        alike = [run for run in asked if (run.name, run.seed) == (record.name, record.seed)]
        if alike:
            nearest = min(alike, key=lambda run: len(changed_settings(record, run)))
            why = f"it was run with other settings than the recipe's ({'; '.join(changed_settings(record, nearest))})"
        else:
            why = f"the recipe has no variant {record.name!r} with seed {record.seed} any more"
        notes.append(f"{path}: {why}: not used")
    return found, notes
