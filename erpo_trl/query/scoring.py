"""Log-probs of whole prompts under the reference: the model as it is, through the fused head that training uses."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from accelerate.utils import is_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from .fingerprint import base_model


def batches_by_tokens(queries: list[np.ndarray], budget: int) -> list[list[np.ndarray]]:
    """Queries, longest first, cut where rows x longest row would pass `budget` tokens; at least one a batch."""
    batches, batch = [], []
    for query in sorted(queries, key=len, reverse=True):
        if batch and len(batch[0]) * (len(batch) + 1) > budget:
            batches.append(batch)
            batch = []
        batch.append(query)
    return [*batches, batch] if batch else batches


@contextlib.contextmanager
def reference_policy(
    model: nn.Module, config, adapter: bool, autocast_dtype: torch.dtype | None
) -> Iterator[nn.Module]:
    """The model as the reference, without gradient: eval mode, fused head, adapter on or off.

    Modes, the random state, what is trainable and the model's own forward are put back afterwards.

    Args:
        model: causal LM or PEFT model.
        config: gives the head's settings (`temperature`, `cast_lm_head_to_fp32`).
        adapter: whether a PEFT model's adapter is part of the reference.
        autocast_dtype: dtype of autocast in training, None for none.
    """
    base = base_model(model)
    modes = [(module, module.training) for module in model.modules()]
    # Leaving `disable_adapter` makes every adapter weight trainable, the ones a user froze included
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    patched = base.__dict__.get("forward")
    device = model.get_input_embeddings().weight.device
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [parameter.requires_grad_(was) for parameter, was in trainable])
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        if is_peft_model(model) and not adapter:
            stack.enter_context(model.disable_adapter())
        if autocast_dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype=autocast_dtype))
        add_fused_lm_head(
            base,
            temperature=config.temperature,
            cast_lm_head_to_fp32=config.cast_lm_head_to_fp32,
            outputs=("log_probs",),
        )
        model.eval()
        try:
            yield model
        finally:
            for module, training in modes:
                module.training = training
            if patched is None:
                del base.forward
            else:
                base.forward = patched


def score_queries(policy: nn.Module, queries: list[np.ndarray], processing_class) -> list[np.ndarray]:
    """(T_i - 1,) float32 log-probs in nats of each query of one batch, in one forward.

    Raises:
        ValueError: a log-prob is no finite number; the message shows the prompt.
    """
    device = policy.get_input_embeddings().weight.device
    longest = max(map(len, queries))
    # Padded on the right, where causal attention needs no mask and absolute positions stay put
    input_ids = torch.zeros(len(queries), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, query in enumerate(queries):
        input_ids[row, : len(query)] = torch.from_numpy(query)
        attention_mask[row, : len(query)] = 1
    padded = bool((attention_mask == 0).any())
    outputs = policy(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device) if padded else None,
        labels=input_ids.masked_fill(attention_mask == 0, -100).to(device),
        fused_lm_head=True,
    )
    scored = outputs.log_probs.float().cpu().numpy()
    logps = [scored[row, : len(query) - 1] for row, query in enumerate(queries)]
    for query, values in zip(queries, logps):
        if not np.isfinite(values).all():
            text = processing_class.decode(query.tolist())
            raise ValueError(
                f"The reference gives this prompt a log-probability that is no finite number: {text[:200]!r}. Check the model's "
                "weights and dtype."
            )
    return logps
