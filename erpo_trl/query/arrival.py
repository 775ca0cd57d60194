"""Rows without reference columns: scored under the reference when their completions are generated.

For streams, which cannot be mapped beforehand, and for sets too large to score whole (`reference_sample_size`). Every process
must take part in every call, since the rows of all are spread over all.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from transformers.utils import logging

from .fingerprint import base_model, query_key, row_fingerprint
from .reference import DatasetMapper
from .scoring import reference_policy, score_in_rounds
from .sharding import is_sharded
from .span import scored_in_span
from .weights import query_weights

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
class RunningMean:
    """s̄ of a stream: the mean over generation batches, which turns into an exponential moving average.

    Args:
        decay: share that the past keeps once 1 / (1 - decay) batches have been seen, in [0, 1); 1 for a fixed value.
        value: nats, None before the first batch.
        batches: how many it has seen.
    """

    decay: float
    value: float | None = None
    batches: int = 0

    def update(self, batch_mean: float) -> float:
        """Take in one batch and return the new mean."""
        if self.decay == 1:
            return self.value
        self.batches += 1
        rate = max(1 / self.batches, 1 - self.decay)
        self.value = batch_mean if self.value is None else self.value + rate * (batch_mean - self.value)
        return self.value


class ArrivingReference:
    """Gives rows their reference columns as they arrive.

    Args:
        mapper: holds the reference and how training calls the model.
        accelerator: the trainer's.
        mean: s̄.
    """

    def __init__(self, mapper: DatasetMapper, accelerator: Accelerator, mean: RunningMean):
        self.mapper, self.accelerator, self.mean = mapper, accelerator, mean
        self._frozen: nn.Module | None = None

    def keep_reference(self) -> None:
        """Call while the model still is the reference: keeps a copy where training would change it.

        Raises:
            ValueError: a copy is needed but the model is spread over processes.
        """
        mapper = self.mapper
        if hasattr(mapper.model, "peft_config") and not mapper.reference.adapter:
            return  # the base model stays as it is; the adapter is turned off for scoring
        why = (
            "its adapter is part of the reference and is trained"
            if mapper.reference.adapter
            else "all weights are trained"
        )
        if is_sharded(mapper.model) or self.accelerator.is_fsdp2:
            raise ValueError(
                f"Rows without reference columns need the reference at hand while training, and {why}; a copy of a model that "
                "is spread over processes is not supported. Train a fresh LoRA adapter, or map the data beforehand with "
                "DatasetMapper."
            )
        size = sum(p.numel() * p.element_size() for p in mapper.model.parameters())
        logger.warning(
            f"Rows are scored as they arrive, and {why}: a frozen copy of the model ({size / 2**30:.2f} GiB) stays in memory. "
            "A fresh LoRA adapter, or data mapped beforehand with DatasetMapper, needs none."
        )
        base = base_model(mapper.model)
        # A patched forward would be copied with what it closes over: the model in training
        patched = base.__dict__.pop("forward", None)
        try:
            self._frozen = copy.deepcopy(mapper.model).to(self.accelerator.device).eval().requires_grad_(False)
        finally:
            if patched is not None:
                base.forward = patched

    def _score(self, queries: list[np.ndarray]) -> dict[int, np.ndarray]:
        """Log-probs by query key, of the queries of all processes."""
        mapper = self.mapper
        distinct = list({query_key(row): row for row in gather_object(queries)}.values())
        scored: list[tuple[int, np.ndarray]] = []
        if not distinct:
            return {}
        with mapper.prepared() as policy:
            model = mapper.model if self._frozen is None else self._frozen
            call = policy if self._frozen is None else self._frozen
            with reference_policy(model, mapper.config, mapper.reference.adapter, mapper.autocast_dtype):
                budget = mapper.config.reference_batch_tokens
                for pairs, _ in score_in_rounds(call, distinct, budget, mapper.processing_class):
                    scored += [(query_key(row), logps) for row, logps in pairs]
        return dict(gather_object(scored))

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
            row for row, column in enumerate(columns) if None in (column["query_fingerprint"], column["query_span"])
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
        scorable = torch.tensor(
            [scored_in_span(span, len(row)).any() for span, row in zip(spans, ids)], dtype=torch.bool
        )
        total = torch.stack([nll[scorable].sum(), scorable.sum().double()]).float()
        total, rows = self.accelerator.reduce(total.to(self.accelerator.device), reduction="sum").tolist()
        mean = self.mean.value
        if rows and (learning or mean is None):
            mean = self.mean.update(total / rows) if learning else total / rows
        weights = query_weights(
            nll,
            mean if mean is not None else 1.0,
            scheme=mapper.config.query_weight,
            clip=mapper.config.query_weight_clip,
            scored=scorable,
        )
        for column, weight in zip(filled, weights.tolist()):
            column["query_weight"] = weight
        return filled
