"""Trust regions in training: the gradient of an off-policy step is that of the region's objective, aggregation and all."""

import copy
import itertools

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    logged,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    prompts_dataset,
    rows_of,
    tiny_model,
    token_logps,
)
from trl import GRPOTrainer

ALPHA, DELTA, DELTA_KL, EPSILON, CAP, COEF = 0.3, 0.004, 2e-4, 0.5, 1.2, 3.0
# The objectives once more, per token: r, mu, A -> maximised
OBJECTIVES = {
    "none": lambda r, mu, a: r * a,
    "spo": lambda r, mu, a: r * a - a.abs() * (r - 1) ** 2 / (2 * EPSILON),
    "drpo": lambda r, mu, a: r * a - a.abs() * mu * (r - 1) ** 2 / (2 * DELTA),
    "drpo_no_advantage": lambda r, mu, a: r * a - mu * (r - 1) ** 2 / (2 * DELTA),
    # Where rounding alone moved the token, |r - 1| has no slope
    "drpo_tv": lambda r, mu, a: r * a - a.abs() * COEF * torch.where((r - 1).abs() < 1e-5, 0.0, (r - 1).abs()),
    "drpo_kl": lambda r, mu, a: r * a + a.abs() * COEF * r.log(),
    "drpo_k3": lambda r, mu, a: r * a - a.abs() * COEF * (r - 1 - r.log()),
    "dppo_tv": lambda r, mu, a: torch.where(_outside(r, mu, a), 0.0, (CAP / r).clamp(max=1).detach() * r * a),
    "dppo_kl": lambda r, mu, a: torch.where(_outside_kl(r, mu, a), 0.0, (CAP / r).clamp(max=1).detach() * r * a),
    "drpo_mask": lambda r, mu, a: torch.where(
        _outside(r, mu, a), r * a - a.abs() * mu * (r - 1) ** 2 / (2 * DELTA), r * a
    ),
}


def _outside(r, mu, a):
    shift = mu * (r - 1)
    return torch.where(a > 0, shift > DELTA, shift < -DELTA)


def _outside_kl(r, mu, a):
    pi = mu * r
    kl = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return (kl > DELTA_KL) & torch.where(a > 0, pi > mu, pi < mu)


def settings(region, **more):
    base = {
        "trust_region": region,
        "trust_region_delta": DELTA_KL if region == "dppo_kl" else DELTA,
        "trust_region_coef": COEF,
        "trust_region_ratio_cap": CAP,
        "spo_epsilon": EPSILON,
        "query_kl_coef": ALPHA,
        "num_iterations": 2,
        "learning_rate": 0.1,
        "max_steps": 2,
    }
    return base | more


def run(tmp_path, model, region, **more):
    trainer = make_trainer(
        tmp_path, model=copy.deepcopy(model), dataset=prompts_dataset(UNEQUAL), **settings(region, **more)
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    return trainer, recorder


def expected_gradient(model, step, trainer, region):
    """Float64: minus the region's objective under the aggregation, times the query weight, plus α R̂."""
    policy = double_copy(model, step.weights)
    for parameter, template in zip(policy.parameters(), model.parameters()):
        parameter.requires_grad_(template.requires_grad)
        parameter.grad = None
    batches = [rows_of(batch) for batch in step.batches]
    reference_model = double_copy(model)
    with torch.no_grad():
        reference = {q: token_logps(reference_model, list(q)) for q in distinct_queries(batches)}
    weight = {
        tuple(row["prompt"]): w for rows, b in zip(batches, step.batches) for row, w in zip(rows, b["query_weight"])
    }
    total = 0.0
    for rows in batches:
        sums, counts = [], []
        for row in rows:
            logps = token_logps(policy, row["prompt"] + row["completion"])[len(row["prompt"]) - 1 :]
            mu = row["old"].exp()
            advantage = torch.tensor(row["advantage"], dtype=torch.float64)
            value = OBJECTIVES[region]((logps - row["old"]).exp(), mu, advantage)
            sums.append(-value.sum() * weight[tuple(row["prompt"])].double())
            counts.append(len(row["completion"]))
        if trainer.loss_type == "grpo":
            part = sum(s / c for s, c in zip(sums, counts)) / len(rows)
        elif trainer.loss_type == "dr_grpo":
            part = sum(sums) / (len(rows) * trainer.max_completion_length)
        elif trainer.loss_type == "bnpo":
            part = sum(sums) / sum(counts)
        elif trainer.loss_type == "luspo":
            part = sum(sums) / len(rows)
        else:  # dapo and cispo: tokens of the step
            part = sum(sums) / sum(len(row["completion"]) for batch in batches for row in batch) * len(batches)
        total = total + part / len(batches)
    (total + penalty_of(policy, distinct_queries(batches), reference, ALPHA)).backward()
    return policy


@pytest.mark.parametrize("region", OBJECTIVES)
def test_off_policy_gradient(tmp_path, raw_advantages, region):
    """In the second iteration π ≠ μ; query weights and Query-KL act beside the region."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, region)
    assert logged(trainer, "trust_region/shift_max")[1] > 1e-3
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, region), rel=3e-4)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "bnpo", "dapo", "cispo", "luspo"])
def test_every_aggregation(tmp_path, raw_advantages, loss_type):
    """`loss_type` only says how tokens are summed; cispo's own truncation does not act."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo", loss_type=loss_type)
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)


