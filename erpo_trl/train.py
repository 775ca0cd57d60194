"""`erpo-trl train`: from a recipe to a trained model, on TRL's parser, trainer and savers."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import transformers
from datasets import Dataset
from packaging.version import Version
from transformers.utils import logging
from trl import ModelConfig, get_peft_config, get_quantization_config

from .cli import InputError, check_folder
from .config import ERPOConfig, ERPODPOConfig, ERPORLOOConfig
from .data import NAMED, resolve_dataset
from .demo import MODEL_DIR
from .options import first_option, parse_options
from .preferences import load_preferences
from .query.fields import QueryFields
from .report.live import show_live_line
from .rewards import resolve_reward
from .trainer import ERPODPOTrainer, ERPORLOOTrainer, ERPOTrainer

logger = logging.get_logger(__name__)

# What `trainer` may be -> its config and its class
TRAINERS = {
    "grpo": (ERPOConfig, ERPOTrainer),
    "rloo": (ERPORLOOConfig, ERPORLOOTrainer),
    "dpo": (ERPODPOConfig, ERPODPOTrainer),
}


# Arguments of every reward function, beside the columns of the data
GIVEN_TO_REWARDS = ("prompts", "completions")


@dataclass
class TrainerArguments:
    r"""
    Which algorithm trains. Read before the other options, since it says which of them there are.

    Parameters:
        trainer (`str`, *optional*, defaults to `"grpo"`):
            `"grpo"` ([`ERPOTrainer`], [`ERPOConfig`]), `"rloo"` ([`ERPORLOOTrainer`], [`ERPORLOOConfig`]) or `"dpo"`
            ([`ERPODPOTrainer`], [`ERPODPOConfig`]).
    """

    trainer: str = field(
        default="grpo", metadata={"help": "'grpo', 'rloo' or 'dpo'; the other options are those of its config."}
    )

    def __post_init__(self):
        if self.trainer not in TRAINERS:
            raise ValueError(f"trainer must be one of {', '.join(map(repr, TRAINERS))}, found {self.trainer!r}.")


@dataclass
class DataArguments:
    r"""
    What to train on.

    Parameters:
        dataset (`str`, *optional*, defaults to `"arithmetic"`):
            `"arithmetic"` (embedded), `"math_3_5"` (MATH levels 3 to 5), a JSONL, JSON, CSV or Parquet file, or a hub id. With
            `trainer="dpo"` a file or hub id with the columns `prompt`, `chosen` and `rejected`, text or chat messages; the
            options below but the splits and `max_rows` are for trainers that generate.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of a named or hub data set.
        eval_dataset (`str`, *optional*):
            Same as `dataset`, for evaluation.
        eval_dataset_split (`str`, *optional*, defaults to `"test"`):
            Split of `eval_dataset`.
        problem_field (`str`, *optional*):
            Column of a file or hub data set with the problem's text. Default: `problem`, else `prompt`.
        answer_field (`str`, *optional*):
            Column of a file or hub data set with the gold answer. Default: `answer`.
        prompt_suffix (`str`, *optional*):
            Text appended to every problem. Default: for `math_3_5` the instruction to reason inside `<think></think>` and to
            box the answer, else none.
        system_prompt (`str`, *optional*):
            System turn before every problem.
        max_rows (`int`, *optional*):
            Keep only the first rows of the training data.
        reward_funcs (`list[str]`, *optional*, defaults to `["accuracy"]`):
            Rewards by name (`accuracy`, `format`) or import path (`package.module:function`, `file.py:function`).
    """

    dataset: str = field(
        default="arithmetic",
        metadata={"help": "'arithmetic', 'math_3_5', a JSONL/JSON/CSV/Parquet file, or a hub id."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a named or hub data set."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Same as dataset, for evaluation."})
    eval_dataset_split: str = field(default="test", metadata={"help": "Split of eval_dataset."})
    problem_field: str | None = field(default=None, metadata={"help": "Column with the problem's text."})
    answer_field: str | None = field(default=None, metadata={"help": "Column with the gold answer."})
    prompt_suffix: str | None = field(default=None, metadata={"help": "Text appended to every problem."})
    system_prompt: str | None = field(default=None, metadata={"help": "System turn before every problem."})
    max_rows: int | None = field(default=None, metadata={"help": "Keep only the first rows of the training data."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={
            "help": "Rewards by name (accuracy, format) or import path (package.module:function, file.py:function)."
        },
    )

    def __post_init__(self):
        if isinstance(self.reward_funcs, str):  # `reward_funcs: accuracy` in YAML
            self.reward_funcs = [self.reward_funcs]
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows must be >= 1, found {self.max_rows}.")


def configs_of(trainer: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the options of `erpo-trl train` with this trainer."""
    return TrainerArguments, DataArguments, TRAINERS[trainer][0], ModelConfig


def parse(argv: Sequence[str], prog: str = "erpo-trl train") -> tuple[DataArguments, QueryFields, ModelConfig]:
    """Options from `--config FILE` (YAML) and the command line; the command line beats the file, the file the defaults.

    The config's class is that of the trainer which `trainer` names.

    Raises:
        InputError: unknown key (named, with the nearest known one), missing file, or a value a field refuses.
    """
    # Modules of rewards and weight schemes in the working directory, as with TRL's own scripts
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    trainer = first_option(argv, TrainerArguments, prog).trainer
    others = {f"trainer {name}": config for name, (config, _) in TRAINERS.items() if name != trainer}
    return parse_options(argv, configs_of(trainer), prog, others)[1:]


