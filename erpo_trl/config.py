"""The configs: TRL's plus the fields of the environment side. Every default and every preset stands here."""

import math
import os
from dataclasses import dataclass, field
from typing import ClassVar

from transformers.utils import is_torch_bf16_gpu_available, logging
from trl import GRPOConfig, RLOOConfig

from .policy.trust_region import REGIONS
from .query.divergence import ESTIMATORS, LEVELS
from .query.weights import WEIGHT_SCHEMES
from .query.window import generation_window

logger = logging.get_logger(__name__)

# What a preset gives to the fields the user left unset (None)
PRESETS = {
    "paper": {
        "query_kl_estimator": "k3",
        "query_kl_level": "token",
        "query_weight": "nll_ratio",
        "query_weight_clip": (0.0, 2.0),
        "query_weight_source": "reference",
        "query_kl_coef": 1e-2,
    },
}
PRESETS["drpo"] = PRESETS["paper"] | {
    "query_kl_coef": 0.0,
    "query_weight": "uniform",
    "trust_region": "drpo",
    "trust_region_delta": 12.5,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
}
# Presets that design and papers name but that this version cannot run yet -> why
UNAVAILABLE_PRESETS = {
    "release": "it weights queries by the current policy's likelihood, which this version does not compute; "
    "use preset='paper'",
}


