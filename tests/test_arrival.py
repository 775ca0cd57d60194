"""Rows scored as they arrive train as rows scored beforehand do; s̄ is a running mean, or estimated on a sample."""

import copy

import pytest
import torch
from datasets import Dataset
from helpers import (
    UNEQUAL,
    byte_tokenizer,
    count_forwards,
    fixed_rollouts,
    logged,
    lora_model,
    make_trainer,
    prompts_dataset,
    tiny_model,
)

from erpo_trl.query.arrival import RunningMeans, sample_prompts

ROWS = UNEQUAL[:6]
SETTINGS = {
    "shuffle_dataset": False,
    "per_device_train_batch_size": 4,  # two prompts a step
    "max_steps": 6,
    "learning_rate": 5e-2,
    "query_kl_coef": 0.3,
}


def run(tmp_path, dataset, model, **fields):
    trainer = make_trainer(
        tmp_path, model=copy.deepcopy(model), dataset=dataset, rollout=fixed_rollouts(), **SETTINGS | fields
    )
    trainer.train()
    return trainer


def assert_same_run(one, other):
    for name in ("loss", "query/kl", "query/weight_mean"):
        assert logged(one, name) == pytest.approx(logged(other, name), rel=1e-5, abs=1e-6), name
    # A difference of sums of some 100 nats, in float32, of prompts that were padded otherwise
    assert logged(one, "query/nll_drift") == pytest.approx(logged(other, "query/nll_drift"), abs=1e-4)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


