"""The mixin that puts a trust region in place of TRL's ratio clip.

What it changes against TRL: after the one forward, the advantage of every token becomes r·w·A with the region's weight w, and
TRL's own ratio becomes 1, so that TRL's loss has the gradient w·A·∇r per token under whatever aggregation `loss_type` names.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .metrics import RegionMetrics
from .trust_region import REGIONS, Move, RegionParams

logger = logging.get_logger(__name__)


class CompletionReader:
    """Stand-in for the model in TRL's forward: hands the completion's log-probs to `use` before TRL goes on.

    Args:
        model: what TRL would have called.
        width: number of completion columns, the last ones.
        use: called once with the (B, width) log-probs in nats, detached.
    """

    def __init__(self, model: nn.Module, width: int, use: Callable[[Tensor], None]):
        self.model, self.width, self.use = model, width, use

    def __call__(self, *args, **kwargs):
        outputs = self.model(*args, **kwargs)
        self.use(outputs.log_probs[:, -self.width :].detach())
        return outputs

    def __getattr__(self, name: str):
        return getattr(self.model, name)


class TrustRegionMixin:
    """Trust regions for TRL's GRPO trainer. `trust_region="ratio_clip"` leaves TRL as it is, bit for bit."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.args
        self._region_metrics = {"train": RegionMetrics(), "eval": RegionMetrics()}
        if config.trust_region == "ratio_clip":
            return
        generate_every = config.steps_per_generation * config.num_iterations
        on_policy = config.gradient_accumulation_steps % generate_every == 0
        if on_policy and not self.use_vllm and self.rollout_func is None and config.trust_region != "none":
            raise ValueError(
                f"trust_region={config.trust_region!r} would do nothing: with one update per generation and no rollout "
                "log-probs the policy has not moved (r = 1) when it is updated. Set num_iterations to 2 or more, "
                "steps_per_generation above gradient_accumulation_steps, or use_vllm."
            )
        if (
            config.trust_region_delta is not None
            and config.trust_region_delta >= 1
            and config.trust_region != "dppo_kl"
        ):
            logger.warning(
                f"trust_region_delta={config.trust_region_delta:g}: |π - μ| never exceeds 1, so the boundary is out of reach "
                "and the region only dampens the gradient. DRPO's authors run 12.5; a boundary needs a value below 1."
            )
        self.region_params = RegionParams(
            delta=config.trust_region_delta or math.inf,
            delta_low=config.trust_region_delta_low,
            delta_high=config.trust_region_delta_high,
            ratio_cap=config.trust_region_ratio_cap,
            epsilon=config.spo_epsilon,
            coef=config.trust_region_coef,
        )
        # The ratio TRL sees is 1; only cispo's one-sided clamp, which is not around 1, could still act on it
        self.epsilon_low = self.epsilon_high = math.inf

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.args.trust_region == "ratio_clip":
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs = dict(inputs)  # TRL reads the advantages after its forward, so that they can still be set during it
        reader = CompletionReader(
            model, inputs["completion_ids"].shape[1], lambda logps: self._weight_advantages(inputs, logps)
        )
        return super().compute_loss(reader, inputs, *args, **kwargs)

    def _weight_advantages(self, inputs: dict, logps: Tensor) -> None:
        """Set the (B, C) advantages to r·w·A and TRL's own ratio to 1."""
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        log_mu = inputs.get("sampling_per_token_logps")
        if log_mu is None:
            log_mu = inputs.get("old_per_token_logps", logps)
        # An engine that could not score a token says NaN: there the policy counts as not moved, as TRL has it
        log_mu = torch.where(mask & ~log_mu.isnan(), log_mu, logps)
        advantage = inputs.get("unweighted_advantages", inputs["advantages"])
        advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
        move = Move(logps - log_mu, log_mu)
        region, _ = REGIONS[self.args.trust_region]
        pushed = region(move, advantage, self.region_params)
        query_weight = inputs["query_weight"].unsqueeze(1) if "query_weight" in inputs else 1.0
        inputs["advantages"] = torch.where(mask, move.r * pushed * query_weight, 0.0)
        inputs["old_per_token_logps"] = logps
        inputs["sampling_per_token_logps"] = log_mu
        if "importance_sampling_ratio" in inputs:
            # The mismatch between rollout and trainer is in r already
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        mode = "train" if self.model.training else "eval"
        self._region_metrics[mode].add(move, advantage, pushed, mask, self.region_params, self.accelerator)

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        for name, value in self._region_metrics[mode].summarize().items():
            self._metrics[mode][f"trust_region/{name}"] = [value]
        super().log(logs, start_time)
