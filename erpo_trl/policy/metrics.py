"""Trust-region metrics: how far the policy moved on the sampled tokens and what the region made of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .trust_region import Move, weight_of

# |π - μ| is counted in bins of equal ratio, so that no token needs to be kept to know a quantile within 2.4 %
_BINS_PER_DECADE, _DECADES = 100, 6
_BINS = _BINS_PER_DECADE * _DECADES


@dataclass
class StepMoves:
    """The tokens of one optimizer step, over all ranks.

    Args:
        tokens: how many; shift_sum: Σ|π-μ|; signed_sum: Σ(π-μ); violations, weight_sum, corrective: counts and Σw.
        shift_max, ratio_max, weight_max, weight_min: extremes.
        histogram: (BINS,) tokens by |π - μ|.
    """

    tokens: float
    shift_sum: float
    signed_sum: float
    violations: float
    weight_sum: float
    corrective: float
    shift_max: float
    ratio_max: float
    weight_max: float
    weight_min: float
    histogram: np.ndarray

    @property
    def shift_p99(self) -> float:
        """99th percentile of |π - μ|, by the upper edge of its bin; NaN without a token."""
        return _quantile(self.histogram, 0.99, self.shift_max)


def _quantile(histogram: np.ndarray, q: float, highest: float) -> float:
    if not histogram.sum():
        return float("nan")
    place = np.searchsorted(histogram.cumsum(), q * histogram.sum())
    return min(10 ** ((place + 1) / _BINS_PER_DECADE - _DECADES), highest)


class RegionMetrics:
    """Collects micro-batches into steps (one gather a step) and steps into what is logged."""

    def __init__(self):
        self._sums: list[Tensor]  # per micro-batch (6 + BINS,)
        self._extremes: list[Tensor]  # per micro-batch (4,)
        self.begin_step()
        self._steps: list[StepMoves] = []

    def begin_step(self) -> None:
        """Forget micro-batches whose step never ended."""
        self._sums, self._extremes = [], []

    def add(self, move: Move, advantage: Tensor, pushed: Tensor, outside: Tensor, mask: Tensor) -> None:
        """Take in one micro-batch of (B, C) tokens; `pushed` is the region's w·A, `outside` True past its boundary."""
        shift, weight = move.shift.abs(), weight_of(pushed, advantage)
        counted = (torch.ones_like(shift), shift, move.shift, outside, weight, weight < 0)
        sums = [torch.where(mask, value.float(), 0.0).sum() for value in counted]
        bins = (shift[mask].float().clamp(min=10.0**-_DECADES).log10() + _DECADES) * _BINS_PER_DECADE
        histogram = torch.bincount(bins.long().clamp(max=_BINS - 1), minlength=_BINS)
        self._sums.append(torch.cat([torch.stack(sums), histogram.float()]))
        lowest = -torch.inf
        extremes = [x.float().masked_fill(~mask, lowest).max() for x in (shift, move.r, weight, -weight)]
        self._extremes.append(torch.stack(extremes))

    @property
    def micro_batches(self) -> int:
        """How many wait for their step to end."""
        return len(self._sums)

    def end_step(self, accelerator) -> StepMoves:
        """Bring the ranks' micro-batches since the last call together. Every rank must call it."""
        local = torch.cat([torch.stack(self._sums).sum(0), torch.stack(self._extremes).amax(0)])
        self.begin_step()
        ranks = accelerator.gather(local.unsqueeze(0)).cpu().double()
        sums, extremes = ranks[:, :-4].sum(0), ranks[:, -4:].amax(0).tolist()
        step = StepMoves(*sums[:6].tolist(), *extremes[:3], -extremes[3], sums[6:].numpy())
        self._steps.append(step)
        return step

    def summarize(self) -> dict[str, float]:
        """Metrics of the steps since the last summary, then start anew; empty without a token."""
        steps, self._steps = [step for step in self._steps if step.tokens], []
        tokens = sum(step.tokens for step in steps)
        if not tokens:
            return {}
        shift_max = max(step.shift_max for step in steps)
        return {
            "shift_mean": sum(step.shift_sum for step in steps) / tokens,
            "shift_p99": _quantile(sum(step.histogram for step in steps), 0.99, shift_max),
            "shift_max": shift_max,
            "violation_rate": sum(step.violations for step in steps) / tokens,
            "weight_mean": sum(step.weight_sum for step in steps) / tokens,
            "weight_min": min(step.weight_min for step in steps),
            "weight_max": max(step.weight_max for step in steps),
            "corrective_rate": sum(step.corrective for step in steps) / tokens,
            "ratio_max": max(step.ratio_max for step in steps),
        }
