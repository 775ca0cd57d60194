"""The output folder: parts of what is being drawn, finished pairs, and the samples of all of them.

    DIR/samples.parquet         every sample, one or more row groups per (benchmark, temperature)
    DIR/metrics.json, table.md, *.png
    DIR/work/PAIR.parquet       a finished pair, until samples.parquet holds it
    DIR/work/PAIR/BATCH.parquet a drawn batch, until its pair is finished
    DIR/lock                    held by the call that is at work there
    DIR/prompt_time.txt         when prompts were first rendered, where the chat template writes the date

Every file is written under another name first, so whatever is there is whole. The name of a pair holds a digest of all that
its samples depend on, the name of a batch one of its requests: what was drawn for the same is found again, by any number of
processes, and nothing else is.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from .backends import Request
from .protocol import DRAWN, SCORED

METADATA = b"erpo_trl"


@dataclass(frozen=True)
class Pair:
    """A benchmark at a temperature, and what its samples depend on.

    Args: run: digest of model and settings; prompts: digest of the prompts' token ids; golds: digest of the gold answers.
    """

    benchmark: str
    temperature: float
    run: str
    prompts: str
    golds: str

    @property
    def slug(self) -> str:
        """A file name."""
        name = re.sub(r"[^\w.-]", "_", self.benchmark)
        return f"{name}-T{self.temperature:g}-{digest(asdict(self))}"


def digest(value) -> str:
    """16 hex digits that name a JSON-able value."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def write_atomically(path: Path, write) -> None:
    """Calls `write` with a temporary path beside `path`, then moves it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class ResultFolder:
    """Args: path: the output folder, made if need be."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.work = self.path / "work"
        self.samples = self.path / "samples.parquet"
        self.path.mkdir(parents=True, exist_ok=True)

    def prompt_time(self) -> datetime:
        """When prompts were first rendered for this folder: a template that writes the date is told this one for good, since
        prompts with another date are others. Raises: ValueError for a file that holds no time."""
        path = self.path / "prompt_time.txt"
        if not path.is_file():
            now = datetime.now().isoformat(timespec="seconds")
            write_atomically(path, lambda temporary: temporary.write_text(now + "\n"))
        try:
            return datetime.fromisoformat(path.read_text(encoding="utf-8").strip())
        except ValueError as error:
            raise ValueError(f"{path} holds no time ({error}); delete it to begin with today's date") from error

    def stored_pairs(self) -> list[Pair]:
        """The pairs that samples.parquet holds."""
        if not self.samples.is_file():
            return []
        with _naming(self.samples):
            found = pq.read_schema(self.samples).metadata or {}
        try:
            return [Pair(**fields) for fields in json.loads(found[METADATA])]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.samples} was not written by this version of erpo-trl eval; give another output folder"
            ) from error

    def finished(self, pair: Pair) -> bool:
        """Whether every sample of the pair is drawn and scored."""
        return self._pair_path(pair).is_file() or pair in self.stored_pairs()

    def _pair_path(self, pair: Pair) -> Path:
        return self.work / f"{pair.slug}.parquet"

    def part_path(self, pair: Pair, batch: Sequence[Request]) -> Path:
        """Where a drawn batch lies."""
        name = digest([[request.row, request.sample] for request in batch])
        return self.work / pair.slug / f"{name}.parquet"

    def part_paths(self) -> set[Path]:
        """The drawn batches that are there."""
        return set(self.work.glob("*/*.parquet"))

    def write_part(self, path: Path, drawn: pa.Table) -> None:
        write_atomically(path, lambda temporary: pq.write_table(drawn, temporary))

    def read_parts(self, paths: Iterable[Path]) -> pa.Table:
        """The drawn batches together."""
        return pa.concat_tables([DRAWN.empty_table(), *(pq.read_table(path, schema=DRAWN) for path in paths)])

    def write_pair(self, pair: Pair, scored: pa.Table) -> None:
        """Keeps a finished pair and lets go of its parts."""
        write_atomically(self._pair_path(pair), lambda temporary: pq.write_table(scored, temporary))
        shutil.rmtree(self.work / pair.slug, ignore_errors=True)

    def gather(self, pairs: Sequence[Pair]) -> None:
        """Makes samples.parquet of exactly these finished pairs, in their order, and clears the work folder."""
        stored = self.stored_pairs()
        if stored == list(pairs):
            shutil.rmtree(self.work, ignore_errors=True)
            return

        def write(temporary: Path) -> None:
            metadata = {METADATA: json.dumps([asdict(pair) for pair in pairs]).encode()}
            with pq.ParquetWriter(temporary, SCORED.with_metadata(metadata)) as writer:
                for pair in pairs:
                    fresh = self._pair_path(pair)
                    table = pq.read_table(fresh, schema=SCORED) if fresh.is_file() else read_pair(self.samples, pair)
                    writer.write_table(table.replace_schema_metadata(metadata))

        write_atomically(self.samples, write)
        shutil.rmtree(self.work, ignore_errors=True)


def read_pair(samples: Path, pair: Pair, columns: Sequence[str] | None = None) -> pa.Table:
    """The samples of one pair, by row and sample."""
    chosen = [("benchmark", "=", pair.benchmark), ("temperature", "=", pair.temperature)]
    with _naming(samples):
        return pq.read_table(samples, columns=columns, filters=chosen)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """pyarrow's errors about a broken file do not name it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); if it is broken, delete it and run erpo-trl eval again, into that folder"
        ) from error
