"""The gradient of an optimizer step is that of the printed objective, however the batch is cut.

The expected gradient is computed here from plain logits in float64, one unpadded sequence at a time, with the rows and
advantages that TRL prepared and the parameters as they stood before the step:

    L = mean over rows of w(q) * L_PG(q, o)  +  alpha * mean over the step's distinct queries of R-hat(q)
"""

import copy
import math

import pytest
import torch
from helpers import (
    EQUAL,
    LAYOUTS,
    UNEQUAL,
    Recorder,
    assert_grads_close,
    byte_tokenizer,
    constant_reward,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    policy_loss,
    prompt_ids,
    prompts_dataset,
    reference_of,
    rows_of,
    shift_reference,
    tiny_model,
    weights_of,
)

from erpo_trl import DatasetMapper

ALPHA = 0.3


def run(tmp_path, model, prompts=UNEQUAL, **settings):
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(prompts),
        **{"query_kl_coef": ALPHA, "learning_rate": 5e-2, "max_steps": 3, **settings},
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    assert len(recorder.done) == trainer.state.max_steps
    return trainer, recorder


def expected_model(model, step, reference, weight_of, trainer, alpha=ALPHA, **penalty):
    """A float64 model that carries the gradient of the printed objective for this step; returns it with the two terms."""
    policy = double_copy(model, step.weights)
    for parameter, template in zip(policy.parameters(), model.parameters()):
        parameter.requires_grad_(template.requires_grad)
        parameter.grad = None
    batches = [rows_of(batch) for batch in step.batches]
    dapo_tokens = None
    if trainer.loss_type == "dapo":
        per_window = trainer.args.steps_per_generation
        dapo_tokens = step.batches[0]["num_items_in_batch"].item() * len(batches) / per_window
    inner = policy_loss(policy, batches, weight_of, trainer.temperature, trainer.loss_type, dapo_tokens=dapo_tokens)
    outer = penalty_of(policy, distinct_queries(batches), reference, alpha, trainer.temperature, **penalty)
    (inner + outer).backward()
    return policy, inner.item(), outer.item()


def check_every_step(tmp_path, model, prompts=UNEQUAL, rel=1e-4, penalty=None, **settings):
    trainer, recorder = run(tmp_path, model, prompts, **settings)
    queries = prompt_ids(byte_tokenizer(), prompts)
    reference = reference_of(model, set(queries), trainer.temperature)
    weights = weights_of(reference, queries)
    for step in recorder.done:
        policy, inner, outer = expected_model(model, step, reference, weights.__getitem__, trainer, **(penalty or {}))
        assert_grads_close(step.grads, policy, rel)
        assert sum(step.losses) == pytest.approx(inner + outer, rel=1e-4, abs=2e-6)
    losses = [e["query/loss"] for e in trainer.state.log_history if "query/loss" in e]
    assert losses[-1] == pytest.approx(outer, rel=1e-3)
    assert outer > 1e-5, "the penalty vanishes: the test would prove nothing"
    return trainer, recorder


@pytest.mark.parametrize("accumulation, steps_per_generation", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_step_gradient_is_the_printed_objective(
    tmp_path, raw_advantages, accumulation, steps_per_generation, loss_type
):
    """Weights, policy term and penalty of every step against float64 logits; prompts of different lengths."""
    check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        loss_type=loss_type,
    )


@pytest.mark.parametrize("accumulation, steps_per_generation", [(1, 1), (4, 4), (2, 4)])
def test_step_gradient_with_dapo(tmp_path, raw_advantages, accumulation, steps_per_generation):
    """TRL's default loss normalises by completion tokens of the generation batch; the penalty must not inherit that."""
    check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        loss_type="dapo",
    )


@pytest.mark.parametrize("accumulation, steps_per_generation", [(1, 1), (2, 4), (2, 2)])
def test_step_gradient_off_policy(tmp_path, raw_advantages, accumulation, steps_per_generation):
    """With two iterations the policy has moved since generation: ratios differ from 1 and the clip acts."""
    _, recorder = check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        num_iterations=2,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )
    assert all("old_per_token_logps" in batch for step in recorder.done for batch in step.batches)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_step_gradient_of_other_families(tmp_path, raw_advantages, kind):
    """Untied head, soft-capping and logit scale act on prompt tokens as on completion tokens."""
    rate = 0.5 if kind == "cohere" else 5e-2  # its scale of 1/4 makes small gradients
    check_every_step(
        tmp_path, tiny_model(kind), gradient_accumulation_steps=2, max_steps=2, rel=2e-4, learning_rate=rate
    )


