"""The reference table: right values, found again when nothing changed, new when anything that matters did, never stale.

Forwards are counted at the model's trunk, so "nothing recomputed" means no call at all.
"""

import copy
import logging
import math
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from helpers import (
    BOS,
    EOS,
    SPECIALS,
    TEMPLATE,
    TEMPLATE_WITHOUT_SYSTEM,
    UNEQUAL,
    Recorder,
    byte_tokenizer,
    chat,
    constant_reward,
    count_forwards,
    double_copy,
    fixed_rollouts,
    logged,
    lora_config,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    prompt_token_ids,
    prompts_dataset,
    rows_of,
    shift_reference,
    tiny_model,
    token_logps,
)
from peft import PromptTuningConfig
from transformers.utils import logging as transformers_logging

from erpo_trl import DatasetMapper
from erpo_trl.query.table import ReferenceTable
from erpo_trl.query.weights import of_means

COLUMNS = ["ref_query_logps", "query_span", "ref_query_nll", "query_weight", "query_fingerprint"]


@pytest.fixture
def mapped(config):
    """`mapped(model, dataset)` -> (data set with columns, report, forwards)."""

    def run(model, dataset=None, tokenizer=None, mean_nll=None, **fields):
        population = None if mean_nll is None else of_means(mean_nll, mean_nll)
        mapper = DatasetMapper(model, tokenizer or byte_tokenizer(), config(**fields))
        with count_forwards(model) as counter:
            data = mapper(prompts_dataset() if dataset is None else dataset, population=population)
        assert mapper.report.forwards == counter.calls
        return data, mapper.report, counter.calls

    return run


def plain_logps(model, ids, temperature=1.0):
    with torch.no_grad():
        return token_logps(double_copy(model), list(ids), temperature)


def mean_k3(reference, policy, prompts) -> float:
    """Mean over prompts of the k3 drift per token of `policy` from `reference`, both plain float64 models."""
    queries = [tuple(byte_tokenizer()(prompt)["input_ids"]) for prompt in prompts]
    with torch.no_grad():
        before = {query: token_logps(reference, list(query)) for query in queries}
        return penalty_of(policy, queries, before, alpha=1.0).item()


def assert_row(row, model, ids, temperature=1.0):
    expected = plain_logps(model, ids, temperature)
    column = torch.tensor(row["ref_query_logps"], dtype=torch.float64)
    torch.testing.assert_close(column, expected, atol=2e-5, rtol=0)
    assert row["ref_query_nll"] == pytest.approx(-expected.sum().item(), abs=1e-3)


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("batch_tokens", [1, 40, 16384])
def test_values_against_plain_logits(mapped, batch_tokens):
    """Every token of every prompt, rows in their order, one value per token but the first, weights from the mean."""
    model = tiny_model("qwen2")
    data, report, forwards = mapped(model, reference_batch_tokens=batch_tokens)
    tokenizer = byte_tokenizer()
    assert data["prompt"] == prompts_dataset()["prompt"]
    nll = []
    for row in data:
        ids = tokenizer(row["prompt"])["input_ids"]
        assert len(row["ref_query_logps"]) == len(ids) - 1
        assert_row(row, model, ids)
        nll.append(-plain_logps(model, ids).sum().item())
    mean = sum(nll) / len(nll)
    assert report.mean_nll == pytest.approx(mean, rel=1e-5)
    assert list(data["query_weight"]) == pytest.approx([min(mean / s, 2.0) for s in nll], rel=1e-5)
    assert (report.rows, report.scored, report.reused, report.unscorable) == (8, 8, 0, 0)
    # The shortest would pad by more than a forward of its own costs
    assert forwards == {1: 8, 40: forwards, 16384: 2}[batch_tokens]
    assert 1 < forwards < 8 or batch_tokens != 40


def test_token_budget_holds(config):
    """No forward is larger than the budget, padding included, unless a single prompt alone is."""
    model = tiny_model("qwen2")
    sizes = []
    model.model.register_forward_pre_hook(lambda m, a, k: sizes.append(k["input_ids"].shape), with_kwargs=True)
    lengths = [len(p) for p in UNEQUAL]
    DatasetMapper(model, byte_tokenizer(), config(reference_batch_tokens=36))(prompts_dataset())
    assert sum(rows for rows, _ in sizes) == len(lengths)
    assert all(rows * width <= 36 or rows == 1 for rows, width in sizes)
    padding = sum(rows * width for rows, width in sizes) - sum(lengths)
    assert padding <= 0.2 * sum(lengths)  # sorted by length, the batches are nearly rectangular


def test_duplicates_are_scored_once(mapped):
    """Equal prompts are one query: scored once, every row gets the values, the order stays."""
    prompts = ["1+1=", "2+2=", "1+1=", "3", "1+1=", "2+2="]
    model = tiny_model("qwen2")
    data, report, _ = mapped(model, prompts_dataset(prompts), reference_batch_tokens=1)
    assert (report.rows, report.scored, report.duplicates, report.unscorable) == (6, 2, 3, 1)
    assert report.forwards == 2
    assert data["ref_query_logps"][0] == data["ref_query_logps"][2] == data["ref_query_logps"][4]
    assert data["ref_query_logps"][1] == data["ref_query_logps"][5]
    assert data["ref_query_logps"][0] != data["ref_query_logps"][1]
    for row in data:
        if row["prompt"] != "3":
            assert_row(row, model, byte_tokenizer()(row["prompt"])["input_ids"])
    # Duplicates count as rows in the mean: 3 and 2 of them
    first, second = data["ref_query_nll"][0], data["ref_query_nll"][1]
    assert report.mean_nll == pytest.approx((3 * first + 2 * second) / 5, rel=1e-5)


