"""Several references: the sum and the mixture in closed form and by autograd, models and tables, λ per row, refusals."""

import copy
import json
import math

import pytest
import torch
from datasets import Dataset
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    byte_tokenizer,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    k_estimator,
    keep_raw_advantages,
    logged,
    lora_model,
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

from erpo_trl import DatasetMapper
from erpo_trl.query.divergence import query_kl
from erpo_trl.query.references import load_reference, several_query_kl

ROWS, ALPHA = UNEQUAL[:4], 0.4


def random_logps(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(3, 5, generator=generator, dtype=torch.float64) * 4
    refs = -torch.rand(3, 2, 5, generator=generator, dtype=torch.float64) * 4
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    return logps, refs, mask


def test_sum():
    """λ of 0.25 and 2: a quarter of one drift and twice the other; masked entries, NaN included, do not count."""
    logps, refs, mask = random_logps()
    weights = torch.tensor([[0.25, 2.0]] * 3, dtype=torch.float64)
    expected = 0.25 * query_kl(logps, refs[:, 0], mask) + 2.0 * query_kl(logps, refs[:, 1], mask)
    refs = torch.where(mask.unsqueeze(1), refs, math.nan)
    torch.testing.assert_close(several_query_kl(logps, refs, weights, mask), expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_mixture(normalize):
    """k2 on log(0.3 e^ℓ_1 + 0.7 e^ℓ_2) - ℓ_θ of the whole query, or on its mean per token; 0 without a scored token."""
    logps, refs, mask = random_logps()
    weights = torch.tensor([[0.3, 0.7]] * 3, dtype=torch.float64)
    expected = []
    for q in range(2):
        likelihood = [refs[q, k][mask[q]].sum().exp().item() for k in range(2)]
        x = math.log(0.3 * likelihood[0] + 0.7 * likelihood[1]) - logps[q][mask[q]].sum().item()
        expected.append((x / mask[q].sum().item() if normalize else x) ** 2 / 2)
    found = several_query_kl(logps, refs, weights, mask, "mixture", "k2", "sequence", normalize)
    assert found.tolist() == pytest.approx([*expected, 0.0])


def test_mixture_of_one():
    """A λ of 0 leaves the other reference alone, and long prompts do not underflow."""
    logps, refs, mask = random_logps()
    refs, logps = refs * 500, logps * 500
    weights = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    found = several_query_kl(logps, refs, weights, mask, "mixture", "k2", "sequence")
    torch.testing.assert_close(found, query_kl(logps, refs[:, 0], mask, "k2", "sequence"))


@pytest.fixture
def other(tmp_path):
    """A second model, in a folder."""
    model = tiny_model("llama", seed=7)
    model.save_pretrained(tmp_path / "other")
    return model, str(tmp_path / "other")


def run(tmp_path, model, resume=None, dataset=None, **fields):
    settings = {"query_kl_coef": ALPHA, "learning_rate": 0.05, "max_steps": 2, "per_device_train_batch_size": 8}
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=dataset or prompts_dataset(ROWS),
        rollout=fixed_rollouts(),
        **settings | fields,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


@pytest.mark.parametrize("mode", ["sum", "mixture"])
def test_gradient(tmp_path, monkeypatch, other, mode):
    """Float64 autograd of the printed objective with λ = 0.25 on the model itself and 0.75 on another."""
    keep_raw_advantages(monkeypatch)
    model, (second, folder) = tiny_model("llama"), other
    references = {"self": 0.25, "code": {"weight": 0.75, "model": folder}}
    level = {"query_kl_level": "sequence", "query_kl_length_normalize": True} if mode == "mixture" else {}
    trainer, recorder = run(tmp_path, model, query_references=references, query_references_mode=mode, **level)
    ids = prompt_ids(byte_tokenizer(), ROWS)
    first, other_reference = reference_of(model, ids), reference_of(second, ids)
    weight = weights_of(first, ids)
    for step, found in zip(recorder.done, logged(trainer, "query/kl"), strict=True):
        policy = double_copy(model, step.weights)
        batches, values = [rows_of(batch) for batch in step.batches], []
        for query in distinct_queries(batches):
            logps, pair = token_logps(policy, list(query)), (first[query].double(), other_reference[query].double())
            if mode == "sum":
                drifts = [k_estimator(reference - logps, "k3").mean() for reference in pair]
                values.append(0.25 * drifts[0] + 0.75 * drifts[1])
            else:
                likelihood = [math.log(x) + reference.sum() for x, reference in zip((0.25, 0.75), pair)]
                x = torch.logsumexp(torch.stack(likelihood), 0) - logps.sum()
                values.append(k_estimator(x / len(logps), "k3"))
        drift = torch.stack(values).mean()
        assert found == pytest.approx(drift.item(), rel=1e-4)
        (policy_loss(policy, batches, weight.__getitem__, 1.0, "grpo") + ALPHA * drift).backward()
        assert_grads_close(step.grads, policy)


def test_alone_with_itself(tmp_path):
    """ "self" of weight 1 is the plain run, bit for bit."""
    plain, _ = run(tmp_path / "plain", tiny_model("llama"))
    named, _ = run(tmp_path / "named", tiny_model("llama"), query_references='{"self": 1.0}')
    assert logged(plain, "query/kl") == logged(named, "query/kl")
    expected = plain.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in named.model.state_dict().items())


def test_a_table_in_place_of_its_model(tmp_path, other):
    """The table that the other model's mapping left gives the same run; a row that it lacks is named."""
    second, folder = other
    by_model, _ = run(
        tmp_path / "model", tiny_model("llama"), query_references={"code": {"weight": 1.0, "model": folder}}
    )
    config = make_config(tmp_path, reference_cache_dir=str(tmp_path / "tables"))
    mapper = DatasetMapper(second, byte_tokenizer(), config)
    mapper(prompts_dataset(ROWS))
    (table,) = (tmp_path / "tables").iterdir()
    entry = {"weight": 1.0, "table": str(table)}
    by_table, _ = run(tmp_path / "table", tiny_model("llama"), query_references={"code": entry})
    assert logged(by_table, "query/kl") == pytest.approx(logged(by_model, "query/kl"), rel=1e-5)
    assert logged(by_table, "query/kl")[0] > 0.01  # drift from another model, from the first step on
    with pytest.raises(
        ValueError, match=r"query_references\['code'\]: 2 of 6 rows are not in the table .*, row 4 the first"
    ):
        run(
            tmp_path / "more",
            tiny_model("llama"),
            dataset=prompts_dataset(UNEQUAL[:6]),
            query_references={"code": entry},
        )


def test_a_table_of_another_temperature_is_refused(tmp_path, other):
    """Its log-probs would make a drift of nothing."""
    config = make_config(tmp_path, temperature=0.7, reference_cache_dir=str(tmp_path / "tables"))
    DatasetMapper(other[0], byte_tokenizer(), config)(prompts_dataset(ROWS))
    (table,) = (tmp_path / "tables").iterdir()
    references = {"code": {"weight": 1.0, "table": str(table)}}
    with pytest.raises(ValueError, match=r"query_references\['code'\]: the table .* was scored with temperature=0.7, this run "
                                         r"has 1.0: .* Score it again \(erpo-trl score --temperature 1.0\)"):  # fmt: skip
        run(tmp_path, tiny_model("llama"), query_references=references)
    at_it, _ = run(tmp_path / "at_it", tiny_model("llama"), query_references=references, temperature=0.7, max_steps=1)
    assert logged(at_it, "query/kl")[0] > 0.01


def test_weights_of_each_row(tmp_path, other):
    """λ from a column, as a list or by name: each query is held to its own domain's reference."""
    model, (second, folder) = tiny_model("llama"), other
    ids = prompt_ids(byte_tokenizer(), ROWS)
    pair = reference_of(model, ids), reference_of(second, ids)
    lists = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 1.0]]
    references = {"self": 1.0, "code": {"weight": 0.0, "model": folder}}
    expected = 0.0
    for query, (_, weight) in zip(ids, lists):
        expected += weight * k_estimator((pair[1][query] - pair[0][query]).double(), "k3").mean().item() / 4
    for n, column in enumerate((lists, [{"self": a, "code": b} for a, b in lists])):
        dataset = Dataset.from_dict({"prompt": ROWS, "domain": column})
        trainer, _ = run(
            tmp_path / str(n),
            model,
            dataset=dataset,
            query_references=references,
            query_references_column="domain",
            max_steps=1,
        )
        assert logged(trainer, "query/kl") == pytest.approx([expected], rel=1e-4)


