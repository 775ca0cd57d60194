"""Who scores a query in an optimizer step, and for how much of it."""

import numpy as np


def settle_owners(
    keys: np.ndarray, tokens: np.ndarray, rank: int, micro_batch: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Settle, for one rank, which rows score their query in an optimizer step and with what share.

    The penalty of a step is the mean of R̂ over its distinct queries, each counted once, whatever rows of it fell into the
    step and wherever they lie. Each rank that holds rows of a query scores it once, on one of them (the owner), and carries
    the share (rows of the query here) / (rows of it in the step), so that the shares of a query sum to 1.

    Which of its rows owns a query is free. Longest queries first, the owner is the row whose micro-batch has the fewest tokens
    to score so far: were it the first row, the first micro-batch would score most queries of the step and need the memory.

    Args:
        keys: (R, N) int64, the query of each of the N rows that each of the R ranks holds in this step.
        tokens: (R, N) scored tokens of each row's query, 0 or less for padding and for queries with no likelihood.
        rank: the rank to settle for.
        micro_batch: (N,) which of this rank's micro-batches each row is in. Default: all in one.

    Returns:
        owner: (N,) bool; share: (N,) float64, 0 where not owner; number of distinct scored queries in the step.
    """
    scored = tokens > 0
    queries, rows_in_step = np.unique(keys[scored], return_counts=True)
    owner = np.zeros(keys.shape[1], dtype=bool)
    share = np.zeros(keys.shape[1])
    if micro_batch is None:
        micro_batch = np.zeros(keys.shape[1], dtype=int)
    load = np.zeros(micro_batch.max(initial=0) + 1)
    here = np.flatnonzero(scored[rank])
    local, first, query_of = np.unique(keys[rank, here], return_index=True, return_inverse=True)
    for query in np.argsort(-tokens[rank, here[first]].astype(int), kind="stable"):
        rows = here[query_of == query]
        chosen = rows[np.argmin(load[micro_batch[rows]])]
        load[micro_batch[chosen]] += tokens[rank, chosen]
        owner[chosen] = True
        share[chosen] = len(rows) / rows_in_step[np.searchsorted(queries, local[query])]
    return owner, share, len(queries)
