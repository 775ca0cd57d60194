"""Models, tokenizer, prompts and completions of a benchmark: built in code from a seed, nothing is downloaded."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ..cli import InputError
from .config import Dimensions

_SPECIALS = ["<pad>", "<eos>", "<unk>"]


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token a word: `w3` to the end of the vocabulary, between blanks."""
    words = {word: index for index, word in enumerate([*_SPECIALS, *(f"w{i}" for i in range(3, vocabulary))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def built_model(dimensions: Dimensions, vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 with random float32 weights and tied embeddings. Leaves the random state as found."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary,
                hidden_size=dimensions.hidden,
                num_hidden_layers=dimensions.layers,
                num_attention_heads=dimensions.heads,
                num_key_value_heads=dimensions.kv_heads,
                intermediate_size=dimensions.intermediate,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=1,
            )
        )
    return model


def _tokenizer(name: str, built: int) -> PreTrainedTokenizerBase:
    """That of a user's model, or the one of a model built in code with so many tokens."""
    if built:
        return word_tokenizer(built)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class Workload:
    """A model on disk and what goes into it.

    Args:
        folder: where a model built in code is saved, so that each trainer, and TRL's reference model, load their own.
        model: the user's model, or None for one of `dimensions` and `vocabulary`.
        seed: of weights, prompts and completions.
    """

    def __init__(self, folder: Path, model: str | None, dimensions: Dimensions, vocabulary: int, seed: int):
        self.seed, self.gpu = seed, torch.cuda.is_available()
        self.built = vocabulary if model is None else 0  # the vocabulary of a model built in code
        self.name = model or str(folder / f"model-{dimensions.hidden}-{vocabulary}")
        if model is None and not Path(self.name).exists():
            built_model(dimensions, vocabulary, seed).save_pretrained(self.name)
        self.tokenizer = _tokenizer(self.name, self.built)

    def arguments(self) -> list[str]:
        """What `Workload.again` takes, as arguments of a process."""
        return [self.name, str(self.built), str(self.seed)]

    @classmethod
    def again(cls, name: str, built: str, seed: str) -> "Workload":
        """The same workload in another process."""
        work = cls.__new__(cls)
        work.name, work.built, work.seed, work.gpu = name, int(built), int(seed), torch.cuda.is_available()
        work.tokenizer = _tokenizer(work.name, work.built)
        return work

    def model(self):
        """A fresh copy in float32 on the device; training computes in bf16 on a GPU, as TRL does by default."""
        model = AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32)
        return model.to("cuda" if self.gpu else "cpu")

    def prompts(self, lengths: Sequence[int]) -> list[str]:
        """Distinct random prompts of so many tokens; with a user's tokenizer about so many."""
        rng = np.random.default_rng(self.seed)
        words = self._words()
        texts = [" ".join(words[i] for i in rng.integers(0, len(words), length)) for length in lengths]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if not all(ids):
            raise InputError(
                f"The tokenizer of {self.name} makes no token of {texts[ids.index([])][:40]!r}: no prompts can be made."
            )
        return [self.tokenizer.decode(row[:length]) for row, length in zip(ids, lengths)]

    def dataset(self, rows: int, length: int) -> Dataset:
        return Dataset.from_dict({"prompt": self.prompts([length] * rows)})

    def completions(self, count: int, length: int) -> list[list[int]]:
        """Random completions of `length` tokens that never end by themselves."""
        rng = np.random.default_rng(self.seed + 1)
        return rng.integers(3, min(len(self.tokenizer), 3000), (count, length)).tolist()

    def _words(self) -> list[str]:
        return [f"w{i}" for i in range(3, self.built)] if self.built else [str(i) for i in range(10, 10_000)]


def mixed_lengths(rows: int, longest: int, seed: int) -> np.ndarray:
    """Prompt lengths as data sets of questions have them: log-normal around a fifth of the longest, none below a fifteenth.

    With a longest of 600, from 40 tokens up, with a median of 120 and a mean of 142.
    """
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(longest / 5), 0.6, rows).astype(int), max(2, longest // 15), longest)


# Tokens of MATH-500's problems (500, without a chat template, by SmolLM2's tokenizer), at these shares of the problems
_SHARES = (0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_MATH500 = (9, 19, 33, 52, 80, 150, 233, 401, 913)


def bare_lengths(rows: int, longest: int, seed: int) -> np.ndarray:
    """Prompt lengths that differ as those of MATH-500's problems do, up to the same longest as [`mixed_lengths`].

    With a longest of 600, from 9 tokens up, with a median of 52 and a mean of 76.
    """
    rng = np.random.default_rng(seed)
    return np.clip(np.interp(rng.random(rows), _SHARES, _MATH500).astype(int), 2, longest)
