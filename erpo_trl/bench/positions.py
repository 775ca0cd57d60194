"""What one optimizer step asks of the model: forwards, and positions projected through the LM head."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trl.trainer import utils as trl_utils

from .measure import Comparison
from .step import BASE, ERPO, SIDES, StepShape, compact_head, steppers
from .workload import Workload


@dataclass
class HeadCount:
    """Args: forwards: of any model through the fused head; positions: projected through the head."""

    forwards: int = 0
    positions: int = 0


@contextlib.contextmanager
def counted_head(count: HeadCount) -> Iterator[None]:
    """Counts what goes through TRL's fused head."""
    function = trl_utils._ChunkedLogProbFunction
    inner = function.apply

    def apply(hidden, *args):
        count.forwards += 1
        count.positions += hidden.shape[0]
        return inner(hidden, *args)

    function.apply = apply
    try:
        yield
    finally:
        function.apply = inner


def measure_positions(work: Workload, shape: StepShape, folder: Path, compact: bool) -> list[Comparison]:
    """Forwards and projected positions of one step on every side."""
    head = "labelled positions only" if compact or work.gpu else "every position"
    forwards, positions = {}, {}
    with compact_head(compact), steppers(SIDES, work, shape, folder) as held:
        for side, stepper in held.items():
            count = HeadCount()
            stepper.step(counted_head(count))
            forwards[side], positions[side] = [float(count.forwards)], [float(count.positions)]
    completions = shape.queries * shape.group * shape.completion
    name = f"{shape}, {shape.queries} queries, head on {head}"
    found = [
        Comparison(f"forwards of a step {name}", "forwards", forwards, counted=True),
        Comparison(f"projected positions of a step {name}", "positions", positions, counted=True),
    ]
    if compact or work.gpu:
        queries = {side: [values[0] - completions] for side, values in positions.items() if side != BASE}
        scored = {"scored tokens of the distinct queries": [float(shape.queries * (shape.prompt - 1))]}
        found.append(
            Comparison(
                f"positions beside the completions' {name}",
                "positions",
                scored | queries,
                target={ERPO: ("<=", 1.0)},
                counted=True,
            )
        )
    return found
