"""The trainer's side of the reference: which model it is, which rows it scores when, and what they are weighted relative to."""

import contextlib
import functools
import inspect
from dataclasses import asdict
from datetime import datetime

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from ..policy.kl import PolicyKLMonitor
from . import clock
from .arrival import ArrivingReference, RunningMeans, drop_long_prompts, sample_prompts
from .checks import check_model, refuse_images, refuse_unsupported
from .columns import REFERENCE_FEATURES, carries_columns
from .fingerprint import base_model
from .likelihood import has_absolute_positions, pass_position_ids
from .reference import DatasetMapper
from .references import SEVERAL_FEATURES, OtherReferences, load_reference, parse_references
from .resume import ResumeMixin
from .rows import collate_rows
from .sampling import CurriculumSampler, curriculum_weights, sampling_power, typical_rows
from .scoring_report import ScoringReport
from .sharding import is_sharded, prepared_for_scoring, training_precision
from .standby import StandbyReference
from .weights import Queries, WeightRule
from .window import generation_window, inside_generation

logger = logging.get_logger(__name__)

_MAP_RELATIVE = (
    "The training stream carries reference columns, so map the evaluation data relative to it, as a map-style data set: "
    "DatasetMapper(model, processing_class, config)(eval_dataset, population=mapper.report.population)."
)


