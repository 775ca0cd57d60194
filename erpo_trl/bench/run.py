"""`erpo-trl bench`: measure, print one table of ratios, and keep everything as JSON."""

import contextlib
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers.utils import logging

from .. import __version__
from ..cli import InputError, check_folder
from ..options import parse_options
from .config import SMOKE, BenchConfig, Dimensions, Shapes
from .evaluation import measure_evaluation
from .measure import Comparison, keep_freed_memory
from .positions import measure_positions
from .prefix import measure_prefix
from .scaling import measure_growth, measure_ranks, measure_rows
from .scoring import measure_memory, measure_scoring, measure_warm
from .startup import measure_startup
from .step import BASE, ERPO, RELEASE, StepShape, measure_step
from .summary import summary_table
from .workload import Workload, bare_lengths, built_model, mixed_lengths

_UNITS = {
    "s": (1e3, "ms", 1), "bytes": (2**-20, "MiB", 1), "FLOP": (1e-9, "GFLOP", 2), "tokens/s": (1, "tokens/s", 0),
    "samples/s": (1, "samples/s", 2), "forwards": (1, "", 0), "positions": (1, "", 0),
}  # fmt: skip

_SMALL_VOCABULARY = 1000


def measure(config: BenchConfig, folder: Path) -> Iterator[Comparison]:
    """Every comparison of a run, as it is done.

    Args: folder: for models, tables and what trainers write.
    """
    gpu = torch.cuda.is_available()
    shapes = config.resolve(gpu)
    work = Workload(folder, config.model, shapes.model, shapes.vocabularies[0], config.seed)
    # For what depends on rows and not on the model
    small = Workload(folder, config.model, SMOKE.model, _SMALL_VOCABULARY, config.seed)
    rounds = config.repetitions
    for part in config.parts:
        if part == "startup":
            yield measure_startup(rounds)
        elif part == "positions":
            for compact in (True, False) if not gpu else (False,):
                yield from measure_positions(work, _step(shapes, shapes.steps[0]), folder, compact)
        elif part == "step":
            for vocabulary in shapes.vocabularies if config.model is None else (len(work.tokenizer),):
                sized = Workload(folder, config.model, shapes.model, vocabulary, config.seed)
                for index, shape in enumerate(shapes.steps):
                    # As on a GPU, and, on another device, as it runs there: the same ratios for every shape
                    for compact in (False,) if gpu else (True, False) if not index or config.full else (True,):
                        yield from measure_step(sized, _step(shapes, shape), str(vocabulary), rounds, folder, compact)
            for vocabulary, dimensions in shapes.large:
                sized = Workload(folder, None, dimensions, vocabulary, config.seed)
                step = StepShape(*shapes.steps[0], queries=1)
                named = f"{vocabulary} with {_head_share(dimensions, vocabulary):.0%} of the weights in the head"
                # Each of these steps takes seconds, with 150 K and the release's scheme half a minute
                some, sides = max(1, rounds // 3), (BASE, ERPO) if vocabulary > 2**16 else (BASE, ERPO, RELEASE)
                yield from measure_step(sized, step, named, some, folder, compact=True, sides=sides)
        elif part == "shared_prefix":
            for shape in shapes.prefixes:
                yield from measure_prefix(work, _step(shapes, shape), rounds, folder)
        elif part == "scoring":
            for lengths in (mixed_lengths, bare_lengths):
                yield from measure_scoring(work, lengths(shapes.rows, shapes.longest, config.seed), rounds, folder)
            yield measure_warm(small, shapes.map_rows[1], rounds, folder)
            yield measure_memory(small, shapes.map_rows, folder)
        elif part == "scaling":
            yield from measure_growth(work, shapes.groups, shapes.prompts, rounds, folder)
            yield measure_rows(small, shapes.map_rows, folder)
            if not gpu or torch.cuda.device_count() > 1:
                yield measure_ranks(work, shapes.groups[0], shapes.prompts[0], rounds, folder)
        elif part == "evaluation":
            yield measure_evaluation(work, shapes.samples, shapes.new_tokens, shapes.longest, rounds)


def _head_share(dimensions: Dimensions, vocabulary: int) -> float:
    with torch.device("meta"):
        model = built_model(dimensions, vocabulary, seed=0)
    return model.get_output_embeddings().weight.numel() / sum(p.numel() for p in model.parameters())


def _step(shapes: Shapes, shape: tuple[int, int, int]) -> StepShape:
    return StepShape(*shape, queries=shapes.queries)


def machine() -> dict:
    """What the numbers were measured on and with."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "device": gpu or f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "erpo_trl": __version__,
            **{name: version(name) for name in ("torch", "trl", "transformers", "accelerate", "datasets")},
        },
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(comparisons: Sequence[Comparison]) -> str:
    """All comparisons as one Markdown table: median, ratio to the first side with its quartiles, target."""
    lines = ["| measured | side | median | ratio (quartiles) | target |", "|---|---|---|---|---|"]
    for comparison in comparisons:
        scale, unit, digits = _UNITS[comparison.unit]
        for index, (side, values) in enumerate(comparison.values.items()):
            median = f"{np.median(values) * scale:,.{digits}f} {unit}".strip()
            ratio, low, high = comparison.ratio(side)
            alone = ratio is None or comparison.counted or len(values) == 1
            spread = "" if alone else f" ({low:.2f}–{high:.2f})"
            shown = "" if ratio is None else f"{ratio:.3g}{spread}" if index else "1"
            target = "{} {:g}".format(*comparison.target[side]) if side in comparison.target else ""
            lines.append(f"| {comparison.name if not index else ''} | {side} | {median} | {shown} | {target} |")
    return "\n".join(lines)


def run(config: BenchConfig) -> dict:
    """Measure, print each comparison when it is done, and keep all in `bench.json`, `table.md` and `summary.md` in
    `config.output`.

    Returns: what `bench.json` holds.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    done: list[Comparison] = []
    begin = time.perf_counter()
    where = machine()
    try:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            for comparison in measure(config, Path(folder)):
                done.append(comparison)
                print("\n".join(table([comparison]).splitlines()[2:]), flush=True)
                # After each, so that a run that is stopped leaves what it has measured
                result = {
                    **where,
                    "seconds": time.perf_counter() - begin,
                    "config": {name: value for name, value in vars(config).items() if name != "steps"},
                    "comparisons": [comparison.summary() for comparison in done],
                }
                _write(output / "bench.json", json.dumps(result, indent=1))
                _write(output / "table.md", f"{heading(result)}\n\n{table(done)}\n")
                _write(output / "summary.md", f"{heading(result)}\n\n{summary_table(done)}\n")
    finally:
        torch.set_num_threads(threads)
    return result


def heading(result: dict) -> str:
    """One sentence on the machine, the date and the versions."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    load = "" if result["load"] is None else f", load {result['load']:.1f} at the start"
    kind = " Smoke run: the numbers mean nothing." if result["config"]["smoke"] else ""
    return (
        f"{result['device']}{load}; {result['date']}; {versions}; {result['config']['repetitions']} rounds, "
        f"{result['seconds'] / 60:.0f} minutes.{kind}"
    )


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and warnings of dozens of trainers."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    mapping = datasets.are_progress_bars_disabled()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if not mapping:
            datasets.enable_progress_bars()


def main(argv: Sequence[str]) -> None:
    """`erpo-trl bench`."""
    [config] = parse_options(argv, (BenchConfig,), "erpo-trl bench")
    check_folder(config.output, "--output")
    keep_freed_memory()
    try:
        result = run(config)
    except OSError as error:
        raise InputError(str(error)) from error
    except ValueError as error:
        raise InputError(f"not to be measured with these shapes, vocabularies or model: {error}") from error
    print(f"\n{heading(result)}\nKept in {os.path.abspath(config.output)}: bench.json, table.md, summary.md")
