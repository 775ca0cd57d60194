"""Rows without reference columns: scored under the reference when their completions are generated.

For streams, which cannot be mapped beforehand, and for sets too large to score whole (`reference_sample_size`). Every process
must take part in every call, since the rows of all are spread over all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from .fingerprint import query_key, row_fingerprint
from .reference import DatasetMapper, column_rule
from .scoring import queries_of_all, score_for_all
from .span import scored_in_span
from .standby import StandbyReference
from .weights import MEAN_SCHEMES, Queries, of_means, query_weights

logger = logging.get_logger(__name__)


def sample_prompts(dataset: Dataset | IterableDataset, size: int, seed: int) -> Dataset:
    """Prompts to estimate s̄ on: rows drawn without replacement, or the first rows of a stream.

    Raises:
        ValueError: the data is empty.
    """
    if isinstance(dataset, IterableDataset):
        rows = [{"prompt": row["prompt"]} for row in dataset.take(size)]
        if not rows:
            raise ValueError("The training stream has no rows.")
        return Dataset.from_list(rows)
    drawn = np.random.default_rng(seed).permutation(len(dataset))[:size]
    return dataset.select(np.sort(drawn)).select_columns("prompt")


def drop_long_prompts(stream: IterableDataset, tokenize: Callable[[list], list], limit: int) -> IterableDataset:
    """The stream without rows whose prompt has more than `limit` tokens."""
    warned = False

    def fits(batch: dict) -> list[bool]:
        nonlocal warned
        kept = [len(ids) <= limit for ids in tokenize(batch["prompt"])]
        if not warned and not all(kept):
            warned = True
            logger.warning(f"Rows with prompts of more than {limit} tokens are left out of the stream.")
        return kept

    return stream.filter(fits, batched=True, batch_size=16)


@dataclass
class RunningMeans:
    """s̄, and its like per token, of a stream: means over generation batches, which turn into exponential moving averages.

    Args:
        decay: share that the past keeps once 1 / (1 - decay) batches have been seen, in [0, 1).
        nll: s̄, nats, None before the first batch.
        token_nll: the mean of s/T, nats per token, None before the first batch.
        batches: how many it has seen.
    """

    decay: float
    nll: float | None = None
    token_nll: float | None = None
    batches: int = 0

    def update(self, nll: float, token_nll: float) -> None:
        """Take in the means of one batch."""
        self.batches += 1
        rate = max(1 / self.batches, 1 - self.decay)
        self.nll = nll if self.nll is None else self.nll + rate * (nll - self.nll)
        self.token_nll = token_nll if self.token_nll is None else self.token_nll + rate * (token_nll - self.token_nll)


class ArrivingReference:
    """Gives rows their reference columns as they arrive.

    Args:
        mapper: holds the reference and how training calls the model.
        accelerator: the trainer's.
        reference: at hand while training.
        population: what weights are relative to, of a sample; or the running means of what has arrived.

    Raises:
        ValueError: weights that need more of the training set than its means, and no sample.
    """

    def __init__(
        self,
        mapper: DatasetMapper,
        accelerator: Accelerator,
        reference: StandbyReference,
        population: Queries | RunningMeans,
    ):
        self.mapper, self.accelerator, self.reference = mapper, accelerator, reference
        self.means = population if isinstance(population, RunningMeans) else None
        self._sample = population if self.means is None else None
        rule = column_rule(mapper.config)
        if self.means is not None and (rule.normalize or rule.scheme not in MEAN_SCHEMES):
            what = "query_weight_normalize" if rule.normalize else f"query_weight={rule.scheme!r}"
            raise ValueError(
                f"{what} needs the likelihoods of the training set, and a stream gives their means alone: set "
                f"reference_sample_size, or use query_weight {', '.join(map(repr, MEAN_SCHEMES))} without normalization."
            )

    def _score(self, queries: list[np.ndarray]) -> dict[int, np.ndarray]:
        """Log-probs by query key, of the queries of all processes."""
        queries = queries_of_all(queries)
        if not queries:
            return {}
        with self.reference.policy() as policy:
            return score_for_all(
                policy, queries, self.mapper.config.reference_batch_tokens, self.mapper.processing_class
            )

    def fill(self, columns: list[dict], ids: list[np.ndarray], prompts: list, learning: bool) -> list[dict]:
        """The columns of each row, those that a row lacks computed.

        Args:
            columns: per row the reference columns, None where it has none.
            ids: per row the (T,) prompt ids.
            prompts: per row the prompt, text or messages.
            learning: whether the rows count towards s̄; evaluation rows do not.
        """
        mapper = self.mapper
        lacking = [
            row
            for row, column in enumerate(columns)
            if column["query_fingerprint"] is None or column["query_span"] is None
        ]
        # Rows of a group share their prompt
        wanted = {query_key(ids[row]): ids[row] for row in lacking if len(ids[row]) > 1}
        scored = self._score(list(wanted.values()))
        filled = [dict(column) for column in columns]
        for row in lacking:
            key = query_key(ids[row])
            logps = scored.get(key, np.empty(0, dtype=np.float32))
            span = mapper.find_span(prompts[row], ids[row], f"Row {row} of the batch")
            filled[row] = {
                "ref_query_logps": logps,
                "query_span": span,
                "ref_query_nll": abs(float(logps[scored_in_span(span, len(ids[row]))].sum(dtype=np.float64))),
                "query_fingerprint": row_fingerprint(mapper.reference.fingerprint, key),
            }
        nll = torch.tensor([column["ref_query_nll"] for column in filled], dtype=torch.float64)
        spans = [column["query_span"] for column in filled]
        tokens = [scored_in_span(span, len(row)).sum() for span, row in zip(spans, ids)]
        queries = Queries(nll, torch.tensor(tokens, dtype=torch.float64))
        scored = queries.tokens > 0
        population = self._sample or self._running_population(queries, scored, learning)
        weights = query_weights(queries, population, column_rule(mapper.config), scored)
        for column, weight in zip(filled, weights.tolist()):
            column["query_weight"] = weight
        return filled

    def _running_population(self, queries: Queries, scored: torch.Tensor, learning: bool) -> Queries:
        """The running means, with this batch's in them where it counts; an evaluation before any is relative to itself."""
        nll, tokens = (column[scored] for column in queries)
        total = torch.stack([nll.sum(), (nll / tokens).sum(), torch.tensor(float(len(nll)), dtype=nll.dtype)]).float()
        *sums, rows = self.accelerator.reduce(total.to(self.accelerator.device), reduction="sum").tolist()
        batch = [value / rows for value in sums] if rows else None
        if batch and learning:
            self.means.update(*batch)
        if self.means.nll is not None:
            return of_means(self.means.nll, self.means.token_nll)
        return of_means(*batch) if batch else Queries(nll, tokens)
