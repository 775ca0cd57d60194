"""Run by `test_sharded.py`, on one process or under `accelerate launch`: trains and scores a model that ZeRO or FSDP2 may
shard, and saves per rank what the tests compare. `runs.json` in the folder given holds the runs by name.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import PartialState
from helpers import (
    byte_tokenizer,
    checksum_reward,
    count_forwards,
    fixed_rollouts,
    lora_config,
    make_config,
    prompts_dataset,
    shift_reference,
    tiny_model,
)
from scripts.on_cpu import FSDP
from transformers import TrainerCallback

from erpo_trl import DatasetMapper, ERPOTrainer

# Not from PartialState: made before the training arguments, it would be one of a single process
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class WholeWeights(TrainerCallback):
    """All weights at the start and after the first step. With plain SGD at rate 1 their difference is the gradient, also
    where an engine has stepped and dropped it before any callback could look.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.weights = []

    def _look(self):
        found = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped) or {}
        self.weights.append({name: value.detach().clone() for name, value in found.items()})

    def on_train_begin(self, args, state, control, **kwargs):
        self._look()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._look()

    @property
    def gradient(self) -> dict:
        start, end = self.weights
        return {name: value.float() - end[name].float() for name, value in start.items()}


def build(settings: dict, folder: Path, root: Path) -> ERPOTrainer:
    fields = {
        "per_device_train_batch_size": 8 // WORLD,
        "num_generations": 4,
        "learning_rate": 1.0,
        "max_steps": 2,
        "query_kl_coef": 0.3,
        "use_cpu": not FSDP,
        "model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"},
    } | settings.get("fields", {})
    config = make_config(folder, **fields)
    if "cache_dirs" in settings:
        config.reference_cache_dir = str(folder / settings["cache_dirs"][PartialState().process_index])
    model = str(root / settings.get("model", "llama_tied"))
    return ERPOTrainer(
        model=tiny_model("llama_tied") if settings.get("instance") else model,
        reward_funcs=checksum_reward,
        args=config,
        train_dataset=prompts_dataset(settings["prompts"]),
        processing_class=byte_tokenizer(),
        rollout_func=fixed_rollouts(),
        peft_config=lora_config() if settings.get("lora") else None,
    )


def run(settings: dict, folder: Path, root: Path) -> dict:
    trainer = build(settings, folder, root)
    mapper_refusal = None
    if settings.get("map_alone"):
        try:
            DatasetMapper(trainer.model, byte_tokenizer(), trainer.args)(prompts_dataset(settings["prompts"]))
        except ValueError as error:
            mapper_refusal = str(error)
    with count_forwards(trainer.model) as counter:
        trainer.prepare_reference()
    table = trainer.train_dataset
    result = {
        "rows": list(table["ref_query_logps"]),
        "weights": list(table["query_weight"]),
        "fingerprint": trainer.dataset_mapper.reference.fingerprint,
        "forwards": counter.calls,
        "report": trainer.dataset_mapper.report,
        "refusal": mapper_refusal,
        "world": trainer.accelerator.num_processes,
        "distributed": trainer.accelerator.distributed_type.value,
    }
    if settings["task"] == "score":
        return result
    if "shifts" in settings:
        trainer.train_dataset = shift_reference(table, lambda i: settings["shifts"][i])
    weights = WholeWeights(trainer)
    trainer.add_callback(weights)
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    result |= {
        "log": trainer.state.log_history,
        "wrapped": type(trainer.model_wrapped).__name__,
        "trainable": [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad],
        "gradient": weights.gradient if PartialState().is_main_process and len(weights.weights) == 2 else None,
    }
    return result


def main():
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    results = {}
    for name, settings in json.loads((root / "runs.json").read_text()).items():
        # Scoring runs that name folders of their ranks share them
        results[name] = run(settings, root if "cache_dirs" in settings else root / name, root)
        PartialState().wait_for_everyone()
    torch.save(results, root / f"rank{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
