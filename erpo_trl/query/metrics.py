"""Query metrics of optimizer steps and evaluations, averaged by sums and counts over ranks and accumulation."""

from dataclasses import dataclass

import numpy as np
import torch

from .weights import effective_sample_fraction


@dataclass(frozen=True)
class StepQueries:
    """The distinct scored queries of one optimizer step, over all ranks; every field is (Q,).

    Args:
        key: of the query; kl: R̂; nll: -ℓ_θ, nats; nll_drift: ℓ_0 - ℓ_θ, nats; weight: w; tokens: scored tokens of the query.
        response_nll: NLL of its responses in the step, nats per response, under the policy in training; response_tokens:
            their length. Means over the responses that have a token in the loss; NaN where none has.
    """

    key: np.ndarray
    kl: np.ndarray
    nll: np.ndarray
    nll_drift: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    response_nll: np.ndarray
    response_tokens: np.ndarray


class QueryMetrics:
    """Statistics of the queries seen since the last summary, each query of a step counted once.

    A step is opened with the layout of its rows, fed one (B, 9) tensor per micro-batch through `pending` and closed with
    all ranks' rows together.
    """

    def __init__(self):
        # Columns: owner, R̂, NLL, NLL drift, penalty, weight, scored tokens, response NLL, response tokens
        self.pending: list[torch.Tensor] = []
        self.latest: StepQueries | None = None  # of the step closed last
        self.micro_batches = 0
        self.keys = np.empty((0, 0), dtype=np.int64)  # (R, N) of the step at hand, see `open`
        self._queries: list[np.ndarray] = []  # per step (Q,) keys of its scored queries
        self._values: list[np.ndarray] = []  # per step (Q, 4): their R̂, NLL, NLL drift, penalty
        self._seen: list[np.ndarray] = []  # per step (D,) keys of all its distinct queries, scored or not
        self._weights: list[np.ndarray] = []  # per step (D,) their weights
        self._unscored: list[int] = []  # per step the rows without likelihood
        self._weight_tokens: list[int] = []  # per step the tokens that were forwarded for its weights alone

    def open(self, keys: np.ndarray, scored: np.ndarray, micro_batches: int, weight_tokens: int | None = None) -> None:
        """Begin a step.

        Args:
            keys: (R, N) the query of each row of each rank; scored: (R, N) 1, or 0 without likelihood, or -1 for padding.
            micro_batches: how many of them make the step on each rank.
            weight_tokens: prompt tokens, of all ranks, that were forwarded for the weights alone; None where weights never
                need it.
        """
        if weight_tokens is not None:
            self._weight_tokens.append(weight_tokens)
        self.keys, self._scored, self.micro_batches = keys, scored, micro_batches
        self.pending = []

    def close(self, rows: np.ndarray) -> float | None:
        """End a step with (R, N, 9) rows in the layout given to `open`; returns the mean R̂ of its queries, if any."""
        self.pending = []
        owner = rows[..., 0] > 0
        # Ranks that share a query score it once each, with the same result up to rounding
        distinct, first_owned = np.unique(self.keys[owner], return_index=True)
        owned = rows[owner][first_owned].astype(np.float64)
        self._queries.append(distinct)
        self._values.append(owned[:, 1:5])
        real = self._scored >= 0
        seen, first = np.unique(self.keys[real], return_index=True)
        self._seen.append(seen)
        self._weights.append(rows[..., 5][real][first].astype(np.float64))
        self._unscored.append(int((self._scored == 0).sum()))
        kl, nll, drift, _, weight, tokens = owned[:, 1:7].T
        self.latest = StepQueries(distinct, kl, nll, drift, weight, tokens, *self._responses(distinct, rows))
        return float(kl.mean()) if len(distinct) else None

    def _responses(self, queries: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(Q,) means of response NLL and length over the rows of each query whose response has a token in the loss."""
        counted = (self._scored == 1) & (rows[..., 8] > 0)
        of = np.searchsorted(queries, self.keys[counted])
        count, nll, tokens = (
            np.bincount(of, weights=w, minlength=len(queries))
            for w in (None, rows[..., 7][counted], rows[..., 8][counted])
        )
        with np.errstate(invalid="ignore"):
            return nll / count, tokens / count

    def summarize(self, distinct: bool = False) -> dict[str, float]:
        """Metrics since the last summary, then start anew; empty without a closed step.

        Args:
            distinct: count a query that several steps held once, and unscored queries instead of rows (evaluation: the
                sampler repeats rows to fill batches).
        """
        if not self._queries:
            return {}
        queries, values = np.concatenate(self._queries), np.concatenate(self._values)
        seen, weights = np.concatenate(self._seen), np.concatenate(self._weights)
        unscored = sum(self._unscored) / len(self._unscored)
        if distinct:
            values = values[np.unique(queries, return_index=True)[1]]
            weights = weights[np.unique(seen, return_index=True)[1]]
            unscored = len(weights) - len(values)
        self._queries, self._values, self._seen, self._weights, self._unscored = [], [], [], [], []
        summary = {
            "weight_mean": weights.mean(),
            "weight_min": weights.min(),
            "weight_max": weights.max(),
            "weight_ess": effective_sample_fraction(torch.from_numpy(weights)),
            "unscored_rows": unscored,
        }
        if self._weight_tokens:
            summary["weight_forward_tokens"] = np.mean(self._weight_tokens)
            self._weight_tokens = []
        if len(values):
            kl, nll, drift, loss = (column.mean() for column in values.T)
            summary |= {"kl": kl, "kl_max": values[:, 0].max(), "nll": nll, "nll_drift": drift, "loss": loss}
        return {name: float(value) for name, value in summary.items()}
