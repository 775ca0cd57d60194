"""Run folders as training leaves them, written in code: what a report reads, with numbers a test can work out."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from erpo_trl.query.metrics import StepQueries
from erpo_trl.query.table import ReferenceTable
from erpo_trl.report.query_log import as_table

ARGS = {
    "query_kl_coef": 0.01, "query_weight": "nll_ratio", "query_weight_clip": [0.0, 2.0], "query_weight_floor": 0.0,
    "query_weight_normalize": False, "query_weight_beta": 1.0, "query_weight_source": "reference", "query_span": "prompt",
    "beta": 0.0, "seed": 0,
    "output_dir": "somewhere", "learning_rate": 1e-6, "trust_region": "ratio_clip", "epsilon": 0.2, "epsilon_high": None,
    "trust_region_delta": None, "trust_region_delta_low": None, "trust_region_delta_high": None,
    "trust_region_ratio_cap": 20.0, "spo_epsilon": 0.2, "trust_region_coef": None,
}  # fmt: skip


def line_log(steps=(10, 20, 30, 40), rise=0.001, **series):
    """A log in which Query-KL is `rise` per step, and other metrics are what the functions of a step give."""
    return [
        {"step": step, "loss": 0.0, "query/kl": rise * step, **{name: of(step) for name, of in series.items()}}
        for step in steps
    ]


def write_run(folder: Path, log, seed=0, checkpoint=None, state=True, table=None, queries=None, **args) -> Path:
    """A run's folder.

    Args: log: its log_history; checkpoint: write the state there instead; state: with erpo_state.json; table: NLLs of the
    reference table, in a cache below the folder; queries: step -> StepQueries, each in a file of its own; args: settings that differ.
    """
    place = folder / f"checkpoint-{checkpoint}" if checkpoint else folder
    place.mkdir(parents=True)
    last = max((entry["step"] for entry in log), default=0)
    progress = {"log_history": log, "global_step": checkpoint or last, "max_steps": last}
    (place / "trainer_state.json").write_text(json.dumps(progress))
    if state:
        content = {
            **{"fingerprint": "f00d", "adapter": False, "data_fingerprint": "d", "seed": seed, "mean_nll": 4.0},
            **{"reference_cache_dir": str(folder / "cache"), "args": {**ARGS, **args, "seed": seed}},
        }
        (place / "erpo_state.json").write_text(json.dumps(content))
    if table is not None:
        logps = [np.array([-nll / 2, -nll / 2], dtype=np.float32) for nll in table]
        ReferenceTable(folder / "cache" / "f00d").add(range(len(table)), logps)
    for step, values in (queries or {}).items():
        (folder / "queries").mkdir(exist_ok=True)
        pq.write_table(as_table(step, values), folder / "queries" / f"queries_{step:05d}-{step:05d}.parquet")
    return folder


def queries(prompt_nll, response_nll, weight=None, tokens=None, response_tokens=None) -> StepQueries:
    """The queries of a step; lengths and weights are 1 unless given."""
    n = len(prompt_nll)
    ones = np.ones(n)
    return StepQueries(
        key=np.arange(n),
        kl=np.full(n, 0.01),
        nll=np.asarray(prompt_nll, dtype=float),
        nll_drift=np.full(n, 0.1),
        weight=ones if weight is None else np.asarray(weight, dtype=float),
        tokens=ones if tokens is None else np.asarray(tokens, dtype=float),
        response_nll=np.asarray(response_nll, dtype=float),
        response_tokens=ones if response_tokens is None else np.asarray(response_tokens, dtype=float),
    )


def write_evaluation(folder: Path, model: Path, values: dict, samples=4) -> Path:
    """An evaluation's folder. Args: model: what it is of; values: benchmark -> temperature -> Avg@k."""
    folder.mkdir(parents=True)
    benchmarks = {
        name: {"temperatures": {t: {f"avg@{samples}": {"value": v, "se": 0.0}} for t, v in by_temperature.items()}}
        for name, by_temperature in values.items()
    }
    metrics = {
        "model": {"name": str(model), "adapter": None},
        "settings": {"samples": samples},
        "benchmarks": benchmarks,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "samples.parquet").touch()
    return folder
