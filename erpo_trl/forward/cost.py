"""What a forward and backward of packed rows costs against the plain ones."""

import math

from torch import nn

from ..query.sharding import whole_shape
from .branches import Parts, price
from .prefix import Layout

# What eager attention pays for a pair of tokens, in the time of as many floating-point operations in a matrix product: in plain
# rows at least, and in packed ones, where a mask is added. Elsewhere than on a CPU not measured, so set high.
_EAGER_PAIR = {"cpu": (1.0, 3.0)}
_EAGER_PAIR_ELSEWHERE = (1.0, 20.0)
# Share of the plain forward's cost that must be saved: packing itself is not free, and the count is a count
_LEAST_SAVED = 0.05


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
    # Gemma 4's have heads of two sizes
    differ = getattr(config, "is_heterogeneous", False)
    total = 0.0
    for layer in config.per_layer_config if differ else [config] * config.num_hidden_layers:
        head = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        total += 4.0 * head * layer.num_attention_heads
    return total


def plain_cost(layout: Layout, token: float, pair: float, device: str, attention: str) -> float:
    """What the layers cost on the rows as they are, at least: without padding, so that the kernel needs no mask.

    In the time of so many floating-point operations of a forward's matrix products, the backward in proportion. The head is left
    out: it costs the same either way.

    Args: as of [`pays`].
    """
    rows, columns = layout.place.shape
    causal = price(device).causal if attention == "sdpa" else _EAGER_PAIR.get(device, _EAGER_PAIR_ELSEWHERE)[0]
    return rows * columns * (token + columns * pair * causal)


def packed_cost(layout: Layout, token: float, pair: float, device: str, attention: str) -> float:
    """What the layers cost on the packed rows, as [`plain_cost`]."""
    rows, columns = layout.source.shape
    if attention == "sdpa":
        # A score and a weighted sum are four operations for each of the numbers of a token's query
        return rows * columns * token + Parts.of(layout.group, layout.branch).cheapest(device).cost(device) * pair
    masked = _EAGER_PAIR.get(device, _EAGER_PAIR_ELSEWHERE)[1]
    return rows * columns * (token + columns * pair * masked)


def pays(layout: Layout, token: float, pair: float, device: str, attention: str) -> bool:
    """Whether the packed rows cost clearly less than the plain ones.

    Args:
        layout: of the batch.
        token, pair: see `flops_per_token`, `flops_per_pair`.
        device: type of the device, e.g. `cuda`; attention: `sdpa` or `eager`.
    """
    arguments = (layout, token, pair, device, attention)
    return packed_cost(*arguments) < (1 - _LEAST_SAVED) * plain_cost(*arguments)
