r"""Problems to train and evaluate on: local files, MATH levels 3 to 5, the embedded arithmetic set, the hub.

Every loader returns a `datasets.Dataset` with a `prompt` (chat messages, or a plain string), an `answer` (a string, or None
where there is none, for which the accuracy reward abstains) and whatever other columns its source has.
"""

import csv
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetsError

from erpo_trl.rewards import gold_text, last_boxed

logger = logging.getLogger(__name__)

MATH_PROMPT_SUFFIX = (
    "\n\nThink it through first, between <think> and </think>. After that, state the final answer in \\boxed{}."
)

MATH_HUB_ID = "DigitalLearningGmbH/MATH-lighteval"
MATH_HUB_ROWS = {"train": 7500, "test": 5000}
MATH500_HUB_ID = "HuggingFaceH4/MATH-500"
MATH500_ROWS = 500
MATH_LEVELS = (3, 4, 5)
# How many problems of these levels the ERPO paper trains on, of the 12,000 outside MATH-500.
PAPER_ROWS = 8523
# Data sets that go by a name of their own
NAMED = ARITHMETIC, MATH_3_5 = ("arithmetic", "math_3_5")

# A row as it was read: where it stands, for messages, and its fields.
Row = tuple[str, dict]


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        index = 0
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"line {number} (row {index})"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, {where}: not valid JSON ({error}). Put one JSON object on each line"
                ) from error
            yield where, _as_fields(fields, path, where)
            index += 1


def _read_json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}). For one object per line, name the file .jsonl") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: holds a {type(rows).__name__}; expected a list of objects, one per problem")
    for index, fields in enumerate(rows):
        yield f"row {index}", _as_fields(fields, path, f"row {index}")


def _as_fields(value, path: Path, where: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{path}, {where}: holds a {type(value).__name__}; expected an object with named fields")
    return value


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for index, fields in enumerate(reader):
            where = f"line {reader.line_num} (row {index})"
            if None in fields or None in fields.values():
                found = sum(value is not None for key, value in fields.items() if key is not None)
                found += len(fields.get(None, ()))
                raise ValueError(
                    f"{path}, {where}: {found} fields where the header has {len(reader.fieldnames)}. "
                    "Put fields that hold commas or line breaks in double quotes"
                )
            yield where, fields


def _read_parquet(path: Path) -> Iterator[Row]:
    for index, fields in enumerate(pq.read_table(path).to_pylist()):
        yield f"row {index}", fields


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a local file. Raises: FileNotFoundError, or ValueError that names the file and what is wrong with it."""
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown extension {path.suffix!r}; expected one of {', '.join(READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (looked for {path.resolve()})")
    try:
        rows = list(reader(path))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 at byte {error.start} ({error.reason}). Save the file as UTF-8"
        ) from error
    except (pa.ArrowInvalid, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix} ({error})") from error
    if not rows:
        raise ValueError(f"{path}: no rows. Give a file with at least one problem")
    return rows


def field_names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for _, fields in rows for name in fields))


def require_fields(rows: list[Row], source: str, needed: Iterable[str], advice: str = "") -> None:
    found = field_names(rows)
    for name in needed:
        if name not in found:
            raise ValueError(f"{source}: no column {name!r}; found {', '.join(map(repr, found))}. {advice}".rstrip())


def require_encodable(value, source: str, where: str, field: str) -> None:
    """Refuses text that no tokenizer takes: a lone surrogate, which JSON can spell and UTF-8 cannot."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{source}, {where}, field {field!r}: the lone surrogate {value[error.start]!a} at character "
                f"{error.start} cannot be encoded. Remove it, or write the whole character"
            ) from error
    elif isinstance(value, dict):
        for name, part in value.items():
            require_encodable(part, source, where, f"{field}.{name}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            require_encodable(part, source, where, field)


def is_chat(value) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(turn, dict) and isinstance(turn.get("content"), str) and "role" in turn for turn in value)
    )


