"""How long the package and its command take to start."""

import subprocess
import sys
import time
from collections.abc import Callable

from .measure import Comparison, interleaved


def _run(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    return run


def measure_startup(repetitions: int) -> Comparison:
    """Seconds of a fresh process that does nothing, imports the package, or prints the command's help."""
    sides = {
        "python": _run("-c", "pass"),
        "import erpo_trl": _run("-c", "import erpo_trl"),
        "erpo-trl --help": _run("-m", "erpo_trl.cli", "--help"),
    }
    times = interleaved(sides, repetitions, clock=time.perf_counter)
    return Comparison("start of a process", "s", times, limit={"import erpo_trl": 0.3, "erpo-trl --help": 1.0})
