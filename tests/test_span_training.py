"""`query_span` in training: only the span's tokens count in the Query-KL, the weights and the metrics.

The expected spans are spelled out here message by message for the byte tokenizer (one token a byte, one a role, one after
each message); the expected numbers come from plain float64 logits, as in `test_gradient.py`.
"""

import copy
import importlib.resources

import pytest
import torch
from helpers import (
    EOS,
    SPECIALS,
    Recorder,
    assert_grads_close,
    assert_same_run,
    byte_tokenizer,
    chat,
    constant_reward,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    k_estimator,
    logged,
    lora_model,
    make_config,
    make_trainer,
    policy_loss,
    prompts_dataset,
    reference_of,
    rows_of,
    shift_reference,
    tiny_model,
    token_logps,
)
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer, RLOOTrainer

from erpo_trl import DatasetMapper, ERPOConfig, ERPORLOOTrainer, ERPOTrainer

ALPHA = 0.3


def turn(role, content):
    return {"role": role, "content": content}


CHATS = [
    chat("2+2="),
    chat("what is 17+5?", system="Be brief."),
    [turn("user", "1*1="), turn("assistant", "1"), turn("user", "9-4 é😀")],
    [turn("system", "Only this.")],  # no user turn: an empty span for "user"
    chat("", system="S"),  # no content
    chat("6/2=", system="2+2="),
    [turn("user", "a"), turn("assistant", "user"), turn("user", "a")],
    chat("2+2="),  # twice in the data
]


def spelled(messages, span):
    """Token ids of a prompt and which of them are in the span, by the rule that the test's template follows."""
    ids, inside = [], []
    for message in messages:
        text = byte_tokenizer()(message["content"])["input_ids"]
        ids += [SPECIALS.index(f"<|{message['role']}|>"), *text, EOS]
        counts = span == "prompt" or span == "content" or message["role"] == "user"
        inside += [span == "prompt", *[counts] * len(text), span == "prompt"]
    return (*ids, SPECIALS.index("<|assistant|>")), torch.tensor([*inside, span == "prompt"])


def spans_of(span, chats=CHATS):
    """Query -> (T-1,) which tokens are scored."""
    return {ids: inside[1:] for ids, inside in (spelled(messages, span) for messages in chats)}


def weights_of(reference, masks, chats, span):
    """Query -> weight; the mean NLL runs over the rows that have a scored token."""
    nll = {query: -reference[query][masks[query]].sum().item() for query in masks}
    queries = [spelled(messages, span)[0] for messages in chats]
    scored = [query for query in queries if masks[query].any()]
    mean = sum(nll[query] for query in scored) / len(scored)
    return mean, {query: min(mean / nll[query], 2.0) if masks[query].any() else 1.0 for query in masks}


def penalty_of(model, queries, reference, masks, level="token"):
    values = []
    for query in queries:
        x = (reference[query].double() - token_logps(model, list(query)))[masks[query]]
        values.append(k_estimator(x, "k3").mean() if level == "token" else k_estimator(x.sum(), "k3"))
    return ALPHA * torch.stack(values).mean()


