"""The logged numbers against values recomputed from the rows, masks and empty rows, and the terms that stand beside the
penalty: router loss, Policy-KL, entropy bonus. At the end, what is refused.
"""

import copy
import math

import pytest
import torch
from datasets import Dataset
from helpers import (
    UNEQUAL,
    Recorder,
    byte_tokenizer,
    captured_warnings,
    chat,
    checksum_reward,
    constant_reward,
    distinct_queries,
    double_copy,
    fixed_completion,
    fixed_rollouts,
    logged,
    lora_config,
    make_config,
    make_trainer,
    prompt_token_ids,
    prompts_dataset,
    rows_of,
    shift_reference,
    tiny_model,
    token_logps,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from erpo_trl import DatasetMapper, ERPORLOOTrainer, ERPOTrainer
from erpo_trl.demo import MODEL_DIR

# ------------------------------------------------------------------------------------------------------------------ metrics
LAYOUTS = {
    "one_step": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "part_of_a_generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_each_step(tmp_path, raw_advantages, layout):
    """Every query metric of every step from plain float64 logits of the policy and of the start."""
    model = tiny_model("qwen2")
    start = double_copy(model)
    prompts = [*UNEQUAL[:6], "x", "y"]  # two prompts without likelihood
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=prompts_dataset(prompts),
        learning_rate=5e-2,
        query_kl_coef=0.2,
        max_steps=4,
        **LAYOUTS[layout],
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    tokenizer = byte_tokenizer()
    nll = {}
    for prompt in UNEQUAL[:6]:
        ids = tuple(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            nll[ids] = -token_logps(start, list(ids)).sum().item()
    mean = sum(nll.values()) / 6
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == len(recorder.done) == 4
    unscored_seen = 0
    for step, entry in zip(recorder.done, logs):
        policy = double_copy(model, step.weights)
        queries = distinct_queries([rows_of(batch) for batch in step.batches])
        scored = [q for q in queries if len(q) > 1]
        unscored_seen += len(queries) - len(scored)
        if not scored:
            assert entry.get("query/kl") in (None, 0.0)
            continue
        drifts, now = [], []
        for query in scored:
            with torch.no_grad():
                logps = token_logps(policy, list(query))
                x = token_logps(start, list(query)) - logps
            drifts.append((x.exp() - x - 1).mean().item())
            now.append(-logps.sum().item())
        kl = sum(drifts) / len(drifts)
        assert entry["query/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-9)
        assert entry["query/kl_max"] == pytest.approx(max(drifts), rel=1e-3, abs=1e-9)
        assert entry["query/loss"] == pytest.approx(0.2 * kl, rel=1e-3, abs=1e-9)
        assert entry["query/alpha"] == pytest.approx(0.2)
        assert entry["query/nll"] == pytest.approx(sum(now) / len(now), rel=1e-4)
        drift = sum(n - nll[q] for n, q in zip(now, scored)) / len(scored)
        assert entry["query/nll_drift"] == pytest.approx(drift, rel=1e-2, abs=1e-3)
        rows = [tuple(row["prompt"]) for batch in step.batches for row in rows_of(batch)]
        weights = [min(mean / nll[q], 2.0) if q in nll else 1.0 for q in rows]
        assert entry["query/weight_min"] == pytest.approx(min(weights), rel=1e-4)
        assert entry["query/weight_max"] == pytest.approx(max(weights), rel=1e-4)
        by_row = sum(weights) / len(weights)
        distinct = [min(mean / nll[q], 2.0) if q in nll else 1.0 for q in queries]
        by_query = sum(distinct) / len(distinct)
        assert entry["query/weight_mean"] == pytest.approx(by_row, rel=1e-4) or entry[
            "query/weight_mean"
        ] == pytest.approx(by_query, rel=1e-4)
        unscored_rows = sum(1 for q in rows if len(q) == 1)
        assert entry["query/unscored_rows"] in (
            unscored_rows,
            unscored_rows / len(step.batches),
            len(queries) - len(scored),
        )
        assert (entry["query/unscored_rows"] == 0) == (unscored_rows == 0)
    assert unscored_seen > 0, "a step with a one-token prompt was meant to occur"


def test_effective_sample_size(tmp_path):
    """Weights 1.5 and 0.75, equally often: (sum w)^2 / sum w^2 is 0.9 of the number of rows or queries."""
    model = tiny_model("qwen2")
    config = make_config(tmp_path)
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), config)(prompts_dataset(UNEQUAL[:2]))
    trainer = make_trainer(tmp_path, model=model, dataset=data, per_device_train_batch_size=4)
    trainer.train()
    first, second = data["query_weight"]
    fraction = (first + second) ** 2 / (first**2 + second**2) / 2
    assert fraction < 0.999
    found = logged(trainer, "query/weight_ess")[0]
    assert any(found == pytest.approx(fraction * size, rel=1e-4) for size in (1, 2, 4))


def test_uniform_weights_have_full_size(tmp_path):
    """All weights 1: mean, min and max are 1, and the effective size is that of the step."""
    trainer = make_trainer(tmp_path, query_weight="uniform", max_steps=2)
    trainer.train()
    for name in ("query/weight_mean", "query/weight_min", "query/weight_max"):
        assert logged(trainer, name) == [1.0, 1.0]
    ess = logged(trainer, "query/weight_ess")
    assert ess[0] == ess[1] and ess[0] in (1.0, 2.0, 4.0)


def test_metrics_over_several_steps_per_log(tmp_path):
    """With logging_steps = 2 an entry is the mean of its two steps."""
    entries = []
    for every in (1, 2):
        trainer = make_trainer(
            tmp_path / str(every), rollout=fixed_rollouts(), learning_rate=5e-2, max_steps=4, logging_steps=every
        )
        trainer.train()
        entries.append((logged(trainer, "query/kl"), logged(trainer, "query/nll")))
    for single, paired in zip(*entries):
        assert paired == pytest.approx([(single[0] + single[1]) / 2, (single[2] + single[3]) / 2], rel=1e-5)


def test_alpha_zero_still_measures(tmp_path):
    """alpha = 0 measures the drift without holding it: the metric is that of the policy, the penalty 0."""
    trainer = make_trainer(tmp_path, query_kl_coef=0.0, learning_rate=0.1, max_steps=2)
    trainer.train()
    assert logged(trainer, "query/kl")[1] > 1e-5
    assert logged(trainer, "query/loss") == [0.0, 0.0]
    assert logged(trainer, "query/alpha") == [0.0, 0.0]


def test_the_penalty_holds_the_drift(tmp_path):
    """A reference one nat away and no reward signal: following the penalty moves the policy towards the reference."""
    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset(UNEQUAL[:2]))
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shift_reference(data, 1.0),
        reward=constant_reward,
        query_kl_coef=1.0,
        learning_rate=2e-2,
        max_steps=10,
    )
    trainer.train()
    drift = logged(trainer, "query/kl")
    assert drift[0] == pytest.approx(math.e - 2, abs=1e-4)
    assert drift[-1] < 0.3 * drift[0]