def test_one_token_prompts(mapped):
    """T = 1: no likelihood, an empty list, weight 1, left out of the mean and counted."""
    data, report, _ = mapped(tiny_model("qwen2"), prompts_dataset(["a", "bc", "d", "efg"]))
    assert (report.unscorable, report.scored) == (2, 2)
    assert [len(row) for row in data["ref_query_logps"]] == [0, 1, 0, 2]
    assert data["query_weight"][0] == data["query_weight"][2] == 1.0
    mean = (data["ref_query_nll"][1] + data["ref_query_nll"][3]) / 2
    assert report.mean_nll == pytest.approx(mean, rel=1e-6)
    assert data["query_weight"][1] == pytest.approx(min(mean / data["ref_query_nll"][1], 2.0), rel=1e-5)


def test_only_one_token_prompts(mapped):
    """Nothing to score at all: no forward is wrong, no mean exists, every weight is 1."""
    data, report, _ = mapped(tiny_model("qwen2"), prompts_dataset(["a", "b", "c"]))
    assert (report.scored, report.unscorable) == (0, 3)
    assert list(data["query_weight"]) == [1.0, 1.0, 1.0]


def test_first_rows_do_not_set_the_type(mapped):
    """`datasets` infers a list's type from its first rows: with empty ones first, the floats must still be floats."""
    data, _, _ = mapped(tiny_model("qwen2"), prompts_dataset(["a"] * 1001 + ["what is 2+2?"]))
    assert data.features["ref_query_logps"].feature.dtype == "float32"
    assert data.features["ref_query_nll"].dtype == data.features["query_weight"].dtype == "float32"
    assert data.features["query_fingerprint"].dtype == "string"
    assert data[0]["ref_query_logps"] == []
    assert_row(data[1001], tiny_model("qwen2"), byte_tokenizer()("what is 2+2?")["input_ids"])


def test_other_columns_stay(mapped):
    """The user's columns keep values and types; only the four of the reference are added."""
    source = prompts_dataset(["1+1=", "2+3="], answer=["2", "5"], level=[None, 3])
    data, _, _ = mapped(tiny_model("qwen2"), source)
    assert data.column_names == ["prompt", "answer", "level", *COLUMNS]
    assert data["answer"] == ["2", "5"] and data["level"] == [None, 3]
    assert {name: data.features[name] for name in source.features} == dict(source.features)