@pytest.mark.parametrize(
    "span, fields",
    [
        ("user", {}),
        ("user", {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "per_device_train_batch_size": 2}),
        ("user", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}),
        ("user", {"query_kl_level": "sequence", "learning_rate": 1e-2}),
        ("content", {}),
        ("prompt", {}),
    ],
)
def test_step_gradient_counts_the_span_only(tmp_path, raw_advantages, span, fields):
    """Policy term with the span's weights, penalty over the span's tokens of each distinct query that has any."""
    model = tiny_model("qwen2")
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(CHATS),
        **{"query_span": span, "query_kl_coef": ALPHA, "learning_rate": 5e-2, "max_steps": 4} | fields,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    masks = spans_of(span)
    reference = reference_of(model, set(masks))
    mean, weights = weights_of(reference, masks, CHATS, span)
    level = fields.get("query_kl_level", "token")
    assert len(recorder.done) == 4
    seen, penalties = set(), []
    for step in recorder.done:
        policy = double_copy(model, step.weights)
        for parameter in policy.parameters():
            parameter.grad = None
        batches = [rows_of(batch) for batch in step.batches]
        queries = distinct_queries(batches)
        seen |= set(queries)
        inner = policy_loss(policy, batches, weights.__getitem__, 1.0, "grpo")
        counted = [query for query in queries if masks[query].any()]
        outer = penalty_of(policy, counted, reference, masks, level) if counted else torch.zeros(())
        (inner + outer).backward()
        assert_grads_close(step.grads, policy, 2e-4)
        assert sum(step.losses) == pytest.approx((inner + outer).item(), rel=1e-4, abs=2e-6)
        penalties.append(outer.item())
    assert max(penalties) > 1e-5, "the penalty vanishes: the test would prove nothing"
    assert any(not masks[query].any() for query in seen) == (span == "user")
    assert logged(trainer, "query/loss")[-1] == pytest.approx(penalties[-1], rel=1e-3)
    assert logged(trainer, "query/ref_nll_mean")[-1] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("cls", [ERPOTrainer, ERPORLOOTrainer])
@pytest.mark.parametrize("span", ["user", "content"])
def test_no_drift_at_step_zero(tmp_path, cls, span):
    """R̂ is 0 before the first update, and the logged NLL is that of the span's tokens."""
    model = tiny_model("qwen2")
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        cls=cls,
        dataset=prompts_dataset(CHATS[:4]),
        query_span=span,
        per_device_train_batch_size=8,
    )
    trainer.train()
    masks = spans_of(span, CHATS[:4])
    reference = reference_of(model, set(masks))
    nll = [-reference[query][mask].sum().item() for query, mask in masks.items() if mask.any()]
    assert len(nll) == (3 if span == "user" else 4)
    assert logged(trainer, "query/kl") == pytest.approx([0.0], abs=1e-9)
    assert logged(trainer, "query/nll") == pytest.approx([sum(nll) / len(nll)], rel=1e-5)
    assert logged(trainer, "query/unscored_rows") == [8 - 2 * len(nll)]


@pytest.mark.parametrize("cls, trl", [(ERPOTrainer, GRPOTrainer), (ERPORLOOTrainer, RLOOTrainer)])
def test_without_penalty_and_weights_it_is_trl(tmp_path, cls, trl):
    """α = 0 with uniform weights: the span only says what is measured."""
    model = tiny_model("qwen2")
    runs = []
    for trainer_class in (cls, trl):
        erpo = {"query_kl_coef": 0.0, "query_weight": "uniform", "query_span": "user"} if trainer_class is cls else {}
        beta = {"beta": 0.0} if trl is RLOOTrainer else {}
        trainer = make_trainer(
            tmp_path / trainer_class.__name__,
            model=copy.deepcopy(model),
            cls=trainer_class,
            dataset=prompts_dataset(CHATS),
            **{"max_steps": 4, "learning_rate": 5e-2, "num_iterations": 2, **erpo, **beta},
        )
        trainer.train()
        runs.append(trainer)
    runs[1].initial_weights = model.state_dict()
    assert_same_run(*runs)
    assert logged(runs[0], "query/kl")[-1] > 1e-7