def test_evaluation_metrics(tmp_path):
    """`eval_query/kl` is the mean drift of the evaluation prompts, measured without a training step or an owner."""
    model = tiny_model("qwen2")
    start = double_copy(model)
    prompts = ["3*3=", "what is left of 9-8?", "z", "12/4="]
    trainer = make_trainer(
        tmp_path,
        model=model,
        learning_rate=0.1,
        max_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=2,
        query_kl_coef=0.2,
        trainer_kwargs={"eval_dataset": prompts_dataset(prompts)},
    )
    trainer.train()
    now = double_copy(trainer.model)
    drifts = []
    for prompt in prompts:
        ids = byte_tokenizer()(prompt)["input_ids"]
        if len(ids) > 1:
            with torch.no_grad():
                x = token_logps(start, ids) - token_logps(now, ids)
            drifts.append((x.exp() - x - 1).mean().item())
    (found,) = logged(trainer, "eval_query/kl")
    assert found == pytest.approx(sum(drifts) / 3, rel=1e-3)
    assert logged(trainer, "eval_query/kl_max")[0] == pytest.approx(max(drifts), rel=1e-3)
    assert len(logged(trainer, "query/kl")) == 2  # evaluation does not leak into the training entries


def test_evaluation_over_several_batches(tmp_path):
    """Batches of evaluation hold different prompts: the mean runs over prompts, and training continues unharmed."""
    model = tiny_model("qwen2")
    shifts = [0.2, 0.4, 0.6, 0.8]
    mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))
    data = shift_reference(mapper(prompts_dataset(["1+1=", "2+2=", "3+3=", "4+4="])), lambda i: shifts[i])
    trainer = make_trainer(
        tmp_path, model=model, per_device_eval_batch_size=4, max_steps=3, trainer_kwargs={"eval_dataset": data}
    )
    found = trainer.evaluate()["eval_query/kl"]
    assert found == pytest.approx(sum(math.exp(x) - x - 1 for x in shifts) / 4, rel=1e-4)
    trainer.train()
    assert trainer.state.global_step == 3 and logged(trainer, "query/kl")[0] < 1e-9


