"""ERPO on DPO: TRL's DPOTrainer bit for bit with both terms off, the printed objective with both on.

With Δ = β [log π(c)/π_ref(c) - log π(r)/π_ref(r)] of a pair, L_DPO = -log σ(Δ), a mean over pairs; the penalty is
α · mean of R̂ over the distinct prompts of the optimizer step.
"""

import copy
import json

import pytest
import torch
from datasets import Dataset
from helpers import (
    TEMPLATE,
    UNEQUAL,
    Recorder,
    assert_grads_close,
    assert_same_run,
    byte_tokenizer,
    chat,
    count_forwards,
    double_copy,
    logged,
    lora_config,
    lora_model,
    penalty_of,
    prompt_ids,
    reference_of,
    shift_reference,
    tiny_model,
    token_logps,
    weights_of,
)
from launching import SCRIPTS, finish, torchrun
from preference_helpers import CHOSEN, REJECTED, distinct_of, pairs, pairs_of
from preference_helpers import make_preference_config as make_config
from preference_helpers import make_preference_trainer as build
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from erpo_trl import DatasetMapper, ERPOConfig, ERPODPOTrainer, ReferenceUnavailableError, cli, load_preferences
from erpo_trl.report.query_log import read_queries
from erpo_trl.train import make_trainer as trainer_of
from erpo_trl.train import parse

ALPHA, BETA = 0.3, 0.1
NOTHING = {"query_kl_coef": 0.0, "query_weight": "uniform"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
USER = [{"role": "user", "content": "1+1="}]


# ------------------------------------------------------------------------------------------------- nothing, bit for bit
CASES = {
    "sigmoid_accumulated": {"gradient_accumulation_steps": 2},
    "hinge": {"loss_type": ["hinge"]},
    "ipo": {"loss_type": ["ipo"]},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "bco_pair": {"loss_type": ["bco_pair"], "gradient_checkpointing": True},
    "aot": {"loss_type": ["aot"], "per_device_train_batch_size": 4},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "length_desensitized": {"ld_alpha": 0.5},
    "wpo": {"use_weighting": True},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "precomputed": {"precompute_ref_log_probs": True},
    "truncated": {"max_length": 16, "pad_to_multiple_of": 8},
    "adamw_clipped": {"optim": "adamw_torch", "max_grad_norm": 0.1, "learning_rate": 1e-3},
}


def both(tmp_path, model, trainer_kwargs=None, **settings):
    """Ours with nothing on and TRL's, after four steps and an evaluation of each."""
    runs = []
    for cls in (ERPODPOTrainer, DPOTrainer):
        kwargs = {"eval_dataset": pairs(UNEQUAL[:3]), **(trainer_kwargs or {})}
        if settings.get("precompute_ref_log_probs"):
            kwargs["ref_model"] = None
        trainer = build(
            tmp_path / cls.__name__,
            cls,
            copy.deepcopy(model),
            trainer_kwargs=kwargs,
            **{"max_steps": 4, **(NOTHING if cls is ERPODPOTrainer else {}), **settings},
        )
        trainer.train()
        trainer.evaluate()
        runs.append(trainer)
    runs[1].initial_weights = model.state_dict()
    evaluations = [trainer.state.log_history[-1] for trainer in runs]
    for key, value in evaluations[1].items():
        if not key.endswith(("_runtime", "_per_second")):
            assert evaluations[0][key] == value, key
    return runs


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit(tmp_path, case):
    """The same losses, metrics and parameters after four steps as TRL's trainer with the same settings."""
    assert_same_run(*both(tmp_path, tiny_model("qwen2"), **CASES[case]))


def test_bit_for_bit_with_a_router_loss(tmp_path):
    assert_same_run(*both(tmp_path, tiny_model("qwen2_moe"), router_aux_loss_coef=0.1))


@pytest.mark.parametrize("pretrained", [False, True])
def test_bit_for_bit_with_lora(tmp_path, pretrained):
    """The reference forward runs on the policy's own model, with the adapter off or its copy on, and past the reader."""
    model = lora_model(pretrained=True) if pretrained else tiny_model("llama")
    more = {} if pretrained else {"peft_config": lora_config()}
    ours, theirs = both(tmp_path, model, more, learning_rate=1.0)
    theirs.initial_weights = {n: torch.zeros_like(v) for n, v in theirs.model.state_dict().items()}
    assert_same_run(ours, theirs)


def test_bit_for_bit_with_metrics_of_the_logits(tmp_path):
    """With `compute_metrics`, TRL makes a second, plain forward for the logits, which goes past the reader."""
    more = {"compute_metrics": lambda prediction: {"sum": float(abs(prediction.predictions).sum())}}
    ours, theirs = both(tmp_path, tiny_model("qwen2"), more)
    assert logged(theirs, "eval_sum")[0] > 0
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("fields", [{"query_kl_coef": 1.0}, {"query_weight": "nll_ratio"}])
def test_each_term_changes_the_run(tmp_path, fields):
    """The control: either term alone ends elsewhere, so that the equality above is not of an inactive trainer."""
    ends = []
    for name, settings in (("without", NOTHING), ("with", NOTHING | fields)):
        trainer = build(tmp_path / name, max_steps=3, **settings)
        trainer.train()
        ends.append(trainer.model.state_dict())
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# ------------------------------------------------------------------------------------------------- the printed objective
def dpo_losses(model, reference, pair: dict, kind: str) -> torch.Tensor:
    """One pair's loss in float64 from plain logits."""
    ratios, lengths = [], []
    for name in ("chosen", "rejected"):
        ids, start = pair["prompt"] + pair[name], len(pair["prompt"]) - 1
        with torch.no_grad():
            old = token_logps(reference, ids)[start:].sum()
        ratios.append(token_logps(model, ids)[start:].sum() - old)
        lengths.append(len(pair[name]))
    chosen, rejected = ratios
    if kind == "sigmoid":
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))
    if kind == "ipo":
        return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * BETA)) ** 2
    raise ValueError(kind)


