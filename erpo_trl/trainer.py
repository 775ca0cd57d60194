"""ERPO trainers: TRL's trainers with the query side mixed in."""

import textwrap

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

from .config import ERPOConfig, ERPODPOConfig, ERPORLOOConfig
from .forward.mixin import SharedPrefixMixin
from .policy.baseline import AdvantageBaselineMixin
from .policy.mixin import TrustRegionMixin
from .query.fields import QueryFields
from .query.preference import PreferenceMixin
from .query.regularizer import QueryRegularizerMixin

ERPO_PAPER = {
    "title": "Beyond the Stability-Exploration Dilemma: Environmental Regularization for LLM Policy Optimization",
    "id": "2608.23311",
    "citation": textwrap.dedent("""\
        @misc{zhou2026erpo,
            title        = {{Beyond the Stability-Exploration Dilemma: Environmental Regularization for LLM Policy Optimization}},
            author       = {Xianlei Zhou and Xiangdi Meng and Yu He and Tianyu Qi and Shuyan Guan and Xianli Zhang and Jian Zhang and Xin Li and Qika Lin and Jun Liu},
            year         = 2026,
            eprint       = {arXiv:2608.23311},
        }"""),
}


class ERPOTrainer(SharedPrefixMixin, QueryRegularizerMixin, TrustRegionMixin, AdvantageBaselineMixin, GRPOTrainer):
    """GRPO with ERPO's Query-KL penalty and query weights in place of the Policy-KL.

    Takes what [`~trl.GRPOTrainer`] takes, with an [`ERPOConfig`] as `args` (default: one with its defaults), and works
    with its loss types, importance-sampling levels, LoRA, vLLM, tools and `rollout_func`. Images in prompts and
    `environment_factory` are refused.

    Before training, every distinct prompt is scored once under the reference (the model as handed over); see
    [`DatasetMapper`]. With `query_kl_coef=0` and `query_weight="uniform"` it trains exactly as GRPOTrainer does, and
    measures the drift.

    Example:
        ```python
        trainer = ERPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=accuracy_reward,
            args=ERPOConfig("out", query_kl_coef=1e-2),
            train_dataset=dataset,  # columns: prompt (which asks for a box), answer
        )
        trainer.train()
        ```
    """

    _tag_names = ["trl", "grpo", "erpo"]
    _name = "ERPO"
    _paper = ERPO_PAPER

    def __init__(self, model, reward_funcs=None, args: ERPOConfig | None = None, *more, **kwargs):
        super().__init__(model, reward_funcs, _config(self, ERPOConfig, args, model), *more, **kwargs)

    def extra_state(self) -> dict:
        return super().extra_state() | self.region_state()

    def restore_extra_state(self, state: dict) -> None:
        super().restore_extra_state(state)
        self.restore_region(state)


class ERPORLOOTrainer(SharedPrefixMixin, QueryRegularizerMixin, RLOOTrainer):
    """RLOO with ERPO's Query-KL penalty and query weights in place of the KL in the reward.

    Takes what [`~trl.RLOOTrainer`] takes, with an [`ERPORLOOConfig`] as `args`. A query's weight multiplies its
    leave-one-out advantages; the clip of the sequence ratio is TRL's. With `query_kl_coef=0` and `query_weight="uniform"` it
    trains exactly as RLOOTrainer does, and measures the drift.
    """

    _tag_names = ["trl", "rloo", "erpo"]
    _name = "ERPO"
    _paper = ERPO_PAPER

    def __init__(self, model, reward_funcs=None, args: ERPORLOOConfig | None = None, *more, **kwargs):
        super().__init__(model, reward_funcs, _config(self, ERPORLOOConfig, args, model), *more, **kwargs)


class ERPODPOTrainer(PreferenceMixin, DPOTrainer):
    """DPO with ERPO's Query-KL penalty on the prompt that chosen and rejected share.

    Takes what [`~trl.DPOTrainer`] takes, with an [`ERPODPOConfig`] as `args`, and works with its loss types, LoRA and
    precomputed reference log-probs. The Query-KL is to the policy as handed over, whatever `ref_model` is. Streams and images
    are refused. With `query_kl_coef=0` and `query_weight="uniform"` it trains exactly as DPOTrainer does, and measures the
    drift.
    """

    _tag_names = ["trl", "dpo", "erpo"]
    _name = "ERPO"
    _paper = ERPO_PAPER

    def __init__(self, model, ref_model=None, args: ERPODPOConfig | None = None, *more, **kwargs):
        super().__init__(model, ref_model, _config(self, ERPODPOConfig, args, model), *more, **kwargs)


def _config(trainer, config_class: type[QueryFields], args, model) -> QueryFields:
    """`args`, or the defaults in a folder named after the model; raise for another trainer's config."""
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = config_class(f"{name.split('/')[-1]}-{trainer._name}")
    if not isinstance(args, config_class):
        raise TypeError(
            f"args of {type(trainer).__name__} must be an {config_class.__name__}, found {type(args).__name__}."
        )
    return args
