"""Preference pairs to train on with DPO: a local file or a hub data set."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, Features, List, Value

from .data import (
    READERS,
    Row,
    column_feature,
    field_names,
    is_chat,
    load_from_hub,
    plain_turns,
    read_rows,
    require_encodable,
    require_fields,
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
        rows = read_rows(name)
    else:
        rows = load_from_hub(name, split, revision, "Give a local file or the id of a hub data set")
    require_fields(rows, name, ("chosen", "rejected"), "Preference pairs need both, and a 'prompt'")
    found = field_names(rows)
    columns = [column for column in ("prompt", "chosen", "rejected") if column in found]
    chats = is_chat(rows[0][1].get("chosen"))
    for row in rows:
        _check_pair(row, name, columns, chats)
    features = {column: List(_TURN) if chats else Value("string") for column in columns}
    values = {column: [fields.get(column) for _, fields in rows] for column in found}
    if chats:
        values |= {
            column: [plain_turns(fields[column], name, where, column) for where, fields in rows] for column in columns
        }
    features |= {column: column_feature(column, values[column], name) for column in found if column not in columns}
    return Dataset.from_dict(values, features=Features({column: features[column] for column in values}))


def _check_pair(row: Row, source: str, columns: Sequence[str], chats: bool) -> None:
    where, fields = row
    for column in columns:
        value = fields.get(column)
        require_encodable(value, source, where, column)
        if not (is_chat(value) if chats else isinstance(value, str) and value.strip()):
            kind = "chat messages" if chats else "text"
            raise ValueError(
                f"{source}, {where}, field {column!r}: is {value!r:.80}; expected {kind}, as the first row's 'chosen' is. Fill it "
                "in or drop the row"
            )
