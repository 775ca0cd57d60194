"""The curriculum and the filter: probabilities in closed form, TRL's order at κ = 0, resume, which rows are left out."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    byte_tokenizer,
    make_config,
    make_trainer,
    prompt_ids,
    prompts_dataset,
    reference_of,
    tiny_model,
    weights_of,
)
from trl.trainer.utils import RepeatSampler

from erpo_trl import DatasetMapper
from erpo_trl.query.sampling import CurriculumSampler, draw, sampling_power, typical_rows
from erpo_trl.query.weights import Queries, WeightRule

ROWS = UNEQUAL[:6]


def test_power():
    """κ = 3 decaying over 12 steps: 3 at the start, 2 at step 4, 0 at step 12 and ever after."""
    assert [sampling_power(step, 3.0, 12) for step in (0, 4, 12, 500)] == pytest.approx([3.0, 2.0, 0.0, 0.0])


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_probabilities(power):
    """The first of two draws is ∝ w^κ, the second likewise among the others; within four standard errors of the closed form."""
    weights, n = np.array([0.5, 1.0, 1.5, 2.0]), 20_000
    generator = np.random.default_rng(0)
    pairs = Counter(tuple(draw(weights, 2, power, generator)) for _ in range(n))
    p = weights**power / (weights**power).sum()
    for i in range(4):
        for j in range(4):
            expected = 0.0 if i == j else p[i] * p[j] / (1 - p[i])
            assert abs(pairs[(i, j)] / n - expected) <= 4 * (expected / n) ** 0.5


def test_a_weight_of_zero_comes_last():
    """It is drawn only when nothing else is left."""
    generator = np.random.default_rng(0)
    draws = [draw(np.array([0.0, 1.0, 1.0]), 3, 0.5, generator).tolist() for _ in range(50)]
    assert {row[-1] for row in draws} == {0}


def test_far_weights_keep_their_odds():
    """e^-100 against e^-200 at κ = 0.01 is e : 1, and a weight of 0 still comes last, however small κ."""
    generator, n = np.random.default_rng(0), 5000
    weights = np.array([np.exp(-100.0), np.exp(-200.0), 0.0])
    draws = np.array([draw(weights, 3, 0.01, generator) for _ in range(n)])
    p = math.e / (1 + math.e)
    assert abs((draws[:, 0] == 0).mean() - p) <= 4 * (p * (1 - p) / n) ** 0.5
    assert (draws[:, 2] == 2).all()


def samplers(power_at, weights=(9.0, 1.0, 1.0, 1.0, 1.0), epoch=0, shuffle=True):
    """TRL's sampler and ours over five rows: batches of two queries, three times each, two rounds."""
    arguments = (range(5), 3, 2, 2, shuffle, 42)
    usual, inner = RepeatSampler(*arguments), RepeatSampler(*arguments)
    for _ in range(epoch):
        list(usual), list(inner)
    return usual, CurriculumSampler(inner, np.array(weights), power_at, seed=42, epoch=epoch)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_power_the_order_is_trls(shuffle):
    usual, ours = samplers(lambda batch: 0.0, shuffle=shuffle)
    assert [list(ours) for _ in range(3)] == [list(usual) for _ in range(3)]
    assert len(ours) == len(usual) == 24


def test_once_the_power_is_gone_the_order_is_trls():
    """Batches 0 to 2 are drawn, the fourth and all later ones are what TRL has in their place, in the layout of its own."""
    usual, ours = samplers(lambda batch: 5.0 if batch < 3 else 0.0)
    theirs, mine = list(usual) + list(usual), list(ours) + list(ours)
    assert mine[36:] == theirs[36:] and mine[:36] != theirs[:36]
    for start in range(0, 36, 12):
        a, b = mine[start], mine[start + 3]
        assert mine[start : start + 12] == [a, a, a, b, b, b] * 2 and a != b
        assert 0 in (a, b)  # 9^5 against 1: the typical query is in every batch


