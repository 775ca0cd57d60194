"""Sampling that belongs to the sample: one seed each, whatever batch, order or process it is drawn in.

`model.generate` draws a whole batch from one random stream, so that a sample changes with its neighbours. Here every sample
has its own uniform numbers, one per token, and picks its tokens by the inverse of the cumulative distribution. What is left
of the neighbours is the rounding of the logits, which padding and batch size move by an ulp or so.
"""

import hashlib
import json

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

# The index of the draw that Pass@1 has to itself; those of Avg@k and Pass@k count from 0.
PASS_AT_1_DRAW = -1


def sample_seed(seed: int, benchmark: str, row: int, sample: int, temperature: float) -> int:
    """The seed of one sample: a 63-bit hash, so that no two samples of a run share one but by a chance of about n²/2⁶⁴.

    Args: seed: of the run; benchmark: its name; row: of the problem; sample: index of the draw; temperature: of the draw.
    """
    name = json.dumps([seed, benchmark, row, sample, float(temperature)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def uniforms(seed: int, count: int) -> np.ndarray:
    """(count,) float64 in [0, 1); a longer request begins with the numbers of a shorter one."""
    # Philox takes the whole seed as its key; torch's CPU generator would keep 32 bits of it
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """A token per row: the first at which the cumulative probability exceeds the row's uniform number.

    Args: logits: (B, V), unnormalised, before the temperature; uniform: (B,) float64 in [0, 1); temperature: above 0.
    Returns: (B,) token ids, distributed as softmax(logits / temperature); never one of probability 0.
    """
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    # In float64: a cumulative sum over a vocabulary of 10^5 would lose the rare tokens' share in float32. MPS has no float64
    probabilities = probabilities.cpu() if logits.device.type == "mps" else probabilities
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform.to(cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return tokens.to(logits.device)


class SeededSampling(LogitsProcessor):
    """Makes the greedy search of `generate` draw each row's token from the row's own random numbers.

    Args: seeds: one per row; temperature: above 0; prompt_width: padded length of the prompts; max_new_tokens: at most so
    many tokens are drawn.
    """

    def __init__(self, seeds: list[int], temperature: float, prompt_width: int, max_new_tokens: int):
        self.uniform = torch.from_numpy(np.stack([uniforms(seed, max_new_tokens) for seed in seeds]))
        self.temperature, self.prompt_width = temperature, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = draw_tokens(scores, self.uniform[:, input_ids.shape[1] - self.prompt_width], self.temperature)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(-1), 0.0)
