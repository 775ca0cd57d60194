"""`query_weight_source="policy"`: weights from the policy's own NLL of the optimizer step's queries, exact however it is cut."""

import copy
import math

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    assert_same_run,
    byte_tokenizer,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    keep_raw_advantages,
    logged,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    policy_loss,
    prompt_ids,
    prompts_dataset,
    reference_of,
    rows_of,
    tiny_model,
    token_logps,
)

from erpo_trl import ERPORLOOTrainer
from erpo_trl.query.policy_weights import step_weights, weights_of_rows
from erpo_trl.query.weights import WeightRule

ALPHA = 0.3
# Four prompts of unequal length, two responses each: eight rows an optimizer step in whatever cut
CUTS = [{"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}]  # fmt: skip


@pytest.fixture(autouse=True)
def raw_advantages(monkeypatch):
    keep_raw_advantages(monkeypatch)


def run(tmp_path, model, **fields):
    settings = {"preset": "release", "query_kl_coef": ALPHA, "learning_rate": 0.05, "max_steps": 3} | fields
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(UNEQUAL[:4]),
        rollout=fixed_rollouts(),
        **settings,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    return trainer, recorder


def test_release_preset(tmp_path):
    """The right column of the design's table: the policy's likelihood, no clip, k3 on tokens."""
    config = make_config(tmp_path, preset="release")
    assert (config.query_weight_source, config.query_weight) == ("policy", "nll_ratio")
    assert config.query_weight_clip == [0.0, math.inf]
    assert (config.query_kl_estimator, config.query_kl_level, config.query_kl_coef) == ("k3", "token", 1e-2)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut['per_device_train_batch_size']}_rows")
def test_gradient(tmp_path, cut):
    """Float64 autograd with w = s̄_θ/s_θ detached, s̄_θ over the step's distinct queries, of the weights before the step."""
    model = tiny_model("llama")
    trainer, recorder = run(tmp_path, model, **cut)
    reference = reference_of(model, prompt_ids(byte_tokenizer(), UNEQUAL[:4]))
    for step in recorder.done:
        policy = double_copy(model, step.weights)
        batches = [rows_of(batch) for batch in step.batches]
        queries = distinct_queries(batches)
        assert len(queries) == 4
        with torch.no_grad():
            nll = {query: -token_logps(policy, list(query)).sum().item() for query in queries}
        mean = sum(nll.values()) / 4
        loss = policy_loss(policy, batches, lambda query, mean=mean, nll=nll: mean / nll[query], 1.0, "grpo")
        (loss + penalty_of(policy, queries, reference, ALPHA)).backward()
        assert_grads_close(step.grads, policy)


@pytest.mark.parametrize("region", ["ratio_clip", "drpo"])
def test_cuts_agree(tmp_path, region):
    """One, two or four micro-batches: the same weights after three steps, with a trust region and two updates a generation."""
    model = tiny_model("qwen2")
    fields = {"trust_region": region, "num_iterations": 2, "max_steps": 4}
    if region == "drpo":
        fields |= {"trust_region_delta": 0.3, "trust_region_check_rollout": False}
    runs = [run(tmp_path / str(n), model, **fields, **cut)[0] for n, cut in enumerate(CUTS)]
    initial, first = model.state_dict(), runs[0].model.state_dict()
    assert any((first[name] - initial[name]).abs().max() > 1e-3 for name in first)
    for other in runs[1:]:
        for name, value in other.model.state_dict().items():
            torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-6)


def test_the_weights_follow_the_policy(tmp_path):
    """Each step's weights are its own policy's, so that they change from step to step, and their metrics are theirs."""
    model = tiny_model("llama")
    trainer, recorder = run(tmp_path, model, learning_rate=0.3, **CUTS[0])
    lowest = []
    for step, logged_min in zip(recorder.done, logged(trainer, "query/weight_min"), strict=True):
        policy = double_copy(model, step.weights)
        with torch.no_grad():
            nll = [-token_logps(policy, list(q)).sum().item() for q in prompt_ids(byte_tokenizer(), UNEQUAL[:4])]
        assert logged_min == pytest.approx(sum(nll) / 4 / max(nll), rel=1e-4)
        lowest.append(logged_min)
    assert len(set(lowest)) == 3


def test_forwards(tmp_path):
    """One micro-batch a step: no forward beyond TRL's. Several: the distinct prompts once more, and the metric counts them."""
    model = tiny_model("llama")
    tokens = sum(map(len, prompt_ids(byte_tokenizer(), UNEQUAL[:4])))
    for n, (cut, extra) in enumerate(zip(CUTS, (0, tokens, tokens))):
        trainer, recorder = run(tmp_path / str(n), model, **cut)
        assert all(step.forwards == [1] * len(step.batches) for step in recorder.done)
        assert logged(trainer, "query/weight_forward_tokens") == [extra] * 3


