"""Resume and termination: a run that stopped continues with the same reference, prompts and losses.

A reference cannot be read off trained weights, so a checkpoint names its reference, and a resumed run finds the table again
before the checkpoint's weights are loaded.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import xxhash
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .arrival import RunningMeans
from .checkpoint import last_whole_checkpoint, read_state, write_state
from .columns import carries_columns
from .reference import Reference

logger = logging.get_logger(__name__)

# What a user sets to get these
_MEANT_BY = {
    "prompts_per_generation": "prompts per generation batch: per_device_train_batch_size x processes x steps_per_generation / "
    "num_generations",
    "steps_per_generation_batch": "optimizer steps per generation batch: steps_per_generation x num_iterations / "
    "gradient_accumulation_steps",
    "pairs_per_step": "pairs per optimizer step: per_device_train_batch_size x processes x gradient_accumulation_steps",
}


class SaveOnTermination(TrainerCallback):
    """On SIGTERM, saves and stops after the first step from which a run can be resumed.

    transformers' own `enable_jit_checkpoint` saves where the signal finds the run, which may be inside a generation batch,
    and does not agree with the other processes on the step.

    Args:
        can_resume: step -> whether a checkpoint after it can be resumed.
    """

    def __init__(self, can_resume: Callable[[int], bool]):
        self.can_resume = can_resume
        self.received = False  # by this process
        self.agreed = False  # by any process, and all know
        self._process = os.getpid()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM, where it is free to take: in the main thread, and no handler of the user's is there."""
        free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not free or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _receive(self, signum, frame):
        self.received = True
        if os.getpid() != self._process:
            # A forked worker (data loading) inherits this handler but has nothing to save
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def on_step_end(self, args, state, control, **kwargs):
        self.agreed = self.agreed or any(gather_object([self.received]))
        if self.agreed and self.can_resume(state.global_step):
            control.should_save = control.should_training_stop = True
        return control


