"""Interleaved repetitions, ratios with their spread, and counts that do not depend on the machine's load."""

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, mm_flop, sdpa_backward_flop_count, sdpa_flop_count

# What the counter does not know: attention as a CPU runs it, and the product in place of TRL's fused head
_MORE_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
    torch.ops.aten.addmm_: lambda _, a, b, **__: mm_flop(a, b),
}


# Options of glibc's mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


@dataclass
class Comparison:
    """Sides of one measurement, of which the first is the measure of the others.

    Args:
        name: what is compared, with its shape.
        unit: of `values`.
        values: side -> (R,), one of each round.
        target: side -> the ratio to the first side that is aimed at, and whether it is an upper ("<=") or lower (">=") end.
        limit: side -> what its median, in `unit`, is to stay below.
        counted: whether the values are counts, which repeat exactly.
    """

    name: str
    unit: str
    values: dict[str, list[float]]
    target: dict[str, tuple[str, float]] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    counted: bool = False

    def ratio(self, side: str) -> tuple[float, float, float] | tuple[None, None, None]:
        """Median, lower and upper quartile of a side's ratio to the first, round by round; None where that is 0.

        Rounds, not medians of each side: what else a machine does changes from round to round, less so within one.
        """
        base = next(iter(self.values.values()))
        if not all(base):  # memory that a small mapping adds may be 0
            return None, None, None
        ratios = np.asarray(self.values[side]) / np.asarray(base)
        return tuple(float(x) for x in np.percentile(ratios, [50, 25, 75]))

    def summary(self) -> dict:
        """What JSON keeps."""
        return {
            "name": self.name,
            "unit": self.unit,
            "counted": self.counted,
            "sides": {
                side: {
                    "median": float(np.median(values)),
                    "quartiles": [float(x) for x in np.percentile(values, [25, 75])],
                    "ratio": self.ratio(side),
                    "values": [float(x) for x in values],
                    **({"target": self.target[side]} if side in self.target else {}),
                    **({"limit": self.limit[side]} if side in self.limit else {}),
                }
                for side, values in self.values.items()
            },
        }


def keep_freed_memory() -> None:
    """Have the C library (glibc; others are left alone) keep what this process frees, in one pool for all threads.

    Each trainer of a comparison runs in a thread of its own, and glibc gives each thread a pool that hands large tensors back to the
    system and faults their pages in anew, one more often than another: ratios of equal work then differ by a tenth.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)


def synchronize() -> None:
    """Wait for the device, so that a clock read next to this one times work and not its launch."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def own_clock() -> Callable[[], float]:
    """The clock of work within this process: CPU time on one thread of a CPU, which other jobs change least; else the wall's."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time if alone else time.perf_counter


def seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds of one call by `clock`."""
    synchronize()
    start = clock()
    work()
    synchronize()
    return clock() - start


def interleaved(
    sides: dict[str, Callable[[], None]],
    repetitions: int,
    warm_up: int = 1,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every side, one of each a round, the order turned by one from round to round.

    Args: sides: name -> what to time; repetitions: rounds; warm_up: rounds before that are not kept; clock: default that of
    work within this process.
    """
    clock = clock or own_clock()
    names = list(sides)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, repetitions):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            took = seconds(sides[name], clock)
            if turn >= 0:
                values[name].append(took)
    return values


@contextlib.contextmanager
def counted_flops(found: list[int]) -> Iterator[None]:
    """Appends the floating-point operations of the matrix products and attentions within."""
    with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as counter:
        yield
    found.append(counter.get_total_flops())


@contextlib.contextmanager
def peak_bytes(found: list[int]) -> Iterator[None]:
    """Appends the peak of what tensors allocated within, in bytes, beyond what was allocated on entering.

    On a GPU by PyTorch's allocator; on a CPU by every allocation and release that PyTorch's profiler sees.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield
    moves = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = np.cumsum([size for _, size in sorted(moves, key=lambda move: move[0])])
    found.append(int(max(live, default=0)))


def exponent(sizes, values) -> float:
    """Slope of log value against log size by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