def plain_turns(chat: list[dict], source: str, where: str, field: str) -> list[dict]:
    """Role and content of every turn, which is all that these loaders keep. Raises: ValueError for a turn with more to it,
    such as tool calls, that a chat template would have rendered.
    """
    for number, turn in enumerate(chat):
        more = [key for key, value in turn.items() if key not in ("role", "content") and value is not None]
        if more:
            raise ValueError(
                f"{source}, {where}, field {field!r}: turn {number} has {', '.join(map(repr, more))}, which would be lost. Remove "
                "it where it means nothing; else load the data with `datasets` and hand it to the trainer in Python"
            )
    return [{"role": turn["role"], "content": turn["content"]} for turn in chat]


def _prompt(value, suffix: str | None, system_prompt: str | None, conversational: bool) -> list[dict] | str:
    """A prompt from a problem: its text, or the chat messages that it already is."""
    suffix = suffix or ""
    if not conversational:
        return (f"{system_prompt}\n\n" if system_prompt else "") + value + suffix
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    turns[-1]["content"] += suffix
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + turns


def column_feature(name: str, values: list, source: str):
    """The type of a column by all of its values, so that leading Nones or whole numbers do not settle it."""
    try:
        kind = pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        raise ValueError(
            f"{source}: column {name!r} holds values of different types ({error}). Make them one type, or drop the column"
        ) from error
    if pa.types.is_null(kind):
        return Value("string")
    return Features.from_arrow_schema(pa.schema([(name, kind)]))[name]


def build_dataset(
    rows: list[Row],
    source: str,
    problem: str,
    answer: str,
    suffix: str | None,
    system_prompt: str | None,
    conversational: bool,
    needs_answer: bool = True,
) -> Dataset:
    """The dataset of checked rows; see `load_problems` for the arguments. `needs_answer`: refuse rows without that column."""
    advice = "Name the right ones with `problem` and `answer`, on the command line --problem_field and --answer_field"
    require_fields(rows, source, (problem, answer) if needs_answer else (problem,), advice)
    others = [name for name in field_names(rows) if name not in (problem, answer)]
    for taken in ("prompt", "answer"):
        if taken in others:
            raise ValueError(
                f"{source}: the column {taken!r} would be overwritten. Rename it, or name it with `problem` or `answer`"
            )
    prompts, answers = [], []
    for where, fields in rows:
        for name, value in fields.items():
            require_encodable(value, source, where, name)
        text = fields.get(problem)
        readable = isinstance(text, str) and text.strip() or (conversational and is_chat(text))
        if not readable:
            kind = "text or chat messages" if conversational else "text"
            raise ValueError(
                f"{source}, {where}, field {problem!r}: is {text!r:.80}; expected {kind}. Fill it in or drop the row"
            )
        if not isinstance(text, str):
            text = plain_turns(text, source, where, problem)
        prompts.append(_prompt(text, suffix, system_prompt, conversational))
        answers.append(gold_text(fields.get(answer)))
    missing = answers.count(None)
    if missing and needs_answer:
        logger.warning(
            "%s: %d of %d rows have no answer; the accuracy reward abstains on them", source, missing, len(rows)
        )
    columns = {name: [fields.get(name) for _, fields in rows] for name in others}
    turn = {"role": Value("string"), "content": Value("string")}
    features = {"prompt": List(turn) if conversational else Value("string"), "answer": Value("string")}
    features |= {name: column_feature(name, values, source) for name, values in columns.items()}
    return Dataset.from_dict({"prompt": prompts, "answer": answers, **columns}, features=Features(features))


