"""DatasetMapper: scores each distinct prompt of a data set once under the reference and attaches the columns ERPO reads.

The reference is the policy before RL: the model as it is handed over, with its adapter where that adapter already does
something. Its log-probs go through the same fused head and settings as training (temperature, soft-capping, casts,
autocast), so that the drift at step 0 is 0 whatever they are.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from huggingface_hub.constants import HF_HOME
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging
from trl.data_utils import is_conversational

from .checks import refuse_native_adapter
from .columns import REFERENCE_FEATURES, RowLogps, rows_of_reference, with_columns
from .fingerprint import (
    adapter_is_inert,
    base_model,
    fingerprint,
    is_peft_model,
    query_key,
    reference_settings,
    row_fingerprint,
)
from .likelihood import has_absolute_positions
from .rows import TokenRows, attach_columns, require_mappable, tokenized
from .scoring import reference_policy, score_in_rounds
from .scoring_report import ScoringReport
from .sharding import is_partitioned
from .span import SpanFinder
from .table import ReferenceTable
from .weights import Queries, WeightRule, effective_sample_fraction, query_weights

logger = logging.get_logger(__name__)

# Tokens between two writes of the table: what a killed scoring pass can lose
_TOKENS_PER_PART = 1 << 20


class ReferenceUnavailableError(RuntimeError):
    """The reference policy is needed but the model at hand is no longer it."""


@dataclass(frozen=True)
class Reference:
    """Which reference a table belongs to.

    Args:
        fingerprint: name of weights, head settings and versions.
        adapter: whether the model's adapter is part of the reference (False: adapter off, or no adapter).
    """

    fingerprint: str
    adapter: bool


def column_rule(config) -> WeightRule:
    """What the column `query_weight` holds: 1 where the weights come from the policy, which nobody knows beforehand."""
    return WeightRule("uniform") if config.query_weight_source == "policy" else WeightRule.of(config)


class DatasetMapper:
    """Attach the reference's columns to a data set of prompts: `DatasetMapper(model, processing_class, config)(dataset)`.

    Args:
        model: causal LM or PEFT model; the reference is its policy at the time of the call. Left as found: weights, mode,
            forward and the random state.
        processing_class: the tokenizer or processor that training uses.
        config: an [`ERPOConfig`].
        tokenize: prompts -> list of ids, in place of the tokenization that TRL does; the trainer passes TRL's own.
        column: of the data set, with the prompts.
        template: arguments that chats are rendered with besides themselves. Default: `config.chat_template_kwargs`.
        autocast_dtype: dtype of autocast in training, or None for none. Default: what `config.bf16` and `config.fp16` say.
        precision: name of what lowers the precision of a forward in training, part of the fingerprint. Default: the dtype of
            autocast.
        prepare: gives the model, on entering, the state that forwards in training find it in (sharded, on its device), and
            what to call. Default: the model is called as it is.
        reference: the reference to hold to. With it, the mapper finds rows in that reference's table and scores only while
            the model still is that reference; without it, every call takes the model as it is.

    Attributes:
        report: [`ScoringReport`] of the last call.
    """

    def __init__(
        self,
        model: nn.Module,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        config,
        *,
        tokenize: Callable[[list], list[Sequence[int]]] | None = None,
        column: str = "prompt",
        template: dict | None = None,
        autocast_dtype: torch.dtype | None | str = "config",
        precision: str | None = None,
        prepare: Callable[[nn.Module], contextlib.AbstractContextManager[nn.Module]] = contextlib.nullcontext,
        reference: Reference | None = None,
    ):
        refuse_native_adapter(model)
        self.model = model
        self.processing_class = processing_class
        self.config = config
        self.tokenize = tokenize or self._tokenize
        self.column = column
        # DPO has no such setting; its rows may
        default = getattr(config, "chat_template_kwargs", None) or {}
        self.render_with(default if template is None else template)
        if autocast_dtype == "config":
            autocast_dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
        self.autocast_dtype = autocast_dtype
        self.precision = str(autocast_dtype) if precision is None else precision
        self.prepare = prepare
        self.reference = reference
        self._policy: nn.Module | None = None  # what to call, while prepared
        self._present: tuple[Reference, dict] | None = (
            None  # what the model is, while prepared: digesting it takes its time
        )
        self.report = ScoringReport()
        self.cache_dir = Path(config.reference_cache_dir or Path(HF_HOME) / "erpo_trl" / "reference")

    def render_with(self, template: dict) -> None:
        """Render chats with these arguments of `apply_chat_template` from here on."""
        self.template = template
        self.find_span = SpanFinder(self.config.query_span, self.processing_class, template)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[nn.Module]:
        """The model as forwards in training find it; yields what to call. Preparing costs, so that nested calls share one.

        The weights must not change within.
        """
        if self._policy is not None:
            yield self._policy
            return
        if self.prepare is contextlib.nullcontext and any(map(is_partitioned, self.model.parameters())):
            raise ValueError(
                "DeepSpeed ZeRO-3 has spread the model's parameters over the processes, and only a trainer can score with it: "
                "give the trainer the data set as it is, or map it with a model that was loaded outside of ZeRO-3."
            )
        with self.prepare(self.model) as self._policy:
            try:
                yield self._policy
            finally:
                self._policy = self._present = None

    def pin(self) -> Reference:
        """Hold to the model's present policy as the reference from here on."""
        if self.reference is None:
            self.reference = self.present_reference()
        return self.reference

    def present_reference(self) -> Reference:
        """The reference that the model is now."""
        return self._present_reference()[0]

    def __call__(self, dataset: Dataset, population: Queries | None = None) -> Dataset:
        """Map a data set.

        Args:
            dataset: with a `prompt` column, strings or chat messages. Columns of an earlier mapping are kept where they
                belong to the same reference and ids.
            population: what to weight relative to; default this data set's own queries. Evaluation data is weighted relative
                to the training set: `report.population` of its mapping.

        Returns:
            The data set with `ref_query_logps`, `query_span`, `ref_query_nll`, `query_weight` and `query_fingerprint`, rows
            in order, rows with too long a prompt left out.

        Raises:
            ValueError: a row cannot be tokenised, is empty or has no span that can be known (named by its index), or no row is
                left.
            ReferenceUnavailableError: rows need scoring but the model is no longer the reference.
        """
        require_mappable(dataset, REFERENCE_FEATURES, self.column)
        # Formats (numpy, torch) change what rows look like to the tokenizer; they are put back at the end
        layout, dataset = dataset.format["type"], dataset.with_format(None)
        reference, settings = (self.reference, None) if self.reference else self._present_reference()
        table = ReferenceTable(self.cache_dir / reference.fingerprint)

        ids = self.all_ids(dataset)
        kept = self.fitting_rows(ids)
        self.report = ScoringReport(rows=len(kept), dropped=len(ids) - len(kept))
        if len(kept) < len(ids):
            dataset = dataset.select(kept)
            ids = TokenRows([[ids[row] for row in kept]])
        spans = TokenRows(self.find_span.of_rows(dataset, ids, kept))

        keys = ids.keys()
        known = np.zeros(len(ids), dtype=bool)
        if "query_fingerprint" in dataset.column_names:
            known = rows_of_reference(dataset, reference.fingerprint, keys, ids.lengths)
        scorable = ids.lengths > 1

        distinct, first = np.unique(keys[scorable], return_index=True)
        rows = np.flatnonzero(scorable)[first]
        have = table.contains(distinct) | np.isin(distinct, keys[known])
        missing = [ids[row] for row in rows[~have]]
        self._score(missing, table, reference, settings)
        self.report.scored, self.report.reused = len(missing), int(have.sum())
        self.report.unscorable = int((~scorable).sum())
        self.report.duplicates = len(ids) - self.report.unscorable - len(distinct)

        mapped = self._attach(dataset, table, keys, known, scorable, spans, population)
        logger.info(str(self.report))
        return mapped.with_format(layout) if layout else mapped

    # ---- which reference

    def head_settings(self) -> dict:
        """What training does to logits before they are log-probs; the reference must be read the same way."""
        return {
            "temperature": self.config.temperature,
            "cast_lm_head_to_fp32": self.config.cast_lm_head_to_fp32,
            "autocast": self.precision,
        }

    def _present_reference(self) -> tuple[Reference, dict]:
        """The reference that the model is now, and the settings its fingerprint stands for."""
        with self.prepared():
            if self._present is not None:
                return self._present
            if self.reference is not None:
                adapter = self.reference.adapter
            else:
                adapter = is_peft_model(self.model) and not adapter_is_inert(self.model)
            settings = reference_settings(self.model, self.head_settings(), adapter)
            reference = Reference(fingerprint(settings), adapter)
            if len(set(gather_object([reference]))) > 1:
                raise ValueError(
                    "The processes hold different models, so there is no one reference: give all of them the same weights (one "
                    "checkpoint, or one seed where layers start at random)."
                )
            self._present = reference, settings
        return reference, settings

    # ---- ids

    def _tokenize(self, prompts: list) -> list[Sequence[int]]:
        """What TRL does to prompts before generation, for use without a trainer."""
        if not is_conversational({"prompt": prompts[0]}):
            return self.processing_class(text=prompts)["input_ids"]
        return self.processing_class.apply_chat_template(
            conversation=prompts,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.template,
        )["input_ids"]

    def all_ids(self, dataset: Dataset) -> TokenRows:
        """The token ids of every prompt of an unformatted data set; raise for a row that has none."""
        ids = TokenRows(tokenized(dataset.select_columns(self.column), self.column, self.tokenize))
        if not ids.lengths.all():
            row = int(np.flatnonzero(ids.lengths == 0)[0])
            raise ValueError(f"Row {row} of the data set has an empty prompt: remove it.")
        return ids

    def prompt_limit(self) -> tuple[int | None, str]:
        """Longest prompt in tokens that leaves room to answer, None for no limit, and where the limit comes from."""
        if not hasattr(self.config, "max_prompt_length"):
            return None, ""  # the completions are there, and the trainer has limited their length with the prompt's
        if self.config.max_prompt_length is not None:
            return self.config.max_prompt_length, "max_prompt_length"
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        if context is None:
            return None, ""
        room = self.config.max_completion_length if has_absolute_positions(base_model(self.model)) else 1
        return context - room, f"a context of {context} tokens, {room} of them for the completion"

    def fitting_rows(self, ids: TokenRows) -> list[int]:
        """Indices of the rows whose prompt leaves room to answer; the others are named in a warning."""
        limit, reason = self.prompt_limit()
        if limit is None:
            return list(range(len(ids)))
        kept = np.flatnonzero(ids.lengths <= limit).tolist()
        if len(kept) < len(ids):
            dropped = np.flatnonzero(ids.lengths > limit).tolist()
            message = (
                f"{len(dropped)} of {len(ids)} rows have prompts of more than {limit} tokens ({reason}): rows "
                f"{', '.join(map(str, dropped[:10]))}{', …' if len(dropped) > 10 else ''}"
            )
            if not kept:
                raise ValueError(f"{message}. No row is left: raise max_prompt_length or shorten the prompts.")
            logger.warning(f"{message}. They are left out.")
        return kept

    # ---- scoring

    def _score(
        self, queries: list[np.ndarray], table: ReferenceTable, reference: Reference, settings: dict | None
    ) -> None:
        """Score distinct queries of at least two tokens into the table, spread over the processes."""
        state = PartialState()
        # A node whose cache lacks rows that others have would run more forwards than they do, and hang them
        mine = xxhash.xxh3_64_intdigest(np.array([query_key(row) for row in queries], dtype=np.int64).tobytes())
        if len(set(gather_object([mine]))) > 1:
            queries = list({query_key(row): row for row in gather_object(queries)}.values())
        if not queries:
            return
        with self.prepared() as policy:
            if settings is None:
                present, settings = self._present_reference()
                if present != reference:
                    raise ReferenceUnavailableError(
                        f"{len(queries)} prompts are not in the reference table {table.folder} and the model is no longer "
                        "the reference policy (its weights or head settings changed), so they cannot be scored with it. "
                        "Map the data before training, with the pre-RL model: "
                        "DatasetMapper(reference_model, processing_class, config)(dataset), or point reference_cache_dir at "
                        "the folder that holds the table."
                    )
            if state.is_main_process:
                table.describe(settings)
            progress = tqdm(
                total=len(queries),
                desc="Scoring the reference",
                unit="query",
                disable=self.config.disable_tqdm or not state.is_main_process,
            )
            budget, pending, tokens = self.config.reference_batch_tokens, [], 0
            with progress, reference_policy(self.model, self.config, reference.adapter, self.autocast_dtype):
                for scored, count in score_in_rounds(policy, queries, budget, self.processing_class):
                    self.report.forwards += 1
                    progress.update(count)
                    pending += [(query_key(row), logps) for row, logps in scored]
                    tokens += budget * state.num_processes
                    if tokens >= _TOKENS_PER_PART:
                        self._write(table, pending)
                        pending, tokens = [], 0
                self._write(table, pending)

    def _write(self, table: ReferenceTable, rows: list[tuple[int, np.ndarray]]) -> None:
        """Add the rows that all processes scored; every process has them in its table afterwards."""
        state = PartialState()
        rows = gather_object(rows)
        if not rows:
            return
        keys = [key for key, _ in rows]

        # Once for a folder that all share, once a machine for folders of machines, once a process for folders of processes
        for writer in (state.is_main_process, state.is_local_main_process, True):
            if writer and not table.contains(keys).all():
                table.add(keys, [logps for _, logps in rows])
            state.wait_for_everyone()
            table.refresh()

    # ---- columns

    def _attach(self, dataset, table, keys, known, scorable, spans, population) -> Dataset:
        reference = table.folder.name
        logps_of = RowLogps(dataset, table, keys, known, scorable)
        nll, tokens = logps_of.likelihoods(spans)
        scored = tokens > 0
        self.report.spanless = int((scorable & ~scored).sum())
        if self.report.spanless:
            logger.warning(
                f"{self.report.spanless} of {len(keys)} rows have no token in their span "
                f"(query_span={self.config.query_span!r}): they weigh 1 and have no Query-KL."
            )
        if not np.isfinite(nll).all():
            row = int(np.flatnonzero(~np.isfinite(nll))[0])
            raise ValueError(
                f"Row {row} of the data set holds reference log-probs that are no finite numbers: map it again."
            )
        queries = Queries(torch.from_numpy(nll), torch.from_numpy(tokens))
        counted = torch.from_numpy(scored)
        if population is None:
            population = Queries(*(column[counted] for column in queries))
        rule = column_rule(self.config)
        weights = query_weights(queries, population, rule, counted).numpy()
        self.report.population, self.report.queries = population, queries
        self.report.mean_nll = float(population.nll.mean()) if len(population.nll) else float("nan")
        self.report.weight_ess = effective_sample_fraction(torch.from_numpy(weights))

        def attach(batch: pa.Table, rows: list[int]) -> pa.Table:
            columns = {
                "ref_query_logps": logps_of(np.asarray(rows)),
                "query_span": pa.array([spans[row] for row in rows], pa.list_(pa.int32())),
                "ref_query_nll": pa.array(nll[rows].astype(np.float32)),
                "query_weight": pa.array(weights[rows].astype(np.float32)),
                "query_fingerprint": pa.array([row_fingerprint(reference, key) for key in keys[rows].tolist()]),
            }
            return with_columns(batch, columns)

        # As Arrow tables: Python objects of every log-prob would take most of the time
        mapped = attach_columns(
            dataset.with_format("arrow"),
            attach,
            REFERENCE_FEATURES,
            [reference, repr((rule, self.config.query_span)), keys, nll, weights, spans.lengths, *spans],
            "Attaching the reference",
            not self.config.disable_tqdm,
        )
        return mapped.with_format(None)
