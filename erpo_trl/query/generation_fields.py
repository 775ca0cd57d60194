"""Config fields of the environment side for trainers that generate completions while they train."""

import math
from dataclasses import dataclass, field

from transformers.utils import logging

from .fields import QueryFields
from .validation import number, require_steps, require_whole
from .window import generation_window

logger = logging.get_logger(__name__)


@dataclass
class GenerationFields(QueryFields):
    r"""
    The fields of the environment side for trainers that generate completions while they train.

    Parameters:
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
        query_sampling_power (`float`, *optional*, defaults to `0.0`):
            κ of a curriculum: a generation batch draws its queries with probability ∝ w^κ from the whole training set, w by the
            reference. κ decays linearly to 0 over `query_sampling_steps` optimizer steps; from there on, and with 0, the
            order is TRL's.
        query_sampling_steps (`int`, *optional*):
            Optimizer steps over which κ decays to 0.
        query_drop_quantile (`float`, *optional*, defaults to `0.0`):
            Share of the training rows to leave out before training, the least typical under the reference by the scheme of
            `query_weight`, in [0, 1).
        log_policy_kl_steps (`int`, *optional*, defaults to `0`):
            Measure the Policy-KL on the current batch every so many optimizer steps, the first included (metric `policy/kl`),
            in one forward of the reference: the base model under a fresh LoRA adapter, else a frozen copy, which stays in
            memory. 0: never. With `beta` above 0 TRL logs it in every step (metric `kl`).
        save_steps (`int`, *optional*):
            As in transformers, but a multiple of the optimizer steps that one generation batch spans; the default, 500, is
            rounded up to one.
    """

    reference_sample_size: int | None = field(
        default=None,
        metadata={"help": "Score this many rows beforehand, to estimate the mean NLL, and the others as they arrive."},
    )
    reference_nll_decay: float = field(
        default=0.99, metadata={"help": "Decay of a stream's mean NLL over generation batches."}
    )
    query_sampling_power: float = field(
        default=0.0,
        metadata={"help": "Power kappa of a curriculum that draws queries by weight^kappa; 0: TRL's order."},
    )
    query_sampling_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps over which the curriculum's power decays to 0."}
    )
    query_drop_quantile: float = field(
        default=0.0, metadata={"help": "Share of the training rows to leave out, the least typical ones."}
    )
    log_policy_kl_steps: int = field(
        default=0, metadata={"help": "Measure the Policy-KL every so many steps; 0: never."}
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt in tokens; longer rows are left out and counted. Default: the model's context."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        for name, unit in {"max_prompt_length": "tokens", "reference_sample_size": "rows"}.items():
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), unit)
        self._check_sampling()
        require_steps("log_policy_kl_steps", self.log_policy_kl_steps)
        self.reference_nll_decay = number("reference_nll_decay", self.reference_nll_decay)
        if not 0 <= self.reference_nll_decay < 1:
            raise ValueError(f"reference_nll_decay must be in [0, 1), found {self.reference_nll_decay!r}.")
        self._check_save_steps()

    @property
    def generate_every(self) -> int:
        """Micro-batches that one generation serves."""
        return self.steps_per_generation * self.num_iterations

    def _check_sampling(self) -> None:
        self.query_sampling_power = number("query_sampling_power", self.query_sampling_power)
        if not 0 <= self.query_sampling_power < math.inf:
            raise ValueError(f"query_sampling_power must be a finite number >= 0, found {self.query_sampling_power}.")
        self.query_drop_quantile = number("query_drop_quantile", self.query_drop_quantile)
        if not 0 <= self.query_drop_quantile < 1:
            raise ValueError(f"query_drop_quantile must be in [0, 1), found {self.query_drop_quantile}.")
        if self.query_sampling_power and self.query_sampling_steps is None:
            raise ValueError(
                "query_sampling_power needs the steps over which it decays to 0: set query_sampling_steps."
            )
        if self.query_sampling_steps is not None:
            require_whole("query_sampling_steps", self.query_sampling_steps, "steps")
            if not self.query_sampling_power:
                raise ValueError("query_sampling_steps does nothing without query_sampling_power: set that too.")
        for name in ("query_sampling_power", "query_drop_quantile"):
            if getattr(self, name) and self.query_weight == "uniform":
                raise ValueError(
                    f"{name} goes by the query weights, which query_weight='uniform' makes all equal: use another."
                )
            if getattr(self, name) and self.reference_sample_size is not None:
                raise ValueError(f"{name} needs every row's likelihood before training: unset reference_sample_size.")

    def _check_save_steps(self) -> None:
        """Refuse checkpoints inside a generation batch, whose completions a checkpoint does not hold."""
        window = generation_window(self.generate_every, self.gradient_accumulation_steps)
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
