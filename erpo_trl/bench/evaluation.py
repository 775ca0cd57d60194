"""Sampling of `erpo-trl eval` under transformers against plain `generate` on the same prompts in the same batches."""

import numpy as np
import torch

from ..evaluation.backends import Request, TransformersBackend
from .measure import Comparison, interleaved
from .workload import Workload, mixed_lengths

_TEMPERATURE = 0.8
_BATCH_TOKENS = 4096


def measure_evaluation(work: Workload, samples: int, new_tokens: int, longest: int, repetitions: int) -> Comparison:
    """Samples a second of random prompts of mixed lengths."""
    model = work.model().eval()
    ids = work.tokenizer(work.prompts(mixed_lengths(samples, longest, work.seed)))["input_ids"]
    backend = TransformersBackend(model, work.tokenizer, _BATCH_TOKENS)
    requests = [Request(row, 0, row, _TEMPERATURE, tuple(prompt), new_tokens) for row, prompt in enumerate(ids)]
    batches = backend.plan(requests)

    def ours():
        for batch in batches:
            backend.generate(batch)

    @torch.no_grad()
    def plain():
        for batch in batches:
            inputs = work.tokenizer.pad({"input_ids": [list(r.prompt_ids) for r in batch]}, return_tensors="pt")
            model.generate(
                **inputs.to(model.device),
                do_sample=True,
                temperature=_TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                pad_token_id=backend.pad,
            )

    times = interleaved({"plain generate": plain, "erpo-trl eval": ours}, repetitions)
    rates = {side: (samples / np.asarray(values)).tolist() for side, values in times.items()}
    return Comparison(f"evaluation of {samples} samples of {new_tokens} tokens", "samples/s", rates)
