"""What ERPO costs, as far as it can be counted (forwards, projected positions, bytes), and that the benchmark runs."""

import gc
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers import byte_tokenizer, make_config, make_trainer, prompts_dataset, tiny_model

from erpo_trl import DatasetMapper, cli
from erpo_trl.bench.config import SMOKE, BenchConfig
from erpo_trl.bench.measure import Comparison, counted_flops, exponent, interleaved, peak_bytes
from erpo_trl.bench.positions import measure_positions
from erpo_trl.bench.prefix import measure_prefix
from erpo_trl.bench.step import BASE, ERPO, REFERENCE_MODEL, RELEASE, StepShape, measure_step, steppers
from erpo_trl.bench.summary import summary_table
from erpo_trl.bench.workload import Workload, bare_lengths, mixed_lengths
from erpo_trl.cli import InputError
from erpo_trl.query import fingerprint
from erpo_trl.query.scoring import batches_by_tokens
from erpo_trl.query.table import ReferenceTable

SHAPE = StepShape(prompt=8, completion=4, group=4, queries=2, micro_batches=2)
COMPLETION_TOKENS = 2 * 4 * 4


@pytest.fixture
def work(tmp_path):
    return Workload(tmp_path, None, SMOKE.model, 64, seed=0)


def by_name(comparisons):
    return {comparison.name.partition(" (")[0]: comparison.values for comparison in comparisons}


# ------------------------------------------------------------------------------------------------ counts of a step
@pytest.mark.parametrize("compact", [True, False])
def test_forwards_of_a_step(work, tmp_path, compact):
    """ERPO makes GRPO's forwards, one a micro-batch; a reference model adds one, the release's scheme two."""
    forwards = by_name(measure_positions(work, SHAPE, tmp_path, compact))["forwards of a step"]
    assert forwards == {BASE: [2], ERPO: [2], REFERENCE_MODEL: [4], RELEASE: [6]}


def test_projected_positions_of_a_step(work, tmp_path):
    """With the compact head: completions, and each distinct query's T - 1 tokens once, not K times."""
    positions = by_name(measure_positions(work, SHAPE, tmp_path, compact=True))["projected positions of a step"]
    once = 2 * (8 - 1)
    assert positions[BASE] == [COMPLETION_TOKENS]
    assert positions[ERPO] == [COMPLETION_TOKENS + once]
    # Forward, reference, and the prompts alone, each with the K copies of each query
    assert positions[RELEASE] == [2 * COMPLETION_TOKENS + 3 * 4 * once]


def test_every_position_is_projected_elsewhere(work, tmp_path):
    """On a device without Triton, TRL projects every position whatever is labelled, so reading the query costs nothing."""
    positions = by_name(measure_positions(work, SHAPE, tmp_path, compact=False))["projected positions of a step"]
    assert positions[ERPO] == positions[BASE] == [8 * (8 + 4 - 1)]


def test_compute_and_memory_of_a_step(work, tmp_path):
    """Counted: ERPO computes what GRPO does where every position is projected, and a fifth less than the release's scheme."""
    found = measure_step(work, SHAPE, "64", 1, tmp_path, compact=False)
    compute, memory = by_name(found)["step compute"], by_name(found)["step peak memory"]
    assert compute[ERPO] == compute[BASE]
    assert compute[ERPO][0] <= 0.8 * compute[RELEASE][0]
    assert memory[ERPO][0] <= 1.03 * memory[BASE][0]
    weights = sum(p.numel() for p in work.model().parameters()) * 4
    assert memory[REFERENCE_MODEL][0] - memory[BASE][0] == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize("shape, choice", [((40, 4), "on"), ((4, 40), "off")])
def test_shared_prompts(work, tmp_path, shape, choice):
    """Of 8 rows each: a long prompt is worth sharing and saves memory, which `auto` then has; a short one is left alone."""
    time, memory = measure_prefix(work, StepShape(*shape, group=8, queries=2), 1, tmp_path)
    assert time.name == f"step time with shared prompts ({shape[0]}, {shape[1]}, 8), auto is {choice}"
    assert list(time.values) == list(memory.values) == ["off", "on", "auto"]
    off, on, auto = (memory.values[side][0] for side in ("off", "on", "auto"))
    assert auto == pytest.approx(on if choice == "on" else off, rel=0.02)
    if choice == "on":
        assert on < off


# --------------------------------------------------------------------------------------------- counts of the scoring pass
@pytest.mark.parametrize(
    "made, rows, budget, share",
    [
        (mixed_lengths, 192, 16_384, 0.06),
        (mixed_lengths, 10_000, 16_384, 0.02),
        (mixed_lengths, 10_000, 2048, 0.005),
        (bare_lengths, 192, 16_384, 0.06),
        (bare_lengths, 10_000, 16_384, 0.03),
        (bare_lengths, 10_000, 2048, 0.005),
    ],
)
def test_padding_of_the_scoring_pass(made, rows, budget, share):
    """Prompts of mixed lengths: no batch passes its budget or its padding, and all together have little of it."""
    lengths = made(rows, 600, seed=0)
    batches = batches_by_tokens([np.zeros(length, dtype=np.int32) for length in lengths], budget)
    sizes = [[len(row) for row in batch] for batch in batches]
    padded = [len(batch) * max(batch) for batch in sizes]
    assert sorted(sum(sizes, [])) == sorted(lengths.tolist())
    assert max(padded) <= budget
    assert all(total - sum(batch) <= max(64, sum(batch) / 32) for total, batch in zip(padded, sizes))
    assert 1 - sum(lengths) / sum(padded) < share


