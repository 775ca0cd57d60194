"""REINFORCE without a baseline: the advantage of a completion is its reward.

TRL subtracts the group's mean, which is REINFORCE with a group baseline (`scale_rewards="none"`, one update per generation).
"""

from torch import Tensor


def reward_advantages(rewards: Tensor, weights: Tensor) -> Tensor:
    """Advantages without a baseline.

    Args: rewards: (N, F) of each reward function, NaN where one gave None; weights: (F,) of the functions.
    Returns: (N,) the weighted sum of what a completion got; 0 where no function scored it, as in TRL.
    """
    return (rewards * weights).nansum(dim=1)


class AdvantageBaselineMixin:
    """`advantage_baseline="none"` for TRL's GRPO trainer; `"group"` leaves TRL as it is."""

    def _calculate_rewards(self, *args, **kwargs):
        self._rewards = super()._calculate_rewards(*args, **kwargs)  # (N, F), of all processes
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.args.advantage_baseline == "group":
            return batch
        advantages = reward_advantages(self._rewards, self.reward_weights.to(self._rewards.device))
        # What TRL shows beside the completions
        for _ in range(min(len(advantages), len(self._logs["advantages"]))):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(advantages.tolist())
        rows = len(batch["advantages"])
        mine = advantages[self.accelerator.process_index * rows :][:rows]
        batch["advantages"] = mine.to(batch["advantages"])
        return batch


def check_baseline(config) -> None:
    """Raise for settings that have no meaning without a baseline."""
    if config.advantage_baseline == "group":
        return
    if config.scale_rewards != "none":
        raise ValueError(
            f"advantage_baseline='none' takes rewards as they are: set scale_rewards='none', found {config.scale_rewards!r}."
        )
    if config.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "advantage_baseline='none' sums the rewards: set multi_objective_aggregation='sum_then_normalize', found "
            f"{config.multi_objective_aggregation!r}."
        )
