"""ERPO trainers: TRL's trainers with the query side mixed in."""

import textwrap

from trl import GRPOTrainer

from .config import ERPOConfig
from .policy.mixin import TrustRegionMixin
from .query.regularizer import QueryRegularizerMixin

ERPO_PAPER = {
    "title": "Beyond the Stability-Exploration Dilemma: Environmental Regularization for LLM Policy Optimization",
    "id": "2608.23311",
    "citation": textwrap.dedent("""\
        @article{zhou2026erpo,
            title        = {{Beyond the Stability-Exploration Dilemma: Environmental Regularization for LLM Policy Optimization}},
            author       = {Xianlei Zhou and Xiangdi Meng and Yu He and Tianyu Qi and Shuyan Guan and Xianli Zhang and Jian Zhang and Xin Li and Qika Lin and Jun Liu},
            year         = 2026,
            eprint       = {arXiv:2608.23311},
        }"""),
}


class ERPOTrainer(QueryRegularizerMixin, TrustRegionMixin, GRPOTrainer):
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
            train_dataset=dataset,  # columns: prompt, answer
        )
        trainer.train()
        ```
    """

    _tag_names = ["trl", "grpo", "erpo"]
    _name = "ERPO"
    _paper = ERPO_PAPER

    def __init__(self, model, reward_funcs=None, args: ERPOConfig | None = None, *more, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = ERPOConfig(f"{name.split('/')[-1]}-ERPO")
        if not isinstance(args, ERPOConfig):
            raise TypeError(f"args must be an ERPOConfig, found {type(args).__name__}.")
        super().__init__(model, reward_funcs, args, *more, **kwargs)

    def extra_state(self) -> dict:
        return super().extra_state() | self.region_state()

    def restore_extra_state(self, state: dict) -> None:
        super().restore_extra_state(state)
        self.restore_region(state)
