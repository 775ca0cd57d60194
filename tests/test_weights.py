"""Query weights clip(mean NLL / NLL) against the numbers of the design, and the rows that have no likelihood."""

import math

import pytest
import torch

from erpo_trl.query.weights import (
    Queries,
    WeightRule,
    of_means,
    query_weights,
)


def queries(nll, tokens=None):
    nll = torch.tensor(nll, dtype=torch.float64)
    return Queries(nll, torch.ones_like(nll) if tokens is None else torch.tensor(tokens, dtype=torch.float64))


def weights(nll, mean=None, tokens=None, population=None, scored=None, **rule):
    """Weights relative to a population: the queries themselves, one known by its mean, or that given."""
    of = queries(nll, tokens)
    population = population or (of if mean is None else of_means(mean, mean))
    return query_weights(of, population, WeightRule(**rule), scored).tolist()


def test_two_queries():
    """NLL 3 and 6 with their mean 4.5 weigh 1.5 and 0.75."""
    assert weights([3.0, 6.0]) == pytest.approx([1.5, 0.75])


def test_clip_at_the_upper_end():
    """Of [2, 4, 6, 6, 6, 6] with mean 5 the first is clipped from 2.5 to 2; the others are 1.25 and 5/6."""
    assert weights([2.0, 4.0, 6.0, 6.0, 6.0, 6.0]) == pytest.approx([2.0, 1.25, 5 / 6, 5 / 6, 5 / 6, 5 / 6])


def test_without_an_upper_bound():
    """An infinite upper end leaves 5 / 2 as it is."""
    assert weights([2.0, 8.0], clip=(0.0, math.inf)) == pytest.approx([2.5, 0.625])


def test_clip_at_the_lower_end():
    """The lower end holds too: 4.5 / 9 = 0.5 is raised to 0.7."""
    assert weights([9.0, 4.5], mean=4.5, clip=(0.7, 2.0)) == pytest.approx([0.7, 1.0])


def test_the_mean_is_an_argument():
    """The mean belongs to the whole training set: a shard's weights use the mean they are given, not their own."""
    assert weights([3.0], mean=4.5) == pytest.approx([1.5])
    assert weights([6.0], mean=4.5) == pytest.approx([0.75])


def test_one_token_prompt():
    """A prompt of one token has no likelihood: weight 1, whatever its NLL field holds."""
    scored = torch.tensor([True, False, True])
    assert weights([3.0, 0.0, 6.0], mean=4.5, scored=scored) == pytest.approx([1.5, 1.0, 0.75])
    assert weights([math.nan], mean=4.5, scored=torch.tensor([False])) == [1.0]
    assert weights([0.0], mean=4.5, clip=(0.0, 0.5), scored=torch.tensor([False])) == [1.0]


def test_certain_prompt():
    """NLL 0 with scored tokens: the ratio is unbounded, so the clip's upper end applies; never inf or NaN."""
    assert weights([0.0, 9.0], mean=4.5) == pytest.approx([2.0, 0.5])
    assert weights([0.0], mean=0.0) == pytest.approx([2.0])


def test_uniform():
    """`uniform` is GRPO's weighting: ones, whatever the NLL."""
    assert weights([0.0, 1.0, 50.0], mean=5.0, scheme="uniform") == [1.0, 1.0, 1.0]


def test_unknown_scheme():
    """A misspelt scheme is refused by its name."""
    with pytest.raises((ValueError, KeyError), match="nll_ration"):
        weights([1.0], scheme="nll_ration")


def test_random_ratios():
    """Against the formula in plain python on random NLLs."""
    generator = torch.Generator().manual_seed(0)
    nll = (20 * torch.rand(50, generator=generator, dtype=torch.float64)).tolist()
    mean = sum(nll) / len(nll)
    assert weights(nll) == pytest.approx([min(max(mean / s, 0.0), 2.0) for s in nll])