# ------------------------------------------------------------------------------------------------------------- columns
def test_columns(config, caplog, monkeypatch):
    """The table holds whole prompts; span, NLL, mean and weights are the setting's, without a new scoring."""
    monkeypatch.setattr(transformers_logging.get_logger("erpo_trl"), "propagate", True)
    model = tiny_model("qwen2")
    columns = {}
    for span in ("prompt", "user", "content"):
        mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), config(query_span=span))
        data = columns[span] = mapper(prompts_dataset(CHATS))
        masks = spans_of(span)
        reference = reference_of(model, set(masks))
        mean, weights = weights_of(reference, masks, CHATS, span)
        assert mapper.report.mean_nll == pytest.approx(mean, rel=1e-5)
        empty = 2 if span == "user" else 0
        assert (mapper.report.rows, mapper.report.unscorable, mapper.report.spanless) == (8, 0, empty)
        assert mapper.report.scored == (7 if span == "prompt" else 0)
        for row, messages in zip(data, CHATS):
            query, inside = spelled(messages, span)
            found = torch.zeros(len(query), dtype=torch.bool)
            for start, end in zip(row["query_span"][::2], row["query_span"][1::2]):
                found[start:end] = True
            assert torch.equal(found, inside)
            assert len(row["ref_query_logps"]) == len(query) - 1
            assert row["ref_query_nll"] == pytest.approx(-reference[query][masks[query]].sum().item(), abs=1e-3)
            assert row["query_weight"] == pytest.approx(weights[query], rel=1e-5)
    assert (
        "2 of 8 rows have no token in their span (query_span='user'): they weigh 1 and have no Query-KL" in caplog.text
    )
    assert columns["prompt"]["ref_query_logps"] == columns["user"]["ref_query_logps"]
    assert columns["user"]["query_span"][0] == [1, 5] and columns["prompt"]["query_span"][0] == [0, 7]
    assert columns["user"]["query_span"][3] == []


def test_mapping_again_under_another_span(config):
    """Columns of an earlier mapping keep their log-probs and get the new span."""
    model = tiny_model("qwen2")
    mapped = DatasetMapper(model, byte_tokenizer(), config(query_span="content"))(prompts_dataset(CHATS))
    mapper = DatasetMapper(model, byte_tokenizer(), config(query_span="user", reference_cache_dir="elsewhere"))
    again = mapper(mapped)
    assert (mapper.report.scored, mapper.report.forwards) == (0, 0)
    assert (
        again["query_span"] == DatasetMapper(model, byte_tokenizer(), config(query_span="user"))(mapped)["query_span"]
    )
    assert again["query_span"] != mapped["query_span"]


def test_the_same_tokens_with_another_span_are_another_query(tmp_path):
    """One user text that spells out three turns has the tokens of those turns, but all of it is the user's.

    A constant drift of one nat costs α a step only if both are owned, with shares that sum to 1.
    """
    turns = [turn("user", "ab"), turn("assistant", "cd"), turn("user", "ef")]
    chats = [turns, chat("ab</s><|assistant|>cd</s><|user|>ef")]
    assert spelled(turns, "user")[0] == tuple(
        byte_tokenizer().apply_chat_template(chats[1], add_generation_prompt=True)["input_ids"]
    )
    model = tiny_model("qwen2")
    config = make_config(tmp_path, query_span="user")
    data = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), config)(prompts_dataset(chats))
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=shift_reference(data, -1.0),
        reward=constant_reward,
        query_span="user",
        query_kl_estimator="k1",
        query_kl_coef=0.1,
        learning_rate=0.0,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        per_device_train_batch_size=2,
        max_steps=2,
    )
    recorder = Recorder().attach(trainer)
    trainer.train()
    assert trainer.dataset_mapper.report.duplicates == 1
    for step in recorder.done:
        assert sum(step.losses) == pytest.approx(0.1, abs=1e-6)
        owned = torch.cat([batch["query_mask"][batch["query_owner"]] for batch in step.batches])
        assert sorted(owned.sum(1).tolist()) == [4, 10], "6 bytes of user text and 4 control tokens"
        assert sum(batch["query_share"].sum().item() for batch in step.batches) == pytest.approx(1.0)


