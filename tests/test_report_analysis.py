"""The analysis functions against closed forms and plain loops."""

import math

import numpy as np
import pytest
import torch

from erpo_trl import train_eval_gap
from erpo_trl.report.analysis import (
    BandRule,
    band_exits,
    cross_lag_correlation,
    drift,
    find_collapses,
    log_series,
    nll_correlation,
    partial_correlation,
    pearson,
    ranks,
    spearman,
    tail_mean,
    train_eval_gaps,
)


def test_drift_of_a_straight_line():
    steps = np.arange(1, 101)
    found = drift(steps, 0.002 * steps + 0.1)
    # The last ten points are 0.1 + 0.002 · (91 .. 100)
    assert found.end == pytest.approx(0.1 + 0.002 * 95.5)
    assert found.highest == pytest.approx(0.3) and found.slope == pytest.approx(0.2)
    assert math.isnan(drift([5], [0.1]).slope) and drift([5], [0.1]).end == 0.1
    assert math.isnan(tail_mean([]))
    with pytest.raises(ValueError, match="empty series"):
        drift([], [])


def test_gap_takes_the_training_accuracy_of_the_last_log():
    """Logs at 10, 20, 30; evaluations at 0 (before the first log: its accuracy), 20 and 25."""
    gaps = train_eval_gaps([10, 20, 30], [0.5, 0.7, 0.8], [0, 20, 25], [0.3, 0.6, 0.9])
    assert [step for step, _ in gaps] == [0, 20, 25]
    assert [gap for _, gap in gaps] == pytest.approx([0.2, 0.1, -0.2])
    assert train_eval_gap([0.5, 0.7, 0.7], [0.3, 0.6, 0.9]) == pytest.approx(np.mean([gap for _, gap in gaps]))
    assert train_eval_gaps([], [], [10], [0.5]) == []


def test_pearson_by_hand():
    # x - mean = (-1, 0, 1), y - mean = (-1, 2, -1): product 0;  and (-1, 0, 1)·(-3, 1, 2) = 5 over sqrt(2 · 14)
    assert pearson([1, 2, 3], [1, 4, 1]) == 0.0
    assert pearson([1, 2, 3], [0, 4, 5]) == pytest.approx(5 / math.sqrt(28))
    assert math.isnan(pearson([0.1 + 0.2] * 7, range(7))), "a mean that is rounded makes no variation"
    assert math.isnan(pearson([1, 1, 1], [1, 2, 3])) and math.isnan(pearson([1], [1]))


def test_ranks_share_ties_and_spearman_sees_order_only():
    assert ranks([30, 10, 20, 20, 5]).tolist() == [5, 2, 3.5, 3.5, 1]
    x = np.array([0.1, 3.0, 2.0, 9.0])
    assert spearman(x, np.exp(x)) == pytest.approx(1.0) and pearson(x, np.exp(x)) < 0.96
    # Without ties: 1 - 6 Σd² / (n (n² - 1)), here d = (0, 1, 1, 0)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_partial_correlation_against_the_recursive_formula():
    """r_xy|z = (r_xy - r_xz r_yz) / sqrt((1 - r_xz²)(1 - r_yz²)), once for one variable and again for the second."""
    rng = np.random.default_rng(0)
    z, u = rng.normal(size=(2, 200))
    x, y = z + 0.5 * u + rng.normal(size=200), 2 * z - u + rng.normal(size=200)

    def given_z(a, b):
        ab, az, bz = pearson(a, b), pearson(a, z), pearson(b, z)
        return (ab - az * bz) / math.sqrt((1 - az**2) * (1 - bz**2))

    assert partial_correlation(x, y, [z]) == pytest.approx(given_z(x, y), abs=1e-12)
    xy, xu, yu = given_z(x, y), given_z(x, u), given_z(y, u)
    both = (xy - xu * yu) / math.sqrt((1 - xu**2) * (1 - yu**2))
    assert partial_correlation(x, y, [z, u]) == pytest.approx(both, abs=1e-12)
    # What is a function of the others has nothing left, and three points cannot carry two slopes
    assert math.isnan(partial_correlation(2 * z + 3, y, [z])) and math.isnan(
        partial_correlation(z[:3], y[:3], [u[:3]])
    )


def test_lengths_alone_make_no_partial_correlation():
    """NLLs that are lengths times a rate, with noise of their own: strongly correlated, but not given the lengths."""
    rng = np.random.default_rng(1)
    length = rng.integers(10, 100, 4000)
    prompt, response = length + rng.normal(size=4000), 3 * length + rng.normal(size=4000)
    found = nll_correlation(prompt, response, length, 3 * length)
    assert found.points == 4000 and found.pearson > 0.99 and found.spearman > 0.99 and abs(found.partial) < 0.05


def test_cross_lag_finds_a_delay_of_three_points():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=203)
    x, y = noise[3:], noise[:-3]  # y[i + 3] = x[i]
    curve = dict(cross_lag_correlation(x, y, 5))
    assert list(curve) == list(range(-5, 6))
    assert curve[3] == pytest.approx(1.0) and max(abs(r) for lag, r in curve.items() if lag != 3) < 0.3
    assert curve[-2] == pytest.approx(np.corrcoef(x[2:], y[:-2])[0, 1])
    assert math.isnan(dict(cross_lag_correlation([1, 2, 3], [1, 2, 4], 1))[1])
    with pytest.raises(ValueError, match="one length, found 2 and 3"):
        cross_lag_correlation([1, 2], [1, 2, 3], 0)