def test_several_evaluation_sets(tmp_path):
    """A dictionary of evaluation sets: each is scored and logged under its own name."""
    sets = {"easy": prompts_dataset(["1+1=", "2+2="]), "hard": prompts_dataset(["123*456=?", "what is 99*98?"])}
    trainer = make_trainer(
        tmp_path,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        learning_rate=0.1,
        trainer_kwargs={"eval_dataset": sets},
    )
    trainer.train()
    entries = [e for e in trainer.state.log_history if "eval_query/kl" in e]
    assert len(entries) == 2
    assert entries[0]["eval_query/nll"] < entries[1]["eval_query/nll"]
    assert all(e["eval_query/kl"] > 0 for e in entries)


def test_a_prediction_is_no_part_of_the_next_evaluation(tmp_path):
    few, many = prompts_dataset(["1+1=", "2+2="]), prompts_dataset(["123*456=?", "what is 99*98?"])
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4, trainer_kwargs={"eval_dataset": few})
    before = trainer.evaluate()
    trainer.predict(many)
    after = trainer.evaluate()
    assert after["eval_query/nll"] == before["eval_query/nll"]


def test_a_plain_evaluation_stream_beside_a_mapped_training_stream(tmp_path):
    """What to do is another thing there: the population is that of whoever mapped it."""
    mapped = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
    stream = prompts_dataset(["1+1=", "2+2="]).to_iterable_dataset()
    trainer = make_trainer(tmp_path, dataset=mapped.to_iterable_dataset(), trainer_kwargs={"eval_dataset": stream})
    with pytest.raises(ValueError, match="map the evaluation data relative to it, as a map-style data set"):
        trainer.train()


def test_an_evaluation_stream_beside_scored_data_is_refused(tmp_path):
    """Before the first step, with what to do; with rows that are scored as they arrive it is taken."""
    stream = prompts_dataset(["1+1=", "2+2="]).to_iterable_dataset()
    trainer = make_trainer(tmp_path, trainer_kwargs={"eval_dataset": {"held": stream}})
    with pytest.raises(ValueError, match="evaluation data is a stream .* or set reference_sample_size"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match="evaluation data is a stream"):
        make_trainer(tmp_path).evaluate(stream)


@pytest.mark.parametrize("length, said", [(8, True), (100, False)])
def test_rotary_positions_that_batches_change_are_said(tmp_path, caplog, length, said):
    """Prompts of at most 10 tokens with completions of 6, against a length up to which `longrope` is one set of frequencies."""
    model = tiny_model("llama")
    half = model.config.hidden_size // model.config.num_attention_heads // 2
    model.config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * half, "long_factor": [2.0] * half,
        "original_max_position_embeddings": length,
    }  # fmt: skip
    with captured_warnings(caplog):
        make_trainer(tmp_path, model=model, max_prompt_length=10)
    assert (f"rotary positions (longrope) change in a batch of more than {length} tokens" in caplog.text) is said