def test_step_gradient_of_absolute_positions(tmp_path, raw_advantages):
    """GPT-2 adds a position to every token: the formula's unpadded positions must be those of the padded batch."""
    check_every_step(tmp_path, tiny_model("gpt2"), gradient_accumulation_steps=2, max_steps=2)


def test_step_gradient_with_lora(tmp_path, raw_advantages):
    """An adapter that already changes the policy: reference and gradient are those of base plus adapter."""
    check_every_step(
        tmp_path, lora_model(pretrained=True), max_steps=2, learning_rate=0.5, gradient_accumulation_steps=2
    )


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_step_gradient_at_other_temperatures(tmp_path, raw_advantages, temperature):
    """Policy and reference are both read at the sampling temperature."""
    check_every_step(tmp_path, tiny_model("qwen2"), temperature=temperature, max_steps=2)


@pytest.mark.parametrize(
    "fields, penalty",
    [
        ({"query_kl_estimator": "k2"}, {"estimator": "k2"}),
        ({"query_kl_level": "sequence", "query_kl_coef": 0.05}, {"level": "sequence", "alpha": 0.05}),
        ({"query_kl_level": "sequence", "query_kl_estimator": "k2"}, {"level": "sequence", "estimator": "k2"}),
        ({"query_kl_level": "sequence", "query_kl_length_normalize": True}, {"level": "sequence", "normalize": True}),
    ],
)
def test_step_gradient_of_every_estimator(tmp_path, raw_advantages, fields, penalty):
    """The estimators and levels reach the loss as they are configured."""
    check_every_step(
        tmp_path, tiny_model("qwen2"), gradient_accumulation_steps=2, learning_rate=1e-2, penalty=penalty, **fields
    )


def test_gradient_checkpointing_changes_nothing(tmp_path, raw_advantages):
    """Recomputed activations give the same gradient."""
    check_every_step(tmp_path, tiny_model("qwen2"), gradient_checkpointing=True, max_steps=2)


@pytest.mark.parametrize("per_device, accumulation", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_rows_of_a_query_spread_over_micro_batches(tmp_path, raw_advantages, per_device, accumulation):
    """Four rows per query and up to eight micro-batches: whoever scores it, a query counts once."""
    check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        num_generations=4,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL], ids=["equal_lengths", "unequal_lengths"])
def test_the_same_gradient_for_every_cut_of_one_batch(tmp_path, raw_advantages, prompts):
    """One global batch of fixed completions, cut into 1, 2, 4 or 8 micro-batches and shuffled differently each time."""
    gradients = []
    for i, (per_device, accumulation) in enumerate([(16, 1), (8, 2), (4, 4), (2, 8)]):
        _, recorder = run(
            tmp_path / str(i),
            tiny_model("qwen2"),
            prompts,
            rollout=fixed_rollouts(),
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            seed=i,  # another order within the batch; the batch holds the whole data set
        )
        orders = [row["prompt"] for batch in recorder.done[0].batches for row in rows_of(batch)]
        gradients.append((recorder.done[0].grads, recorder.done[1].grads, orders))
    assert gradients[0][2] != gradients[1][2], "the order was meant to differ"
    for first, second, _ in gradients[1:]:
        for name, expected in gradients[0][0].items():
            torch.testing.assert_close(first[name], expected, atol=2e-6, rtol=1e-4)
        for name, expected in gradients[0][1].items():
            torch.testing.assert_close(second[name], expected, atol=5e-6, rtol=1e-3)


