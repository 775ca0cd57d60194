"""Config fields of the environment side, which every config of this package has beside those of its TRL config."""

import json
import math
import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers.utils import is_torch_bf16_gpu_available, logging

from ..presets import PRESETS
from .divergence import ESTIMATORS, LEVELS
from .references import MODES, parse_references
from .span import SPANS
from .validation import number, pair, require_one_of, require_steps, require_whole
from .weights import weight_scheme

logger = logging.get_logger(__name__)


def computes_in_bf16() -> bool:
    """Whether there is a device that computes in bfloat16 itself: torch counts GPUs before Ampere (T4, V100) in, which emulate it."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available()


@dataclass
class QueryFields:
    r"""
    The fields of the environment side, which every config of this package has beside those of its TRL config. Put it before
    the TRL config in the bases.

    Parameters:
        preset (`str`, *optional*, defaults to `"paper"`):
            Values for the fields left unset. `"paper"`: arXiv 2608.23311 where it speaks, the authors' release where the
            paper is silent. `"release"`: the authors' released code, whose weights come from the current policy
            (`query_weight_source="policy"`) and are not clipped. `"drpo"`, with GRPO only: the recipe that arXiv 2606.09821 published, `trust_region="drpo"`
            with `trust_region_delta=12.5` on `loss_type="dr_grpo"` and `scale_rewards="none"`, with the query side off
            (`query_kl_coef=0`, `query_weight="uniform"`); set those to compose it with ERPO. Their runs draw 8 responses at
            temperature 1, of at most 8192 tokens (`max_completion_length`, which `dr_grpo` divides by), from an engine
            whose log-probs are μ (`use_vllm`).
        query_kl_coef (`float`, *optional*):
            α, the coefficient of the Query-KL penalty, per nat. 0 measures the drift without holding it. Preset `paper`:
            `1e-2` (paper section 5.1).
        query_kl_estimator (`str`, *optional*):
            Estimator of the drift, a function of x = log P_0 - log P_θ: `"k1"` (-x), `"k2"` (x²/2) or `"k3"`
            (e^x - x - 1). k1 measures and does not hold: its gradient is that of the likelihood, at any drift. Preset `paper`:
            `"k3"` (paper section 4.2).
        query_kl_level (`str`, *optional*):
            `"token"`: estimator per token, averaged over the query's scored tokens. `"sequence"`: estimator on the sum of
            x over the query. Preset `paper`: `"token"` (authors' release; the paper is silent).
        query_kl_length_normalize (`bool`, *optional*, defaults to `False`):
            With `"sequence"`: estimator on the mean of x over the query's scored tokens.
        query_kl_target (`float`, *optional*):
            Drift R̂ to hold, in the estimator's nats: α adapts, from `query_kl_coef` on, by damped dual ascent on log α, once
            per optimizer step, and is kept in checkpoints. See `query/alpha.py`.
        query_kl_hinge (`bool`, *optional*, defaults to `False`):
            With `query_kl_target`: α stays, and a query is penalized only for the drift above the target.
        query_kl_coef_range (`list[float]`, *optional*, defaults to `[1e-4, 10]`):
            Lowest and highest α when it adapts.
        query_kl_coef_rate (`float`, *optional*, defaults to `0.05`):
            When α adapts: how far log α moves in one step where the drift is 0, or twice the target and above.
        query_kl_coef_gain (`float`, *optional*, defaults to `2.0`):
            When α adapts: damping, in log α per unit of the drift's relative error; 0 leaves dual ascent alone, which swings.
        query_kl_ema (`float`, *optional*, defaults to `0.9`):
            Decay of the exponential moving average of R̂ that α follows, in [0, 1).
        query_span (`str`, *optional*, defaults to `"prompt"`):
            Which tokens of a query count, in the Query-KL, in the likelihoods that the weights rest on and in the metrics:
            `"prompt"` (all), `"user"` (the texts of user turns) or `"content"` (the texts of all turns, without what the
            chat template writes around them; tools, arguments of tool calls and a default system turn are the template's).
            The last two need prompts in chat form. A token counts if it lies wholly inside; the first never does.
        query_weight (`str`, *optional*):
            Weight w(q) on a query's advantages, by its NLL s(q) in nats and the mean s̄ over the training set: `"nll_ratio"`
            (s̄/s), `"token_nll_ratio"` (the same of s per token), `"softmax"`, `"quantile"` (of its rank), `"snis"`
            (self-normalised density ratio), `"uniform"` (1), or the import path of a function like those in
            `query/weights.py` (`package.module:function`, `file.py:function`). Preset `paper`: `"nll_ratio"` (paper section
            4.2).
        query_weight_clip (`list[float]`, *optional*):
            Lowest and highest weight of any scheme but `uniform`; `quantile` spreads its weights over it. Preset `paper`:
            `[0, 2]`.
        query_weight_floor (`float`, *optional*, defaults to `0.0`):
            φ in [0, 1): share of a uniform weight that every query keeps, w ← φ + (1 - φ) w.
        query_weight_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the training set, after clip and floor.
        query_weight_beta (`float`, *optional*, defaults to `1.0`):
            β of `softmax`, the inverse temperature on the mean log-prob of a query's tokens.
        query_weight_source (`str`, *optional*):
            Whose likelihood the weight reads: `"reference"` (constant over the run), or `"policy"`: the current policy's,
            detached, read at every update, relative to the distinct queries of the whole optimizer step in place of the
            training set. With several micro-batches a step that takes one prompt-only forward a step, see
            docs/query_side.md. Preset `paper`: `"reference"`; preset `release`: `"policy"`.
        query_references (`dict`, *optional*):
            Several references: name -> `{"weight": λ, "model": hub id or folder}` or `{"weight": λ, "table": folder of a
            reference table}`. `"self"`, the model before RL, takes a weight alone. Default: `"self"` of weight 1. The weights
            w(q) read `"self"` in any case.
        query_references_mode (`str`, *optional*, defaults to `"sum"`):
            `"sum"`: the drift is Σ λ_k R̂_k. `"mixture"`: the estimator on log Σ λ_k e^{ℓ_k} - ℓ_θ, which needs
            `query_kl_level="sequence"` and λ that sum to 1.
        query_references_column (`str`, *optional*):
            Column of the data set with each row's λ, in place of those above: a list in their order, or a mapping by name.
        reference_cache_dir (`str`, *optional*):
            Folder of the reference tables, shared by all processes and found again by later runs and by resume. Default:
            `erpo_trl/reference` in the Hugging Face cache (`HF_HOME`).
        reference_batch_tokens (`int`, *optional*, defaults to `16384`):
            Token budget of one forward of the scoring pass, padding included.
        query_log_steps (`int`, *optional*, defaults to `50`):
            Every so many optimizer steps, and at the end, write the queries of the steps since to `output_dir/queries` (drift,
            weight, NLL of the query and of its responses; read by `erpo-trl report`), and send their histograms and the run's
            curves to the trackers in `report_to`. 0: neither.
    """

    # Fields without a default of their own that presets may set -> what holds where they do not
    _unset: ClassVar[dict] = {}

    preset: str = field(
        default="paper",
        metadata={
            "help": "Values for the fields left unset: 'paper' (arXiv 2608.23311), 'release' (its authors' code) or, with GRPO, "
            "'drpo' (arXiv 2606.09821)."
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
    query_kl_target: float | None = field(
        default=None, metadata={"help": "Drift to hold, in nats: alpha adapts to it (see query_kl_hinge)."}
    )
    query_kl_hinge: bool = field(
        default=False,
        metadata={"help": "With query_kl_target: alpha stays, and only drift above the target is penalized."},
    )
    query_kl_coef_range: list[float] = field(
        default_factory=lambda: [1e-4, 10.0], metadata={"help": "Lowest and highest alpha when it adapts."}
    )
    query_kl_coef_rate: float = field(
        default=0.05, metadata={"help": "Most that log alpha moves in one step when it adapts, damping apart."}
    )
    query_kl_coef_gain: float = field(default=2.0, metadata={"help": "Damping of an alpha that adapts."})
    query_kl_ema: float = field(
        default=0.9, metadata={"help": "Decay of the moving average of the drift that alpha follows."}
    )
    query_kl_length_normalize: bool = field(
        default=False,
        metadata={"help": "With query_kl_level='sequence', use the mean log-ratio per token."},
    )
    query_span: str = field(
        default="prompt",
        metadata={
            "help": "Which tokens of a query count: 'prompt' (all), 'user' (user turns) or 'content' (without the template)."
        },
    )
    query_weight: str | None = field(
        default=None,
        metadata={
            "help": "Weight on a query's advantages: nll_ratio, token_nll_ratio, softmax, quantile, snis, uniform, or an "
            "import path. Preset 'paper': nll_ratio."
        },
    )
    query_weight_clip: list[float] | None = field(
        default=None,
        metadata={"help": "Lowest and highest query weight. Preset 'paper': 0 2."},
    )
    query_weight_floor: float = field(
        default=0.0, metadata={"help": "Share of a uniform weight that every query keeps, in [0, 1)."}
    )
    query_weight_normalize: bool = field(
        default=False, metadata={"help": "Divide the weights by their mean over the training set."}
    )
    query_weight_beta: float = field(default=1.0, metadata={"help": "Inverse temperature of query_weight='softmax'."})
    query_weight_source: str | None = field(
        default=None,
        metadata={"help": "Whose likelihood the weight reads: 'reference' or 'policy'. Preset 'paper': reference."},
    )
    query_references: dict | str | None = field(
        default=None, metadata={"help": "Several references, as JSON: name -> weight, and model or table."}
    )
    query_references_mode: str = field(
        default="sum", metadata={"help": "'sum' of the drifts, or drift from the 'mixture' of the references."}
    )
    query_references_column: str | None = field(
        default=None, metadata={"help": "Column with each row's weights of the references."}
    )
    reference_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the reference tables. Default: erpo_trl/reference in the Hugging Face cache."},
    )
    reference_batch_tokens: int = field(
        default=16384,
        metadata={"help": "Token budget of one forward of the scoring pass, padding included."},
    )
    query_log_steps: int = field(
        default=50,
        metadata={
            "help": "Optimizer steps between writing the queries seen to output_dir/queries and sending histograms and "
            "plots to report_to; 0: never."
        },
    )

    def __post_init__(self):
        if self.bf16 is None and not self.fp16 and not self.use_cpu and not computes_in_bf16():
            # TRL's default would be refused on a CPU, and be emulated on a GPU before Ampere
            logger.info("No device with bfloat16 found: training in float32. Set bf16 or fp16 to choose.")
            self.bf16 = False
        require_one_of("preset", self.preset, PRESETS)
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

        require_one_of("query_kl_estimator", self.query_kl_estimator, ESTIMATORS)
        require_one_of("query_kl_level", self.query_kl_level, LEVELS)
        require_one_of("query_span", self.query_span, SPANS)
        self._require_switch("query_kl_length_normalize")
        if self.query_kl_length_normalize and self.query_kl_level != "sequence":
            raise ValueError(
                "query_kl_length_normalize=True needs query_kl_level='sequence': the token level already averages over "
                "the query's tokens."
            )
        self._check_alpha()
        if self.query_kl_estimator == "k1" and self.query_kl_coef > 0:
            logger.warning(
                "query_kl_estimator='k1' is linear in the likelihood: as a penalty it lowers that of the prompts without end, "
                "whatever the drift. Use 'k2' or 'k3' to hold the drift, or query_kl_coef=0 to measure it alone."
            )
        self._check_weights()
        self._check_references()
        require_whole("reference_batch_tokens", self.reference_batch_tokens, "tokens")
        require_steps("query_log_steps", self.query_log_steps)
        if self.reference_cache_dir is not None:
            if not isinstance(self.reference_cache_dir, (str, os.PathLike)):
                raise ValueError(f"reference_cache_dir must be a path, found {self.reference_cache_dir!r}.")
            self.reference_cache_dir = os.path.expanduser(self.reference_cache_dir)

    def _require_switch(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}.")

    def _check_alpha(self) -> None:
        self.query_kl_coef = number("query_kl_coef", self.query_kl_coef)
        if not (math.isfinite(self.query_kl_coef) and self.query_kl_coef >= 0):
            raise ValueError(f"query_kl_coef must be a finite number >= 0, found {self.query_kl_coef}.")
        self._require_switch("query_kl_hinge")
        self.query_kl_coef_range = pair("query_kl_coef_range", self.query_kl_coef_range)
        low, high = self.query_kl_coef_range
        if not 0 < low <= high < math.inf:
            raise ValueError(f"query_kl_coef_range must satisfy 0 < lowest <= highest, found {[low, high]!r}.")
        for name in ("query_kl_coef_rate", "query_kl_coef_gain", "query_kl_ema"):
            setattr(self, name, number(name, getattr(self, name)))
        if not 0 < self.query_kl_coef_rate < math.inf:
            raise ValueError(f"query_kl_coef_rate must be a finite number > 0, found {self.query_kl_coef_rate}.")
        if not 0 <= self.query_kl_coef_gain < math.inf:
            raise ValueError(f"query_kl_coef_gain must be a finite number >= 0, found {self.query_kl_coef_gain}.")
        if not 0 <= self.query_kl_ema < 1:
            raise ValueError(f"query_kl_ema must be in [0, 1), found {self.query_kl_ema}.")
        if self.query_kl_target is None:
            if self.query_kl_hinge:
                raise ValueError("query_kl_hinge=True needs the drift to start at: set query_kl_target.")
            return
        self.query_kl_target = number("query_kl_target", self.query_kl_target)
        if not 0 < self.query_kl_target < math.inf:
            raise ValueError(f"query_kl_target must be a finite number > 0, found {self.query_kl_target}.")
        if self.query_kl_coef == 0:
            raise ValueError("query_kl_target needs an α to start from: set query_kl_coef above 0.")
        if self.query_kl_estimator == "k1":
            raise ValueError(
                "query_kl_target needs a drift that is not negative: set query_kl_estimator to 'k2' or 'k3'."
            )
        if not self.query_kl_hinge and not low <= self.query_kl_coef <= high:
            raise ValueError(
                f"query_kl_coef={self.query_kl_coef:g}, from where α adapts to query_kl_target, must lie in "
                f"query_kl_coef_range={[low, high]!r}."
            )

    def _check_references(self) -> None:
        require_one_of("query_references_mode", self.query_references_mode, MODES)
        if self.query_references is None:
            for name, value in (("query_references_mode", "sum"), ("query_references_column", None)):
                if getattr(self, name) != value:
                    raise ValueError(f"{name} is about several references: set query_references.")
            return
        if not isinstance(self.query_references_column, str | None):
            raise ValueError(
                f"query_references_column must be a column's name, found {self.query_references_column!r}."
            )
        specs = parse_references(self.query_references)
        self.query_references = (
            json.loads(self.query_references) if isinstance(self.query_references, str) else self.query_references
        )
        if self.query_references_mode == "mixture":
            if self.query_kl_level != "sequence":
                raise ValueError(
                    "query_references_mode='mixture' mixes likelihoods of whole queries: set query_kl_level='sequence'."
                )
            total = sum(spec.weight for spec in specs)
            if self.query_references_column is None and abs(total - 1) > 1e-4:
                raise ValueError(
                    f"query_references_mode='mixture' needs weights that sum to 1, those of query_references sum to {total:g}."
                )

    def _check_weights(self) -> None:
        if not isinstance(self.query_weight, str):
            raise ValueError(f"query_weight must be a name or an import path, found {self.query_weight!r}.")
        weight_scheme(self.query_weight)
        require_one_of("query_weight_source", self.query_weight_source, ("reference", "policy"))
        self._require_switch("query_weight_normalize")
        low, high = pair("query_weight_clip", self.query_weight_clip)
        if not 0 <= low <= high or high == 0:
            raise ValueError(
                f"query_weight_clip must satisfy 0 <= lowest <= highest and highest > 0, found {self.query_weight_clip!r}."
            )
        if self.query_weight == "quantile" and high == math.inf:
            raise ValueError(
                "query_weight='quantile' spreads its weights over query_weight_clip: give it a finite upper end."
            )
        self.query_weight_clip = [low, high]
        self.query_weight_floor = number("query_weight_floor", self.query_weight_floor)
        if not 0 <= self.query_weight_floor < 1:
            raise ValueError(f"query_weight_floor must be in [0, 1), found {self.query_weight_floor}.")
        self.query_weight_beta = number("query_weight_beta", self.query_weight_beta)
        if not 0 <= self.query_weight_beta < math.inf:
            raise ValueError(f"query_weight_beta must be a finite number >= 0, found {self.query_weight_beta}.")
