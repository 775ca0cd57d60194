"""Who scores a query in an optimizer step, and for how much of it."""

import numpy as np


def settle_owners(keys: np.ndarray, scored: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Settle, for one rank, which rows score their query in an optimizer step and with what share.

    The penalty of a step is the mean of R̂ over its distinct queries, each counted once, whatever rows of it fell into the
    step and wherever they lie. Each rank that holds rows of a query scores it once, on the first of them (the owner), and
    carries the share (rows of the query here) / (rows of it in the step), so that the shares of a query sum to 1.

    Args:
        keys: (R, N) int64, the query of each of the N rows that each of the R ranks holds in this step.
        scored: (R, N) bool, False for padding and for queries with no likelihood.
        rank: the rank to settle for.

    Returns:
        owner: (N,) bool; share: (N,) float64, 0 where not owner; number of distinct scored queries in the step.
    """
    queries, rows_in_step = np.unique(keys[scored], return_counts=True)
    owner = np.zeros(keys.shape[1], dtype=bool)
    share = np.zeros(keys.shape[1])
    here = np.flatnonzero(scored[rank])
    if here.size:
        local, first, rows_here = np.unique(keys[rank, here], return_index=True, return_counts=True)
        owner[here[first]] = True
        share[here[first]] = rows_here / rows_in_step[np.searchsorted(queries, local)]
    return owner, share, len(queries)
