"""The configs: TRL's plus the fields of the environment side (`query/fields.py`) and, for GRPO, of the action side."""

from dataclasses import dataclass, field
from typing import ClassVar

from trl import DPOConfig, GRPOConfig, RLOOConfig

from .forward.fields import ForwardFields
from .policy.baseline import check_baseline
from .policy.trust_region import REGIONS
from .query.fields import QueryFields
from .query.generation_fields import GenerationFields
from .query.validation import number, require_one_of


@dataclass
class ERPOConfig(ForwardFields, GenerationFields, GRPOConfig):
    r"""
    Configuration of [`ERPOTrainer`]: all of TRL's [`~trl.GRPOConfig`], the fields of [`QueryFields`], [`ForwardFields`] and
    those below. `beta`, the coefficient of GRPO's Policy-KL, is 0 unless set, as in TRL; ERPO needs no reference model in
    memory.

    Parameters:
        trust_region (`str`, *optional*):
            How a token's policy gradient is weighted by how far the policy has moved on it since the rollout:
            `"ratio_clip"` (TRL's own, set by `epsilon`), `"none"`, `"spo"`, `"dppo_tv"`, `"dppo_kl"`, `"dppo_topk_tv"`,
            `"dppo_topk_kl"`, `"drpo"`, `"drpo_mask"`, and the ablations `"drpo_no_advantage"`, `"drpo_tv"`, `"drpo_kl"`,
            `"drpo_k3"`. Any but `ratio_clip` replaces the clip and keeps `loss_type` as the aggregation. See
            `policy/trust_region.py`. Preset `paper`: `"ratio_clip"`.
        trust_region_delta (`float`, *optional*):
            δ, the radius: of the probability shift |π - μ| (at most 1), of a total variation (`dppo_topk_tv`), or in nats
            (`dppo_kl`, `dppo_topk_kl`). Needed by every region but `none`, `spo` and those that
            `trust_region_coef` sets. DRPO's authors run 12.5, where the
            boundary is out of reach and the region only dampens.
        trust_region_delta_low (`float`, *optional*), trust_region_delta_high (`float`, *optional*):
            Radius of the masks where the probability fell and where it rose. Default: `trust_region_delta`.
        trust_region_ratio_cap (`float`, *optional*, defaults to `20.0`):
            C, at which DPPO truncates the ratio of the tokens it keeps.
        trust_region_coef (`float`, *optional*):
            c, the coefficient of `drpo_tv`, `drpo_kl` and `drpo_k3`. Default: 1/δ (the paper's values were not found).
        trust_region_topk (`int`, *optional*, defaults to `20`):
            K, how many of the rollout's likeliest tokens the top-K regions compare. A colocated vLLM gives at most 20.
        trust_region_delta_target (`float`, *optional*):
            With it δ adapts: after every step log δ moves so that the 99th percentile of |π - μ| sits at this fraction of δ.
            For regions whose δ bounds |π - μ|. δ starts at `trust_region_delta` and stays in [1e-4, 1].
        trust_region_delta_rate (`float`, *optional*, defaults to `0.1`):
            Share of the way that log δ goes in one step.
        trust_region_check_rollout (`bool`, *optional*, defaults to `True`):
            Refuse, at the run's first step, rollout log-probs that differ from the policy's to one side throughout: another
            temperature, top-p or top-k. Set to `False` to train on rollouts of another policy.
        spo_epsilon (`float`, *optional*, defaults to `0.2`):
            ε, SPO's radius of |r - 1|.
        advantage_baseline (`str`, *optional*, defaults to `"group"`):
            What a completion's reward is compared with: `"group"`, the mean of its query's completions, as in TRL, or `"none"`,
            REINFORCE on the reward itself, which needs `scale_rewards="none"`.
        loss_type (`str`, *optional*), scale_rewards (`str` or `bool`, *optional*):
            As in TRL, whose defaults hold where neither you nor the preset sets them.
    """

    _unset: ClassVar[dict] = {"trust_region": "ratio_clip"} | {
        name: GRPOConfig.__dataclass_fields__[name].default for name in ("loss_type", "scale_rewards")
    }

    trust_region: str | None = field(
        default=None,
        metadata={
            "help": "Weight on a token's policy gradient: ratio_clip (TRL's), none, spo, dppo_*, drpo*. Preset 'paper': "
            "ratio_clip."
        },
    )
    trust_region_delta: float | None = field(
        default=None,
        metadata={
            "help": "Radius delta of the trust region: of |pi - mu|, a total variation for dppo_topk_tv, nats for dppo_kl and dppo_topk_kl."
        },
    )
    trust_region_delta_low: float | None = field(
        default=None, metadata={"help": "Radius of the masks where the probability fell. Default: the radius."}
    )
    trust_region_delta_high: float | None = field(
        default=None, metadata={"help": "Radius of the masks where the probability rose. Default: the radius."}
    )
    trust_region_ratio_cap: float = field(
        default=20.0, metadata={"help": "Where DPPO truncates the ratio of the tokens it keeps."}
    )
    trust_region_coef: float | None = field(
        default=None, metadata={"help": "Coefficient of drpo_tv, drpo_kl and drpo_k3. Default: 1/delta."}
    )
    trust_region_topk: int = field(
        default=20, metadata={"help": "How many of the rollout's likeliest tokens the top-K regions compare."}
    )
    trust_region_delta_target: float | None = field(
        default=None,
        metadata={"help": "Adapt delta so that the 99th percentile of |pi - mu| sits at this fraction of it."},
    )
    trust_region_delta_rate: float = field(
        default=0.1, metadata={"help": "Share of the way that log delta goes in one step, when it adapts."}
    )
    trust_region_check_rollout: bool = field(
        default=True,
        metadata={"help": "Refuse rollout log-probs at another temperature, top-p or top-k than the policy's."},
    )
    spo_epsilon: float = field(default=0.2, metadata={"help": "SPO's radius of |r - 1|."})
    advantage_baseline: str = field(
        default="group", metadata={"help": "What a reward is compared with: the mean of its 'group', or 'none'."}
    )
    # TRL's fields, without their default so that a preset can tell whether the user set them
    loss_type: str | None = field(
        default=None, metadata={"help": "Aggregation of the token losses, as in TRL. Preset 'drpo': dr_grpo."}
    )
    scale_rewards: str | None = field(
        default=None, metadata={"help": "Scaling of the advantages, as in TRL. Preset 'drpo': none."}
    )

    def __post_init__(self):
        super().__post_init__()
        # On the command line a switch is text; TRL has renamed the switches that it was given
        self.scale_rewards = {"true": "group", "false": "none"}.get(
            str(self.scale_rewards).lower(), self.scale_rewards
        )
        require_one_of("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        require_one_of("advantage_baseline", self.advantage_baseline, ("group", "none"))
        check_baseline(self)
        self._check_trust_region()

    def _check_trust_region(self) -> None:
        require_one_of("trust_region", self.trust_region, ("ratio_clip", *REGIONS))
        for name in ("delta", "delta_low", "delta_high", "ratio_cap", "coef", "delta_target", "delta_rate"):
            value = getattr(self, f"trust_region_{name}")
            if value is None and name not in ("ratio_cap", "delta_rate"):
                continue
            if not number(f"trust_region_{name}", value) > 0:
                raise ValueError(f"trust_region_{name} must be > 0, found {value}.")
            setattr(self, f"trust_region_{name}", float(value))
        self.spo_epsilon = number("spo_epsilon", self.spo_epsilon)
        if not self.spo_epsilon > 0:
            raise ValueError(f"spo_epsilon must be > 0, found {self.spo_epsilon:g}.")
        if not isinstance(self.trust_region_check_rollout, bool):
            raise ValueError(
                f"trust_region_check_rollout must be true or false, found {self.trust_region_check_rollout!r}."
            )
        if type(self.trust_region_topk) is not int or self.trust_region_topk < 1:
            raise ValueError(f"trust_region_topk must be a whole number >= 1, found {self.trust_region_topk!r}.")
        over = "nothing" if self.trust_region == "ratio_clip" else REGIONS[self.trust_region].over
        self._check_adaptive_radius(over)
        if self.trust_region == "ratio_clip":
            return
        needs_radius = over not in ("nothing", "coefficient") or (
            over == "coefficient" and self.trust_region_coef is None
        )
        if needs_radius and self.trust_region_delta is None:
            raise ValueError(f"trust_region={self.trust_region!r} needs its radius: set trust_region_delta.")
        if self.loss_type in ("sapo", "vespo"):
            raise ValueError(
                f"loss_type={self.loss_type!r} is itself a trust region, so trust_region={self.trust_region!r} cannot replace "
                "its ratio weights: use loss_type 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo' or 'luspo' for the aggregation."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"trust_region={self.trust_region!r} weights single tokens: set importance_sampling_level='token', found "
                f"{self.importance_sampling_level!r}."
            )
        if self.delta is not None:
            raise ValueError(f"delta clips TRL's ratio, which trust_region={self.trust_region!r} replaces: unset it.")
        if self.beta != 0 and self.use_bias_correction_kl:
            raise ValueError(
                f"use_bias_correction_kl multiplies the Policy-KL by TRL's ratio, which trust_region={self.trust_region!r} "
                "replaces: set it to False, or beta to 0."
            )

    def _check_adaptive_radius(self, over: str) -> None:
        if self.trust_region_delta_target is None:
            return
        for name in ("target", "rate"):
            value = getattr(self, f"trust_region_delta_{name}")
            if value > 1:
                raise ValueError(f"trust_region_delta_{name} must be in (0, 1], found {value}.")
        if (self.trust_region_delta or 0.0) > 1:
            raise ValueError(
                f"trust_region_delta_target keeps δ within [1e-4, 1]: set trust_region_delta to at most 1 to start from, found "
                f"{self.trust_region_delta:g}."
            )
        if over != "shift":
            names = ", ".join(name for name, region in REGIONS.items() if region.over == "shift")
            raise ValueError(
                f"trust_region_delta_target follows |π - μ|, which trust_region={self.trust_region!r} does not bound: unset it, "
                f"or use {names}."
            )
        if self.trust_region_delta_low is not None or self.trust_region_delta_high is not None:
            raise ValueError(
                "trust_region_delta_target adapts one radius for both directions: unset trust_region_delta_low and "
                "trust_region_delta_high."
            )


@dataclass
class ERPORLOOConfig(ForwardFields, GenerationFields, RLOOConfig):
    r"""
    Configuration of [`ERPORLOOTrainer`]: all of TRL's [`~trl.RLOOConfig`] and the fields of [`QueryFields`] and
    [`ForwardFields`]. The clip of the sequence ratio is TRL's (`epsilon`, `epsilon_high`); trust regions weight single tokens
    and are not here.

    Parameters:
        beta (`float`, *optional*, defaults to `0.0`):
            Coefficient of the KL that RLOO takes off the reward. TRL's default is 0.05; ERPO holds the drift of the queries in
            its place, and at 0 needs no reference model in memory.
    """

    # Not an option of RLOO: the reference is scored with the head as it is
    cast_lm_head_to_fp32: ClassVar[bool] = False

    beta: float = field(
        default=0.0, metadata={"help": "Coefficient of the KL in the reward. 0 needs no reference model in memory."}
    )


@dataclass
class ERPODPOConfig(QueryFields, DPOConfig):
    r"""
    Configuration of [`ERPODPOTrainer`]: all of TRL's [`~trl.DPOConfig`] and the fields of [`QueryFields`]. `beta` is DPO's own
    and stays; `query_kl_coef` weighs the Query-KL on the prompts beside it.

    Parameters:
        query_weight (`str`, *optional*, defaults to `"uniform"`):
            Weight w(q) on the pairs of a query, by the same schemes as elsewhere. It multiplies the gradient of a pair's
            loss; the loss that is logged is the one without weights. From the reference's likelihood only
            (`query_weight_source`).
        query_span (`str`, *optional*, defaults to `"prompt"`):
            As elsewhere; spans of chats need rows without `tools` and `chat_template_kwargs`.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            As in TRL, which then leaves out rows whose prompt alone fills `max_length`, so that every prompt stays whole.
            `"keep_end"` is refused with a `max_length`: it cuts prompts at their beginning, and for chosen and rejected
            differently.
    """

    # Not options of DPO: the reference is scored with the head as it is, before training
    temperature: ClassVar[float] = 1.0
    cast_lm_head_to_fp32: ClassVar[bool] = False
    reference_sample_size: ClassVar[int | None] = None

    query_weight: str = field(
        default="uniform",
        metadata={
            "help": "Weight on the gradient of a query's pairs: uniform, nll_ratio, token_nll_ratio, softmax, quantile, snis, "
            "or an import path."
        },
    )

    def __post_init__(self):
        if self.query_weight is None:  # where the other trainers' presets would speak
            self.query_weight = "uniform"
        super().__post_init__()
        if self.truncation_mode == "keep_end" and self.max_length is not None:
            raise ValueError(
                "truncation_mode='keep_end' cuts prompts at their beginning, for chosen and rejected differently, so that they "
                "share no query: use 'keep_start', or max_length=None."
            )
        if self.query_references is not None:
            raise ValueError("query_references is for trainers that generate: unset it for DPO.")
        if self.query_weight == "uniform":
            return
        if self.query_weight_source == "policy":
            raise ValueError(
                "query_weight_source='policy' is for trainers that generate: with DPO set query_weight_source='reference', or "
                "query_weight='uniform'."
            )
        mixing = [name for name in self.loss_type if name in ("aot", "aot_unpaired")]
        if mixing:
            raise ValueError(
                f"loss_type={mixing[0]!r} sorts the pairs of a batch, so that no loss belongs to one query: set "
                "query_weight='uniform'."
            )
