"""An optimizer step as `Trainer` does it, without generation: time, memory and counts of ERPO and of what it is compared to.

Completions come from a `rollout_func`, the same for every side. Each side is a trainer that runs in a thread of its own and
goes on for one step when it is told to, so that steps of all sides can be interleaved within one process.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from ..config import ERPOConfig
from ..train import take_one_gpu
from ..trainer import ERPOTrainer
from .measure import Comparison, counted_flops, interleaved, peak_bytes
from .release import ReleaseSchemeTrainer
from .workload import Workload

BASE, REFERENCE_MODEL, ERPO, RELEASE = "GRPO β=0", "GRPO β=0.04", "ERPO", "release's scheme"
# Side -> trainer, config, what its config adds
SIDES = {
    BASE: (GRPOTrainer, GRPOConfig, {"beta": 0.0}),
    REFERENCE_MODEL: (GRPOTrainer, GRPOConfig, {"beta": 0.04}),
    ERPO: (ERPOTrainer, ERPOConfig, {}),
    RELEASE: (ReleaseSchemeTrainer, GRPOConfig, {"beta": 0.04}),
}
# The same of ERPO alone, by its `shared_prefix`
SHARING = {mode: (ERPOTrainer, ERPOConfig, {"shared_prefix": mode}) for mode in ("off", "on", "auto")}


@dataclass(frozen=True)
class StepShape:
    """Args: prompt, completion: tokens; group: K; queries: distinct prompts of a step; micro_batches: of a step."""

    prompt: int
    completion: int
    group: int
    queries: int
    micro_batches: int = 2

    def __str__(self) -> str:
        return f"({self.prompt}, {self.completion}, {self.group})"


class _Stopped(Exception):
    """Ends a trainer between two steps."""


class Stepper(TrainerCallback):
    """Holds a trainer between its optimizer steps and lets it do one at a time.

    A step is all from one beginning to the next: forwards and backwards, the optimizer, logging, and the next batch's rows.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._around: contextlib.AbstractContextManager = contextlib.nullcontext()
        self._running = contextlib.ExitStack()
        self._over, self._error = False, None
        self._threads = torch.get_num_threads()  # of each thread its own
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        """Train up to the first step."""
        self._thread.start()
        self._wait()

    def step(self, around: contextlib.AbstractContextManager | None = None) -> None:
        """One optimizer step, within `around`."""
        self._around = around or contextlib.nullcontext()
        self._go.release()
        self._wait()

    def stop(self) -> None:
        """End the run, if it has begun."""
        if self._thread.ident is None:
            return
        self._over = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._held.acquire()
        if self._error is not None:
            raise self._error

    def _train(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self.trainer.train()
        except _Stopped:
            pass
        except BaseException as error:  # goes on in the thread that waits
            self._error = error
        finally:
            self._held.release()

    def on_step_begin(self, args, state, control, **kwargs):
        self._running.close()
        self._held.release()
        self._go.acquire()
        if self._over:
            raise _Stopped
        self._running.enter_context(self._around)


def make_trainer(side: str, work: Workload, shape: StepShape, folder: Path, **fields):
    """A trainer of a side that never generates."""
    trainer_class, config_class, more = (SIDES | SHARING)[side]
    rows = shape.queries * shape.group
    completions = work.completions(rows, shape.completion)

    def rollout(prompts, trainer):
        ids = trainer._tokenize_prompts(prompts)[0]
        return {"prompt_ids": ids, "completion_ids": completions[: len(ids)], "logprobs": None}

    def reward(completion_ids, **kwargs):
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    if issubclass(config_class, ERPOConfig):
        more = {**more, "reference_cache_dir": str(folder / "reference")}
    settings = {
        "output_dir": str(folder / "run"),
        "use_cpu": not work.gpu,
        "bf16": work.gpu,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": rows // shape.micro_batches,
        "gradient_accumulation_steps": shape.micro_batches,
        "num_generations": shape.group,
        "max_completion_length": shape.completion,
        "max_steps": 1_000_000,
        "seed": work.seed,
    }
    args = config_class(**settings | more | fields)
    take_one_gpu(args)
    trainer = trainer_class(
        model=work.model(),
        reward_funcs=reward,
        args=args,
        train_dataset=work.dataset(8 * shape.queries, shape.prompt),
        processing_class=work.tokenizer,
        rollout_func=rollout,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


@contextlib.contextmanager
def compact_head(forced: bool) -> Iterator[None]:
    """Have TRL's fused head project labelled positions only, as it does on a GPU, on any device."""
    if not forced:
        yield
        return
    with mock.patch.object(trl_utils, "_use_triton", lambda device: True):
        yield


@contextlib.contextmanager
def steppers(sides, work: Workload, shape: StepShape, folder: Path) -> Iterator[dict[str, Stepper]]:
    """A trainer of every side, held before its second step: the first makes the optimizer's state."""
    held = {side: Stepper(make_trainer(side, work, shape, folder)) for side in sides}
    try:
        for stepper in held.values():
            stepper.start()
            stepper.step()
        yield held
    finally:
        for stepper in held.values():
            stepper.stop()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def held_bytes(trainer) -> int:
    """Bytes that a trainer keeps between steps: weights, a reference model's, the optimizer's state."""
    models = [trainer.model, getattr(trainer, "ref_model", None)]
    tensors = [x for model in models if model is not None for x in (*model.parameters(), *model.buffers())]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    tensors += [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def measure_step(
    work: Workload,
    shape: StepShape,
    vocabulary: str,
    repetitions: int,
    folder: Path,
    compact: bool,
    sides=tuple(SIDES),
) -> list[Comparison]:
    """Time, peak memory and floating-point operations of a step on several sides.

    Args: vocabulary: its size, for the name; repetitions: rounds; folder: for what trainers write; compact: force the
    compact head (it is the only one on a GPU); sides: `BASE`, `ERPO`, and what else.
    """
    head = "labelled positions only" if compact or work.gpu else "every position"
    name = f"{shape}, vocabulary {vocabulary}, head on {head}"
    at_most = 1.05 if shape.prompt >= 4 * shape.completion and (compact or work.gpu) else 1.03
    target = {ERPO: ("<=", at_most)}
    with compact_head(compact), steppers(sides, work, shape, folder) as held:
        times = interleaved({side: stepper.step for side, stepper in held.items()}, repetitions)
        memory, flops = {}, {}
        for side, stepper in held.items():
            found: list[int] = []
            stepper.step(counted_flops(found))
            stepper.step(peak_bytes(found))
            flops[side], memory[side] = [float(found[0])], [float(found[1] + held_bytes(stepper.trainer))]
    return [
        Comparison(f"step time {name}", "s", times, target),
        # Off a GPU, what stands in for the compact head's kernel holds copies of its tiles
        Comparison(
            f"step peak memory {name}", "bytes", memory, {} if compact and not work.gpu else target, counted=True
        ),
        Comparison(f"step compute {name}", "FLOP", flops, counted=True),
        *(
            [
                _to_release(f"step time against the release's scheme {name}", "s", times),
                _to_release(f"step compute against the release's scheme {name}", "FLOP", flops, counted=True),
            ]
            if RELEASE in sides
            else []
        ),
    ]


def _to_release(name: str, unit: str, values: dict, **more) -> Comparison:
    sides = {RELEASE: values[RELEASE], ERPO: values[ERPO]}
    return Comparison(name, unit, sides, {ERPO: ("<=", 0.80)}, **more)
