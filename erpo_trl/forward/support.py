"""Which models can run a prompt once for several rows exactly, and when it pays."""

import inspect
import math

from torch import nn

from ..query.fingerprint import base_model
from ..query.sharding import whole_shape
from .prefix import Layout

# Positions that grow with the longest row of a batch, which packing changes
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

# What attention pays for one pair of tokens, in the time of as many floating-point operations in a matrix product: in plain
# rows at least (no padding, so that the kernel may leave out what is not causal), and in rows with a mask of their own. On CPUs
# fitted to forward and backward of models of hidden size 256 and 512. Elsewhere not measured: set high for masks, whose
# kernels are several times slower than causal ones, so that a guess costs a saving rather than time.
_PAIR_COST = {("cpu", "sdpa"): (0.8, 1.3), ("cpu", "eager"): (1.0, 3.0)}
_PAIR_COST_ELSEWHERE = {"sdpa": (1.0, 6.0), "eager": (1.0, 20.0)}
# Share of the plain forward's cost that must be saved: packing itself is not free, and the count is a count
_LEAST_SAVED = 0.1


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
        return f"attention {config._attn_implementation!r} takes no mask (sdpa and eager do)"
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    kinds = {rope.get("rope_type") for rope in (nested or [ropes])} & set(_BATCH_DEPENDENT_ROPE)
    if kinds:
        return f"the rotary positions of {name} ({', '.join(kinds)}) depend on the longest row of a batch"
    return None


def attention_window(config) -> float:
    """How many tokens back the model's sliding attention reaches, itself included; infinity where every layer sees all."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return math.inf if window is None or (types and "sliding_attention" not in types) else window


def flops_per_token(backbone: nn.Module) -> float:
    """Floating-point operations of one token's forward through the layers' weights: two per weight that it meets.

    Of a mixture's experts, whose weights are stacked to three dimensions, a token meets `num_experts_per_tok`.
    """
    config = backbone.config
    experts = getattr(config, "num_experts_per_tok", None)
    embeddings = {id(p) for m in backbone.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    total = 0.0
    for parameter in backbone.parameters():
        shape = whole_shape(parameter)
        if len(shape) > 1 and id(parameter) not in embeddings:
            met = min(1.0, experts / shape[0]) if experts and len(shape) == 3 else 1.0
            total += 2 * math.prod(shape) * met
    return total


def flops_per_pair(config) -> float:
    """Floating-point operations that attention spends on one pair of tokens in all layers: a score and a weighted sum."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * head * config.num_attention_heads * config.num_hidden_layers


def pays(layout: Layout, token: float, pair: float, device: str, attention: str) -> bool:
    """Whether the packed rows cost clearly less than the plain ones.

    A forward of R rows of S columns costs R·S·token + R·S²·pair·c: padding and forbidden pairs cost what the others do. The
    head's cost is the same either way, and the backward's is in proportion.

    Args:
        layout: of the batch.
        token, pair: see `flops_per_token`, `flops_per_pair`.
        device: type of the device, e.g. `cuda`; attention: `sdpa` or `eager`.
    """
    plain, masked = _PAIR_COST.get((device, attention), _PAIR_COST_ELSEWHERE[attention])

    def cost(rows: int, columns: int, pair_cost: float) -> float:
        return rows * columns * (token + columns * pair * pair_cost)

    return cost(*layout.source.shape, masked) < (1 - _LEAST_SAVED) * cost(*layout.place.shape, plain)
