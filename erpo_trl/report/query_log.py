"""What a run keeps of its queries, and shows of them while it goes on.

Scalars reach the trackers (W&B, TensorBoard, trackio) through transformers' own callbacks. Beside them this callback writes the
queries of every step to `output_dir/queries`, and sends their histograms and the run's curves as images.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from transformers import TrainerCallback
from transformers.utils import logging

from ..evaluation.results import write_atomically
from ..query.metrics import StepQueries
from .grouping import group_name
from .trackers import TRACKERS, open_wandb_run

logger = logging.get_logger(__name__)

FOLDER = "queries"
SCHEMA = pa.schema(
    [("step", pa.int32()), ("key", pa.int64())]
    + [(f.name, pa.float32()) for f in fields(StepQueries) if f.name != "key"]
)


class QueryLog(TrainerCallback):
    """Keeps the queries of every optimizer step, and shows them every so often.

    The ERPO trainers add it themselves, with the config's `query_log_steps`.

    Args:
        trainer: an ERPO trainer; its `latest_queries` are kept.
        every: optimizer steps between two files, and between what is sent to the trackers. What is left is written with each
            checkpoint and at the end.

    Files: `output_dir/queries/queries_FIRST-LAST.parquet`, by the steps they hold. A row is a query at a step: `step` and the
    fields of [`~erpo_trl.query.metrics.StepQueries`].
    """

    def __init__(self, trainer, every: int):
        if every < 1:
            raise ValueError(f"every must be at least 1, found {every}")
        self.trainer, self.every = trainer, every
        self._kept: list[pa.Table] = []  # per step, since the trackers were sent any
        self._written = 0  # how many of them are in a file
        self._warned = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._kept, self._written = [], 0
        if state.is_world_process_zero and "wandb" in args.report_to:
            open_wandb_run(args, group_name(self.trainer.erpo_state(), self.trainer.model.config._name_or_path))
        return control

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.trainer.latest_queries is not None:
            self._kept.append(as_table(state.global_step, self.trainer.latest_queries))
        if self._kept and state.global_step % self.every == 0:
            self._flush(args, state)
        return control

    def on_save(self, args, state, control, **kwargs):
        # A run that is killed later and resumed from here would not see these steps again
        self._write(args, state)
        return control

    def on_train_end(self, args, state, control, **kwargs):
        if self._kept:
            self._flush(args, state)
        return control

    def _write(self, args, state) -> None:
        tables, self._written = self._kept[self._written :], len(self._kept)
        if not sum(map(len, tables)):
            return  # nothing new, or queries of one token only
        table = pa.concat_tables(tables)
        first = table["step"][0].as_py()
        path = Path(args.output_dir) / FOLDER / f"queries_{first:05d}-{state.global_step:05d}.parquet"
        write_atomically(path, lambda temporary: pq.write_table(table, temporary))

    def _flush(self, args, state) -> None:
        self._write(args, state)
        table = pa.concat_tables(self._kept)
        self._kept, self._written = [], 0
        if not len(table):
            return
        trackers = [TRACKERS[name] for name in args.report_to if name in TRACKERS]
        if not trackers:
            return
        histograms = {
            f"query/{name}_histogram": values[np.isfinite(values)]
            for name in ("weight", "kl", "nll_drift")
            if np.isfinite(values := table[name].to_numpy()).any()
        }
        images = self._images(state.log_history, table)
        for send in trackers:
            send(self.trainer, state.global_step, histograms, images)

    def _images(self, log_history: Sequence[dict], table: pa.Table) -> dict[str, np.ndarray]:
        """Name -> (H, W, 3) uint8; none without matplotlib."""
        if importlib.util.find_spec("matplotlib") is None:
            if not self._warned:
                logger.warning("Without matplotlib no plots are sent to the trackers: pip install erpo-trl[plot]")
            self._warned = True
            return {}
        from .figures import live_images

        return live_images(log_history, {name: table[name].to_numpy() for name in table.column_names})


def as_table(step: int, queries: StepQueries) -> pa.Table:
    """A step's queries as rows of the files."""
    columns = {f.name: getattr(queries, f.name) for f in fields(queries)}
    return pa.table({"step": np.full(len(queries.key), step), **columns}).cast(SCHEMA)


def read_queries(run: Path, last: int | None = None) -> dict[str, np.ndarray]:
    """Columns of all query files of a run, by step; empty without any.

    Args: run: its output folder; last: step up to which they are read. Later ones are of an earlier run in the same folder.
    Of a step that two files hold, as after a resume, the rows of the later file count.
    Raises: ValueError for a file that cannot be read, with its name.
    """
    tables, known = [], np.empty(0, dtype=np.int32)
    latest_first = sorted(
        (Path(run) / FOLDER).glob("queries_*.parquet"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )
    for path in latest_first:
        try:
            table = pq.read_table(path, schema=SCHEMA)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}); delete it to go on without it") from error
        steps = table["step"].to_numpy()
        tables.append(table.filter(pa.array(~np.isin(steps, known))))
        known = np.union1d(known, steps)
    if not tables:
        return {}
    joined = pa.concat_tables(tables).sort_by("step")
    if last is not None:
        joined = joined.filter(pa.compute.less_equal(joined["step"], last))
    if not len(joined):
        return {}
    return {name: joined[name].to_numpy() for name in joined.column_names}
