r"""Rewards that training and evaluation share: is the boxed answer right, and is the completion in the asked format.

`score_answer` is the one scorer. It takes the last `\boxed{...}` of a completion and lets math-verify compare it with the
gold answer, in a process of its own that is killed when it is late: the limit is wall-clock, holds in every thread, and
a slow answer costs its own score and nothing else.

Known limits, each of them pinned by a test:

- `9\%` equals both 9 and 0.09, because math-verify compares whole percents either way; 7.41\% and 7.41 differ.
- A decimal equals an exact number when both round to the same six decimals and agree to one part in a thousand, so 0.333333
  is right for 1/3, and 0.33 is not.
- The imaginary unit is a symbol: 1/i and -i differ.
- A gold in notation that math-verify cannot parse (a congruence, `E_1`) is compared as text: another spelling of it is wrong.
- Single letters are compared without their case.
- Bare words of two or three letters are products: `no` equals `on`, and `IV` equals `VI`, which may be a current and a voltage.
  `\text{IV}` is a word.
- Units are dropped: 5 kg equals 5 m. The base of a number counts only where the gold and the answer both have one.
- Thousands are joined at `,`, `{,}` and `\,`, not at a plain space; repeating decimals are read with a bar, not with dots.
- Where POSIX pipes and timers are missing (Windows), the scorer does not run.
"""

import atexit
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path

from .imports import import_function

logger = logging.getLogger(__name__)

# Seconds of wall-clock time that one answer, its gold included, may take. Ordinary answers take milliseconds.
TIME_LIMIT_S = 5.0
# Seconds that a new worker may take to import sympy, on a busy machine or a cold network disk.
START_LIMIT_S = 120.0

# No leading zero, plus sign or thousands mark: the integers that have one spelling only.
PLAIN_INTEGER = re.compile(r"-?[1-9]\d{0,17}|0")
GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
BOX = re.compile(r"\\boxed\s*\{")
BOX_OF_SOLUTIONS = re.compile(r"\\f?box(?:ed)?\s*\{|\\boxed\s+(?=[^{\s])")
BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
THINK_BLOCK = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?P<rest>(?:(?!</?think>).)*)", re.DOTALL)


class _WorkerLost(Exception):
    """The worker gave no reply in time, or died. The message says which."""

    def __init__(self, died: bool):
        super().__init__("The answer checker died" if died else "The answer checker ran out of time")
        self.died = died
        self.reading_gold = False


class MathWorker:
    """A process that compares answers, started on first use and again after each kill.

    One request is under way at a time; threads queue for it. A forked child starts a worker of its own.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return None if self._process is None else self._process.pid

    def compare(self, gold: str, answer: str | None, limit_s: float) -> bool | None:
        """Whether `answer` means the same as `gold`.

        Args: gold, answer: LaTeX or plain text, without a box; answer None asks only whether the gold can be read;
        limit_s: wall-clock seconds for the gold and the answer together, not counting the start of a worker.
        Returns: None for a gold that cannot be read (in time), else whether the answer is right (in time).
        Raises: RuntimeError when no worker can be started.
        """
        with self._lock:
            for last_try in (False, True):
                try:
                    return self._exchange(gold, answer, limit_s)
                except _WorkerLost as lost:
                    # A death may have nothing to do with the answer (memory pressure, a stray signal): ask once more
                    if lost.died and not last_try:
                        continue
                    logger.warning("%s on the answer %.80r to %.80r; a new worker takes over", lost, answer, gold)
                    return None if lost.reading_gold else False

    def close(self) -> None:
        """Ends the worker; the next comparison starts another."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """For a forked child: lets go of the parent's worker without ending it."""
        process, self._process, self._unread, self._lock = self._process, None, b"", threading.Lock()
        if process is not None:
            # Held open here, the pipes would keep the worker alive after its parent
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0  # not a child of this process: there is nothing to wait for

    def _exchange(self, gold: str, answer: str | None, limit_s: float) -> bool | None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        deadline = time.monotonic() + limit_s
        request = memoryview((json.dumps({"gold": gold, "answer": answer, "limit": limit_s}) + "\n").encode())
        reading_gold = True
        try:
            while request:
                request = request[self._process.stdin.write(request) :]
            if not self._reply(deadline)["readable"]:
                return None
            reading_gold = False
            return answer is not None and self._reply(deadline)["equal"]
        except BaseException as error:
            # Whatever ends this early, an interrupt included, leaves a reply behind that the next request would read
            self._stop()
            if isinstance(error, BrokenPipeError):
                error = _WorkerLost(died=True)
            if isinstance(error, _WorkerLost):
                error.reading_gold = reading_gold
            raise error

    def _reply(self, deadline: float) -> dict:
        pipe = self._process.stdout
        while b"\n" not in self._unread:
            if not wait([pipe], max(0.0, deadline - time.monotonic())):
                raise _WorkerLost(died=False)
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                raise _WorkerLost(died=True)
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        reply = json.loads(line)
        if reply.get("error"):
            logger.debug("math-verify failed with %s; the text counts as unreadable", reply["error"])
        return reply

    def _start(self) -> None:
        self._stop()
        # Run as a file with this interpreter's path: neither the user's script nor this package is imported in the worker
        script = str(Path(__file__).with_name("_math_worker.py"))
        launch = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", launch, json.dumps(sys.path), script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a buffer would be copied by a fork, and flushed twice
        )
        try:
            self._reply(time.monotonic() + START_LIMIT_S)
        except _WorkerLost as lost:
            code = self._process.poll()
            self._stop()
            raise RuntimeError(
                f"the math-verify worker did not start: {lost} (exit code {code}, {sys.executable}). "
                "Its own message, if any, is above; check that `import math_verify` works in this environment"
            ) from lost
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def make_worker() -> MathWorker:
    """A worker that ends with this process and is not shared with forked children."""
    worker = MathWorker()
    atexit.register(worker.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=worker.forget)
    return worker


