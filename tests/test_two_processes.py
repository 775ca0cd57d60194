"""Two processes train the same model as one: global means, groups that straddle ranks, equal numbers of forwards.

The process group is real (gloo on CPU under torchrun); a deadlock ends in the timeout.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import (
    UNEQUAL,
    assert_grads_close,
    byte_tokenizer,
    distinct_queries,
    double_copy,
    penalty_of,
    policy_loss,
    rows_of,
    tiny_model,
    token_logps,
)
from launching import SCRIPTS, finish, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("two_processes")]

SCRIPT = str(SCRIPTS / "distributed_run.py")
ALPHA = 0.3
SHIFTS = [0.3, -0.4, 0.8, 0.5, -0.7, 0.2, 0.6, -0.2]  # every query has its own drift at the first step
FIVE = ["2+2=", "what is 17+5?", "1*1=", "compute 9-4 please", "7+7"]
SCORED = {
    "five": FIVE,
    "one_scorable_last": ["a", "b", "c", "d", "2+2="],
    "one_scorable_first": ["1+1=", "2", "3", "4", "5", "6"],
    "single": ["one prompt only"],
}


def train(per_device, **fields):
    return {
        "task": "train",
        "prompts": UNEQUAL,
        "shifts": SHIFTS,
        "query_kl_coef": ALPHA,
        "num_generations": 4,
        "per_device_train_batch_size": per_device,
        "learning_rate": 2e-2,
        "max_steps": 3,
        **fields,
    }


def score(prompts, *cache_dirs):
    return {"task": "score", "prompts": prompts, "batch_tokens": 20, "cache_dirs": cache_dirs}


# Launching costs more than running: everything that needs one process goes into one launch, two processes into another.
WHOLE = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
GROUP = {"num_generations": 8, "gradient_accumulation_steps": 4}
EVALUATION = {"max_steps": 1, "evaluation": ["3*3=", "what is left of 9-8?", "5", "12/4="]}
LAYOUTS = {
    "half_a_generation": {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "two_generations": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "two_iterations": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2},
}
# Off-policy, with the log-probs of `fixed_rollouts` as μ, which are far from any policy
REGION = {
    "trust_region": "drpo",
    "trust_region_delta": 0.2,
    "trust_region_delta_target": 0.5,
    "trust_region_check_rollout": False,
    "num_iterations": 2,
}
STREAM = {"stream": True, "shuffle_dataset": False, "learning_rate": 0.1}
RLOO = {"trainer": "rloo", "num_iterations": 2}
# Weights from the policy, α that adapts, queries by weight, the Policy-KL: all that is of the step's or the set's whole
POLICY = {
    "query_weight_source": "policy",
    "query_weight_clip": [0.0, 9.0],
    "query_kl_target": 0.1,
    "query_sampling_power": 1.0,
    "query_sampling_steps": 9,
    "log_policy_kl_steps": 1,
    "learning_rate": 0.1,
}
ONE_PROCESS = {
    "rloo": train(6, **WHOLE, **RLOO),
    "region": train(6, **WHOLE, **REGION),
    "stream": train(6, **WHOLE, **STREAM),
    "policy_several": train(6, **WHOLE, **POLICY),
    "policy_one": train(12, **POLICY),
    "whole": train(6, **WHOLE),
    "group": train(2, **GROUP),
    "evaluation": train(8, per_device_eval_batch_size=8, **EVALUATION),
}
TWO_PROCESSES = {
    "rloo": train(3, **WHOLE, **RLOO),
    "region": train(3, **WHOLE, **REGION),
    "stream": train(3, **WHOLE, **STREAM),
    "policy_several": train(3, **WHOLE, **POLICY),
    "policy_one": train(6, **POLICY),
    "whole": train(3, **WHOLE),
    "group": train(1, **GROUP),
    "evaluation": train(4, per_device_eval_batch_size=4, **EVALUATION),
    **{name: train(3, **fields) for name, fields in LAYOUTS.items()},
    **{f"score_{name}": score(prompts, name, name) for name, prompts in SCORED.items()},
    "score_small_memory": score(UNEQUAL, "small", "small") | {"batch_tokens": 80, "memory": [40, 1 << 30]},
    **{f"again_{name}": score(prompts, name, name) for name, prompts in SCORED.items()},
}


def launch(folder: Path, processes: int, runs: dict) -> list[dict]:
    """Run the script and return what each rank saved, by run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    finish(torchrun(SCRIPT, str(folder), processes=processes))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(runs of one process, [runs of rank 0, runs of rank 1]); launched once per session, also under xdist."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    results = []
    with FileLock(root / "launched.lock"):
        for processes, runs in ((1, ONE_PROCESS), (2, TWO_PROCESSES)):
            folder = root / f"launched_{processes}"
            if not (folder / "rank0.pt").exists():
                launch(folder, processes, runs)
            results.append([torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(processes)])
    return results[0][0], results[1]


