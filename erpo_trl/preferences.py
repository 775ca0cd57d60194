"""Preference pairs to train on with DPO: a local file or a hub data set."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, Features, List, Value

from .data import (
    READERS,
    Row,
    _column_feature,
    _field_names,
    _is_chat,
    _load_from_hub,
    _read,
    _require_encodable,
    _require_fields,
)

_TURN = {"role": Value("string"), "content": Value("string")}


def load_preferences(name_or_path: str | Path, split: str = "train", revision: str | None = None) -> Dataset:
    """Preference pairs in the columns that TRL's DPOTrainer reads.

    Args: name_or_path: a .jsonl, .json (a list of objects), .csv or .parquet file, or a hub id; split, revision: of a hub
    data set.
    Returns: `chosen`, `rejected`, `prompt` where the source has it (without it, TRL takes what the two begin with in common),
    each text or chat messages, and all other columns as they were.
    Raises: FileNotFoundError; ValueError that names the source, the row and the field.
    """
    name = str(name_or_path)
    if Path(name).is_file() or Path(name).suffix.lower() in READERS:
        rows = _read(name)
    else:
        rows = _load_from_hub(name, split, revision, "Give a local file or the id of a hub data set")
    _require_fields(rows, name, ("chosen", "rejected"), "Preference pairs need both, and a 'prompt'")
    found = _field_names(rows)
    columns = [column for column in ("prompt", "chosen", "rejected") if column in found]
    chats = _is_chat(rows[0][1].get("chosen"))
    for row in rows:
        _check_pair(row, name, columns, chats)
    features = {column: List(_TURN) if chats else Value("string") for column in columns}
    values = {column: [fields.get(column) for _, fields in rows] for column in found}
    if chats:
        values |= {column: [[_turn(turn) for turn in chat] for chat in values[column]] for column in columns}
    features |= {column: _column_feature(column, values[column], name) for column in found if column not in columns}
    return Dataset.from_dict(values, features=Features({column: features[column] for column in values}))


def _check_pair(row: Row, source: str, columns: Sequence[str], chats: bool) -> None:
    where, fields = row
    for column in columns:
        value = fields.get(column)
        _require_encodable(value, source, where, column)
        if not (_is_chat(value) if chats else isinstance(value, str) and value.strip()):
            kind = "chat messages" if chats else "text"
            raise ValueError(
                f"{source}, {where}, field {column!r}: is {value!r:.80}; expected {kind}, as the first row's 'chosen' is. Fill it "
                "in or drop the row"
            )


def _turn(turn: dict) -> dict:
    return {"role": turn["role"], "content": turn["content"]}
