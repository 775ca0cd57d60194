"""ERPOConfig: TRL's GRPOConfig plus the fields of the environment side. Every default and every preset stands here."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from .query.divergence import ESTIMATORS, LEVELS
from .query.weights import WEIGHT_SCHEMES

# What a preset gives to the fields the user left unset (None)
PRESETS = {
    "paper": {
        "query_kl_estimator": "k3",
        "query_kl_level": "token",
        "query_kl_length_normalize": False,
        "query_weight": "nll_ratio",
        "query_weight_clip": (0.0, 2.0),
        "query_weight_source": "reference",
    },
}
# Presets that design and papers name but that this version cannot run yet -> why
UNAVAILABLE_PRESETS = {
    "release": "it weights queries by the current policy's likelihood, which this version does not compute; "
    "use preset='paper'",
}


@dataclass
class ERPOConfig(GRPOConfig):
    r"""
    Configuration of [`ERPOTrainer`]: all of TRL's [`~trl.GRPOConfig`] and the fields below. `beta`, the coefficient of
    GRPO's Policy-KL, is 0 unless set, as in TRL; ERPO needs no reference model in memory.

    Parameters:
        preset (`str`, *optional*, defaults to `"paper"`):
            Values for the query fields left unset. `"paper"`: arXiv 2608.23311 where it speaks, the authors' release
            where the paper is silent.
        query_kl_coef (`float`, *optional*, defaults to `1e-2`):
            α, the coefficient of the Query-KL penalty, per nat. 0 measures the drift without holding it. Source: paper
            section 5.1.
        query_kl_estimator (`str`, *optional*):
            Estimator of the drift, a function of x = log P_0 - log P_θ: `"k1"` (-x), `"k2"` (x²/2) or `"k3"`
            (e^x - x - 1). Preset `paper`: `"k3"` (paper section 4.2).
        query_kl_level (`str`, *optional*):
            `"token"`: estimator per token, averaged over the query's scored tokens. `"sequence"`: estimator on the sum of
            x over the query. Preset `paper`: `"token"` (authors' release; the paper is silent).
        query_kl_length_normalize (`bool`, *optional*):
            With `"sequence"`: estimator on the mean of x over the query's scored tokens. Preset `paper`: `False`.
        query_weight (`str`, *optional*):
            Weight w(q) on a query's advantages: `"nll_ratio"` (s̄/s(q), s the reference NLL in nats and s̄ its mean over
            the training set) or `"uniform"` (1). Preset `paper`: `"nll_ratio"` (paper section 4.2).
        query_weight_clip (`list[float]`, *optional*):
            Lowest and highest weight. Preset `paper`: `[0, 2]`.
        query_weight_source (`str`, *optional*):
            Whose likelihood the weight reads: `"reference"` (constant over the run). Preset `paper`: `"reference"`.
        reference_cache_dir (`str`, *optional*):
            Folder of the reference tables, shared by all processes and found again by later runs and by resume. Default:
            `erpo_trl/reference` in the Hugging Face cache (`HF_HOME`).
        reference_batch_tokens (`int`, *optional*, defaults to `16384`):
            Token budget of one forward of the scoring pass, padding included.
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens; rows with a longer one are left out, counted and named in a warning. Default: what the
            model's context allows (`max_position_embeddings` minus 1, or minus `max_completion_length` for models
            with absolute positions, which cannot run past their table).
    """

    preset: str = field(
        default="paper",
        metadata={"help": "Values for the query fields left unset: 'paper' (arXiv 2608.23311)."},
    )
    query_kl_coef: float = field(
        default=1e-2,
        metadata={"help": "Coefficient alpha of the Query-KL penalty; 0 measures the drift without holding it."},
    )
    query_kl_estimator: str | None = field(
        default=None,
        metadata={"help": "Drift estimator: k1, k2 or k3. Preset 'paper': k3."},
    )
    query_kl_level: str | None = field(
        default=None,
        metadata={"help": "'token' (mean over the query's tokens) or 'sequence'. Preset 'paper': token."},
    )
    query_kl_length_normalize: bool | None = field(
        default=None,
        metadata={"help": "With query_kl_level='sequence', use the mean log-ratio per token. Preset 'paper': False."},
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
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt in tokens; longer rows are left out and counted. Default: the model's context."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.preset in UNAVAILABLE_PRESETS:
            raise ValueError(f"preset={self.preset!r} is not available yet: {UNAVAILABLE_PRESETS[self.preset]}.")
        _require_one_of("preset", self.preset, PRESETS)
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, list(value) if isinstance(value, tuple) else value)

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
        for name in ("reference_batch_tokens", "max_prompt_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be a number of tokens >= 1, found {value}.")


def _require_one_of(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, found {value!r}.")


def _number(name: str, value) -> float:
    """YAML 1.1 reads `1e-3` as text; fields declared float are cast by the parser, list items are not."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, found {value!r}.") from error
