"""The mixin that puts a trust region in place of TRL's ratio clip.

What it changes against TRL: after the one forward, the advantage of every token becomes r·w·A with the region's weight w, and
TRL's own ratio becomes 1, so that TRL's loss has the gradient w·A·∇r per token under whatever aggregation `loss_type` names.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.utils import logging
from trl.trainer.utils import pad

from .._trl import metrics_mode
from .metrics import RegionMetrics, StepMoves
from .radius import adapt_radius
from .rollout import refuse_filtered_log_probs, refuse_one_sided_rollout
from .topk import captured_head, policy_logps, split_sampled
from .trust_region import REGIONS, Move, RegionParams, TopK

logger = logging.get_logger(__name__)

# vLLM's own limit of log-probs per token, which TRL's colocated engine does not raise
_VLLM_MAX_LOGPROBS = 20


class CompletionReader:
    """Stand-in for the model in TRL's forward: hands the completion's log-probs to `use` before TRL goes on.

    Args:
        model: what TRL would have called.
        tokens: (B, C) the completion's ids, the last columns of what TRL passes.
        use: called once with the (B, C) log-probs in nats, detached, and those of `topk_ids` or None.
        topk_ids: (B, C, K) further ids to read the policy's log-probs of, -1 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        use: Callable[[Tensor, Tensor | None], None],
        topk_ids: Tensor | None = None,
    ):
        self.model, self.tokens, self.use, self.topk_ids = model, tokens, use, topk_ids

    def __call__(self, *args, **kwargs):
        if self.topk_ids is None:
            outputs = self.model(*args, **kwargs)
        else:
            listed = torch.cat([self.tokens.unsqueeze(-1), self.topk_ids.clamp(min=0)], dim=-1)
            with captured_head(listed.unique()) as heads:
                outputs = self.model(*args, **kwargs)
        logps = outputs.log_probs[:, -self.tokens.shape[1] :].detach()
        topk = None
        if self.topk_ids is not None:
            [head] = heads
            topk = policy_logps(head, outputs.label_mask, logps, self.tokens, self.topk_ids)
        self.use(logps, topk)
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
        self._region = REGIONS[config.trust_region]
        # Per completion of the generation at hand, what the rollout said about the likeliest tokens
        self._rollout_topk: list[tuple[Tensor, Tensor]] = []
        # First steps on their rollouts, until they hold enough tokens to judge the rollout's log-probs by; None when judged
        from_rollout = self.use_vllm or self.rollout_func is not None
        self._unchecked_rollout: list[StepMoves] | None = (
            [] if from_rollout and config.trust_region_check_rollout else None
        )
        self._refuse_unmoved_policy()
        bounded = self._region.over == "shift" or config.trust_region == "dppo_topk_tv"
        if (config.trust_region_delta or 0.0) >= 1 and bounded:
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
        # TRL would decide it by the sign of what it gets as advantage, which is that of w·A
        self._off_policy_threshold, self.off_policy_mask_threshold = self.off_policy_mask_threshold, None
        if self.use_vllm:
            refuse_filtered_log_probs(config, self._engine_logprobs_mode())
        self._take_likeliest_tokens()

    # ---- construction

    @property
    def _one_update_per_generation(self) -> bool:
        return self.args.gradient_accumulation_steps % self.args.generate_every == 0

    def _refuse_unmoved_policy(self) -> None:
        config = self.args
        if (
            self._one_update_per_generation
            and not self.use_vllm
            and self.rollout_func is None
            and config.trust_region != "none"
        ):
            raise ValueError(
                f"trust_region={config.trust_region!r} would do nothing: with one update per generation and no rollout "
                "log-probs the policy has not moved (r = 1) when it is updated. Set num_iterations to 2 or more, "
                "steps_per_generation above gradient_accumulation_steps, or use_vllm."
            )

    def _engine_logprobs_mode(self) -> str:
        """vLLM's, on every rank; TRL's colocated engine is built with processed log-probs."""
        if self.args.vllm_mode == "colocate":
            return "processed_logprobs"
        mode = [None]
        if self.accelerator.is_main_process:
            mode = [self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]]
        return broadcast_object_list(mode)[0]

    def _take_likeliest_tokens(self) -> None:
        """Have the rollout hand over the K likeliest tokens, where it gives more than the sampled one."""
        wanted, k = self._region.over == "topk", self.args.trust_region_topk
        if wanted and not self.use_vllm and self.rollout_func is None:
            raise ValueError(
                f"trust_region={self.args.trust_region!r} needs the rollout's log-probs of its {k} likeliest tokens, which "
                "transformers' generation does not give: set use_vllm, or pass a rollout_func that returns `logprobs` and "
                "`logprob_token_ids` of shape (completions, tokens, K). Or use 'dppo_tv' or 'dppo_kl'."
            )
        if wanted and self.tools:
            raise ValueError(
                f"trust_region={self.args.trust_region!r} does not work with tools: the rollout's likeliest tokens are known for "
                "single turns only. Use 'dppo_tv' or 'dppo_kl'."
            )
        if self.rollout_func is not None:
            self.rollout_func = self._splitting(self.rollout_func)
        elif wanted:
            if self.args.vllm_mode == "colocate" and k > _VLLM_MAX_LOGPROBS:
                raise ValueError(
                    f"trust_region_topk={k}: a colocated vLLM gives at most {_VLLM_MAX_LOGPROBS} log-probs per token. Lower it, "
                    "or use a server started with --max-logprobs."
                )
            self.vllm_generation.logprobs = k
            self.vllm_generation.generate = self._sampled_first(self.vllm_generation.generate)

    def _splitting(self, rollout_func):
        """`rollout_func` as TRL reads it: the sampled tokens' log-probs alone."""

        @functools.wraps(rollout_func)
        def split(prompts, trainer):
            output = dict(rollout_func(prompts, trainer))
            token_ids = output.pop("logprob_token_ids", None)
            unmoved = self._one_update_per_generation and self.args.trust_region != "none"
            if output.get("logprobs") is None and (unmoved or self._region.over == "topk"):
                raise ValueError(
                    f"trust_region={self.args.trust_region!r} needs the rollout's log-probs, but rollout_func returned "
                    "logprobs=None. Return them, or make several updates per generation (num_iterations, "
                    "steps_per_generation) with a region other than the top-K ones."
                )
            if token_ids is not None:
                output["logprobs"], self._rollout_topk = split_sampled(
                    output["logprobs"], token_ids, output["completion_ids"], self.args.trust_region_topk
                )
            elif self._region.over == "topk":
                raise ValueError(
                    f"trust_region={self.args.trust_region!r} needs `logprob_token_ids` from rollout_func, beside `logprobs` of "
                    "the same shape (completions, tokens, K); it returned none."
                )
            return output

        return split

    def _sampled_first(self, generate):
        """vLLM's `generate` with the sampled token's log-prob in the first place, where TRL takes it from."""

        @functools.wraps(generate)
        def reordered(*args, **kwargs):
            prompt_ids, completion_ids, logprobs, token_ids = generate(*args, **kwargs)
            sampled, self._rollout_topk = split_sampled(
                logprobs, token_ids, completion_ids, self.args.trust_region_topk
            )
            return prompt_ids, completion_ids, [[[value] for value in row] for row in sampled], token_ids

        return reordered

    # ---- rows

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.args.trust_region == "ratio_clip" or self._region.over != "topk":
            return batch
        device, width = batch["completion_ids"].device, batch["completion_ids"].shape[1]
        for name, value, part in (("topk_ids", -1, 0), ("topk_logps", 0.0, 1)):
            padded = pad([entry[part] for entry in self._rollout_topk], padding_value=value, padding_side="right")
            room = width - padded.shape[1]
            batch[name] = nn.functional.pad(padded, (0, 0, 0, room), value=value).to(device)  # (B, C, K)
        return batch

    # ---- the loss

    def get_batch_samples(self, *args, **kwargs):
        # A step that was broken off, by an interrupt or for lack of memory, has left micro-batches behind
        self._region_metrics["train"].begin_step()
        return super().get_batch_samples(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.args.trust_region == "ratio_clip":
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs = dict(inputs)  # TRL reads the advantages after its forward, so that they can still be set during it
        reader = CompletionReader(
            model, inputs["completion_ids"], functools.partial(self._weight_advantages, inputs), inputs.get("topk_ids")
        )
        loss = super().compute_loss(reader, inputs, *args, **kwargs)
        self._end_region_step()
        return loss

    def _weight_advantages(self, inputs: dict, logps: Tensor, topk_logps: Tensor | None) -> None:
        """Set the (B, C) advantages to r·w·A and TRL's own ratio to 1."""
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        log_mu = inputs.get("sampling_per_token_logps")
        if log_mu is None:
            log_mu = inputs.get("old_per_token_logps", logps)
        # An engine that could not score a token says NaN or -inf: there the policy counts as not moved, as TRL has it
        log_mu = torch.where(mask & log_mu.isfinite(), log_mu, logps)
        advantage = inputs.get("unweighted_advantages", inputs["advantages"])
        advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
        topk = None
        if topk_logps is not None:
            ids = inputs["topk_ids"]
            listed = (ids >= 0) & (ids != inputs["completion_ids"].unsqueeze(-1)) & mask.unsqueeze(-1)
            topk = TopK(inputs["topk_logps"], topk_logps, listed)
        move = Move(logps - log_mu, log_mu, topk)
        pushed = self._region.push(move, advantage, self.region_params)
        query_weight = inputs["query_weight"].unsqueeze(1) if "query_weight" in inputs else 1.0
        weighted = torch.where(mask, move.r * pushed * query_weight, 0.0)
        if self._off_policy_threshold is not None:
            weighted = weighted * self.get_off_policy_mask(
                advantages=advantage,
                per_token_logps=logps,
                sampling_per_token_logps=log_mu,
                mask=mask.to(logps.dtype),
                off_policy_threshold=self._off_policy_threshold,
            )
        inputs["advantages"] = weighted
        inputs["old_per_token_logps"] = logps
        inputs["sampling_per_token_logps"] = log_mu
        if "importance_sampling_ratio" in inputs:
            # The mismatch between rollout and trainer is in r already
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        outside = self._region.outside(move, self.region_params)
        self._region_metrics[metrics_mode(self.model)].add(move, advantage, pushed, outside, mask)

    def _end_region_step(self) -> None:
        """After the last micro-batch of a step: look at the rollout, adapt the radius."""
        mode = metrics_mode(self.model)
        metrics = self._region_metrics[mode]
        if mode == "train" and metrics.micro_batches < self.current_gradient_accumulation_steps:
            return
        step = metrics.end_step(self.accelerator)
        if mode == "eval":
            return
        config = self.args
        first = self.state.global_step * config.gradient_accumulation_steps % config.generate_every == 0
        if self._unchecked_rollout is not None and first:
            self._unchecked_rollout.append(step)
            if refuse_one_sided_rollout(self._unchecked_rollout, config.trust_region):
                self._unchecked_rollout = None
        if self._radius_adapts:
            delta = adapt_radius(
                self.region_params.delta,
                step.shift_p99,
                config.trust_region_delta_target,
                config.trust_region_delta_rate,
            )
            self.region_params = dataclasses.replace(self.region_params, delta=delta)

    # ---- checkpoint and log

    def predict(self, *args, **kwargs):
        # Nothing is logged of a prediction: it is no part of the next evaluation
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._region_metrics["eval"].summarize()

    def region_state(self) -> dict:
        """What a checkpoint must hold of the region beside TRL's own state."""
        return {"trust_region_delta": self.region_params.delta} if self._radius_adapts else {}

    def restore_region(self, state: dict) -> None:
        """Take up what `region_state` gave."""
        if self._radius_adapts and "trust_region_delta" in state:
            self.region_params = dataclasses.replace(self.region_params, delta=state["trust_region_delta"])

    @property
    def _radius_adapts(self) -> bool:
        return self.args.trust_region_delta_target is not None

    def log(self, logs, start_time=None):
        mode = metrics_mode(self.model)
        summary = self._region_metrics[mode].summarize()
        if summary and self._radius_adapts:
            summary["delta"] = self.region_params.delta
        for name, value in summary.items():
            self._metrics[mode][f"trust_region/{name}"] = [value]
        super().log(logs, start_time)