def test_lengths_of_bare_problems():
    """Shares of the rows that are longer than MATH-500's quantiles, and no row longer than asked."""
    lengths = bare_lengths(100_000, 600, seed=0)
    for quantile, share in ((33, 0.75), (52, 0.5), (80, 0.25), (233, 0.05)):
        assert (lengths >= quantile).mean() == pytest.approx(share, abs=0.01)
    assert (lengths.min(), lengths.max()) == (9, 600)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_freed_memory_is_kept():
    """A thread that makes the same 32 MiB twenty times meets few page faults, where without each time meets them anew."""
    code = """
import ctypes, resource, sys, threading
import numpy as np
from erpo_trl.bench.measure import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, which come or not as the system likes
def work():
    for _ in range(20):
        np.ones(1 << 22)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert 0 < 5 * found["keep"] < found["leave"]


def test_weights_are_digested_once(tmp_path, monkeypatch):
    """On a cold start, whatever is scored with the model: training rows, then evaluation rows."""
    calls = []
    digest = fingerprint.weights_digest
    monkeypatch.setattr(fingerprint, "weights_digest", lambda *args: calls.append(args) or digest(*args))
    trainer = make_trainer(tmp_path, trainer_kwargs={"eval_dataset": prompts_dataset(["one prompt", "another one"])})
    trainer.prepare_reference()
    assert [report.scored for _, report in trainer.scoring_reports] == [len(trainer.train_dataset), 2]
    assert len(calls) == 1


def test_bytes_of_the_table(tmp_path):
    """A row of the table is its key, its log-probs and an offset: 12 bytes and 4 a scored token, whatever else a file has."""
    prompts = [f"{i:06d}" + "x" * 58 for i in range(2000)]
    mapper = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), make_config(tmp_path))
    mapper(prompts_dataset(prompts))
    [part] = (tmp_path / "reference").glob("*/part-*.arrow")
    per_row = part.stat().st_size / 2000
    assert 12 + 4 * 63 <= per_row <= 12 + 4 * 63 + 2


def test_memory_of_a_mapping_does_not_follow_the_log_probs(tmp_path):
    """What a mapping of a data set on disk holds in Python and numpy, and in Arrow: per row its ids and places, no log-probs.

    The table is warm, so that what is counted is looking up and attaching.
    """
    length = 96
    peaks = {}
    for rows in (2000, 8000):
        data = prompts_dataset([f"{i:06d}" + "x" * (length - 6) for i in range(rows)])
        data.save_to_disk(tmp_path / f"data-{rows}")
        data = type(data).load_from_disk(str(tmp_path / f"data-{rows}"))
        config = make_config(tmp_path, reference_cache_dir=str(tmp_path / "reference"))
        mapper = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), config)
        table_rows = [list(range(length - 1))] * rows
        keys = mapper.all_ids(data).keys()
        table = ReferenceTable(mapper.cache_dir / mapper.present_reference().fingerprint)
        table.add(keys.tolist(), [np.asarray(row, dtype=np.float32) for row in table_rows])
        del table, table_rows, keys
        gc.collect()
        tracemalloc.start()
        arrow = pa.total_allocated_bytes()
        mapped = mapper(data)
        peaks[rows] = tracemalloc.get_traced_memory()[1] + max(0, pa.total_allocated_bytes() - arrow)
        tracemalloc.stop()
        assert mapper.report.reused == rows and len(mapped["ref_query_logps"][rows - 1]) == length - 1
    per_row = (peaks[8000] - peaks[2000]) / 6000
    ids = 4 * length
    assert per_row < ids + 300, f"{per_row:.0f} bytes a row"


# ------------------------------------------------------------------------------------------------------- instruments
def test_flops_are_counted():
    """Against 2·m·n·k of a product, forward and the two of its backward, and of the product in place of TRL's head."""
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    found: list[int] = []
    with counted_flops(found):
        (a @ b).sum().backward()
        torch.zeros(3, 7).addmm_(a.detach(), b.detach())
    assert found == [4 * 2 * 3 * 5 * 7]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's allocations")
def test_peak_bytes():
    """The most that is alive at once, not the sum of what was allocated."""
    found: list[int] = []
    with peak_bytes(found):
        for _ in range(3):
            first = torch.zeros(1000, dtype=torch.float32)
            second = torch.zeros(500, dtype=torch.float32)
            del first, second
    assert 6000 <= found[0] < 6600