def shifted_reference():
    tokenizer, reference = byte_tokenizer(), {}
    model = double_copy(tiny_model("qwen2"))
    nll = {}
    for prompt, shift in zip(UNEQUAL, SHIFTS):
        query = tuple(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            logps = token_logps(model, list(query))
        reference[query] = logps + shift
        nll[query] = -reference[query].sum().item()
    return reference, nll


def expected_gradient(ranks, index):
    """The printed objective over the rows of all ranks' micro-batches, in float64."""
    steps = [rank["steps"][index] for rank in ranks]
    policy = double_copy(tiny_model("qwen2"), steps[0]["weights"])
    policy.zero_grad()
    batches = [rows_of(batch) for step in steps for batch in step["batches"]]
    reference, nll = shifted_reference()
    mean = sum(nll.values()) / len(nll)
    loss = policy_loss(policy, batches, lambda q: min(mean / nll[q], 2.0), 1.0, "grpo")
    penalty = penalty_of(policy, distinct_queries(batches), reference, ALPHA)
    (loss + penalty).backward()
    return policy, penalty.item()


QUERY_METRICS = [
    "query/kl",
    "query/kl_max",
    "query/nll",
    "query/nll_drift",
    "query/weight_mean",
    "query/weight_min",
] + [
    "query/weight_max",
    "query/weight_ess",
    "query/alpha",
    "query/loss",
    "query/unscored_rows",
]


@pytest.fixture
def whole_generation(launched):
    """Three prompts of four rows per step on 2 x 3 rows x 2 micro-batches: the second group lies half on each rank."""
    one, two = launched
    return [rank["whole"] for rank in two], one["whole"]


def test_the_launch_is_distributed(whole_generation):
    """The comparison means something only if two processes really formed a group and a query lies on both."""
    two, one = whole_generation
    assert [rank["world"] for rank in two] == [2, 2] and one["world"] == 1
    assert all("MULTI_CPU" in rank["distributed"] for rank in two)
    queries = [{tuple(r["prompt"]) for b in rank["steps"][0]["batches"] for r in rows_of(b)} for rank in two]
    assert queries[0] & queries[1], "a group was meant to straddle the ranks"
    assert queries[0] != queries[1]


def test_gradient_equals_one_process(whole_generation):
    """The averaged gradient of each step is the single process's on the same global batch."""
    two, one = whole_generation
    for index in range(3):
        expected = one["steps"][index]["grads"]
        scale = max(g.abs().max().item() for g in expected.values())
        for rank in two:
            for name, gradient in rank["steps"][index]["grads"].items():
                assert (gradient - expected[name]).abs().max().item() < 2e-4 * scale, name


def test_rloo_equals_one_process(launched):
    """RLOO with groups that straddle ranks, two updates a generation: gradients, losses and drift of one process."""
    one, two = launched[0]["rloo"], [rank["rloo"] for rank in launched[1]]
    for index in range(3):
        expected = one["steps"][index]["grads"]
        scale = max(g.abs().max().item() for g in expected.values())
        for rank in two:
            assert rank["steps"][index]["forwards"] == [1, 1]
            for name, gradient in rank["steps"][index]["grads"].items():
                assert (gradient - expected[name]).abs().max().item() < 2e-4 * scale, name
    logs = [[entry for entry in run["log"] if "query/kl" in entry] for run in (one, two[0])]
    assert len(logs[0]) == len(logs[1]) == 3
    for expected, found in zip(*logs):
        for name in (*QUERY_METRICS, "loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert logs[0][0]["query/loss"] > 1e-3


def test_query_metrics_equal_one_process(whole_generation):
    """Metrics are sums over sums across ranks, not means of the ranks' means."""
    two, one = whole_generation
    mine = [entry for entry in two[0]["log"] if "query/kl" in entry]
    other = [entry for entry in one["log"] if "query/kl" in entry]
    assert len(mine) == len(other) == 3
    for found, expected in zip(mine, other):
        for name in QUERY_METRICS:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


def test_gradient_is_the_printed_objective(whole_generation):
    """And both are the formula, evaluated in float64 on the rows of both ranks."""
    two, _ = whole_generation
    for index in range(3):
        policy, penalty = expected_gradient(two, index)
        assert penalty > 1e-3
        for rank in two:
            assert_grads_close(rank["steps"][index]["grads"], policy, rel=2e-4)


def test_one_forward_and_one_scoring_per_rank(whole_generation):
    """Each rank makes one forward per micro-batch and scores a query once per step, also when it shares the query."""
    two, _ = whole_generation
    for rank in two:
        for step in rank["steps"]:
            assert step["forwards"] == [1, 1]
            queries = distinct_queries([rows_of(batch) for batch in step["batches"]])
            assert sum(step["labelled"]) == sum(len(query) - 1 for query in queries)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_the_printed_objective(launched, layout):
    """A step that holds half of a generation, or two of them: each rank shuffles its own rows, the formula still holds."""
    two = [rank[layout] for rank in launched[1]]
    for index in range(3):
        policy, _ = expected_gradient(two, index)
        for rank in two:
            assert_grads_close(rank["steps"][index]["grads"], policy, rel=2e-4)


def test_a_group_larger_than_both_batches(launched):
    """Eight rows per query on 2 x 1 rows x 4 micro-batches: every rank holds half of the one query of each step."""
    one, two = launched[0]["group"], [rank["group"] for rank in launched[1]]
    for index in range(3):
        expected = one["steps"][index]["grads"]
        scale = max(g.abs().max().item() for g in expected.values())
        for name, gradient in two[0]["steps"][index]["grads"].items():
            assert (gradient - expected[name]).abs().max().item() < 2e-4 * scale, name


def test_evaluation_over_two_ranks(launched):
    """The evaluation drift is the mean over all evaluation prompts, wherever they lie."""
    one, two = launched[0]["evaluation"]["metrics"], launched[1][0]["evaluation"]["metrics"]
    assert one["eval_query/kl"] > 1e-5
    for name in ("eval_query/kl", "eval_query/nll", "eval_query/weight_mean", "eval_query/unscored_rows"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name


# --------------------------------------------------------------------------------------------------------------- scoring
def check_scores(ranks, prompts):
    model = double_copy(tiny_model("qwen2"))
    tokenizer = byte_tokenizer()
    for rank in ranks:
        assert rank["world"] == 2 and rank["prompts"] == prompts
        nll = []
        for prompt, column in zip(prompts, rank["logps"]):
            ids = tokenizer(prompt)["input_ids"]
            assert len(column) == len(ids) - 1
            if len(ids) > 1:
                with torch.no_grad():
                    expected = token_logps(model, ids)
                torch.testing.assert_close(torch.tensor(column, dtype=torch.float64), expected, atol=2e-5, rtol=0)
                nll.append(-expected.sum().item())
        assert rank["mean_nll"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["forwards"] == ranks[1]["forwards"], "unequal numbers of forwards hang a sharded model"


@pytest.mark.parametrize("name", SCORED)
def test_scoring_over_two_ranks(launched, name):
    """Uneven numbers of prompts: values in data set order on both ranks and equal numbers of forwards; then a second
    mapping finds everything.
    """
    ranks = [rank[f"score_{name}"] for rank in launched[1]]
    check_scores(ranks, SCORED[name])
    assert ranks[0]["forwards"] > 0
    again = [rank[f"again_{name}"] for rank in launched[1]]
    check_scores(again, SCORED[name])
    assert [rank["forwards"] for rank in again] == [0, 0]


def test_out_of_memory_on_one_rank(launched):
    """Only the first rank's device is too small: both go on with half the tokens and make as many forwards."""
    ranks = [rank["score_small_memory"] for rank in launched[1]]
    check_scores(ranks, UNEQUAL)
    # A round of 72 and 16 tokens, repeated as 36 and 26, then 16 on both
    assert ranks[0]["forwards"] == 3


@pytest.mark.xdist_group("table_on_one_rank")  # launches of its own
@pytest.mark.parametrize(
    "cache_dirs",
    [("warm", "cold"), pytest.param(("cold", "warm"), marks=pytest.mark.slow)],
    ids=["first_warm", "second_warm"],
)
def test_table_on_one_rank_only(tmp_path, cache_dirs):
    """Node-local folders: one rank finds everything, the other nothing. Equal forwards and right values on both, or a
    refusal that names the field; never a hang (the launch has a time limit) and never a bare KeyError.
    """
    runs = {"warm": score(FIVE, "warm", "warm"), "mixed": score(FIVE, *cache_dirs)}
    try:
        ranks = launch(tmp_path, 2, runs)
    except RuntimeError as error:
        assert "reference_cache_dir" in str(error)
    else:
        check_scores([rank["mixed"] for rank in ranks], FIVE)


@pytest.mark.parametrize("run", ["region", "stream", "policy_several", "policy_one"])
def test_other_runs_equal_one_process(launched, run):
    """A trust region, whose metrics and radius are of all ranks' tokens; rows scored as they arrive, s̄ of all ranks'; weights
    from the policy, relative to all ranks' queries, in a forward of their own or in TRL's.
    """
    one, ranks = launched
    names = {
        "region": [
            f"trust_region/{name}" for name in ("shift_mean", "shift_p99", "violation_rate", "ratio_max", "delta")
        ],
        "stream": ["query/ref_nll_mean", "query/weight_mean"],
    }.get(run, ["query/weight_max", "query/weight_forward_tokens", "query/alpha", "policy/kl"])
    for rank in ranks:
        assert len(rank[run]["steps"]) == len(one[run]["steps"]) == 3
        for mine, whole in zip(rank[run]["log"], one[run]["log"]):
            for name in ("query/kl", *names):
                if name in whole:
                    assert mine[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7), name
        for step, whole in zip(rank[run]["steps"], one[run]["steps"]):
            for name, grad in whole["grads"].items():
                torch.testing.assert_close(step["grads"][name], grad, rtol=1e-3, atol=1e-6)
    assert sum(names[0] in entry for entry in one[run]["log"]) == 3
