"""Query weights clip(mean NLL / NLL) against the numbers of the design, and the rows that have no likelihood."""

import math

import pytest
import torch

from erpo_trl.query.weights import (
    WEIGHT_SCHEMES,
    Queries,
    WeightRule,
    effective_sample_fraction,
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


def test_token_nll_ratio():
    """s/T of 1, 2 and 3 nats a token, their mean 2: 2, 1 and 2/3, whatever the lengths."""
    assert weights([4.0, 20.0, 3.0], tokens=[4, 10, 1], scheme="token_nll_ratio") == pytest.approx([2.0, 1.0, 2 / 3])


def test_token_nll_ratio_relative_to_means():
    """A stream's mean per token is what counts, not its mean per query."""
    population = of_means(mean_nll=50.0, mean_token_nll=3.0)
    found = weights([4.0, 20.0], tokens=[4, 5], population=population, scheme="token_nll_ratio")
    assert found == pytest.approx([2.0, 0.75])  # 3/1 clipped to 2, 3/4
    assert weights([25.0], population=population, scheme="nll_ratio") == [2.0]


def test_softmax():
    """ℓ/T of -1, -2, -2 with β = ln 2 are in the proportion 2 : 1 : 1, so N times softmax is 1.5, 0.75, 0.75."""
    rule = {"scheme": "softmax", "beta": math.log(2.0)}
    assert weights([3.0, 4.0, 20.0], tokens=[3, 2, 10], **rule) == pytest.approx([1.5, 0.75, 0.75])
    assert weights([3.0, 4.0, 20.0], tokens=[3, 2, 10], scheme="softmax", beta=0.0) == pytest.approx([1.0] * 3)


def test_softmax_of_long_prompts_does_not_overflow():
    """Thousands of nats: e^-ℓ is 0 in floating point, its share is not."""
    assert weights([9000.0, 9000.0 + math.log(3.0)], scheme="snis") == pytest.approx([1.5, 0.5])


def test_snis():
    """P of 1/2, 1/4 and 1/4: N · P/ΣP is 1.5, 0.75, 0.75; length does not matter."""
    nll = [math.log(2.0), math.log(4.0), math.log(4.0)]
    assert weights(nll, tokens=[1, 5, 50], scheme="snis") == pytest.approx([1.5, 0.75, 0.75])


def test_snis_of_a_shard_is_relative_to_the_population():
    """The same query weighs the same whoever stands beside it in the batch."""
    everyone = queries([1.0, 2.0, 3.0])
    whole = weights([1.0, 2.0, 3.0], scheme="snis", clip=(0.0, math.inf))
    for row in range(3):
        alone = weights([1.0 + row], population=everyone, scheme="snis", clip=(0.0, math.inf))
        assert alone == pytest.approx(whole[row : row + 1])


def test_quantile():
    """Four NLLs: the midranks of the less typical share are 7/8, 5/8, 3/8, 1/8; over [0, 2] twice that."""
    assert weights([1.0, 9.0, 2.0, 500.0], scheme="quantile") == pytest.approx([1.75, 0.75, 1.25, 0.25])
    assert weights([1.0, 9.0], scheme="quantile", clip=(0.5, 1.5)) == pytest.approx([1.25, 0.75])


@pytest.mark.parametrize(
    "nll, expected", [([4.0], [1.0]), ([4.0, 4.0, 4.0], [1.0] * 3), ([2.0, 5.0, 5.0, 9.0], [1.75, 1.0, 1.0, 0.25])]
)
def test_quantile_of_ties(nll, expected):
    """One row, all rows equal, and a tie in the middle: equals share their rank and the mean stays (a + b)/2."""
    assert weights(nll, scheme="quantile") == pytest.approx(expected)
    assert sum(expected) / len(expected) == 1.0


def test_quantile_of_a_newcomer():
    """A query outside the population is ranked in it: more typical than all, than none, and beside an equal."""
    population = queries([1.0, 2.0, 3.0, 4.0])
    assert weights([0.5, 9.0, 2.0], population=population, scheme="quantile") == pytest.approx([2.0, 0.0, 1.25])


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
@pytest.mark.parametrize("nll", [[7.0], [3.0, 3.0, 3.0]])
def test_equal_queries_weigh_one(scheme, nll):
    """Where nothing tells queries apart, every scheme is uniform."""
    assert weights(nll, tokens=[4] * len(nll), scheme=scheme, beta=3.0) == pytest.approx([1.0] * len(nll))


@pytest.mark.parametrize("scheme", [name for name in WEIGHT_SCHEMES if name != "uniform"])
def test_every_scheme_prefers_the_typical(scheme):
    """Of equally long queries the likelier weighs more, strictly, inside the clip."""
    found = weights([9.0, 11.0, 10.0], tokens=[10, 10, 10], scheme=scheme, clip=(0.0, 10.0))
    assert found[0] > found[2] > found[1]


def test_floor():
    """φ = 0.25 of 2 and 0.5: 0.25 + 0.75 · 2 = 1.75 and 0.625."""
    assert weights([2.0, 8.0], mean=4.0, floor=0.25) == pytest.approx([1.75, 0.625])


def test_normalize():
    """Weights 2 (clipped) and 0.5 with floor 0.25 are 1.75 and 0.625, of mean 1.1875, which divides them."""
    nll, rule = [2.0, 8.0, 8.0], {"floor": 0.25, "clip": (0.5, 1.5), "normalize": True}
    plain = [0.25 + 0.75 * 1.5, 0.25 + 0.75 * 0.75, 0.25 + 0.75 * 0.75]
    found = weights(nll, **rule)
    assert found == pytest.approx([w * 3 / sum(plain) for w in plain])
    assert sum(found) / 3 == pytest.approx(1.0)
    # A newcomer is divided by the population's mean, not by its own
    assert weights([6.0], population=queries(nll), **rule) == pytest.approx([3 / sum(plain)])


def test_a_scheme_of_ones_own(tmp_path):
    """A function by its path, with population and rule at hand; a wrong shape and a wrong path are named."""
    path = tmp_path / "schemes.py"
    path.write_text(
        "def inverse(queries, population, rule):\n    return population.nll.max() / queries.nll * rule.beta\n"
        "def one(queries, population, rule):\n    return queries.nll[:1]\n"
    )
    found = weights([2.0, 8.0], scheme=f"{path}:inverse", clip=(0.0, math.inf), beta=0.5)
    assert found == pytest.approx([2.0, 0.5])
    with pytest.raises(ValueError, match=r"one' returned weights of shape \(1,\) for 2 queries"):
        weights([2.0, 8.0], scheme=f"{path}:one")
    with pytest.raises(ValueError, match="query_weight '.*:two': .* has no 'two'. Known names: nll_ratio, quantile"):
        weights([2.0], scheme=f"{path}:two")


@pytest.mark.parametrize("body, message", [("[1.0, 1.0]", "returned a list, not a torch.Tensor"),
                                           ("queries.nll * float('nan')", "gives query 0, of 2.0 nats, the weight nan")])  # fmt: skip
def test_what_a_scheme_of_ones_own_must_return(tmp_path, body, message):
    """The message is about the scheme; a clip would not help."""
    path = tmp_path / "schemes.py"
    path.write_text(f"def mine(queries, population, rule):\n    return {body}\n")
    with pytest.raises(ValueError, match=f"mine' {message}") as error:
        weights([2.0, 8.0], scheme=f"{path}:mine")
    assert "query_weight_clip" not in str(error.value)


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_to_be_relative_to(scheme, normalize):
    """With an empty population every query weighs 1: prompts of one token, and one that has a likelihood."""
    nobody = queries([], [])
    rule = {"scheme": scheme, "normalize": normalize, "floor": 0.1, "clip": (0.0, 4.0)}
    scored = torch.tensor([False, False])
    assert weights([0.0, 0.0], tokens=[0, 0], population=nobody, scored=scored, **rule) == [1.0, 1.0]
    assert weights([3.0], tokens=[2], population=nobody, **rule) == [1.0]


def test_effective_sample_size():
    """(Σw)²/(N Σw²): 1 for equal weights, 1/N for one alone, 25/26 of 1 and 1.5."""
    assert effective_sample_fraction(torch.tensor([0.7, 0.7, 0.7])) == pytest.approx(1.0)
    assert effective_sample_fraction(torch.tensor([0.0, 5.0, 0.0, 0.0])) == 0.25
    assert effective_sample_fraction(torch.tensor([1.0, 1.5])) == pytest.approx(25 / 26)
    assert effective_sample_fraction(torch.zeros(3)) == 0.0
