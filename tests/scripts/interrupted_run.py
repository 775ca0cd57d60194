"""Run by `test_interruptions.py`: one ERPO run from a folder's `settings.json`, which the test kills, terminates or lets finish.

What a step did is appended to `rank<r>.jsonl` as soon as it is known, so that it outlives a kill.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import scripts.on_cpu  # noqa: F401
import torch
from helpers import byte_tokenizer, checksum_reward, fixed_rollouts, make_config, prompts_dataset
from transformers import TrainerCallback

from erpo_trl import ERPOTrainer
from erpo_trl.query import reference, scoring


class Diary(TrainerCallback):
    """Writes each event of a run as one line."""

    def __init__(self, path: Path, pause_after: int | None):
        self.path = path
        self.pause_after = pause_after

    def write(self, **event):
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.write(step=state.global_step, loss=logs["loss"], kl=logs["query/kl"], reward=logs.get("reward", 0.0))

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.pause_after:
            self.write(event="paused", step=state.global_step)
            time.sleep(5)  # where the test's signal finds the run


def main():
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    diary = Diary(folder / f"rank{rank}.jsonl", settings.get("pause_after"))
    config = make_config(
        folder,
        per_device_train_batch_size=8 // world,
        num_generations=4,
        learning_rate=0.5,
        query_kl_coef=0.3,
        model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"},
        **settings["fields"],
    )

    # Small parts, and a diary of what is scored, with a pause where the test's signal finds the pass
    reference._TOKENS_PER_PART = 1
    score_queries = scoring.score_queries

    def watched(policy, queries, processing_class):
        if settings.get("pause_in_scoring") == watched.calls:
            diary.write(event="paused")
            time.sleep(30)
        watched.calls += 1
        diary.write(event="scored", queries=[query.tolist() for query in queries])
        return score_queries(policy, queries, processing_class)

    watched.calls = 0
    scoring.score_queries = watched

    rollout = fixed_rollouts()

    def rollout_with_diary(prompts, trainer):
        diary.write(event="prompts", prompts=sorted(set(prompts)))
        return rollout(prompts, trainer)

    trainer = ERPOTrainer(
        model=str(folder / "model"),
        reward_funcs=checksum_reward,
        args=config,
        train_dataset=prompts_dataset(settings["prompts"]),
        processing_class=byte_tokenizer(),
        rollout_func=rollout_with_diary,
        callbacks=[diary],
    )
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    diary.write(
        event="finished",
        world=trainer.accelerator.num_processes,
        distributed=trainer.accelerator.distributed_type.value,
        rows=[list(row) for row in trainer.train_dataset["ref_query_logps"]],
        mean_nll=trainer.dataset_mapper.report.mean_nll,
    )


if __name__ == "__main__":
    main()
