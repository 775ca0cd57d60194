"""What the authors' release computes in a step, on this package's code: the yardstick of "no additional forward".

Beside the forward that trains, the release runs the reference model over prompt and completion, and the policy once more over
the prompt alone, for weights that are read anew at every update. It knows nothing of rows that share their prompt, so that
each of the K rows scores it.
"""

import math

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from ..query.divergence import query_kl
from ..query.likelihood import QueryReader, scored_token_mask
from ..query.weights import Queries, WeightRule, query_weights


class _PromptLabelled:
    """Stand-in for the reference model that labels the prompt of every row, call after call, and keeps the log-probs."""

    def __init__(self, model: nn.Module, completion_width: int):
        self.model, self.completion_width = model, completion_width
        self.logps: list[Tensor] = []

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, **kwargs):
        prompts = slice(None, -self.completion_width)
        every = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        mask = scored_token_mask(attention_mask[:, prompts])
        reader = QueryReader(self.model, input_ids[:, prompts], mask, every)
        outputs = reader(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        self.logps.append(reader.logps)
        return outputs

    def __getattr__(self, name: str):
        return getattr(self.model, name)


class ReleaseSchemeTrainer(GRPOTrainer):
    """GRPO with the release's forwards. Set `beta` above 0: TRL then keeps a reference model and runs it."""

    alpha = 1e-2

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if model is not self.ref_model:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        reader = _PromptLabelled(model, logits_to_keep)
        result = super()._get_per_token_logps_and_entropies(
            reader, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        self._reference_logps = torch.cat(reader.logps)
        return result

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["ref_query_logps"] = self._reference_logps  # (B, P-1)
        return batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
        with torch.no_grad(), self.accelerator.autocast():
            labels = ids.masked_fill(mask == 0, -100)
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        scored = scored_token_mask(mask)
        nll = -torch.where(scored, outputs.log_probs, 0.0).sum(-1)
        queries = Queries(nll.double(), scored.sum(-1).double())
        weights = query_weights(queries, queries, WeightRule(clip=(0.0, math.inf))).to(nll.dtype)
        every = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        reader = QueryReader(model, ids, scored, every)
        weighted = {**inputs, "advantages": inputs["advantages"] * weights}
        loss = super().compute_loss(reader, weighted, return_outputs, num_items_in_batch)
        return loss + self.alpha * query_kl(reader.logps, inputs["ref_query_logps"], reader.mask).mean()
