"""The fused head as GPUs run it: only labelled positions are projected.

On other devices TRL projects every position; here its switch is turned on, with torch in place of the Triton kernel.
"""

import copy

import pytest
import torch
from helpers import Recorder, logged, make_trainer, prompts_dataset, tiny_model
from trl import GRPOTrainer
from trl.trainer import utils

from erpo_trl import ERPOTrainer


@pytest.fixture(autouse=True)
def compact(monkeypatch):
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)


@pytest.mark.parametrize(
    "fields", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}]
)
def test_bit_for_bit(tmp_path, fields):
    """α = 0 and uniform weights: reading the query's log-probs changes no bit of TRL's run."""
    model = tiny_model("qwen2")
    runs = []
    for cls in (ERPOTrainer, GRPOTrainer):
        erpo = {"query_kl_coef": 0.0, "query_weight": "uniform"} if cls is ERPOTrainer else {}
        trainer = make_trainer(
            tmp_path / cls.__name__,
            model=copy.deepcopy(model),
            cls=cls,
            max_steps=4,
            learning_rate=5e-2,
            **fields,
            **erpo,
        )
        trainer.train()
        runs.append(trainer)
    ours, theirs = runs
    assert logged(ours, "loss") == logged(theirs, "loss")
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name


def test_projected_positions(tmp_path, monkeypatch):
    """A step projects its completion tokens and each distinct query's scored tokens once, not once per response."""
    projected = []
    inner = utils._ChunkedLogProbFunction.apply

    def count(hidden, *args):
        if torch.is_grad_enabled():
            projected.append(hidden.shape[0])
        return inner(hidden, *args)

    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", count)
    trainer = make_trainer(
        tmp_path,
        dataset=prompts_dataset(["a longer prompt", "short", "in between", "x y z"]),
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        max_steps=2,
    )
    recorder = Recorder().attach(trainer)
    trainer.train()
    for index, step in enumerate(recorder.done):
        completions = sum(batch["completion_mask"].sum().item() for batch in step.batches)
        queries = {
            tuple(ids[mask.bool()].tolist())
            for batch in step.batches
            for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])
        }
        assert len(queries) == 2
        assert sum(projected[2 * index : 2 * index + 2]) == completions + sum(len(query) - 1 for query in queries)


def test_penalty_reaches_the_query(tmp_path):
    """With the penalty on, the drift is measured and held through the compact path too."""
    trainer = make_trainer(tmp_path, query_kl_coef=0.5, max_steps=3, learning_rate=5e-2)
    trainer.train()
    kl = logged(trainer, "query/kl")
    assert kl[0] < 1e-9 < kl[1]
    assert logged(trainer, "query/loss") == pytest.approx([0.5 * value for value in kl])