def load_problems(
    path: str | Path,
    problem: str = "problem",
    answer: str = "answer",
    suffix: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = True,
) -> Dataset:
    """Problems of a local file.

    Args: path: a .jsonl, .json (a list of objects), .csv or .parquet file; problem, answer: the columns that hold them; a
    problem is text or chat messages; suffix: text put behind every problem, which should ask for the answer in `\\boxed{}`
    where the accuracy reward is to read it; system_prompt: text of a system turn before it;
    conversational: prompts are chat messages, else plain strings (with the system prompt as a first paragraph).
    Returns: columns `prompt`, `answer` (string: 142.0 is "142", a list is joined by ", ", a solution in GSM8K's manner is
    what follows its last `####`; None where empty, counted in one warning), and all others as they were.
    Raises: FileNotFoundError; ValueError that names the file, the row and the field.
    """
    return build_dataset(read_rows(path), str(path), problem, answer, suffix, system_prompt, conversational)


def load_from_hub(hub_id: str, split: str, revision: str | None, instead: str, config: str | None = None) -> list[Row]:
    try:
        dataset = load_dataset(hub_id, *([config] if config else []), split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"{hub_id}, split {split!r}: cannot be loaded from the hub ({type(error).__name__}: {error}). {instead}"
        ) from error
    return [(f"{split} row {index}", fields) for index, fields in enumerate(dataset)]


def _require_rows(rows: list[Row], expected: int, source: str) -> None:
    if len(rows) != expected:
        raise ValueError(
            f"{source}: {len(rows)} rows found, {expected} expected. Pin a `revision`, or give a local file"
        )


def _level(value) -> int | None:
    """The number of a difficulty: of 3 and of "Level 3" it is 3; None when there is none, as in "Level ?"."""
    digits = str(value).removeprefix("Level").strip()
    return int(digits) if digits.isdecimal() else None


def _same_text(text: str) -> str:
    return " ".join(text.split())


def load_math_levels_3_to_5(
    path: str | Path | None = None,
    revision: str | None = None,
    split: str | None = None,
    math500: bool | str | Path | None = None,
    suffix: str | None = MATH_PROMPT_SUFFIX,
    system_prompt: str | None = None,
    conversational: bool = True,
) -> Dataset:
    """The problems of levels 3, 4 and 5 of the MATH data set (Hendrycks et al., arXiv 2103.03874).

    The ERPO paper trains on 8,523 of these levels, out of the 12,000 problems outside MATH-500; that is `split="all"`.

    Args: path: a local file instead of the hub, with `problem`, `level`, and `solution` or `answer`; revision: commit or tag
    of the hub data set; split: "train" (default), "test" or "all", of the hub data set only; math500: leave out the
    problems of MATH-500, read from the hub (True) or from this file; default: as True for the hub's "test" and "all", not
    at all for its "train", which is disjoint, and for a local file; suffix, system_prompt, conversational: as in
    `load_problems`.
    Returns: `prompt`, `answer` (the last box of the solution, else the source's own), `level` (3, 4 or 5) and all other columns.
    Raises: FileNotFoundError; ValueError for missing fields or another number of rows than the data set has.
    """
    if path is not None:
        if split is not None or revision is not None:
            raise ValueError(
                "`split` and `revision` choose within the hub data set; leave them out with a local `path`"
            )
        rows, source = read_rows(path), str(path)
    else:
        split = split or "train"
        if split not in (*MATH_HUB_ROWS, "all"):
            raise ValueError(f"split is {split!r}; expected 'train', 'test' or 'all'")
        rows, source = [], MATH_HUB_ID
        for part in MATH_HUB_ROWS if split == "all" else (split,):
            read = load_from_hub(MATH_HUB_ID, part, revision, "Give a local file with `path`")
            _require_rows(read, MATH_HUB_ROWS[part], f"{MATH_HUB_ID}, split {part!r}")
            rows += read
    gold = "answer" if "answer" in field_names(rows) else "solution"
    require_fields(rows, source, ("problem", "level", gold), "MATH has 'problem', 'level' and 'solution'")

    excluded = _math500_texts(split in ("test", "all") if math500 is None else math500)
    kept, met = [], set()
    for where, fields in rows:
        text = _same_text(str(fields.get("problem")))
        if text in excluded:
            met.add(text)
        elif _level(fields.get("level")) in MATH_LEVELS:
            boxed = last_boxed(fields.get("solution") or "", written_solution=True)
            kept.append((where, {**fields, "answer": boxed or fields.get("answer"), "level": _level(fields["level"])}))
    if path is None and excluded and len(met) != len(excluded):
        raise ValueError(
            f"{source}: {len(met)} of the {len(excluded)} problems of MATH-500 found by their text; expected all of them. "
            "Pin a `revision`, or give local files with `path` and `math500`"
        )
    if not kept:
        levels = sorted({str(fields.get("level")) for _, fields in rows})
        raise ValueError(f"{source}: no problem of level 3, 4 or 5 is left; levels found: {', '.join(levels)}")
    logger.info("%s: %d problems of levels 3 to 5; the paper trains on %d", source, len(kept), PAPER_ROWS)
    return build_dataset(kept, source, "problem", "answer", suffix, system_prompt, conversational)


