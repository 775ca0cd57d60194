"""What a trained model is measured on beside its accuracy: drifts from the model before training, and NLLs.

All variants are measured alike, on the same prompts and by the same estimators, whatever they trained with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..evaluation.backends import Request
from ..evaluation.protocol import make_requests
from ..query.divergence import query_kl

MOST_TOKENS = 16384
MOST_LOGITS = 1 << 26  # of one forward, which holds them all; a quarter of a gigabyte
BENCHMARK = "study"  # part of the seeds of the responses


def batches(rows: Sequence[Sequence[int]], vocabulary: int) -> list[list[int]]:
    """Indices of rows of token ids, those of like length together, under a budget of tokens with padding and of logits."""
    most = min(MOST_TOKENS, MOST_LOGITS // vocabulary)
    found: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if not found or (len(found[-1]) + 1) * len(rows[index]) > most:
            found.append([])
        found[-1].append(index)
    return found


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(B, T) token ids, padded on the right so that positions need no care, and their mask."""
    ids = torch.full((len(rows), max(map(len, rows))), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def next_token_logps(model, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, T-1, V) log-probs in nats of every next token."""
    ids, mask = ids.to(model.device), mask.to(model.device)
    return model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1).cpu()


@dataclass(frozen=True)
class PromptDrift:
    """Of a set of prompts. Args: query_kl: mean k3 per prompt token, nats; nll, ref_nll: (N,) nats per prompt; tokens: (N,) scored."""

    query_kl: float
    nll: np.ndarray
    ref_nll: np.ndarray
    tokens: np.ndarray


@torch.no_grad()
def prompt_drift(model, base, prompts: Sequence[Sequence[int]], pad: int) -> PromptDrift:
    """Drift of the prompts' likelihood from `base`: k3 per token, averaged over a prompt's tokens, then over prompts.

    Args: model, base: in evaluation mode; prompts: token ids; pad: any id.
    """
    kl, nll, ref_nll, tokens = (np.zeros(len(prompts)) for _ in range(4))
    for rows in batches(prompts, base.config.vocab_size):
        ids, mask = padded([prompts[i] for i in rows], pad)
        scored = mask[:, 1:].bool()
        logps, ref = (next_token_logps(m, ids, mask).gather(-1, ids[:, 1:, None]).squeeze(-1) for m in (model, base))
        kl[rows] = query_kl(logps, ref, scored).double().numpy()
        nll[rows], ref_nll[rows] = (-torch.where(scored, x, 0.0).sum(-1).double().numpy() for x in (logps, ref))
        tokens[rows] = scored.sum(-1).numpy()
    return PromptDrift(float(kl.mean()), nll, ref_nll, tokens)


@dataclass(frozen=True)
class ResponseDrift:
    """Of sampled responses.

    Args: policy_kl: KL(π‖π_0) of the next-token distributions, nats, mean over response tokens; entropy: of π on them, nats;
    nll, tokens: (N,) NLL in nats and length of a prompt's responses under π, means over its responses.
    """

    policy_kl: float
    entropy: float
    nll: np.ndarray
    tokens: np.ndarray


@torch.no_grad()
def response_drift(
    model, base, prompts: Sequence[tuple[int, ...]], backend, samples: int, seed: int, room: int
) -> ResponseDrift:
    """Drift of the policy on responses that it samples at T=1.

    Args: model, base: as in `prompt_drift`; prompts: token ids; backend: draws from `model`; samples: responses to each prompt;
    seed: of the draws; room: longest response in tokens.
    """
    requests = make_requests(BENCHMARK, prompts, 1.0, samples, seed, room, None, own_draw=False)
    drawn: dict[tuple[int, int], list[int]] = {}
    for batch in backend.plan(requests):
        drawn |= {_place(request): draw.token_ids for request, draw in zip(batch, backend.generate(batch))}
    rows = [(*request.prompt_ids, *drawn[_place(request)]) for request in requests]
    kl, entropy, nll, tokens = (np.zeros(len(rows)) for _ in range(4))
    for members in batches(rows, base.config.vocab_size):
        ids, mask = padded([rows[i] for i in members], backend.pad)
        first = torch.tensor([len(requests[i].prompt_ids) for i in members])
        response = mask[:, 1:].bool() & (torch.arange(1, ids.shape[1]) >= first[:, None])
        now, before = next_token_logps(model, ids, mask), next_token_logps(base, ids, mask)
        own = now.gather(-1, ids[:, 1:, None]).squeeze(-1)
        per_token = (now.exp() * (now - before)).sum(-1), -(now.exp() * now).sum(-1), -own
        for column, value in zip((kl, entropy, nll), per_token):
            column[members] = torch.where(response, value, 0.0).sum(-1).double().numpy()
        tokens[members] = response.sum(-1).numpy()
    total = max(tokens.sum(), 1)
    of_prompt = [column.reshape(len(prompts), samples).mean(1) for column in (nll, tokens)]
    return ResponseDrift(float(kl.sum() / total), float(entropy.sum() / total), *of_prompt)


def _place(request: Request) -> tuple[int, int]:
    return request.row, request.sample