def check_every_step(
    tmp_path, model=None, data=None, rel=1e-4, kind="sigmoid", weighted=False, penalty=None, **settings
):
    """Gradient and loss of every step against float64 autograd of the objective; returns the recorded steps."""
    model = tiny_model("qwen2") if model is None else model
    trainer = build(
        tmp_path,
        model=copy.deepcopy(model),
        data=data,
        **{"query_kl_coef": ALPHA, "max_steps": 3, "loss_type": [kind], **settings},
        **({"query_weight": "nll_ratio"} if weighted else {}),
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    assert len(recorder.done) == trainer.state.max_steps
    start = double_copy(model)
    queries = [tuple(ids) for ids in trainer.train_dataset["prompt_ids"]]
    reference = reference_of(model, set(queries))
    weights = weights_of(reference, queries) if weighted else dict.fromkeys(queries, 1.0)
    assert not weighted or len(set(weights.values())) > 3
    for step in recorder.done:
        policy = double_copy(model, step.weights)
        for parameter, template in zip(policy.parameters(), model.parameters()):
            parameter.requires_grad_(template.requires_grad)
            parameter.grad = None
        plain, steered = 0.0, 0.0
        for batch in step.batches:
            found = pairs_of(batch)
            for pair in found:
                loss = dpo_losses(policy, start, pair, kind) / len(found) / len(step.batches)
                plain += loss.item()
                steered = steered + loss * weights[tuple(pair["prompt"])]
        scored = [query for query in distinct_of(step.batches) if len(query) > 1]
        outer = penalty_of(policy, scored, reference, ALPHA, **(penalty or {}))
        (steered + outer).backward()
        assert_grads_close(step.grads, policy, rel)
        # The Trainer takes the mean over the step's micro-batches; the loss it logs has no weights
        assert sum(step.losses) / len(step.losses) == pytest.approx(plain + outer.item(), rel=1e-4, abs=2e-6)
    assert logged(trainer, "query/loss")[-1] == pytest.approx(outer.item(), rel=1e-3)
    assert outer > 1e-5, "the penalty vanishes: the test would prove nothing"
    return recorder.done


@pytest.mark.parametrize("per_device, accumulation", [(8, 1), (2, 2), (1, 4), (2, 3)])
def test_step_gradient_is_the_printed_objective(tmp_path, per_device, accumulation):
    """DPO and penalty for several cuts; of (2, 3) every second step is a short one."""
    steps = check_every_step(
        tmp_path, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation
    )
    for step in steps:
        assert step.forwards == [1] * len(step.batches)
    if (per_device, accumulation) == (2, 3):
        assert [len(step.batches) for step in steps] == [3, 1, 3]


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_step_gradient_with_weights(tmp_path, kind):
    """w(q) multiplies the gradient of the pair's loss; the loss that is logged is the plain one."""
    check_every_step(tmp_path, kind=kind, weighted=True, gradient_accumulation_steps=2, learning_rate=1e-2)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_step_gradient_of_other_heads(tmp_path, kind):
    check_every_step(tmp_path, tiny_model(kind), rel=2e-4, max_steps=2, gradient_accumulation_steps=2)


def test_step_gradient_with_lora(tmp_path):
    """Two forwards a micro-batch on the policy's model, TRL's own two: the penalty adds none."""
    steps = check_every_step(
        tmp_path, lora_model(pretrained=True), learning_rate=0.5, max_steps=2, gradient_accumulation_steps=2
    )
    assert [step.forwards for step in steps] == [[2, 2]] * 2


def test_step_gradient_on_the_sequence(tmp_path):
    check_every_step(
        tmp_path,
        penalty={"level": "sequence", "estimator": "k2"},
        query_kl_level="sequence",
        query_kl_estimator="k2",
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
    )


SHARED = [UNEQUAL[0], UNEQUAL[1], UNEQUAL[0], UNEQUAL[3], "7", UNEQUAL[1], UNEQUAL[0], UNEQUAL[2]]


@pytest.mark.parametrize("per_device, accumulation", [(8, 1), (2, 4), (1, 8)])
def test_pairs_that_share_a_prompt_count_it_once(tmp_path, per_device, accumulation):
    """Eight pairs of five prompts, one of a single token, in one step: each prompt is labelled once and enters the mean once."""
    steps = check_every_step(
        tmp_path,
        data=pairs(SHARED),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
    )
    for step in steps:
        found = [pair for batch in step.batches for pair in pairs_of(batch)]
        completions = sum(len(pair["chosen"]) + len(pair["rejected"]) for pair in found)
        queries = sum(len(query) - 1 for query in distinct_of(step.batches))
        assert len(distinct_of(step.batches)) == 5
        assert sum(labels.sum().item() for labels in step.prompt_labels) == completions + queries


def test_the_same_gradient_for_every_cut_of_one_batch(tmp_path):
    """One batch, cut into 1, 2, 4 or 8 micro-batches and shuffled differently each time."""
    steps, orders = [], []
    for i, (per_device, accumulation) in enumerate([(8, 1), (4, 2), (2, 4), (1, 8)]):
        trainer = build(
            tmp_path / str(i),
            data=pairs(SHARED),
            query_kl_coef=ALPHA,
            query_weight="nll_ratio",
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            seed=i,
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        steps.append([step.grads for step in recorder.done])
        orders.append([pair["chosen"] for batch in recorder.done[0].batches for pair in pairs_of(batch)])
    assert orders[0] != orders[1], "the order was meant to differ"
    for first, second in steps[1:]:
        for name, expected in steps[0][0].items():
            torch.testing.assert_close(first[name], expected, atol=2e-6, rtol=1e-4)
        for name, expected in steps[0][1].items():
            torch.testing.assert_close(second[name], expected, atol=5e-6, rtol=1e-3)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_constant_drift_costs_alpha(tmp_path, accumulation):
    """A reference one nat too low makes k1 = 1 for every query while the policy stands still: what the Trainer logs for every
    step, the epoch's short tail included, is log 2 + alpha.
    """
    model = tiny_model("qwen2")
    mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))
    trainer = build(
        tmp_path,
        model=model,
        data=shift_reference(mapper(pairs(UNEQUAL[:7])), -1.0),
        query_kl_estimator="k1",
        query_kl_coef=0.1,
        learning_rate=0.0,
        gradient_accumulation_steps=accumulation,
        max_steps=-1,
        num_train_epochs=2,
    )
    trainer.train()
    losses = logged(trainer, "loss")
    assert len(losses) == trainer.state.global_step == (8 if accumulation == 1 else 4)
    assert losses == pytest.approx([0.693147 + 0.1] * len(losses), abs=2e-6)


