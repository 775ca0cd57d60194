"""Query log-probs out of the one forward that TRL makes, and which positions count.

TRL's trainers call `model(input_ids, attention_mask, labels=..., fused_lm_head=True)` with the completion labelled. The
`QueryReader` stands in for the model during that one call: it labels the query as well and keeps what comes back.
"""

import functools
import inspect
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from .sharding import whole_shape


def scored_token_mask(attention_mask: Tensor) -> Tensor:
    """Which next-token predictions belong to a query's likelihood.

    A token is scored when it and its predecessor are real: x_1 has no context, and under left padding its prediction
    would come from a pad position.

    Args:
        attention_mask: (B, T) 1 on real tokens.

    Returns:
        (B, T-1) bool; entry t is about token t+1, the layout of TRL's `log_probs`.
    """
    real = attention_mask.bool()
    return real[:, 1:] & real[:, :-1]


def real_ids(ids: Tensor, attention_mask: Tensor) -> list[np.ndarray]:
    """The (T_i,) token ids of each of (B, T) padded rows, on the host."""
    return [row[real] for row, real in zip(ids.cpu().numpy(), attention_mask.bool().cpu().numpy())]


class QueryReader:
    """Stand-in for the model in TRL's forward: labels the prompts of the chosen rows and keeps their log-probs.

    Every attribute other than the call is the model's own.

    Args:
        model: the model TRL would have called (wrapped or not).
        prompt_ids: (B, P) token ids, left-padded; the first P columns of the ids that TRL passes.
        query_mask: (B, P-1) True where a token is scored.
        rows: (B,) bool, the rows whose prompt is labelled. On a GPU the head projects labelled positions only, so a query
            that K rows share costs one projection, not K.
        then: called after the forward, before TRL goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        query_mask: Tensor,
        rows: Tensor,
        then: Callable[["QueryReader"], None] | None = None,
    ):
        self.model = model
        self.then = then
        self.mask = query_mask & rows.unsqueeze(1)  # (B, P-1)
        self.targets = prompt_ids[:, 1:]
        self.logps: Tensor | None = None  # (B, P-1) nats, with gradient; meaningful where `mask`
        self.completion_logps: Tensor | None = None  # (B, C) nats, with gradient

    def __call__(self, *args, labels: Tensor, **kwargs):
        if self.logps is not None:
            raise RuntimeError("TRL made a second forward inside one loss; the query log-probs would be ambiguous")
        width = self.targets.shape[1]
        labels = labels.clone()
        rows = len(self.mask)
        labels[:rows, 1 : width + 1] = torch.where(self.mask, self.targets, labels[:rows, 1 : width + 1])
        outputs = self.model(*args, labels=labels, **kwargs)
        # Counted from the right: prompt-learning adapters put virtual tokens before the prompt
        start = outputs.log_probs.shape[1] - (labels.shape[1] - 1)
        self.logps = outputs.log_probs[:rows, start : start + width]
        self.completion_logps = outputs.log_probs[:, start + width :]
        if self.then is not None:
            self.then(self)
        return outputs

    def __getattr__(self, name: str):
        return getattr(self.model, name)


class PairReader(QueryReader):
    """`QueryReader` for preference pairs: rows are [chosen; rejected], prompt and completion in one row, padded on the right.

    The prompt is labelled in the chosen row. TRL sums log-probs over whole rows, so it is handed every per-token output as it
    would be without those labels. Calls without labels (for logits) go through.

    Args:
        model: as in `QueryReader`.
        input_ids: (N, L) the chosen rows.
        query_mask: (N, L-1) True where a token of the prompt is scored.
        rows: (N,) bool, the pairs whose prompt is labelled.
        weight: (N,) multiplies the gradient of the log-probs that TRL gets of either row, and so that of every loss of the
            pair alone; their values, and the loss, stay. None for no weights.
    """

    def __init__(
        self, model: nn.Module, input_ids: Tensor, query_mask: Tensor, rows: Tensor, weight: Tensor | None = None
    ):
        super().__init__(model, input_ids, query_mask, rows)
        self.weight = weight

    def __call__(self, *args, labels: Tensor | None = None, **kwargs):
        if labels is None:
            return self.model(*args, **kwargs)
        outputs = super().__call__(*args, labels=labels, **kwargs)
        unlabelled = labels[:, 1:] == -100
        for name, value in outputs.items():
            if isinstance(value, Tensor) and value.shape == unlabelled.shape:
                outputs[name] = value.masked_fill(unlabelled, 0)
        self.completion_logps = outputs.log_probs  # (2N, L-1), 0 on other tokens
        if self.weight is not None and outputs.log_probs.requires_grad:
            weight = self.weight.repeat(2).unsqueeze(1)
            outputs.log_probs.register_hook(lambda grad: grad * weight.to(grad.dtype))
        return outputs


# A learned scale per dimension after the rotary embedding: scores depend on where the two tokens stand, not on their distance alone
_SCALED_AFTER_ROTATION = ("hunyuan_v1_dense", "hunyuan_v1_moe", "dory")


def has_absolute_positions(model: nn.Module) -> bool:
    """Whether left padding changes what the model makes of a prompt: it looks positions up in a table (GPT-2 type), or scales
    queries and keys after their rotation."""
    if model.config.model_type in _SCALED_AFTER_ROTATION:
        return True
    config = model.config.get_text_config()
    lengths = {getattr(config, name, None) for name in ("n_positions", "max_position_embeddings")} - {None}
    # OPT-type tables hold two rows more than there are positions
    sizes = lengths | {n + 2 for n in lengths}
    accepts = "position_ids" in inspect.signature(type(model).forward).parameters
    tokens = model.get_input_embeddings()
    # Sinusoidal tables (XGLM) are a buffer called `weights`
    tables = [
        module.weight if isinstance(module, nn.Embedding) else getattr(module, "weights", None)
        for module in model.modules()
        if module is not tokens
    ]
    shapes = [whole_shape(x) for x in tables if isinstance(x, Tensor)]
    return accepts and any(len(shape) == 2 and shape[0] in sizes for shape in shapes)


def ropes_by_length(config) -> dict[str, int]:
    """Types of rotary positions whose frequencies depend on the longest row of a batch -> the length up to which they do not."""
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    return {
        rope["rope_type"]: rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in (nested or [ropes])
        if rope.get("rope_type") in ("dynamic", "longrope")
    }


def pass_position_ids(model: nn.Module) -> None:
    """Make fused-head forwards of `model` count positions from the first real token.

    TRL's forward passes no position ids, so under left padding an absolute-position model would see a query at positions
    that depend on the longest prompt of its batch. Patches `model.forward` in place; calls that pass `position_ids`, and
    calls without the fused head (generation does its own counting), go through unchanged.
    """
    forward = model.forward

    @functools.wraps(forward)
    def counted(*args, fused_lm_head: bool = False, **kwargs):
        mask = kwargs.get("attention_mask")
        if fused_lm_head and mask is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return forward(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = counted
