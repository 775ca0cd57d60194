"""The terminal while a run trains: one line that says where it is, and a table at its end."""

import shutil
import sys
import time
from collections.abc import Sequence

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..evaluation.report import markdown
from .analysis import log_series, tail_mean

# Label -> logged names, the first that is there
SHOWN = {
    "reward": ("reward",),
    "query/kl": ("query/kl",),
    "policy/kl": ("policy/kl", "kl"),
    "entropy": ("entropy",),
    "α": ("query/alpha",),
}


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: `1:02:03`, `2:03`, `0:03`."""
    hours, rest = divmod(int(round(seconds)), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def line(step: int, max_steps: int, logs: dict, tokens_per_second: float | None, remaining: float | None) -> str:
    """The live line.

    Args: step, max_steps: optimizer steps; logs: the metrics logged last, {} before the first; tokens_per_second: prompts' and
    completions' tokens of all processes; remaining: seconds to the end. None where it is not known.
    """
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
    for label, names in SHOWN.items():
        value = next((logs[name] for name in names if logs.get(name) is not None), None)
        if value is not None:
            parts.append(f"{label} {value:.3g}")
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:,.0f} tok/s")
    if remaining is not None:
        parts.append(f"ETA {duration(remaining)}")
    return "  ".join(parts)


def closing_table(log_history: Sequence[dict]) -> str:
    """Markdown: what was shown, at the first log and over the last tenth of them, with its extremes; empty without a log."""
    rows = [["", "first", "end", "lowest", "highest"]]
    for label, names in SHOWN.items():
        for name in names:
            _, values = log_series(log_history, name)
            if len(values):
                numbers = (values[0], tail_mean(values), values.min(), values.max())
                rows.append([label, *(f"{number:.4g}" for number in numbers)])
                break
    return markdown(rows) if len(rows) > 1 else ""


class LiveLine(TrainerCallback):
    """Prints where a run is: on a terminal one line that is written over, elsewhere a line per log; then a closing table.

    Silent on all processes but the first. `disable_tqdm` asks for plain lines on a terminal too. [`show_live_line`] puts it in
    the place of transformers' own.

    Args: stream: where to. Default: standard output, as it is when training begins.
    """

    def __init__(self, stream=None):
        self._given = stream

    def on_train_begin(self, args, state, control, **kwargs):
        self.stream = self._given or sys.stdout
        self._in_place = self.stream.isatty() and not args.disable_tqdm
        self._began = self._logged = time.perf_counter()
        self._first_step = state.global_step
        self._tokens, self._rate, self._logs = None, None, {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self._in_place:
            self._rewrite(self._line(state))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "loss" not in logs:
            return  # evaluations, and the summary at the end
        now = time.perf_counter()
        if "num_tokens" in logs:
            # A resumed run's first log holds the tokens from before as well
            if self._tokens is not None or self._first_step == 0:
                self._rate = (logs["num_tokens"] - (self._tokens or 0)) / max(now - self._logged, 1e-9)
            self._tokens, self._logged = logs["num_tokens"], now
        self._logs = logs
        if self._in_place:
            self._rewrite(self._line(state))
        else:
            print(self._line(state), file=self.stream, flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if self._in_place:
            self._rewrite("")
        seconds, steps = time.perf_counter() - self._began, state.global_step - self._first_step
        table = closing_table(state.log_history)
        per_step = f", {seconds / steps:.2f} s a step" if steps else ""
        end = f"{steps} steps in {duration(seconds)}{per_step}"
        print("\n".join(part for part in (table, end) if part), file=self.stream, flush=True)

    def _line(self, state) -> str:
        done = state.global_step - self._first_step
        remaining = None
        if done:
            remaining = (time.perf_counter() - self._began) / done * (state.max_steps - state.global_step)
        return line(state.global_step, state.max_steps, self._logs, self._rate, remaining)

    def _rewrite(self, text: str) -> None:
        # Back to the line's beginning, and clear to its end; a line that wraps could not be written over
        width = shutil.get_terminal_size().columns - 1
        self.stream.write(f"\r\x1b[K{text[:width]}")
        self.stream.flush()


def show_live_line(trainer) -> None:
    """Give a trainer a [`LiveLine`] in place of transformers' progress bar or printed dicts."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(LiveLine())
