"""What cannot be trained with a query likelihood known beforehand, refused before anything is loaded."""

import torch
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from .fingerprint import base_model, is_peft_model
from .likelihood import ropes_by_length

logger = logging.get_logger(__name__)


def refuse_unsupported(given: dict) -> None:
    """Raise for constructor arguments under which prompts have no likelihood known beforehand, or no run can resume."""
    if given.get("environment_factory") is not None:
        raise ValueError(
            "environment_factory is not supported: an environment's reset() rewrites prompts while training, so their "
            "reference log-probs cannot be computed beforehand. Use tools, or a rollout_func that keeps the prompts."
        )
    if getattr(given.get("args"), "enable_jit_checkpoint", False):
        raise ValueError(
            "enable_jit_checkpoint=True may save inside a generation batch, from where a run cannot be resumed: unset it. On "
            "SIGTERM this trainer saves by itself, after the first step that a run can be resumed from."
        )
    if getattr(given.get("args"), "use_liger_kernel", False):
        raise ValueError(
            "use_liger_kernel=True replaces layers when training starts, after the reference was scored with the others: unset it. "
            "TRL's own successor, model_init_kwargs={'use_kernels': True}, replaces them when the model is loaded."
        )
    for name, instead in (("bf16_full_eval", "bf16"), ("fp16_full_eval", "fp16")):
        if getattr(given.get("args"), name, False):
            raise ValueError(
                f"{name}=True casts the weights for an evaluation, for good, and the reference was scored with those of training: "
                f"unset it. With {instead}=True evaluations run in {instead} as training does."
            )
    evaluation = given.get("eval_dataset")
    for dataset in (
        given.get("train_dataset"),
        *(evaluation.values() if isinstance(evaluation, dict) else [evaluation]),
    ):
        if isinstance(dataset, (Dataset, IterableDataset)):
            refuse_images(dataset)


def refuse_images(dataset) -> None:
    """Raise for prompts with images."""
    names = dataset.column_names or []
    for name in ("image", "images"):
        if name in names:
            raise ValueError(
                f"The data set has a column {name!r}: prompts with images are not supported, since their likelihood is not "
                "that of their tokens alone. Remove the column, or use TRL's own trainer."
            )
    if "prompt" not in names or isinstance(dataset, IterableDataset) or not len(dataset):
        return
    prompt = dataset[0]["prompt"]
    parts = (
        [m["content"] for m in prompt if isinstance(m, dict) and isinstance(m.get("content"), list)]
        if isinstance(prompt, list)
        else []
    )
    if any(isinstance(part, dict) and part.get("type") == "image" for content in parts for part in content):
        raise ValueError("The data set's prompts hold image parts, which are not supported: use TRL's own trainer.")


def check_model(model: torch.nn.Module, args) -> None:
    """Raise for adapters under which a prompt's likelihood depends on its padding; warn of noise in it.

    Args: args: the trainer's config.
    """
    if is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ValueError(
            "Prompt-learning adapters (prompt tuning, prefix tuning, p-tuning) are not supported: their virtual tokens stand at "
            "a distance from the prompt that depends on its padding, and so would its likelihood. Use LoRA."
        )
    refuse_cast_weights(model, args)
    rate = dropout_rate(model)
    if rate:
        logger.warning(
            f"The model trains with dropout (up to {rate:g}), so its query log-probs are noisy and query/kl is not 0 at the "
            "first step. To measure and hold drift alone, set disable_dropout=True, and for attention, which it leaves as it is, "
            "attention_dropout=0 in the model's config (model_init_kwargs={'attention_dropout': 0.0})."
        )
    if args.neftune_noise_alpha:
        logger.warning(
            f"neftune_noise_alpha={args.neftune_noise_alpha:g} puts noise on the embeddings while training, so query log-probs are "
            "noisy and query/kl is not 0 at the first step. Unset it to measure and hold drift alone."
        )
    names = ["max_length"] if hasattr(args, "max_length") else ["max_prompt_length", "max_completion_length"]
    lengths = [getattr(args, name) for name in names]
    for kind, length in ropes_by_length(base_model(model).config).items():
        if None in lengths or sum(lengths) > length:
            logger.warning(
                f"The model's rotary positions ({kind}) change in a batch of more than {length} tokens: a prompt is then read with "
                "others in training, together with its completion, than it was scored with, and query/kl holds the difference. Keep "
                f"{' + '.join(names)} within {length} to measure and hold drift alone."
            )


def refuse_cast_weights(model: torch.nn.Module, args) -> None:
    """Raise where TRL would cast the weights that the reference was scored with: for continuous batching it does so at every
    generation, for good."""
    if not getattr(args, "use_transformers_continuous_batching", False) or not (args.bf16 or args.fp16):
        return
    asked, name = (torch.bfloat16, "bf16") if args.bf16 else (torch.float16, "fp16")
    base = base_model(model)
    kept = base.get_output_embeddings() if args.cast_lm_head_to_fp32 else None
    kept = set() if kept is None else set(kept.parameters())
    adapter = is_peft_model(model)
    found = {
        weight.dtype
        for weight in model.parameters()
        if weight.is_floating_point() and weight not in kept and not (adapter and weight.requires_grad)
    }
    if found - {asked}:
        raise ValueError(
            f"use_transformers_continuous_batching with {name}=True: TRL casts the weights to {asked} at the first generation, "
            f"found {', '.join(sorted(map(str, found)))}; the reference would be that of other weights. Load them so "
            f"(model_init_kwargs={{'dtype': '{str(asked).removeprefix('torch.')}'}}), or set {name}=False."
        )


def refuse_native_adapter(model: torch.nn.Module) -> None:
    """Raise for an adapter in transformers' own hands, which cannot be told from the base model's weights, nor be turned off."""
    if getattr(base_model(model), "_hf_peft_config_loaded", False):
        raise ValueError(
            "The model carries an adapter of transformers' own (`add_adapter`, `load_adapter`, or `from_pretrained` on an "
            "adapter's folder), which cannot be told from the reference. Load the base model and give peft_config to the trainer, "
            "or put the adapter on with `peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)`."
        )


def dropout_rate(model: torch.nn.Module) -> float:
    """The highest dropout probability that `model.train()` would turn on."""
    rates = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    # Attention passes its rate to a function
    rates += [m.attention_dropout for m in model.modules() if isinstance(getattr(m, "attention_dropout", None), float)]
    return max(rates, default=0.0)
