"""The mixin that lets the rows of a query share its prompt in the forwards of a TRL trainer.

What it changes against TRL: during `_get_per_token_logps_and_entropies` the transformer below the head runs on packed rows (see
`prefix.py`), and before a step's micro-batches are settled their rows change places so that those of a query meet.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..policy.mixin import CompletionReader
from ..query.fingerprint import base_model
from ..query.likelihood import QueryReader
from .cost import flops_per_pair, flops_per_token, pays
from .prefix import Layout, shared_prefixes
from .regroup import regroup
from .support import attention_window, why_not_shared

logger = logging.get_logger(__name__)

# Mean deviation of log-probs, nats, that rounding explains: of float32, and of shorter types
_ROUNDING = 1e-3
_ROUNDING_OF_HALF = 0.05


class SharedPrefixMixin:
    """Shared prompts for a TRL trainer with a fused head. `shared_prefix="off"` leaves it as it is, bit for bit.

    Put it before [`QueryRegularizerMixin`] in the bases, whose steps it rearranges.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._shares_prefix = self.args.shared_prefix != "off"
        self._checked: set[int] = set()  # models whose shared forward was compared with the plain one
        self._window_told = False
        if self._shares_prefix:
            why = why_not_shared(self.accelerator.unwrap_model(self.model))
            if why is not None:
                self._do_not_share(why)

    def _do_not_share(self, why: str) -> None:
        self._shares_prefix = False
        logger.warning(f"shared_prefix={self.args.shared_prefix!r} does nothing in this run: {why}.")

    # ---- forwards

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        forward = super()._get_per_token_logps_and_entropies
        arguments = (model, input_ids, attention_mask, logits_to_keep)
        if self._shares_prefix:
            self._check_once(forward, *arguments)
        if not self._shares_prefix:
            return forward(*arguments, *args, **kwargs)
        with self._sharing(model, input_ids.shape[1] - logits_to_keep, self.args.shared_prefix):
            return forward(*arguments, *args, **kwargs)

    def _owner_of(self, model) -> nn.Module:
        """Whose weights `model` runs: the policy's, whatever stands in for it, or TRL's reference."""
        reference = getattr(self, "ref_model", None)
        return self.accelerator.unwrap_model(reference if reference is not None and model is reference else self.model)

    @contextlib.contextmanager
    def _sharing(self, model, prompt_width: int, when: str) -> Iterator[None]:
        base = base_model(self._owner_of(model))
        backbone, config = base.base_model, base.config
        window = attention_window(config)
        costs = (flops_per_token(backbone), flops_per_pair(config)) if when == "auto" else None

        def wanted(layout: Layout) -> bool:
            if layout.longest > window:
                if not self._window_told:
                    self._window_told = True
                    logger.warning(
                        f"shared_prefix={self.args.shared_prefix!r} leaves out batches with rows longer than the sliding window "
                        f"of {window} tokens, as the one of {layout.longest} now."
                    )
                return False
            return costs is None or pays(layout, *costs, self.accelerator.device.type, config._attn_implementation)

        with shared_prefixes(backbone, prompt_width, config._attn_implementation == "eager", wanted):
            yield

    @torch.no_grad()
    def _check_once(self, forward, model, input_ids: Tensor, attention_mask: Tensor, completion: int) -> None:
        """At the first forward of a model compare two rows that share a prompt with themselves run apart.

        Every process takes part, as a forward of a model spread over them needs, and all come to the same end.
        """
        owner = self._owner_of(model)
        if id(owner) in self._checked:
            return
        self._checked.add(id(owner))
        while isinstance(model, (QueryReader, CompletionReader)):
            model = model.model
        prompt = input_ids.shape[1] - completion
        row = int(attention_mask[:, prompt:].sum(1).argmax())
        ids, mask = input_ids[row].repeat(2, 1), attention_mask[row].repeat(2, 1)
        # Another branch: the same tokens in another order
        tokens = mask[1, prompt:].bool()
        ids[1, prompt:][tokens] = ids[1, prompt:][tokens].roll(1)
        modes = [(module, module.training) for module in owner.modules()]
        owner.eval()
        try:
            plain, *_ = forward(model, ids, mask, completion)
            with self._sharing(model, prompt, "on"):
                shared, *_ = forward(model, ids, mask, completion)
        finally:
            for module, training in modes:
                module.training = training
        counted = mask[:, prompt:].sum().clamp(min=1)
        found = (((plain - shared).abs() * mask[:, prompt:]).sum() / counted).float().reshape(1)
        deviation = self.accelerator.gather(found).max().item()
        half = torch.finfo(owner.dtype).bits < 32 or self.accelerator.mixed_precision in ("bf16", "fp16")
        if not deviation <= (_ROUNDING_OF_HALF if half else _ROUNDING):
            self._do_not_share(
                f"{type(base_model(owner)).__name__} gives other log-probs when rows share a prompt ({deviation:.2g} nats a token)"
            )

    # ---- the optimizer step

    def _settle(self, batches: list[dict]) -> list[dict]:
        if self._shares_prefix and len(batches) > 1 and self._rows_may_move():
            batches = self._regrouped(batches)
        return super()._settle(batches)

    def _rows_may_move(self) -> bool:
        """Whether a step's gradient is the same wherever its rows lie: nothing is normalized within a micro-batch.

        A mean over the tokens of each micro-batch (`bnpo`, the entropy bonus), a quantile of them or a mixture's balance is;
        a mean over its rows is not, as micro-batches have as many rows.
        """
        bonus, quantile = getattr(self, "_entropy_bonus_enabled", False), getattr(self, "top_entropy_quantile", 1.0)
        return not (
            getattr(self.args, "loss_type", None) == "bnpo" or bonus or quantile < 1.0 or self.aux_loss_enabled
        )

    def _regrouped(self, batches: list[dict]) -> list[dict]:
        """`batches`, each run of them that was cut from one generation batch regrouped by query."""
        span = self.args.steps_per_generation
        runs: dict[int, list[dict]] = {}
        for offset, batch in enumerate(batches):
            runs.setdefault((self._step + offset) // span, []).append(batch)
        return [batch for run in runs.values() for batch in regroup(run, "query_key")]
