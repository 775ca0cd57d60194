"""Policy-KL now and then: how far the policy has moved from the reference on its completions, as GRPO's `kl` measures it.

GRPO logs it when it penalizes it (`beta` > 0), from a reference forward in every step. ERPO needs none to train; the monitor
makes one every N steps, so that the two drifts of the paper's Figure 1 can be drawn for its runs, too.
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from ..query.divergence import k3
from ..query.fingerprint import base_model
from ..query.likelihood import has_absolute_positions
from ..query.standby import StandbyReference


def policy_kl(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """KL(π_θ ‖ π_0) on sampled tokens, by k3 of log π_0 - log π_θ.

    Args: logps, ref_logps: (B, C) log-probs of the completions' tokens, nats; mask: (B, C), True where a token counts.
    Returns: (2,) the sum over the tokens that count, nats, and their number.
    Source: GRPO (arXiv 2402.03300) Eq. 4; TRL's metric `kl`.
    """
    mask = mask.bool()
    x = torch.where(mask, ref_logps, 0.0) - torch.where(mask, logps, 0.0)
    return torch.stack([torch.where(mask, k3(x), 0.0).sum(), mask.sum().to(x.dtype)])


class PolicyKLMonitor:
    """Measures the Policy-KL of the micro-batches it is shown, all processes together.

    Args:
        reference: at hand for a forward.
        accelerator: the trainer's.
    """

    def __init__(self, reference: StandbyReference, accelerator: Accelerator):
        self.reference, self.accelerator = reference, accelerator
        self._total = torch.zeros(2)

    def reference_logps(self, batch: dict) -> Tensor:
        """(B, C) log-probs in nats of a micro-batch's completions under the reference; one forward."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["prompt_ids"].shape[1]
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :width] = -100
        more = {}
        if has_absolute_positions(base_model(self.reference.mapper.model)):
            more["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with self.reference.policy() as policy:
            outputs = policy(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **more)
        return outputs.log_probs[:, width - 1 :]

    def add(self, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> None:
        """Take in a micro-batch; see `policy_kl` for the arguments."""
        total = policy_kl(logps, ref_logps, mask).float()
        self._total += self.accelerator.reduce(total, reduction="sum").cpu()

    def summarize(self) -> float | None:
        """Mean over the tokens since the last call, nats; None where none was measured."""
        (total, tokens), self._total = self._total.tolist(), torch.zeros(2)
        return total / tokens if tokens else None
