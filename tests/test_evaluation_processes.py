"""Real processes on the embedded model: two draw what one draws, and a killed run is continued."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from evaluation_helpers import read_metrics, samples
from launching import accelerate, environment, torchrun
from scripts import evaluation_run
from test_sharded import LAUNCHES as SHARDINGS

from erpo_trl import cli

pytestmark = pytest.mark.distributed

OPTIONS = [
    "eval", "--model", "demo", "--benchmarks", "arithmetic", "--max_rows", "7", "--samples", "3", "--max_new_tokens", "24",
    "--temperatures", "0", "0.6", "1.2", "--bootstrap", "20", "--batch_tokens", "200",
]  # fmt: skip
TIME_LIMIT_S = 300
MARK = "kept "


def key(row):
    return row["temperature"], row["row"], row["sample"]


def launch(output, processes=1, *options):
    command = torchrun("-m", "erpo_trl.cli", *OPTIONS, "--output", str(output), processes=processes)
    return start([*command, *options])


def start(command, **variables):
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
        process_group=0,
    )


def finish(process):
    text, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 0, text
    return text


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run without interruption and without other processes, in this one."""
    output = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    assert cli.main([*OPTIONS, "--output", str(output)]) == 0
    return output


def test_two_processes_draw_what_one_draws(alone, tmp_path):
    """Uneven: 7 problems, and batches that do not divide by two."""
    finish(launch(tmp_path, 2))
    assert samples(tmp_path) == samples(alone)
    assert read_metrics(tmp_path)["processes"] == 2
    assert read_metrics(tmp_path)["benchmarks"] == read_metrics(alone)["benchmarks"]


def test_killed_run_continues_where_it_was(alone, tmp_path):
    """kill -9 once a part of the batches is there: those are kept as they are, and the result is that of one run."""
    process = launch(tmp_path)
    deadline = time.monotonic() + TIME_LIMIT_S
    while len(list(tmp_path.glob("work/*/*.parquet"))) + 3 * len(list(tmp_path.glob("work/*.parquet"))) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "samples.parquet").exists()
    kept = list(tmp_path.glob("work/**/*.parquet"))
    assert kept
    marked = set()
    for path in kept:
        # A mark in the text, before the box: a sample that was drawn again would not have it
        table = pq.read_table(path)
        texts = pa.array([MARK + text for text in table["text"].to_pylist()])
        pq.write_table(table.set_column(table.schema.get_field_index("text"), "text", texts), path)
        marked |= {key(row) for row in table.to_pylist()}
    expected = [row | {"text": MARK + row["text"]} if key(row) in marked else row for row in samples(alone)]
    assert cli.main([*OPTIONS, "--output", str(tmp_path)]) == 0
    assert 0 < len(marked) < len(expected)
    assert samples(tmp_path) == expected
    assert read_metrics(tmp_path)["benchmarks"] == read_metrics(alone)["benchmarks"]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("sharding", [None, "zero3", "fsdp2"])
def test_callback_measures_the_same_on_any_number_of_ranks(tmp_path, sharding):
    """7 problems with 3 samples each on two ranks, in an odd number of batches; every rank ends with the same numbers. On a sharded
    model a rank that made a call less, or ended its answers earlier, would leave the other waiting.
    """
    _, alone = evaluation_run.measure(tmp_path)
    script = str(Path(evaluation_run.__file__))
    command, variables = torchrun(script, str(tmp_path), processes=2), {}
    if sharding is not None:
        (tmp_path / "accelerate.yaml").write_text(SHARDINGS[sharding][0])
        command = accelerate(script, str(tmp_path), config=tmp_path / "accelerate.yaml")
        variables = {"ACCELERATE_TORCH_DEVICE": "cpu"} if sharding == "fsdp2" else {}
    finish(start(command, **variables))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks == [{"world": 2, "sharded": sharding is not None, "metrics": alone}] * 2
    assert 0 < alone["eval/seven/avg@3@T0.8"] < 1