def test_more_padding_changes_nothing(tmp_path, raw_advantages):
    """Padding both sides to a multiple of 32 adds pad positions only."""
    gradients = []
    for multiple in (None, 32):
        _, recorder = run(
            tmp_path / str(multiple),
            tiny_model("qwen2"),
            rollout=fixed_rollouts(),
            pad_to_multiple_of=multiple,
            max_steps=2,
        )
        gradients.append(recorder.done[1].grads)
        widths = recorder.done[1].batches[0]["prompt_ids"].size(1)
    assert widths == 32
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("accumulation, steps_per_generation", [(1, 1), (2, 4), (4, 2)])
def test_two_data_rows_with_one_prompt_are_one_query(tmp_path, raw_advantages, accumulation, steps_per_generation):
    """The penalty is the mean over distinct token sequences: a prompt listed twice does not pull twice."""
    prompts = [UNEQUAL[1], UNEQUAL[2], UNEQUAL[1], UNEQUAL[0], UNEQUAL[1], UNEQUAL[3], UNEQUAL[2], UNEQUAL[1]]
    _, recorder = check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        prompts,
        per_device_train_batch_size=4 if steps_per_generation == 4 else 8,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )
    steps = [[rows_of(batch) for batch in step.batches] for step in recorder.done]
    assert any(sum(map(len, batches)) > 2 * len(distinct_queries(batches)) for batches in steps)


def shifted_reference(tmp_path, model, prompts, shift):
    """The data set with its reference column moved by `shift` nats on every token."""
    mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))
    return shift_reference(mapper(prompts_dataset(prompts)), shift)


@pytest.mark.parametrize("accumulation, steps_per_generation", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL], ids=["equal_lengths", "unequal_lengths"])
def test_a_constant_drift_costs_alpha(tmp_path, accumulation, steps_per_generation, loss_type, prompts):
    """A reference one nat too low makes k1 = -x = 1 for every query while the policy stands still (learning rate 0),
    and equal rewards leave no policy term: the loss of every step, the epoch's short tail included, is alpha = 0.1.
    """
    model = tiny_model("qwen2")
    prompts = prompts[: 5 if accumulation == 3 else 7]  # no multiple of the accumulation
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shifted_reference(tmp_path, model, prompts, -1.0),
        reward=constant_reward,
        query_kl_estimator="k1",
        query_kl_coef=0.1,
        learning_rate=0.0,
        loss_type=loss_type,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        max_steps=-1,
        num_train_epochs=2,
    )
    recorder = Recorder().attach(trainer)
    trainer.train()
    sizes = {len(step.batches) for step in recorder.done}
    assert len(recorder.done) == trainer.state.global_step
    if (accumulation, steps_per_generation) in ((4, 2), (3, 2)):
        assert min(sizes) < accumulation, "the epoch was meant to end with a short step"
    for step in recorder.done:
        assert sum(step.losses) == pytest.approx(0.1, abs=1e-6)
    for entry in trainer.state.log_history:
        if "query/loss" in entry:
            assert entry["query/kl"] == pytest.approx(1.0, abs=1e-5)
            assert entry["query/loss"] == pytest.approx(0.1, abs=1e-6)
            assert entry["loss"] == pytest.approx(0.1, abs=1e-6)


def test_the_penalty_leaves_completions_alone(tmp_path, raw_advantages):
    """Prop. 1: the penalty's derivative w.r.t. every completion token's log-prob is exactly zero, and not for queries."""
    seen = []
    model = tiny_model("qwen2")
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shifted_reference(tmp_path, model, UNEQUAL, 1.0),
        reward=constant_reward,
        query_kl_coef=1.0,
        max_steps=1,
    )
    base_forward = trainer.model.forward

    def forward(*args, **kwargs):
        output = base_forward(*args, **kwargs)
        if kwargs.get("fused_lm_head") and torch.is_grad_enabled():
            output.log_probs.retain_grad()
            seen.append((output.log_probs, kwargs["labels"]))
        return output

    trainer.model.forward = forward
    recorder = Recorder().attach(trainer)
    trainer.train()
    ((log_probs, labels),) = seen
    batch = recorder.done[0].batches[0]
    width = batch["prompt_ids"].size(1)
    gradient = log_probs.grad
    completion = gradient[:, width - 1 :]
    assert completion.abs().max() == 0.0
    # Per scored token (1 - e^x) / (T - 1) / m, here x = 1 and m = 2 queries in the step
    query = gradient[:, : width - 1][labels[:, 1:width] != -100]
    lengths = {len(row["prompt"]) - 1 for row in rows_of(batch)}
    allowed = torch.tensor([(1 - math.e) / length / 2 for length in lengths])
    assert (query[:, None] - allowed[None]).abs().min(1).values.max() < 1e-5
    assert len(query) == sum(len(q) - 1 for q in distinct_queries([rows_of(batch)]))
