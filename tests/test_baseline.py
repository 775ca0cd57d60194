"""REINFORCE: with the group's mean as baseline (TRL's own) and without any."""

import copy
import math

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    byte_tokenizer,
    checksum_reward,
    constant_reward,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    keep_raw_advantages,
    make_config,
    make_trainer,
    penalty_of,
    policy_loss,
    prompt_ids,
    prompts_dataset,
    reference_of,
    rows_of,
    tiny_model,
    weights_of,
)

from erpo_trl.policy.baseline import reward_advantages

ROWS, ALPHA = UNEQUAL[:4], 0.3
REINFORCE = {"advantage_baseline": "none", "scale_rewards": "none"}


def test_rewards_as_advantages():
    """Weighted sums; what a function did not score counts 0, and so does a completion that none scored."""
    rewards = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]])
    assert reward_advantages(rewards, torch.tensor([1.0, 0.5])).tolist() == [2.0, 1.0, 0.0]


def run(tmp_path, model, **fields):
    settings = {"query_kl_coef": ALPHA, "learning_rate": 0.05, "max_steps": 2, "per_device_train_batch_size": 8}
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(ROWS),
        rollout=fixed_rollouts(),
        **settings | fields,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    return trainer, recorder


@pytest.mark.parametrize("cut", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_gradient(tmp_path, monkeypatch, cut):
    """Float64: Σ w · reward · ∇log π, the reward itself computed from the completion, plus the penalty."""
    keep_raw_advantages(monkeypatch)
    model = tiny_model("llama")
    _, recorder = run(tmp_path, model, **REINFORCE, **cut)
    ids = prompt_ids(byte_tokenizer(), ROWS)
    reference = reference_of(model, ids)
    weight = weights_of(reference, ids)
    for step in recorder.done:
        policy = double_copy(model, step.weights)
        batches = [rows_of(batch) for batch in step.batches]
        for rows in batches:
            for row in rows:
                (row["advantage"],) = checksum_reward(completion_ids=[row["completion"]])
        loss = policy_loss(policy, batches, weight.__getitem__, 1.0, "grpo")
        (loss + penalty_of(policy, distinct_queries(batches), reference, ALPHA)).backward()
        assert_grads_close(step.grads, policy)


def test_equal_rewards_teach_without_a_baseline_alone(tmp_path):
    """Where all completions of a group earn the same, a group baseline leaves nothing to learn from, and none leaves all."""
    fields = {"query_kl_coef": 0.0, "max_steps": 1}
    for n, (baseline, moves) in enumerate((("group", False), ("none", True))):
        model = tiny_model("llama")
        trainer = make_trainer(
            tmp_path / str(n), model=model, dataset=prompts_dataset(ROWS), reward=constant_reward,
            **fields | REINFORCE | {"advantage_baseline": baseline},
        )  # fmt: skip
        before = copy.deepcopy(model.state_dict())
        trainer.train()
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()) == moves
        assert set(trainer._logs["advantages"]) == ({0.0} if not moves else {constant_reward([[1]])[0]})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"advantage_baseline": "batch"}, "advantage_baseline must be one of 'group', 'none', found 'batch'"),
        ({"advantage_baseline": "none"}, "set scale_rewards='none', found 'group'"),
        (REINFORCE | {"multi_objective_aggregation": "normalize_then_sum"}, "set multi_objective_aggregation="),
    ],
)
def test_refusals(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)
