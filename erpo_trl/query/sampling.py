"""Which queries are trained on when: a curriculum from the typical to all, and a filter of the atypical. Both off by default."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from .weights import Queries, WeightRule, query_weights, weight_scheme


def sampling_power(step: float, power: float, steps: int) -> float:
    """κ at an optimizer step: from `power` at step 0 linearly to 0 at `steps`, and 0 from there."""
    return power * max(0.0, 1.0 - step / steps)


def draw(weights: np.ndarray, size: int, power: float, generator: np.random.Generator) -> np.ndarray:
    """`size` distinct indices, drawn one after the other with probability ∝ w^κ among those that are left.

    Args: weights: (N,) w >= 0, N >= size; power: κ >= 0.
    Returns: (size,) indices in the order drawn.
    Source: the Gumbel-top-k trick (Vieira 2014; Kool et al., arXiv 1903.06059).
    """
    impossible = weights == 0
    keys = power * np.log(np.where(impossible, 1.0, weights)) + generator.gumbel(size=len(weights))
    # A weight of 0 comes after all others, whatever κ
    return np.lexsort((-keys, impossible))[:size]


class CurriculumSampler(RepeatSampler):
    """TRL's sampler, except that a generation batch at κ > 0 draws its queries ∝ w^κ from the whole set.

    Batches at κ = 0 are those that TRL's sampler has in their place. A batch is drawn from random numbers of its own, so that
    a resumed run needs to know nothing but how many batches came before.

    Args:
        sampler: TRL's.
        weights: (N,) w of each row.
        power_at: generation batch since the start of the run -> κ.
        seed: of the draws.
        epoch: passes over the data that lie behind.
    """

    def __init__(
        self, sampler: RepeatSampler, weights: np.ndarray, power_at: Callable[[int], float], seed: int, epoch: int = 0
    ):
        vars(self).update(vars(sampler))
        self.weights, self.power_at, self.draw_seed, self.epoch = weights, power_at, seed, epoch

    def __iter__(self) -> Iterator[int]:
        batches = self.num_samples // self.batch_size
        each = self.mini_repeat_count * self.repeat_count
        first, self.epoch = self.epoch * batches, self.epoch + 1
        usual = super().__iter__()
        for batch in range(first, first + batches):
            rows = [next(usual) for _ in range(self.batch_size * each)]
            power = self.power_at(batch)
            if power > 0:
                generator = np.random.default_rng([self.draw_seed, batch])
                drawn = draw(self.weights, self.batch_size, power, generator)
                # TRL's layout: each query K times in a row, the whole batch `repeat_count` times
                rows = np.tile(np.repeat(drawn, self.mini_repeat_count), self.repeat_count).tolist()
            yield from rows


def curriculum_weights(queries: Queries, population: Queries, rule: WeightRule) -> np.ndarray:
    """(N,) w of each row, by the reference; 1 for rows without likelihood."""
    return query_weights(queries, population, rule, queries.tokens > 0).numpy()


def typical_rows(queries: Queries, population: Queries, rule: WeightRule, share: float) -> Tensor:
    """Rows that are left when a share of those with a likelihood, the least typical, is taken out.

    Args: queries: (N,) rows, tokens 0 where there is no likelihood, which stay; rule: its scheme's raw weight, unclipped, says
        who is typical, and of equals (a far tail of `snis` is 0) the likelier, then the first rows stay; share: in [0, 1).
    Returns: (M,) indices, ascending.
    """
    scored = torch.nonzero(queries.tokens > 0).squeeze(1)
    raw = weight_scheme(rule.scheme)(Queries(*(column[scored] for column in queries)), population, rule)
    likelier = torch.argsort(queries.nll[scored], stable=True)
    order = likelier[torch.argsort(raw[likelier], descending=True, stable=True)]
    dropped = scored[order[len(scored) - int(share * len(scored)) :]]
    kept = torch.ones(len(queries.nll), dtype=torch.bool)
    kept[dropped] = False
    return torch.nonzero(kept).squeeze(1)