def test_a_sampler_that_starts_later_goes_on_alike():
    """Epoch 2 of a run that was resumed there is epoch 2 of the whole run."""
    whole, late = samplers(lambda batch: 1.0)[1], samplers(lambda batch: 1.0, epoch=2)[1]
    list(whole), list(whole)
    assert [list(whole), list(whole)] == [list(late), list(late)]


def build(tmp_path, **fields):
    settings = {"learning_rate": 0.05, "per_device_train_batch_size": 4, "max_steps": 8} | fields
    return make_trainer(tmp_path, model=tiny_model("llama"), dataset=prompts_dataset(ROWS), **settings)


def run(tmp_path, resume=None, **fields):
    trainer = build(tmp_path, **fields)
    recorder = Recorder().attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    tokenizer = byte_tokenizer()
    steps = [
        [
            tuple(ids[mask.bool()].tolist())
            for batch in step.batches
            for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])
        ]
        for step in recorder.done
    ]
    names = dict(zip(prompt_ids(tokenizer, ROWS), ROWS))
    return trainer, [sorted({names[ids] for ids in step}) for step in steps]


def test_training_with_a_curriculum(tmp_path):
    """At a steep κ every early batch holds the two most typical queries; after it has decayed, the batches are TRL's."""
    reference = reference_of(tiny_model("llama"), prompt_ids(byte_tokenizer(), ROWS))
    weight = weights_of(reference, list(reference), clip=(0.0, 1e9))
    typical = sorted(sorted(ROWS, key=lambda p: -weight[prompt_ids(byte_tokenizer(), [p])[0]])[:2])
    clip = {"query_weight_clip": [0.0, 1e9]}
    _, plain = run(tmp_path / "plain", **clip)
    _, steps = run(tmp_path / "curriculum", query_sampling_power=400.0, query_sampling_steps=4, **clip)
    assert steps[:3] == [typical] * 3
    assert steps[4:] == plain[4:] and len(steps) == 8


@pytest.mark.parametrize("save_steps", [2, 5])
def test_resume(tmp_path, save_steps):
    """Within the first pass over the data and in a later one: the remaining batches are those of the whole run."""
    fields = {"query_sampling_power": 2.0, "query_sampling_steps": 20}
    _, whole = run(tmp_path / "whole", **fields)
    run(tmp_path / "cut", save_strategy="steps", save_steps=save_steps, **fields)
    checkpoint = str(tmp_path / "cut" / "run" / f"checkpoint-{save_steps}")
    _, rest = run(tmp_path / "cut", resume=checkpoint, **fields)
    assert rest == whole[save_steps:]
    with pytest.raises(ValueError, match="Not what the checkpoint was trained with: query_sampling_power"):
        run(tmp_path / "cut", resume=checkpoint, query_sampling_power=1.0, query_sampling_steps=20)
    with pytest.raises(ValueError, match="Not what the checkpoint was trained with: query_weight_clip"):
        run(tmp_path / "cut", resume=checkpoint, query_weight_clip=[0.0, 1.0], **fields)


def test_typical_rows():
    """Of five likelihoods the highest two fifths of the NLL go, ties from behind; a row without likelihood stays."""
    queries = Queries(torch.tensor([3.0, 9.0, 0.0, 5.0, 9.0, 4.0]), torch.tensor([1, 1, 0, 1, 1, 1]))
    population = Queries(*(column[queries.tokens > 0] for column in queries))
    rule = WeightRule()
    assert typical_rows(queries, population, rule, 0.2).tolist() == [0, 1, 2, 3, 5]
    assert typical_rows(queries, population, rule, 0.4).tolist() == [0, 2, 3, 5]
    assert typical_rows(queries, population, rule, 0.199).tolist() == [0, 1, 2, 3, 4, 5]
    # Per token, the long query is the typical one
    longer = queries._replace(tokens=torch.tensor([1, 9, 0, 1, 1, 1]))
    population = Queries(*(column[longer.tokens > 0] for column in longer))
    assert typical_rows(longer, population, WeightRule("token_nll_ratio"), 0.4).tolist() == [0, 1, 2, 5]


