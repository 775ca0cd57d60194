"""Reference columns of many rows at a time, as Arrow arrays: a Python object a log-prob would cost more than its forward."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, List, Value

from .fingerprint import row_fingerprint
from .rows import TokenRows
from .span import scored_in_span
from .table import ReferenceTable

_ROWS_PER_CALL = 1000
# The columns a mapped data set carries, beside its own
REFERENCE_FEATURES = {
    "ref_query_logps": List(Value("float32")),  # one per token but the first, nats, whatever the span
    "query_span": List(Value("int32")),  # start, end of each stretch of tokens that count, flat
    "ref_query_nll": Value("float32"),  # minus the sum over these tokens
    "query_weight": Value("float32"),
    "query_fingerprint": Value("string"),  # reference and ids that the row was scored with
}
_LOGPS = pa.list_(pa.float32())


def rows_of_reference(dataset: Dataset, reference: str, keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which rows of a mapped data set carry columns that were made under `reference` from the ids they have now.

    Args:
        dataset: with the reference columns.
        reference: fingerprint.
        keys, lengths: (N,) query key and number of tokens of each row.

    Returns:
        (N,) bool.
    """
    columns = dataset.select_columns(["query_fingerprint", "ref_query_logps"]).with_format("arrow")
    known = np.zeros(len(keys), dtype=bool)
    for rows in blocks(len(keys)):
        batch = columns[rows]
        # -1 for a row without log-probs
        counts = pc.fill_null(pc.list_value_length(batch["ref_query_logps"]), -1).to_numpy()
        names = [row_fingerprint(reference, key) for key in keys[rows].tolist()]
        same = [found == name for found, name in zip(batch["query_fingerprint"].to_pylist(), names)]
        known[rows] = np.array(same) & (counts == lengths[rows] - 1)
    return known


class RowLogps:
    """Log-probs of rows by their index, from the table or from the data set's own columns.

    Args:
        dataset: unformatted.
        table: holds every query that is in no column.
        keys: (N,) query key of each row; known: (N,) bool, rows whose own column holds; scorable: (N,) bool, rows that have
            a likelihood.
    """

    def __init__(
        self, dataset: Dataset, table: ReferenceTable, keys: np.ndarray, known: np.ndarray, scorable: np.ndarray
    ):
        self._table, self._keys, self._scorable = table, keys, scorable
        # The row of the data set whose column holds a row's log-probs, one of the same ids; -1 for the table
        self._source = np.full(len(keys), -1)
        if known.any():
            self._column = dataset.select_columns("ref_query_logps").with_format("arrow")
            held, first = np.unique(keys[known], return_index=True)
            at = np.searchsorted(held, keys).clip(max=len(held) - 1)
            self._source = np.where(held[at] == keys, np.flatnonzero(known)[first][at], -1)

    def __call__(self, rows: np.ndarray) -> pa.ListArray:
        """One list of float32 for each of `rows`, nats; an empty one without likelihood."""
        mute = ~self._scorable[rows]
        stored = ~mute & (self._source[rows] < 0)
        carried = ~mute & ~stored
        parts = [pa.array([[]] * int(mute.sum()), _LOGPS), self._table.take(self._keys[rows[stored]])]
        if carried.any():
            lists = self._column[self._source[rows[carried]].tolist()]["ref_query_logps"]
            parts += [chunk.cast(_LOGPS) for chunk in lists.chunks]
        order = np.concatenate([np.flatnonzero(part) for part in (mute, stored, carried)])
        return pa.concat_arrays(parts).take(pa.array(np.argsort(order)))

    def likelihoods(self, spans: TokenRows) -> tuple[np.ndarray, np.ndarray]:
        """(N,) float64 NLL in nats and (N,) number of the scored tokens in each row's span; 0 and 0 without likelihood.

        Args: spans: (N,) flat starts and ends of stretches of token positions.
        """
        nll, tokens = np.zeros(len(self._keys)), np.zeros(len(self._keys), dtype=np.int64)
        for rows in blocks(len(nll)):
            lists = self(np.arange(rows.start, rows.stop))
            lengths = lists.value_lengths().to_numpy()
            filled = lengths > 0
            if not filled.any():
                continue
            counted = np.concatenate(
                [scored_in_span(spans[rows.start + row], lengths[row] + 1) for row in np.flatnonzero(filled)]
            )
            values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
            starts, at = (lengths.cumsum() - lengths)[filled], rows.start + np.flatnonzero(filled)
            nll[at] = abs(np.add.reduceat(np.where(counted, values, 0.0), starts))
            tokens[at] = np.add.reduceat(counted.astype(np.int64), starts)
        return nll, tokens


def blocks(rows: int) -> Iterator[slice]:
    """Slices that cover so many rows."""
    return (slice(start, min(start + _ROWS_PER_CALL, rows)) for start in range(0, rows, _ROWS_PER_CALL))


def with_columns(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    """A table with columns added, or replaced where it has them."""
    for name, values in columns.items():
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, values)
        else:
            table = table.append_column(name, values)
    return table


def carries_columns(dataset) -> bool:
    """Whether a stream was mapped beforehand, as its first row tells."""
    return isinstance(dataset, IterableDataset) and set(REFERENCE_FEATURES) <= set(next(iter(dataset), {}))
