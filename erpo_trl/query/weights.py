"""Query weights: from the NLL of a query to the factor on its advantages.

A scheme is one function (queries, population, rule) -> raw weight and one line in `WEIGHT_SCHEMES`; clipping, the floor, the
normalization and one-token queries are common to all and live in `query_weights`. A scheme of one's own needs no line: its
import path is its name.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..imports import import_function


class Queries(NamedTuple):
    """Likelihoods of queries under whose eyes they are weighted: the reference's, or the current policy's.

    nll: (N,) s(q) = -ℓ(q) over the query's scored tokens, nats, >= 0; tokens: (N,) how many those are.
    """

    nll: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class WeightRule:
    """How weights are made of likelihoods.

    Args:
        scheme: a key of `WEIGHT_SCHEMES`, or the import path of a function like them.
        clip: lowest and highest raw weight, of any scheme but `uniform`. The highest also answers s(q) = 0, where a ratio has
            no bound.
        floor: φ in [0, 1): share of a uniform weight that every query keeps, w ← φ + (1 - φ) w, so that no query is silent and
            the order stays.
        normalize: divide by the mean over the population, so that weights move learning between queries and not its pace.
        beta: β of `softmax`.
    """

    scheme: str = "nll_ratio"
    clip: tuple[float, float] = (0.0, 2.0)
    floor: float = 0.0
    normalize: bool = False
    beta: float = 1.0

    @classmethod
    def of(cls, config) -> "WeightRule":
        """The rule that a config's `query_weight*` fields describe."""
        return cls(
            config.query_weight,
            tuple(config.query_weight_clip),
            config.query_weight_floor,
            config.query_weight_normalize,
            config.query_weight_beta,
        )


