"""The reference table on disk: one folder per reference, append-only Arrow parts, each written whole or not at all."""

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from transformers.utils import logging

logger = logging.get_logger(__name__)

SCHEMA = pa.schema([("query_key", pa.int64()), ("ref_query_logps", pa.list_(pa.float32()))])
_NO_LISTS = pa.array([], pa.list_(pa.float32()))


class ReferenceTable:
    """Log-probs of queries under one reference, by query key.

    Parts are memory-mapped, so memory grows with the number of queries (16 bytes each), not with their tokens. Several
    processes may add parts at once; `refresh` makes those of the others visible.

    Args:
        folder: where the parts lie; created when first written to.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._names: set[str] = set()
        self._parts: list[pa.Array] = []
        self._keys = np.empty(0, dtype=np.int64)  # sorted
        self._places = np.empty((0, 2), dtype=np.int64)  # (part, row) of each key
        self.refresh()

    def refresh(self) -> None:
        """Index the parts that appeared on disk since the last look."""
        keys, places = [self._keys], [self._places]
        for path in sorted(self.folder.glob("part-*.arrow")):
            if path.name in self._names:
                continue
            self._names.add(path.name)
            try:
                with pa.memory_map(str(path)) as source:
                    part = pa.ipc.open_file(source).read_all().cast(SCHEMA)
            except (pa.ArrowException, ValueError, KeyError, OSError) as error:
                # Parts appear by rename only, so this is damage from outside; its queries are simply not in the table
                logger.warning(f"Reference table part {path} cannot be read and is left out ({error}). Delete it.")
                continue
            keys.append(part["query_key"].to_numpy())
            places.append(np.stack([np.full(len(part), len(self._parts)), np.arange(len(part))], axis=1))
            # A part is one chunk, as `add` writes it; combining would copy it out of the mapped file
            column = part["ref_query_logps"]
            self._parts.append(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
        self._keys, first = np.unique(np.concatenate(keys), return_index=True)
        self._places = np.concatenate(places)[first]

    def __len__(self) -> int:
        return len(self._keys)

    def _find(self, keys) -> tuple[np.ndarray, np.ndarray]:
        """Positions of `keys` in the sorted index, and which of them are there."""
        keys = np.asarray(keys, dtype=np.int64)
        at = np.searchsorted(self._keys, keys)
        inside = at < len(self._keys)
        found = np.zeros(len(keys), dtype=bool)
        found[inside] = self._keys[at[inside]] == keys[inside]
        return at, found

    def contains(self, keys: Sequence[int]) -> np.ndarray:
        """(N,) bool: which keys the table holds."""
        return self._find(keys)[1]

    def take(self, keys: Sequence[int]) -> pa.ListArray:
        """(N,) lists of float32 log-probs of queries, nats, in the order of `keys`; raises KeyError if one is not there."""
        at, found = self._find(keys)
        if not found.all():
            raise KeyError(int(np.asarray(keys)[~found][0]))
        part, row = self._places[at].T
        order = np.argsort(part, kind="stable")
        pieces = [self._parts[index].take(pa.array(row[part == index])) for index in np.unique(part)]
        # Parts one after another, then back into the order asked for
        return pa.concat_arrays([_NO_LISTS, *pieces]).take(pa.array(np.argsort(order)))

    def all_nlls(self) -> np.ndarray:
        """(N,) float64 NLL of every query in the table, nats, in no order."""
        return np.array([-row.values.to_numpy().sum(dtype=np.float64) for row in self.take(self._keys)])

    def add(self, keys: Sequence[int], logps: Sequence[np.ndarray]) -> None:
        """Write one part, atomically, and index it."""
        self._make_folder()
        part = pa.table([pa.array(keys, pa.int64()), pa.array(logps, pa.list_(pa.float32()))], schema=SCHEMA)
        name = f"{uuid.uuid4().hex}.arrow"
        unfinished = self.folder / f".unfinished-{name}"
        try:
            with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
                writer.write_table(part)
            os.replace(unfinished, self.folder / f"part-{name}")
        finally:
            unfinished.unlink(missing_ok=True)
        self.refresh()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"The reference table cannot be written to {self.folder}; set reference_cache_dir ({error})."
            ) from error

    def describe(self, settings: dict) -> None:
        """Write `reference.json`, which says what the fingerprint in the folder's name stands for."""
        self._make_folder()
        unfinished = self.folder / f".unfinished-{uuid.uuid4().hex}.json"
        unfinished.write_text(json.dumps(settings, indent=1, sort_keys=True, default=str))
        os.replace(unfinished, self.folder / "reference.json")
