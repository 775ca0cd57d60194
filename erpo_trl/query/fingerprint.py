"""Names for what a reference table depends on: the model's weights, the head's settings, the prompt's ids.

A fingerprint that missed the weights would hand out stale log-probs; one that saw the training mode, the class instance or
an adapter that changes nothing would score again for nothing.
"""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import torch
import xxhash
from torch import nn

from .._version import __version__
from .sharding import whole

# Entries of a model config that do not change its log-probs, or that loading and training rewrite
_NEUTRAL_CONFIG = {
    "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "output_router_logits", "router_aux_loss_coef", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "gradient_checkpointing", "task_specific_params", "id2label",
    "label2id", "finetuning_task", "return_dict",
}  # fmt: skip
# What PEFT and torch.compile put into the names of a base model's weights
_PEFT_PREFIX = "base_model.model."
_WRAPPER_NAMES = (".base_layer.", "._orig_mod.")
# Bytes copied to the host at a time
_CHUNK = 1 << 28


def query_key(ids: Sequence[int]) -> int:
    """Name of a query: a 63-bit hash of its exact token ids, non-negative so that it survives as int64."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype=np.int64)) >> 1


def row_fingerprint(reference: str, key: int) -> str:
    """What a row's `query_fingerprint` says: the reference's fingerprint and the query's key."""
    return f"{reference}-{key:016x}"


def key_of_row(name: str) -> int:
    """The query's key out of a `row_fingerprint`."""
    return int(name.rpartition("-")[2], 16)


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model. accelerate's function of this name reads the metadata of what is installed at each call,
    which took a fifth of a mapping with a warm table."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_model(model: nn.Module) -> nn.Module:
    """The causal LM inside a PEFT model; any other model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def adapter_is_inert(model: nn.Module) -> bool:
    """Whether the active adapter of a PEFT model leaves the base model exactly as it is (a fresh LoRA: every B is 0).

    Anything but plain LoRA (DoRA, trained biases, saved modules, other adapter types) counts as not inert.
    """
    if any(getattr(config, "peft_type", None) != "LORA" for config in model.peft_config.values()):
        return False
    for config in model.peft_config.values():
        # PiSSA, OLoRA and their like move part of the base weights into the adapter, so base != adapter off
        if (
            config.use_dora
            or config.bias != "none"
            or config.modules_to_save
            or config.init_lora_weights not in (True, "gaussian")
        ):
            return False
    products = [p for name, p in model.named_parameters() if ".lora_B." in name]
    # An embedding's adapter starts with A at zero instead of B
    products += [p for name, p in model.named_parameters() if ".lora_embedding_A." in name]
    for product in products:
        with whole(product) as values:
            if values.any():
                return False
    return True


def weights_digest(model: nn.Module, adapter: bool, cast_lm_head_to_fp32: bool = False) -> str:
    """Digest of every weight and buffer of `model` that takes part in its log-probs.

    Args:
        model: names are those of the base model, so a table scored on it serves a LoRA run and a full run alike.
        adapter: False leaves all adapters out, True those that are not active (TRL adds a frozen copy as "ref").
        cast_lm_head_to_fp32: digest the head in float32, as which TRL's trainers store it with this setting.
    """
    inactive = set(model.peft_config) - set(model.active_adapters) if is_peft_model(model) else set()
    head = model.get_output_embeddings()
    digest = xxhash.xxh3_128()
    seen = set()
    # The parameters themselves, not detached: a tied one stands twice in a state dict, a sharded one has no address
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if inactive & set(name.split(".")) or (not adapter and ".lora_" in name):
            continue
        for part in _WRAPPER_NAMES:
            name = name.replace(part, ".")
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        with whole(tensor) as values:
            if cast_lm_head_to_fp32 and head is not None and tensor is head.weight:
                values = values.float()
            digest.update(f"{name.removeprefix(_PEFT_PREFIX)} {tuple(values.shape)} {values.dtype}".encode())
            flat = values.contiguous().view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _CHUNK):
                digest.update(flat[start : start + _CHUNK].cpu().numpy())
    return digest.hexdigest()


def adapter_settings(model: nn.Module) -> dict:
    """What the active adapters of a PEFT model do besides their weights: type and scaling."""
    neutral = {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"}
    configs = {
        name: {key: value for key, value in model.peft_config[name].to_dict().items() if key not in neutral}
        for name in model.active_adapters
    }
    # Scaling can be changed after construction, so that the config alone does not tell it
    scaling = {
        name: {adapter: module.scaling[adapter] for adapter in model.active_adapters if adapter in module.scaling}
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    return {"configs": configs, "scaling": scaling}


def reference_settings(model: nn.Module, head: dict, adapter: bool) -> dict:
    """Everything a reference log-prob depends on besides the ids, as a JSON-able mapping.

    Args:
        model: the reference policy, adapter included where it has one.
        head: settings of the fused head and of autocast (temperature, casts).
        adapter: whether the adapter is part of the reference.
    """
    config = model.config.get_text_config().to_dict()
    return {
        "weights": weights_digest(model, adapter, head["cast_lm_head_to_fp32"]),
        "adapter": adapter_settings(model) if adapter else None,
        "config": {key: value for key, value in sorted(config.items()) if key not in _NEUTRAL_CONFIG},
        "head": head,
        "versions": {"erpo_trl": __version__, **{name: version(name) for name in ("transformers", "trl")}},
    }


def fingerprint(settings: dict) -> str:
    """16 hex digits that name a mapping."""
    # Sets, which PEFT configs hold, have no order that would survive a new process
    text = json.dumps(
        settings, sort_keys=True, default=lambda x: sorted(map(str, x)) if isinstance(x, set) else str(x)
    )
    return xxhash.xxh3_64_hexdigest(text.encode())
