"""Query weights: from the reference NLL of a query to the factor on its advantage.

A scheme is one function (nll, mean_nll) -> raw weight and one line in `WEIGHT_SCHEMES`; clipping and one-token queries are
common to all and live in `query_weights`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def nll_ratio(nll: Tensor, mean_nll: float) -> Tensor:
    """s̄ / s(q): queries more typical under the reference than the average weigh more (ERPO section 4.2)."""
    return mean_nll / nll


def uniform(nll: Tensor, mean_nll: float) -> Tensor:
    """1 for every query: no weighting."""
    return torch.ones_like(nll)


WEIGHT_SCHEMES = {"nll_ratio": nll_ratio, "uniform": uniform}


def query_weights(
    nll: Tensor,
    mean_nll: float,
    scheme: str = "nll_ratio",
    clip: Sequence[float] = (0.0, 2.0),
    scored: Tensor | None = None,
) -> Tensor:
    """Weight w(q) of each query.

    Args:
        nll: (N,) reference NLL s(q) = -ℓ_0(q), nats, >= 0.
        mean_nll: s̄, the mean of s over the training set's scored queries, nats.
        scheme: a key of `WEIGHT_SCHEMES`.
        clip: lowest and highest weight. The highest also answers s(q) = 0, where the ratio has no bound.
        scored: (N,) False for a one-token query, which has no likelihood and weighs 1. Default: all True.

    Returns:
        (N,) weights, same dtype as `nll`.

    Raises:
        ValueError: if a weight is not finite, which needs s(q) = 0 and no upper clip.

    Source: ERPO (arXiv 2608.23311) section 4.2; clip [0, 2].
    """
    raw = WEIGHT_SCHEMES[scheme](nll, mean_nll)
    if scheme != "uniform":
        # 0/0 at mean 0 is NaN, which a clamp would keep
        raw = torch.where(nll == 0, torch.full_like(raw, math.inf), raw).clamp(clip[0], clip[1])
    if scored is not None:
        raw = torch.where(scored, raw, torch.ones_like(raw))
    if not torch.isfinite(raw).all():
        row = int((~torch.isfinite(raw)).nonzero()[0])
        raise ValueError(
            f"query {row} has a reference NLL of {nll[row].item()} nats, so its weight has no bound: set "
            "query_weight_clip to a finite upper end"
        )
    return raw


def effective_sample_fraction(weights: Tensor) -> float:
    """Effective sample size of (N,) weights as a share of N: (Σw)² / (N Σw²), in (0, 1]; 0 when all weights are 0."""
    squares = (weights * weights).sum()
    return float(weights.sum() ** 2 / (len(weights) * squares)) if squares > 0 else 0.0
