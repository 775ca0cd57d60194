"""Benchmarks by name, from the hub or a local file.

Every entry of the registry was read in public code; the columns and the number of rows that are found are checked when a
benchmark is loaded from the hub, so that a moved data set shows at once.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from ..data import (
    MATH_PROMPT_SUFFIX,
    READERS,
    Row,
    build_dataset,
    field_names,
    load_arithmetic,
    load_from_hub,
    read_rows,
    require_fields,
)
from ..rewards import score_answer


@dataclass(frozen=True)
class Source:
    """Where a benchmark lies on the hub, and which of its columns are which.

    Args: hub_id, config, split: of the data set; problem, answer: columns; rows: how many it has, each number allowed.
    """

    hub_id: str
    split: str
    problem: str
    answer: str
    rows: tuple[int, ...]
    config: str | None = None


BENCHMARKS: dict[str, Source] = {
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer", (30,)),
    "aime25": Source("math-ai/aime25", "test", "problem", "answer", (30,)),
    # The paper's 83 rows of AMC12; math-ai/amc23 has 40
    "amc": Source("AI-MO/aimo-validation-amc", "train", "problem", "answer", (83,)),
    "math500": Source("HuggingFaceH4/MATH-500", "test", "problem", "answer", (500,)),
    "minerva": Source("math-ai/minervamath", "test", "question", "answer", (272,)),
    "olympiadbench": Source("math-ai/olympiadbench", "test", "question", "final_answer", (674, 675)),
    "gsm8k": Source("openai/gsm8k", "test", "question", "answer", (1319,), config="main"),
}
# How many golds may be unreadable from the first on before the others are not tried
GOLDS_TRIED = 100
# Problems of the embedded arithmetic set; its test split has no end of them
ARITHMETIC_ROWS = 200


@dataclass(frozen=True)
class Benchmark:
    """A fixed list of problems.

    Args: name: in file names, tables and metrics; dataset: columns `prompt` and `answer`, a row per problem; source: where it
    came from, for the record.
    """

    name: str
    dataset: Dataset
    source: str = "given as a data set"


def known_benchmarks() -> list[str]:
    """Names that `load_benchmark` takes besides those of files."""
    return [*BENCHMARKS, "arithmetic"]


def load_benchmark(
    name: str,
    problem: str | None = None,
    answer: str | None = None,
    suffix: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = True,
    max_rows: int | None = None,
) -> Benchmark:
    """A benchmark by what a user writes.

    Args:
        name: a name of `known_benchmarks()`, `name@revision` (commit or tag on the hub), `name=file` (a local file in the
            hub's place) or a local file, whose stem becomes the name.
        problem, answer: columns of a local file. Default: those of the hub data set where the file has them, else `problem`
            (or `prompt`) and `answer`.
        suffix: text put behind every problem. Default: for the math benchmarks the one that training on MATH uses, for
            arithmetic and own files none.
        system_prompt, conversational: as in `load_problems`.
        max_rows: keep only the first rows.

    Raises: FileNotFoundError; ValueError that says what was looked for and what was found, or that no answer can be read.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; expected at least 1")
    written = name
    if Path(written).is_file() and Path(written).suffix.lower() in READERS:
        # Whatever its folders are called: "split=test" is a common name
        path, name, revision = written, Path(written).stem, ""
    else:
        name, _, path = written.partition("=")
        name, _, revision = name.partition("@")
    if name not in known_benchmarks() and not path:
        if Path(written).suffix.lower() not in READERS:
            raise ValueError(
                f"unknown benchmark {written!r}; known: {', '.join(known_benchmarks())}, or give a local file "
                f"({', '.join(READERS)})"
            )
        path, name, revision = written, Path(written).stem, ""
    if revision and (path or name not in BENCHMARKS):
        raise ValueError(f"benchmark {written!r}: only a hub data set has a revision")
    options = {"system_prompt": system_prompt, "conversational": conversational}
    if name == "arithmetic" and not path:
        dataset = load_arithmetic("test", n=max_rows or ARITHMETIC_ROWS, suffix=suffix, **options)
        return Benchmark(name, dataset, "embedded, split 'test'")

    known = BENCHMARKS.get(name)
    rows, source = (read_rows(path), path) if path else _from_hub(name, known, revision)
    found = field_names(rows)
    problem = problem or _first([known.problem] if known else [], ["problem", "prompt"], found)
    answer = answer or _first([known.answer] if known else [], ["answer"], found)
    require_fields(rows, source, (problem, answer), "Name the right ones with problem_field and answer_field")
    rows = [(where, {problem: row.get(problem), answer: row.get(answer)}) for where, row in rows[:max_rows]]
    if suffix is None and known:
        suffix = MATH_PROMPT_SUFFIX
    dataset = build_dataset(rows, source, problem, answer, suffix, **options)
    _require_readable(dataset["answer"][:GOLDS_TRIED], source, answer)
    return Benchmark(name, dataset, source)


def _require_readable(golds: list[str | None], source: str, column: str) -> None:
    """Refuses golds of which none can be read: every sample would count as wrong. Tries them until one can."""
    if all(score_answer(gold, "") is None for gold in golds):
        raise ValueError(
            f"{source}, column {column!r}: none of the first {len(golds)} answers can be read as a math answer; the first is "
            f"{golds[0]!r:.80}. Name the column of the answers alone with answer_field"
        )


def _from_hub(name: str, known: Source, revision: str) -> tuple[list[Row], str]:
    source = f"{known.hub_id}, split {known.split!r}" + (f", revision {revision}" if revision else "")
    rows = load_from_hub(
        known.hub_id, known.split, revision or None, f"Give a local file with {name}=FILE", known.config
    )
    if len(rows) not in known.rows:
        raise ValueError(
            f"{name} ({source}): {len(rows)} rows found, {' or '.join(map(str, known.rows))} expected. Pin a revision with "
            f"{name}@REVISION, or give a local file with {name}=FILE"
        )
    return rows, source


def _first(registered: list[str], usual: list[str], found: list[str]) -> str:
    """The first of the names that was found; the first of all where none was, for the error to name."""
    names = [*registered, *usual]
    return next((name for name in names if name in found), names[0])
