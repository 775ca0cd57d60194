"""The mixin that makes a TRL trainer an ERPO trainer.

What it changes against TRL: rows carry the reference's log-probs and a weight on their advantages; the one forward that TRL
makes also labels each distinct query once per optimizer step; the loss gains α · (mean of R̂ over the step's queries).
Settled per step: which rows score their query and for how much of it, so that the step's gradient is the same however the
batch is cut into micro-batches, generations and ranks.
"""

import contextlib
import inspect
import math
from collections import deque

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers.utils import logging

from ..report.query_log import QueryLog
from .arrival import ArrivingReference, RunningMean, drop_long_prompts, sample_prompts
from .checks import check_model, refuse_images, refuse_unsupported
from .divergence import query_kl
from .fingerprint import base_model, query_key, row_fingerprint
from .likelihood import QueryReader, has_absolute_positions, pass_position_ids, scored_token_mask
from .metrics import QueryMetrics, StepQueries
from .owners import settle_owners
from .reference import REFERENCE_FEATURES, DatasetMapper, ScoringReport
from .resume import ResumeMixin
from .sharding import prepared_for_scoring, training_precision
from .window import generation_window

logger = logging.get_logger(__name__)


class QueryRegularizerMixin(ResumeMixin):
    """Query-KL and query weights for a TRL trainer that generates in `_prepare_inputs` and has a fused LM head.

    Put it before the TRL trainer in the bases: `class ERPORLOOTrainer(QueryRegularizerMixin, RLOOTrainer)`.
    """

    def __init__(self, *args, **kwargs):
        # Before anything is loaded
        signatures = (inspect.signature(cls.__init__) for cls in type(self).__mro__)
        trl = next(signature for signature in signatures if "train_dataset" in signature.parameters)
        refuse_unsupported(trl.bind_partial(self, *args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        check_model(self.model, self.args.disable_dropout)
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and has_absolute_positions(base_model(model)):
                pass_position_ids(base_model(model))

        asked = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        autocast, precision = training_precision(self.accelerator, asked if self.accelerator.native_amp else None)
        self.dataset_mapper = DatasetMapper(
            self.model,
            self.processing_class,
            self.args,
            tokenize=lambda prompts: self._tokenize_prompts(prompts)[0],
            autocast_dtype=autocast,
            precision=precision,
            prepare=self._prepared_for_scoring,
        )
        self._mean_nll: float | None = None  # s̄, nats
        # What scores rows without reference columns, where the training data is not mapped beforehand
        self._arrival: ArrivingReference | None = None
        self._arrived_batches = 0  # generation batches that s̄ of a stream rests on, from a checkpoint
        self._reference_ready = False
        self.scoring_reports: list[
            tuple[str, ScoringReport]
        ] = []  # of the mappings so far: training or evaluation, report
        self._epochs_before_resume = 0
        self._mapped_evaluation: set[str] = set()
        self._step_batches: list = []  # raw generation batches of the optimizer step at hand
        self._step_queue: deque = deque()  # its settled micro-batches
        self._query_metrics = {"train": QueryMetrics(), "eval": QueryMetrics()}
        if self.args.query_log_steps:
            # Before the trackers' own callbacks: it opens the W&B run in its group
            self.callback_handler.callbacks.insert(0, QueryLog(self, self.args.query_log_steps))

    @property
    def query_alpha(self) -> float:
        """α, the coefficient of the Query-KL penalty."""
        return self.args.query_kl_coef

    @property
    def latest_queries(self) -> StepQueries | None:
        """The queries of the optimizer step made last, over all ranks."""
        return self._query_metrics["train"].latest

    # ---- construction

    def _generation_window(self) -> int:
        generate_every = self.args.steps_per_generation * self.args.num_iterations
        return generation_window(generate_every, self.args.gradient_accumulation_steps)

    def _inside_generation(self, step: int) -> bool:
        """Whether completions are left over after `step` optimizer steps; each epoch begins with a new generation batch."""
        generate_every = self.args.steps_per_generation * self.args.num_iterations
        accumulation = self.args.gradient_accumulation_steps
        if isinstance(self.train_dataset, Dataset):
            generations = len(self.train_dataset) // (self.args.generation_batch_size // self.args.num_generations)
            # An epoch's last step may have fewer micro-batches than the others
            step %= max(1, math.ceil(generations * generate_every / accumulation))
        return step * accumulation % generate_every != 0

    # ---- the reference

    def prepare_reference(self) -> None:
        """Score what is not in the reference table yet and attach the columns to the training and evaluation data.

        Runs by itself when training or evaluation starts; a second call does nothing.
        """
        if self._reference_ready:
            return
        # A known reference, that of a checkpoint, needs the model only for rows that are not in its table
        known = self.dataset_mapper.reference is not None
        with contextlib.nullcontext() if known else self.dataset_mapper.prepared():
            reference = self.dataset_mapper.pin()
            logger.info(f"Reference {reference.fingerprint} in {self.dataset_mapper.cache_dir}")
            if isinstance(self.train_dataset, Dataset) and self.args.reference_sample_size is None:
                self.train_dataset = self.dataset_mapper(self.train_dataset, self._mean_nll)
                self._mean_nll = self.dataset_mapper.report.mean_nll
                self.scoring_reports.append(("training", self.dataset_mapper.report))
            elif self.train_dataset is not None and not _carries_columns(self.train_dataset):
                self._score_on_arrival(known)
            if isinstance(self.train_dataset, Dataset):
                self._warn_of_left_over_rows()
            if isinstance(self.eval_dataset, dict):
                self.eval_dataset = {name: self._map_evaluation(data) for name, data in self.eval_dataset.items()}
            elif self.eval_dataset is not None:
                self.eval_dataset = self._map_evaluation(self.eval_dataset)
        self._reference_ready = True

    def _score_on_arrival(self, resumed: bool) -> None:
        """Have training rows scored as they arrive: s̄ from a sample, or a running mean."""
        mapper = self.dataset_mapper
        if resumed and mapper.pin() != mapper.present_reference():
            raise ValueError(
                "The checkpoint's rows are scored as they arrive, which needs the model that the run started from; this one is "
                "another. Give the trainer the pre-RL model; the checkpoint's weights are loaded by themselves."
            )
        self.train_dataset = self._without_long_prompts(self.train_dataset)
        sample = self.args.reference_sample_size
        if sample is not None and self._mean_nll is None:
            rows = sample_prompts(self.train_dataset, sample, self.args.seed)
            mapper(rows)
            self._mean_nll = mapper.report.mean_nll
        decay = self.args.reference_nll_decay if sample is None else 1.0
        mean = RunningMean(decay, self._mean_nll, self._arrived_batches)
        self._arrival = ArrivingReference(mapper, self.accelerator, mean)
        self._arrival.keep_reference()

    def _without_long_prompts(self, dataset):
        mapper = self.dataset_mapper
        limit, _ = mapper.prompt_limit()
        if limit is None:
            return dataset
        if isinstance(dataset, IterableDataset):
            return drop_long_prompts(dataset, mapper.tokenize, limit)
        return dataset.select(mapper.fitting_rows(mapper.all_ids(dataset.with_format(None))))

    def extra_state(self) -> dict:
        return {"arrived_batches": self._arrival.mean.batches if self._arrival else 0}

    def _prepared_for_scoring(self, model):
        """The model to score with: while training, the one in training."""
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            return contextlib.nullcontext(self.deepspeed)
        return prepared_for_scoring(model, self.accelerator)

    def _map_evaluation(self, dataset):
        """The data set with its columns, which rows that are scored on arrival go without; it comes back at every evaluation."""
        if self._arrival is not None and isinstance(dataset, IterableDataset):
            return self._without_long_prompts(dataset)
        if not isinstance(dataset, Dataset) or not len(dataset) or dataset._fingerprint in self._mapped_evaluation:
            return dataset
        if self._arrival is not None:
            dataset = self._without_long_prompts(dataset)
            self._mapped_evaluation.add(dataset._fingerprint)
            return dataset
        if self._mean_nll is None:
            # A stream with columns: its mean NLL is known to whoever mapped it
            if not set(REFERENCE_FEATURES) <= set(dataset.column_names):
                raise ValueError(
                    "The training stream carries reference columns, so map the evaluation data with its mean NLL: "
                    "DatasetMapper(model, processing_class, config)(eval_dataset, mean_nll=...)."
                )
            return dataset
        dataset = self.dataset_mapper(dataset, self._mean_nll)
        self.scoring_reports.append(("evaluation", self.dataset_mapper.report))
        self._mapped_evaluation.add(dataset._fingerprint)
        return dataset

    def _warn_of_left_over_rows(self) -> None:
        rows = len(self.train_dataset)
        per_generation = self.args.generation_batch_size // self.args.num_generations
        if rows < per_generation:
            raise ValueError(
                f"The training data has {rows} rows but one generation batch holds {per_generation} prompts "
                f"(generation_batch_size {self.args.generation_batch_size} / num_generations {self.args.num_generations}): "
                "lower the batch or add rows."
            )
        if rows % per_generation:
            logger.warning(
                f"Each epoch leaves out {rows % per_generation} of {rows} rows, other ones each time the order is shuffled: "
                f"TRL drops a last generation batch of fewer than {per_generation} prompts."
            )

    def get_train_dataloader(self):
        self.prepare_reference()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset=None):
        self.prepare_reference()
        if isinstance(eval_dataset, Dataset):
            refuse_images(eval_dataset)
            eval_dataset = self._map_evaluation(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        self.prepare_reference()
        return super().get_test_dataloader(self._map_evaluation(test_dataset))

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        missing = [name for name in REFERENCE_FEATURES if name not in self._signature_columns]
        self._signature_columns = [*self._signature_columns, *missing]

    # ---- rows

    def _generate_and_score_completions(self, inputs):
        """TRL's batch, with each row's reference log-probs, weight and query; weights multiply the advantages."""
        columns = [{name: row.get(name) for name in REFERENCE_FEATURES} for row in inputs]
        # Reward functions see the columns they would see under TRL
        inputs = [{name: value for name, value in row.items() if name not in REFERENCE_FEATURES} for row in inputs]
        batch = super()._generate_and_score_completions(inputs)

        prompt_ids, prompt_mask = batch["prompt_ids"], batch["prompt_mask"]
        if self._arrival is not None:
            ids = [row[mask.bool()].numpy() for row, mask in zip(prompt_ids.cpu(), prompt_mask.cpu())]
            columns = self._arrival.fill(columns, ids, learning=self.model.training)
            self._mean_nll = self._arrival.mean.value
        keys = self._check_ids(prompt_ids, prompt_mask, columns, inputs)
        device, width = prompt_ids.device, prompt_ids.shape[1] - 1
        ref_logps = torch.zeros(len(inputs), width)
        for row, column in enumerate(columns):
            logps = column["ref_query_logps"]
            if len(logps):
                ref_logps[row, width - len(logps) :] = torch.tensor(logps, dtype=torch.float32)
        weight = torch.tensor([column["query_weight"] for column in columns], dtype=torch.float32, device=device)
        batch["ref_query_logps"] = ref_logps.to(device)  # (B, P-1), aligned with TRL's log_probs
        batch["query_weight"] = weight
        batch["query_key"] = torch.tensor(keys, dtype=torch.int64, device=device)
        batch["unweighted_advantages"] = batch["advantages"]
        batch["advantages"] = batch["advantages"] * (weight if batch["advantages"].dim() == 1 else weight.unsqueeze(1))
        return batch

    def _check_ids(self, prompt_ids: Tensor, prompt_mask: Tensor, columns: list[dict], rows: list[dict]) -> list[int]:
        """The query key of each row; raise where the ids trained on are not the ids scored."""
        reference = self.dataset_mapper.reference.fingerprint
        keys = []
        for row, (ids, mask) in enumerate(zip(prompt_ids.cpu(), prompt_mask.cpu())):
            ids = ids[mask.bool()].numpy()
            keys.append(query_key(ids))
            found, expected = columns[row]["query_fingerprint"], row_fingerprint(reference, keys[-1])
            if found is None:
                raise ValueError(
                    f"Row {row} of the batch has no reference log-probs; map its data set with DatasetMapper. Prompt: "
                    f"{_shorten(rows[row]['prompt'])}"
                )
            if found != expected or len(columns[row]["ref_query_logps"]) != len(ids) - 1:
                if found.startswith(reference):
                    cause = (
                        f"the {len(ids)} token ids trained on are not the ones its reference scored; something rewrote the "
                        "prompt after scoring (a rollout_func, a changed chat template)"
                    )
                else:
                    cause = (
                        f"its reference log-probs were made under reference {found.partition('-')[0]}, this run's is "
                        f"{reference}: another model, or other settings ({self.dataset_mapper.head_settings()})"
                    )
                raise ValueError(
                    f"Row {row} of the batch cannot be regularized: {cause}. Prompt: {_shorten(rows[row]['prompt'])}"
                )
        return keys

    # ---- the optimizer step

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_batches = list(batches)
        self._step_queue.clear()
        return batches, num_items

    def _prepare_inputs(self, generation_batch):
        """One settled micro-batch.

        At the first micro-batch of a step, all of the step's are prepared: who scores which query, and for how much of
        it, depends on every row of the step. Completions that TRL would generate between two micro-batches come from the
        same weights when they are generated before the first; only a model with dropout, which draws random numbers in
        its forward, gets other random numbers for it.
        """
        if not self.model.training:
            return self._settle([super()._prepare_inputs(generation_batch)])[0]
        if not self._step_queue:
            first = self._step
            prepared = []
            try:
                for offset, raw in enumerate(self._step_batches or [generation_batch]):
                    self._step = first + offset
                    prepared.append(super()._prepare_inputs(raw))
            finally:
                self._step = first
            self._step_queue.extend(self._settle(prepared))
        return self._step_queue.popleft()

    def _settle(self, batches: list[dict]) -> list[dict]:
        """Give the micro-batches of one step their owners: `query_owner` (B,) bool and `query_share` (B,) float.

        The share is scaled so that Σ share · R̂ over a rank's rows, averaged over ranks as gradients are, is the mean of
        R̂ over the step's distinct queries.
        """
        sizes = [len(batch["query_key"]) for batch in batches]
        scored = [scored_token_mask(batch["prompt_mask"]).any(-1) for batch in batches]
        rows = torch.stack([torch.cat([batch["query_key"] for batch in batches]), torch.cat(scored).long()], dim=1)
        rows = self.accelerator.pad_across_processes(rows, dim=0, pad_index=-1)
        ranks = self.accelerator.num_processes
        keys, scored = self.accelerator.gather(rows).view(ranks, -1, 2).cpu().numpy().transpose(2, 0, 1)
        owner, share, queries = settle_owners(keys, scored == 1, self.accelerator.process_index)
        owner, share = (torch.from_numpy(x).split([*sizes, len(x) - sum(sizes)]) for x in (owner, share))
        mode = "train" if self.model.training else "eval"
        self._query_metrics[mode].open(keys, scored, len(batches))
        settled = []
        for batch, owns, part in zip(batches, owner, share):
            device = batch["query_key"].device
            # TRL keeps its dicts for later iterations over the same completions; they must not change
            settled.append(
                {
                    **batch,
                    "query_owner": owns.to(device),
                    "query_share": (part * ranks / max(queries, 1)).float().to(device),
                }
            )
        return settled

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        reader = QueryReader(model, inputs["prompt_ids"], inputs["prompt_mask"], inputs["query_owner"])
        loss = super().compute_loss(reader, inputs, return_outputs, num_items_in_batch)

        alpha, share = self.query_alpha, inputs["query_share"]
        logps = reader.logps if alpha > 0 else reader.logps.detach()
        divergence = query_kl(
            logps,
            inputs["ref_query_logps"],
            reader.mask,
            estimator=self.args.query_kl_estimator,
            level=self.args.query_kl_level,
            length_normalize=self.args.query_kl_length_normalize,
        )
        if alpha > 0:
            penalty = alpha * (divergence * share).sum()
            if self.model.training and not self.loss_is_scaled_for_ga:
                # Trainer will divide the loss by the accumulation steps; the shares already span the whole step
                penalty = penalty * self.current_gradient_accumulation_steps
            loss = loss + penalty
        self._record(inputs, reader, divergence.detach())
        return loss

    # ---- metrics

    def _record(self, inputs: dict, reader: QueryReader, divergence: Tensor) -> None:
        """Keep this micro-batch's query statistics; after the step's last one, bring the ranks' together."""
        mode = "train" if self.model.training else "eval"
        metrics = self._query_metrics[mode]
        nll = -torch.where(reader.mask, reader.logps.detach(), 0.0).sum(-1)
        ref_nll = -torch.where(reader.mask, inputs["ref_query_logps"], 0.0).sum(-1)
        columns = (
            *(inputs["query_owner"], divergence, nll, nll - ref_nll, inputs["query_weight"]),
            *(reader.mask.sum(-1), reader.response_nll, reader.response_tokens),
        )
        metrics.pending.append(torch.stack([column.float() for column in columns], dim=1))
        if len(metrics.pending) == metrics.micro_batches:
            rows = self.accelerator.pad_across_processes(torch.cat(metrics.pending), dim=0)
            ranks = self.accelerator.num_processes
            metrics.close(self.accelerator.gather(rows).view(ranks, -1, len(columns)).cpu().numpy())

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        for name, value in self._query_metrics[mode].summarize(distinct=mode == "eval").items():
            self._metrics[mode][f"query/{name}"] = [value]
        if "query/kl" in self._metrics[mode]:
            self._metrics[mode]["query/alpha"] = [self.query_alpha]
            self._metrics[mode]["query/loss"] = [self.query_alpha * self._metrics[mode]["query/kl"][0]]
            if self._mean_nll is not None:
                self._metrics[mode]["query/ref_nll_mean"] = [self._mean_nll]
        super().log(logs, start_time)


def _carries_columns(dataset) -> bool:
    """Whether a stream was mapped beforehand, as its first row tells."""
    return isinstance(dataset, IterableDataset) and set(REFERENCE_FEATURES) <= set(next(iter(dataset), {}))


def _shorten(prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= 200 else text[:200] + "…"