def test_pad_is_eos_with_eos_inside(mapped):
    """pad = eos: the eos that ends a turn in the middle of a prompt is a token to score, found by attention, not by id."""
    tokenizer = byte_tokenizer(pad_is_eos=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    long = [*chat("hi"), {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "and then"}]
    model = tiny_model("llama")
    data, _, _ = mapped(model, Dataset.from_dict({"prompt": [long, chat("a")]}), tokenizer)
    for row in data:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert EOS in ids[:-1]
        assert len(row["ref_query_logps"]) == len(ids) - 1
        assert_row(row, model, ids)


# ------------------------------------------------------------------------------------------------- the ids that are trained
def trained_prompts(tmp_path, **settings):
    """(ids scored -> row of columns, ids trained) of one optimizer step over the whole data set."""
    trainer = make_trainer(tmp_path, per_device_train_batch_size=2 * len(settings["dataset"]), **settings)
    recorder = Recorder().attach(trainer)
    trainer.train()
    trained = {tuple(row["prompt"]) for row in rows_of(recorder.done[0].batches[0])}
    return trainer, trained


@pytest.mark.parametrize("conversational", [True, False])
def test_one_bos(tmp_path, raw_advantages, conversational):
    """Template and post-processor both write BOS: the query has exactly one, in scoring and in training."""
    text = byte_tokenizer()("hi")["input_ids"]
    expected = [BOS, SPECIALS.index("<|user|>"), *text, EOS, SPECIALS.index("<|assistant|>")]
    if not conversational:
        expected = [BOS, *text]
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    data = Dataset.from_dict({"prompt": [chat("hi") if conversational else "hi"] * 2})
    trainer, trained = trained_prompts(tmp_path, model=model, dataset=data, tokenizer=byte_tokenizer(bos=True))
    assert trained == {tuple(expected)}
    assert_row(trainer.train_dataset[0], reference, expected)


def test_unusual_text(tmp_path, raw_advantages):
    """Emoji, combining marks and right-to-left text are scored as they are trained on."""
    prompts = ["🙂👩‍🚀 = ?", "é́́ o̲", "שלום 2+2؟", "線形代数"]
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    tokenizer = byte_tokenizer()
    trainer, trained = trained_prompts(tmp_path, model=model, dataset=prompts_dataset(prompts), tokenizer=tokenizer)
    assert trained == {tuple(tokenizer(p)["input_ids"]) for p in prompts}
    for row in trainer.train_dataset:
        assert_row(row, reference, tokenizer(row["prompt"])["input_ids"])
        assert tokenizer.decode(tokenizer(row["prompt"])["input_ids"]) == row["prompt"]


def test_conversation_that_ends_in_a_tool_turn(tmp_path, raw_advantages):
    """A conversation may end in a tool's answer: scoring and training render the same ids."""
    prompts = [
        [*chat("2+2?"), {"role": "assistant", "content": "calc(2+2)"}, {"role": "tool", "content": answer}]
        for answer in ("4", "four")
    ]
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    tokenizer = byte_tokenizer()
    data = Dataset.from_dict({"prompt": prompts})
    trainer, trained = trained_prompts(tmp_path, model=model, dataset=data, tokenizer=tokenizer)
    rendered = [tuple(tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"]) for p in prompts]
    assert trained == set(rendered)
    for row, ids in zip(trainer.train_dataset, rendered):
        assert_row(row, reference, ids)


def test_template_arguments_reach_scoring(tmp_path, raw_advantages):
    """`chat_template_kwargs` change the ids: the reference is scored on what they give."""
    template = "{% if brief %}{{ 'be brief ' }}{% endif %}" + TEMPLATE
    tokenizer = byte_tokenizer(template=template)
    model = tiny_model("llama")
    reference = copy.deepcopy(model)
    data = Dataset.from_dict({"prompt": [chat("2+2?"), chat("17+5?")]})
    trainer, trained = trained_prompts(
        tmp_path, model=model, dataset=data, tokenizer=tokenizer, chat_template_kwargs={"brief": True}
    )
    for row in trainer.train_dataset:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, brief=True)["input_ids"]
        assert tuple(ids) in trained
        assert_row(row, reference, ids)


def test_other_ids_in_training_fail_with_the_row(tmp_path):
    """A rollout that rewrites a prompt trains on ids that were never scored: the run stops and names the row."""

    def rewritten(prompts, trainer):
        return [[*ids, 40] if p == UNEQUAL[3] else ids for p, ids in zip(prompts, prompt_token_ids(prompts, trainer))]

    trainer = make_trainer(
        tmp_path,
        rollout=fixed_rollouts(prompt_ids_of=rewritten),
        per_device_train_batch_size=16,
        shuffle_dataset=False,
    )
    with pytest.raises(ValueError, match="(?i)row") as error:
        trainer.train()
    assert UNEQUAL[3] in str(error.value)


def test_a_column_of_the_wrong_length_is_refused_or_rescored(tmp_path, mapped):
    """A stored list that does not have T - 1 values can't belong to the prompt, whatever its fingerprint says."""
    model = tiny_model("qwen2")
    data, _, _ = mapped(model)
    rows = [row[:-1] for row in data["ref_query_logps"]]
    feature = data.features["ref_query_logps"]
    data = data.remove_columns("ref_query_logps").add_column("ref_query_logps", rows, feature=feature)
    trainer = make_trainer(tmp_path, model=model, dataset=data)
    try:
        trainer.train()
    except ValueError as error:
        assert "ref_query_logps" in str(error)
    else:
        assert [len(row) for row in trainer.train_dataset["ref_query_logps"]] == [len(p) - 1 for p in UNEQUAL]
        assert logged(trainer, "query/kl")[0] < 1e-9


def test_a_row_that_cannot_be_rendered_is_named(mapped):
    """A template that raises on a system turn: the error carries the index of the row, before anything is trained."""
    tokenizer = byte_tokenizer(template=TEMPLATE_WITHOUT_SYSTEM)
    data = Dataset.from_dict({"prompt": [chat("one"), chat("two"), chat("three", system="You add."), chat("four")]})
    with pytest.raises(ValueError, match=r"Row 2\b") as error:
        mapped(tiny_model("qwen2"), data, tokenizer)
    assert "System role not supported" in str(error.value)


def test_a_row_that_cannot_be_rendered_stops_the_trainer(tmp_path):
    """The same through the trainer: it fails before the first update, with the row."""
    tokenizer = byte_tokenizer(template=TEMPLATE_WITHOUT_SYSTEM)
    data = Dataset.from_dict({"prompt": [chat("one"), chat("two", system="You add.")]})
    trainer = make_trainer(tmp_path, dataset=data, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"Row 1\b"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("prompt", [None, ""], ids=["missing", "empty"])
def test_a_row_without_tokens_is_named_or_counted(mapped, prompt):
    """A prompt of no tokens can't be generated from: it is named by its index, or left out and counted."""
    data = Dataset.from_dict({"prompt": ["1+1=", prompt, "2+2="]})
    try:
        result, report, _ = mapped(tiny_model("qwen2"), data)
    except (ValueError, TypeError) as error:
        assert "row 1" in str(error).lower()
    else:
        assert report.dropped == 1 and result["prompt"] == ["1+1=", "2+2="]


# --------------------------------------------------------------------------------------------------- over-long prompts
def test_long_prompts_are_dropped_and_counted(mapped):
    """Longer than `max_prompt_length`: left out, counted; the others keep order and values. The limit itself is allowed."""
    prompts = ["a" * 20, "b" * 64, "c" * 19, "d" * 200, "e" * 21]
    model = tiny_model("qwen2")
    data, report, _ = mapped(model, prompts_dataset(prompts), max_prompt_length=20)
    assert data["prompt"] == ["a" * 20, "c" * 19]
    assert (report.rows, report.dropped, report.scored) == (2, 3, 2)
    for row in data:
        assert_row(row, model, byte_tokenizer()(row["prompt"])["input_ids"])


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_prompts_beyond_the_context_never_reach_the_model(tmp_path, kind, caplog):
    """A context of 64 and prompts of 20, 64 and 200 tokens: one policy in scoring, training and evaluation, no crash."""
    context = {"gpt2": {"n_positions": 64}}.get(kind, {"max_position_embeddings": 64})
    model = tiny_model(kind, **context)
    prompts = ["a" * 20, "b" * 64, "c" * 200, "d" * 10]
    trainer = make_trainer(
        tmp_path,
        model=model,
        dataset=prompts_dataset(prompts),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        max_steps=3,
        trainer_kwargs={"eval_dataset": prompts_dataset(prompts)},
    )
    trainer.train()
    metrics = trainer.evaluate()
    kept = [len(p) for p in trainer.train_dataset["prompt"]]
    assert kept == [20, 10]
    assert [len(row) for row in trainer.train_dataset["ref_query_logps"]] == [n - 1 for n in kept]
    assert math.isfinite(metrics["eval_query/kl"])
    assert trainer.state.global_step == 3


def test_all_prompts_too_long(mapped):
    """Nothing left to train on is an error, not an empty run."""
    with pytest.raises(ValueError, match="max_prompt_length|too long|longer"):
        mapped(tiny_model("qwen2"), prompts_dataset(["a" * 30, "b" * 40]), max_prompt_length=20)


# -------------------------------------------------------------------------------------------- found again, or computed anew
def test_second_run_makes_no_forward(mapped):
    """The same model, prompts and settings again, with new objects throughout: everything is found, nothing computed."""
    first, report, forwards = mapped(tiny_model("qwen2"))
    assert report.scored == 8 and forwards > 0
    second, report, forwards = mapped(tiny_model("qwen2"), tokenizer=byte_tokenizer())
    assert (report.scored, report.reused, forwards) == (0, 8, 0)
    assert second.to_dict() == first.to_dict()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mode_and_objects_do_not_matter(mapped, mode):
    """train() or eval(), gradients or none, another mapper: object state that does not change values recomputes nothing."""
    first, _, _ = mapped(tiny_model("qwen2"))
    model = tiny_model("qwen2")
    getattr(model, mode)()
    for parameter in model.parameters():
        parameter.requires_grad_(mode == "train")
    model(input_ids=torch.tensor([[20, 21]]))
    second, report, forwards = mapped(model)
    assert (report.scored, forwards) == (0, 0)
    assert second.to_dict() == first.to_dict()


def test_columns_already_there_cost_nothing(mapped):
    """A mapped data set mapped again by the same reference: no forward, even where the table is gone."""
    first, _, _ = mapped(tiny_model("qwen2"))
    second, report, forwards = mapped(tiny_model("qwen2"), first)
    assert (report.scored, forwards) == (0, 0)
    assert second.to_dict() == first.to_dict()


def test_growing_data_sets_score_only_what_is_new(mapped):
    """A second data set with one new prompt scores that prompt; the mean runs over the rows at hand."""
    model = tiny_model("qwen2")
    mapped(model, prompts_dataset(UNEQUAL[:4]))
    data, report, forwards = mapped(model, prompts_dataset([UNEQUAL[7], *UNEQUAL[:4]]))
    assert (report.scored, report.reused, forwards) == (1, 4, 1)
    assert_row(data[0], model, byte_tokenizer()(UNEQUAL[7])["input_ids"])
    assert report.mean_nll == pytest.approx(sum(data["ref_query_nll"]) / 5, rel=1e-5)


def test_one_changed_weight(mapped):
    """One weight of one matrix: the table is another one, and its values are those of the changed model."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.5
    second, report, _ = mapped(model)
    assert report.scored == 8
    assert second["ref_query_logps"] != first["ref_query_logps"]
    assert_row(second[1], model, byte_tokenizer()(UNEQUAL[1])["input_ids"])
    # ... and back again: the first table is still there
    with torch.no_grad():
        model.load_state_dict(tiny_model("qwen2").state_dict())
    third, report, forwards = mapped(model)
    assert (report.scored, forwards) == (0, 0)
    assert third.to_dict() == first.to_dict()


def test_changed_columns_of_another_reference(mapped):
    """A mapped data set with another model: its columns are replaced, not believed."""
    first, _, _ = mapped(tiny_model("qwen2", seed=0))
    model = tiny_model("qwen2", seed=1)
    second, report, _ = mapped(model, first)
    assert report.scored == 8
    assert_row(second[1], model, byte_tokenizer()(UNEQUAL[1])["input_ids"])
    assert second.column_names == first.column_names


def test_changed_adapter(mapped):
    """A pretrained adapter's weights are part of the reference."""
    model = lora_model(pretrained=True)
    first, _, _ = mapped(model)
    name, parameter = next((n, p) for n, p in model.named_parameters() if "lora_B" in n)
    with torch.no_grad():
        parameter[0, 0] += 1.0
    second, report, _ = mapped(model)
    assert report.scored == 8
    assert_row(second[1], model, byte_tokenizer()(UNEQUAL[1])["input_ids"])


def test_fresh_adapter_of_another_draw(mapped):
    """lora_A is random but lora_B is 0: a fresh adapter of any draw has the base model as its reference."""
    base, _, _ = mapped(tiny_model("llama"))
    model = lora_model(pretrained=False)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.normal_()
    data, report, _ = mapped(model)
    torch.testing.assert_close(
        torch.tensor(data["ref_query_logps"][1]), torch.tensor(base["ref_query_logps"][1]), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(
    "kind, field, value", [("gemma2", "final_logit_softcapping", 7.0), ("cohere", "logit_scale", 0.5)]
)
def test_changed_head_setting(mapped, kind, field, value):
    """The same weights under another soft-cap or scale give other log-probs."""
    mapped(tiny_model(kind))
    model = tiny_model(kind, **{field: value})
    data, report, _ = mapped(model)
    assert report.scored == 8
    assert_row(data[1], model, byte_tokenizer()(UNEQUAL[1])["input_ids"])


def test_changed_temperature(mapped):
    """The sampling temperature divides the logits: another temperature, another table."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    second, report, _ = mapped(model, temperature=0.5)
    assert report.scored == 8
    for row in second:
        assert_row(row, model, byte_tokenizer()(row["prompt"])["input_ids"], temperature=0.5)


def test_mapped_at_another_temperature_is_not_believed(tmp_path, mapped):
    """A table built at temperature 1 and a run at 0.7: rescored, so the drift starts at 0 and not at the mismatch."""
    data, _, _ = mapped(tiny_model("qwen2"))
    trainer = make_trainer(tmp_path, dataset=data, temperature=0.7)
    trainer.train()
    assert logged(trainer, "query/kl")[0] < 1e-9


def test_changed_template(mapped):
    """Another template renders other ids: new values, no stale row."""
    model = tiny_model("qwen2")
    data = Dataset.from_dict({"prompt": [chat("2+2?"), chat("17+5?")]})
    first, _, _ = mapped(model, data)
    tokenizer = byte_tokenizer(template=TEMPLATE.replace("eos_token", "'\n'"))
    second, report, _ = mapped(model, first, tokenizer)
    assert report.scored == 2
    for row in second:
        assert_row(row, model, tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])


def test_changed_prompts_under_old_columns(mapped):
    """Prompts edited after mapping: the columns of the edited row are replaced, the other row's are kept."""
    model = tiny_model("qwen2")
    data, _, _ = mapped(model, prompts_dataset(["1+1=", "2+2="]))
    edited = data.remove_columns("prompt").add_column("prompt", ["1+1=", "2+3="])
    again, report, _ = mapped(model, edited)
    assert (report.scored, report.reused) == (1, 1)
    assert_row(again[1], model, byte_tokenizer()("2+3=")["input_ids"])


def test_changed_clip_needs_no_forward(mapped):
    """Weights follow from the NLL: other clip bounds give other weights and score nothing."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    second, report, forwards = mapped(model, first, query_weight_clip=[0.9, 1.1])
    assert (report.scored, forwards) == (0, 0)
    assert list(second["query_weight"]) == pytest.approx([min(max(w, 0.9), 1.1) for w in first["query_weight"]])
    third, _, forwards = mapped(model, first, query_weight="uniform")
    assert forwards == 0 and list(third["query_weight"]) == [1.0] * 8


def test_data_set_on_disk(tmp_path, mapped):
    """A data set from a file, where `map` caches by fingerprint: a changed model still gives new values."""
    prompts_dataset().to_json(str(tmp_path / "data.jsonl"))
    model = tiny_model("qwen2")
    results = []
    for delta in (0.0, 0.5, 0.0):
        source = load_dataset(
            "json", data_files=str(tmp_path / "data.jsonl"), split="train", cache_dir=str(tmp_path / "c")
        )
        with torch.no_grad():
            model.load_state_dict(tiny_model("qwen2").state_dict())
            model.model.embed_tokens.weight[79] += delta
        data, report, forwards = mapped(model, source)
        results.append((list(data["ref_query_logps"]), forwards))
    assert results[0][0] == results[2][0] != results[1][0]
    assert results[1][1] > 0 and results[2][1] == 0


# ------------------------------------------------------------------------------------------------------------ the table's files
def table_files(tmp_path):
    return sorted(path for path in (tmp_path / "reference").rglob("*") if path.is_file())


def test_leftovers_of_a_killed_run(tmp_path, mapped):
    """A killed run leaves temporary or half-written files: they are ignored or replaced, never read as values."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    files = table_files(tmp_path)
    assert files
    for path in files:
        (path.parent / (path.name + ".tmp")).write_bytes(path.read_bytes()[:100])
    second, report, _ = mapped(model)
    assert second.to_dict() == first.to_dict()
    assert report.scored == 0


@pytest.mark.parametrize("keep", [0, 100])
def test_truncated_file(tmp_path, mapped, keep):
    """A truncated table is not believed: its rows are scored again and the next run finds them."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    for path in table_files(tmp_path):
        path.write_bytes(path.read_bytes()[:keep])
    second, report, _ = mapped(model)
    assert report.scored == 8
    assert second.to_dict() == first.to_dict()
    third, report, forwards = mapped(model)
    assert (report.scored, forwards) == (0, 0)
    assert third.to_dict() == first.to_dict()


def test_scoring_killed_half_way(tmp_path, mapped):
    """Scoring that dies in its third forward leaves a table that the next run completes to the right values."""
    model = tiny_model("qwen2")
    calls = []

    def die(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.model.register_forward_pre_hook(die)
    with pytest.raises(KeyboardInterrupt):
        mapped(model, reference_batch_tokens=1)
    handle.remove()
    data, report, _ = mapped(model, reference_batch_tokens=1)
    assert report.scored + report.reused == 8
    for row in data:
        assert_row(row, model, byte_tokenizer()(row["prompt"])["input_ids"])


def test_interrupted_scoring_restores_the_model(mapped):
    """An exception in scoring must not leave the model in eval mode or with a patched forward."""
    model = tiny_model("qwen2").train()
    forward = model.forward
    handle = model.model.register_forward_pre_hook(lambda m, a: (_ for _ in ()).throw(MemoryError("out of memory")))
    state = torch.get_rng_state()
    with pytest.raises(MemoryError):
        mapped(model)
    handle.remove()
    assert model.training and model.forward == forward
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------ columns reach the loss
@pytest.mark.parametrize("remove_unused", [True, False])
@pytest.mark.parametrize("shift, expected", [(-1.0, 1 / math.e), (1.0, math.e - 2)])
def test_shifted_column_shows_at_the_first_step(tmp_path, mapped, shift, expected, remove_unused):
    """x = log P_0 - log P_theta: a reference one nat too low gives 1/e at the first step, one too high e - 2."""
    model = tiny_model("qwen2")
    data, _, _ = mapped(model)
    data = shift_reference(data, shift)
    trainer = make_trainer(tmp_path, model=model, dataset=data, remove_unused_columns=remove_unused)
    trainer.train()
    assert logged(trainer, "query/kl")[0] == pytest.approx(expected, abs=2e-5)
    assert logged(trainer, "query/kl_max")[0] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    "layout", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}]
)
def test_columns_stay_with_their_rows(tmp_path, mapped, layout, raw_advantages):
    """Row i's reference is moved by (i + 1)/10 nats: after TRL's shuffle and split each query still meets its own."""
    model = tiny_model("qwen2")
    data, _, _ = mapped(model)
    shift_of = {tuple(byte_tokenizer()(p)["input_ids"]): (i + 1) / 10 for i, p in enumerate(data["prompt"])}
    data = shift_reference(data, lambda i: (i + 1) / 10)
    trainer = make_trainer(tmp_path, model=model, dataset=data, learning_rate=0.0, max_steps=6, **layout)
    recorder = Recorder().attach(trainer)
    trainer.train()
    for step, found in zip(recorder.done, logged(trainer, "query/kl")):
        queries = {tuple(row["prompt"]) for batch in step.batches for row in rows_of(batch)}
        values = [math.exp(shift_of[q]) - shift_of[q] - 1 for q in queries]
        assert found == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_trainer_scores_what_is_missing(tmp_path):
    """Without columns the trainer scores when training starts, once; `prepare_reference` twice costs nothing more."""
    trainer = make_trainer(tmp_path)
    with count_forwards(trainer.model) as counter:
        trainer.prepare_reference()
        after_first = counter.calls
        trainer.prepare_reference()
        assert 0 < after_first == counter.calls
    assert set(COLUMNS) <= set(trainer.train_dataset.column_names)
    before = trainer.train_dataset.to_dict()
    trainer.train()
    assert trainer.train_dataset.to_dict() == before


# ----------------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_data_keeps_out_of_the_mean(tmp_path):
    """Evaluation prompts get columns and weights from the training mean; training weights do not move."""
    model = tiny_model("qwen2")
    evaluation = prompts_dataset(["an entirely different and much longer question: 1+1?", "3*3="])
    runs = []
    for i, eval_dataset in enumerate([None, evaluation]):
        trainer = make_trainer(
            tmp_path / str(i),
            model=copy.deepcopy(model),
            per_device_eval_batch_size=2,
            trainer_kwargs={"eval_dataset": eval_dataset} if eval_dataset is not None else None,
        )
        trainer.prepare_reference()
        runs.append(trainer)
    assert runs[0].train_dataset["query_weight"] == runs[1].train_dataset["query_weight"]
    mean = sum(runs[0].train_dataset["ref_query_nll"]) / 8
    metrics = runs[1].evaluate()
    assert metrics["eval_query/kl"] < 1e-9
    rows = runs[1].eval_dataset
    for prompt, weight in zip(rows["prompt"], rows["query_weight"]):
        nll = -plain_logps(model, byte_tokenizer()(prompt)["input_ids"]).sum().item()
        assert weight == pytest.approx(min(mean / nll, 2.0), rel=1e-4)


def test_drift_on_evaluation_data_after_training(tmp_path):
    """Evaluation data given at construction is scored before training: afterwards its drift is that of the two models."""
    model = tiny_model("qwen2")
    start = double_copy(model)
    prompts = ["3*3=", "what is left of 9-8?"]
    trainer = make_trainer(
        tmp_path,
        model=model,
        learning_rate=0.1,
        max_steps=2,
        per_device_eval_batch_size=2,
        query_kl_coef=0.0,
        trainer_kwargs={"eval_dataset": prompts_dataset(prompts)},
    )
    trainer.train()
    found = trainer.evaluate()["eval_query/kl"]
    now = double_copy(trainer.model)
    expected = mean_k3(start, now, prompts)
    assert expected > 1e-4
    assert found == pytest.approx(expected, rel=1e-3)


def test_new_evaluation_data_after_full_training_is_refused(tmp_path):
    """The full model has moved, its start is gone: scoring a new data set with it would take the policy for the reference."""
    trainer = make_trainer(tmp_path, learning_rate=0.1, per_device_eval_batch_size=2)
    trainer.train()
    with pytest.raises(Exception, match="reference") as error:
        trainer.evaluate(prompts_dataset(["3*3=", "8-2="]))
    message = str(error.value)
    assert "DatasetMapper" in message or "eval_dataset" in message, "the message must say how to supply a reference"


def test_known_evaluation_data_after_full_training(tmp_path):
    """Prompts that the table already holds need no reference model: evaluate works and their values are the old ones."""
    model = tiny_model("qwen2")
    start = double_copy(model)
    trainer = make_trainer(tmp_path, model=model, learning_rate=0.1, per_device_eval_batch_size=2, query_kl_coef=0.0)
    trainer.train()
    found = trainer.evaluate(prompts_dataset(UNEQUAL[:2]))["eval_query/kl"]
    now = double_copy(trainer.model)
    expected = mean_k3(start, now, UNEQUAL[:2])
    assert found == pytest.approx(expected, rel=1e-3)


def test_new_evaluation_data_after_training_a_fresh_adapter(tmp_path):
    """The base of a LoRA run is still there: new data is scored by it, with the trained adapter off."""
    model = tiny_model("llama")
    base = double_copy(model)
    trainer = make_trainer(
        tmp_path,
        model=model,
        learning_rate=5.0,
        max_steps=2,
        per_device_eval_batch_size=2,
        query_kl_coef=0.0,
        trainer_kwargs={"peft_config": lora_config()},
    )
    trainer.train()
    prompts = ["3*3=", "what is left of 9-8?"]
    found = trainer.evaluate(prompts_dataset(prompts))["eval_query/kl"]
    now = double_copy(trainer.model)
    expected = mean_k3(base, now, prompts)
    assert expected > 1e-4, "the adapter was meant to have moved"
    assert found == pytest.approx(expected, rel=1e-3)


def test_second_train_call_keeps_the_reference(tmp_path):
    """train() twice on one trainer: the second call still measures against the start, not against the trained weights."""
    model = tiny_model("qwen2")
    start = double_copy(model)
    trainer = make_trainer(
        tmp_path,
        model=model,
        learning_rate=0.1,
        query_kl_coef=0.0,
        reward=constant_reward,
        per_device_train_batch_size=16,
    )
    trainer.train()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    now = double_copy(trainer.model)
    trainer.train()
    expected = mean_k3(start, now, UNEQUAL)
    assert logged(trainer, "query/kl")[-1] == pytest.approx(expected, rel=1e-3)


def test_report_is_logged(mapped, caplog):
    """A user sees how many rows were dropped without reading the report object."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        mapped(tiny_model("qwen2"), prompts_dataset(["a" * 20, "b" * 64]), max_prompt_length=20)
    transformers_logging.disable_propagation()
    text = caplog.text
    assert "1" in text and "max_prompt_length" in text


def test_the_cache_folder_is_used(tmp_path, mapped):
    """Removing the folder removes the table: the next run scores again, to the same values."""
    model = tiny_model("qwen2")
    first, _, _ = mapped(model)
    shutil.rmtree(tmp_path / "reference")
    second, report, _ = mapped(model)
    assert report.scored == 8
    assert second.to_dict() == first.to_dict()


def adapter_variant(kind):
    """Two models with the same weights whose adapters act differently."""
    model = lora_model(pretrained=True)
    if kind == "scaled":
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: 3 * value for name, value in module.scaling.items()}
    if kind == "other":
        model.add_adapter("other", lora_config())
        for name, parameter in model.named_parameters():
            if ".other." in name and "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.set_adapter("other")
    return model


@pytest.mark.parametrize("kind", ["scaled", "other"])
def test_adapters_that_act_differently_do_not_share_a_table(tmp_path, kind):
    """Scaling and the choice of the active adapter are not weights, but they change every log-prob."""
    first = make_trainer(tmp_path, model=adapter_variant("plain"))
    first.prepare_reference()
    second = make_trainer(tmp_path, model=adapter_variant(kind))
    second.train()
    assert second.state.log_history[0]["query/kl"] < 1e-9


def test_scoring_leaves_frozen_adapter_weights_frozen(config):
    """Leaving PEFT's `disable_adapter` makes every adapter weight trainable."""
    model = lora_model(pretrained=False)
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    DatasetMapper(model, byte_tokenizer(), config())(prompts_dataset())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert any(before.values())


@pytest.mark.parametrize("fields", [{"cast_lm_head_to_fp32": True}, {"beta": 0.04}])
def test_table_made_alone_serves_the_trainer(tmp_path, fields):
    """TRL upcasts the head and adds a frozen "ref" adapter; neither changes what the reference is."""
    model = tiny_model("llama", dtype=torch.bfloat16) if "beta" not in fields else lora_model(pretrained=True)
    DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path, **fields))(prompts_dataset())
    trainer = make_trainer(tmp_path, model=model, **fields)
    trainer.prepare_reference()
    assert trainer.dataset_mapper.report.scored == 0


def test_dropout_is_said(tmp_path, caplog):
    """With dropout the policy's log-probs are noisy, and so is the drift."""
    transformers_logging.enable_propagation()
    try:
        for disable in (False, True):  # TRL turns off modules, and attention's rate is none
            make_trainer(tmp_path, model=tiny_model("llama", attention_dropout=0.5), disable_dropout=disable)
            assert "trains with dropout (up to 0.5)" in caplog.text
            assert "model_init_kwargs={'attention_dropout': 0.0}" in caplog.text
            caplog.clear()
        make_trainer(tmp_path, model=tiny_model("llama", attention_dropout=0.0))
        assert "dropout" not in caplog.text
    finally:
        transformers_logging.disable_propagation()


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluations_in_other_weights_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=True casts the weights"):
        make_trainer(tmp_path, **{name: True})


def test_layers_replaced_after_scoring_are_refused(tmp_path):
    with pytest.raises(ValueError, match="use_liger_kernel=True replaces layers.*'use_kernels': True"):
        make_trainer(tmp_path, use_liger_kernel=True)


def test_continuous_batching_of_other_weights_is_refused(tmp_path):
    """TRL casts them to the compute dtype at the first generation: the reference would be of other weights."""
    fields = {"use_transformers_continuous_batching": True, "bf16": True}
    with pytest.raises(ValueError, match=r"casts the weights to torch.bfloat16.*'dtype': 'bfloat16'.*bf16=False"):
        make_trainer(tmp_path, model=tiny_model("llama"), **fields)
    with pytest.raises(ValueError, match="casts the weights"):
        make_trainer(tmp_path, model=lora_model(pretrained=False), **fields)
    make_trainer(tmp_path, model=tiny_model("llama", dtype=torch.bfloat16), **fields)
    make_trainer(tmp_path, model=tiny_model("llama", dtype=torch.bfloat16), cast_lm_head_to_fp32=True, **fields)
    make_trainer(tmp_path, model=tiny_model("llama"), **fields | {"bf16": False})


def test_prompt_learning_is_refused(tmp_path):
    """Virtual tokens stand at a distance from the prompt that its padding changes."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="Prompt-learning adapters .* are not supported"):
        make_trainer(tmp_path, trainer_kwargs={"peft_config": config})


def test_values_that_are_no_numbers(tmp_path, config):
    """A NaN in the reference would silently become the loss."""
    model = tiny_model("qwen2")
    broken = byte_tokenizer()("~")["input_ids"][0]
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = float("nan")
    with pytest.raises(ValueError, match="no finite number: 'th~ree'"):
        DatasetMapper(model, byte_tokenizer(), config())(prompts_dataset(["one", "th~ree"]))


@pytest.mark.parametrize(
    "data, error, message",
    [
        (lambda: prompts_dataset([]), ValueError, "has no rows"),
        (lambda: DatasetDict({"train": prompts_dataset()}), TypeError, "found DatasetDict: map the splits"),
        (lambda: prompts_dataset().to_iterable_dataset(), TypeError, "found IterableDataset"),
        (
            lambda: prompts_dataset().rename_column("prompt", "text"),
            ValueError,
            r"no column 'prompt'; it has \['text'\]",
        ),
        (
            lambda: prompts_dataset(["a b", "c d"], query_weight=[1.0, 2.0]),
            ValueError,
            "has query_weight but not all of",
        ),
        (lambda: prompts_dataset().with_transform(lambda batch: batch), ValueError, "has a transform"),
    ],
)
def test_data_that_cannot_be_mapped(config, data, error, message):
    """Each with what to do."""
    with pytest.raises(error, match=message):
        DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), config())(data())


@pytest.mark.parametrize("layout", ["numpy", "torch"])
def test_formatted_data(tmp_path, layout):
    """Formats change what rows look like; the columns arrive all the same."""
    trainer = make_trainer(tmp_path, dataset=prompts_dataset().with_format(layout))
    trainer.train()
    assert trainer.state.log_history[0]["query/kl"] < 1e-9
    assert trainer.train_dataset.format["type"] == layout


def test_predict(tmp_path):
    """A test set is mapped like an evaluation set."""
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4)
    metrics = trainer.predict(prompts_dataset(["new one", "new two"])).metrics
    assert metrics["test_loss"] == pytest.approx(0.0, abs=1.0)
    assert trainer.dataset_mapper.report.rows == 2


def test_unwritable_cache_is_named(tmp_path):
    """The message names the setting."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    trainer = make_trainer(tmp_path, reference_cache_dir=str(blocked / "reference"))
    with pytest.raises(OSError, match="set reference_cache_dir"):
        trainer.prepare_reference()


def test_log_probs_stay_on_disk(tmp_path):
    """What a table holds in memory is its index; the log-probs are mapped from the files."""
    logps = [np.full(1000, -1.0, dtype=np.float32) for _ in range(500)]
    ReferenceTable(tmp_path).add(range(500), logps)
    before = pa.total_allocated_bytes()
    table = ReferenceTable(tmp_path)
    assert pa.total_allocated_bytes() - before < 100_000 < sum(row.nbytes for row in logps)
    assert table.take([499])[0].as_py() == [-1.0] * 1000
