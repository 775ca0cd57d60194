"""Scoring by the training reward's scorer, on several workers."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from ..rewards import TIME_LIMIT_S, MathWorker, last_boxed, make_worker, score_answer

# Kept from call to call, since a worker takes seconds to import sympy
_WORKERS: list[MathWorker] = []


def _kept_workers(count: int) -> list[MathWorker]:
    _WORKERS.extend(make_worker() for _ in range(count - len(_WORKERS)))
    return _WORKERS[:count]


def default_workers() -> int:
    """Processes that compare answers unless told otherwise: the cores of this process, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


def score_texts(
    golds: Sequence, texts: Sequence[str], workers: int, time_limit_s: float = TIME_LIMIT_S
) -> tuple[list[str | None], list[float | None]]:
    """The answer read from each text, and whether it is right.

    Args: golds: of each text; workers: processes that compare answers, each started only when needed; time_limit_s: per answer.
    Returns: answers (None without a filled box) and the verdicts of `score_answer`: 1.0, 0.0, or None for a gold that cannot
    be read.
    """
    answers = [last_boxed(text) or None for text in texts]
    # Samples agree on many answers: each (gold, answer) is compared once, and all of a gold's in one worker, which reads the
    # gold once
    pairs = {}
    for gold, answer in zip(golds, answers):
        pairs.setdefault(repr(gold), (gold, {}))[1][answer] = None
    free = SimpleQueue()
    for worker in _kept_workers(workers):
        free.put(worker)

    def score(gold, verdicts: dict) -> None:
        worker = free.get()
        try:
            for answer in verdicts:
                # The blank keeps a trailing backslash from escaping the brace
                text = "" if answer is None else f"\\boxed{{{answer} }}"
                verdicts[answer] = score_answer(gold, text, time_limit_s, worker)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda pair: score(*pair), pairs.values()))
    return answers, [pairs[repr(gold)][1][answer] for gold, answer in zip(golds, answers)]
