"""The behaviour policy's likeliest tokens, out of the rollout, and the policy's log-probs on them, out of TRL's one forward."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor

# Elements of the head's rows held at once in float32 (256 MB)
_CHUNK_ELEMENTS = 1 << 26


def split_sampled(
    logprobs: Sequence, token_ids: Sequence, completion_ids: Sequence[Sequence[int]], k: int
) -> tuple[list[list[float]], list[tuple[Tensor, Tensor]]]:
    """Take apart what an engine says about each sampled token and its alternatives.

    Args:
        logprobs: per completion, per token, the log-probs (nats, None where unknown) of some tokens, likeliest first.
        token_ids: their ids, same shape.
        completion_ids: the sampled ids; each must be among `token_ids` of its position.
        k: how many of the likeliest to keep.

    Returns:
        per completion the sampled tokens' log-probs; per completion ids (T, k) int64, -1 for padding, and their log-probs
        (T, k) float32.

    Raises:
        ValueError: shapes differ, or a sampled token is not listed; names completion and token.
    """
    sampled, sets = [], []
    for row, (row_logprobs, row_ids, completion) in enumerate(zip(logprobs, token_ids, completion_ids, strict=True)):
        row_logprobs, row_ids, completion = (
            x.tolist() if hasattr(x, "tolist") else x for x in (row_logprobs, row_ids, completion)
        )
        if not len(row_logprobs) == len(row_ids) == len(completion):
            raise ValueError(
                f"Rollout of completion {row}: logprobs for {len(row_logprobs)} tokens and logprob_token_ids for "
                f"{len(row_ids)}, but {len(completion)} completion ids."
            )
        ids = torch.full((len(completion), k), -1, dtype=torch.int64)
        values = torch.zeros(len(completion), k)
        own = []
        for place, (entry_logprobs, entry_ids, token) in enumerate(zip(row_logprobs, row_ids, completion)):
            if len(entry_ids) != len(entry_logprobs):
                raise ValueError(
                    f"Rollout of completion {row}, token {place}: {len(entry_logprobs)} logprobs for {len(entry_ids)} "
                    "logprob_token_ids."
                )
            known = dict(zip(entry_ids, entry_logprobs))
            if token not in known:
                raise ValueError(
                    f"Rollout of completion {row}, token {place}: logprob_token_ids does not list the sampled id {token}; the "
                    "sampled token must be among those with a log-prob."
                )
            own.append(known[token])
            # A padded list may repeat an id, which would count twice
            entries = [(i, logprob) for i, logprob in known.items() if logprob is not None][:k]
            for column, (i, logprob) in enumerate(entries):
                ids[place, column], values[place, column] = i, logprob
        sampled.append(own)
        sets.append((ids, values))
    return sampled, sets


@dataclass
class HeadRows:
    """What TRL's fused head was called with, and the rows of its weight that are needed after it.

    Args:
        hidden: (N, H) hidden states of the projected positions.
        ids: (U,) sorted ids whose rows are kept; weight: (U, H); bias: (U,) or None.
        temperature, softcap, scale: what the head does to the logits; autocast: whether it projects under autocast.
    """

    hidden: Tensor
    ids: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    scale: float
    autocast: bool

    def logits(self, positions: Tensor, ids: Tensor) -> Tensor:
        """Logits as the head's softmax sees them, in its precision, given back in float32.

        Args:
            positions: (M,) rows of `hidden`; ids: (M, K) token ids, each among `self.ids`.

        Returns: (M, K).
        """
        rows = torch.searchsorted(self.ids, ids)
        step = max(1, _CHUNK_ELEMENTS // (ids.shape[1] * self.hidden.shape[1]))
        parts = []
        for start in range(0, len(positions), step):
            part = slice(start, start + step)
            hidden = self.hidden[positions[part]]
            with torch.autocast(hidden.device.type, enabled=self.autocast):
                logits = torch.einsum("mh,mkh->mk", hidden, self.weight[rows[part]].to(hidden.dtype))
            logits = logits.float()
            if self.bias is not None:
                logits = logits + self.bias[rows[part]].float()
            parts.append(logits)
        logits = torch.cat(parts) * self.scale if parts else rows.float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


@contextlib.contextmanager
def captured_head(ids: Tensor) -> Iterator[list[HeadRows]]:
    """Inside, a fused-head forward also leaves a [`HeadRows`] with the rows of `ids` (sorted, distinct) in the list.

    The head's weight is whole only while TRL projects (ZeRO-3 gathers it, FSDP2 unshards it), so its rows are taken there.
    """
    heads: list[HeadRows] = []
    kernel = trl_utils._ChunkedLogProbFunction

    class Recording:
        @staticmethod
        def apply(hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs):
            index = ids.to(weight.device)
            heads.append(
                HeadRows(
                    hidden.detach(),
                    index,
                    weight.detach()[index],
                    None if bias is None else bias.detach()[index],
                    temperature,
                    softcap,
                    scale,
                    torch.is_autocast_enabled(hidden.device.type),
                )
            )
            return kernel.apply(hidden, weight, bias, labels, temperature, chunk, softcap, scale, outputs)

    trl_utils._ChunkedLogProbFunction = Recording
    try:
        yield heads
    finally:
        trl_utils._ChunkedLogProbFunction = kernel


def policy_logps(head: HeadRows, label_mask: Tensor, logps: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
    """The policy's log-probs of the listed ids, from one projection and the sampled tokens' log-probs.

    Args:
        head: from [`captured_head`].
        label_mask: (B, S) bool, the positions that had a label; the last C are the completion's.
        logps: (B, C) log-probs of the sampled tokens, nats, meaningful where labelled.
        tokens: (B, C) their ids.
        ids: (B, C, K) the ids asked for, -1 for none.

    Returns: (B, C, K) nats, float32; 0 where there is no label.
    """
    width = tokens.shape[1]
    labelled = label_mask[:, -width:]
    # The head projects every position, or on a GPU the labelled ones only, in order
    if head.hidden.shape[0] == label_mask.numel():
        place = torch.arange(label_mask.numel(), device=label_mask.device).view(label_mask.shape)
    else:
        place = (label_mask.flatten().cumsum(0) - 1).view(label_mask.shape)
    wanted = torch.cat([tokens.unsqueeze(-1), ids.clamp(min=0)], dim=-1)[labelled]
    logits = head.logits(place[:, -width:][labelled], wanted)
    log_normalizer = logits[:, :1] - logps[labelled].float().unsqueeze(-1)
    result = torch.zeros(ids.shape, dtype=torch.float32, device=logits.device)
    result[labelled] = logits[:, 1:] - log_normalizer
    return result