def test_noise_on_embeddings_is_said(tmp_path, caplog):
    with captured_warnings(caplog):
        make_trainer(tmp_path, neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha=5 puts noise on the embeddings" in caplog.text


def test_an_adapter_of_transformers_own_is_refused(tmp_path, monkeypatch):
    """Its weights stand in the model under no wrapper that could turn them off."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
    model = tiny_model("llama")
    model.add_adapter(lora_config())
    with pytest.raises(ValueError, match="adapter of transformers' own .* give peft_config to the trainer"):
        make_trainer(tmp_path, model=model)
    with pytest.raises(ValueError, match="adapter of transformers' own"):
        DatasetMapper(model, byte_tokenizer(), make_config(tmp_path))


# -------------------------------------------------------------------------------------------------------------------- masks
def never_ending(prompts, trainer):
    """Completions without an end: `mask_truncated_completions` masks every one of them."""
    ids = prompt_token_ids(prompts, trainer)
    return {"prompt_ids": ids, "completion_ids": [[9, 10, 11]] * len(ids), "logprobs": [[-1.0] * 3] * len(ids)}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_all_completions_masked(tmp_path, loss_type):
    """No completion token left: the loss is the penalty alone, finite, and backward reaches the parameters."""
    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
    gradients = []
    for coefficient in (0.5, 0.0):
        trainer = make_trainer(
            tmp_path,
            model=copy.deepcopy(model),
            dataset=shift_reference(data, 1.0),
            rollout=never_ending,
            mask_truncated_completions=True,
            loss_type=loss_type,
            query_kl_coef=coefficient,
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        (step,) = recorder.done
        assert all((batch["completion_mask"] == 0).all() for batch in step.batches)
        assert sum(step.losses) == pytest.approx(coefficient * (math.e - 2), abs=1e-5)
        assert logged(trainer, "query/kl")[0] == pytest.approx(math.e - 2, abs=1e-5)
        gradients.append(max(g.abs().max().item() for g in step.grads.values()))
    assert math.isfinite(gradients[0]) and gradients[0] > 1e-3
    assert gradients[1] == 0.0


def test_some_completions_masked(tmp_path, raw_advantages):
    """Masked rows leave the policy term, but their query is still held: the penalty is that of all distinct queries."""
    tokenizer = byte_tokenizer()
    cut = {tuple(tokenizer(p)["input_ids"]) for p in UNEQUAL[:4]}

    def rollout(prompts, trainer):
        ids = prompt_token_ids(prompts, trainer)
        completions = [[9, 10, 11 + i] if tuple(row) in cut else fixed_completion(row, i) for i, row in enumerate(ids)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * len(c) for c in completions]}

    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), tokenizer, make_config(tmp_path))(prompts_dataset())
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shift_reference(data, lambda i: (i + 1) / 10),
        rollout=rollout,
        mask_truncated_completions=True,
        per_device_train_batch_size=16,
    )
    trainer.train()
    expected = [math.exp(x) - x - 1 for x in [(i + 1) / 10 for i in range(8)]]
    assert logged(trainer, "query/kl")[0] == pytest.approx(sum(expected) / 8, rel=1e-4)
    assert math.isfinite(logged(trainer, "loss")[0])


def test_empty_completions(tmp_path, monkeypatch):
    """A completion of no tokens, as the loss sees it when everything after the prompt is masked out, beside a normal row."""
    inner = GRPOTrainer._generate_and_score_completions

    def generate(self, inputs):
        output = inner(self, inputs)
        output["completion_mask"] = output["completion_mask"].clone()
        output["completion_mask"][::2] = 0
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", generate)
    trainer = make_trainer(tmp_path, query_kl_coef=0.5, max_steps=2, gradient_accumulation_steps=2)
    recorder = Recorder().attach(trainer)
    trainer.train()
    for step in recorder.done:
        assert all(math.isfinite(loss) for loss in step.losses)
        assert all(torch.isfinite(g).all() for g in step.grads.values())
    assert all(math.isfinite(value) for value in logged(trainer, "query/kl"))


def test_tool_tokens_are_masked_and_queries_are_not(tmp_path, raw_advantages):
    """An `env_mask` takes tokens of the environment out of the policy term; the query's tokens are all scored."""
    base = fixed_rollouts(lengths=(4, 5))

    def rollout(prompts, trainer):
        output = base(prompts, trainer)
        output["env_mask"] = [[1, 0] + [1] * (len(c) - 2) for c in output["completion_ids"]]
        return output

    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
    trainer = make_trainer(tmp_path, model=model, dataset=shift_reference(data, -1.0), rollout=rollout)
    trainer.train()
    assert logged(trainer, "query/kl")[0] == pytest.approx(1 / math.e, abs=1e-5)


def test_only_one_token_prompts(tmp_path):
    """No query of the run has a likelihood: it trains as GRPO does, and says how many rows were not scored."""
    trainer = make_trainer(tmp_path, dataset=prompts_dataset(list("abcdefgh")), query_kl_coef=0.5, max_steps=2)
    recorder = Recorder().attach(trainer)
    trainer.train()
    assert all(value > 0 for value in logged(trainer, "query/unscored_rows"))
    assert logged(trainer, "query/loss") in ([0.0, 0.0], [None, None], [])
    for step in recorder.done:
        assert max(g.abs().max().item() for g in step.grads.values()) > 0


# ------------------------------------------------------------------------------------------------------ beside the penalty
def moe_run(tmp_path, erpo: dict | None, accumulation: int, coefficient):
    settings = {
        "rollout": fixed_rollouts(),
        "reward": constant_reward,
        "per_device_train_batch_size": 16 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "router_aux_loss_coef": coefficient,
        "learning_rate": 0.0,
    }
    cls = GRPOTrainer if erpo is None else ERPOTrainer
    trainer = make_trainer(tmp_path, model=tiny_model("qwen2_moe"), cls=cls, **settings, **(erpo or {}))
    recorder = Recorder().attach(trainer)
    trainer.train()
    return trainer, sum(recorder.done[0].losses), recorder.done[0].forwards


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("coefficient", [None, 0.0, 0.001, 0.5])
def test_router_loss_is_added_once(tmp_path, accumulation, coefficient):
    """With equal rewards and no drift the loss is the router term alone: coefficient times TRL's mean aux loss, once,
    whether the penalty is on or off, whatever the weights and the accumulation.
    """
    theirs, reference, _ = moe_run(tmp_path / "grpo", None, accumulation, coefficient)
    for i, erpo in enumerate([{"query_kl_coef": 0.0}, {"query_kl_coef": 0.7}, {"query_weight": "uniform"}]):
        ours, loss, forwards = moe_run(tmp_path / str(i), erpo, accumulation, coefficient)
        assert loss == pytest.approx(reference, abs=1e-6)
        assert forwards == [1] * accumulation
        assert logged(ours, "aux_loss") == pytest.approx(logged(theirs, "aux_loss"), rel=1e-6)
    used = {None: 0.001}.get(coefficient, coefficient)
    if used:
        assert reference == pytest.approx(used * logged(theirs, "aux_loss")[0], abs=1e-6)
        assert logged(theirs, "aux_loss")[0] > 0.5
    else:
        assert reference == pytest.approx(0.0, abs=1e-6) and logged(ours, "aux_loss") == []


def test_policy_kl_beside_the_penalty(tmp_path):
    """beta > 0 and alpha > 0: the loss is the sum of both; neither is scaled by the other's coefficient or by weights."""
    path = str(tmp_path / "start")
    tiny_model("qwen2").save_pretrained(path)
    losses = {}
    for beta, alpha in [(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)]:
        model = tiny_model("qwen2").from_pretrained(path, attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
        with torch.no_grad():  # the policy has moved; the reference columns and TRL's reference model have not
            for parameter in model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        # Columns are accepted where they belong to the run's reference, so move them rather than the model
        here = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
        logps = list(data["ref_query_logps"])
        moved = here.remove_columns("ref_query_logps").add_column(
            "ref_query_logps", logps, feature=here.features["ref_query_logps"]
        )
        trainer = make_trainer(
            tmp_path,
            model=model,
            dataset=moved,
            rollout=fixed_rollouts(),
            reward=constant_reward,
            per_device_train_batch_size=16,
            beta=beta,
            query_kl_coef=alpha,
            query_weight="nll_ratio",
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        losses[beta, alpha] = sum(recorder.done[0].losses)
        if alpha:
            assert logged(trainer, "query/kl")[0] > 1e-3
    assert losses[0.0, 0.0] == pytest.approx(0.0, abs=1e-7)
    assert losses[0.2, 0.0] > 1e-4 and losses[0.0, 0.3] > 1e-4
    assert losses[0.2, 0.3] == pytest.approx(losses[0.2, 0.0] + losses[0.0, 0.3], rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_entropy_bonus_beside_the_penalty(tmp_path, accumulation):
    """The bonus is TRL's, on completion tokens only: it is the same with the penalty on and off."""
    losses = {}
    for coefficient, shift in [(0.0, 0.0), (0.1, 0.0), (0.1, 1.0)]:
        model = tiny_model("qwen2")
        data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
        trainer = make_trainer(
            tmp_path,
            model=model,
            dataset=shift_reference(data, shift),
            rollout=fixed_rollouts(),
            reward=constant_reward,
            per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation,
            entropy_coef=coefficient,
            query_kl_coef=0.5,
            seed=3,
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        losses[coefficient, shift] = sum(recorder.done[0].losses)
        losses["entropy"] = logged(trainer, "entropy")[0]
    assert losses[0.0, 0.0] == pytest.approx(0.0, abs=1e-6)
    assert losses[0.1, 0.0] == pytest.approx(-0.1 * losses["entropy"], rel=0.05)
    assert losses[0.1, 1.0] - losses[0.1, 0.0] == pytest.approx(0.5 * (math.e - 2), abs=1e-5)


def test_weights_multiply_the_policy_term_only(tmp_path, raw_advantages):
    """The penalty of a query is not weighted: with equal rewards the loss is alpha times the plain mean of the drifts."""
    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(prompts_dataset())
    assert max(data["query_weight"]) / min(data["query_weight"]) > 2
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shift_reference(data, lambda i: (i + 1) / 10),
        reward=constant_reward,
        per_device_train_batch_size=16,
        query_kl_coef=0.5,
    )
    recorder = Recorder().attach(trainer)
    trainer.train()
    drifts = [math.exp(x) - x - 1 for x in [(i + 1) / 10 for i in range(8)]]
    assert sum(recorder.done[0].losses) == pytest.approx(0.5 * sum(drifts) / 8, rel=1e-4)


def test_logged_advantages_and_rewards_are_those_of_grpo(tmp_path):
    """Rewards, their spread and completion statistics are those of GRPO: weights act in the loss, not in the reports."""
    logs = []
    for cls in (ERPOTrainer, GRPOTrainer):
        trainer = make_trainer(tmp_path / cls.__name__, cls=cls, rollout=fixed_rollouts(), reward=checksum_reward)
        trainer.train()
        logs.append((trainer.state.log_history[0], list(trainer._logs["advantages"])))
    assert logs[0][1] == pytest.approx(logs[1][1])
    for key in ("reward", "reward_std", "completions/mean_length", "frac_reward_zero_std", "entropy"):
        assert logs[0][0][key] == pytest.approx(logs[1][0][key]), key


def test_reward_functions_see_what_they_see_under_grpo(tmp_path):
    """A reward function may pass its keyword arguments on: the reference's columns must not turn up among them."""
    seen = []
    for cls in (ERPOTrainer, GRPOTrainer):
        names = set()

        def reward(completions, names=names, **kwargs):
            names.update(kwargs)
            return [float(len(c)) for c in completions]

        data = prompts_dataset(UNEQUAL, answer=[str(i) for i in range(8)])
        make_trainer(tmp_path / cls.__name__, cls=cls, dataset=data, reward=reward).train()
        seen.append(names)
    assert "answer" in seen[0]
    assert seen[0] == seen[1]


def test_model_card_names_the_method(tmp_path):
    """The saved card says what the model was trained with: the paper's number and the tags."""
    trainer = make_trainer(tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "2608.23311" in card and "- erpo" in card and "- trl" in card


# ------------------------------------------------------------------------------------------------------------------- refused
def test_environments_are_refused(tmp_path):
    """An environment rewrites the prompt at `reset`: it can't have been scored before. Refused at construction, before
    TRL asks for a tool-calling template that would not help.
    """

    class Environment:
        def reset(self, **kwargs):
            return "an observation"

        def move(self, step: int) -> str:
            """
            Move.

            Args:
                step: how far
            """
            return "moved"

    with pytest.raises(ValueError, match="environment") as error:
        make_trainer(
            tmp_path,
            dataset=Dataset.from_dict({"prompt": [chat("a"), chat("b")]}),
            trainer_kwargs={"environment_factory": Environment},
        )
    assert len(str(error.value).split()) > 6, "a sentence, not a code"


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused(tmp_path, column):
    """A prompt with images is more than its token ids. Refused at construction, by the column's name."""
    data = Dataset.from_dict({"prompt": [chat("a"), chat("b")], column: [["x.png"], ["y.png"]]})
    with pytest.raises(ValueError, match="image"):
        make_trainer(tmp_path, dataset=data)


def test_streaming_data_with_columns(tmp_path, raw_advantages):
    """A stream of mapped rows: groups hold one prompt each and every query meets its own reference."""
    model = tiny_model("qwen2")
    mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))
    data = shift_reference(mapper(prompts_dataset(UNEQUAL[:4])), lambda i: (i + 1) / 5)
    shift_of = {tuple(byte_tokenizer()(p)["input_ids"]): (i + 1) / 5 for i, p in enumerate(UNEQUAL[:4])}
    trainer = make_trainer(tmp_path, model=model, dataset=data.to_iterable_dataset(), max_steps=2, learning_rate=0.0)
    recorder = Recorder().attach(trainer)
    trainer.train()
    for step, found in zip(recorder.done, logged(trainer, "query/kl"), strict=True):
        rows = [tuple(row["prompt"]) for batch in step.batches for row in rows_of(batch)]
        assert sorted(rows.count(q) for q in set(rows)) == [2, 2]
        shifts = [shift_of[q] for q in set(rows)]
        assert found == pytest.approx(sum(math.exp(x) - x - 1 for x in shifts) / 2, abs=1e-5)


def test_a_grpo_config_is_refused(tmp_path):
    """A plain GRPOConfig has no penalty to read: the message names what is needed."""
    settings = {k: v for k, v in make_config(tmp_path, GRPOConfig).to_dict().items() if k in ("output_dir", "use_cpu")}
    with pytest.raises((ValueError, TypeError), match="ERPOConfig"):
        make_trainer(tmp_path, args=GRPOConfig(**settings, bf16=False, report_to="none"))


@pytest.mark.parametrize(
    "field, value",
    [
        ("query_kl_coef", -0.1),
        ("query_kl_coef", float("nan")),
        ("query_kl_estimator", "k4"),
        ("query_kl_level", "word"),
        ("query_weight", "nll"),
        ("query_weight_clip", [2.0, 0.0]),
        ("query_weight_clip", [1.0]),
        ("query_weight_source", "batch"),
        ("query_weight_floor", 1.0),
        ("query_weight_normalize", "yes"),
        ("query_weight_beta", -1.0),
        ("query_kl_target", 0.0),
        ("query_kl_coef_range", [0.0, 1.0]),
        ("query_kl_coef_rate", 0.0),
        ("query_kl_ema", 1.0),
        ("reference_batch_tokens", 0),
        ("max_prompt_length", 0),
        ("preset", "papier"),
    ],
)
def test_bad_fields_name_themselves(tmp_path, field, value):
    """A message names the field and the value found."""
    with pytest.raises(ValueError, match=field) as error:
        make_config(tmp_path, **{field: value})
    shown = value if isinstance(value, str) else str(value)
    assert shown in str(error.value) or repr(value) in str(error.value)


def test_preset_fills_only_what_was_left_unset(tmp_path):
    """`paper` is k3 per token with nll_ratio clipped to [0, 2]; a field that was given stays as given."""
    config = make_config(tmp_path)
    assert config.query_kl_coef == 1e-2 and config.beta == 0.0
    assert (config.query_kl_estimator, config.query_kl_level, config.query_weight) == ("k3", "token", "nll_ratio")
    assert list(config.query_weight_clip) == [0.0, 2.0] and config.query_weight_source == "reference"
    config = make_config(tmp_path, preset="paper", query_kl_estimator="k2", query_weight_clip=[0.5, 3.0])
    assert config.query_kl_estimator == "k2" and list(config.query_weight_clip) == [0.5, 3.0]
    assert config.query_weight == "nll_ratio"


@pytest.mark.parametrize("cls", [ERPOTrainer, ERPORLOOTrainer])
def test_evaluation_under_continuous_batching_stays_one(tmp_path, cls):
    """TRL leaves the model in training mode after each generation: the next batches would be those of the last step."""
    fields = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
    }
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    trainer = make_trainer(
        tmp_path,
        model=model,
        cls=cls,
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        dataset=prompts_dataset(["1+2=", "3+4="]),
        trainer_kwargs={"eval_dataset": prompts_dataset(["5+6=", "7+8=", "9+0="])},
        **fields,
    )
    seen, settle = [], trainer._settle
    trainer._settle = lambda batches: seen.append((trainer.model.training, batches)) or settle(batches)
    trainer.train()
    evaluated = [batch for training, batches in seen if not training for batch in batches]
    decode = trainer.processing_class.batch_decode
    texts = {text for batch in evaluated for text in decode(batch["prompt_ids"], skip_special_tokens=True)}
    assert texts == {"5+6=", "7+8=", "9+0="}
    assert len([log for log in trainer.state.log_history if "eval_query/kl" in log]) == 1
