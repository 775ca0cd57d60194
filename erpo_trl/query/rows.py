"""Rows of a data set on their way to the reference: what can be mapped, and token ids without an object a row."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import datasets
import numpy as np
import xxhash
from accelerate import PartialState
from datasets import Dataset

from .fingerprint import query_key

_ROWS_AT_A_TIME = 1000  # cast or tokenised together


class TokenRows:
    """Token ids of many rows at 4 bytes a token, instead of an array object each.

    Args:
        batches: of rows.

    Attributes:
        lengths: (N,) tokens of each row.
    """

    def __init__(self, batches: Iterable[Sequence[Sequence[int]]]):
        lengths, parts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)]
        for rows in batches:
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            parts.append(np.fromiter(chain.from_iterable(rows), np.int32, lengths[-1].sum()))
        self._ids, self.lengths = np.concatenate(parts), np.concatenate(lengths)
        self._starts = self.lengths.cumsum() - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        start = self._starts[row]
        return self._ids[start : start + self.lengths[row]]

    def keys(self) -> np.ndarray:
        """(N,) int64, the `query_key` of every row."""
        keys = np.empty(len(self), dtype=np.int64)
        for first in range(0, len(self), _ROWS_AT_A_TIME):
            # Cast many rows at once; a cast of each row would take longer than its hash
            ends = self.lengths[first : first + _ROWS_AT_A_TIME].cumsum()
            ids = self._ids[self._starts[first] : self._starts[first] + ends[-1]].astype(np.int64)
            for row, (start, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist()), start=first):
                keys[row] = query_key(ids[start:end])
        return keys


def require_mappable(dataset, reserved, column: str) -> None:
    """Raise, with what to do, for what cannot get the columns named in `reserved`, or has no `column` of prompts."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"DatasetMapper maps a datasets.Dataset, found {type(dataset).__name__}: map the splits of a DatasetDict one by "
            "one. A trainer takes a stream as it is and scores its rows as they arrive."
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "The data set has a transform (set_transform), which would hide the reference columns: apply it with "
            "dataset.map(...) first."
        )
    names = dataset.column_names
    if column not in names:
        raise ValueError(f"The data set has no column {column!r}; it has {names}.")
    taken = [name for name in reserved if name in names]
    if taken and len(taken) < len(reserved):
        raise ValueError(
            f"The data set has {', '.join(taken)} but not all of {', '.join(reserved)}: these names belong to "
            "DatasetMapper. Rename your column, or remove what is left of an earlier mapping."
        )
    if not len(dataset):
        raise ValueError("The data set has no rows.")


def tokenized(
    prompts: Dataset, column: str, tokenize: Callable[[list], list[Sequence[int]]]
) -> Iterator[list[Sequence[int]]]:
    """The token ids of a data set's prompts, a thousand rows at a time.

    Raises: ValueError that names the first row that cannot be tokenised.
    """
    for start in range(0, len(prompts), _ROWS_AT_A_TIME):
        batch = prompts[start : start + _ROWS_AT_A_TIME][column]
        try:
            rows = tokenize(batch)
        except Exception:
            _name_untokenisable_row(batch, start, tokenize)
            raise
        yield rows


def _name_untokenisable_row(batch: list, start: int, tokenize: Callable[[list], list[Sequence[int]]]) -> None:
    """Raise for the first prompt of `batch` that cannot be tokenised by itself."""
    for offset, prompt in enumerate(batch):
        try:
            tokenize([prompt])
        except Exception as error:
            raise ValueError(
                f"Row {start + offset} of the data set cannot be tokenised ({type(error).__name__}: {error}). "
                "Correct or remove it."
            ) from error


def collate_rows(collate: Callable[[list[dict]], list[dict]], rows: list[dict]) -> list[dict]:
    """What `collate` makes of a batch, with each row's log-probs and span as one array each.

    Every micro-batch brings the rows of a whole generation batch, and accelerate, which moves it to the device, would walk
    through each number of a list.
    """
    arrays = {"ref_query_logps": np.float32, "query_span": np.int64}
    return [
        row | {name: np.asarray(row[name], dtype) for name, dtype in arrays.items() if row.get(name) is not None}
        for row in collate(rows)
    ]


def attach_columns(
    dataset: Dataset,
    attach: Callable,
    added: dict,
    contents: Iterable[np.ndarray | str],
    description: str,
    shown: bool,
) -> Dataset:
    """`dataset.map(attach)` by batches with indices, made by one process and found in the cache by the others.

    Args:
        attach: (batch, rows) -> batch with the columns added, in the data set's format.
        added: name -> feature of those columns. Without declared features, a first batch of empty lists or of ints would fix
            a wrong type.
        contents: what decides the columns, which names the result in the cache.
        description: of the progress bar; shown: whether there is one.
    """
    name = xxhash.xxh3_64(dataset._fingerprint.encode())
    for part in contents:
        name.update(part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes())
    features = dataset.features.copy()
    features.update(added)
    with progress_bars(shown), PartialState().main_process_first():
        return dataset.map(
            attach,
            batched=True,
            with_indices=True,
            features=features,
            new_fingerprint=name.hexdigest(),
            desc=description,
        )


@contextlib.contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """`Dataset.map` has no switch of its own for its progress bar."""
    before = datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.enable_progress_bars()
