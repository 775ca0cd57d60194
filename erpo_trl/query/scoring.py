"""Log-probs of whole prompts under the reference: the model as it is, through the fused head that training uses."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

from .fingerprint import base_model, is_peft_model, query_key
from .sharding import compute_device, is_sharded

logger = logging.get_logger(__name__)


# Padding of one batch above which one more forward is cheaper: tokens, or a share of its real ones where that is more
_MOST_PADDING, _PADDING_SHARE = 64, 1 / 32


def batches_by_tokens(queries: list[np.ndarray], budget: int) -> list[list[np.ndarray]]:
    """Queries, longest first, at least one a batch, cut where rows x longest row would pass `budget` tokens, or padding both
    64 tokens and 1/32 of the real ones."""
    batches, batch, real = [], [], 0
    for query in sorted(queries, key=len, reverse=True):
        if batch:
            total, tokens = len(batch[0]) * (len(batch) + 1), real + len(query)
            if total > budget or total - tokens > max(_MOST_PADDING, tokens * _PADDING_SHARE):
                batches.append(batch)
                batch, real = [], 0
        batch.append(query)
        real += len(query)
    return [*batches, batch] if batch else batches


@contextlib.contextmanager
def reference_policy(model: nn.Module, config, adapter: bool, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Makes the model the reference, without gradient: eval mode, fused head, adapter on or off.

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
    device = compute_device(model)

    def restore_trainable():
        for parameter, was in trainable:
            parameter.requires_grad_(was)

    with contextlib.ExitStack() as stack:
        stack.callback(restore_trainable)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        if is_peft_model(model) and not adapter:
            stack.enter_context(model.disable_adapter())
            # It also freezes them, and FSDP2 keeps for good what the first forward finds
            restore_trainable()
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
            yield
        finally:
            for module, training in modes:
                module.training = training
            if patched is None:
                del base.forward
            else:
                base.forward = patched


def score_in_rounds(
    policy: nn.Module, queries: list[np.ndarray], budget: int, processing_class
) -> Iterator[tuple[list[tuple[np.ndarray, np.ndarray]], int]]:
    """Score queries over all processes, one forward a process and round.

    Where a forward runs out of memory on any process, all of them repeat the round with half the token budget.

    Args:
        policy: what to call, see `reference_policy`.
        queries: the same on every process.
        budget: tokens of one forward, padding included.

    Yields:
        after each round the (query, log-probs) pairs that this process scored, and the number that all scored together.

    Raises:
        torch.OutOfMemoryError: a single prompt does not fit, or the model is sharded over processes.
    """
    state = PartialState()
    alone = state.num_processes == 1 or not is_sharded(policy)
    waiting = batches_by_tokens(queries, budget)
    while waiting:
        turn, waiting = waiting[: state.num_processes], waiting[state.num_processes :]
        # Ranks without a batch of their own repeat the last: under ZeRO-3 all must run the same number of forwards
        mine = turn[min(state.process_index, len(turn) - 1)]
        logps = None
        try:
            logps = score_queries(policy, mine, processing_class)
        except torch.OutOfMemoryError as error:
            if not alone:
                # The others wait for this one's shard in the middle of their forward, where no message reaches them
                raise torch.OutOfMemoryError(
                    f"Scoring the reference ran out of memory on process {state.process_index} with {len(mine)} prompts of up "
                    f"to {len(mine[0])} tokens. Lower reference_batch_tokens (now {budget}); what was scored is kept."
                ) from error
        failed = gather_object([len(mine) * len(mine[0]) if logps is None else 0])
        if not any(failed):
            scored = list(zip(mine, logps)) if state.process_index < len(turn) else []
            yield scored, sum(map(len, turn))
            continue
        clear_device_cache(garbage_collection=True)
        for batch, size in zip(turn, failed):
            if size and len(batch) == 1:
                raise torch.OutOfMemoryError(
                    f"Scoring the reference ran out of memory with one prompt of {size} tokens: set max_prompt_length to "
                    "leave such prompts out, or score on a larger device."
                )
        budget = min(budget, max(failed)) // 2
        logger.warning(f"Scoring the reference ran out of memory; going on with {budget} tokens a forward.")
        waiting = batches_by_tokens([query for batch in (*turn, *waiting) for query in batch], budget)
        yield [], 0


def score_queries(policy: nn.Module, queries: list[np.ndarray], processing_class) -> list[np.ndarray]:
    """(T_i - 1,) float32 log-probs in nats of each query of one batch, in one forward.

    Raises:
        ValueError: a log-prob is no finite number; the message shows the prompt.
    """
    device = compute_device(policy)
    longest = max(map(len, queries))
    # Padded on the right: no real token attends to padding, and positions stay put, so that attention runs its causal kernel
    # without a mask, which would take longer
    input_ids = torch.zeros(len(queries), longest, dtype=torch.long)
    labels = torch.full_like(input_ids, -100)
    for row, query in enumerate(queries):
        input_ids[row, : len(query)] = labels[row, : len(query)] = torch.from_numpy(query)
    outputs = policy(input_ids=input_ids.to(device), labels=labels.to(device), fused_lm_head=True)
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


def queries_of_all(queries: list[np.ndarray]) -> list[np.ndarray]:
    """The distinct queries of all processes, in one order."""
    return list({query_key(row): row for row in gather_object(queries)}.values())


def score_for_all(policy, queries: list[np.ndarray], budget: int, processing_class) -> dict[int, np.ndarray]:
    """(T-1,) log-probs in nats by query key, on every process, of queries that every process gives alike."""
    scored = []
    for pairs, _ in score_in_rounds(policy, queries, budget, processing_class):
        scored += [(query_key(row), logps) for row, logps in pairs]
    return dict(gather_object(scored))