@pytest.mark.parametrize("bad", [[0.5], [0.5, -1.0], None])
def test_a_bad_weight_names_its_row(tmp_path, other, bad):
    dataset = Dataset.from_dict({"prompt": ROWS, "domain": [[1.0, 0.0]] * 2 + [bad] + [[1.0, 0.0]]})
    references = {"self": 1.0, "code": {"weight": 0.0, "model": other[1]}}
    with pytest.raises(
        ValueError, match="Row 2 of the data set: 'domain' must hold 2 numbers >= 0, for self, code; found"
    ):
        run(
            tmp_path,
            tiny_model("llama"),
            dataset=dataset,
            query_references=references,
            query_references_column="domain",
        )


def test_rows_of_one_prompt_have_one_weight(tmp_path, other):
    """A step scores a query once: which of two weights it took would depend on the order of the rows."""
    dataset = Dataset.from_dict({"prompt": [*ROWS[:3], ROWS[1]], "domain": [[1.0, 0.0]] * 3 + [[0.0, 1.0]]})
    fields = {
        "query_references": {"self": 1.0, "code": {"weight": 0.0, "model": other[1]}},
        "query_references_column": "domain",
    }
    with pytest.raises(ValueError, match="Rows 1 and 3 of the data set have the same prompt, and different 'domain'"):
        run(tmp_path, tiny_model("llama"), dataset=dataset, **fields)


