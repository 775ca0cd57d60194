"""Intervals over seeds: Student's t, and paired differences. Pure functions of numbers.

Two values have no interval worth its name (12.7 standard errors to each side): they are given themselves.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95


@functools.lru_cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """How many standard errors to each side hold `level` of Student's t distribution.

    Args: freedom: degrees of freedom ν ≥ 1; level: in (0, 1).
    Returns: t with P(|T| < t) = level; 4.303 for ν = 2 and 2.776 for ν = 4 at 0.95.
    Source: with T = √ν tan φ, P(|T| < t) = ∫₀^φ cos^(ν-1) / ∫₀^(π/2) cos^(ν-1).
    """
    if freedom < 1 or not 0 < level < 1:
        raise ValueError(f"needs freedom >= 1 and level in (0, 1), found {freedom} and {level}")
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def integral(end: float) -> float:
        return end / 2 * float(weights @ np.cos(end / 2 * (nodes + 1)) ** (freedom - 1))

    whole, low, high = integral(math.pi / 2), 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) < level * whole else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval.

    Args: count: n; mean; low, high: of the interval; of two seeds, the two values; NaN for a single seed. In the values' unit.
    """

    count: int
    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean ± t·s/√n of n independent values, s their standard deviation with n-1; of two, the mean and both; NaN without any."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        return Interval(0, *[float("nan")] * 3)
    mean = float(values.mean())
    if len(values) == 1:
        return Interval(1, mean, float("nan"), float("nan"))
    if len(values) == 2:
        return Interval(2, mean, float(values.min()), float(values.max()))
    half = t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(len(values), mean, mean - half, mean + half)


def log_interval(values: Sequence[float]) -> Interval:
    """The same on the logarithms of positive values, taken back: geometric mean and an interval that is positive, too."""
    found = mean_interval(np.log(np.asarray(values, dtype=float)))
    return Interval(found.count, *(float(np.exp(x)) for x in (found.mean, found.low, found.high)))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> list[tuple[float, float]]:
    """The values of two variants at the seeds that both have. Args: a, b: seed -> value."""
    return [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """Mean and interval of a - b over the seeds that both have: what a seed does to both drops out."""
    return mean_interval([x - y for x, y in paired(a, b)])


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
    """Geometric mean and interval of a / b over the seeds that both have; all values positive."""
    return log_interval([x / y for x, y in paired(a, b)])