def test_rounds_are_interleaved_and_compared_round_by_round():
    """The order turns, the warm-up is not kept, and a ratio is the median of the rounds' ratios."""
    order: list[str] = []
    values = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert "".join(order) == "baabba" and [len(x) for x in values.values()] == [2, 2]
    # A machine that slows down fourfold: the medians' ratio would be 2.2
    found = Comparison("x", "s", {"a": [1.0, 2.0, 4.0], "b": [2.0, 4.4, 8.0]})
    assert found.ratio("b") == pytest.approx((2.0, 2.0, 2.1))
    assert exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)


def test_summary_of_aims():
    """Every side with an aim, its ratio or median with quartiles, in bold where it misses."""
    found = summary_table(
        [
            Comparison("time", "s", {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.1, 1.2]}, {"b": ("<=", 1.03)}),
            Comparison("bytes", "bytes", {"a": [4.0], "b": [4.0], "c": [9.0]}, {"b": ("<=", 1.0)}, counted=True),
            Comparison("rate", "tokens/s", {"a": [100.0], "b": [90.0]}, {"b": (">=", 0.85)}),
            Comparison("start", "s", {"a": [0.5, 0.25, 0.75]}, limit={"a": 1.0}),
        ]
    )
    assert found.splitlines()[2:] == [
        "| time: b to a | **1.1 (1.05–1.15)** | ≤ 1.03 |",
        "| bytes: b to a | 1 | ≤ 1 |",
        "| rate: b to a | 0.9 (0.90–0.90) | ≥ 0.85 |",
        "| start: a | 0.50 s (0.38–0.62) | < 1 s |",
    ]


def test_a_tokenizer_that_makes_nothing_is_named(work, monkeypatch):
    monkeypatch.setattr(work, "tokenizer", lambda texts, **kwargs: {"input_ids": [[] for _ in texts]})
    with pytest.raises(InputError, match="makes no token of 'w"):
        work.prompts([4])


def test_a_failing_side_is_what_is_raised(work, tmp_path, monkeypatch):
    """Not that the sides after it had not begun when all were stopped."""

    class Missing:
        def __getitem__(self, rows):
            raise LookupError("no completions")

    monkeypatch.setattr(work, "completions", lambda *args: Missing())
    with pytest.raises(LookupError, match="no completions"), steppers((BASE, ERPO), work, SHAPE, tmp_path):
        pass


# ----------------------------------------------------------------------------------------------------------- command
@pytest.mark.slow
def test_smoke_run(tmp_path, capsys):
    """The command measures, prints a table and keeps it with machine, date and versions."""
    parts = ["positions", "step", "shared_prefix", "scoring", "startup", "evaluation"]
    output = tmp_path / "bench"
    assert cli.main(["bench", "--smoke", "--repetitions", "1", "--output", str(output), "--parts", *parts]) == 0
    said = capsys.readouterr().out
    result = json.loads((output / "bench.json").read_text())
    assert result["versions"]["trl"] and result["date"] and result["device"]
    names = [comparison["name"] for comparison in result["comparisons"]]
    for start in ("forwards", "step time", "step peak memory", "scoring", "second mapping", "start of", "evaluation"):
        assert any(name.startswith(start) for name in names), start
    table = (output / "table.md").read_text()
    assert "Smoke run: the numbers mean nothing." in table
    for line in table.splitlines()[4:]:
        assert line in said
    short = (output / "summary.md").read_text()
    assert "positions beside the completions'" in short and "erpo-trl --help" in short


@pytest.mark.slow
@pytest.mark.distributed
def test_scaling_smoke_run(tmp_path):
    """Step time against K, prompt and processes, the last in launches of its own."""
    output = tmp_path / "bench"
    argv = ["bench", "--smoke", "--repetitions", "1", "--output", str(output), "--parts", "scaling"]
    assert cli.main(argv) == 0
    last = json.loads((output / "bench.json").read_text())["comparisons"][-1]
    assert list(last["sides"]) == [
        f"{side}, {ranks}" for ranks in ("1 process", "2 processes") for side in (BASE, ERPO)
    ]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--parts", "stepp"], "parts must be of 'positions', 'step'"),
        (
            ["--shapes", "64x64"],
            "shapes must be PROMPTxCOMPLETIONxK with K of at least 2, as in 64x256x8, found '64x64'",
        ),
        (["--shapes", "64x64x1"], "found '64x64x1'"),
        (["--full", "--smoke"], "full and smoke exclude each other"),
        (["--repetitions", "0"], "repetitions must be at least 1, found 0"),
        (["--model", "x", "--vocabularies", "64"], "vocabularies are for the model built in code"),
        (["--output", __file__], f"--output: {__file__} is a file; give a folder"),
    ],
)
def test_bad_options_are_named(argv, message, capsys):
    assert cli.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_shapes_that_cannot_be_measured_are_refused_in_one_line(tmp_path, capsys):
    """A prompt of one token has no likelihood, so that the release's weight of it has no bound."""
    line = ["bench", "--smoke", "--parts", "positions", "--shapes", "1x1x2", "--output", str(tmp_path)]
    assert cli.main(line) == 2
    assert "not to be measured with these shapes, vocabularies or model: query 0 has" in capsys.readouterr().err


def test_shapes_are_read():
    assert BenchConfig(shapes=["64x256x8"]).resolve(gpu=False).steps == ((64, 256, 8),)
