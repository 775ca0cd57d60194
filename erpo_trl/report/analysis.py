"""What reports and callbacks compute from a run's numbers, as pure functions of arrays.

A series is two arrays of the same length: the optimizer steps of its points, rising, and their values.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Share of a series, at its end, that "the end of the run" is a mean over
TAIL = 0.1


def tail_mean(values: Sequence[float], share: float = TAIL) -> float:
    """Mean over the last `share` of a series' points, at least one, in its unit; NaN for an empty series."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        return float("nan")
    return float(values[-max(1, round(share * len(values))) :].mean())


@dataclass(frozen=True)
class Drift:
    """How a divergence went over a run.

    Args: end: mean over the last tenth of its points; highest: its maximum; both in nats per token; slope: least-squares slope,
    nats per token and 100 steps, NaN for a single point.
    """

    end: float
    highest: float
    slope: float


def drift(steps: Sequence[float], kl: Sequence[float]) -> Drift:
    """Sums up a divergence over optimizer steps.

    Args: steps, kl: (N,) steps and the divergence at them, nats per token; N ≥ 1.
    Returns: [`Drift`].
    Raises: ValueError for an empty series.
    Source: the curves of arXiv 2608.23311, Figure 1, and the columns of its Table 3.
    """
    steps, kl = np.asarray(steps, dtype=float), np.asarray(kl, dtype=float)
    if not len(kl):
        raise ValueError("the drift of an empty series is not defined")
    slope = float(100 * np.polyfit(steps, kl, 1)[0]) if np.ptp(steps) else float("nan")
    return Drift(tail_mean(kl), float(kl.max()), slope)


def train_eval_gaps(
    train_steps: Sequence[float],
    train: Sequence[float],
    eval_steps: Sequence[float],
    evaluation: Sequence[float],
) -> list[tuple[int, float]]:
    """Training accuracy minus evaluation accuracy at every checkpoint that was evaluated.

    Args: train_steps, train: (N,) steps of the logs and the training accuracy since the log before; eval_steps, evaluation: (M,)
    likewise of the evaluations, in the same unit.
    Returns: (step, gap) per evaluation. Training accuracy is that of the last log up to the step; before the first log it is the
    first log's, whose rollouts begin with the policy of step 0. Empty without training accuracy.
    Source: arXiv 2608.23311, Table 5; `train_eval_gap` is their mean (Table 4).
    """
    if not len(train):
        return []
    places = np.searchsorted(np.asarray(train_steps), np.asarray(eval_steps), side="right") - 1
    return [
        (int(step), float(train[max(place, 0)] - value)) for step, place, value in zip(eval_steps, places, evaluation)
    ]


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation of (N,) x and y, in [-1, 1]; NaN with fewer than two points or where one does not vary."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    size = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / size, -1, 1)) if size > 0 else float("nan")


def ranks(values: Sequence[float]) -> np.ndarray:
    """(N,) ranks from 1; equal values share the mean of their ranks."""
    _, of, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[of]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation of (N,) x and y: Pearson's of their ranks, ties at their mean rank."""
    return pearson(ranks(x), ranks(y))


def partial_correlation(x: Sequence[float], y: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """Pearson's correlation of what is left of x and y after a linear fit on other variables.

    Args: x, y: (N,); given: C variables of (N,).
    Returns: in [-1, 1]; NaN where the fit leaves nothing (fewer than C + 3 points, or x or y is a function of the others).
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    design = np.stack([np.ones(len(x)), *(np.asarray(variable, dtype=float) for variable in given)], axis=1)
    if len(x) < design.shape[1] + 2:
        return float("nan")
    rest = []
    for target in (x, y):
        left = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
        # Rounding leaves crumbs of an exact fit, and their correlation would be noise
        if np.abs(left).max() <= 1e-9 * max(np.abs(target).max(), 1.0):
            return float("nan")
        rest.append(left)
    return pearson(*rest)


@dataclass(frozen=True)
class NLLCorrelation:
    """How the NLL of prompts goes with that of their responses. Args: points: N; the others: correlations in [-1, 1] or NaN."""

    points: int
    pearson: float
    spearman: float
    partial: float


def nll_correlation(
    prompt_nll: Sequence[float],
    response_nll: Sequence[float],
    prompt_tokens: Sequence[float],
    response_tokens: Sequence[float],
) -> NLLCorrelation:
    """Correlation of prompt-NLL with response-NLL, with and without what both owe to their lengths.

    Args: all (N,): NLLs in nats (sums over tokens) and lengths in tokens.
    Returns: [`NLLCorrelation`], its `partial` given both lengths.
    Source: arXiv 2608.23311, Figure 9.
    """
    return NLLCorrelation(
        len(prompt_nll),
        pearson(prompt_nll, response_nll),
        spearman(prompt_nll, response_nll),
        partial_correlation(prompt_nll, response_nll, [prompt_tokens, response_tokens]),
    )


def cross_lag_correlation(x: Sequence[float], y: Sequence[float], max_lag: int) -> list[tuple[int, float]]:
    """Pearson's correlation of x with y so many points later.

    Args: x, y: (N,) values at the same, evenly spaced steps; max_lag: L ≥ 0, in points.
    Returns: (lag, correlation of x[i] with y[i + lag]) for lags -L to L; at a positive lag x leads. NaN where fewer than three
    pairs are left. Two series that both rise or fall throughout correlate at every lag: what tells is where the curve peaks, and
    `numpy.diff` of both takes a common trend out.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) != len(y):
        raise ValueError(f"cross-lag correlation needs series of one length, found {len(x)} and {len(y)}")
    n, found = len(x), []
    for lag in range(-max_lag, max_lag + 1):
        first, second = (x[: n - lag], y[lag:]) if lag >= 0 else (x[-lag:], y[: n + lag])
        found.append((lag, pearson(first, second) if n - abs(lag) >= 3 else float("nan")))
    return found


