"""Run by `test_evaluation_processes.py`, under torchrun or `accelerate launch`: the callback measures the embedded model before the
first step, wrapped as it is trained."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers import make_trainer, prompt_token_ids
from scripts.on_cpu import FSDP
from transformers import AutoModelForCausalLM, AutoTokenizer

from erpo_trl import EvaluationCallback, accuracy_reward, load_arithmetic
from erpo_trl.demo import MODEL_DIR
from erpo_trl.evaluation.benchmarks import Benchmark
from erpo_trl.query.sharding import is_sharded


def empty_answers(prompts, trainer) -> dict:
    """Rollouts of one token, for which no rank waits for another."""
    ids = prompt_token_ids(prompts, trainer)
    eos = trainer.processing_class.eos_token_id
    return {"prompt_ids": ids, "completion_ids": [[eos] for _ in ids], "logprobs": [[-1.0] for _ in ids]}


def measure(folder: Path) -> tuple:
    """The trainer, and what the callback logged at step 0."""
    torch.set_num_threads(1)
    trainer = make_trainer(
        folder,
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        dataset=load_arithmetic("train", n=8),
        reward=accuracy_reward,
        rollout=empty_answers,
        max_completion_length=24,
        use_cpu=not FSDP,
    )
    benchmark = Benchmark("seven", load_arithmetic("test", n=7))
    callback = EvaluationCallback(trainer, [benchmark], temperatures=[0, 0.8], samples=3, batch_tokens=150, every=2)
    trainer.add_callback(callback)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "eval/seven/avg@3@T0.8" in entry)
    assert logged["step"] == 0
    return trainer, {name: value for name, value in logged.items() if name.startswith("eval/")}


def main():
    folder = Path(sys.argv[1])
    trainer, metrics = measure(folder)
    accelerator = trainer.accelerator
    found = {
        "world": accelerator.num_processes,
        "sharded": is_sharded(accelerator.unwrap_model(trainer.model_wrapped)),
    }
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(found | {"metrics": metrics}))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
