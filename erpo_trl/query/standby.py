"""The reference at hand while another policy trains: the base model under its adapter, or else a frozen copy."""

import contextlib
import copy
from collections.abc import Callable, Iterator

from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from .fingerprint import base_model, is_peft_model
from .reference import DatasetMapper
from .scoring import reference_policy
from .sharding import is_sharded

logger = logging.get_logger(__name__)


class StandbyReference:
    """Make it while the model still is the reference: it copies what training would change.

    Args:
        mapper: holds the reference and how training calls the model.
        accelerator: the trainer's.
        purpose: what needs it, a sentence up to its object, for messages.

    Raises:
        ValueError: a copy is needed but the model is spread over processes.
    """

    def __init__(self, mapper: DatasetMapper, accelerator: Accelerator, purpose: str):
        self.mapper = mapper
        self.mapper.pin()
        self._frozen: nn.Module | None = None
        if not is_peft_model(mapper.model):
            why = "all weights are trained"
        elif mapper.reference.adapter:
            why = "its adapter is part of the reference and is trained"
        elif any(
            p.requires_grad
            for name, p in mapper.model.named_parameters()
            if ".lora_" not in name and ".trainable_tokens_" not in name  # off with the adapter
        ):
            why = "weights outside its adapter are trained, too"
        else:
            return  # the base model stays as it is; the adapter is turned off
        if is_sharded(mapper.model) or accelerator.is_fsdp2:
            raise ValueError(
                f"{purpose} the reference at hand while training, and {why}; a copy of a model that is spread over processes is "
                "not supported. Train a fresh LoRA adapter, or do without: map the data beforehand with DatasetMapper, leave "
                "log_policy_kl_steps at 0."
            )
        size = sum(p.numel() * p.element_size() for p in mapper.model.parameters())
        logger.warning(
            f"{purpose} the reference at hand while training, and {why}: a frozen copy of the model ({size / 2**30:.2f} GiB) stays "
            "in memory. A fresh LoRA adapter needs none."
        )
        base = base_model(mapper.model)
        # A patched forward would be copied with what it closes over: the model in training
        patched = base.__dict__.pop("forward", None)
        try:
            self._frozen = copy.deepcopy(mapper.model).to(accelerator.device).eval().requires_grad_(False)
        finally:
            if patched is not None:
                base.forward = patched

    @contextlib.contextmanager
    def policy(self) -> Iterator[Callable]:
        """What to call for forwards of the reference with its fused head; every process must take part."""
        mapper = self.mapper
        with mapper.prepared() as prepared:
            model = mapper.model if self._frozen is None else self._frozen
            with reference_policy(model, mapper.config, mapper.reference.adapter, mapper.autocast_dtype):
                yield prepared if self._frozen is None else self._frozen