def test_typical_rows_of_a_far_tail():
    """`snis` gives 0 to all that lie 750 nats off; the least likely of them goes, wherever it stands."""
    queries = Queries(torch.tensor([10.0, 5000.0, 2000.0, 3000.0], dtype=torch.float64), torch.ones(4))
    assert typical_rows(queries, queries, WeightRule("snis"), 0.25).tolist() == [0, 2, 3]
    assert typical_rows(queries, queries, WeightRule("snis"), 0.5).tolist() == [0, 2]


def test_training_with_the_filter(tmp_path):
    """A third of six rows goes, the least typical; s̄ and the weights are those of the other four; nothing is scored twice."""
    ids = prompt_ids(byte_tokenizer(), ROWS)
    reference = reference_of(tiny_model("llama"), ids)
    order = sorted(range(6), key=lambda row: -reference[ids[row]].sum().item())
    trainer, steps = run(tmp_path, query_drop_quantile=0.34, max_steps=4)
    kept = sorted(order[:4])
    assert trainer.train_dataset["prompt"] == [ROWS[row] for row in kept]
    assert {prompt for step in steps for prompt in step} == {ROWS[row] for row in kept}
    expected = weights_of(reference, [ids[row] for row in kept])
    assert trainer.train_dataset["query_weight"] == pytest.approx([expected[ids[row]] for row in kept], rel=1e-4)
    ((_, report),) = trainer.scoring_reports
    assert (report.rows, report.dropped, report.atypical, report.scored, report.reused) == (4, 0, 2, 0, 4)
    assert "0 dropped as too long, 2 as atypical" in str(report)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"query_sampling_power": -1.0}, "query_sampling_power must be a finite number >= 0, found -1"),
        ({"query_sampling_power": 1.0}, "query_sampling_power needs the steps over which it decays to 0"),
        ({"query_drop_quantile": 1.0}, r"query_drop_quantile must be in \[0, 1\), found 1"),
        ({"query_drop_quantile": 0.1, "query_weight": "uniform"}, "query_drop_quantile goes by the query weights"),
        ({"query_drop_quantile": 0.1, "reference_sample_size": 3}, "query_drop_quantile needs every row's likelihood"),
    ],
)
def test_refusals(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)


def test_a_stream_is_refused(tmp_path):
    dataset = prompts_dataset(ROWS).to_iterable_dataset()
    trainer = make_trainer(tmp_path, dataset=dataset, query_drop_quantile=0.1)
    with pytest.raises(
        ValueError, match="query_drop_quantile needs every row's likelihood before training, and these rows are"
    ):
        trainer.train()


@pytest.mark.parametrize(
    "fields", [{"query_drop_quantile": 0.1}, {"query_sampling_power": 1.0, "query_sampling_steps": 3}]
)
def test_a_stream_with_columns_is_refused(tmp_path, fields):
    """Neither would do anything to it."""
    mapped = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), make_config(tmp_path))(prompts_dataset(ROWS))
    trainer = make_trainer(tmp_path, dataset=mapped.to_iterable_dataset(), **fields)
    name = next(iter(fields))
    with pytest.raises(
        ValueError, match=f"{name} needs every row's likelihood before training, and this is a stream that"
    ):
        trainer.train()


def test_off_by_default(tmp_path):
    """The sampler is TRL's own, and no row is left out."""
    trainer = make_trainer(tmp_path, dataset=prompts_dataset(ROWS))
    trainer.prepare_reference()
    assert type(trainer._get_train_sampler()) is RepeatSampler
    assert trainer.train_dataset["prompt"] == ROWS


def test_steps_without_a_power_are_refused(tmp_path):
    with pytest.raises(ValueError, match="query_sampling_steps does nothing without query_sampling_power"):
        make_config(tmp_path, query_sampling_steps=5)


def test_the_filter_drops_once(tmp_path, monkeypatch):
    """What fails after it, as the mapping of the evaluation data, is tried again by a second call."""
    trainer = build(tmp_path, query_drop_quantile=0.34)
    trainer.eval_dataset = {"broken": None}
    monkeypatch.setattr(trainer, "_map_evaluation", lambda dataset: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.prepare_reference()
        assert len(trainer.train_dataset) == 4