MODELS = {
    "full": lambda: tiny_model("qwen2"),
    "absolute_positions": lambda: tiny_model("gpt2"),
    "fresh_lora": lambda: lora_model(pretrained=False),
    "pretrained_lora": lambda: lora_model(pretrained=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_stream_is_the_mapped_run(tmp_path, kind):
    """Scored against the model before RL, also when it has moved: a copy of it, or the base under a fresh adapter.

    Three passes over a stream of six prompts with s̄ from all of them, against the same data mapped beforehand.
    """
    model, stream = MODELS[kind](), prompts_dataset(ROWS).to_iterable_dataset()
    streamed = run(tmp_path / "stream", stream, model, reference_sample_size=len(ROWS))
    mapped = run(tmp_path / "mapped", prompts_dataset(ROWS), model)
    assert_same_run(streamed, mapped)
    assert logged(streamed, "query/kl")[-1] > 1e-5
    assert (streamed._arrival.reference._frozen is None) == (kind == "fresh_lora")


def test_a_sample_stands_for_a_large_set(tmp_path):
    """Map-style data: only the sample is scored beforehand, the others in time; weights rest on the sample's mean."""
    model, size = tiny_model("qwen2"), 3
    trainer = run(tmp_path, prompts_dataset(ROWS), model, reference_sample_size=size)
    assert trainer.dataset_mapper.report.scored == size
    whole = run(tmp_path / "whole", prompts_dataset(ROWS), model, reference_sample_size=len(ROWS))
    assert_same_run(whole, run(tmp_path / "mapped", prompts_dataset(ROWS), model))
    drawn = sample_prompts(prompts_dataset(ROWS), size, trainer.args.seed)["prompt"]
    mapper = whole.dataset_mapper
    nll = {row["prompt"]: row["ref_query_nll"] for row in mapper(prompts_dataset(ROWS))}
    assert logged(trainer, "query/ref_nll_mean") == pytest.approx([sum(nll[p] for p in drawn) / size] * 6)


def test_running_mean():
    """The mean of the first batches, and from 1/(1 - decay) on an exponential moving average."""
    means, seen = RunningMeans(0.75), []
    for value in (4.0, 8.0, 3.0, 9.0):
        means.update(value, value / 2)
        seen.append(means.nll)
    assert seen == [4.0, 6.0, 5.0, 6.0]
    means.update(2.0, 1.0)
    assert (means.nll, means.token_nll) == (0.75 * 6 + 0.25 * 2, 0.5 * (0.75 * 6 + 0.25 * 2))


def test_stream_mean_runs_along(tmp_path):
    """Without a sample, s̄ at step t is the mean over the batches so far, and weights are s̄ over the row's NLL."""
    trainer = run(tmp_path, prompts_dataset(ROWS).to_iterable_dataset(), tiny_model("qwen2"), learning_rate=0.0)
    nll = [row["ref_query_nll"] for row in trainer.dataset_mapper(prompts_dataset(ROWS))]
    batches = [(nll[0] + nll[1]) / 2, (nll[2] + nll[3]) / 2, (nll[4] + nll[5]) / 2] * 2
    expected = [sum(batches[: t + 1]) / (t + 1) for t in range(6)]
    assert logged(trainer, "query/ref_nll_mean") == pytest.approx(expected, rel=1e-5)
    weights = [sum(min(2, s / nll[i]) for i in (2 * (t % 3), 2 * (t % 3) + 1)) / 2 for t, s in enumerate(expected)]
    assert logged(trainer, "query/weight_mean") == pytest.approx(weights, rel=1e-5)


def test_each_arriving_query_is_scored_once_a_generation(tmp_path):
    """One prompt-only forward for the distinct queries of a generation batch, beside TRL's own."""
    calls = {}
    for name, data in (("stream", prompts_dataset(ROWS).to_iterable_dataset()), ("mapped", prompts_dataset(ROWS))):
        trainer = make_trainer(
            tmp_path / name,
            model=lora_model(pretrained=False),
            dataset=data,
            rollout=fixed_rollouts(),
            **SETTINGS | {"num_iterations": 2, "max_steps": 4, "reference_batch_tokens": 1024},
        )
        trainer.prepare_reference()
        with count_forwards(trainer.model) as counter:
            trainer.train()
        calls[name] = counter.calls
    assert calls["stream"] - calls["mapped"] == 2  # two generations


def test_stream_resumes(tmp_path):
    """The reference is at hand again, s̄ and the place in the stream are those of the checkpoint."""
    fields = {"save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path, prompts_dataset(ROWS).to_iterable_dataset(), tiny_model("qwen2"), **fields)
    resumed = make_trainer(
        tmp_path,
        model=tiny_model("qwen2"),
        dataset=prompts_dataset(ROWS).to_iterable_dataset(),
        rollout=fixed_rollouts(),
        **SETTINGS | fields,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name in ("loss", "query/kl", "query/ref_nll_mean"):
        assert logged(resumed, name)[-4:] == pytest.approx(logged(whole, name)[-4:], rel=1e-5, abs=1e-7), name


def test_resume_from_trained_weights_is_refused(tmp_path):
    """The checkpoint's own weights are not the reference."""
    stream = prompts_dataset(ROWS).to_iterable_dataset()
    trained = run(tmp_path, stream, tiny_model("qwen2"), save_strategy="steps", save_steps=2).model
    resumed = make_trainer(tmp_path, model=trained, dataset=stream, rollout=fixed_rollouts(), **SETTINGS)
    with pytest.raises(ValueError, match="scored as they arrive.*pre-RL model"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_long_prompts_are_left_out(tmp_path):
    """Lazily from a stream, at once from a set."""
    limit = len(ROWS[0])
    short = sum(len(prompt) <= limit for prompt in ROWS)
    assert 2 <= short < len(ROWS)
    for data in (prompts_dataset(ROWS).to_iterable_dataset(), prompts_dataset(ROWS)):
        trainer = make_trainer(
            tmp_path, dataset=data, **SETTINGS | {"max_prompt_length": limit, "reference_sample_size": 2}
        )
        trainer.prepare_reference()
        assert len(list(trainer.train_dataset)) == short


def test_evaluation_rows_arrive_too(tmp_path):
    """They are weighted by the training stream's mean and leave it alone."""
    trainer = make_trainer(
        tmp_path,
        dataset=prompts_dataset(ROWS).to_iterable_dataset(),
        rollout=fixed_rollouts(),
        trainer_kwargs={"eval_dataset": prompts_dataset(UNEQUAL[6:8])},
        **SETTINGS | {"max_steps": 1, "learning_rate": 0.0, "per_device_eval_batch_size": 4},
    )
    trainer.train()
    mean = trainer._mean_nll
    metrics = trainer.evaluate()
    assert trainer._mean_nll == mean
    nll = [row["ref_query_nll"] for row in trainer.dataset_mapper(prompts_dataset(UNEQUAL[6:8]))]
    assert metrics["eval_query/nll"] == pytest.approx(sum(nll) / 2, rel=1e-5)
    assert metrics["eval_query/weight_mean"] == pytest.approx(sum(min(2, mean / x) for x in nll) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"reference_sample_size": 0}, "reference_sample_size must be a whole number of rows >= 1, found 0"),
        ({"reference_nll_decay": 1.0}, r"reference_nll_decay must be in \[0, 1\), found 1.0"),
    ],
)
def test_bad_settings_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **fields)


def test_evaluation_rows_have_the_same_limit(tmp_path):
    """Long evaluation prompts are left out as long training prompts are, whichever way their rows get their columns."""
    for evaluation in (
        prompts_dataset(["2+2=", "x" * 300]),
        prompts_dataset(["2+2=", "x" * 300]).to_iterable_dataset(),
    ):
        trainer = make_trainer(
            tmp_path,
            dataset=prompts_dataset(ROWS).to_iterable_dataset(),
            rollout=fixed_rollouts(),
            trainer_kwargs={"eval_dataset": evaluation},
            **SETTINGS | {"max_steps": 1, "per_device_eval_batch_size": 4, "max_prompt_length": 20},
        )
        trainer.train()
        assert trainer.evaluate()["eval_query/nll"] < 60


def test_the_limit_follows_the_tokenizer(tmp_path):
    """A set on disk is limited by today's tokens, not by those of an earlier run with another tokenizer."""
    path = tmp_path / "data.json"
    path.write_text("\n".join(f'{{"prompt": "{prompt}"}}' for prompt in [*ROWS, "7*7"]))
    limit = len(ROWS[0])
    kept = []
    for bos in (False, True):
        trainer = make_trainer(
            tmp_path,
            dataset=Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache")),
            tokenizer=byte_tokenizer(bos=bos),
            **SETTINGS | {"max_prompt_length": limit, "reference_sample_size": 2},
        )
        trainer.prepare_reference()
        lengths = [len(ids) for ids in trainer._tokenize_prompts(trainer.train_dataset["prompt"][:])[0]]
        assert max(lengths) <= limit
        kept.append(len(lengths))
    assert kept[0] > kept[1]


def test_too_little_data_is_said(tmp_path):
    """A stream shorter than a generation batch would end at step 0 without a word."""
    trainer = make_trainer(
        tmp_path, dataset=prompts_dataset(ROWS[:1]).to_iterable_dataset(), rollout=fixed_rollouts(), **SETTINGS
    )
    with pytest.raises(ValueError, match=r"no step: the data holds less than one generation batch \(2 prompts\)"):
        trainer.train()


def test_another_sample_size_on_resume_is_named(tmp_path):
    """Not the data, which is the same."""
    run(
        tmp_path,
        prompts_dataset(ROWS),
        tiny_model("qwen2"),
        reference_sample_size=3,
        save_strategy="steps",
        save_steps=2,
    )
    resumed = make_trainer(tmp_path, dataset=prompts_dataset(ROWS), rollout=fixed_rollouts(), **SETTINGS)
    with pytest.raises(ValueError, match="trained with: reference_sample_size"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
