"""Trust regions: how a token's policy gradient is weighted by how far the policy has moved on it.

With r = π/μ on a sampled token (μ the behaviour policy) and A its advantage, the plain policy gradient is A·∇r. A region
multiplies it by a weight w(r, μ, A), which a region with an objective gets from that objective's gradient. In code a region
is its *push* w·A: for `drpo_no_advantage` something is left to push where A = 0, which no weight could say.

Adding a region: one function (move, A, params) -> push, its objective beside it, one line in `REGIONS`.

Sources: SPO (arXiv 2401.16025), DPPO (arXiv 2602.04879), DRPO and its ablations (arXiv 2606.09821, Eq. 8 and Table 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

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
        delta: δ, radius: of |π - μ| (TV regions) or of a divergence in nats (`dppo_kl`).
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


class Move:
    """How far the policy has moved on sampled tokens, in the quantities that regions are written in.

    Args:
        log_ratio: (B, T) log π - log μ, nats; bounded by ±`LOG_RATIO_BOUND`.
        log_mu: (B, T) log-probability of the token under the behaviour policy, nats.
    """

    def __init__(self, log_ratio: Tensor, log_mu: Tensor):
        self.log_r = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.r = self.log_r.exp()
        self.mu = log_mu.exp()
        self.pi = (log_ratio + log_mu).clamp(max=0.0).exp()
        self.shift = self.pi - self.mu


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


def outside_tv(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """True where |π - μ| is past the radius and the update would move it further out."""
    return torch.where(advantage > 0, move.shift > params.high, move.shift < -params.low)


def bernoulli_kl(move: Move) -> Tensor:
    """KL(μ‖π) of "this token or any other", nats; finite where π is 0 or 1."""
    tiny = torch.finfo(move.mu.dtype).tiny
    eps = torch.finfo(move.mu.dtype).eps
    rest_mu, rest_pi = (1 - move.mu).clamp(min=0.0), (1 - move.pi).clamp(min=eps)
    return -move.mu * move.log_r + rest_mu * (rest_mu.clamp(min=tiny).log() - rest_pi.log())


def outside_kl(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """True where the Bernoulli KL is past the radius and π has moved in the direction that A pushes."""
    divergence = bernoulli_kl(move)
    rose = (divergence > params.high) & (move.log_r > 0)
    fell = (divergence > params.low) & (move.log_r < 0)
    return torch.where(advantage > 0, rose, fell)


def masked_push(move: Move, advantage: Tensor, params: RegionParams, outside: Tensor) -> Tensor:
    """DPPO's: nothing outside, and inside A with r truncated at C, as min(r, C)/r."""
    truncated = (params.ratio_cap / move.r).clamp(max=1.0)
    return torch.where(outside, 0.0, truncated * advantage)


def dppo_tv(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by |π - μ|."""
    return masked_push(move, advantage, params, outside_tv(move, advantage, params))


def dppo_tv_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return dppo_tv(move, advantage, params).detach() * move.r


def dppo_kl(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Mask by the Bernoulli KL(μ‖π)."""
    return masked_push(move, advantage, params, outside_kl(move, advantage, params))


def dppo_kl_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return dppo_kl(move, advantage, params).detach() * move.r


def drpo(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """Quadratic in the probability shift: weight 1 - sign(A(r-1))·|π-μ|/δ, in [1 - 1/δ, 1 + 1/δ]."""
    return advantage - advantage.abs() * move.shift / params.delta


def drpo_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    return move.r * advantage - advantage.abs() * move.mu * (move.r - 1) ** 2 / (2 * params.delta)


def drpo_mask(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    """DRPO's weight where DPPO would drop the token, 1 elsewhere."""
    return torch.where(outside_tv(move, advantage, params), drpo(move, advantage, params), advantage)


def drpo_mask_objective(move: Move, advantage: Tensor, params: RegionParams) -> Tensor:
    outside = outside_tv(move, advantage, params)
    return torch.where(outside, drpo_objective(move, advantage, params), move.r * advantage)


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


# Name -> (push, objective); `ratio_clip` is TRL's own and needs neither
REGIONS: dict[str, tuple[Push, Push]] = {
    "none": (plain, plain_objective),
    "spo": (spo, spo_objective),
    "dppo_tv": (dppo_tv, dppo_tv_objective),
    "dppo_kl": (dppo_kl, dppo_kl_objective),
    "drpo": (drpo, drpo_objective),
    "drpo_mask": (drpo_mask, drpo_mask_objective),
    "drpo_no_advantage": (drpo_no_advantage, drpo_no_advantage_objective),
    "drpo_tv": (drpo_tv, drpo_tv_objective),
    "drpo_kl": (drpo_kl, drpo_kl_objective),
    "drpo_k3": (drpo_k3, drpo_k3_objective),
}


def push(region: str, log_ratio: Tensor, log_mu: Tensor, advantage: Tensor, params: RegionParams) -> Tensor:
    """w·A of every token: what multiplies ∇r.

    Args:
        region: a key of `REGIONS`.
        log_ratio, log_mu: (B, T) nats; see [`Move`].
        advantage: (B, T) or (B, 1).
        params: [`RegionParams`].

    Returns: (B, T), finite for any log-ratio.
    """
    return REGIONS[region][0](Move(log_ratio, log_mu), advantage, params)


def gradient_weight(region: str, log_ratio: Tensor, log_mu: Tensor, advantage: Tensor, params: RegionParams) -> Tensor:
    """w of every token, (B, T); 1 where A = 0, where it multiplies nothing. Arguments as for [`push`]."""
    return weight_of(push(region, log_ratio, log_mu, advantage, params), advantage)


def weight_of(pushed: Tensor, advantage: Tensor) -> Tensor:
    """w from the push w·A, (B, T); 1 where A = 0."""
    zero = advantage == 0
    return torch.where(zero, 1.0, pushed / torch.where(zero, 1.0, advantage))


def objective(region: str, log_ratio: Tensor, log_mu: Tensor, advantage: Tensor, params: RegionParams) -> Tensor:
    """The region's printed objective per token, maximised, (B, T). Differentiable in `log_ratio`. Arguments as for `push`."""
    return REGIONS[region][1](Move(log_ratio, log_mu), advantage, params)
