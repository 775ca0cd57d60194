"""Steps whose rows share a query's prompt, against steps whose rows do not, and what `auto` chooses."""

from pathlib import Path
from unittest import mock

from ..forward import mixin
from .measure import Comparison, interleaved, peak_bytes
from .step import SHARING, StepShape, compact_head, held_bytes, steppers
from .workload import Workload


def measure_prefix(work: Workload, shape: StepShape, repetitions: int, folder: Path) -> list[Comparison]:
    """Time and peak memory of a step under each `shared_prefix`, with the head on labelled positions only.

    The names say what `auto` did: "on" or "off" where all forwards of its step were alike, else the share that was packed.
    """
    choices: list[bool] = []

    def pays(*args):
        choices.append(mixin_pays(*args))
        return choices[-1]

    mixin_pays = mixin.pays
    with compact_head(True), steppers(SHARING, work, shape, folder) as held:
        with mock.patch.object(mixin, "pays", pays):
            held["auto"].step()
        times = interleaved({side: stepper.step for side, stepper in held.items()}, repetitions)
        memory = {}
        for side, stepper in held.items():
            found: list[int] = []
            stepper.step(peak_bytes(found))
            memory[side] = [float(found[0] + held_bytes(stepper.trainer))]
    shared = sum(choices) / max(1, len(choices))
    choice = {0.0: "off", 1.0: "on"}.get(shared, f"on in {shared:.0%}")
    name = f"with shared prompts {shape}, auto is {choice}"
    return [
        Comparison(f"step time {name}", "s", times, {"auto": ("<=", 1.03)}),
        Comparison(f"step peak memory {name}", "bytes", memory, {"auto": ("<=", 1.03)}, counted=True),
    ]