@dataclass
class QueryFields:
    r"""
    The fields of the environment side, which every config of this package has beside those of its TRL config. Put it before
    the TRL config in the bases.

    Parameters:
        preset (`str`, *optional*, defaults to `"paper"`):
            Values for the fields left unset. `"paper"`: arXiv 2608.23311 where it speaks, the authors' release where the
            paper is silent. `"drpo"`, with GRPO only: the recipe that arXiv 2606.09821 published, `trust_region="drpo"`
            with `trust_region_delta=12.5` on `loss_type="dr_grpo"` and `scale_rewards="none"`, with the query side off
            (`query_kl_coef=0`, `query_weight="uniform"`); set those to compose it with ERPO. Their runs draw 8 responses at
            temperature 1, of at most 8192 tokens (`max_completion_length`, which `dr_grpo` divides by), from an engine
            whose log-probs are μ (`use_vllm`).
        query_kl_coef (`float`, *optional*):
            α, the coefficient of the Query-KL penalty, per nat. 0 measures the drift without holding it. Preset `paper`:
            `1e-2` (paper section 5.1).
        query_kl_estimator (`str`, *optional*):
            Estimator of the drift, a function of x = log P_0 - log P_θ: `"k1"` (-x), `"k2"` (x²/2) or `"k3"`
            (e^x - x - 1). Preset `paper`: `"k3"` (paper section 4.2).
        query_kl_level (`str`, *optional*):
            `"token"`: estimator per token, averaged over the query's scored tokens. `"sequence"`: estimator on the sum of
            x over the query. Preset `paper`: `"token"` (authors' release; the paper is silent).
        query_kl_length_normalize (`bool`, *optional*, defaults to `False`):
            With `"sequence"`: estimator on the mean of x over the query's scored tokens.
        query_weight (`str`, *optional*):
            Weight w(q) on a query's advantages: `"nll_ratio"` (s̄/s(q), s the reference NLL in nats and s̄ its mean over
            the training set) or `"uniform"` (1). Preset `paper`: `"nll_ratio"` (paper section 4.2).
        query_weight_clip (`list[float]`, *optional*):
            Lowest and highest weight of any scheme but `uniform`. Preset `paper`: `[0, 2]`.
        query_weight_source (`str`, *optional*):
            Whose likelihood the weight reads: `"reference"` (constant over the run). Preset `paper`: `"reference"`.
        reference_cache_dir (`str`, *optional*):
            Folder of the reference tables, shared by all processes and found again by later runs and by resume. Default:
            `erpo_trl/reference` in the Hugging Face cache (`HF_HOME`).
        reference_batch_tokens (`int`, *optional*, defaults to `16384`):
            Token budget of one forward of the scoring pass, padding included.
        reference_sample_size (`int`, *optional*):
            Score this many rows before training instead of all, to estimate s̄ (drawn without replacement; a stream's first
            ones), and the others when their completions are generated. For sets too large to score whole.
        reference_nll_decay (`float`, *optional*, defaults to `0.99`):
            For streams without `reference_sample_size`, whose rows are scored as they arrive: s̄ is the mean over the first
            1/(1 - decay) generation batches and an exponential moving average from there.
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens; rows with a longer one are left out, counted and named in a warning. Default: what the
            model's context allows (`max_position_embeddings` minus 1, or minus `max_completion_length` for models
            with absolute positions, which cannot run past their table).
        query_log_steps (`int`, *optional*, defaults to `50`):
            Every so many optimizer steps, and at the end, write the queries of the steps since to `output_dir/queries` (drift,
            weight, NLL of the query and of its responses; read by `erpo-trl report`), and send their histograms and the run's
            curves to the trackers in `report_to`. 0: neither.
        save_steps (`int`, *optional*):
            As in transformers, but a multiple of the optimizer steps that one generation batch spans; the default, 500, is
            rounded up to one.
    """

    # Fields without a default of their own that presets may set -> what holds where they do not
    _unset: ClassVar[dict] = {}

    preset: str = field(
        default="paper",
        metadata={
            "help": "Values for the fields left unset: 'paper' (arXiv 2608.23311) or, with GRPO, 'drpo' (arXiv 2606.09821)."
        },
    )
    query_kl_coef: float | None = field(
        default=None,
        metadata={
            "help": "Coefficient alpha of the Query-KL penalty; 0 measures the drift without holding it. Preset 'paper': 1e-2."
        },
    )
    query_kl_estimator: str | None = field(
        default=None,
        metadata={"help": "Drift estimator: k1, k2 or k3. Preset 'paper': k3."},
    )
    query_kl_level: str | None = field(
        default=None,
        metadata={"help": "'token' (mean over the query's tokens) or 'sequence'. Preset 'paper': token."},
    )
    query_kl_length_normalize: bool = field(
        default=False,
        metadata={"help": "With query_kl_level='sequence', use the mean log-ratio per token."},
    )
    query_weight: str | None = field(
        default=None,
        metadata={"help": "Weight on a query's advantages: 'nll_ratio' or 'uniform'. Preset 'paper': nll_ratio."},
    )
    query_weight_clip: list[float] | None = field(
        default=None,
        metadata={"help": "Lowest and highest query weight. Preset 'paper': 0 2."},
    )
    query_weight_source: str | None = field(
        default=None,
        metadata={"help": "Whose likelihood the weight reads: 'reference'. Preset 'paper': reference."},
    )
    reference_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the reference tables. Default: erpo_trl/reference in the Hugging Face cache."},
    )
    reference_batch_tokens: int = field(
        default=16384,
        metadata={"help": "Token budget of one forward of the scoring pass, padding included."},
    )
    reference_sample_size: int | None = field(
        default=None,
        metadata={"help": "Score this many rows beforehand, to estimate the mean NLL, and the others as they arrive."},
    )
    reference_nll_decay: float = field(
        default=0.99, metadata={"help": "Decay of a stream's mean NLL over generation batches."}
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt in tokens; longer rows are left out and counted. Default: the model's context."
        },
    )
    query_log_steps: int = field(
        default=50,
        metadata={
            "help": "Optimizer steps between writing the queries seen to output_dir/queries and sending histograms and "
            "plots to report_to; 0: never."
        },
    )

    def __post_init__(self):
        if self.bf16 is None and not self.fp16 and not self.use_cpu and not is_torch_bf16_gpu_available():
            # TRL's default would be refused on such a device
            logger.info("No device with bfloat16 found: training in float32. Set bf16 or fp16 to choose.")
            self.bf16 = False
        if isinstance(self.preset, str) and self.preset in UNAVAILABLE_PRESETS:
            raise ValueError(f"preset={self.preset!r} is not available yet: {UNAVAILABLE_PRESETS[self.preset]}.")
        _require_one_of("preset", self.preset, PRESETS)
        missing = [name for name in PRESETS[self.preset] if not hasattr(self, name)]
        if missing:
            raise ValueError(
                f"preset={self.preset!r} sets {', '.join(missing)}, which {type(self).__name__} does not have: use "
                "preset='paper', or train with GRPO (ERPOConfig; trainer='grpo' on the command line)."
            )
        for name, value in (self._unset | PRESETS[self.preset]).items():
            if getattr(self, name) is None:
                setattr(self, name, list(value) if isinstance(value, tuple) else value)
        super().__post_init__()

        _require_one_of("query_kl_estimator", self.query_kl_estimator, ESTIMATORS)
        _require_one_of("query_kl_level", self.query_kl_level, LEVELS)
        _require_one_of("query_weight", self.query_weight, WEIGHT_SCHEMES)
        _require_one_of("query_weight_source", self.query_weight_source, ("reference",))
        self.query_kl_coef = _number("query_kl_coef", self.query_kl_coef)
        if not (math.isfinite(self.query_kl_coef) and self.query_kl_coef >= 0):
            raise ValueError(f"query_kl_coef must be a finite number >= 0, found {self.query_kl_coef}.")
        if self.query_kl_length_normalize and self.query_kl_level != "sequence":
            raise ValueError(
                "query_kl_length_normalize=True needs query_kl_level='sequence': the token level already averages over "
                "the query's tokens."
            )
        clip = self.query_weight_clip
        if not isinstance(clip, (list, tuple)) or len(clip) != 2:
            raise ValueError(f"query_weight_clip must hold two numbers, lowest and highest weight, found {clip!r}.")
        low, high = (_number("query_weight_clip", value) for value in clip)
        if not 0 <= low <= high or high == 0:
            raise ValueError(f"query_weight_clip must satisfy 0 <= lowest <= highest and highest > 0, found {clip!r}.")
        self.query_weight_clip = [low, high]
        units = {"reference_batch_tokens": "tokens", "max_prompt_length": "tokens", "reference_sample_size": "rows"}
        for name, unit in units.items():
            value = getattr(self, name)
            if value is None and name != "reference_batch_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of {unit} >= 1, found {value!r}.")
        if (
            not isinstance(self.query_log_steps, int)
            or isinstance(self.query_log_steps, bool)
            or self.query_log_steps < 0
        ):
            raise ValueError(f"query_log_steps must be a whole number of steps >= 0, found {self.query_log_steps!r}.")
        if not 0 <= _number("reference_nll_decay", self.reference_nll_decay) < 1:
            raise ValueError(f"reference_nll_decay must be in [0, 1), found {self.reference_nll_decay!r}.")
        if not isinstance(self.query_kl_length_normalize, bool):
            raise ValueError(
                f"query_kl_length_normalize must be true or false, found {self.query_kl_length_normalize!r}."
            )
        if self.reference_cache_dir is not None:
            if not isinstance(self.reference_cache_dir, (str, os.PathLike)):
                raise ValueError(f"reference_cache_dir must be a path, found {self.reference_cache_dir!r}.")
            self.reference_cache_dir = os.path.expanduser(self.reference_cache_dir)
        self._check_save_steps()

    def _check_save_steps(self) -> None:
        """Refuse checkpoints inside a generation batch, whose completions a checkpoint does not hold."""
        generate_every = self.steps_per_generation * self.num_iterations
        window = generation_window(generate_every, self.gradient_accumulation_steps)
        if window > 1 and (self.save_strategy == "best" or (self.save_strategy == "steps" and self.save_steps < 1)):
            found = "save_strategy='best'" if self.save_strategy == "best" else f"save_steps={self.save_steps:g}"
            raise ValueError(
                f"{found} would save inside generation batches, from where a run cannot be resumed: each spans {window} "
                f"optimizer steps. Set save_strategy='steps' and save_steps to a multiple of {window}."
            )
        if self.save_strategy != "steps" or self.save_steps < 1 or self.save_steps % window == 0:
            return
        reason = f"each generation batch spans {window} optimizer steps"
        if self.load_best_model_at_end and self.eval_strategy == "steps" and self.eval_steps >= 1:
            window = math.lcm(window, int(self.eval_steps))
            reason += f", and load_best_model_at_end needs multiples of eval_steps={int(self.eval_steps)}"
        below = int(self.save_steps // window) * window
        nearest = f"{below} or {below + window}" if below else f"{window}"
        if self.save_steps == self.__dataclass_fields__["save_steps"].default:
            # Nobody chose the default
            self.save_steps = below + window
            logger.warning(f"save_steps is {self.save_steps} in place of the default: {reason}.")
            return
        raise ValueError(
            f"save_steps={int(self.save_steps)} would save inside a generation batch, from where a run cannot be resumed: "
            f"{reason}. Set save_steps to {nearest}, or another multiple of {window}."
        )


@dataclass
class ERPOConfig(QueryFields, GRPOConfig):
    r"""
    Configuration of [`ERPOTrainer`]: all of TRL's [`~trl.GRPOConfig`], the fields of [`QueryFields`] and those below. `beta`,
    the coefficient of GRPO's Policy-KL, is 0 unless set, as in TRL; ERPO needs no reference model in memory.

    Parameters:
        trust_region (`str`, *optional*):
            How a token's policy gradient is weighted by how far the policy has moved on it since the rollout:
            `"ratio_clip"` (TRL's own, set by `epsilon`), `"none"`, `"spo"`, `"dppo_tv"`, `"dppo_kl"`, `"dppo_topk_tv"`,
            `"dppo_topk_kl"`, `"drpo"`, `"drpo_mask"`, and the ablations `"drpo_no_advantage"`, `"drpo_tv"`, `"drpo_kl"`,
            `"drpo_k3"`. Any but `ratio_clip` replaces the clip and keeps `loss_type` as the aggregation. See
            `policy/trust_region.py`. Preset `paper`: `"ratio_clip"`.
        trust_region_delta (`float`, *optional*):
            δ, the radius: of the probability shift |π - μ| (at most 1), of a total variation (`dppo_topk_tv`), or in nats
            (`dppo_kl`, `dppo_topk_kl`). Needed by every region but `none` and `spo`. DRPO's authors run 12.5, where the
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
        metadata={"help": "Radius delta of the trust region: of |pi - mu|, or in nats for dppo_kl."},
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
    # TRL's fields, without their default so that a preset can tell whether the user set them
    loss_type: str | None = field(
        default=None, metadata={"help": "Aggregation of the token losses, as in TRL. Preset 'drpo': dr_grpo."}
    )
    scale_rewards: str | None = field(
        default=None, metadata={"help": "Scaling of the advantages, as in TRL. Preset 'drpo': none."}
    )

    def __post_init__(self):
        super().__post_init__()
        # On the command line a switch is text
        self.scale_rewards = {"true": True, "false": False}.get(str(self.scale_rewards).lower(), self.scale_rewards)
        if not isinstance(self.scale_rewards, bool):
            _require_one_of("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        self._check_trust_region()

    def _check_trust_region(self) -> None:
        _require_one_of("trust_region", self.trust_region, ("ratio_clip", *REGIONS))
        for name in ("delta", "delta_low", "delta_high", "ratio_cap", "coef", "delta_target", "delta_rate"):
            value = getattr(self, f"trust_region_{name}")
            if value is None:
                continue
            if not _number(f"trust_region_{name}", value) > 0:
                raise ValueError(f"trust_region_{name} must be > 0, found {value}.")
            setattr(self, f"trust_region_{name}", float(value))
        self.spo_epsilon = _number("spo_epsilon", self.spo_epsilon)
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
class ERPORLOOConfig(QueryFields, RLOOConfig):
    r"""
    Configuration of [`ERPORLOOTrainer`]: all of TRL's [`~trl.RLOOConfig`] and the fields of [`QueryFields`]. The clip of the
    sequence ratio is TRL's (`epsilon`, `epsilon_high`); trust regions weight single tokens and are not here.

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


def _require_one_of(name: str, value, allowed) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, found {value!r}.")


def _number(name: str, value) -> float:
    """YAML 1.1 reads `1e-3` as text; fields declared float are cast by the parser, list items are not."""
    try:
        if isinstance(value, bool):
            raise TypeError("a switch is no number")
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, found {value!r}.") from error
