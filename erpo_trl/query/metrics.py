"""Query metrics of optimizer steps and evaluations, averaged by sums and counts over ranks and accumulation."""

import numpy as np
import torch

from .weights import effective_sample_fraction


class QueryMetrics:
    """Statistics of the queries seen since the last summary, each query of a step counted once.

    A step is opened with the layout of its rows, fed one (B, 6) tensor per micro-batch through `pending` and closed with
    all ranks' rows together.
    """

    def __init__(self):
        self.pending: list[torch.Tensor] = []  # columns: owner, R̂, NLL, NLL drift, penalty, weight
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
        """End a step with (R, N, 6) rows in the layout given to `open`; returns the mean R̂ of its queries, if any."""
        self.pending = []
        owner = rows[..., 0] > 0
        # Ranks that share a query score it once each, with the same result up to rounding
        distinct, first = np.unique(self.keys[owner], return_index=True)
        self._queries.append(distinct)
        self._values.append(rows[owner][first, 1:5].astype(np.float64))
        real = self._scored >= 0
        seen, first = np.unique(self.keys[real], return_index=True)
        self._seen.append(seen)
        self._weights.append(rows[..., 5][real][first].astype(np.float64))
        self._unscored.append(int((self._scored == 0).sum()))
        return float(self._values[-1][:, 0].mean()) if len(distinct) else None

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
