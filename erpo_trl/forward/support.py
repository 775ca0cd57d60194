"""Which models can run a prompt once for several rows exactly."""

import inspect
import math

from torch import nn

from ..query.fingerprint import base_model
from ..query.likelihood import ropes_by_length


def why_not_shared(model: nn.Module) -> str | None:
    """Why the rows of a query cannot share its prompt in this model; None where they can.

    Shared forwards hand the layers position ids and a 4D mask, which leaves the result alone only where a token's state
    depends on those before it through attention, by their positions and that mask.
    """
    adapters = getattr(model, "peft_config", {})
    if any(config.is_prompt_learning for config in adapters.values()):
        return "a prompt-learning adapter puts virtual tokens before every row"
    if any(getattr(config, "alora_invocation_tokens", None) for config in adapters.values()):
        return "an activated LoRA looks for its invocation tokens row by row"
    base = base_model(model)
    config, backbone = base.config, getattr(base, "base_model", base)
    name = type(base).__name__
    if config.get_text_config() is not config:
        return f"{name} is a model of more than text"
    if backbone is base:
        return f"{name} has no transformer apart from its head"
    if getattr(backbone, "_is_stateful", False):
        return f"{name} carries a state from token to token beside attention"
    if not getattr(backbone, "_supports_attention_backend", False):
        return f"{name} has an attention of its own"
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        return f"{name} takes no position ids"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"prompts are shared with attention 'sdpa' or 'eager', and this is {config._attn_implementation!r}"
    kinds = ropes_by_length(config)
    if kinds:
        return f"the rotary positions of {name} ({', '.join(kinds)}) depend on the longest row of a batch"
    return None


def attention_window(config) -> float:
    """How many tokens back the model's sliding attention reaches, itself included; infinity where every layer sees all."""
    if getattr(config, "is_heterogeneous", False):  # layers that differ in it
        layers = config.per_layer_config
        return min(
            (w for w in (getattr(layer, "sliding_window", None) for layer in layers) if w is not None),
            default=math.inf,
        )
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return math.inf if window is None or (types and "sliding_attention" not in types) else window
