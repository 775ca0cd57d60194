"""Makes the runs of a study, several at a time, each in a process of its own.

The processes are forked from one that has imported everything once: an import takes longer than some runs. A stopped study leaves
records of the runs that are done and, of those that were at work, a checkpoint to go on from or nothing.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from ..locking import is_claimed
from ..report.live import duration
from .recipe import RunSpec
from .records import Record
from .worker import LOG, PATIENCE_SECONDS, ended_by_signal, write_data
from .worker import main as work_on

# What a run takes beside its steps (evaluation, loading), in steps: measured on the embedded model
OVERHEAD_STEPS = 50
SECONDS_PER_STEP = 1.0  # until a run has been measured
FORK_ATTEMPTS = 3
FORK_PAUSE_SECONDS = 0.5


def expected_seconds(run: RunSpec, records: Sequence[Record]) -> float:
    """How long a run will take: as long as those with its settings took, else by the steps of all that are done."""
    same = [record for record in records if record.content["hash"] == run.key]
    if same:
        return sum(map(seconds_of, same)) / len(same)
    steps = sum(record.steps + OVERHEAD_STEPS for record in records)
    rate = sum(map(seconds_of, records)) / steps if records else SECONDS_PER_STEP
    return rate * (run.steps + OVERHEAD_STEPS)


def seconds_of(record: Record) -> float:
    """Wall-clock seconds that a run took."""
    return sum(record.content["seconds"].values())


@dataclass
class Outcome:
    """What became of a call. Args: done, failed: slugs; left: runs not begun, or stopped; stopped: by a signal."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    stopped: bool = False


class Stop:
    """SIGINT and SIGTERM as a flag, while it lasts."""

    def __enter__(self) -> "Stop":
        self.asked = False
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        self.asked = True

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_all(
    runs: Sequence[RunSpec],
    expected: Mapping[str, float],
    model: str,
    work: Path,
    records: Path,
    questions: Mapping[str, list[str]],
    commit: str,
    jobs: int = 2,
    max_hours: float | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Makes these runs, in their order.

    Args: runs: that have no record yet; expected: slug -> seconds; model: path or id; work: folder for everything but the
    records; records: folder for those; questions: slug -> names of the questions that want it; commit: of the code; jobs: runs at
    a time; max_hours: begin no run that is expected to end later.
    """
    for run in runs:
        write_data(run, work)
    # Forked from a process of its own, which has one thread and has computed nothing: that is when forking is safe
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work_on.__module__])
    start = time.monotonic()
    waiting, active, outcome = list(runs), {}, Outcome()
    total = len(waiting)
    with Stop() as stop:
        while active or waiting:
            while waiting and len(active) < jobs and not stop.asked:
                elapsed = time.monotonic() - start
                fits = next(
                    (r for r in waiting if max_hours is None or elapsed + expected[r.slug] <= 3600 * max_hours), None
                )
                if fits is None:
                    break
                waiting.remove(fits)
                arguments = (fits, model, str(work), str(records), questions[fits.slug], commit)
                process = context.Process(target=work_on, args=arguments, name=fits.slug)
                _start(process)
                active[process.sentinel] = (process, fits, time.monotonic())
            if not active:
                break
            # A signal does not end the wait by itself
            for sentinel in wait(list(active), timeout=0.5):
                process, run, began = active.pop(sentinel)
                process.join()
                if stop.asked and process.exitcode:
                    active[sentinel] = (process, run, began)
                    break
                _settle(process.exitcode, run, time.monotonic() - began, outcome, work, total, say)
            if stop.asked and active:
                _stop(active, outcome, work, records, say)
                active = {}
            if stop.asked:
                break
        outcome.stopped = stop.asked
    outcome.left += [run.slug for run in waiting]
    return outcome


def _start(process: multiprocessing.Process) -> None:
    """Starts a process. The one that forks it may be ending at this moment: `multiprocessing` makes another once it has ended."""
    for _ in range(FORK_ATTEMPTS - 1):
        try:
            return process.start()
        except (EOFError, ConnectionError):
            time.sleep(FORK_PAUSE_SECONDS)
    process.start()


def _settle(status: int, run: RunSpec, seconds: float, outcome: Outcome, work: Path, total: int, say) -> None:
    if status == 0:
        outcome.done.append(run.slug)
        say(f"[{len(outcome.done)}/{total}] {run.slug}  {duration(seconds)}")
    elif ended_by_signal(status):
        outcome.left.append(run.slug)
        say(f"{run.slug} was ended by a signal; it will be taken up again")
    else:
        outcome.failed.append(run.slug)
        say(f"{run.slug} failed: {last_line(work / 'runs' / run.slug / LOG)}")


def _stop(active: Mapping, outcome: Outcome, work: Path, records: Path, say) -> None:
    """Ends the runs at work. Whoever stops a whole process group has ended the process that forked them, too, and with it what
    `multiprocessing` knows of them: a run is at work as long as it holds its folder."""
    say(f"Stopping {len(active)} runs; those in training save a checkpoint first")
    folders = {process: work / "runs" / run.slug for process, run, _ in active.values()}
    for process, folder in folders.items():
        process.terminate()
        if is_claimed(folder):
            _send(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for process, folder in folders.items():
        process.join(max(0.0, deadline - time.monotonic()))
        while is_claimed(folder) and time.monotonic() < deadline:
            time.sleep(0.2)
        if is_claimed(folder):
            _send(process.pid, signal.SIGKILL)
    for _, run, _ in active.values():
        (outcome.done if (records / f"{run.slug}.json").is_file() else outcome.left).append(run.slug)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def last_line(log: Path) -> str:
    """The last line of a run's log that is not empty, and where the rest is."""
    lines = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if log.is_file()
        else []
    )
    return f"{lines[-1][:300] if lines else 'it left no log'} ({log})"