def test_labels_are_the_span(tmp_path, raw_advantages):
    """The forward labels the owners' span tokens and no other prompt token; left padding is in the batch."""
    trainer = make_trainer(tmp_path, dataset=prompts_dataset(CHATS), query_span="user", max_steps=4)
    recorder = Recorder().attach(trainer)
    trainer.train()
    masks = spans_of("user")
    padded = 0
    for step in recorder.done:
        for batch, labels in zip(step.batches, step.prompt_labels):
            padded += (batch["prompt_mask"] == 0).sum().item()
            for row, owner, label, mask in zip(rows_of(batch), batch["query_owner"], labels, batch["prompt_mask"]):
                expected = (
                    masks[tuple(row["prompt"])] if owner else torch.zeros(len(row["prompt"]) - 1, dtype=torch.bool)
                )
                assert torch.equal(label[mask.bool()][1:], expected)
                assert not label[~mask.bool()].any()
    assert padded > 0


# --------------------------------------------------------------------------------------------------------- tools, streams
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def test_tools_and_template_arguments_are_the_trainers(tmp_path):
    """TRL renders prompts with the trainer's tools, its training template and chat_template_kwargs; so is the span found."""
    template = (importlib.resources.files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer = byte_tokenizer(template=template)
    model = tiny_model("qwen2", max_position_embeddings=4096)
    trainer = make_trainer(
        tmp_path,
        model=model,
        tokenizer=tokenizer,
        dataset=prompts_dataset([chat("add", system="Sys"), chat("Adds two numbers.")]),
        query_span="user",
        chat_template_kwargs={"enable_thinking": False},
        trainer_kwargs={"tools": [add]},
    )
    trainer.train()
    texts = []
    for row in trainer.train_dataset:
        (ids,) = trainer._tokenize_prompts([row["prompt"]])[0]
        start, end = row["query_span"]
        texts.append(tokenizer.decode(ids[start:end]))
        prompt = tokenizer.decode(ids)
        assert prompt.count("Adds two numbers.") >= 1 and prompt.endswith("<think>\n\n</think>\n\n")
    assert texts == ["add", "Adds two numbers."]
    assert logged(trainer, "query/kl") == pytest.approx([0.0], abs=1e-9)


STREAM = {
    "shuffle_dataset": False,
    "max_steps": 6,
    "learning_rate": 5e-2,
    "query_kl_coef": ALPHA,
    "query_span": "user",
    "rollout": fixed_rollouts(),
}


def test_rows_scored_on_arrival(tmp_path):
    """A stream trains as the mapped set does, empty spans included."""
    runs = []
    for name, data in (
        ("stream", prompts_dataset(CHATS[:6]).to_iterable_dataset()),
        ("mapped", prompts_dataset(CHATS[:6])),
    ):
        sample = {"reference_sample_size": 6} if name == "stream" else {}
        trainer = make_trainer(tmp_path / name, model=tiny_model("qwen2"), dataset=data, **STREAM, **sample)
        trainer.train()
        runs.append(trainer)
    for name in (
        "loss",
        "query/kl",
        "query/weight_mean",
        "query/unscored_rows",
        "query/ref_nll_mean",
    ):
        assert logged(runs[0], name) == pytest.approx(logged(runs[1], name), rel=1e-5, abs=1e-6), name
    # A difference of sums of some 100 nats, in float32, of prompts that were padded otherwise
    drifts = [logged(run, "query/nll_drift") for run in runs]
    assert drifts[0] == pytest.approx(drifts[1], abs=1e-4)
    assert max(logged(runs[0], "query/kl")) > 1e-5 and max(logged(runs[0], "query/unscored_rows")) == 2


def test_running_mean_of_a_stream(tmp_path):
    """s̄ of a stream is over the rows that have a token in their span."""
    trainer = make_trainer(
        tmp_path,
        model=tiny_model("qwen2"),
        dataset=prompts_dataset(CHATS[:4]).to_iterable_dataset(),
        **STREAM | {"max_steps": 2, "learning_rate": 0.0},
    )
    trainer.train()
    masks = spans_of("user", CHATS[:4])
    reference = reference_of(tiny_model("qwen2"), set(masks))
    nll = [-reference[query][mask].sum().item() for query, mask in masks.items()]
    first = (nll[0] + nll[1]) / 2
    assert logged(trainer, "query/ref_nll_mean") == pytest.approx([first, (first + nll[2]) / 2], rel=1e-5)


def test_a_stream_mapped_with_another_span(tmp_path):
    """Its columns would regularize other tokens than the run's setting says."""
    data = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), make_config(tmp_path))(prompts_dataset(CHATS))
    trainer = make_trainer(tmp_path, dataset=data.to_iterable_dataset(), **STREAM)
    with pytest.raises(
        ValueError, match="Row 0 of the batch was mapped with another query_span than this run's, 'user'"
    ):
        trainer.train()
    config = make_config(tmp_path, query_span="user")
    data = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), config)(prompts_dataset(CHATS))
    trainer = make_trainer(tmp_path, dataset=data.to_iterable_dataset(), **STREAM)
    trainer.train()
    assert logged(trainer, "query/kl")[-1] > 1e-7


