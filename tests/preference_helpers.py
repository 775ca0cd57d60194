"""Preference pairs, a DPO trainer of a tiny model, and what a micro-batch of pairs holds."""

import copy

from datasets import Dataset
from helpers import UNEQUAL, byte_tokenizer, tiny_model
from trl import DPOConfig, DPOTrainer

from erpo_trl import ERPODPOConfig, ERPODPOTrainer

CHOSEN = [" 4", "22", " one, of course", "5", "14.", "eleven", "3", "it is 5"]
REJECTED = ["5", "I do not know", "2", " 4 or 6", "15", "ten", " 12/6", "6"]


def pairs(prompts=UNEQUAL, **columns) -> Dataset:
    n = len(prompts)
    return Dataset.from_dict({"prompt": list(prompts), "chosen": CHOSEN[:n], "rejected": REJECTED[:n], **columns})


def make_preference_config(tmp_path, cls=ERPODPOConfig, **overrides):
    """Quick, exact settings, as `helpers.make_config` has them."""
    settings = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 5e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "seed": 3,
    }
    if cls is not DPOConfig:
        settings["reference_cache_dir"] = str(tmp_path / "reference")
    return cls(**settings | overrides)


def make_preference_trainer(
    tmp_path, cls=ERPODPOTrainer, model=None, data=None, trainer_kwargs=None, args=None, **settings
):
    """A trainer whose DPO reference is a copy of the model, as TRL would load it again."""
    model = tiny_model("qwen2") if model is None else model
    kwargs = {"processing_class": byte_tokenizer(), **(trainer_kwargs or {})}
    if not hasattr(model, "peft_config") and "peft_config" not in kwargs:
        kwargs.setdefault("ref_model", copy.deepcopy(model))
    return cls(
        model,
        args=args or make_preference_config(tmp_path, DPOConfig if cls is DPOTrainer else ERPODPOConfig, **settings),
        train_dataset=pairs() if data is None else data,
        **kwargs,
    )


NAMES = ("input_ids", "attention_mask", "completion_mask")


def pairs_of(batch: dict) -> list[dict]:
    """Unpadded pairs of a micro-batch."""
    found = []
    half = len(batch["input_ids"]) // 2
    rows = [(ids, real.bool(), done.bool()) for ids, real, done in zip(*(batch[n] for n in NAMES))]
    for (chosen, real, done), (rejected, other_real, other_done) in zip(rows[:half], rows[half:]):
        prompt = chosen[real & ~done].tolist()
        assert prompt == rejected[other_real & ~other_done].tolist()
        found.append({"prompt": prompt, "chosen": chosen[done].tolist(), "rejected": rejected[other_done].tolist()})
    return found


def distinct_of(batches: list[dict]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(tuple(pair["prompt"]) for batch in batches for pair in pairs_of(batch)))