_WORKER = make_worker()


def gold_text(value) -> str | None:
    """A gold answer as the text that is compared: `142.0` is "142", a list is joined by ", ", a solution that ends in
    `#### 2,000`, as GSM8K's do, is "2000".

    Returns: None for None, NaN, an empty list and blank text: there is no gold.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, (list, tuple)):
        parts = [gold_text(part) for part in value]
        return None if not parts or None in parts else ", ".join(parts)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    _, hashes, text = str(value).rpartition("####")
    text = text.strip()
    if hashes and GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return text or None


def completion_text(completion) -> str:
    """The text that a model answered with.

    Args: completion: a string, or chat messages, of which the last assistant message counts; its `content` may be a string,
    None, or a list of parts, of which the texts count.
    """
    if isinstance(completion, str):
        return completion
    messages = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = (messages[-1].get("content") if messages else None) or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one before `start`, -1 without one. Escaped braces are no braces to LaTeX."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return -1


def last_boxed(text: str, written_solution: bool = False) -> str | None:
    r"""What the last `\boxed{...}` of `text` holds, nested braces and all; None without a box, or if the last is left open.

    Args: text: a completion or a solution; written_solution: also take the `\fbox{...}` and `\boxed 5` of human authors.
    """
    matches = list((BOX_OF_SOLUTIONS if written_solution else BOX).finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if not match[0].endswith("{"):
        return re.match(r"[^$\n]*", text[match.end() :])[0].strip()
    end = _closing_brace(text, match.end())
    return None if end < 0 else text[match.end() : end].strip()


@lru_cache(maxsize=1024)
def _warn_unreadable(gold: str) -> None:
    # Cached, so that a gold is reported once, however many completions it meets
    logger.warning("The gold answer %.200r (column `answer`) cannot be read: its completions get no reward", gold)


@lru_cache(maxsize=1 << 14)
def _verdict(gold: str, answer: str | None, limit_s: float, worker: MathWorker) -> float | None:
    # A timeout is remembered like any verdict: a group of samples that agree on a slow answer costs its limit once
    if PLAIN_INTEGER.fullmatch(gold) and (answer is None or PLAIN_INTEGER.fullmatch(answer)):
        # Two integers of one spelling each are equal exactly when their texts are, and math-verify parses these texts
        # to sympy Integers and compares by value: the verdict is the same, without a round trip
        return float(gold == answer)
    if answer is not None and _verdict(gold, None, limit_s, worker) is None:
        return None
    right = worker.compare(gold, answer, limit_s)
    return None if right is None else float(right)


def score_answer(gold, completion, time_limit_s: float = TIME_LIMIT_S, worker: MathWorker = _WORKER) -> float | None:
    r"""Whether a completion's last boxed answer is right.

    Args: gold: the right answer, a string (LaTeX, with or without `$` or box, or a solution that ends in a box or in GSM8K's
    `#### answer`), a number, or a list of the parts of one answer;
    completion: a string or chat messages; time_limit_s: wall-clock seconds for reading the gold, and again for comparing;
    worker: the process that compares; by default one that all callers share.
    Returns: 1.0 right; 0.0 wrong, no box, an empty box, or too slow to parse; None when the gold is missing or cannot be
    read in time, whatever the completion.
    Raises: RuntimeError when the math-verify worker cannot be started.
    """
    gold = gold_text(gold)
    if gold is not None and BOX_COMMAND.search(gold):
        gold = last_boxed(gold, written_solution=True)  # the worker boxes what it compares itself
    if not gold:
        return None
    return _verdict(gold, last_boxed(completion_text(completion)) or None, time_limit_s, worker)


class _FirstCompletions:
    """Looks at the first completions that are scored for a fault that all of them share, which their rewards do not name."""

    ENOUGH = 64

    def __init__(self):
        self.readable = self.unreadable = 0
        self.done = False

    def look(self, golds: list, completions: list, rewards: list[float | None]) -> None:
        """Counts these, and warns once: of golds none of which can be read, or of completions none of which has a box."""
        if self.done:
            return
        self.readable += sum(reward is not None for reward in rewards)
        self.unreadable += sum(reward is None and bool(gold_text(gold)) for gold, reward in zip(golds, rewards))
        if any(last_boxed(completion_text(completion)) for completion in completions):
            self.done = self.readable > 0
        elif self.readable >= self.ENOUGH:
            self.done = True
            logger.warning(
                "None of the first %d completions has a filled \\boxed{...}, and the accuracy reward reads nothing else: all got "
                "0. Ask for the box at the end of each problem: `suffix` of the loaders, `--prompt_suffix` of the commands",
                self.readable,
            )
        if self.unreadable >= self.ENOUGH and not self.readable:
            self.done = True
            logger.warning(
                "None of the first %d gold answers (column `answer`) can be read, so the accuracy reward gives nothing: name the "
                "column of the answers alone, `answer` of the loaders, `--answer_field` of the commands",
                self.unreadable,
            )


_FIRST_COMPLETIONS = _FirstCompletions()


def accuracy_reward(
    completions: list, answer: list, log_metric: Callable[[str, float], None] | None = None, **kwargs
) -> list[float | None]:
    """TRL reward function: 1.0 where the last boxed answer is right, 0.0 where not, None where the gold cannot be read.

    Args: completions: strings or chat messages; answer: the gold of each, the dataset's `answer` column; log_metric: TRL's
    hook, given the number of unreadable golds as `rewards/unreadable_gold`; kwargs: the other columns, unused.
    """
    if len(completions) != len(answer):
        raise ValueError(
            f"accuracy_reward got {len(completions)} completions and {len(answer)} answers; expected as many"
        )
    rewards = [score_answer(gold, completion) for gold, completion in zip(answer, completions)]
    unreadable = [gold for gold, reward in zip(answer, rewards) if reward is None]
    for gold in unreadable:
        _warn_unreadable(str(gold))
    _FIRST_COMPLETIONS.look(answer, completions, rewards)
    if log_metric is not None:
        log_metric("rewards/unreadable_gold", float(len(unreadable)))
    return rewards


def _opens_thinking(prompt) -> bool:
    """Whether a prompt, or the assistant's turn at its end, leaves a `<think>` for the completion to go on from."""
    return completion_text(prompt if isinstance(prompt, str) else prompt[-1:]).rstrip().endswith("<think>")


