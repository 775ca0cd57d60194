"""Trust-region metrics: how far the policy moved on the sampled tokens and what the region made of it."""

import numpy as np
import torch
from torch import Tensor

from .trust_region import Move, RegionParams, weight_of


class RegionMetrics:
    """Statistics over the tokens since the last summary, over ranks and micro-batches by sums, counts and a histogram."""

    # |π - μ| lies in [0, 1]; quantiles are read from its histogram, so no token needs to be kept
    BINS = 1000

    def __init__(self):
        self._sums: list[Tensor] = []  # per micro-batch (5,): tokens, Σ|π-μ|, violations, Σw, corrective
        self._maxima: list[Tensor] = []  # per micro-batch (4,): max|π-μ|, max r, max w, max -w
        self._histogram: list[Tensor] = []  # per micro-batch (BINS,)

    def add(
        self, move: Move, advantage: Tensor, pushed: Tensor, mask: Tensor, params: RegionParams, accelerator
    ) -> None:
        """Take in one micro-batch of (B, C) tokens; `pushed` is the region's w·A."""
        shift = move.shift.abs()
        weight = weight_of(pushed, advantage)
        radius = torch.where(move.shift > 0, params.high, params.low)
        sums = [mask, shift * mask, (shift > radius) & mask, weight * mask, (weight < 0) & mask]
        low = -torch.inf
        maxima = [x.masked_fill(~mask, low).max() for x in (shift, move.r, weight, -weight)]
        histogram = torch.histc(shift[mask].float(), bins=self.BINS, min=0.0, max=1.0)
        # One reduction a micro-batch each, as TRL's own metrics make
        self._sums.append(accelerator.reduce(torch.stack([x.sum().float() for x in sums]), reduction="sum"))
        self._histogram.append(accelerator.reduce(histogram, reduction="sum"))
        self._maxima.append(accelerator.gather(torch.stack(maxima).float().unsqueeze(0)).amax(0))

    def summarize(self) -> dict[str, float]:
        """Metrics since the last summary, then start anew; empty without a token."""
        if not self._sums:
            return {}
        tokens, shift, violations, weight, corrective = torch.stack(self._sums).sum(0).tolist()
        top_shift, top_ratio, top_weight, top_negative = torch.stack(self._maxima).amax(0).tolist()
        counts = torch.stack(self._histogram).sum(0).cpu().numpy()
        self._sums, self._maxima, self._histogram = [], [], []
        if not tokens:
            return {}
        # Upper edge of the bin that holds the 99th percentile
        p99 = (np.searchsorted(counts.cumsum(), 0.99 * counts.sum()) + 1) / self.BINS
        return {
            "shift_mean": shift / tokens,
            "shift_p99": float(min(p99, top_shift)),
            "shift_max": top_shift,
            "violation_rate": violations / tokens,
            "weight_mean": weight / tokens,
            "weight_min": -top_negative,
            "weight_max": top_weight,
            "corrective_rate": corrective / tokens,
            "ratio_max": top_ratio,
        }
