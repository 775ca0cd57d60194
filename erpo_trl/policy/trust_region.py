"""Trust regions: how a token's policy gradient is weighted by how far the policy has moved on it.

With r = π/μ on a sampled token (μ the behaviour policy) and A its advantage, the plain policy gradient is A·∇r. A region
multiplies it by a weight w(r, μ, A), which a region with an objective gets from that objective's gradient. In code a region
is its *push* w·A: for `drpo_no_advantage` something is left to push where A = 0, which no weight could say.

Adding a region: one function (move, A, params) -> push, its objective beside it, one line in `REGIONS`.

Sources: SPO (arXiv 2401.16025), DPPO (arXiv 2602.04879), DRPO and its ablations (arXiv 2606.09821, Eq. 8 and Table 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# |log r| in nats beyond which r stands still: e^40 squared is finite in float32, and no gradient should be that large
LOG_RATIO_BOUND = 40.0
# |log r| in nats up to which a token counts as not moved where only the sign of the move matters: float32 rounding of two
# forwards of the same weights, which would otherwise draw that sign at random
NOT_MOVED = 1e-5


@dataclass(frozen=True)
class RegionParams:
    """What the regions are set by.

    Args:
        delta: δ, radius: of |π - μ| or a total variation (TV regions), or of a divergence in nats (KL regions).
        delta_low, delta_high: radius where the probability falls and where it rises (DPPO's masks may differ). Default δ.
        ratio_cap: C, DPPO's truncation of r on tokens inside the region.
        epsilon: ε, SPO's radius of |r - 1|.
        coef: c, coefficient of the ablations `drpo_tv`, `drpo_kl`, `drpo_k3`. Default 1/δ.
    """

    delta: float
    delta_low: float | None = None
    delta_high: float | None = None
    ratio_cap: float = 20.0
    epsilon: float = 0.2
    coef: float | None = None

    @property
    def low(self) -> float:
        return self.delta if self.delta_low is None else self.delta_low

    @property
    def high(self) -> float:
        return self.delta if self.delta_high is None else self.delta_high

    @property
    def c(self) -> float:
        return 1 / self.delta if self.coef is None else self.coef


class TopK(NamedTuple):
    """The behaviour policy's K likeliest tokens at each sampled token.

    Args:
        log_mu: (B, T, K) their log-probs under the behaviour policy, nats.
        log_pi: (B, T, K) their log-probs under the policy, nats.
        valid: (B, T, K) bool, False for padding and for the sampled token itself, which [`Move`] holds already.
    """

    log_mu: Tensor
    log_pi: Tensor
    valid: Tensor


class Move:
    """How far the policy has moved on sampled tokens, in the quantities that regions are written in.

    Args:
        log_ratio: (B, T) log π - log μ, nats; bounded by ±`LOG_RATIO_BOUND`.
        log_mu: (B, T) log-probability of the token under the behaviour policy, nats.
        topk: [`TopK`], for the regions that compare more than the sampled token.
    """

    def __init__(self, log_ratio: Tensor, log_mu: Tensor, topk: TopK | None = None):
        self.log_r = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.r = self.log_r.exp()
        self.mu = log_mu.exp()
        self.pi = (log_ratio + log_mu).clamp(max=0.0).exp()
        self.shift = self.pi - self.mu
        self.topk = topk


Push = Callable[[Move, Tensor, RegionParams], Tensor]


def plain(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """No region: rA."""
    return advantage.expand_as(move.r)


def plain_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage


def spo(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Quadratic in the ratio: weight 1 - sign(A(r-1))·|r-1|/ε, without bound in r."""
    return advantage - advantage.abs() * (move.r - 1) / params.epsilon


def spo_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - advantage.abs() * (move.r - 1) ** 2 / (2 * params.epsilon)


def radius(move: Move, params: RegionParams) -> Tensor:
    """δ for the direction in which the token moved."""
    return torch.where(move.log_r > 0, params.high, params.low)


def pushed_on(move: Move, advantage: Tensor) -> Tensor:
    """True where the update would move the token on in the direction it has moved in already."""
    return torch.where(advantage > 0, move.log_r > 0, move.log_r < 0)


def outside_none(move: Move, params: RegionParams) -> Tensor:
    """A region without a boundary."""
    return torch.zeros_like(move.r, dtype=torch.bool)


def outside_spo(move: Move, params: RegionParams) -> Tensor:
    """|r - 1| past ε."""
    return (move.r - 1).abs() > params.epsilon


def outside_tv(move: Move, params: RegionParams) -> Tensor:
    """|π - μ| past the radius."""
    return move.shift.abs() > radius(move, params)


def bernoulli_kl(move: Move) -> Tensor:
    """KL(μ‖π) of "this token or any other", nats; finite where π is 0 or 1."""
    rest_mu, rest_pi = 1 - move.mu, 1 - move.pi
    return -move.mu * move.log_r + _rest_kl(rest_mu, rest_pi)


def _rest_kl(rest_mu: Tensor, rest_pi: Tensor) -> Tensor:
    """μ·log(μ/π) of all remaining tokens together, whose mass is known up to rounding."""
    finfo = torch.finfo(rest_mu.dtype)
    rest_mu, rest_pi = rest_mu.clamp(min=0.0), rest_pi.clamp(min=finfo.eps)
    return rest_mu * (rest_mu.clamp(min=finfo.tiny).log() - rest_pi.log())


def outside_kl(move: Move, params: RegionParams) -> Tensor:
    """Bernoulli KL past the radius."""
    return bernoulli_kl(move) > radius(move, params)


def topk_tv(move: Move) -> Tensor:
    """Total variation between μ and π over the K likeliest tokens, the sampled one and "any other"."""
    valid = move.topk.valid
    mu, pi = (torch.where(valid, x.exp(), 0.0) for x in (move.topk.log_mu, move.topk.log_pi))
    rest = (move.pi + pi.sum(-1)) - (move.mu + mu.sum(-1))
    return 0.5 * ((pi - mu).abs().sum(-1) + move.shift.abs() + rest.abs())


def topk_kl(move: Move) -> Tensor:
    """KL(μ‖π), nats, over the K likeliest tokens, the sampled one and "any other"."""
    valid = move.topk.valid
    mu, pi = (torch.where(valid, x.exp(), 0.0) for x in (move.topk.log_mu, move.topk.log_pi))
    log_r = (move.topk.log_pi - move.topk.log_mu).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    listed = -(mu * torch.where(valid, log_r, 0.0)).sum(-1) - move.mu * move.log_r
    return listed + _rest_kl(1 - move.mu - mu.sum(-1), 1 - move.pi - pi.sum(-1))


def outside_topk_tv(move: Move, params: RegionParams) -> Tensor:
    """Top-K total variation past the radius."""
    return topk_tv(move) > radius(move, params)


def outside_topk_kl(move: Move, params: RegionParams) -> Tensor:
    """Top-K KL past the radius."""
    return topk_kl(move) > radius(move, params)


def masked_push(move: Move, advantage: Tensor, params: RegionParams, outside: Tensor) -> Tensor:
    """DPPO's: nothing where the token is outside and A pushes it on, elsewhere A with r truncated at C, as min(r, C)/r."""
    truncated = (params.ratio_cap / move.r).clamp(max=1.0)
    return torch.where(outside & pushed_on(move, advantage), 0.0, truncated * advantage)


def dppo_tv(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by |π - μ|."""
    return masked_push(move, advantage, params, outside_tv(move, params))


def dppo_kl(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by the Bernoulli KL(μ‖π)."""
    return masked_push(move, advantage, params, outside_kl(move, params))


def dppo_topk_tv(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by the total variation over the K likeliest tokens (DPPO's Top-K approximation)."""
    return masked_push(move, advantage, params, outside_topk_tv(move, params))


def dppo_topk_kl(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by the KL over the K likeliest tokens (DPPO's Top-K approximation)."""
    return masked_push(move, advantage, params, outside_topk_kl(move, params))


def masked_objective(dppo: Push) -> Push:
    """DPPO's objective, masked rA with r truncated at C; mask and truncation carry no gradient."""

    def objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
        return dppo(move, advantage, params).detach() * move.r

    return objective


def drpo(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Quadratic in the probability shift: weight 1 - sign(A(r-1))·|π-μ|/δ, in [1 - 1/δ, 1 + 1/δ]."""
    return advantage - advantage.abs() * move.shift / params.delta


def drpo_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - advantage.abs() * move.mu * (move.r - 1) ** 2 / (2 * params.delta)


def drpo_mask(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """DRPO's weight where DPPO would drop the token, 1 elsewhere."""
    masked = outside_tv(move, params) & pushed_on(move, advantage)
    return torch.where(masked, drpo(move, advantage, params), advantage)


def drpo_mask_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    masked = outside_tv(move, params) & pushed_on(move, advantage)
    return torch.where(masked, drpo_objective(move, advantage, params), move.r * advantage)


def drpo_no_advantage(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Without the factor |A|: weight 1 - (π-μ)/(δA), so the boundary moves with |A|, and a push is left where A = 0."""
    return advantage - move.shift / params.delta


def drpo_no_advantage_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - move.mu * (move.r - 1) ** 2 / (2 * params.delta)


def drpo_tv(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Penalty on |r - 1|: weight 1 - c·sign(A(r-1))."""
    direction = torch.where(move.log_r.abs() <= NOT_MOVED, 0.0, move.log_r.sign())
    return advantage - params.c * advantage.abs() * direction


def drpo_tv_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - params.c * advantage.abs() * (move.r - 1).abs()


def drpo_kl(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Forward KL(μ‖π) by its sample: weight 1 + c·sign(A)/r."""
    return advantage + params.c * advantage.abs() / move.r


def drpo_kl_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage + params.c * advantage.abs() * move.log_r


def drpo_k3(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Forward KL by k3: weight 1 - c·sign(A)(1 - 1/r)."""
    return advantage - params.c * advantage.abs() * (1 - 1 / move.r)


def drpo_k3_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - params.c * advantage.abs() * (move.r - 1 - move.log_r)


class Region(NamedTuple):
    """A trust region.

    Args:
        push: (move, A, params) -> w·A.
        objective: (move, A, params) -> what is maximised, for tests and plots.
        outside: (move, params) -> True where a token has moved past the boundary, for the metrics.
        over: what its δ bounds: `shift` (|π - μ|), `divergence` (nats), `topk` (a distance over the K likeliest tokens);
            `coefficient` where it only sets c; `nothing` where there is no δ.
    """

    push: Push
    objective: Push
    outside: Callable[[Move, RegionParams], Tensor]
    over: str


# `ratio_clip` is TRL's own and needs no entry
REGIONS: dict[str, Region] = {
    "none": Region(plain, plain_objective, outside_none, "nothing"),
    "spo": Region(spo, spo_objective, outside_spo, "nothing"),
    "dppo_tv": Region(dppo_tv, masked_objective(dppo_tv), outside_tv, "shift"),
    "dppo_kl": Region(dppo_kl, masked_objective(dppo_kl), outside_kl, "divergence"),
    "dppo_topk_tv": Region(dppo_topk_tv, masked_objective(dppo_topk_tv), outside_topk_tv, "topk"),
    "dppo_topk_kl": Region(dppo_topk_kl, masked_objective(dppo_topk_kl), outside_topk_kl, "topk"),
    "drpo": Region(drpo, drpo_objective, outside_tv, "shift"),
    "drpo_mask": Region(drpo_mask, drpo_mask_objective, outside_tv, "shift"),
    "drpo_no_advantage": Region(drpo_no_advantage, drpo_no_advantage_objective, outside_tv, "shift"),
    "drpo_tv": Region(drpo_tv, drpo_tv_objective, outside_tv, "coefficient"),
    "drpo_kl": Region(drpo_kl, drpo_kl_objective, outside_tv, "coefficient"),
    "drpo_k3": Region(drpo_k3, drpo_k3_objective, outside_tv, "coefficient"),
}


def push(
    region: str,
    log_ratio: Tensor,
    log_mu: Tensor,
    advantage: Tensor,
    params: RegionParams,
    topk: TopK | None = None,
) -> Tensor:
    """w·A of every token: what multiplies ∇r.

    Args:
        region: a key of `REGIONS`.
        log_ratio, log_mu: (B, T) nats; see [`Move`].
        advantage: (B, T) or (B, 1).
        params: [`RegionParams`].
        topk: [`TopK`], for the regions over it.

    Returns: (B, T), finite for any log-ratio.
    """
    return REGIONS[region].push(Move(log_ratio, log_mu, topk), advantage, params)


def gradient_weight(
    region: str,
    log_ratio: Tensor,
    log_mu: Tensor,
    advantage: Tensor,
    params: RegionParams,
    topk: TopK | None = None,
) -> Tensor:
    """w of every token, (B, T); 1 where A = 0, where it multiplies nothing. Arguments as for [`push`]."""
    return weight_of(push(region, log_ratio, log_mu, advantage, params, topk), advantage)


def weight_of(pushed: Tensor, advantage: Tensor) -> Tensor:
    """w from the push w·A, (B, T); 1 where A = 0."""
    zero = advantage == 0
    return torch.where(zero, 1.0, pushed / torch.where(zero, 1.0, advantage))


def objective(
    region: str,
    log_ratio: Tensor,
    log_mu: Tensor,
    advantage: Tensor,
    params: RegionParams,
    topk: TopK | None = None,
) -> Tensor:
    """The region's printed objective per token, maximised, (B, T). Differentiable in `log_ratio`. Arguments as for `push`."""
    return REGIONS[region].objective(Move(log_ratio, log_mu, topk), advantage, params)
