"""Weights from the current policy's likelihood: read at every update, relative to the optimizer step's distinct queries.

w(q) needs the NLL of all of the step's queries before the first of its losses. Where a step is one micro-batch, they all
come out of its one forward, in time for its loss. Where it has several, only two ways are exact: to keep every micro-batch's
graph until the last one's forward, which costs memory, or to read the distinct prompts in a forward of their own, without
gradient and without completions, which costs 1/K of the step's prompt tokens, forward only. This module takes the second.
"""

import numpy as np
import torch
from torch import Tensor

from .fingerprint import query_key
from .reference import DatasetMapper
from .scoring import queries_of_all, reference_policy, score_for_all
from .weights import Queries, WeightRule, query_weights, weighted


def step_weights(
    keys: np.ndarray, nll: np.ndarray, tokens: np.ndarray, rule: WeightRule
) -> tuple[np.ndarray, np.ndarray]:
    """Weights of one optimizer step's queries.

    Args:
        keys: (N,) query of each row that has a likelihood, repeats allowed; nll: (N,) under the policy, nats; tokens: (N,).

    Returns:
        (Q,) sorted distinct keys and (Q,) their weights.
    """
    distinct, first = np.unique(keys, return_index=True)
    queries = Queries(torch.from_numpy(nll[first]).double(), torch.from_numpy(tokens[first]).double())
    return distinct, query_weights(queries, queries, rule).numpy()


def weights_of_rows(keys: np.ndarray, distinct: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(N,) weight of each row by the (N,) keys; 1 for one that is not among the (Q,) sorted distinct keys."""
    if not len(distinct):
        return np.ones(len(keys))
    at = np.searchsorted(distinct, keys).clip(max=len(distinct) - 1)
    return np.where(distinct[at] == keys, weights[at], 1.0)


def likelihoods(mapper: DatasetMapper, queries: list[np.ndarray], masks: list[np.ndarray]):
    """Likelihoods under the policy in training of the distinct queries of all processes, each read once, without gradient.

    Args:
        queries: (T,) ids of this process' distinct queries; masks: (T-1,) bool, their scored tokens.

    Returns:
        (Q,) NLL in nats and (Q,) scored tokens of this process' queries; tokens forwarded by all.
    """
    asked = queries_of_all(queries)
    with mapper.prepared() as policy, reference_policy(mapper.model, mapper.config, True, mapper.autocast_dtype):
        budget = mapper.config.reference_batch_tokens
        logps = score_for_all(policy, asked, budget, mapper.processing_class)
    nll = [-logps[query_key(query)][mask].sum(dtype=np.float64) for query, mask in zip(queries, masks)]
    return np.array(nll), np.array([mask.sum() for mask in masks], dtype=np.float64), sum(map(len, asked))


def weigh(batch: dict, weight: Tensor) -> None:
    """Give a micro-batch its (B,) weights in place, so that everyone who holds its tensors sees them."""
    batch["query_weight"].copy_(weight)
    batch["advantages"].copy_(weighted(batch["unweighted_advantages"], weight))
