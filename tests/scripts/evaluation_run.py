"""Run by `test_evaluation_processes.py` under torchrun: the callback measures the embedded model, untrained, on each rank."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from erpo_trl import EvaluationCallback, accuracy_reward, load_arithmetic
from erpo_trl.demo import MODEL_DIR
from erpo_trl.evaluation.benchmarks import Benchmark


def measure(folder: Path) -> tuple:
    """The accelerator, and what the callback measures."""
    torch.set_num_threads(1)
    trainer = make_trainer(
        folder,
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        dataset=load_arithmetic("train", n=8),
        reward=accuracy_reward,
        max_completion_length=24,
    )
    benchmark = Benchmark("seven", load_arithmetic("test", n=7))
    callback = EvaluationCallback(trainer, [benchmark], temperatures=[0, 0.8], samples=3, batch_tokens=150)
    return trainer.accelerator, callback.measure()


def main():
    folder = Path(sys.argv[1])
    accelerator, metrics = measure(folder)
    found = {"world": accelerator.num_processes, "metrics": metrics}
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
