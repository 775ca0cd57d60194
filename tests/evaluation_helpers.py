"""A backend that computes no model, for tests of the evaluation protocol: its answers are a function of the request."""

import contextlib
import json
from unittest import mock

from accelerate import PartialState
from datasets import Dataset
from helpers import byte_tokenizer

from erpo_trl.evaluation.backends import Draw
from erpo_trl.evaluation.benchmarks import Benchmark
from erpo_trl.evaluation.config import EvalConfig
from erpo_trl.evaluation.protocol import SCORED
from erpo_trl.evaluation.run import run_protocol


class StubBackend:
    """Batches of `size`; `answer(request)` gives the text; `log` keeps what was drawn; raises at batch number `fail_at`."""

    def __init__(self, answer, size=4, fail_at=None):
        self.answer, self.size, self.fail_at = answer, size, fail_at
        self.tokenizer = byte_tokenizer()
        self.log, self.batches = [], 0

    def plan(self, requests):
        return [requests[i : i + self.size] for i in range(0, len(requests), self.size)]

    def generate(self, batch):
        if self.batches == self.fail_at:
            raise KeyboardInterrupt
        self.batches += 1
        self.log += [(r.row, r.sample, r.temperature) for r in batch]
        return [self._draw(request) for request in batch]

    def _draw(self, request):
        ids = self.tokenizer(self.answer(request))["input_ids"]
        return Draw(ids[: request.max_new_tokens], finished=len(ids) <= request.max_new_tokens)


def problems(golds, prompts=None, name="set"):
    prompts = prompts or [f"problem {index}" for index in range(len(golds))]
    return Benchmark(name, Dataset.from_dict({"prompt": prompts, "answer": golds}))


def run(output, backend, *benchmarks, context=None, state=None, weights="w", plots=False, tokenizer=None, **settings):
    """`run_protocol` on benchmarks given as data sets; without `plots` no figures, which take longer than all the rest."""
    options = {"temperatures": [0.8], "samples": 2, "max_new_tokens": 60, "scoring_workers": 1, "bootstrap": 100}
    config = EvalConfig(model="stub", output=str(output), benchmarks=["stub"], **options | settings)
    record = {"name": "stub", "adapter": None, "weights": weights}
    state = state or PartialState(cpu=True)
    with contextlib.nullcontext() if plots else mock.patch("erpo_trl.evaluation.run.plot_sweeps"):
        return run_protocol(
            config, record, tokenizer or byte_tokenizer(), benchmarks, context, lambda longest: backend, state
        )


def samples(output):
    """Every stored sample as a dict."""
    import pyarrow.parquet as pq

    table = pq.read_table(output / "samples.parquet")
    assert table.schema.names == SCORED.names
    return table.to_pylist()


def values(metrics, benchmark="set", temperature="0.8"):
    """The metrics of a pair without their errors."""
    entry = metrics["benchmarks"][benchmark]["temperatures"][temperature]
    return {name: shown["value"] for name, shown in entry.items()}


def read_metrics(output):
    return json.loads((output / "metrics.json").read_text())
