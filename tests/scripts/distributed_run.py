"""Run by `test_two_processes.py` and `test_dpo.py`, on one process or under torchrun: trains a few steps or scores prompts,
and saves per rank what the tests compare. `runs.json` in the folder given holds the runs by name.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import PartialState
from helpers import (
    Recorder,
    byte_tokenizer,
    count_forwards,
    fixed_rollouts,
    keep_raw_advantages,
    make_config,
    make_trainer,
    out_of_memory_above,
    prompts_dataset,
    shift_reference,
    tiny_model,
)
from preference_helpers import make_preference_trainer, pairs

from erpo_trl import DatasetMapper, ERPORLOOTrainer, ERPOTrainer


class Patch:
    """The one method of pytest's monkeypatch that the instruments use."""

    setattr = staticmethod(setattr)


def train(settings: dict, folder: Path) -> dict:
    keep_raw_advantages(Patch)
    model = tiny_model("qwen2")
    shifts = settings.pop("shifts")
    data = prompts_dataset(settings.pop("prompts"))
    evaluation = settings.pop("evaluation", None)
    if settings.pop("stream", False):
        data = data.to_iterable_dataset()
    else:
        mapped = DatasetMapper(model, byte_tokenizer(), make_config(folder))(data)
        data = shift_reference(mapped, lambda i: shifts[i])
    trainer = make_trainer(
        folder,
        model=model,
        cls={"grpo": ERPOTrainer, "rloo": ERPORLOOTrainer}[settings.pop("trainer", "grpo")],
        dataset=data,
        rollout=fixed_rollouts(),
        trainer_kwargs={"eval_dataset": prompts_dataset(evaluation)} if evaluation else None,
        **settings,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    metrics = trainer.evaluate() if evaluation else {}
    steps = [
        {"batches": s.batches, "losses": s.losses, "grads": s.grads, "weights": s.weights, "forwards": s.forwards}
        | {"labelled": [labels.sum().item() for labels in s.prompt_labels]}
        for s in recorder.done
    ]
    return {
        "steps": steps,
        "log": trainer.state.log_history,
        "metrics": metrics,
        "world": trainer.accelerator.num_processes,
        "distributed": str(trainer.accelerator.distributed_type),
    }


def train_pairs(settings: dict, folder: Path) -> dict:
    data, evaluation = pairs(settings.pop("prompts")), pairs(settings.pop("evaluation"))
    trainer = make_preference_trainer(folder, data=data, trainer_kwargs={"eval_dataset": evaluation}, **settings)
    recorder = Recorder().attach(trainer)
    trainer.train()
    return {
        "grads": [step.grads for step in recorder.done],
        "batches": [step.batches for step in recorder.done],
        "metrics": trainer.evaluate(),
        "log": trainer.state.log_history,
        "scored": trainer.scoring_reports[0][1].scored,
        "distributed": str(trainer.accelerator.distributed_type),
    }


def score(settings: dict, folder: Path) -> dict:
    config = make_config(folder, reference_batch_tokens=settings["batch_tokens"])  # also sets up the process group
    state = PartialState()
    config.reference_cache_dir = str(folder / settings["cache_dirs"][state.process_index])
    model = tiny_model("qwen2")
    mapper = DatasetMapper(model, byte_tokenizer(), config)
    with count_forwards(model) as counter:
        if "memory" in settings:
            out_of_memory_above(model, settings["memory"][state.process_index])
        data = mapper(prompts_dataset(settings["prompts"]))
    return {
        "world": state.num_processes,
        "forwards": counter.calls,
        "prompts": list(data["prompt"]),
        "logps": list(data["ref_query_logps"]),
        "nll": list(data["ref_query_nll"]),
        "weights": list(data["query_weight"]),
        "mean_nll": mapper.report.mean_nll,
    }


def main():
    folder = Path(sys.argv[1])
    runs = json.loads((folder / "runs.json").read_text())
    torch.set_num_threads(1)
    results = {}
    for name, settings in runs.items():
        task = {"train": train, "train_pairs": train_pairs, "score": score}[settings.pop("task")]
        results[name] = task(settings, folder if task is score else folder / name)
        PartialState().wait_for_everyone()
    torch.save(results, folder / f"rank{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