# ------------------------------------------------------------------------------------------------- drift, evaluation
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "cohere", "gpt2", "fresh_lora", "pretrained_lora"])
def test_no_drift_before_the_first_update(tmp_path, kind):
    """The reference is scored through DPO's own head; the second step shows that the drift is measured."""
    model = {"fresh_lora": lambda: tiny_model("llama"), "pretrained_lora": lambda: lora_model(True)}.get(
        kind, lambda: tiny_model(kind)
    )()
    trainer = build(
        tmp_path,
        model=model,
        per_device_train_batch_size=8,
        max_steps=2,
        learning_rate=0.5,
        trainer_kwargs={"peft_config": lora_config()} if kind == "fresh_lora" else None,
    )
    trainer.train()
    before, after = logged(trainer, "query/kl")
    assert before < 1e-9
    assert after > 1e-6


def test_the_reference_is_the_policy_not_the_ref_model(tmp_path):
    """DPO's reference may be any model; the drift is that of the policy from where it began."""
    trainer = build(tmp_path, trainer_kwargs={"ref_model": tiny_model("qwen2", seed=1)}, learning_rate=0.0)
    trainer.train()
    assert logged(trainer, "rewards/chosen")[0] != 0
    assert logged(trainer, "query/kl")[0] < 1e-9


