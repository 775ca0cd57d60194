"""What a backend is, and the one on transformers' `generate`.

A backend has two methods: `plan`, which cuts the draws of one benchmark at one temperature into batches, and `generate`,
which draws a batch. The plan depends on the requests alone, never on the number of processes or on what is already done: so
one process, several, and an interrupted run continued all draw the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from ..query.fingerprint import base_model, is_peft_model
from .model_source import ModelSource
from .sampling import SeededSampling


@dataclass(frozen=True)
class Request:
    """One sample to draw.

    Args: row: of the problem; sample: index of the draw; seed: of this sample; temperature: 0 is greedy; prompt_ids: token
    ids; max_new_tokens: at least 1.
    """

    row: int
    sample: int
    seed: int
    temperature: float
    prompt_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Draw:
    """What came of a request. Args: token_ids: the end of turn included; finished: it ended by itself, not at the limit."""

    token_ids: list[int]
    finished: bool


class TransformersBackend:
    """Batches under a token budget, padded on the left, sampled from each sample's own seed.

    Args: model: in evaluation mode, on its device; tokenizer: of the model; batch_tokens: most tokens of a batch, padding and
    room for the completions included, one row at least; in_step: the model's forwards gather weights from all processes, which
    then generate equally many batches, each until all have ended.
    """

    def __init__(self, model, tokenizer: PreTrainedTokenizerBase, batch_tokens: int, in_step: bool = False):
        self.model, self.batch_tokens, self.in_step = model, batch_tokens, in_step
        self.eos = stop_ids(base_model(model).generation_config, tokenizer)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.eos)

    @classmethod
    def load(cls, source: ModelSource, tokenizer, dtype: str, batch_tokens: int, device) -> "TransformersBackend":
        """The backend with the model of `source`, its adapter applied."""
        model = AutoModelForCausalLM.from_pretrained(source.name, revision=source.revision, dtype=dtype)
        if source.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, source.adapter, revision=source.adapter_revision)
        return cls(model.to(device).eval(), tokenizer, batch_tokens)

    def plan(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Batches of requests of like length: shortest prompts first, those with the same room for an answer together.

        Room differs only where the context is too short for `max_new_tokens`; such prompts are batched with their own length,
        so that no row runs past the end of the context.
        """

        def room(request):
            return request.max_new_tokens

        ordered = sorted(requests, key=lambda r: (-room(r), len(r.prompt_ids), r.row, r.sample))
        batches = []
        for _, group in groupby(ordered, key=room):
            batch = []
            for request in group:
                if batch and (len(batch) + 1) * (len(request.prompt_ids) + room(request)) > self.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(request)
            batches.append(batch)
        return batches

    @torch.no_grad()
    def generate(self, batch: Sequence[Request]) -> list[Draw]:
        """Draws of requests with the same temperature and room, in their order. Leaves every global random state as found."""
        width, room = max(len(r.prompt_ids) for r in batch), batch[0].max_new_tokens
        ids = torch.full((len(batch), width), self.pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        processors = []
        if batch[0].temperature > 0:
            processors.append(SeededSampling([r.seed for r in batch], batch[0].temperature, width, room))
        device = self.model.device
        with _plain_generation(
            self.model,
            GenerationConfig(
                do_sample=False, max_new_tokens=room, eos_token_id=self.eos, pad_token_id=self.pad, use_cache=True
            ),
        ) as config:
            output = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=processors,
                synced_gpus=self.in_step,
            )
        return [self._draw(row) for row in output[:, width:].tolist()]

    def _draw(self, token_ids: list[int]) -> Draw:
        end = next((i + 1 for i, token in enumerate(token_ids) if token in self.eos), None)
        return Draw(token_ids[:end], finished=end is not None)


def stop_ids(generation_config, tokenizer) -> list[int]:
    """Every token id that ends a completion: those of the model's generation config and the tokenizer's."""
    ids = generation_config.eos_token_id
    ids = list(ids) if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError("neither the model's generation_config nor its tokenizer names an end-of-sequence token")
    return ids


class _plain_generation:
    """While it lasts, `generate` sees one generation config.

    `generate` fills what a config leaves unset from the model's own, which may hold a repetition penalty or the like; the
    temperatures of a sweep are to be those of the model's plain distribution.
    """

    def __init__(self, model, config: GenerationConfig):
        # PEFT's generate hands its own config down to the base model
        self.models = [model, base_model(model)] if is_peft_model(model) else [model]
        self.config = config

    def __enter__(self) -> GenerationConfig:
        self.found = [model.generation_config for model in self.models]
        for model in self.models:
            model.generation_config = self.config
        return self.config

    def __exit__(self, *exception) -> None:
        for model, config in zip(self.models, self.found):
            model.generation_config = config
