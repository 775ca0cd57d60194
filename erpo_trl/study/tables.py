"""The tables of a study's pages: means and 95 % intervals over seeds, and differences paired by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..report.analysis import find_collapses, tail_mean, train_eval_gaps
from .recipe import Question
from .records import Record
from .statistics import Interval, log_interval, mean_interval, paired_difference, paired_ratio

NOTHING = 1e-9  # a divergence in nats below which there is none
TRAINED_AT = 1.0  # the temperature of training, at which training and held-out accuracy compare

# Variant -> seed -> its record; variants without a record are there, too
Found = Mapping[str, Mapping[int, Record]]


@dataclass(frozen=True)
class Measure:
    """A number of a run. Args: title; of: record -> value, None where it has none; log: its intervals are of logarithms; scale."""

    title: str
    of: Callable[[Record], float | None]
    log: bool = False
    scale: float = 1.0

    def values(self, records: Mapping[int, Record]) -> dict[int, float]:
        """Seed -> value, where it is finite."""
        found = {seed: self.of(record) for seed, record in records.items()}
        return {
            seed: self.scale * value for seed, value in found.items() if value is not None and math.isfinite(value)
        }

    def interval(self, records: Mapping[int, Record]) -> Interval:
        values = list(self.values(records).values())
        return log_interval(values) if self.log and all(v > NOTHING for v in values) else mean_interval(values)

    def difference(self, a: Mapping[int, Record], b: Mapping[int, Record]) -> Interval:
        """Of a to b, by seed: a ratio where intervals are of logarithms."""
        a, b = self.values(a), self.values(b)
        if not self.log:
            return paired_difference(a, b)
        positive = [{seed: v for seed, v in values.items() if v > NOTHING} for values in (a, b)]
        return paired_ratio(*positive)


def _drift(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.content["drift"].get(name)


def _end_reward(record: Record) -> float | None:
    _, values = record.series("reward")
    return tail_mean(values) if len(values) else None


AT_THE_END = (
    Measure("Query-KL, training prompts", _drift("query_kl_train"), log=True),
    Measure("Query-KL, held-out prompts", _drift("query_kl_held_out"), log=True),
    Measure("Policy-KL", _drift("policy_kl"), log=True),
    Measure("entropy", _drift("entropy")),
    Measure("training reward, %", _end_reward, scale=100),
)


def accuracy_at(temperature: float) -> Measure:
    return Measure(f"T={temperature:g}", lambda record: float(record.right(temperature).mean()), scale=100)


MEAN_ACCURACY = Measure(
    "mean", lambda record: float(np.mean([record.right(t).mean() for t in record.temperatures])), scale=100
)


def cell(found: Interval, seeds: int, digits: str = ".3g") -> str:
    """`mean [low, high]`; of two seeds `mean {one; other}`, of one the mean alone; a dash without any.

    Args: seeds: of the row; where fewer have a finite value, the cell says so.
    """
    if not found.count:
        return "–"
    fewer = "" if found.count == seeds else f" (of {found.count})"
    if math.isnan(found.low):
        return f"{found.mean:{digits}}{fewer}"
    ends = f"{found.low:{digits}}", f"{found.high:{digits}}"
    spread = f"{{{'; '.join(ends)}}}" if found.count == 2 else f"[{', '.join(ends)}]"
    return f"{found.mean:{digits}} {spread}{fewer}"


def end_table(found: Found, measures: Sequence[Measure] = AT_THE_END) -> list[list[str]]:
    """A row per variant that has records, a column per measure."""
    rows = [["", "seeds", *(measure.title for measure in measures)]]
    for name, records in found.items():
        if records:
            rows.append([name, str(len(records)), *(cell(m.interval(records), len(records)) for m in measures)])
    return rows


def accuracy_table(found: Found, temperatures: Sequence[float]) -> list[list[str]]:
    """Right answers in percent by sampling temperature."""
    measures = [*map(accuracy_at, temperatures), MEAN_ACCURACY]
    rows = [["", "seeds", *(measure.title for measure in measures)]]
    for name, records in found.items():
        if records:
            rows.append([name, str(len(records)), *(cell(m.interval(records), len(records), ".1f") for m in measures)])
    return rows


def pairs_of(question: Question) -> list[tuple[str, str]]:
    """Which variant is compared with which: the pairs that the recipe names, then every other with its baseline."""
    named = [tuple(pair) for pair in question.summary.get("pairs", ())]
    baseline = question.summary.get("baseline")
    others = [(name, baseline) for name in question.runs if baseline not in (None, name)]
    return list(dict.fromkeys([*named, *others]))


def difference_table(question: Question, found: Found, temperatures: Sequence[float]) -> list[list[str]]:
    """Paired by seed: ratios of the divergences, and differences of the accuracies in points."""
    ratios = [measure for measure in AT_THE_END if measure.log]
    accuracies = [*map(accuracy_at, temperatures), MEAN_ACCURACY]
    rows = [
        ["", "seeds", *(f"{m.title}, ratio" for m in ratios), *(f"accuracy {m.title}, points" for m in accuracies)]
    ]
    for a, b in pairs_of(question):
        shared = found[a].keys() & found[b].keys()
        if shared:
            cells = [cell(m.difference(found[a], found[b]), len(shared)) for m in ratios]
            cells += [cell(m.difference(found[a], found[b]), len(shared), "+.1f") for m in accuracies]
            rows.append([f"{a} against {b}", str(len(shared)), *cells])
    return rows


def gap_table(found: Found) -> list[list[str]]:
    """Training accuracy minus held-out accuracy at every checkpoint, in points, at the temperature of training."""
    rows = [["", "seeds", "train − held-out by checkpoint", "mean over checkpoints"]]
    for name, records in found.items():
        gaps = {seed: dict(_gaps(record)) for seed, record in records.items()}
        steps = sorted(set.intersection(*map(set, gaps.values()))) if gaps else []
        if steps:
            by_step = [mean_interval([100 * g[step] for g in gaps.values()]) for step in steps]
            cells = [f"{step}: {cell(found, len(gaps), '.1f')}" for step, found in zip(steps, by_step)]
            mean = mean_interval([100 * float(np.mean([g[step] for step in steps])) for g in gaps.values()])
            rows.append([name, str(len(records)), "; ".join(cells), cell(mean, len(gaps), ".1f")])
    return rows


def _gaps(record: Record) -> list[tuple[int, float]]:
    evaluations = record.content["evaluations"]
    if TRAINED_AT not in record.temperatures:
        return []
    steps = [entry["step"] for entry in evaluations]
    return train_eval_gaps(
        *record.series("reward"), steps, [float(record.right(TRAINED_AT, step).mean()) for step in steps]
    )


def collapse_table(found: Found) -> list[list[str]]:
    """The first sign of collapse of each run: entropy or reward out of its running band."""
    rows = [["", "seeds", "with a sign of collapse", "first signs"]]
    for name, records in found.items():
        signs = {
            seed: find_collapses({name: record.series(name) for name in ("entropy", "reward")})
            for seed, record in records.items()
        }
        if records:
            first = "; ".join(f"seed {seed}: {s[0].kind} at step {s[0].step}" for seed, s in signs.items() if s)
            rows.append([name, str(len(records)), str(sum(map(bool, signs.values()))), first or "none"])
    return rows


def nll_table(found: Found) -> list[list[str]]:
    """Correlations of prompt NLL and response NLL over the held-out prompts."""
    names = {"pearson": "Pearson", "spearman": "Spearman", "partial": "Pearson given both lengths"}
    measures = [Measure(title, lambda r, name=name: r.content["nll"][name]) for name, title in names.items()]
    return end_table(found, measures)