class PreparedReferenceMixin(ResumeMixin):
    """Gives a TRL trainer's data its reference columns before the first batch, or has its rows scored as they arrive."""

    def __init__(self, *args, **kwargs):
        # Before anything is loaded
        signatures = (inspect.signature(cls.__init__) for cls in type(self).__mro__)
        trl = next(signature for signature in signatures if "train_dataset" in signature.parameters)
        self._refuse_unsupported(trl.bind_partial(self, *args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        check_model(self.model, self.args)
        self._count_positions()
        # DPO renders its prompts once, before this
        arguments = getattr(self, "chat_template_kwargs", None)
        self._own_template = getattr(self, "chat_template", None) or getattr(
            self.processing_class, "chat_template", None
        )
        self._template_time = None
        if arguments is not None and "date_string" not in arguments:
            self._template_time = self._tell_one_time(gather_object([datetime.now()])[0])
        self.data_collator = self._collator()

        asked = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        autocast, precision = training_precision(self.accelerator, asked if self.accelerator.native_amp else None)
        self.dataset_mapper = DatasetMapper(
            self.model,
            self.processing_class,
            self.args,
            tokenize=self._ids_of,
            column=self._prompt_column,
            template=self._template_arguments(),
            autocast_dtype=autocast,
            precision=precision,
            prepare=self._prepared_for_scoring,
        )
        self._population: Queries | None = None  # what weights are relative to
        self._train_queries: Queries | None = None  # of each training row
        # What scores rows without reference columns, where the training data is not mapped beforehand
        self._arrival: ArrivingReference | None = None
        self._resumed_means: RunningMeans | None = None  # of a stream, from a checkpoint
        self._others: OtherReferences | None = None
        if self.args.query_references is not None:
            self._references = parse_references(self.args.query_references)
            self._others = OtherReferences(
                self._references,
                self.dataset_mapper,
                lambda name: load_reference(
                    name,
                    self.model,
                    {"trust_remote_code": self.args.trust_remote_code, **(self.args.model_init_kwargs or {})},
                    self.accelerator.device,
                    is_sharded(self.model) or self.accelerator.is_fsdp2,
                ),
                self.args.query_references_column,
                self.args.query_references_mode == "mixture",
            )
        self._standby: StandbyReference | None = None
        self._policy_kl: PolicyKLMonitor | None = None
        self._reference_ready = False
        self._atypical_dropped = False
        self.scoring_reports: list[
            tuple[str, ScoringReport]
        ] = []  # of the mappings so far: training or evaluation, report
        self._epochs_before_resume = self._steps_before_resume = 0
        self._mapped_evaluation: set[str] = set()
        self._evaluation_streams: list[tuple[IterableDataset, IterableDataset]] = []  # as given, as it is drawn from
        self._few_effective = False  # whether a small effective sample size has been warned of

    _prompt_column = "prompt"
    _refuse_unsupported = staticmethod(refuse_unsupported)

    def _ids_of(self, prompts: list) -> list:
        """The token ids that the trainer gives the model for the prompts of `_prompt_column`."""
        return self._tokenize_prompts(prompts)[0]

    def _collator(self):
        """What brings a batch's rows, with their reference columns, to the trainer."""
        return functools.partial(collate_rows, self.data_collator)

    def _count_positions(self) -> None:
        """Prompts are padded on the left, which models with absolute positions must be told."""
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and has_absolute_positions(base_model(model)):
                pass_position_ids(base_model(model))

    def _tell_one_time(self, when: datetime) -> datetime | None:
        """Gives a chat template that writes the date that of `when`, for the whole run; None where it writes none, or cannot be."""
        template = self._own_template
        if not clock.asks_for_the_time(template):
            return None
        told = clock.at(template, when) if hasattr(self, "chat_template") and isinstance(template, str) else None
        if told is None:
            logger.warning(
                "The chat template writes the date, and prompts are rendered anew at every generation: after midnight they would not "
                "be the scored ones, and the run ends with an error, as does its resume. Fix the date by chat_template_kwargs where "
                "the template takes one (Llama 3.2: date_string), or in the template."
            )
            return None
        self.chat_template = told
        return when

    def _template_arguments(self) -> dict:
        """What TRL's `_tokenize_prompts` renders chats with; RLOO has no tools."""
        optional = {name: getattr(self, name, None) or None for name in ("tools", "chat_template")}
        return {name: value for name, value in optional.items() if value is not None} | self.chat_template_kwargs

    def _generation_window(self) -> int:
        return generation_window(self.args.generate_every, self.args.gradient_accumulation_steps)

    def _inside_generation(self, step: int) -> bool:
        """Whether completions are left over after `step` optimizer steps."""
        # Without the skip an epoch begins where the run is resumed
        begun = self._steps_before_resume if self.args.ignore_data_skip else 0
        return inside_generation(step - begun, self.args, self.train_dataset)

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
                self.train_dataset = self.dataset_mapper(self.train_dataset)
                # What came after may have failed, so that this is a second call: the share is dropped once
                if getattr(self.args, "query_drop_quantile", 0) and not self._atypical_dropped:
                    self._drop_atypical()
                report = self.dataset_mapper.report
                if self._others is not None:
                    self.train_dataset = self._others(self.train_dataset)
                self._population, self._train_queries = report.population, report.queries
                self.scoring_reports.append(("training", report))
                self._warn_of_few_effective(report.weight_ess, "training set")
            elif self.train_dataset is not None and not carries_columns(self.train_dataset):
                self._score_on_arrival(known)
            elif self.train_dataset is not None:
                self._refuse_what_needs_all_rows("this is a stream that was mapped beforehand", "a map-style data set")
            if isinstance(self.train_dataset, Dataset):
                self._warn_of_left_over_rows()
            if isinstance(self.eval_dataset, dict):
                self.eval_dataset = {name: self._map_evaluation(data) for name, data in self.eval_dataset.items()}
            elif self.eval_dataset is not None:
                self.eval_dataset = self._map_evaluation(self.eval_dataset)
            if getattr(self.args, "log_policy_kl_steps", 0):
                reference = self._stand_by("log_policy_kl_steps needs", known)
                self._policy_kl = PolicyKLMonitor(reference, self.accelerator)
        self._reference_ready = True

    def _drop_atypical(self) -> None:
        """Leave out the least typical rows; s̄ is that of the others from here on."""
        report, rows = self.dataset_mapper.report, len(self.train_dataset)
        rule, share = WeightRule.of(self.args), self.args.query_drop_quantile
        kept = typical_rows(report.queries, report.population, rule, share).tolist()
        self.train_dataset, self._atypical_dropped = self.dataset_mapper(self.train_dataset.select(kept)), True
        self.dataset_mapper.report.dropped, self.dataset_mapper.report.atypical = report.dropped, rows - len(kept)
        logger.info(f"query_drop_quantile={share:g}: {rows - len(kept)} of {rows} rows left out, the least typical.")

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        args = self.args
        if not getattr(args, "query_sampling_power", 0):
            return sampler
        # Every pass over the data begins with a new generation batch
        steps = args.generate_every / args.gradient_accumulation_steps
        return CurriculumSampler(
            sampler,
            curriculum_weights(self._train_queries, self._population, WeightRule.of(args)),
            lambda batch: sampling_power(batch * steps, args.query_sampling_power, args.query_sampling_steps),
            args.seed,
            self._epochs_before_resume,
        )

    def _score_on_arrival(self, resumed: bool) -> None:
        """Have training rows scored as they arrive: s̄ from a sample, or a running mean."""
        mapper = self.dataset_mapper
        self._refuse_what_needs_all_rows(
            "these rows are scored as they arrive", "a map-style data set without reference_sample_size"
        )
        reference = self._stand_by("Rows that are scored as they arrive need", resumed)
        self.train_dataset = self._without_long_prompts(self.train_dataset)
        sample = self.args.reference_sample_size
        if sample is not None:
            mapper(sample_prompts(self.train_dataset, sample, self.args.seed))
            self._population = mapper.report.population
        means = self._resumed_means or RunningMeans(self.args.reference_nll_decay)
        self._arrival = ArrivingReference(mapper, self.accelerator, reference, self._population or means)

    def _refuse_what_needs_all_rows(self, found: str, wanted: str) -> None:
        for name in ("query_sampling_power", "query_drop_quantile", "query_references"):
            if getattr(self.args, name):
                raise ValueError(
                    f"{name} needs every row's likelihood before training, and {found}: unset it, or give the trainer {wanted}."
                )

    def _stand_by(self, purpose: str, resumed: bool) -> StandbyReference:
        """The reference at hand while training, one for all who need it."""
        if self._standby is None:
            if resumed and self.dataset_mapper.reference != self.dataset_mapper.present_reference():
                raise ValueError(
                    f"{purpose} the model that the checkpoint's run started from, and this one is another. Give the trainer the "
                    "pre-RL model; the checkpoint's weights are loaded by themselves."
                )
            self._standby = StandbyReference(self.dataset_mapper, self.accelerator, purpose)
        return self._standby

    def _without_long_prompts(self, dataset):
        mapper = self.dataset_mapper
        limit, _ = mapper.prompt_limit()
        if limit is None:
            return dataset
        if isinstance(dataset, IterableDataset):
            return drop_long_prompts(dataset, mapper.tokenize, limit)
        return dataset.select(mapper.fitting_rows(mapper.all_ids(dataset.with_format(None))))

    def extra_state(self) -> dict:
        state = super().extra_state()
        if self._arrival is not None and self._arrival.means is not None:
            state["running_means"] = asdict(self._arrival.means)
        if self._template_time is not None:
            state["template_time"] = self._template_time.isoformat()
        return state

    def _prepared_for_scoring(self, model):
        """The model to score with: while training, the one in training."""
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            return contextlib.nullcontext(self.deepspeed)
        return prepared_for_scoring(model, self.accelerator)

    def _map_evaluation(self, dataset):
        """The data set with its columns, which rows that are scored on arrival go without; it comes back at every evaluation."""
        if isinstance(dataset, IterableDataset):
            return self._prepare_stream(dataset)
        if not isinstance(dataset, Dataset) or not len(dataset) or dataset._fingerprint in self._mapped_evaluation:
            return dataset
        if self._arrival is not None:
            dataset = self._without_long_prompts(dataset)
            self._mapped_evaluation.add(dataset._fingerprint)
            return dataset
        if self._population is None:
            # A stream with columns: what its weights are relative to is known to whoever mapped it
            if not set(REFERENCE_FEATURES) <= set(dataset.column_names):
                raise ValueError(_MAP_RELATIVE)
            return dataset
        dataset = self.dataset_mapper(dataset, self._population)
        self.scoring_reports.append(("evaluation", self.dataset_mapper.report))
        if self._others is not None:
            dataset = self._others(dataset)
        self._mapped_evaluation.add(dataset._fingerprint)
        return dataset

    def _prepare_stream(self, dataset: IterableDataset) -> IterableDataset:
        """An evaluation stream whose rows are scored as they arrive, or carry their columns."""
        for given, prepared in self._evaluation_streams:
            if dataset is given or dataset is prepared:
                return prepared
        prepared = dataset
        if self._arrival is not None:
            prepared = self._without_long_prompts(dataset)
        elif not carries_columns(dataset):
            raise ValueError(
                _MAP_RELATIVE
                if self._population is None
                else "The evaluation data is a stream without reference columns, and the training data is scored before training, "
                "after which no reference is at hand: give a map-style evaluation set, or set reference_sample_size, with which "
                "rows are scored as they arrive."
            )
        self._evaluation_streams.append((dataset, prepared))
        return prepared

    def _warn_of_few_effective(self, share: float, of: str) -> None:
        if self._few_effective or not share < 0.5:
            return
        self._few_effective = True
        logger.warning(
            f"query_weight={self.args.query_weight!r} leaves an effective sample size of {share:.0%} of the {of}: most of it "
            "hardly teaches. Tighten query_weight_clip, set query_weight_floor, or use another scheme."
        )

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
        if isinstance(eval_dataset, (Dataset, IterableDataset)):
            refuse_images(eval_dataset)
            eval_dataset = self._map_evaluation(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        self.prepare_reference()
        return super().get_test_dataloader(self._map_evaluation(test_dataset))

    @property
    def _reference_columns(self) -> list[str]:
        """The columns that this run's rows carry beside their own."""
        return [*REFERENCE_FEATURES, *(SEVERAL_FEATURES if self.args.query_references is not None else ())]

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        missing = [name for name in self._reference_columns if name not in self._signature_columns]
        self._signature_columns = [*self._signature_columns, *missing]