@pytest.mark.parametrize("opening", ["", "think"])
def test_chats_are_scored_by_the_ids_that_are_trained_on(tmp_path, opening):
    """Also where the template opens an answer with words that the answers given do not begin with: TRL cuts them off."""
    template = TEMPLATE.replace("'<|assistant|>'", f"'<|assistant|>{opening}'")
    data = Dataset.from_dict(
        {
            "prompt": [chat(text, system="Be brief.") for text in UNEQUAL],
            "chosen": [[{"role": "assistant", "content": text}] for text in CHOSEN],
            "rejected": [[{"role": "assistant", "content": text}] for text in REJECTED],
        }
    )
    more = {"processing_class": byte_tokenizer(template=template)}
    trainer = build(tmp_path, data=data, per_device_train_batch_size=8, learning_rate=0.0, trainer_kwargs=more)
    recorder = Recorder().attach(trainer)
    trainer.train()
    expected = [  # up to the last token that the template and every answer agree on
        byte_tokenizer().apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in data["prompt"]
    ]
    assert sorted(distinct_of(recorder.done[0].batches)) == sorted(map(tuple, expected))
    nll = [-logps.sum().item() for logps in reference_of(tiny_model("qwen2"), set(map(tuple, expected))).values()]
    assert logged(trainer, "query/nll")[0] == pytest.approx(sum(nll) / 8, rel=1e-5)
    assert logged(trainer, "query/kl")[0] < 1e-9