def test_trust_in_remote_code_holds_for_references(tmp_path, monkeypatch, other):
    seen = {}

    def load(name, policy, init_kwargs, *more):
        seen.update(init_kwargs)
        return load_reference(name, policy, init_kwargs, *more)

    monkeypatch.setattr("erpo_trl.query.preparation.load_reference", load)
    references = {"self": 0.5, "code": {"weight": 0.5, "model": other[1]}}
    run(tmp_path, tiny_model("llama"), query_references=references, trust_remote_code=True)
    assert seen["trust_remote_code"] is True


def test_evaluation_and_resume(tmp_path, other):
    """Evaluation data gets the other references, too; a resumed run must name the same ones."""
    references = {"self": 0.5, "code": {"weight": 0.5, "model": other[1]}}
    fields = {
        "query_references": references,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_eval_batch_size": 4,
    }
    fields["trainer_kwargs"] = {"eval_dataset": prompts_dataset(UNEQUAL[4:6])}
    whole, _ = run(tmp_path, tiny_model("llama"), **fields)
    assert whole.evaluate()["eval_query/kl"] > 0.01
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    resumed, _ = run(tmp_path, tiny_model("llama"), resume=checkpoint, **fields)
    assert logged(resumed, "query/kl")[-1] == logged(whole, "query/kl")[-1]
    changed = json.loads(json.dumps(references))
    changed["code"]["weight"] = 0.4
    with pytest.raises(ValueError, match="The checkpoint's run was held to the references .*0.5.*this run has .*0.4"):
        run(tmp_path, tiny_model("llama"), resume=checkpoint, **fields | {"query_references": changed})


def test_another_tokenizer_is_refused(tmp_path):
    model = tiny_model("llama")
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "small")
    entry = {"weight": 1.0, "model": str(tmp_path / "small")}
    with pytest.raises(ValueError, match="has 100 token embeddings, the tokenizer 264 tokens. A reference must share"):
        run(tmp_path, tiny_model("llama"), query_references={"small": entry})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"query_references": "{self: 1}"}, "query_references is not a mapping, nor JSON of one"),
        ({"query_references": {}}, "query_references must map names to references"),
        ({"query_references": {"code": 1.0}}, r"query_references\['code'\] needs either model or table"),
        (
            {"query_references": {"self": {"weight": 1.0, "model": "x"}}},
            r"query_references\['self'\] needs a weight alone",
        ),
        ({"query_references": {"self": -1.0}}, "needs a weight, a finite number >= 0, found -1.0"),
        ({"query_references": {"code": {"model": "x"}}}, "needs a weight, a finite number >= 0, found None"),
        ({"query_references": {"self": {"wieght": 1.0}}}, r"query_references\['self'\] has no 'wieght'"),
        ({"query_references": {"self": 0.0}}, "query_references are all of weight 0"),
        (
            {"query_references": {1: {"weight": 1.0, "model": "x"}}},
            "query_references has the name 1: names must be text",
        ),
        (
            {"query_references": {"a": {"weight": 1.0, "model": 5}}},
            r"query_references\['a'\]: model must be text, found 5",
        ),
        ({"query_references": {"self": 1.0}, "query_references_mode": "mixture"}, "set query_kl_level='sequence'"),
        (
            {"query_references": {"self": 0.9}, "query_references_mode": "mixture", "query_kl_level": "sequence"},
            "needs weights that sum to 1, those of query_references sum to 0.9",
        ),
        (
            {"query_references": {"self": 1.0}, "query_references_column": 3},
            "query_references_column must be a column's name, found 3",
        ),
        ({"query_references_column": "domain"}, "query_references_column is about several references"),
    ],
)
def test_refusals(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)


def test_an_adapters_folder_is_no_reference(tmp_path):
    """transformers would load it onto its base, from which nothing could tell it."""
    lora_model(pretrained=True).save_pretrained(tmp_path / "adapter")
    references = {"self": 0.5, "other": {"weight": 0.5, "model": str(tmp_path / "adapter")}}
    trainer = make_trainer(tmp_path, query_references=references)
    with pytest.raises(ValueError, match="adapter is an adapter; merge it into its base"):
        trainer.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_is_loaded_in_the_policys_dtype(tmp_path, dtype):
    """Whatever it is stored in, and however the policy was loaded."""
    stored = torch.bfloat16 if dtype == torch.float32 else torch.float32
    tiny_model("llama").to(stored).save_pretrained(tmp_path / "other")
    policy = tiny_model("llama").to(dtype)
    model = load_reference(str(tmp_path / "other"), policy, {}, torch.device("cpu"), sharded=False)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
