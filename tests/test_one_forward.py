"""The cost promised by the design: one forward per micro-batch, each query's tokens scored once per optimizer step.

Completions come from a `rollout_func`, so every forward that is counted belongs to scoring or to the loss.
"""

import pytest
import torch
from helpers import EQUAL, Recorder, count_forwards, fixed_rollouts, make_trainer, prompts_dataset, rows_of

from erpo_trl.query.likelihood import scored_token_mask

LAYOUTS = {
    "one_step": {},
    "accumulation_4": {"gradient_accumulation_steps": 4},
    "part_of_a_generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "two_generations": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "two_iterations": {"num_iterations": 2},
    "two_iterations_in_one_step": {"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "groups_over_micro_batches": {
        "num_generations": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "groups_over_steps": {
        "num_generations": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
    },
}


def trained(tmp_path, **settings):
    trainer = make_trainer(tmp_path, rollout=fixed_rollouts(), query_kl_coef=0.1, max_steps=3, **settings)
    recorder = Recorder().attach(trainer)
    return trainer, recorder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_forward_per_micro_batch(tmp_path, layout, raw_advantages):
    """No second forward: not for the prompt, not for the penalty, however the batch is cut."""
    trainer, recorder = trained(tmp_path, **LAYOUTS[layout])
    trainer.train()
    assert len(recorder.done) == 3
    for step in recorder.done:
        assert step.forwards == [1] * len(step.batches)
        assert len(step.batches) == trainer.args.gradient_accumulation_steps


@pytest.mark.parametrize("iterations", [1, 2])
def test_no_forward_outside_the_loss(tmp_path, iterations, raw_advantages):
    """Beside scoring the reference once, the run makes TRL's own forwards only (old log-probs when off-policy)."""
    trainer, recorder = trained(tmp_path, num_iterations=iterations)
    trainer.prepare_reference()
    with count_forwards(trainer.model) as counter:
        trainer.train()
    generations = 3 if iterations == 1 else 2  # the second iteration reuses the generation: steps 1, 2 | 3
    old_logps = 0 if iterations == 1 else generations
    assert counter.calls == 3 + old_logps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_query_is_labelled_once_per_step(tmp_path, layout, raw_advantages):
    """Counted at the fused head: every distinct query's tokens 2..T once per step, and no other prompt position."""
    trainer, recorder = trained(tmp_path, **LAYOUTS[layout])
    trainer.train()
    for step in recorder.done:
        assert len(step.prompt_labels) == len(step.batches)
        times_labelled = {}
        for batch, labelled in zip(step.batches, step.prompt_labels):
            scorable = torch.nn.functional.pad(scored_token_mask(batch["prompt_mask"]), (1, 0))
            for row, is_labelled, may in zip(rows_of(batch), labelled, scorable):
                query = tuple(row["prompt"])
                if is_labelled.any():
                    assert torch.equal(is_labelled, may)
                times_labelled[query] = times_labelled.get(query, 0) + int(is_labelled.any())
        assert times_labelled and set(times_labelled.values()) == {1}


def test_two_rows_with_the_same_prompt(tmp_path, raw_advantages):
    """Two data rows may hold one prompt: it is one query, labelled once in a step that holds both."""
    data = prompts_dataset([EQUAL[0], EQUAL[0], EQUAL[1], EQUAL[2]])
    trainer, recorder = trained(tmp_path, dataset=data, per_device_train_batch_size=8)
    trainer.train()
    for step in recorder.done:
        distinct = {tuple(row["prompt"]) for batch in step.batches for row in rows_of(batch)}
        assert len(distinct) == 3
        assert sum(labelled.any(1).sum().item() for labelled in step.prompt_labels) == 3


def test_nothing_is_labelled_in_a_one_token_prompt(tmp_path, raw_advantages):
    """A prompt of one token has nothing to score; its rows still train."""
    trainer, recorder = trained(
        tmp_path, dataset=prompts_dataset(["a", "b", "cd", "e"]), per_device_train_batch_size=8
    )
    trainer.train()
    for step in recorder.done:
        assert sum(labelled.sum().item() for labelled in step.prompt_labels) == 1  # the d of "cd"
        assert all(torch.isfinite(g).all() for g in step.grads.values())