def test_the_span_of_the_user_counts_alone(tmp_path):
    """Labelled and penalized are the user's words, without the template and without a system turn."""
    data = Dataset.from_dict(
        {
            "prompt": [chat(text, system="Be brief.") for text in UNEQUAL],
            "chosen": [[{"role": "assistant", "content": text}] for text in CHOSEN],
            "rejected": [[{"role": "assistant", "content": text}] for text in REJECTED],
        }
    )
    model = tiny_model("qwen2")
    trainer = build(
        tmp_path,
        model=copy.deepcopy(model),
        data=data,
        per_device_train_batch_size=8,
        max_steps=2,
        query_kl_coef=ALPHA,
        query_span="user",
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    reference, policy = double_copy(model), double_copy(model, recorder.done[1].weights)
    drifts = []
    for query, text in zip(map(tuple, trainer.train_dataset["prompt_ids"]), trainer.train_dataset["prompt"]):
        words = byte_tokenizer()(text[1]["content"])["input_ids"]
        start = next(i for i in range(len(query)) if list(query[i : i + len(words)]) == words)
        with torch.no_grad():
            x = (token_logps(reference, list(query)) - token_logps(policy, list(query)))[start - 1 :][: len(words)]
        drifts.append((x.exp() - x - 1).mean().item())
    assert logged(trainer, "query/kl")[1] == pytest.approx(sum(drifts) / 8, rel=1e-3)
    completions = sum(
        len(pair[name]) for pair in pairs_of(recorder.done[0].batches[0]) for name in ("chosen", "rejected")
    )
    assert recorder.done[0].prompt_labels[0].sum().item() == completions + sum(map(len, UNEQUAL))


def test_query_files_hold_the_nll_of_the_responses(tmp_path):
    """NLL and length are means over chosen and rejected of all pairs of a query, whatever micro-batches they are in."""
    model, data = tiny_model("qwen2"), pairs([UNEQUAL[0], UNEQUAL[1], UNEQUAL[0], UNEQUAL[3]])
    build(
        tmp_path,
        model=copy.deepcopy(model),
        data=data,
        gradient_accumulation_steps=2,
        query_log_steps=1,
        query_kl_coef=ALPHA,
    ).train()
    kept = read_queries(tmp_path / "run")
    reference, expected = double_copy(model), {}
    for row in data:
        prompt = byte_tokenizer()(row["prompt"])["input_ids"]
        for name in ("chosen", "rejected"):
            response = [*byte_tokenizer()(row[name])["input_ids"], byte_tokenizer().eos_token_id]
            nll = -token_logps(reference, prompt + response)[len(prompt) - 1 :].sum().item()
            expected.setdefault(tuple(prompt), []).append((nll, len(response)))
    wanted = sorted(tuple(sum(x) / len(x) for x in zip(*values)) for values in expected.values())
    found = sorted(zip(kept["response_nll"].tolist(), kept["response_tokens"].tolist()))
    assert found == [pytest.approx(row, rel=1e-4) for row in wanted]


def test_evaluation_counts_each_query_once(tmp_path):
    model = tiny_model("qwen2")
    data = pairs([UNEQUAL[0], UNEQUAL[1], UNEQUAL[0]])
    trainer = build(
        tmp_path, model=copy.deepcopy(model), learning_rate=0.0, per_device_eval_batch_size=2, query_kl_coef=ALPHA
    )
    trainer.train()
    metrics = trainer.evaluate(data)
    queries = prompt_ids(byte_tokenizer(), UNEQUAL[:2])
    nll = [-logps.sum().item() for logps in reference_of(model, queries).values()]
    assert metrics["eval_query/nll"] == pytest.approx(sum(nll) / 2, rel=1e-5)


def test_prompts_unknown_to_the_table_are_refused_after_training(tmp_path):
    trainer = build(tmp_path)
    trainer.train()
    with pytest.raises(ReferenceUnavailableError, match="1 prompts are not in the reference table"):
        trainer.evaluate(pairs(["never seen"]))


def test_data_mapped_beforehand_is_not_scored_again(tmp_path):
    """Nor do its columns reach the model where TRL scores DPO's own reference."""
    model = tiny_model("qwen2")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path))(pairs())
    trainer = build(
        tmp_path,
        model=model,
        data=data,
        trainer_kwargs={"ref_model": None},
        precompute_ref_log_probs=True,
        reference_cache_dir=str(tmp_path / "elsewhere"),
    )
    with count_forwards(trainer.model) as counter:
        trainer.prepare_reference()
        assert counter.calls == 0
        trainer.evaluate(data)
    assert (trainer.scoring_reports[0][1].scored, trainer.scoring_reports[0][1].reused) == (0, 8)


# ------------------------------------------------------------------------------------------------- resume, refusals
RESUMED = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 5,  # in the middle of epoch 2
    "query_kl_coef": ALPHA,
    "query_kl_target": 1e-3,
    "query_weight": "nll_ratio",
    "seed": 5,
}


@pytest.fixture
def checkpoint(tmp_path):
    model = tiny_model("qwen2")
    whole = build(tmp_path, model=copy.deepcopy(model), **RESUMED)
    whole.train()
    assert whole.state.global_step == 8
    return model, whole, str(tmp_path / "run" / "checkpoint-5")


