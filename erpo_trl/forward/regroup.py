"""Micro-batches of one optimizer step, cut so that the rows of a query lie together."""

import torch
from torch import Tensor


def order_by_query(keys: Tensor) -> Tensor:
    """(N,) permutation that brings equal keys together, queries and their rows in the order they had.

    A step of Q queries in M micro-batches then holds at most Q + M - 1 (query, micro-batch) pairs.
    """
    _, query = torch.unique(keys, return_inverse=True)
    rows = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(rows, len(keys)).scatter_reduce(0, query, rows, "amin")
    return torch.argsort(first[query], stable=True)


def regroup(batches: list[dict], name: str) -> list[dict]:
    """The same rows in as many micro-batches of the same sizes, those of a query next to each other.

    Args:
        batches: micro-batches cut from one batch: tensors have a row per entry or no dimension, lists an item per row.
        name: the column that says which query a row is of.
    """
    sizes = [len(batch[name]) for batch in batches]
    order = order_by_query(torch.cat([batch[name] for batch in batches]))
    parts = order.split(sizes)
    result: list[dict] = [{} for _ in batches]
    for column, value in batches[0].items():
        of_all = [batch[column] for batch in batches]
        if isinstance(value, Tensor) and value.ndim > 0:
            whole = torch.cat(of_all)
            pieces = [whole[part] for part in parts]
        elif isinstance(value, list):
            items = [item for batch in of_all for item in batch]
            pieces = [[items[i] for i in part.tolist()] for part in parts]
        else:  # one value for the whole batch
            pieces = of_all
        for batch, piece in zip(result, pieces):
            batch[column] = piece
    return result
