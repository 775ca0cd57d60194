"""EvalConfig: everything an evaluation depends on. Every default stands here."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from ..rewards import TIME_LIMIT_S

BACKENDS = ("transformers", "vllm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Above it every model draws noise; a larger number is a slip, such as YAML's reading of 1:2:0.1 as base 60
HIGHEST_TEMPERATURE = 10


def parse_temperatures(written: str | float | Iterable[str | float]) -> list[float]:
    """Temperatures in rising order, each once.

    Args: written: numbers and ranges `first:last:step`, both ends included, in a list or in one text with blanks between.
    Returns: e.g. 0.1:0.3:0.1 and 1.2 -> [0.1, 0.2, 0.3, 1.2]. Steps are decimal, so that 0.3 is 0.3.
    """
    parts = [written] if isinstance(written, (str, int, float)) else written
    found: set[Decimal] = set()
    for word in " ".join(map(str, parts)).split():
        try:
            first, *more = [Decimal(part) for part in word.split(":")]
        except InvalidOperation:
            more = [None] * 3
        if len(more) not in (0, 2):
            raise ValueError(
                f"temperatures: {word!r} is neither a number nor a range first:last:step, as in 0.1:1.0:0.1"
            )
        last, step = more or (first, Decimal(1))
        if not (first.is_finite() and last.is_finite() and step > 0 and 0 <= first <= last <= HIGHEST_TEMPERATURE):
            raise ValueError(
                f"temperatures: {word!r} must rise within 0 and {HIGHEST_TEMPERATURE}. In YAML, put ranges in quotes"
            )
        while first <= last:
            found.add(first)
            first += step
    if not found:
        raise ValueError("temperatures: give at least one")
    return [float(temperature) for temperature in sorted(found)]


@dataclass
class EvalConfig:
    r"""
    Configuration of [`evaluate`].

    Parameters:
        model (`str`):
            Folder or hub id of a model or of a LoRA adapter, or `"demo"` for the embedded model.
        output (`str`):
            Folder for samples, metrics, table and plots. An interrupted run continues there.
        revision (`str`, *optional*):
            Hub revision of `model`.
        benchmarks (`list[str]`, *optional*):
            Names of the registry: `aime24`, `aime25`, `amc`, `math500`, `minerva`, `olympiadbench`, `gsm8k`, `arithmetic`;
            `name@revision` pins a hub revision, `name=file` puts a local file in the hub's place.
        file (`list[str]`, *optional*):
            JSONL, JSON, CSV or Parquet files of your own problems, each a benchmark named after its file.
        problem_field (`str`, *optional*), answer_field (`str`, *optional*):
            Columns of local files. Default: those of the benchmark, else `problem` or `prompt`, and `answer`.
        prompt_suffix (`str`, *optional*):
            Text appended to every problem. Default: for the math benchmarks the instruction that training on `math_3_5` uses
            (reason inside `<think></think>`, box the answer), for `arithmetic` and own files none.
        system_prompt (`str`, *optional*):
            System turn before every problem.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            Arguments of the chat template, such as Qwen3's `enable_thinking`; on the command line JSON. As in training.
        max_rows (`int`, *optional*):
            Keep only the first rows of each benchmark.
        temperatures (`list[str]`, *optional*, defaults to `["0.1:1.0:0.1", "1.2", "1.3", "1.4", "1.5"]`):
            Sampling temperatures: numbers, and ranges `first:last:step` with both ends. 0 is greedy decoding, drawn once.
            Default: the grid of the paper's tables.
        samples (`int`, *optional*, defaults to `32`):
            k, samples of each problem for Avg@k, Pass@k and maj@k. Pass@1 has one more draw of its own. 0: Pass@1 only.
        max_new_tokens (`int`, *optional*, defaults to `3000`):
            Longest completion in tokens; the model's context may allow less.
        seed (`int`, *optional*, defaults to `0`):
            Of the run; every sample derives its own.
        backend (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"` or `"vllm"`.
        tensor_parallel_size (`int`, *optional*, defaults to `1`):
            GPUs that share the model under vLLM: the paper's TP1 and TP2.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Of the weights: `"auto"` (as stored; vLLM takes 16 bits for what is stored in 32), `"float32"`, `"bfloat16"`, `"float16"`.
        batch_tokens (`int`, *optional*, defaults to `65536`):
            Token budget of one batch under transformers, padding and room for the completions included.
        gpu_memory_utilization (`float`, *optional*, defaults to `0.9`):
            Share of each GPU's memory that vLLM takes.
        scoring_workers (`int`, *optional*):
            Processes that compare answers. Default: the cores, at most 8.
        scoring_time_limit (`float`, *optional*, defaults to `5.0`):
            Wall-clock seconds that one answer may take; a slower one is wrong.
        bootstrap (`int`, *optional*, defaults to `1000`):
            Bootstrap samples over problems, for the standard errors.
    """

    model: str = field(metadata={"help": "Folder or hub id of a model or LoRA adapter, or 'demo'."})
    output: str = field(metadata={"help": "Folder for samples, metrics, table and plots."})
    revision: str | None = field(default=None, metadata={"help": "Hub revision of the model."})
    benchmarks: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of the registry; name@revision or name=file to choose a source."},
    )
    file: list[str] = field(default_factory=list, metadata={"help": "JSONL, JSON, CSV or Parquet files of problems."})
    problem_field: str | None = field(default=None, metadata={"help": "Column of local files with the problem."})
    answer_field: str | None = field(default=None, metadata={"help": "Column of local files with the gold answer."})
    prompt_suffix: str | None = field(default=None, metadata={"help": "Text appended to every problem."})
    system_prompt: str | None = field(default=None, metadata={"help": "System turn before every problem."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    max_rows: int | None = field(default=None, metadata={"help": "Keep only the first rows of each benchmark."})
    temperatures: list[str] = field(
        default_factory=lambda: ["0.1:1.0:0.1", "1.2", "1.3", "1.4", "1.5"],
        metadata={"help": "Numbers and ranges first:last:step, both ends included; 0 is greedy."},
    )
    samples: int = field(default=32, metadata={"help": "k: samples per problem; Pass@1 has one more of its own."})
    max_new_tokens: int = field(default=3000, metadata={"help": "Longest completion in tokens."})
    seed: int = field(default=0, metadata={"help": "Seed of the run; every sample derives its own."})
    backend: str = field(default="transformers", metadata={"help": "'transformers' or 'vllm'."})
    tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs that share the model under vLLM."})
    dtype: str = field(default="auto", metadata={"help": "'auto', 'float32', 'bfloat16' or 'float16'."})
    batch_tokens: int = field(default=65536, metadata={"help": "Token budget of one batch under transformers."})
    gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of GPU memory that vLLM takes."})
    scoring_workers: int | None = field(default=None, metadata={"help": "Processes that compare answers."})
    scoring_time_limit: float = field(default=TIME_LIMIT_S, metadata={"help": "Seconds one answer may take."})
    bootstrap: int = field(default=1000, metadata={"help": "Bootstrap samples over problems."})

    def __post_init__(self):
        for name in ("benchmarks", "file"):  # `benchmarks: math500` in YAML
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        if isinstance(self.chat_template_kwargs, str):  # of the command line
            with contextlib.suppress(ValueError):
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
        if not isinstance(self.chat_template_kwargs or {}, dict):
            raise ValueError(
                "chat_template_kwargs must be a mapping, on the command line as JSON such as '{\"enable_thinking\": false}', found "
                f"{self.chat_template_kwargs!r}"
            )
        self.temperatures = parse_temperatures(self.temperatures)
        if not self.benchmarks and not self.file:
            raise ValueError(
                "benchmarks and file are both empty: name at least one benchmark or give a file of problems"
            )
        for name, known in (("backend", BACKENDS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, found {getattr(self, name)!r}")
        least = {
            "samples": 0, "max_new_tokens": 1, "tensor_parallel_size": 1, "batch_tokens": 1, "scoring_workers": 1,
            "bootstrap": 2, "max_rows": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, found {value}")
        if self.tensor_parallel_size > 1 and self.backend != "vllm":
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} needs backend 'vllm'")
        if not self.scoring_time_limit > 0:
            raise ValueError(f"scoring_time_limit must be above 0 seconds, found {self.scoring_time_limit}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], found {self.gpu_memory_utilization}")
