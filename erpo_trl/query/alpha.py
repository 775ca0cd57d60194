"""α, the coefficient of the Query-KL penalty: fixed, adapted to a target drift, or with a hinge at it."""

import math

from torch import Tensor


def dual_ascent(alpha: float, drift: float, target: float, rate: float, bounds: tuple[float, float]) -> float:
    """One step on log α of the Lagrangian L_PG + α (R̂ - target): up where the drift is above its target, down below.

    Args:
        alpha: α, per nat; drift: R̂ >= 0, nats, averaged as the caller likes; target: nats, > 0.
        rate: how far log α moves at a drift of 0 (down) or of twice the target and above (up).
        bounds: lowest and highest α.

    Returns:
        the new α. The step is clipped above as it is by nature below, so that one wild batch moves α no further than a calm
        one takes back.
    """
    error = min(drift / target - 1, 1.0)
    return min(max(alpha * math.exp(rate * error), bounds[0]), bounds[1])


class AdaptiveAlpha:
    """α that follows the exponential moving average of the drift.

    Args:
        alpha: where it starts, per nat.
        target, rate, bounds: see `dual_ascent`.
        decay: of the average, in [0, 1). The average is corrected for its start, so that the first step counts whole.
    """

    def __init__(self, alpha: float, target: float, rate: float, bounds: tuple[float, float], decay: float):
        self.alpha, self.target, self.rate, self.bounds, self.decay = alpha, target, rate, bounds, decay
        self._sum, self._weight = 0.0, 0.0

    def update(self, drift: float) -> float:
        """Take in the R̂ of one optimizer step, nats, and return the α of the next.

        A step whose R̂ is no finite number, as fp16 makes now and then, leaves α alone: in the average it would stay for good.
        """
        if not math.isfinite(drift):
            return self.alpha
        self._sum = self.decay * self._sum + (1 - self.decay) * drift
        self._weight = self.decay * self._weight + (1 - self.decay)
        self.alpha = dual_ascent(self.alpha, self._sum / self._weight, self.target, self.rate, self.bounds)
        return self.alpha

    def state(self) -> dict:
        """What `restore` needs to go on as if nothing had happened."""
        return {"query_alpha": self.alpha, "query_kl_average": [self._sum, self._weight]}

    def restore(self, state: dict) -> None:
        """Take up what `state` gave."""
        self.alpha = state["query_alpha"]
        self._sum, self._weight = state["query_kl_average"]


def hinge(divergence: Tensor, target: float) -> Tensor:
    """(Q,) the drift R̂(q) above `target`, nats: 0, with no gradient, for a query that drifts less."""
    return (divergence - target).clamp(min=0.0)
