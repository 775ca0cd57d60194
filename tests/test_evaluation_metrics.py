"""Metrics of an evaluation against closed forms, brute force and the paper's own numbers."""

from itertools import combinations

import numpy as np
import pytest

from erpo_trl.evaluation.compare import gap_table, paper_tables
from erpo_trl.evaluation.config import parse_temperatures
from erpo_trl.evaluation.metrics import (
    band_values,
    bootstrap_means,
    majority_at_k,
    pass_at_k,
    problem_values,
    reported_ks,
    train_eval_gap,
    with_errors,
)


@pytest.mark.parametrize(
    "n, c, k, expected", [(4, 1, 4, 1.0), (4, 1, 2, 0.5), (4, 2, 2, 0.833333), (8, 3, 4, 0.928571), (5, 0, 3, 0.0)]
)
def test_pass_at_k_closed_forms(n, c, k, expected):
    assert float(pass_at_k(c, n, k)) == pytest.approx(expected, abs=5e-7)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    """Brute force over all subsets, for every c and k up to n = 7; an array of c gives the same as one by one."""
    for n in range(1, 8):
        for k in range(1, n + 1):
            found = pass_at_k(np.arange(n + 1), n, k)
            for c in range(n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert found[c] == pytest.approx(np.mean([any(subset) for subset in subsets]), abs=1e-12), (n, c, k)


@pytest.mark.parametrize("n, k", [(4, 5), (0, 1), (4, 0)])
def test_pass_at_k_refuses_fewer_samples_than_k(n, k):
    with pytest.raises(ValueError, match=rf"pass@{k} needs at least {k} samples and k at least 1; found {n} samples"):
        pass_at_k(0, n, k)


def test_pass_at_k_stays_exact_for_many_samples():
    """C(n, k) of thousands of samples overflows; the product does not."""
    assert float(pass_at_k(1, 5000, 50)) == pytest.approx(0.01, rel=1e-12)


def test_reported_ks():
    assert [reported_ks(n) for n in (0, 1, 2, 3, 8, 32, 48)] == [
        [], [], [2], [2, 3], [2, 4, 8], [2, 4, 8, 16, 32], [2, 4, 8, 16, 32, 48],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "answers, right, expected",
    [
        (["1", "2", "2"], [True, False, False], 0.0),
        (["1", "1", "2", None], [True, True, False, False], 1.0),
        (["1", "2"], [True, False], 0.5),  # a tie
        ([None, None, "2"], [False, False, True], 1.0),  # no answer has no vote
        ([None, None], [False, False], 0.0),
        (["x + 1", "x+1", "2"], [True, True, False], 1.0),
    ],
)
def test_majority(answers, right, expected):
    assert majority_at_k(answers, right) == expected


def test_problem_values_by_hand():
    right = np.array([[True, False, False, True], [False, False, False, False]])
    answers = [["1", "2", "2", "1"], ["3", "3", None, "4"]]
    values = problem_values(right, answers, np.array([False, True]), 4)
    assert {name: v.tolist() for name, v in values.items()} == {
        "avg@4": [0.5, 0.0],
        "pass@2": [pytest.approx(5 / 6), 0.0],
        "pass@4": [1.0, 0.0],
        "maj@4": [0.5, 0.0],
        "pass@1": [0.0, 1.0],
    }


def test_greedy_draw_stands_for_all_samples():
    values = problem_values(np.array([[True], [False]]), [["1"], ["2"]], np.array([True, False]), 8)
    assert all(v.tolist() == [1.0, 0.0] for v in values.values())
    assert set(values) == {"avg@8", "pass@2", "pass@4", "pass@8", "maj@8", "pass@1"}


def test_bands_leave_greedy_decoding_out():
    """T=1.1 counts for the sweep only; 1.0, 1.2 and 1.5 are inside their bands."""
    by_temperature = {t: {"avg@2": np.array([t])} for t in (0.0, 0.5, 1.0, 1.1, 1.2, 1.5)}
    bands = {band: float(values["avg@2"][0]) for band, values in band_values(by_temperature).items()}
    assert bands == pytest.approx({"mean_le_1.0": 0.75, "mean_1.2_1.5": 1.35, "mean": 1.06})
    assert set(band_values({1.1: {"x": np.zeros(1)}})) == {"mean"}
    assert band_values({0.0: {"x": np.zeros(1)}}) == {}


def test_standard_error_is_that_of_a_mean_over_problems():
    """The bootstrap of a mean has a closed form: sqrt(Σ(v-v̄)²)/P. 20,000 replicates leave 0.5% of noise."""
    values = np.random.default_rng(1).random(60)
    found = with_errors({"avg@2": values}, "some", 20_000)["avg@2"]
    assert found["value"] == pytest.approx(values.mean())
    assert found["se"] == pytest.approx(np.sqrt(((values - values.mean()) ** 2).sum()) / 60, rel=0.02)


def test_bootstrap_draws_the_same_problems_for_all_metrics_of_a_benchmark():
    a, b = np.random.default_rng(2).random((2, 30))
    assert np.allclose(bootstrap_means(a, "x") - bootstrap_means(b, "x"), bootstrap_means(a - b, "x"))
    assert np.allclose(bootstrap_means(np.stack([a, b], 1), "x")[:, 1], bootstrap_means(b, "x"))
    assert abs(np.corrcoef(bootstrap_means(a, "x"), bootstrap_means(a, "y"))[0, 1]) < 0.2


def test_gap_gives_the_papers_table_4_from_its_table_5():
    """Only with step 0 counted; over the six later checkpoints the mean gaps would be 5.28 and 1.39."""
    paper = paper_tables()
    for method, later in (("grpo", 5.28), ("erpo", 1.39)):
        five, four = paper["table5"][method], paper["table4"][method]
        gaps = {tp: train_eval_gap(five["train"], five[tp]) for tp in ("tp1", "tp2")}
        # Table 4 prints one decimal, half of which is the tolerance; 5.45 is printed as 5.5
        assert gaps == pytest.approx({tp: four[tp] for tp in gaps}, abs=0.0501)
        assert sum(gaps.values()) / 2 == pytest.approx(four["average"], abs=0.005)
        without = [train_eval_gap(five["train"], five[tp], include_first=False) for tp in gaps]
        assert sum(without) / 2 == pytest.approx(later, abs=0.005)
    assert "| paper: grpo " in gap_table(paper) and "6.47" in gap_table(paper) and "3.14" in gap_table(paper)


def test_gap_refuses_what_does_not_belong_together():
    with pytest.raises(ValueError, match="found 2 training and 1 evaluation accuracies"):
        train_eval_gap([1, 2], [1])
    with pytest.raises(ValueError, match="at least one checkpoint"):
        train_eval_gap([1.0], [0.5], include_first=False)


def test_shipped_tables_are_consistent():
    """The printed averages come out of the printed columns, so a slip of the pen would show."""
    paper = paper_tables()
    names = paper["table1"]["benchmarks"]
    for metric, rows in paper["table1"].items():
        for numbers in rows.values() if metric != "benchmarks" else ():
            assert len(numbers) == len(names) == 7
            assert numbers[-1] == pytest.approx(np.mean(numbers[:-1]), abs=1.1e-3)
    rows = [row for table in ("table2", "table6") for row in paper["pass_at_1_math500"][table].values()]
    assert len(rows) == 15 and all(len(row) == len(paper["pass_at_1_math500"]["columns"]) for row in rows)


@pytest.mark.parametrize(
    "written, expected",
    [
        ("0.1:1.0:0.1 1.2 1.3", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.3]),
        (["0.1:0.3:0.1", "1.2"], [0.1, 0.2, 0.3, 1.2]),
        ([0, "6e-1", 1], [0.0, 0.6, 1.0]),
        (0.7, [0.7]),
        (["0.5", 0.5, "0.4:0.5:0.1"], [0.4, 0.5]),
        ("0.5:1.2:0.5", [0.5, 1.0]),
    ],
)
def test_temperatures(written, expected):
    assert parse_temperatures(written) == expected


@pytest.mark.parametrize(
    "written, message",
    [
        ("0.1:1.0", "'0.1:1.0' is neither a number nor a range first:last:step"),
        ("hot", "'hot' is neither a number"),
        ("1:0.5:0.1", "'1:0.5:0.1' must rise"),
        ("0.1:1:0", "'0.1:1:0' must rise"),
        ("-0.1", "'-0.1' must rise within 0 and 10"),
        ([3720.1], "put ranges in quotes"),  # what YAML makes of 1:2:0.1
        ([float("nan")], "'nan' must rise"),
        ([], "give at least one"),
    ],
)
def test_bad_temperatures_are_named(written, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_temperatures(written)