def test_uniform_is_trl(tmp_path):
    """α = 0 and uniform weights with the policy as source: TRL's trainer, bit for bit, and no forward for the weights."""
    from trl import GRPOTrainer

    fields = {
        "max_steps": 4,
        "learning_rate": 0.05,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    runs = []
    for cls, more in ((None, {"query_kl_coef": 0.0, "query_weight": "uniform", "query_weight_source": "policy"}),
                      (GRPOTrainer, {})):  # fmt: skip
        model = tiny_model("qwen2")
        initial = copy.deepcopy(model.state_dict())
        trainer = make_trainer(tmp_path / str(len(runs)), model=model, cls=cls, **fields, **more)
        trainer.initial_weights = initial
        trainer.train()
        runs.append(trainer)
    assert_same_run(*runs)
    assert not any("query/weight_forward_tokens" in entry for entry in runs[0].state.log_history)


def test_rloo(tmp_path):
    """RLOO with the policy's weights: the advantages of TRL's batch times s̄_θ/s_θ, in one micro-batch and in two."""
    finals = []
    for n, cut in enumerate(CUTS[:2]):
        model = tiny_model("qwen2")
        trainer = make_trainer(tmp_path / str(n), model=model, cls=ERPORLOOTrainer, dataset=prompts_dataset(UNEQUAL[:4]),
                               rollout=fixed_rollouts(), query_weight_source="policy", learning_rate=0.05, max_steps=2,
                               **cut)  # fmt: skip
        trainer.train()
        assert logged(trainer, "query/weight_max")[0] > 1.1
        finals.append(model.state_dict())
    for name, value in finals[0].items():
        torch.testing.assert_close(value, finals[1][name], rtol=1e-4, atol=1e-6)


def test_lora_weights_read_the_adapter(tmp_path):
    """In a forward of its own, too, the weights are those of the adapted policy, not of its base."""
    finals = []
    for n, cut in enumerate(CUTS[:2]):
        model = lora_model(pretrained=True)
        trainer, _ = run(tmp_path / str(n), model, **cut)
        finals.append({k: v for k, v in trainer.model.state_dict().items() if "lora_" in k})
    for name, value in finals[0].items():
        torch.testing.assert_close(value, finals[1][name], rtol=1e-4, atol=1e-6)


def test_one_token_prompt_weighs_one(tmp_path):
    """Rows without likelihood keep weight 1 and stay out of s̄."""
    dataset = prompts_dataset(["a", *UNEQUAL[:3]])
    for n, cut in enumerate(CUTS[:2]):
        trainer = make_trainer(tmp_path / str(n), dataset=dataset, preset="release", learning_rate=0.0, **cut)
        recorder = Recorder().attach(trainer)
        trainer.train()
        reference = reference_of(tiny_model("qwen2"), prompt_ids(byte_tokenizer(), UNEQUAL[:3]))
        nll = sorted(-logps.sum().item() for logps in reference.values())
        expected = sorted([1.0, *(sum(nll) / 3 / s for s in nll)])
        assert logged(trainer, "query/weight_max")[0] == pytest.approx(expected[-1], rel=1e-4)
        assert logged(trainer, "query/weight_mean")[0] == pytest.approx(sum(expected) / 4, rel=1e-4)
        assert len(recorder.done) == 1


def test_a_step_without_any_likelihood(tmp_path):
    """Prompts of one token alone: every scheme leaves them at weight 1, in one micro-batch and in two."""
    for n, cut in enumerate(CUTS[:2]):
        fields = {"query_weight": "softmax", "query_weight_source": "policy", "max_steps": 2}
        trainer = make_trainer(tmp_path / str(n), dataset=prompts_dataset(["a", "b", "c", "d"]), **fields, **cut)
        trainer.train()
        assert logged(trainer, "query/weight_min") == logged(trainer, "query/weight_max") == [1.0, 1.0]


def test_evaluation(tmp_path):
    """An evaluation batch is weighted by the policy as well, in its own forward."""
    trainer = make_trainer(
        tmp_path, dataset=prompts_dataset(UNEQUAL[:4]), rollout=fixed_rollouts(), preset="release", learning_rate=0.0,
        trainer_kwargs={"eval_dataset": prompts_dataset(UNEQUAL[4:6])}, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    reference = reference_of(tiny_model("qwen2"), prompt_ids(byte_tokenizer(), UNEQUAL[4:6]))
    nll = [-logps.sum().item() for logps in reference.values()]
    assert metrics["eval_query/weight_max"] == pytest.approx(sum(nll) / 2 / min(nll), rel=1e-4)


def test_step_weights_of_rows():
    """NLL 3 and 6 weigh 1.5 and 0.75 whatever their rows; a row that is not among the queries weighs 1."""
    import numpy as np

    keys, nll = np.array([7, 4, 7]), np.array([3.0, 6.0, 3.0])
    distinct, weights = step_weights(keys, nll, np.ones(3), WeightRule(clip=(0.0, math.inf)))
    assert distinct.tolist() == [4, 7] and weights.tolist() == [0.75, 1.5]
    assert weights_of_rows(np.array([7, 9, 4, 1]), distinct, weights).tolist() == [1.5, 1.0, 0.75, 1.0]
    assert weights_of_rows(np.array([7]), np.array([], dtype=np.int64), np.array([])).tolist() == [1.0]


@pytest.mark.parametrize("source, of", [("reference", "training set"), ("policy", "queries of a step")])
def test_a_small_effective_sample_size_is_named(tmp_path, caplog, source, of):
    """`snis` leaves nearly one query of four: said once, with what to do."""
    fields = {"query_weight": "snis", "query_weight_clip": [0.0, math.inf], "query_weight_source": source}
    trainer, _ = run(tmp_path, tiny_model("llama"), **fields, **CUTS[0])
    found = [
        r.getMessage()
        for r in caplog.records
        if "effective sample size" in r.getMessage() and r.levelname == "WARNING"
    ]
    assert len(found) == 1
    assert f"of the {of}" in found[0] and "query_weight='snis'" in found[0] and "query_weight_floor" in found[0]
    assert logged(trainer, "query/weight_ess")[0] < 0.5
