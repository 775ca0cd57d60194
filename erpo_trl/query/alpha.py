"""α, the coefficient of the Query-KL penalty: fixed, adapted to a target drift, or with a hinge at it."""

import math

from torch import Tensor


def drift_error(drift: float, target: float) -> float:
    """R̂/target - 1 for R̂ >= 0 and target > 0, nats: in [-1, 1], clipped above as it is by nature below, so that one wild batch
    moves α no further than a calm one takes back.
    """
    return min(drift / target - 1, 1.0)


def dual_ascent(multiplier: float, error: float, rate: float, bounds: tuple[float, float]) -> float:
    """One step on log λ of the Lagrangian L_PG + λ (R̂ - target): up where the drift is above its target, down below.

    Args: multiplier: λ, per nat; error: see `drift_error`; rate: how far log λ moves at an error of 1; bounds: of λ.
    """
    return min(max(multiplier * math.exp(rate * error), bounds[0]), bounds[1])


class AdaptiveAlpha:
    """α that follows the exponential moving average of the drift: α = λ · e^(gain · error), λ by dual ascent.

    Drift integrates what pushes it, and a multiplier integrates the drift: dual ascent alone swings around the target (on the
    embedded model from half to one and a half of it, over some 200 steps). The term in proportion to the error damps it.

    Args:
        alpha: where it starts, per nat.
        target: drift to hold, nats.
        rate, bounds: see `dual_ascent`; α keeps within the bounds as λ does.
        gain: of the damping; 0 leaves dual ascent alone.
        decay: of the average, in [0, 1). The average is corrected for its start, so that the first step counts whole.

    Source: PID Lagrangian methods (Stooke et al., arXiv 2007.03964), here on log α and without the derivative.
    """

    def __init__(
        self, alpha: float, target: float, rate: float, gain: float, bounds: tuple[float, float], decay: float
    ):
        self.alpha = self.multiplier = alpha
        self.target, self.rate, self.gain, self.bounds, self.decay = target, rate, gain, bounds, decay
        self._sum, self._weight = 0.0, 0.0

    def update(self, drift: float) -> float:
        """Take in the R̂ of one optimizer step, nats, and return the α of the next.

        A step whose R̂ is no finite number, as fp16 makes now and then, leaves α alone: in the average it would stay for good.
        """
        if not math.isfinite(drift):
            return self.alpha
        self._sum = self.decay * self._sum + (1 - self.decay) * drift
        self._weight = self.decay * self._weight + (1 - self.decay)
        error = drift_error(self._sum / self._weight, self.target)
        self.multiplier = dual_ascent(self.multiplier, error, self.rate, self.bounds)
        self.alpha = min(max(self.multiplier * math.exp(self.gain * error), self.bounds[0]), self.bounds[1])
        return self.alpha

    def state(self) -> dict:
        """What `restore` needs to go on as if nothing had happened."""
        average = [self._sum, self._weight]
        return {"query_alpha": self.alpha, "query_alpha_multiplier": self.multiplier, "query_kl_average": average}

    def restore(self, state: dict) -> None:
        """Take up what `state` gave."""
        self.alpha, self.multiplier = state["query_alpha"], state["query_alpha_multiplier"]
        self._sum, self._weight = state["query_kl_average"]


def hinge(divergence: Tensor, target: float) -> Tensor:
    """(Q,) the drift R̂(q) above `target`, nats: 0, with no gradient, for a query that drifts less."""
    return (divergence - target).clamp(min=0.0)