@dataclass(frozen=True)
class BandRule:
    """When a series has left its own running band.

    The band is mean ± max(width · standard deviation, least · |mean|) of the last `window` points that were inside.

    Args:
        window: points that make the band; there is none before so many were seen.
        width: in standard deviations.
        least: smallest half-width, as a share of |mean|: a curve that hardly varies does not alarm at a hair's breadth.
        patience: points in a row outside that count as leaving.
    """

    window: int = 10
    width: float = 4.0
    least: float = 0.25
    patience: int = 2

    def __post_init__(self):
        if self.window < 2 or self.patience < 1:
            raise ValueError(
                f"a band needs window >= 2 and patience >= 1, found window={self.window} and patience={self.patience}"
            )
        if self.width < 0 or self.least < 0 or self.width == self.least == 0:
            raise ValueError(
                f"a band needs width and least >= 0 and one of them above, found {self.width} and {self.least}"
            )


@dataclass(frozen=True)
class Exit:
    """A series left its band. Args: first, noticed: index of the first point outside, and of the one that made it certain;
    value: at `noticed`; mean, limit: the band's middle and the border that was crossed."""

    first: int
    noticed: int
    value: float
    mean: float
    limit: float


class Band:
    """Follows a series point by point and says when it leaves its running band to one side. After an exit it is learnt anew.

    Args: side: +1 for upwards, -1 for downwards; rule: [`BandRule`].
    """

    def __init__(self, side: int, rule: BandRule):
        self.side, self.rule = side, rule
        self._inside: deque[float] = deque(maxlen=rule.window)
        self._outside = self._count = 0

    def add(self, value: float) -> Exit | None:
        """Takes in the next point; the exit that it makes certain, if it does."""
        index, rule = self._count, self.rule
        self._count += 1
        if len(self._inside) == rule.window:
            band = np.array(self._inside)
            mean = float(band.mean())
            limit = mean + self.side * max(rule.width * float(band.std(ddof=1)), rule.least * abs(mean))
            if self.side * (value - limit) > 0:
                self._outside += 1
                if self._outside < rule.patience:
                    return None
                first = index - self._outside + 1
                self._inside.clear()
                self._outside = 0
                return Exit(first, index, float(value), mean, limit)
        self._outside = 0
        self._inside.append(float(value))
        return None


def band_exits(values: Sequence[float], side: int, rule: BandRule) -> list[Exit]:
    """Where an (N,) series leaves its running band; arguments as for [`Band`]."""
    band = Band(side, rule)
    return [found for value in values if (found := band.add(value))]


@dataclass(frozen=True)
class Collapse:
    """A sign of collapse.

    Args: kind: "entropy jump" or "reward fall"; step: optimizer step of the first point outside the band; noticed: step at which it
    was certain; value: at that step; mean, limit: of the band, in the unit of the series.
    """

    kind: str
    step: int
    noticed: int
    value: float
    mean: float
    limit: float

    def __str__(self) -> str:
        series = self.kind.partition(" ")[0]
        return (
            f"{self.kind} at step {self.step}: {series} {self.value:.4g} at step {self.noticed}, after {self.mean:.4g} on "
            f"average (its running band ends at {self.limit:.4g})"
        )


# What is watched -> to which side it leaves its band when a run collapses
SIGNS = {"entropy": ("entropy jump", +1), "reward": ("reward fall", -1)}


class CollapseWatch:
    """Follows entropy and reward and says when one looks like a collapse. Args: rule: default `BandRule()`.

    Source: the running band is this package's own rule.
    """

    def __init__(self, rule: BandRule | None = None):
        self._bands = {name: Band(side, rule or BandRule()) for name, (_, side) in SIGNS.items()}
        self._steps: dict[str, list[int]] = {name: [] for name in SIGNS}

    def add(self, name: str, step: int, value: float) -> Collapse | None:
        """Takes in the next point of a series. Args: name: of `SIGNS`; step: optimizer step; value: finite."""
        steps = self._steps[name]
        steps.append(int(step))
        e = self._bands[name].add(value)
        return e and Collapse(SIGNS[name][0], steps[e.first], steps[e.noticed], e.value, e.mean, e.limit)


def find_collapses(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], rule: BandRule | None = None
) -> list[Collapse]:
    """Entropy jumps and reward falls of a run, by the step at which they were certain.

    Args: series: steps and values of "entropy" (nats per token) and "reward", either or both; rule: default `BandRule()`.
    """
    watch = CollapseWatch(rule)
    found = [watch.add(name, step, value) for name in SIGNS for step, value in zip(*series.get(name, ((), ())))]
    return sorted(filter(None, found), key=lambda collapse: collapse.noticed)


def log_series(log_history: Sequence[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A logged metric as a series.

    Args: log_history: `state.log_history` of a trainer; name: of the metric.
    Returns: (N,) steps and (N,) values of the entries that hold it as a finite number, by step; of two entries at one step the
    later counts.
    """
    points = {}
    for entry in log_history:
        value = entry.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value):
            points[int(entry["step"])] = float(value)
    steps = sorted(points)
    return np.array(steps, dtype=int), np.array([points[step] for step in steps])