class ResumeMixin:
    """What `QueryRegularizerMixin` needs to stop and to resume; it gives the dataset mapper and the generation window."""

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        # TRL's sampler draws one permutation an epoch from a generator of its own, which no checkpoint holds: a run resumed
        # in a later epoch would go through the first one's order again
        for _ in range(self._epochs_before_resume):
            next(iter(sampler), None)
        return sampler

    def prepare_training(self, resume_from_checkpoint=None) -> str | None:
        """All of a run that comes before its first step and may refuse it: the reference table, and with a checkpoint (a
        folder, or True for the last whole one in `output_dir`) that this is the run it belongs to.

        `train` calls it first. Returns: the checkpoint's folder, or None. Raises: ValueError, OSError.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        state = read_state(resume_from_checkpoint) if resume_from_checkpoint else None
        self._epochs_before_resume = self._steps_before_resume = 0
        if state is not None:
            with open(os.path.join(resume_from_checkpoint, "trainer_state.json")) as file:
                progress = json.load(file)
            self._epochs_before_resume = int(progress["epoch"])
            self._steps_before_resume = progress["global_step"]
            self._resume_reference(state)
        # Before the checkpoint's weights are loaded: the model still is what the user handed over
        self.prepare_reference()
        if state is not None:
            self._refuse_cut_generation(resume_from_checkpoint, progress)
            self._check_same_data(state)
            self.restore_extra_state(state)
        return resume_from_checkpoint

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """TRL's, against the checkpoint's reference. On SIGTERM it saves a checkpoint and raises SystemExit(143)."""
        resume_from_checkpoint = self.prepare_training(resume_from_checkpoint)
        self._forget_generation()
        stop = SaveOnTermination(lambda step: not self._inside_generation(step))
        self.add_callback(stop)
        try:
            with stop.listening():
                result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(stop)
        if self.state.global_step == 0 < self.state.max_steps:
            raise ValueError(f"Training made no step: {self._too_little_data()}.")
        if self.state.global_step == self._steps_before_resume > 0:
            logger.warning(
                f"{resume_from_checkpoint} is at step {self.state.global_step}, and the run has {self.state.max_steps}: it is "
                "finished, no step was made. To go on, raise max_steps or num_train_epochs."
            )
        if stop.agreed and self.state.global_step < self.state.max_steps:
            logger.warning(
                f"Terminated by SIGTERM after step {self.state.global_step} of {self.state.max_steps}; the checkpoint is in "
                f"{self.args.output_dir}. Resume with resume_from_checkpoint=True."
            )
            raise SystemExit(128 + signal.SIGTERM)
        return result

    def _forget_generation(self) -> None:
        """Begin with a new generation batch, also where this trainer has trained before: TRL would go on with what is left of
        the last one, whose completions are of other weights and prompts."""
        self._step, self._buffered_inputs = 0, None
        self._last_loaded_step = -1  # vLLM's weights are of that run, too
        self._step_batches.clear()
        self._step_queue.clear()

    def _run_epoch(self, *args, **kwargs):
        # transformers asks only after a step whether it was the last: a finished run that is resumed would make one more
        if self.state.global_step >= self.state.max_steps > 0:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _too_little_data(self) -> str:
        return (
            "the data holds less than one generation batch "
            f"({self.args.generation_batch_size // self.args.num_generations} prompts), or its prompts are too long"
        )

    def _resume_reference(self, state: dict) -> None:
        reference = Reference(state["fingerprint"], state["adapter"])
        for name, value in self.dataset_mapper.head_settings().items():
            if state["head"][name] != value:
                raise ValueError(
                    f"The checkpoint's reference was scored with {name}={state['head'][name]}, this run has {value}: query "
                    "log-probs of the two cannot be compared. Resume with the checkpoint's setting."
                )
        span = state.get("query_span", "prompt")
        if span != self.args.query_span:
            raise ValueError(
                f"The checkpoint was trained with query_span={span!r}, this run has {self.args.query_span!r}: its weights and its "
                "Query-KL would count other tokens. Resume with the checkpoint's setting."
            )
        before, now = state.get("references", self._reference_settings()), self._reference_settings()
        if before != now:
            raise ValueError(
                f"The checkpoint's run was held to the references {before}, this run has {now}. Resume with the checkpoint's."
            )
        folder = os.path.join(state["reference_cache_dir"], reference.fingerprint)
        if self.args.reference_cache_dir is None and os.path.isdir(folder):
            self.dataset_mapper.cache_dir = Path(state["reference_cache_dir"])
        if self.dataset_mapper.reference not in (None, reference):
            raise ValueError(
                f"The checkpoint was trained against reference {reference.fingerprint}, this trainer already holds "
                f"{self.dataset_mapper.reference.fingerprint}: resume with a new trainer."
            )
        self.dataset_mapper.reference = reference
        # A stream with columns was rendered by whoever mapped it
        if self._template_time is not None and "template_time" in state and not carries_columns(self.train_dataset):
            self._template_time = self._tell_one_time(datetime.fromisoformat(state["template_time"]))
            self.dataset_mapper.render_with(self._template_arguments())
        if "running_means" in state:
            self._resumed_means = RunningMeans(**state["running_means"])

    def _refuse_cut_generation(self, checkpoint: str, progress: dict) -> None:
        step, args = progress["global_step"], self.args
        longer = args.max_steps > step if args.max_steps > 0 else args.num_train_epochs > progress["num_train_epochs"]
        if self._inside_generation(step) and (step < progress["max_steps"] or longer):
            raise ValueError(
                f"Checkpoint {checkpoint} was saved after step {step}, inside a generation batch; its completions are gone. "
                f"Resume from another checkpoint; one generation batch spans {self._generation_window()} optimizer steps."
            )

    def _check_same_data(self, state: dict) -> None:
        changed = []
        if state.get("reference_sample_size") != self.args.reference_sample_size:
            changed.append("reference_sample_size")
        elif state["data_fingerprint"] not in (None, self._data_fingerprint()):
            changed.append("the training data (rows changed, were reordered or removed)")
        for name, value in self._order_settings().items():
            if state.get(name, value) != value:
                changed.append(f"{_MEANT_BY[name]} ({state[name]:g}, now {value:g})" if name in _MEANT_BY else name)
        if not changed:
            return
        message = (
            f"Not what the checkpoint was trained with: {', '.join(changed)}. The prompts that come next would not be those of "
            "the interrupted run."
        )
        if not self.args.ignore_data_skip:
            raise ValueError(f"{message} Restore it, or set ignore_data_skip=True to go on regardless.")
        logger.warning(message)

    def extra_state(self) -> dict:
        """What else a trainer keeps in its checkpoints' `erpo_state.json`; given back to `restore_extra_state`."""
        return {}

    def restore_extra_state(self, state: dict) -> None:
        """Take up what `extra_state` gave, before training goes on."""

    def _reference_settings(self) -> dict:
        """Settings that say which references the drift is measured from."""
        names = ("query_references", "query_references_mode", "query_references_column")
        return {name: getattr(self.args, name) for name in names}

    def _order_settings(self) -> dict:
        """Settings that say in which order the rows come."""
        names = ["seed", "shuffle_dataset", "query_sampling_power", "query_sampling_steps"]
        if getattr(self.args, "query_sampling_power", 0):  # rows are drawn by their weights
            names += ["query_weight", "query_weight_clip", "query_weight_floor", "query_weight_beta"]
        found = {name: getattr(self.args, name) for name in names if hasattr(self.args, name)}
        args = self.args
        return found | {
            "prompts_per_generation": args.generation_batch_size // args.num_generations,
            "steps_per_generation_batch": args.generate_every / args.gradient_accumulation_steps,
        }

    def erpo_state(self) -> dict:
        """What `erpo_state.json` holds: the reference, what it was scored with, and the run's settings."""
        return {
            **asdict(self.dataset_mapper.reference),
            "head": self.dataset_mapper.head_settings(),
            "query_span": self.args.query_span,
            "references": self._reference_settings(),
            "mean_nll": self._mean_nll,
            "data_fingerprint": self._data_fingerprint(),
            "reference_sample_size": self.args.reference_sample_size,
            **self._order_settings(),
            "reference_cache_dir": os.path.abspath(self.dataset_mapper.cache_dir),
            # For reports: all that the run was set to; tokens are masked by transformers
            "args": json.loads(json.dumps(self.args.to_dict(), default=str)),
            **self.extra_state(),
        }

    def _data_fingerprint(self) -> str | None:
        if not isinstance(self.train_dataset, Dataset):
            return None
        if "query_fingerprint" in self.train_dataset.column_names:
            return xxhash.xxh3_64_hexdigest("\n".join(self.train_dataset["query_fingerprint"]).encode())
        digest = xxhash.xxh3_64()
        for batch in self.train_dataset.select_columns("prompt").with_format(None).iter(1000):
            digest.update(json.dumps(batch["prompt"]).encode())
        return digest.hexdigest()

    def _save_checkpoint(self, model, trial):
        if self.args.should_save:
            folder = os.path.join(
                self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            step = self.state.global_step
            if step < self.state.max_steps and self._inside_generation(step):
                logger.warning(
                    f"{folder} lies inside a generation batch and cannot be resumed: set save_steps to a multiple of "
                    f"{self._generation_window()}."
                )
            # Before the rest: what follows pushes the folder to the hub and deletes the checkpoint before it
            write_state(folder, self.erpo_state())
        super()._save_checkpoint(model, trial)

    def save_state(self):
        """transformers' `trainer_state.json` in `output_dir`, and with it what a checkpoint remembers of its reference."""
        super().save_state()
        if self.args.should_save and self.dataset_mapper.reference is not None:
            write_state(self.args.output_dir, self.erpo_state())