def _math500_texts(choice: bool | str | Path) -> set[str]:
    """The problem texts of MATH-500: none for False, the hub's for True, a local file's for its path."""
    if choice is False:
        return set()
    source = MATH500_HUB_ID if choice is True else str(choice)
    instead = "Give MATH-500 as a local file with `math500`, or keep its problems with math500=False"
    rows = load_from_hub(MATH500_HUB_ID, "test", None, instead) if choice is True else read_rows(choice)
    require_fields(rows, source, ("problem",))
    _require_rows(rows, MATH500_ROWS, source)
    return {_same_text(str(fields["problem"])) for _, fields in rows}


def load_arithmetic(
    split: str = "train",
    n: int = 1000,
    seed: int = 0,
    suffix: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = True,
) -> Dataset:
    """The embedded arithmetic problems, generated on the spot.

    Args: split: "train" or "test", which share no expression; n: how many, at least 1; seed: of the draw; suffix,
    system_prompt, conversational: as in `load_problems`.
    Returns: `prompt`, `answer` and `level` (1 to 5).
    Raises: ValueError.
    """
    from erpo_trl.demo.arithmetic import make_problems

    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1")
    rows = [(f"row {index}", fields) for index, fields in enumerate(make_problems(n, seed, split=split))]
    return build_dataset(
        rows, f"arithmetic, split {split!r}", "problem", "answer", suffix, system_prompt, conversational
    )


def resolve_dataset(name_or_path: str | Path, split: str = "train", revision: str | None = None, **options) -> Dataset:
    """A dataset by what a user writes on a command line.

    Args: name_or_path: "arithmetic", "math_3_5", a local file, or a hub id; a file or a hub data set needs a `problem` or
    `prompt` column, and an `answer`; split: of all but a local file, which has none; revision: of a hub data set;
    options: further arguments of the loader (`load_arithmetic`, `load_math_levels_3_to_5`, else `load_problems`; there
    `needs_answer=False` takes rows without answers, for a reward that reads none).
    Raises: FileNotFoundError; ValueError that says what was looked for and what was found.
    """
    name = str(name_or_path)
    if name == ARITHMETIC:
        return load_arithmetic(split=split, **options)
    if name == MATH_3_5:
        return load_math_levels_3_to_5(split=split, revision=revision, **options)
    if Path(name).is_file() or Path(name).suffix.lower() in READERS:
        rows, source = read_rows(name), name
    else:
        instead = f"Known names: {', '.join(NAMED)}; else give a local file or the id of a hub data set"
        rows, source = load_from_hub(name, split, revision, instead), name
    found = field_names(rows)
    if "problem" not in options:
        options["problem"] = "problem" if "problem" in found else "prompt"
        if options["problem"] not in found:
            raise ValueError(
                f"{source}: neither 'problem' nor 'prompt' among the columns {', '.join(map(repr, found))}. Name the right one with "
                "`problem`, on the command line --problem_field"
            )
    settings = {"answer": "answer", "suffix": None, "system_prompt": None, "conversational": True}
    if "answer" in options:  # asked for by name
        options["needs_answer"] = True
    return build_dataset(rows, source, **{**settings, **options})