def test_evaluation_counts_the_span(tmp_path):
    trainer = make_trainer(
        tmp_path,
        dataset=prompts_dataset(CHATS),
        query_span="user",
        learning_rate=0.0,
        per_device_eval_batch_size=4,
        trainer_kwargs={"eval_dataset": prompts_dataset(CHATS[:2])},
    )
    trainer.train()
    masks = spans_of("user", CHATS[:2])
    reference = reference_of(tiny_model("qwen2"), set(masks))
    nll = [-reference[query][mask].sum().item() for query, mask in masks.items()]
    assert trainer.evaluate()["eval_query/nll"] == pytest.approx(sum(nll) / 2, rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- refusals
def test_resume_with_another_span(tmp_path):
    """The weights and s̄ of the checkpoint count other tokens; with its own setting it goes on."""
    fields = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 5e-2, "query_kl_coef": ALPHA}

    def build(**more):
        return make_trainer(tmp_path, dataset=prompts_dataset(CHATS), **{**fields, "max_steps": 4, **more})

    whole = build(query_span="user")
    whole.train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(ValueError, match="trained with query_span='user', this run has 'prompt': .* Resume with the"):
        build().train(resume_from_checkpoint=checkpoint)
    resumed = build(query_span="user")
    resumed.train(resume_from_checkpoint=checkpoint)
    for name in ("loss", "query/kl", "query/ref_nll_mean"):
        assert logged(resumed, name)[-2:] == pytest.approx(logged(whole, name)[-2:], rel=1e-5, abs=1e-7), name


def test_plain_text_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, query_span="user")
    with pytest.raises(ValueError, match="Row 0 of the data set: the prompt is plain text without messages"):
        trainer.train()
    trainer = make_trainer(tmp_path, dataset=prompts_dataset().to_iterable_dataset(), query_span="user")
    with pytest.raises(ValueError, match="Row 0 of the batch: the prompt is plain text without messages"):
        trainer.train()


def test_rows_are_named_by_their_place_in_the_data(config):
    """Also where rows before it were left out as too long."""
    reads = (
        "{% for m in messages %}{{ '<|user|>' + m.content + ('!' if m.content[0] == 'w' else '') + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    data = prompts_dataset([chat("1+1"), chat("a long prompt that is left out"), chat("2+2"), chat("what?")])
    fields = {"query_span": "user", "max_prompt_length": 12}
    mapper = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(template=reads), config(**fields))
    with pytest.raises(
        ValueError, match="Row 3 of the data set: its chat template .*depending on what the message says"
    ):
        mapper(data)


@pytest.mark.parametrize("value", ["users", None, True])
def test_values_are_checked(value):
    with pytest.raises(ValueError, match=f"query_span must be one of 'prompt', 'user', 'content', found {value!r}"):
        ERPOConfig("out", use_cpu=True, query_span=value)


def test_spans_with_lora(tmp_path):
    trainer = make_trainer(
        tmp_path, model=lora_model(pretrained=True), dataset=prompts_dataset(CHATS), query_span="user", max_steps=2
    )
    trainer.train()
    assert logged(trainer, "query/kl")[0] == pytest.approx(0.0, abs=1e-9)