def _load(data: DataArguments, name: str, split: str) -> Dataset:
    """A data set with `prompt` and `answer`; options left unset keep the loader's defaults."""
    options = {"suffix": data.prompt_suffix, "system_prompt": data.system_prompt}
    if name not in NAMED:  # whose columns are known, unlike those of another data set of this run
        options |= {"problem": data.problem_field, "answer": data.answer_field}
        # A reward of the user's own may need none
        options["needs_answer"] = any(reads_answer(resolve_reward(reward)) for reward in data.reward_funcs)
    dataset = resolve_dataset(name, split=split, **{key: value for key, value in options.items() if value is not None})
    for column in GIVEN_TO_REWARDS:
        if column in dataset.column_names:
            raise InputError(
                f"dataset {name!r}: rewards are given every column by its name, and {column!r} by the trainer; rename the column"
            )
    return dataset


def reads_answer(reward: Callable) -> bool:
    """Whether a reward function takes the column `answer` by name, and has no default for it."""
    try:
        parameters = inspect.signature(reward).parameters
    except (ValueError, TypeError):  # built in
        return False
    return "answer" in parameters and parameters["answer"].default is inspect.Parameter.empty


def _load_pairs(data: DataArguments, name: str, split: str) -> Dataset:
    """Preference pairs; raise for options that would do nothing to them."""
    if name in NAMED:
        raise InputError(
            f"dataset: trainer 'dpo' learns from preference pairs, which {name!r} does not hold: give a file or a hub id with "
            "the columns prompt, chosen and rejected"
        )
    for option in ("problem_field", "answer_field", "prompt_suffix", "system_prompt"):
        if getattr(data, option) is not None:
            raise InputError(f"{option} is for trainers that generate: with trainer 'dpo' unset it")
    return load_preferences(name, split)


def make_trainer(
    data: DataArguments, args: QueryFields, model: ModelConfig, **more
) -> ERPOTrainer | ERPORLOOTrainer | ERPODPOTrainer:
    """The trainer that these options describe, ready for `train()`; `more` goes to its constructor."""
    trainer_class = next(trainer for config, trainer in TRAINERS.values() if isinstance(args, config))
    if model.model_name_or_path == "demo":
        model.model_name_or_path = str(MODEL_DIR)
    if model.model_name_or_path is None:
        raise InputError("model_name_or_path is not set: a hub id, a folder, or 'demo' for the embedded model")
    check_folder(args.output_dir, "output_dir")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    if args.n_gpu > 1 and args.model_init_kwargs.get("device_map") in (None, {"": 0}):
        # Without a map TRL would spread the model's layers over all of them
        take_one_gpu(args)
        args.model_init_kwargs["device_map"] = {"": 0}
    try:
        pairs = isinstance(args, ERPODPOConfig)
        load = _load_pairs if pairs else _load
        if not pairs:
            more["reward_funcs"] = [resolve_reward(name) for name in data.reward_funcs]
        train_dataset = load(data, data.dataset, data.dataset_split)
        if data.max_rows is not None:
            train_dataset = train_dataset.select(range(min(data.max_rows, len(train_dataset))))
        eval_dataset = None
        if data.eval_dataset is not None:
            eval_dataset = load(data, data.eval_dataset, data.eval_dataset_split)
        return trainer_class(
            model=model.model_name_or_path,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            **more,
        )
    except (ValueError, OSError, ImportError) as error:  # ImportError: vLLM or bitsandbytes, with what to install
        raise InputError(str(error)) from error


def take_one_gpu(args: transformers.TrainingArguments) -> None:
    """Has a process without a launcher train on the first of the GPUs that it sees; TRL's trainers refuse several in one process."""
    if args.n_gpu > 1:
        logger.warning(
            f"One process trains on the first of the {args.n_gpu} GPUs that are visible. To train on all: accelerate launch -m "
            "erpo_trl.cli train ..."
        )
        args._n_gpu = 1


def describe(trainer: ERPOTrainer | ERPORLOOTrainer | ERPODPOTrainer) -> str:
    """One line: what is trained, in which precision, on what."""
    args, accelerator = trainer.args, trainer.accelerator
    parameters = list(trainer.model.parameters())
    # ZeRO-3 leaves empty tensors behind and keeps their size beside them
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in parameters]
    held = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()}))
    compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else held
    return (
        f"Training {sum(n for n, trained in sizes if trained):,} of {sum(n for n, _ in sizes):,} parameters, weights in "
        f"{held}, computing in {compute}, on {accelerator.num_processes} x {accelerator.device.type} "
        f"({accelerator.distributed_type.value})"
    )


def main(argv: Sequence[str]) -> None:
    """Train, save the model to `output_dir`, push it where asked."""
    trainer = make_trainer(*parse(argv))
    args = trainer.args
    trainer.accelerator.print(describe(trainer))
    resume = {"true": True, "false": None}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    try:
        resume = trainer.prepare_training(resume)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    show_live_line(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.accelerator.print(f"Model saved to {os.path.abspath(args.output_dir)}")
    if args.push_to_hub:
        trainer.push_to_hub()
    if Version(transformers.__version__) >= Version("5.18.0"):
        trainer.end()