def test_a_resumed_run_is_the_whole_run(tmp_path, checkpoint):
    """Same pairs, losses, drift, weights and adaptive α from the checkpoint on, against the same table."""
    model, whole, folder = checkpoint
    resumed = build(tmp_path, model=copy.deepcopy(model), **RESUMED)
    with count_forwards(resumed.model) as counter:
        resumed.prepare_reference()
    assert counter.calls == 0
    resumed.train(resume_from_checkpoint=folder)
    assert resumed.state.global_step == 8
    for key in ("loss", "query/kl", "query/alpha", "query/weight_mean", "grad_norm"):
        assert logged(resumed, key) == logged(whole, key), key
    alphas = logged(resumed, "query/alpha")
    assert len(set(alphas)) == len(alphas), "α was meant to move"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_changed_data_is_refused(tmp_path, checkpoint):
    """A changed answer, too, though every prompt is the same."""
    model, _, folder = checkpoint
    data = Dataset.from_dict({**pairs().to_dict(), "rejected": [*REJECTED[:-1], "seven"]})
    for settings, message in (
        ({"data": data}, "the training data \\(rows changed, were reordered or removed\\)"),
        ({"seed": 6}, "Not what the checkpoint was trained with: seed"),
    ):
        resumed = build(tmp_path, model=copy.deepcopy(model), **{**RESUMED, **settings})
        with pytest.raises(ValueError, match=message):
            resumed.train(resume_from_checkpoint=folder)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end' cuts prompts at their beginning"),
        (
            {"preset": "release", "query_weight": "nll_ratio"},
            "query_weight_source='policy' is for trainers that generate",
        ),
        ({"loss_type": ["aot"], "query_weight": "nll_ratio"}, "loss_type='aot' sorts the pairs of a batch"),
        ({"preset": "drpo"}, "preset='drpo' sets trust_region, .*which ERPODPOConfig does not have"),
        ({"query_kl_estimator": "k4"}, "query_kl_estimator must be one of 'k1', 'k2', 'k3', found 'k4'"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **settings)


def test_settings_that_work(tmp_path):
    """Nothing is cut without a max_length; the release's weights are of no use where all are 1."""
    make_config(tmp_path, truncation_mode="keep_end", max_length=None)
    args = make_config(tmp_path, preset="release")
    assert (args.query_weight, args.query_kl_coef, args.beta) == ("uniform", 1e-2, 0.1)


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_streams_are_refused(tmp_path, where):
    stream = pairs().to_iterable_dataset()
    with pytest.raises(ValueError, match="Preference data must be a datasets.Dataset, found a stream"):
        build(tmp_path, **{"data": stream} if where == "train_dataset" else {"trainer_kwargs": {where: stream}})


@pytest.mark.parametrize("config", [ERPOConfig, DPOConfig])
def test_another_trainers_config_is_refused(tmp_path, config):
    args = config(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=f"args of ERPODPOTrainer must be an ERPODPOConfig, found {config.__name__}"):
        build(tmp_path, args=args)


def test_a_collator_that_cuts_prompts_is_refused(tmp_path):
    """The ids trained on are checked against the ids scored, on every batch, and the prompt is named."""
    collator = DataCollatorForPreference(pad_token_id=0, max_length=12, truncation_mode="keep_end")
    trainer = build(tmp_path, data=pairs(["what is 17+5?"] * 2), trainer_kwargs={"data_collator": collator})
    message = (
        "Row 0 of the batch cannot be regularized: the .* token ids trained on are not the ones its reference scored"
    )
    with pytest.raises(ValueError, match=f"{message}.*Prompt: '.*17"):
        trainer.train()


# ------------------------------------------------------------------------------------------------- command line
RECIPE = """
trainer: dpo
model_name_or_path: demo
max_steps: 1
per_device_train_batch_size: 2
bf16: false
use_cpu: true
gradient_checkpointing: false
report_to: none
logging_steps: 1
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe and its pairs, as chat messages."""
    rows = [
        {
            name: [{"role": role, "content": text}]
            for name, role, text in zip(("prompt", "chosen", "rejected"), ROLES, row)
        }
        for row in zip(UNEQUAL, CHOSEN, REJECTED)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row | {"source": i}) for i, row in enumerate(rows)))
    path = tmp_path / "recipe.yaml"
    folders = f"output_dir: {tmp_path / 'out'}\nreference_cache_dir: {tmp_path / 'reference'}\n"
    path.write_text(f"{RECIPE}dataset: {tmp_path / 'pairs.jsonl'}\n{folders}")
    return path


ROLES = ("user", "assistant", "assistant")


