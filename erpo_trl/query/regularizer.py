"""The mixin that makes a TRL trainer an ERPO trainer.

What it changes against TRL: rows carry the reference's log-probs and a weight on their advantages; the one forward that TRL
makes also labels each distinct query once per optimizer step; the loss gains α · (mean of R̂ over the step's queries).
Settled per step: which rows score their query and for how much of it, so that the step's gradient is the same however the
batch is cut into micro-batches, generations and ranks.
"""

import functools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch import Tensor
from transformers.utils import logging

from .._trl import metrics_mode
from ..report.query_log import QueryLog
from .alpha import AdaptiveAlpha, hinge
from .divergence import query_kl
from .fingerprint import query_key, row_fingerprint
from .likelihood import QueryReader, real_ids, scored_token_mask
from .metrics import QueryMetrics, StepQueries
from .owners import settle_owners
from .policy_weights import likelihoods, step_weights, weigh, weights_of_rows
from .preparation import PreparedReferenceMixin
from .references import several_query_kl, stack_references
from .span import scored_in_span, span_key
from .weights import WeightRule, weighted

logger = logging.get_logger(__name__)


class QueryRegularizerMixin(PreparedReferenceMixin):
    """Query-KL and query weights for a TRL trainer that generates in `_prepare_inputs` and has a fused LM head.

    Put it before the TRL trainer in the bases: `class ERPORLOOTrainer(QueryRegularizerMixin, RLOOTrainer)`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step_batches: list = []  # raw generation batches of the optimizer step at hand
        self._step_queue: deque = deque()  # its settled micro-batches
        self._query_metrics = {"train": QueryMetrics(), "eval": QueryMetrics()}
        if self.args.query_log_steps:
            # Before the trackers' own callbacks: it opens the W&B run in its group
            self.callback_handler.callbacks.insert(0, QueryLog(self, self.args.query_log_steps))
        self._policy_weights = self.args.query_weight_source == "policy" and self.args.query_weight != "uniform"
        self._used_alpha = self.args.query_kl_coef  # of the last loss
        self.adaptive_alpha: AdaptiveAlpha | None = None
        if self.args.query_kl_target is not None and not self.args.query_kl_hinge:
            self.adaptive_alpha = AdaptiveAlpha(
                self.args.query_kl_coef,
                self.args.query_kl_target,
                self.args.query_kl_coef_rate,
                self.args.query_kl_coef_gain,
                tuple(self.args.query_kl_coef_range),
                self.args.query_kl_ema,
            )

    @property
    def query_alpha(self) -> float:
        """α, the coefficient of the Query-KL penalty."""
        return self.adaptive_alpha.alpha if self.adaptive_alpha else self.args.query_kl_coef

    @property
    def latest_queries(self) -> StepQueries | None:
        """The queries of the optimizer step made last, over all ranks."""
        return self._query_metrics["train"].latest

    def extra_state(self) -> dict:
        return super().extra_state() | (self.adaptive_alpha.state() if self.adaptive_alpha else {})

    def restore_extra_state(self, state: dict) -> None:
        super().restore_extra_state(state)
        if self.adaptive_alpha is not None and "query_alpha" in state:
            self.adaptive_alpha.restore(state)

    def predict(self, *args, **kwargs):
        # transformers logs nothing of a prediction: what it gathered would count in the next evaluation
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._query_metrics["eval"].summarize()

    # ---- rows

    def _generate_and_score_completions(self, inputs):
        """TRL's batch, with each row's reference log-probs, weight and query; weights multiply the advantages."""
        names = self._reference_columns
        columns = [{name: row.get(name) for name in names} for row in inputs]
        # Reward functions see the columns they would see under TRL
        inputs = [{name: value for name, value in row.items() if name not in names} for row in inputs]
        batch = super()._generate_and_score_completions(inputs)

        prompt_mask = batch["prompt_mask"]
        device, width = prompt_mask.device, prompt_mask.shape[1] - 1
        ids = real_ids(batch["prompt_ids"], prompt_mask)
        if self._arrival is not None:
            prompts = [row["prompt"] for row in inputs]
            columns = self._arrival.fill(columns, ids, prompts, learning=self.model.training)
        keys = self._check_ids(ids, columns, lambda row: inputs[row]["prompt"])
        # In numpy: row by row, tensors take several times as long
        ref_logps, in_span = np.zeros((len(ids), width), np.float32), np.zeros((len(ids), width), bool)
        for row, column in enumerate(columns):
            logps = column["ref_query_logps"]
            if len(logps):
                ref_logps[row, width - len(logps) :] = logps
                in_span[row, width - len(logps) :] = scored_in_span(column["query_span"], len(logps) + 1)
        weight = torch.tensor([column["query_weight"] for column in columns], dtype=torch.float32, device=device)
        batch["ref_query_logps"] = torch.from_numpy(ref_logps).to(device)  # (B, P-1), aligned with TRL's log_probs
        if self._others is not None:
            stacked = stack_references(columns, self._references, batch["ref_query_logps"])
            batch["reference_logps"], batch["reference_weight"] = stacked  # (B, K, P-1), (B, K)
        batch["query_mask"] = scored_token_mask(prompt_mask) & torch.from_numpy(in_span).to(device)  # (B, P-1)
        batch["query_weight"] = weight
        batch["query_key"] = torch.tensor(keys, dtype=torch.int64, device=device)
        batch["unweighted_advantages"] = batch["advantages"]
        batch["advantages"] = weighted(batch["advantages"], weight)
        return batch

    def _check_ids(
        self, prompts: list[np.ndarray], columns: list[dict], prompt_of: Callable[[int], object]
    ) -> list[int]:
        """Key of each row's query and span; raise where the ids trained on are not the ids scored, nor the span the run's.

        Args: prompts: per row the (T,) ids; columns: per row the reference columns; prompt_of: row -> what to show of it.
        """
        reference = self.dataset_mapper.reference.fingerprint
        # Columns that came with a stream; all others are this trainer's
        elsewhere = isinstance(self.train_dataset, IterableDataset) and self._arrival is None
        keys = []
        for row, ids in enumerate(prompts):
            found, expected = columns[row]["query_fingerprint"], row_fingerprint(reference, query_key(ids))
            if found is None:
                raise ValueError(
                    f"Row {row} of the batch has no reference log-probs; map its data set with DatasetMapper. Prompt: "
                    f"{_shorten(prompt_of(row))}"
                )
            if found != expected or len(columns[row]["ref_query_logps"]) != len(ids) - 1:
                if found.startswith(reference):
                    cause = (
                        f"the {len(ids)} token ids trained on are not the ones its reference scored; something rewrote the "
                        "prompt after scoring (a rollout_func, a data collator, a changed chat template, or one that writes the date)"
                    )
                else:
                    cause = (
                        f"its reference log-probs were made under reference {found.partition('-')[0]}, this run's is "
                        f"{reference}: another model, or other settings ({self.dataset_mapper.head_settings()})"
                    )
                raise ValueError(
                    f"Row {row} of the batch cannot be regularized: {cause}. Prompt: {_shorten(prompt_of(row))}"
                )
            span = np.asarray(columns[row]["query_span"], dtype=np.int64).tolist()
            if elsewhere and span != self.dataset_mapper.find_span(prompt_of(row), ids, f"Row {row} of the batch"):
                raise ValueError(
                    f"Row {row} of the batch was mapped with another query_span than this run's, {self.args.query_span!r}: map "
                    f"the stream again with this run's config. Prompt: {_shorten(prompt_of(row))}"
                )
            keys.append(span_key(ids, span))
        return keys

    def _generate_single_turn(self, *args, **kwargs):
        training = self.model.training
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            # After continuous batching TRL leaves it in training mode, also in an evaluation
            if self.model.training != training:
                self.model.train(training)

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
        tokens = [batch["query_mask"].sum(-1) for batch in batches]
        rows = torch.stack([torch.cat([batch["query_key"] for batch in batches]), torch.cat(tokens)], dim=1)
        keys, tokens = self._of_all_ranks(rows, pad=-1)
        micro_batch = np.repeat(np.arange(len(batches)), sizes)
        micro_batch = np.pad(micro_batch, (0, keys.shape[1] - sum(sizes)))  # rows that only pad own nothing
        owner, share, queries = settle_owners(keys, tokens, self.accelerator.process_index, micro_batch)
        owner, share = (torch.from_numpy(x).split([*sizes, len(x) - sum(sizes)]) for x in (owner, share))
        ranks = self.accelerator.num_processes
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
        forwarded = self._weigh_before_forward(settled) if self._policy_weights else None
        self._query_metrics[metrics_mode(self.model)].open(keys, np.minimum(tokens, 1), len(batches), forwarded)
        return settled

    def _of_all_ranks(self, rows: Tensor, pad: int = 0) -> np.ndarray:
        """(C, R, N) of the (N, C) rows that each of the R ranks holds; those that are fewer are filled with `pad`."""
        ranks = self.accelerator.num_processes
        if ranks > 1:
            rows = self.accelerator.pad_across_processes(rows, dim=0, pad_index=pad)
        return self.accelerator.gather(rows).view(ranks, -1, rows.shape[1]).cpu().numpy().transpose(2, 0, 1)

    # ---- weights by the policy

    def _weigh_before_forward(self, batches: list[dict]) -> int:
        """Weights of a step of several micro-batches, whose NLL a forward of their own reads; returns its tokens.

        A step of one micro-batch gets its weights from its own forward, see `_weigh_in_forward`.
        """
        for batch in batches:
            batch["query_weight"] = torch.ones_like(batch["query_weight"])
            batch["advantages"] = batch["unweighted_advantages"].clone()
        if len(batches) == 1:
            return 0
        keys, queries, masks = [], [], []
        for batch in batches:
            owned = batch["query_owner"]
            real, counted = batch["prompt_mask"][owned].bool(), batch["query_mask"][owned]
            for ids, mask, which in zip(batch["prompt_ids"][owned].cpu(), real.cpu(), counted.cpu()):
                queries.append(ids[mask].numpy())
                masks.append(which[1 - len(queries[-1]) :].numpy())  # padded on the left
            keys += batch["query_key"][owned].tolist()
        nll, tokens, forwarded = likelihoods(self.dataset_mapper, queries, masks)
        mine = (np.array(keys, dtype=np.int64), nll, tokens)
        everyone = [np.concatenate(parts) for parts in zip(*gather_object([mine]))]
        distinct, weights = step_weights(*everyone, WeightRule.of(self.args))
        for batch in batches:
            rows = weights_of_rows(batch["query_key"].cpu().numpy(), distinct, weights)
            weigh(batch, torch.from_numpy(rows).to(batch["query_weight"]))
        return forwarded

    def _weigh_in_forward(self, batch: dict, reader: QueryReader) -> None:
        """Weights of a step of one micro-batch, after its forward and before its loss."""
        nll = -torch.where(reader.mask, reader.logps.detach(), 0.0).sum(-1)
        rows = torch.stack([batch["query_owner"].float(), nll.float(), reader.mask.sum(-1).float()], dim=1)
        owner, nll, tokens = self._of_all_ranks(rows)
        owned = owner > 0
        distinct, weights = step_weights(
            self._query_metrics[metrics_mode(self.model)].keys[owned],
            nll[owned],
            tokens[owned],
            WeightRule.of(self.args),
        )
        found = weights_of_rows(batch["query_key"].cpu().numpy(), distinct, weights)
        weigh(batch, torch.from_numpy(found).to(batch["query_weight"]))

    # ---- the loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Before TRL's forward, whose graph then waits for nothing but its backward
        ref_logps = self._policy_kl.reference_logps(inputs) if self._measures_policy_kl() else None
        reader = self._reader(model, inputs)
        loss = super().compute_loss(reader, inputs, return_outputs, num_items_in_batch)
        if ref_logps is not None:
            counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            self._policy_kl.add(reader.completion_logps.detach(), ref_logps, counted)
        return self._regularized(loss, inputs, reader)

    def _reader(self, model, inputs: dict) -> QueryReader:
        """What stands in for the model in the forward of this micro-batch."""
        then = None
        if self._policy_weights and self._query_metrics[metrics_mode(self.model)].micro_batches == 1:
            then = functools.partial(self._weigh_in_forward, inputs)
        return QueryReader(model, inputs["prompt_ids"], inputs["query_mask"], inputs["query_owner"], then)

    def _regularized(self, loss, inputs: dict, reader: QueryReader):
        """TRL's loss with the penalty of the queries that were read in its forward; keeps their statistics."""
        alpha, share = self.query_alpha, inputs["query_share"]
        self._used_alpha = alpha
        logps = reader.logps if alpha > 0 else reader.logps.detach()
        divergence = self._divergence(logps, reader.mask, inputs)
        penalized = hinge(divergence, self.args.query_kl_target) if self.args.query_kl_hinge else divergence
        if alpha > 0:
            penalty = alpha * (penalized * share).sum()
            if self.model.training and not self.loss_is_scaled_for_ga:
                # Trainer will divide the loss by the accumulation steps; the shares already span the whole step
                penalty = penalty * self.current_gradient_accumulation_steps
            loss = loss + penalty
        self._record(inputs, reader, divergence.detach(), alpha * penalized.detach())
        return loss

    def _divergence(self, logps: Tensor, mask: Tensor, inputs: dict) -> Tensor:
        """(B,) R̂ of each row's query, nats."""
        args = self.args
        settings = (args.query_kl_estimator, args.query_kl_level, args.query_kl_length_normalize)
        if self._others is None:
            return query_kl(logps, inputs["ref_query_logps"], mask, *settings)
        references, weights = inputs["reference_logps"], inputs["reference_weight"]
        return several_query_kl(logps, references, weights, mask, args.query_references_mode, *settings)

    def _measures_policy_kl(self) -> bool:
        if self._policy_kl is None or not self.model.training:
            return False
        return self.state.global_step % self.args.log_policy_kl_steps == 0

    # ---- metrics

    @property
    def _mean_nll(self) -> float | None:
        """s̄, nats; of a stream, so far."""
        if self._population is not None:
            return float(self._population.nll.mean())
        return self._arrival.means.nll if self._arrival is not None else None

    def _record(self, inputs: dict, reader: QueryReader, divergence: Tensor, penalty: Tensor) -> None:
        """Keep this micro-batch's query statistics; after the step's last one, bring the ranks' together."""
        mode = metrics_mode(self.model)
        metrics = self._query_metrics[mode]
        nll = -torch.where(reader.mask, reader.logps.detach(), 0.0).sum(-1)
        ref_nll = -torch.where(reader.mask, inputs["ref_query_logps"], 0.0).sum(-1)
        columns = (
            *(inputs["query_owner"], divergence, nll, nll - ref_nll, penalty, inputs["query_weight"]),
            *(reader.mask.sum(-1), *self._responses(inputs, reader)),
        )
        metrics.pending.append(torch.stack([column.float() for column in columns], dim=1))
        if len(metrics.pending) == metrics.micro_batches:
            drift = metrics.close(np.moveaxis(self._of_all_ranks(torch.cat(metrics.pending)), 0, -1))
            if self.adaptive_alpha is not None and mode == "train" and drift is not None:
                self.adaptive_alpha.update(drift)

    def _responses(self, inputs: dict, reader: QueryReader) -> tuple[Tensor, Tensor]:
        """(B,) NLL in nats and (B,) tokens in the loss of each row's response."""
        counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        nll = -torch.where(counted > 0, reader.completion_logps.detach(), 0.0).sum(-1)
        return nll, counted.sum(-1)

    def log(self, logs, start_time=None):
        mode = metrics_mode(self.model)
        for name, value in self._query_metrics[mode].summarize(distinct=mode == "eval").items():
            self._metrics[mode][f"query/{name}"] = [value]
        moved = self._policy_kl.summarize() if self._policy_kl is not None and mode == "train" else None
        if moved is not None:
            self._metrics[mode]["policy/kl"] = [moved]
        if "query/kl" in self._metrics[mode]:
            # Of the step just made, as `query/loss` is; an α that adapts has moved on
            self._metrics[mode]["query/alpha"] = [self._used_alpha]
            mean = self._mean_nll
            if mean is not None:
                self._metrics[mode]["query/ref_nll_mean"] = [mean]
            if self._policy_weights:
                self._warn_of_few_effective(self._metrics[mode]["query/weight_ess"][0], "queries of a step")
        super().log(logs, start_time)


def _shorten(prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= 200 else text[:200] + "…"