def nll_ratio(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """s̄ / s(q): queries more typical than the average weigh more (ERPO section 4.2)."""
    return population.nll.mean() / queries.nll


def token_nll_ratio(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """The same of the NLL per scored token, s/T: a long query is not atypical for its length."""
    return (population.nll / population.tokens).mean() / (queries.nll / queries.tokens)


def softmax(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """N · softmax(β ℓ/T) over the population: β = 0 is uniform, a large β keeps the most typical queries alone."""
    return _softmax(queries, population, lambda x: -rule.beta * x.nll / x.tokens)


def snis(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """P(q)/ρ_train(q) with the population as a uniform sample of ρ_train, self-normalised: N · P(q) / Σ P.

    The ideal weight of ERPO Eq. 9, which the paper's ratio stands in for: one query that is a few nats likelier than the
    others takes nearly all of it, as the effective sample size then says.
    """
    return _softmax(queries, population, lambda x: -x.nll)


def _softmax(queries: Queries, population: Queries, logits: Callable[[Queries], Tensor]) -> Tensor:
    return torch.exp(logits(queries) - torch.logsumexp(logits(population), 0) + math.log(len(population.nll)))


def quantile(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """a + (b - a) · rank, [a, b] the clip and rank the share of the population that is less typical, ties counting half.

    Blind to how far NLLs lie apart; over the population's own queries the mean is (a + b)/2.
    """
    order = population.nll.sort().values
    nll = queries.nll.to(order.dtype)
    likelier = torch.searchsorted(order, nll, side="left")
    as_likely = torch.searchsorted(order, nll, side="right") - likelier
    rank = (len(order) - likelier - 0.5 * as_likely) / len(order)
    low, high = rule.clip
    return (low + (high - low) * rank).to(queries.nll.dtype)


def uniform(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """1 for every query: no weighting."""
    return torch.ones_like(queries.nll)


WEIGHT_SCHEMES = {
    "nll_ratio": nll_ratio,
    "token_nll_ratio": token_nll_ratio,
    "softmax": softmax,
    "quantile": quantile,
    "snis": snis,
    "uniform": uniform,
}
# Those that need no more of a population than its means, which a stream has
MEAN_SCHEMES = ("nll_ratio", "token_nll_ratio", "uniform")


@functools.lru_cache
def weight_scheme(name: str) -> Callable[[Queries, Queries, WeightRule], Tensor]:
    """A scheme by its name or import path. Raises ValueError, with what there is, for neither."""
    if name in WEIGHT_SCHEMES:
        return WEIGHT_SCHEMES[name]
    return import_function(name, "query_weight", WEIGHT_SCHEMES)


def of_means(mean_nll: float, mean_token_nll: float) -> Queries:
    """A population known by its means alone, for `MEAN_SCHEMES`: one query that has them.

    Args: mean_nll: of s, nats; mean_token_nll: of s/T, nats per token.
    """
    nll = torch.tensor([mean_nll], dtype=torch.float64)
    return Queries(nll, nll / mean_token_nll)


def query_weights(queries: Queries, population: Queries, rule: WeightRule, scored: Tensor | None = None) -> Tensor:
    """Weight w(q) of each query.

    Args:
        queries: (N,) those to weight.
        population: (M,) those that weights are relative to, all scored: the training set's, or the distinct ones of an
            optimizer step. Where it is empty, every query weighs 1.
        rule: see `WeightRule`.
        scored: (N,) False for a query without likelihood, as one of one token, which weighs 1. Default: all True.

    Returns:
        (N,) weights, same dtype as `queries.nll`.

    Raises:
        ValueError: a weight is not finite, which for a ratio needs s(q) = 0 and no upper clip; or a scheme of one's own
            returned something else than (N,) finite numbers.

    Source: ERPO (arXiv 2608.23311) section 4.2; clip [0, 2].
    """
    if not len(population.nll):
        return torch.ones_like(queries.nll)
    raw = _bounded(queries, population, rule)
    if rule.normalize:
        raw = raw / _bounded(population, population, rule).mean()
    if scored is not None:
        raw = torch.where(scored, raw, torch.ones_like(raw))
    if not torch.isfinite(raw).all():
        row = int((~torch.isfinite(raw)).nonzero()[0])
        nll = queries.nll[row].item()
        if nll == 0 and rule.scheme in WEIGHT_SCHEMES:
            raise ValueError(
                f"query {row} has an NLL of {nll} nats, so its weight has no bound: set query_weight_clip to a finite upper end"
            )
        raise ValueError(
            f"query_weight={rule.scheme!r} gives query {row}, of {nll} nats, the weight {raw[row].item()}: weights must be "
            "finite numbers"
        )
    return raw


def _bounded(queries: Queries, population: Queries, rule: WeightRule) -> Tensor:
    """The scheme's weights, clipped, with the floor."""
    raw = weight_scheme(rule.scheme)(queries, population, rule)
    if not isinstance(raw, Tensor):
        raise ValueError(f"query_weight={rule.scheme!r} returned a {type(raw).__name__}, not a torch.Tensor")
    if raw.shape != queries.nll.shape:
        raise ValueError(
            f"query_weight={rule.scheme!r} returned weights of shape {tuple(raw.shape)} for {len(queries.nll)} queries"
        )
    if rule.scheme in ("nll_ratio", "token_nll_ratio"):
        # 0/0 at mean 0 is NaN, which a clamp would keep
        raw = torch.where(queries.nll == 0, torch.full_like(raw, math.inf), raw)
    if rule.scheme != "uniform":
        raw = raw.clamp(*rule.clip)
    return rule.floor + (1 - rule.floor) * raw if rule.floor else raw


def weighted(advantages: Tensor, weights: Tensor) -> Tensor:
    """(B,) or (B, C) advantages times the (B,) weight of each row's query."""
    return advantages * (weights if advantages.dim() == 1 else weights.unsqueeze(1))


def effective_sample_fraction(weights: Tensor) -> float:
    """Effective sample size of (N,) weights as a share of N: (Σw)² / (N Σw²), in (0, 1]; 0 when all weights are 0."""
    squares = (weights * weights).sum()
    return float(weights.sum() ** 2 / (len(weights) * squares)) if squares > 0 else 0.0
