"""Adaptive radius: δ follows the moves it should bound."""

import math

# δ stays where a boundary can be reached and where it is more than rounding
LOWEST, HIGHEST = 1e-4, 1.0
# 99th percentile of |π - μ| below which a step says nothing about δ: the first step after a generation moves by rounding only
NOT_MOVED = 1e-5


def adapt_radius(delta: float, shift_p99: float, target: float, rate: float) -> float:
    """δ after one optimizer step, moved so that the 99th percentile of |π - μ| sits at `target` · δ.

    log δ goes the share `rate` of the way to log(shift_p99 / target). Steps on which the policy had not moved leave it.

    Args:
        delta: δ; shift_p99: 99th percentile of |π - μ| over the step's tokens.
        target: in (0, 1]; rate: in (0, 1].

    Returns: δ in [1e-4, 1].
    """
    if shift_p99 >= NOT_MOVED:
        delta *= math.exp(rate * (math.log(shift_p99 / target) - math.log(delta)))
    return min(max(delta, LOWEST), HIGHEST)