def test_score_then_train(recipe, tmp_path, capsys):
    """`score` makes the table that training finds; the model card names the paper and the method."""
    assert cli.main(["score", "--config", str(recipe)]) == 0
    assert "8 queries scored, 0 reused" in capsys.readouterr().out
    assert cli.main(["train", "--config", str(recipe), "--max_rows", "5"]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["log_history"][0]["query/kl"] == pytest.approx(0, abs=1e-10)  # scored in other batches
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2608.23311" in card and "- erpo" in card and "- dpo" in card
    trainer = trainer_of(*parse(["--config", str(recipe)]))
    trainer.prepare_reference()
    assert (trainer.dataset_mapper.report.scored, trainer.dataset_mapper.report.reused) == (0, 8)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dataset", "arithmetic"], "trainer 'dpo' learns from preference pairs, which 'arithmetic' does not hold"),
        (["--prompt_suffix", "!"], "prompt_suffix is for trainers that generate: with trainer 'dpo' unset it"),
        (["--num_generations", "4"], "num_generations (an option of trainer grpo)"),
        (["--truncation_mode", "keep_end"], "truncation_mode='keep_end' cuts prompts"),
    ],
)
def test_bad_options_are_refused(recipe, options, message, capsys):
    assert cli.main(["train", "--config", str(recipe), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"prompt": "a", "chosen": "b"}], r"no column 'rejected'; found 'prompt', 'chosen'"),
        ([PAIR, PAIR | {"chosen": " "}], r"line 2 \(row 1\), field 'chosen': is ' '; expected text"),
        (
            [PAIR, PAIR | {"prompt": [{"role": "user", "content": "a"}]}],
            r"line 2 \(row 1\), field 'prompt': .*expected text",
        ),
        (
            [{"chosen": USER, "rejected": USER}, {"chosen": USER, "rejected": [{**USER[0], "tool_calls": ["add"]}]}],
            r"line 2 \(row 1\), field 'rejected': turn 0 has 'tool_calls', which would be lost",
        ),
        ([PAIR | {"rejected": "\ud800"}], r"line 1 \(row 0\), field 'rejected': the lone surrogate"),
    ],
)
def test_unreadable_pairs_are_refused(tmp_path, rows, message):
    """With the file, the row and the field."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        load_preferences(path)


def test_pairs_of_a_file(tmp_path):
    """Without a prompt, and with another column whose first value is empty."""
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"chosen": "1+1=2", "rejected": "1+1=3", "n": null}\n{"chosen": "ab", "rejected": "ac", "n": 2}')
    data = load_preferences(path)
    assert data.to_list() == [
        {"chosen": "1+1=2", "rejected": "1+1=3", "n": None},
        {"chosen": "ab", "rejected": "ac", "n": 2},
    ]


# ------------------------------------------------------------------------------------------------- two processes
@pytest.mark.distributed
def test_two_processes_are_one(tmp_path):
    """Pairs of one prompt on both ranks and in several micro-batches: gradients and query metrics of one process."""
    settings = {
        "prompts": SHARED,
        "evaluation": [UNEQUAL[0], UNEQUAL[1], UNEQUAL[0]],
        "query_kl_coef": ALPHA,
        "query_weight": "nll_ratio",
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    }
    runs = {"pairs": {"task": "train_pairs", **settings}}
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    finish(torchrun(str(SCRIPTS / "distributed_run.py"), str(tmp_path), processes=2))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)["pairs"] for rank in range(2)]
    assert all("MULTI_CPU" in rank["distributed"] and rank["scored"] == 4 for rank in ranks)
    queries = [set(distinct_of(rank["batches"][0])) for rank in ranks]
    assert queries[0] & queries[1] and queries[0] != queries[1], "a prompt was meant to lie on both ranks"

    evaluation = pairs(settings.pop("evaluation"))
    one = build(
        tmp_path / "one",
        data=pairs(settings.pop("prompts")),
        trainer_kwargs={"eval_dataset": evaluation},
        **settings | {"per_device_train_batch_size": 4},
    )
    recorder = Recorder().attach(one)
    one.train()
    metrics = one.evaluate()
    for index, step in enumerate(recorder.done):
        scale = max(gradient.abs().max().item() for gradient in step.grads.values())
        for rank in ranks:
            for name, gradient in rank["grads"][index].items():
                assert (gradient - step.grads[name]).abs().max().item() < 2e-4 * scale, name
    for name in (
        "query/kl",
        "query/kl_max",
        "query/nll",
        "query/loss",
        "query/weight_mean",
        "query/unscored_rows",
        "loss",
    ):
        found = [entry[name] for entry in ranks[0]["log"] if name in entry]
        assert found == pytest.approx(logged(one, name), rel=1e-3, abs=1e-6), name
    for name in ("eval_query/kl", "eval_query/nll", "eval_query/weight_mean"):
        assert ranks[0]["metrics"][name] == pytest.approx(metrics[name], rel=1e-3), name