def test_band_by_hand():
    """Points 0, 2, 0, 2: mean 1, standard deviation sqrt(4/3); four of them above is 5.62. A point inside is taken into the band."""
    rule = BandRule(window=4, width=4.0, least=0.0, patience=2)
    limit = 1 + 4 * math.sqrt(4 / 3)
    [found] = band_exits([0, 2, 0, 2, limit + 0.01, limit + 0.02], +1, rule)
    assert (found.first, found.noticed, found.mean, found.value) == (4, 5, 1.0, limit + 0.02)
    assert found.limit == pytest.approx(limit)
    # Just inside; one point alone; the other side; not enough points for a band
    assert band_exits([0, 2, 0, 2, limit - 0.01, limit - 0.02], +1, rule) == []
    assert band_exits([0, 2, 0, 2, limit + 1, 1, limit + 1, 1], +1, rule) == []
    assert band_exits([0, 2, 0, 2, limit + 1, limit + 1], -1, rule) == []
    assert band_exits([0, 2, 0, 50, 50, 50], +1, rule) == []
    assert [e.first for e in band_exits([0, 2, 0, 2, -9, -9], -1, rule)] == [4]


def test_a_flat_curve_has_a_band_of_its_mean_and_is_learnt_anew():
    rule = BandRule(window=3, width=4.0, least=0.25, patience=1)
    assert band_exits([1, 1, 1, 1.2], +1, rule) == []
    exits = band_exits([1, 1, 1, 1.3, 4, 4, 4, 9], +1, rule)
    assert [(e.first, e.mean) for e in exits] == [(3, 1.0), (7, 4.0)]
    for fields, message in (({"window": 1}, "window=1"), ({"patience": 0}, "patience=0"), ({"width": -1}, "found -1")):
        with pytest.raises(ValueError, match=message):
            BandRule(**fields)


def test_collapses_of_both_kinds_in_order():
    steps = [10 * i for i in range(1, 31)]
    entropy = [0.5 + 0.01 * (i % 2) for i in range(20)] + [2.0] * 10
    reward = [0.6 + 0.02 * (i % 3) for i in range(15)] + [0.1] * 15
    fall, jump = find_collapses({"entropy": (steps, entropy), "reward": (steps, reward)})
    assert (fall.kind, fall.step, fall.noticed) == ("reward fall", 160, 170)
    assert (jump.kind, jump.step, jump.noticed) == ("entropy jump", 210, 220)
    # Mean of the ten points 0.50, 0.51, …, and a quarter of it above: four standard deviations are less
    assert str(jump) == (
        "entropy jump at step 210: entropy 2 at step 220, after 0.505 on average (its running band ends at 0.6312)"
    )
    # What should rise or fall may do so
    assert find_collapses({"entropy": (steps, entropy[::-1]), "reward": (steps, reward[::-1])}) == []
    assert find_collapses({}) == []


def test_log_series_leaves_out_what_is_no_number():
    log = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": 5},
        {"step": 3, "a": None},
        {"step": 4, "a": float("nan")},
        {"step": 5},
    ]
    steps, values = log_series(log + [{"step": 2, "a": 7.0}], "a")
    assert steps.tolist() == [1, 2] and values.tolist() == [5.0, 7.0]
    assert len(log_series([], "a")[0]) == 0


def test_kept_queries_against_plain_loops():
    """Two ranks of three rows: query 7 on both, query 8 whose second response has no token, an unscored row, padding."""
    from erpo_trl.query.metrics import QueryMetrics

    keys = np.array([[7, 7, 8], [7, 8, 9]])
    scored = np.array([[1, 1, 1], [1, 1, 0]])
    #        owner  kl  nll  drift penalty weight tokens response-NLL, -tokens
    rows = np.array(
        [
            [[1, 0.1, 3.0, 0.5, 0, 1.5, 4, 10.0, 5], [0, 0.0, 0.0, 0.0, 0, 1.5, 0, 20.0, 7], [1, 0.2, 6.0, 0.6, 0, 0.75, 9, 8.0, 2]],
            [[0, 0.0, 0.0, 0.0, 0, 1.5, 0, 30.0, 9], [0, 0.0, 0.0, 0.0, 0, 0.75, 0, 0.0, 0], [0, 0.0, 0.0, 0.0, 0, 1.0, 0, 3.0, 3]],
        ]
    )  # fmt: skip
    metrics = QueryMetrics()
    metrics.open(keys, scored, 1)
    metrics.close(rows)
    found = metrics.latest
    assert found.key.tolist() == [7, 8] and found.kl.tolist() == [0.1, 0.2] and found.nll.tolist() == [3.0, 6.0]
    assert found.weight.tolist() == [1.5, 0.75] and found.tokens.tolist() == [4, 9]
    assert found.response_nll.tolist() == [20.0, 8.0] and found.response_tokens.tolist() == [7.0, 2.0]
    assert metrics.summarize()["weight_mean"] == pytest.approx(float(torch.tensor([1.5, 0.75, 1.0]).mean()))
    # A query none of whose responses counts
    rows[0, 2, 8] = 0
    metrics.open(keys, scored, 1)
    metrics.close(rows)
    assert math.isnan(metrics.latest.response_nll[1]) and math.isnan(metrics.latest.response_tokens[1])