def format_reward(completions: list, prompts: list | None = None, **kwargs) -> list[float]:
    r"""TRL reward function: 1.0 for one `<think>...</think>` at the start and a filled `\boxed{...}` after it, else 0.0.

    The opening tag may be the prompt's last word. One that a chat template adds, as those of the R1 distillations do, is seen
    by no reward: with such a model every completion that goes on from it gets 0.0.

    Args: completions, prompts: strings or chat messages; kwargs: the dataset's columns, unused.
    """
    texts = [completion_text(completion) for completion in completions]
    if prompts is not None:
        texts = ["<think>" * _opens_thinking(prompt) + text for prompt, text in zip(prompts, texts)]
    matches = [THINK_BLOCK.fullmatch(text) for text in texts]
    return [float(match is not None and bool(last_boxed(match["rest"]))) for match in matches]


REWARDS: dict[str, Callable] = {"accuracy": accuracy_reward, "format": format_reward}


def resolve_reward(name_or_path: str | Callable) -> Callable:
    """A reward function by its name in `REWARDS`, or by where it is.

    Args: name_or_path: "accuracy", "package.module:function", "package.module.function", "path/to/file.py:function"; a
    function is returned as it is.
    Raises: ValueError that says what is wrong and lists the registry.
    """
    if callable(name_or_path):
        return name_or_path
    if name_or_path in REWARDS:
        return REWARDS[name_or_path]
    return import_function(name_or_path, "reward", REWARDS)
