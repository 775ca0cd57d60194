"""How a step's time grows with K, with the prompt's length and with processes, and the scoring pass with rows."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from ..query.reference import DatasetMapper
from .measure import Comparison, exponent, interleaved, own_clock, seconds
from .scoring import mapper_config
from .step import BASE, ERPO, StepShape, steppers
from .workload import Workload

_COMPLETION = 32
_RANK_LIMIT_S = 600


def measure_growth(
    work: Workload, groups: tuple[int, ...], prompts: tuple[int, ...], repetitions: int, folder: Path
) -> list[Comparison]:
    """Step time of GRPO and ERPO at several K and several prompt lengths."""
    shapes = {
        "K": {group: StepShape(prompts[0], _COMPLETION, group, 2) for group in groups},
        "prompt tokens": {prompt: StepShape(prompt, _COMPLETION, groups[0], 2) for prompt in prompts},
    }
    found = []
    for what, sizes in shapes.items():
        times: dict[str, dict[int, list[float]]] = {BASE: {}, ERPO: {}}
        for size, shape in sizes.items():
            with steppers((BASE, ERPO), work, shape, folder) as held:
                for side, values in interleaved({s: x.step for s, x in held.items()}, repetitions).items():
                    times[side][size] = values
        for side, values in times.items():
            found.append(_growth(f"step time of {side} against {what}", values))
    return found


def measure_rows(work: Workload, rows: tuple[int, ...], folder: Path) -> Comparison:
    """Time of the scoring pass at several numbers of rows."""
    data, model = work.dataset(max(rows), 24), work.model()
    values: dict[int, list[float]] = {}
    for count in rows:
        part: Dataset = data.select(range(count))
        config = mapper_config(work, folder / f"rows-{count}")
        values[count] = [seconds(lambda: DatasetMapper(model, work.tokenizer, config)(part), own_clock())]  # noqa: B023
    return _growth("scoring time against rows", values)


def _growth(name: str, values: dict[int, list[float]]) -> Comparison:
    slope = exponent(list(values), [float(np.median(x)) for x in values.values()])
    return Comparison(f"{name} (exponent {slope:.2f})", "s", {str(size): x for size, x in values.items()})


def measure_ranks(work: Workload, group: int, prompt: int, repetitions: int, folder: Path) -> Comparison:
    """Step time of GRPO and ERPO on one process and on two, with the same rows on each process."""
    values = {}
    for ranks in (1, 2):
        output = folder / f"ranks-{ranks}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        arguments = [*work.arguments(), group, prompt, repetitions, output]
        done = subprocess.run(
            [*command, "-m", __name__, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=_RANK_LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        if done.returncode:
            raise RuntimeError(f"The step on {ranks} processes failed:\n{done.stderr[-2000:]}")
        for side, times in json.loads(output.read_text()).items():
            values[f"{side}, {ranks} process{'es' if ranks > 1 else ''}"] = times
    return Comparison("step time against processes, the same rows on each", "s", values)


def _step_on_ranks(work: Workload, group: int, prompt: int, repetitions: int, output: Path) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    shape = StepShape(prompt, _COMPLETION, group, 2)
    with steppers((BASE, ERPO), work, shape, output.parent) as held:
        # By the wall's clock: processes wait for each other
        times = interleaved({s: stepper.step for s, stepper in held.items()}, repetitions, clock=time.perf_counter)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(times))
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _step_on_ranks(Workload.again(*sys.argv[1:4]), *map(int, sys.argv[4:7]), Path(sys.argv[7]))
