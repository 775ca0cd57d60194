"""Drift of a query's likelihood from its reference: k1, k2, k3 on tokens or on the whole sequence.

Against the textbook estimators one thing differs: k3 = e^x - x - 1 continues linearly beyond |x| = 20, so that a drift of
tens of nats gives a large finite value and a large finite gradient instead of inf and NaN.
"""

import torch
from torch import Tensor

# |x| in nats beyond which k3 continues linearly; e^20 = 4.9e8 is far above any drift that training survives
K3_LINEAR_FROM = 20.0
# |x| in nats below which k3 is evaluated by its series
K3_SERIES_BELOW = 0.05


def k1(x: Tensor) -> Tensor:
    """-x: unbiased for samples of the policy, can be negative."""
    return -x


def k2(x: Tensor) -> Tensor:
    """x²/2: its gradient on a fixed set is (ℓ_θ - ℓ_0)∇ℓ_θ (Proposition 1)."""
    return 0.5 * x * x


def k3(x: Tensor) -> Tensor:
    """e^x - x - 1 for |x| <= 20, continued with the value and the slope it has there."""
    inside = x.clamp(-K3_LINEAR_FROM, K3_LINEAR_FROM)
    # e^x - 1 - x cancels near 0, where a run begins: in float32 it would be noise, even negative, below |x| = 1e-4.
    # The series to x^7 is exact to 1e-12 there.
    near = x.clamp(-K3_SERIES_BELOW, K3_SERIES_BELOW)
    series = (
        near * near * (1 / 2 + near * (1 / 6 + near * (1 / 24 + near * (1 / 120 + near * (1 / 720 + near / 5040)))))
    )
    slope = torch.expm1(inside)
    value = torch.where(x.abs() < K3_SERIES_BELOW, series, slope - inside)
    # `inside` is constant beyond the bounds, so there only the linear part carries value and gradient
    return value + slope.detach() * (x - inside)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
LEVELS = ("token", "sequence")


def query_kl(
    logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor,
    estimator: str = "k3",
    level: str = "token",
    length_normalize: bool = False,
) -> Tensor:
    """Drift R̂(q) of each query's likelihood from its reference.

    Args:
        logps: (Q, T) log-probabilities of the query tokens under the policy, nats.
        ref_logps: (Q, T) the same under the reference, nats; a constant.
        mask: (Q, T) True where a token is scored. Values elsewhere, NaN included, touch neither value nor gradient.
        estimator: `k1`, `k2` or `k3`, a function of x = log P_0 - log P_θ.
        level: `token` applies it to every token and averages over the query's scored tokens; `sequence` applies it once
            to the sum of x over them.
        length_normalize: with `sequence`, apply it to the mean of x over the scored tokens instead of the sum.

    Returns:
        (Q,) in nats; non-negative for k2 and k3; 0 for a query with no scored token.

    Source: ERPO (arXiv 2608.23311), the K3-style surrogate of Eq. 6 in section 4.2; estimators after Schulman's note
    "Approximating KL divergence".
    """
    mask = mask.bool()
    # `where` before any arithmetic: multiplying by the mask would keep NaN, and inf * 0 is NaN in the gradient
    x = torch.where(mask, ref_logps, 0.0) - torch.where(mask, logps, 0.0)
    count = mask.sum(-1).clamp(min=1)
    if level == "token":
        return torch.where(mask, ESTIMATORS[estimator](x), 0.0).sum(-1) / count
    if level != "sequence":
        raise ValueError(f"level must be one of {LEVELS}, found {level!r}")
    total = x.sum(-1)
    return ESTIMATORS[estimator](total / count if length_normalize else total)
