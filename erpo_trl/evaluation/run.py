"""`erpo-trl eval`: benchmarks × temperatures × samples of one model, from a configuration to tables.

Under several processes (`torchrun`, `accelerate launch`) each draws its share of the batches and leaves them in the output
folder, which all must see; the first scores them. Nothing else passes between the processes but whether the folder is free, and
the date of a chat template that writes one.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import AutoConfig

from .._version import __version__
from ..cli import InputError, check_folder
from ..locking import FolderBusy, claimed
from ..query import clock
from .backends import Request, TransformersBackend
from .benchmarks import Benchmark, known_benchmarks, load_benchmark
from .config import EvalConfig
from .model_source import load_tokenizer, resolve_model
from .protocol import complete_table, drawn_table, make_requests, score_table, tokenize_prompts
from .report import plot_sweeps, read_values, shown_metrics, summarize, table, write_json
from .results import Pair, ResultFolder, digest, write_atomically
from .scoring import default_workers

# Settings that a sample depends on, besides the model, the prompts and the temperature
DRAW_SETTINGS = ("seed", "samples", "max_new_tokens", "backend", "tensor_parallel_size", "dtype")


def evaluate(config: EvalConfig | None = None, **settings) -> dict | None:
    """Draw, score and report; the Python twin of `erpo-trl eval`.

    Args: config: an [`EvalConfig`], or its fields as keywords: `evaluate(model="demo", output="runs/eval",
    benchmarks=["arithmetic"], temperatures=[0.1, 1.0], samples=8)`.
    Returns: what `metrics.json` holds, on the first process; None on the others. Also leaves samples.parquet, table.md and
    plots in `output`.
    Raises: ValueError or OSError that names what is wrong with the input.
    """
    if (config is None) != bool(settings):
        raise TypeError("give evaluate() either an EvalConfig or its fields as keywords")
    config = config or EvalConfig(**settings)
    check_folder(config.output, "output")
    # A process that is done early waits for the others to finish drawing, not for a time-out
    state = PartialState(cpu=not torch.accelerator.is_available(), **_unlimited())
    if config.backend == "vllm" and state.num_processes > 1:
        raise ValueError(
            f"backend 'vllm' runs in one process, which shares the model among GPUs by tensor_parallel_size; found {state.num_processes}"
        )
    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source)
    if config.chat_template_kwargs and tokenizer.chat_template is None:
        raise ValueError(f"chat_template_kwargs: the tokenizer of {config.model} has no chat template; leave them out")
    benchmarks = load_benchmarks(config, conversational=tokenizer.chat_template is not None)
    model_config = AutoConfig.from_pretrained(source.name, revision=source.revision)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)

    def make_backend(longest: int):
        if config.backend == "vllm":
            from .vllm_backend import VLLMBackend

            return VLLMBackend(
                source, config.tensor_parallel_size, config.dtype, longest, config.gpu_memory_utilization, config.seed
            )
        return TransformersBackend.load(source, tokenizer, config.dtype, config.batch_tokens, state.device)

    return run_protocol(config, source.record(), tokenizer, benchmarks, context, make_backend, state)


def _unlimited() -> dict:
    return {"timeout": timedelta(days=30)} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}


def load_benchmarks(config: EvalConfig, conversational: bool) -> list[Benchmark]:
    """The benchmarks and files that a configuration names."""
    benchmarks = []
    for path in config.file:
        if not Path(path).is_file():
            raise FileNotFoundError(f"file: no such file {path!r} (looked for {Path(path).resolve()})")
    for name in [*config.benchmarks, *config.file]:
        # The columns of a registered benchmark are known
        local = name in config.file or name.partition("@")[0] not in known_benchmarks()
        benchmarks.append(
            load_benchmark(
                name,
                problem=config.problem_field if local else None,
                answer=config.answer_field if local else None,
                suffix=config.prompt_suffix,
                system_prompt=config.system_prompt,
                conversational=conversational,
                max_rows=config.max_rows,
            )
        )
    names = [benchmark.name for benchmark in benchmarks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two benchmarks are called {', '.join(twice)}; name a file with NAME=FILE")
    return benchmarks


@dataclass
class _Task:
    """A pair with what drawing it takes."""

    pair: Pair
    benchmark: Benchmark
    prompt_ids: list[tuple[int, ...]]
    parts: list[Path] | None = None  # of all its batches, once planned

    def requests(self, config: EvalConfig, context: int | None) -> list[Request]:
        return make_requests(
            self.benchmark.name,
            self.prompt_ids,
            self.pair.temperature,
            config.samples,
            config.seed,
            config.max_new_tokens,
            context,
        )

    @property
    def drawn(self) -> bool:
        return self.parts is not None and all(path.is_file() for path in self.parts)


def run_protocol(
    config: EvalConfig,
    model: dict,
    tokenizer,
    benchmarks: Sequence[Benchmark],
    context: int | None,
    make_backend: Callable,
    state: PartialState,
) -> dict | None:
    """Everything after loading. Args: model: as recorded, `weights` naming its contents; context: of the model, in tokens;
    make_backend: from the longest sequence in tokens to a backend, called only if something is left to draw."""
    folder = ResultFolder(config.output)
    with _alone(folder, state):
        settings = {"weights": model["weights"], **{name: getattr(config, name) for name in DRAW_SETTINGS}}
        if config.chat_template_kwargs:  # left out, so that evaluations without any stay what they were
            settings["chat_template_kwargs"] = config.chat_template_kwargs
        run = digest(settings)
        chats = any(not isinstance(benchmark.dataset[0]["prompt"], str) for benchmark in benchmarks)
        template = _template_arguments(config, tokenizer, folder, state) if chats else {}
        tasks = []
        for benchmark in benchmarks:
            prompt_ids = tokenize_prompts(tokenizer, benchmark.dataset["prompt"][:], template)
            content = digest(prompt_ids), digest(benchmark.dataset["answer"][:])
            tasks += [
                _Task(Pair(benchmark.name, t, run, *content), benchmark, prompt_ids) for t in config.temperatures
            ]
        stored = folder.stored_pairs()
        # Pairs of earlier calls stay if they are of this model with these settings, and of these problems if those are known
        asked = {task.benchmark.name: (task.pair.prompts, task.pair.golds) for task in tasks}
        kept = [p for p in stored if p.run == run and asked.get(p.benchmark) in (None, (p.prompts, p.golds))]
        todo = [task for task in tasks if not folder.finished(task.pair)]
        there = folder.part_paths()
        if state.is_main_process:
            _announce(len(tasks), todo, len(stored) - len(kept))
        # All processes have seen the same folder before one of them changes it
        state.wait_for_everyone()

        start = time.perf_counter()
        if todo:
            longest = max(len(ids) for task in todo for ids in task.prompt_ids) + config.max_new_tokens
            backend = make_backend(longest if context is None else min(longest, context))
        planned = 0
        for task in todo:
            batches = backend.plan(task.requests(config, context))
            task.parts = [folder.part_path(task.pair, batch) for batch in batches]
            # Dealt over all pairs, so that processes are busy though a pair may be a single batch
            for index, (batch, path) in enumerate(zip(batches, task.parts), start=planned):
                if index % state.num_processes == state.process_index and path not in there:
                    drawn = drawn_table(task.benchmark.name, batch, backend.generate(batch), tokenizer)
                    folder.write_part(path, drawn)
            planned += len(batches)
            if state.is_main_process:
                for ready in [task for task in todo if task.drawn and not folder.finished(task.pair)]:
                    _finish(ready, folder, config, start)
        state.wait_for_everyone()

        metrics = None
        if state.is_main_process:
            for task in todo:
                if not folder.finished(task.pair):
                    _finish(task, folder, config, start)
            pairs = {(pair.benchmark, pair.temperature): pair for pair in [*kept, *(task.pair for task in tasks)]}
            names = list(dict.fromkeys(name for name, _ in pairs))
            folder.gather(sorted(pairs.values(), key=lambda pair: (names.index(pair.benchmark), pair.temperature)))
            metrics = _write_report(folder, config, model, benchmarks, state.num_processes)
            print(f"Written to {folder.path}: samples.parquet, metrics.json, table.md", flush=True)
        state.wait_for_everyone()
        return metrics


@contextlib.contextmanager
def _alone(folder: ResultFolder, state: PartialState) -> Iterator[None]:
    """The output folder to this call, whose first process holds it for all of them.

    Raises: ValueError, on every process, where another call is at work there: the first to be done would clear away what the other
    has drawn.
    """
    with contextlib.ExitStack() as held:
        refusal = [None]
        if state.is_main_process:
            try:
                held.enter_context(claimed(folder.path))
            except FolderBusy:
                refusal = [
                    f"output: another evaluation is at work in {folder.path}; give another --output, or wait until it is done"
                ]
        broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise ValueError(refusal[0])
        yield


def _template_arguments(config: EvalConfig, tokenizer, folder: ResultFolder, state: PartialState) -> dict:
    """What chats are rendered with. A template that writes the date is given that of the folder's first call: past midnight, and
    on a process that came later, prompts would be others than those that were drawn for."""
    given = config.chat_template_kwargs or {}
    template = tokenizer.get_chat_template(given.get("chat_template"))
    if "date_string" in given or not clock.asks_for_the_time(template):
        return given
    when = [folder.prompt_time() if state.is_main_process else None]
    broadcast_object_list(when)
    told = clock.at(template, when[0])
    if told is None:
        if state.is_main_process:
            print(
                "The chat template writes the date: continued on another day, this evaluation begins anew. Fix the date by "
                "chat_template_kwargs where the template takes one (Llama 3.2: date_string), or in the template"
            )
        return given
    return {**given, "chat_template": told}


def _announce(asked: int, todo: list[_Task], replaced: int) -> None:
    """Says what will be drawn and what will be replaced, before anything is."""
    if replaced:
        print(
            f"{replaced} (benchmark, temperature) pairs here are of another model, other settings or other problems: they "
            "will be replaced"
        )
    if len(todo) < asked:
        print(f"{asked - len(todo)} of {asked} (benchmark, temperature) pairs are there already")
    if any(task.pair.temperature == 0 for task in todo):
        print("T=0 is greedy decoding: drawn once, so Avg@k, Pass@k and Pass@1 are the same there")


def _finish(task: _Task, folder: ResultFolder, config: EvalConfig, start: float) -> None:
    """Scores a drawn pair and keeps it."""
    name, temperature, golds = task.benchmark.name, task.pair.temperature, task.benchmark.dataset["answer"][:]
    await_files(task.parts)
    drawn = complete_table(folder.read_parts(task.parts), name, len(golds), temperature, config.samples)
    scored = score_table(drawn, golds, config.scoring_workers or default_workers(), config.scoring_time_limit)
    folder.write_pair(task.pair, scored)
    right = sum(verdict == 1 for verdict in scored["verdict"].to_pylist())
    seconds = time.perf_counter() - start
    print(f"  {name}  T={temperature:g}  {right}/{len(scored)} samples right  {seconds:.0f} s", flush=True)


def await_files(paths: Sequence[Path], patience: float = 90.0) -> None:
    """Until all are there, for so many seconds: a network disk shows what another machine wrote after a while."""
    deadline = time.monotonic() + patience
    while not all(path.is_file() for path in paths) and time.monotonic() < deadline:
        time.sleep(1.0)


def _write_report(folder, config: EvalConfig, model: dict, benchmarks: Sequence[Benchmark], processes: int) -> dict:
    values, counts = read_values(folder, config.samples)
    summary = summarize(values, config.bootstrap)
    sources = {benchmark.name: benchmark.source for benchmark in benchmarks}
    metrics = {
        "model": model,
        "settings": asdict(config),
        "processes": processes,
        "versions": _versions(),
        "benchmarks": {
            name: {"source": sources.get(name, "an earlier call"), **counts[name], **entry}
            for name, entry in summary["benchmarks"].items()
        },
        "average": summary["average"],
    }
    write_json(folder.path / "metrics.json", metrics)
    text = table(metrics)
    write_atomically(folder.path / "table.md", lambda temporary: temporary.write_text(text, encoding="utf-8"))
    shown = shown_metrics(next(iter(next(iter(values.values())).values())))
    curves = {name: {"": entry["temperatures"]} for name, entry in metrics["benchmarks"].items()}
    for metric in shown:
        plot_sweeps(curves, metric, folder.path / f"{metric.replace('@', '_at_')}.png")
    return metrics


def _versions() -> dict[str, str]:
    found = {"erpo_trl": __version__}
    for name in ("torch", "transformers", "trl", "vllm", "math-verify"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str]) -> None:
    """`erpo-trl eval`."""
    from ..options import parse_options

    [config] = parse_options(argv, (EvalConfig,), "erpo-trl eval")
    try:
        metrics = evaluate(config)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if metrics is not None:
        print(f"\n{table(metrics)}")
