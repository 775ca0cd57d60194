"""α that follows a target drift, and the hinge: closed forms, a synthetic drift, the trainer, the checkpoint."""

import copy
import math

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    byte_tokenizer,
    captured_warnings,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    k_estimator,
    keep_raw_advantages,
    logged,
    make_config,
    make_trainer,
    policy_loss,
    prompt_ids,
    prompts_dataset,
    reference_of,
    rows_of,
    tiny_model,
    token_logps,
    weights_of,
)

from erpo_trl.query.alpha import AdaptiveAlpha, drift_error, dual_ascent, hinge

WIDE = (1e-6, 1e6)


@pytest.mark.parametrize(
    "drift, factor",
    [(0.0, math.exp(-0.1)), (0.02, 1.0), (0.03, math.exp(0.05)), (0.04, math.exp(0.1)), (50.0, math.exp(0.1))],
)
def test_one_step(drift, factor):
    """log α moves by rate · (R̂/target - 1), at most by the rate: down where there is no drift, not at all on target."""
    assert dual_ascent(0.5, drift_error(drift, 0.02), 0.1, WIDE) == pytest.approx(0.5 * factor)


def test_bounds():
    """Neither end is passed, and α leaves it at once when the drift turns."""
    assert dual_ascent(1.0, 1.0, 0.1, (1e-3, 1.0)) == 1.0
    assert dual_ascent(1e-3, -1.0, 0.1, (1e-3, 1.0)) == 1e-3
    assert dual_ascent(1.0, -1.0, 0.1, (1e-3, 1.0)) == pytest.approx(math.exp(-0.1))
    controller = AdaptiveAlpha(1.0, 0.02, rate=0.1, gain=5.0, bounds=(1e-3, 2.0), decay=0.0)
    assert controller.update(9.0) == 2.0 and controller.multiplier == pytest.approx(math.exp(0.1))


def test_damping():
    """α is the multiplier times e^(gain · error): at three halves of the target e^(0.05 + 1) with rate 0.1 and gain 2."""
    controller = AdaptiveAlpha(1.0, 0.02, rate=0.1, gain=2.0, bounds=WIDE, decay=0.0)
    assert controller.update(0.03) == pytest.approx(math.exp(0.05 + 1.0))
    # Back on target the damping is gone and the multiplier stays
    assert controller.update(0.02) == pytest.approx(math.exp(0.05))


def test_average():
    """The first drift counts whole; then an exponential moving average, corrected for its start."""
    controller = AdaptiveAlpha(1.0, target=0.1, rate=0.1, gain=0.0, bounds=WIDE, decay=0.5)
    assert controller.update(0.1) == 1.0
    # (0.5 · 0.1 + 1 · 0.4) / 1.5 = 0.3, three times the target: clipped to one rate
    assert controller.update(0.4) == pytest.approx(math.exp(0.1))
    # (0.25 · 0.1 + 0.5 · 0.4 + 0) / 1.75
    average = (0.25 * 0.1 + 0.5 * 0.4) / 1.75
    assert controller.update(0.0) == pytest.approx(math.exp(0.1 + 0.1 * min(average / 0.1 - 1, 1)))


def drift_of(alpha: float, drift: float, push: float) -> float:
    """A synthetic run: each step pushes the drift up, the penalty takes it back in proportion to α."""
    return drift + push - 0.3 * alpha * drift


@pytest.mark.parametrize("start", [1e-3, 0.1, 5.0])
def test_step_response(start):
    """From far on either side the drift settles within 25% of the target, and again after the push has tripled."""
    controller, drift, seen = AdaptiveAlpha(start, 0.02, 0.05, 2.0, WIDE, 0.9), 0.0, []
    for step in range(900):
        drift = drift_of(controller.alpha, drift, 0.002 if step < 450 else 0.006)
        controller.update(drift)
        seen.append(drift)
    for window in (seen[350:450], seen[800:]):
        assert max(abs(x / 0.02 - 1) for x in window) < 0.25
    # In balance α · 0.3 · target = push
    assert controller.alpha == pytest.approx(0.006 / (0.3 * 0.02), rel=0.1)


@pytest.mark.parametrize("drift", [math.nan, math.inf])
def test_a_step_that_is_no_number_changes_nothing(drift):
    """A forward that overflows once (fp16 skips such steps) leaves α and its average as they were."""
    hit, spared = (AdaptiveAlpha(0.1, 0.02, 0.05, 2.0, WIDE, 0.9) for _ in range(2))
    assert hit.update(0.03) == spared.update(0.03) == hit.update(drift)
    assert hit.update(0.01) == spared.update(0.01)


def test_resume_goes_on_where_it_stopped():
    """A controller restored from its state gives the same α's as one that was never interrupted."""
    whole = AdaptiveAlpha(0.1, 0.02, 0.05, 2.0, WIDE, 0.9)
    drifts = [0.01 * (1 + math.sin(step)) for step in range(40)]
    for drift in drifts[:20]:
        whole.update(drift)
    resumed = AdaptiveAlpha(0.1, 0.02, 0.05, 2.0, WIDE, 0.9)
    resumed.restore(whole.state())
    assert [whole.update(x) for x in drifts[20:]] == [resumed.update(x) for x in drifts[20:]]