def test_accumulation(tmp_path, raw_advantages):
    """Two micro-batches make the step; the region acts token by token in each."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo", gradient_accumulation_steps=2, steps_per_generation=4)
    for step in recorder.done:
        assert len(step.batches) == 2
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)


def test_lora(tmp_path, raw_advantages):
    """The same with only an adapter trained."""
    model = lora_model(pretrained=True)
    trainer, recorder = run(tmp_path, model, "dppo_tv", learning_rate=2.0)
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "dppo_tv"), rel=3e-4)


def test_every_pair_of_regions_differs(tmp_path, monkeypatch):
    """On the same off-policy step no two regions have the same gradient, nor any that of TRL's clip."""
    inner = GRPOTrainer._generate_and_score_completions

    def shifted(self, inputs):
        # μ is not π in the first step already, so that all regions see the same batch
        batch = inner(self, inputs)
        old = batch["old_per_token_logps"]
        sign = torch.where(torch.arange(old.shape[1]) % 2 == 0, 1.0, -1.0)
        batch["old_per_token_logps"] = (old + 0.6 * sign).clamp(max=-1e-3)
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", shifted)
    grads = {}
    for region in ("ratio_clip", *OBJECTIVES):
        _, recorder = run(tmp_path / region, tiny_model("qwen2"), region, max_steps=1)
        grads[region] = torch.cat([g.flatten() for g in recorder.done[0].grads.values()])
    for one, other in itertools.combinations(grads, 2):
        scale = max(grads[one].abs().max(), grads[other].abs().max())
        assert (grads[one] - grads[other]).abs().max() > 1e-3 * scale, (one, other)


def test_wide_drpo_is_none(tmp_path):
    """δ → ∞: the region vanishes."""
    model = tiny_model("qwen2")
    wide, none = (
        run(tmp_path / name, model, name, trust_region_delta=delta)[1].done[-1].grads
        for name, delta in (("drpo", 1e9), ("none", None))
    )
    for name in none:
        torch.testing.assert_close(wide[name], none[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("region", ["spo", "drpo", "dppo_tv"])
def test_on_policy_is_refused(tmp_path, region):
    """With one update per generation r = 1 whatever the region: the user should hear it, with what to set."""
    with pytest.raises(ValueError, match="policy has not moved.*num_iterations.*steps_per_generation.*use_vllm"):
        make_trainer(tmp_path, **settings(region, num_iterations=1))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"trust_region": "dppo"}, "trust_region must be one of 'ratio_clip', 'none', 'spo'.* found 'dppo'"),
        ({"trust_region": "drpo"}, "needs its radius: set trust_region_delta"),
        ({"trust_region": "drpo", "trust_region_delta": -1}, "trust_region_delta must be > 0, found -1"),
        ({"trust_region": "spo", "spo_epsilon": 0}, "spo_epsilon must be > 0, found 0"),
        ({"trust_region": "spo", "loss_type": "sapo"}, "loss_type='sapo' is itself a trust region"),
        ({"trust_region": "spo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        ({"trust_region": "spo", "delta": 2.0}, "delta clips TRL's ratio"),
        ({"trust_region": "spo", "beta": 0.1}, "use_bias_correction_kl multiplies the Policy-KL"),
    ],
)
def test_bad_settings_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)


def test_radius_out_of_reach_is_said(tmp_path, monkeypatch):
    """δ >= 1 is allowed, as the authors run it, with a sentence."""
    said = []
    monkeypatch.setattr("erpo_trl.policy.mixin.logger.warning", said.append)
    make_trainer(tmp_path, **settings("drpo", trust_region_delta=12.5))
    assert any("12.5" in text and "out of reach" in text for text in said)


def test_metrics(tmp_path, raw_advantages):
    """Against the same quantities from plain logits."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo")
    step = recorder.done[1]
    policy = double_copy(model, step.weights)
    shifts, ratios, weights = [], [], []
    for batch in step.batches:
        for row in rows_of(batch):
            with torch.no_grad():
                logps = token_logps(policy, row["prompt"] + row["completion"])[len(row["prompt"]) - 1 :]
            shift = logps.exp() - row["old"].exp()
            shifts += shift.abs().tolist()
            ratios += (logps - row["old"]).exp().tolist()
            sign = 0.0 if row["advantage"] == 0 else 1.0 if row["advantage"] > 0 else -1.0
            weights += (1 - sign * shift / DELTA).tolist()
    entry = [e for e in trainer.state.log_history if "trust_region/shift_mean" in e][1]
    found = {
        name.removeprefix("trust_region/"): value for name, value in entry.items() if name.startswith("trust_region/")
    }
    n = len(shifts)
    assert found["shift_mean"] == pytest.approx(sum(shifts) / n, rel=1e-3)
    assert found["shift_max"] == pytest.approx(max(shifts), rel=1e-3)
    assert found["ratio_max"] == pytest.approx(max(ratios), rel=1e-3)
    assert found["violation_rate"] == pytest.approx(sum(s > DELTA for s in shifts) / n)
    assert found["weight_mean"] == pytest.approx(sum(weights) / n, rel=1e-3)
    assert found["weight_min"] == pytest.approx(min(weights), rel=1e-2, abs=1e-3)
    assert found["weight_max"] == pytest.approx(max(weights), rel=1e-2)
    assert found["corrective_rate"] == pytest.approx(sum(w < 0 for w in weights) / n)
    ordered = sorted(shifts)
    assert found["shift_p99"] == pytest.approx(ordered[min(n - 1, int(0.99 * n))], abs=2e-3)


def test_rollout_log_probs_are_the_behaviour_policy(tmp_path, raw_advantages):
    """A rollout's log-probs are μ, with one update per generation too."""
    model = tiny_model("qwen2")
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(UNEQUAL),
        rollout=fixed_rollouts(),  # says log μ = -1 on every token
        **settings("drpo", num_iterations=1, max_steps=1),
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    [step] = recorder.done
    for batch in step.batches:
        batch["old_per_token_logps"] = torch.full(batch["completion_ids"].shape, -1.0)
    assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)
