"""The environment side of preference training (DPO): Query-KL on the prompt that chosen and rejected share.

What it changes against the trainers that generate: rows are pairs, which TRL lays out as [chosen; rejected] with prompt and
completion in one row, padded on the right; the reference is scored from the ids that TRL made of each prompt; a step's
micro-batches come from the data loader as they are; a weight multiplies the gradient of the pair's loss, since there is no
advantage.
"""

import json
from collections.abc import Callable

import torch
import xxhash
from datasets import IterableDataset
from torch import Tensor

from .checks import refuse_unsupported
from .columns import REFERENCE_FEATURES
from .likelihood import PairReader, QueryReader, real_ids
from .regularizer import QueryRegularizerMixin
from .span import scored_in_span

# What a batch holds beside TRL's own inputs, which all go to the model
_COLUMNS = {*REFERENCE_FEATURES, "query_mask", "query_key", "query_owner", "query_share"}


class PairCollator:
    """TRL's collator of preference pairs, with the reference columns of N pairs beside its tensors.

    Args:
        collator: returns `input_ids`, `attention_mask` and `completion_mask` (2N, L), chosen rows first.
    """

    def __init__(self, collator: Callable[[list[dict]], dict]):
        self.collator = collator

    def __call__(self, pairs: list[dict]) -> dict:
        batch = self.collator(pairs)
        logps = torch.zeros(len(pairs), batch["input_ids"].shape[1] - 1)  # aligned with TRL's log_probs
        counted = torch.zeros_like(logps, dtype=torch.bool)
        for row, pair in enumerate(pairs):
            values = pair.get("ref_query_logps") or []
            if 0 < len(values) <= logps.shape[1]:  # a longer one is not in the batch, which is found out later
                logps[row, : len(values)] = torch.tensor(values)
                counted[row, : len(values)] = torch.from_numpy(scored_in_span(pair["query_span"], len(values) + 1))
        batch["ref_query_logps"], batch["query_mask"] = logps, counted
        batch["query_span"] = [pair.get("query_span") for pair in pairs]
        batch["query_weight"] = torch.tensor([pair.get("query_weight", 1.0) for pair in pairs], dtype=torch.float32)
        batch["query_fingerprint"] = [pair.get("query_fingerprint") for pair in pairs]
        return batch


def refuse_streams(given: dict) -> None:
    """Raise for constructor arguments that the environment side of preference training does not work with."""
    refuse_unsupported(given)
    evaluation = given.get("eval_dataset")
    parts = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
    if any(isinstance(part, IterableDataset) for part in (given.get("train_dataset"), *parts)):
        raise ValueError(
            "Preference data must be a datasets.Dataset, found a stream: the reference scores every prompt before training. "
            "Load the data without streaming=True."
        )


class PreferenceMixin(QueryRegularizerMixin):
    """Query-KL and query weights for TRL's DPOTrainer."""

    _prompt_column = "prompt_ids"
    _refuse_unsupported = staticmethod(refuse_streams)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step = 0  # counted by trainers that generate; here nothing reads it

    # ---- the reference

    def _ids_of(self, prompts: list) -> list:
        return prompts  # TRL has made the ids when it took the data set

    def _template_arguments(self) -> dict:
        return {}  # they come with the rows, whose ids tell where a span cannot be found without them

    def _collator(self) -> PairCollator:
        return PairCollator(self.data_collator)

    def _count_positions(self) -> None:
        """Nothing: rows are padded on the right, where absolute positions stay put."""

    def _warn_of_left_over_rows(self) -> None:
        """Nothing: every pair has its turn."""

    # ---- resume

    def _inside_generation(self, step: int) -> bool:
        return False

    def _generation_window(self) -> int:
        return 1

    def _too_little_data(self) -> str:
        return f"the data has {len(self.train_dataset)} pairs"

    def _order_settings(self) -> dict:
        args = self.args
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"seed": args.seed, "data_seed": args.data_seed, "pairs_per_step": pairs}

    def _data_fingerprint(self) -> str:
        digest = xxhash.xxh3_64()
        ids = self.train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]).with_format(None)
        for batch in ids.iter(1000):
            digest.update(json.dumps(batch).encode())
        return digest.hexdigest()

    # ---- the optimizer step

    def _settle(self, batches: list[dict]) -> list[dict]:
        return super()._settle([batch | self._queries_of(batch) for batch in batches])

    def _queries_of(self, batch: dict) -> dict:
        """`query_key` (N,) of the chosen rows, checked against what the reference scored."""
        pairs = len(batch["query_weight"])
        ids, real, completion = (batch[name][:pairs] for name in ("input_ids", "attention_mask", "completion_mask"))
        mask = real * (1 - completion)
        tokens = (mask.sum(1) - 1).clamp(min=0).tolist()
        columns = [
            {"query_fingerprint": fingerprint, "ref_query_logps": logps[:count], "query_span": span}
            for fingerprint, logps, count, span in zip(
                batch["query_fingerprint"], batch["ref_query_logps"], tokens, batch["query_span"]
            )
        ]
        keys = self._check_ids(
            real_ids(ids, mask), columns, lambda row: self.processing_class.decode(ids[row][mask[row].bool()])
        )
        return {"query_key": torch.tensor(keys, dtype=torch.int64, device=ids.device)}

    # ---- the loss

    def _reader(self, model, inputs: dict) -> QueryReader:
        weight = None if self.args.query_weight == "uniform" else inputs["query_weight"]
        chosen = inputs["input_ids"][: len(inputs["query_mask"])]
        return PairReader(model, chosen, inputs["query_mask"], inputs["query_owner"], weight)

    def _regularized(self, loss, inputs: dict, reader: QueryReader):
        if isinstance(loss, tuple):  # with return_outputs
            return super()._regularized(loss[0], inputs, reader), *loss[1:]
        return super()._regularized(loss, inputs, reader)

    def _responses(self, inputs: dict, reader: QueryReader) -> tuple[Tensor, Tensor]:
        """(N,) means over chosen and rejected, the two responses of a pair."""
        nll = -reader.completion_logps.detach().sum(-1)
        tokens = inputs["completion_mask"][:, 1:].sum(-1).float()
        return tuple(column.view(2, -1).mean(0) for column in (nll, tokens))

    def _compute_loss(self, model, inputs, return_outputs):
        return super()._compute_loss(model, _without_columns(inputs), return_outputs)

    def compute_ref_log_probs(self, model, inputs):
        """TRL's, which hands all of `inputs` to the model."""
        return super().compute_ref_log_probs(model, _without_columns(inputs))


def _without_columns(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if name not in _COLUMNS}