def test_hinge():
    """Below the target nothing, no gradient; above it the excess, with the gradient of R̂."""
    drift = torch.tensor([0.01, 0.02, 0.05], dtype=torch.float64, requires_grad=True)
    value = hinge(drift, 0.02)
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, 0.0, 0.03])
    assert drift.grad[[0, 2]].tolist() == [0.0, 1.0]


SETTINGS = {"query_kl_coef": 0.5, "learning_rate": 0.3, "per_device_train_batch_size": 8}


def run(tmp_path, model, resume=None, **fields):
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(UNEQUAL[:4]),
        rollout=fixed_rollouts(),
        **SETTINGS | fields,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def test_trainer_follows_the_rule(tmp_path):
    """The logged α of each step is the rule applied to the logged drifts before it, the penalty α · R̂."""
    trainer, _ = run(tmp_path, tiny_model("llama"), query_kl_target=1e-3, max_steps=5, query_kl_ema=0.5)
    controller = AdaptiveAlpha(0.5, 1e-3, 0.05, 2.0, (1e-4, 10.0), 0.5)
    drifts, alphas, losses = (logged(trainer, f"query/{name}") for name in ("kl", "alpha", "loss"))
    assert max(drifts) > 1e-3 > min(drifts)
    for drift, alpha, loss in zip(drifts, alphas, losses, strict=True):
        assert loss == pytest.approx(controller.alpha * drift, rel=1e-5)
        assert alpha == pytest.approx(controller.alpha, rel=1e-5)
        controller.update(drift)


def test_trainer_resumes_alpha(tmp_path):
    """After a resume, α and its average go on: the remaining α's and drifts are those of an uninterrupted run."""
    fields = {"query_kl_target": 1e-3, "max_steps": 6}
    whole, _ = run(tmp_path / "whole", tiny_model("llama"), **fields)
    run(tmp_path / "cut", tiny_model("llama"), save_strategy="steps", save_steps=3, **fields)
    checkpoint = str(tmp_path / "cut" / "run" / "checkpoint-3")
    resumed, _ = run(tmp_path / "cut", tiny_model("llama"), resume=checkpoint, **fields)
    for name in ("query/alpha", "query/kl"):
        assert logged(resumed, name)[-3:] == logged(whole, name)[-3:]
    assert len(set(logged(whole, "query/alpha"))) == 6


def test_hinge_gradient(tmp_path, monkeypatch):
    """Float64: α times the mean over queries of max(R̂(q) - target, 0), with queries on both sides of the target."""
    keep_raw_advantages(monkeypatch)
    model, target = tiny_model("llama"), 1e-3
    trainer, recorder = run(tmp_path, model, query_kl_target=target, query_kl_hinge=True, max_steps=4)
    ids = prompt_ids(byte_tokenizer(), UNEQUAL[:4])
    reference = reference_of(model, ids)
    weight = weights_of(reference, ids)
    sides = set()
    for step, loss in zip(recorder.done, logged(trainer, "query/loss"), strict=True):
        policy = double_copy(model, step.weights)
        batches = [rows_of(batch) for batch in step.batches]
        drift = [
            k_estimator(reference[q].double() - token_logps(policy, list(q)), "k3").mean()
            for q in distinct_queries(batches)
        ]
        sides |= {(x > target).item() for x in drift}
        penalty = 0.5 * torch.stack([(x - target).clamp(min=0) for x in drift]).mean()
        assert loss == pytest.approx(penalty.item(), rel=1e-3, abs=1e-7)
        (policy_loss(policy, batches, weight.__getitem__, 1.0, "grpo") + penalty).backward()
        assert_grads_close(step.grads, policy)
    assert sides == {True, False}
    assert set(logged(trainer, "query/alpha")) == {0.5}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"query_kl_hinge": True}, "query_kl_hinge=True needs the drift to start at: set query_kl_target"),
        (
            {"query_kl_target": 0.02, "query_kl_coef": 0.0},
            "query_kl_target needs an α to start from: set query_kl_coef",
        ),
        ({"query_kl_target": 0.02, "query_kl_estimator": "k1"}, "set query_kl_estimator to 'k2' or 'k3'"),
        (
            {"query_kl_target": 0.02, "query_kl_coef": 50.0},
            r"query_kl_coef=50, .*must lie in query_kl_coef_range=\[0.0001, 10",
        ),
    ],
)
def test_refusals(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)


def test_k1_as_a_penalty_is_warned_of(tmp_path, caplog):
    """Its gradient is that of the likelihood, whatever the drift; with k2 and k3, or where it only measures, nothing is said."""
    for fields, said in [
        ({"query_kl_estimator": "k1"}, True),
        ({"query_kl_estimator": "k1", "query_kl_coef": 0}, False),
        ({"query_kl_estimator": "k2"}, False),
    ]:
        caplog.clear()
        with captured_warnings(caplog):
            make_config(tmp_path, **fields)
        assert ("lowers that of the prompts without end" in caplog.text) == said
