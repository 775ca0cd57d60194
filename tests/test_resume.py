"""A resumed run is the run that was not interrupted: the same reference, prompts, losses and weights.

Completions are a fixed function of the prompt, so what is compared does not depend on how generation's RNG is restored.
"""

import copy
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    Recorder,
    captured_warnings,
    count_forwards,
    fixed_rollouts,
    logged,
    lora_config,
    lora_model,
    make_config,
    make_trainer,
    prompts_dataset,
    rows_of,
    tiny_model,
)
from transformers import TrainerCallback

TEN = [f"question {i * i}: {i}+{7 * i}=?" for i in range(10)]
SETTINGS = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,  # two prompts per step, five steps per epoch
    "save_strategy": "steps",
    "save_steps": 7,  # in the middle of epoch 2
    "learning_rate": 5e-2,
    "query_kl_coef": 0.3,
}


def build(tmp_path, dataset=None, model=None, **settings):
    return make_trainer(
        tmp_path,
        model=model or tiny_model("qwen2"),
        dataset=prompts_dataset(TEN) if dataset is None else dataset,
        rollout=fixed_rollouts(),
        **SETTINGS | settings,
    )


def checkpoint(tmp_path, step=7) -> str:
    path = tmp_path / "run" / f"checkpoint-{step}"
    assert path.is_dir()
    return str(path)


def prompts_per_step(recorder):
    return [
        sorted({tuple(row["prompt"]) for batch in step.batches for row in rows_of(batch)}) for step in recorder.done
    ]


@pytest.fixture
def interrupted(tmp_path, raw_advantages):
    """A whole run with a checkpoint at step 7 of 10, followed by the recorder."""
    trainer = build(tmp_path)
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    assert trainer.state.global_step == 10
    return trainer, recorder


def test_remaining_steps_equal_the_uninterrupted_run(tmp_path, interrupted):
    """Steps 8 to 10 after a resume in the middle of epoch 2: the same prompts, losses, drift and final weights."""
    whole, record = interrupted
    resumed = build(tmp_path)
    again = Recorder().attach(resumed)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    assert prompts_per_step(again) == prompts_per_step(record)[7:]
    for key in ("loss", "query/kl", "query/nll", "query/loss", "reward"):
        assert logged(resumed, key)[-3:] == pytest.approx(logged(whole, key)[-3:], rel=1e-6, abs=1e-8), key
    assert logged(resumed, "query/kl")[-1] > 1e-6
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], atol=1e-7, rtol=1e-6)


class InterruptedOnce(TrainerCallback):
    """Ctrl-C once, in the middle of the first step."""

    def __init__(self):
        self.pending = True

    def on_substep_end(self, args, state, control, **kwargs):
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


def test_training_again_in_the_same_object_begins_with_new_completions(tmp_path, raw_advantages):
    """As after Ctrl-C in a notebook: TRL would go on with what is left of the last generation."""
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    whole = build(tmp_path / "whole", **settings)
    expected = Recorder().attach(whole)
    whole.train()
    again = build(tmp_path / "again", **settings)
    again.add_callback(InterruptedOnce())
    with pytest.raises(KeyboardInterrupt):
        again.train()
    found = Recorder().attach(again)
    again.train()
    assert prompts_per_step(found) == prompts_per_step(expected)
    # TRL shuffles the rows of a generation, so sums are rounded in another order
    assert logged(again, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-4, abs=1e-6)
    for name, value in again.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_resume_in_the_same_object_equals_one_in_a_new_one(tmp_path, raw_advantages):
    """A run ends inside a generation batch, is made longer, and resumed from the checkpoint before."""
    settings = {"max_steps": 6, "num_iterations": 2, "save_steps": 2}
    whole = build(tmp_path / "whole", **settings)
    expected = Recorder().attach(whole)
    whole.train()
    short = build(tmp_path / "short", **settings | {"max_steps": 3})
    short.train()
    shutil.rmtree(tmp_path / "short" / "run" / "checkpoint-3", ignore_errors=True)
    short.args.max_steps = 6
    found = Recorder().attach(short)
    short.train(resume_from_checkpoint=True)
    assert prompts_per_step(found) == prompts_per_step(expected)[2:]
    assert logged(short, "loss")[-4:] == pytest.approx(logged(whole, "loss")[-4:], rel=1e-5)


@pytest.mark.parametrize("limit", [{"max_steps": 7}, {"max_steps": 5}, {"num_train_epochs": 1.4}])
def test_a_finished_run_makes_no_step(tmp_path, interrupted, caplog, limit):
    """As a job that is queued again after its end: the weights are the checkpoint's, and the log says why."""
    trainer = build(tmp_path, **limit)
    with captured_warnings(caplog):
        trainer.train(resume_from_checkpoint=checkpoint(tmp_path))
    assert "checkpoint-7 is at step 7" in caplog.text and "it is finished, no step was made" in caplog.text
    assert trainer.state.global_step == 7
    saved = tiny_model("qwen2").from_pretrained(checkpoint(tmp_path)).state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, saved[name])


def test_without_the_skip_generations_are_counted_from_the_resume(tmp_path, raw_advantages):
    """Nine prompts, three micro-batches a generation, two a step: an epoch has five steps, the last of one micro-batch."""
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 3, "gradient_accumulation_steps": 2}
    settings |= {"num_train_epochs": 1, "save_steps": 3, "max_steps": 3}
    build(tmp_path, prompts_dataset(TEN[:9]), **settings).train()
    resumed = build(tmp_path, prompts_dataset(TEN[:9]), **settings | {"max_steps": 8, "ignore_data_skip": True})
    believed, real = [], []

    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            believed.append(resumed._inside_generation(state.global_step))
            real.append(resumed._step % 3 != 0)

    resumed.add_callback(Compare())
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path, step=3))
    assert believed == real and len(real) == 5 and len(set(real)) == 2


def test_each_prompt_once_in_the_resumed_epoch(tmp_path, interrupted):
    """Epoch 2 uses each of its ten prompts once, before and after the interruption together."""
    _, record = interrupted
    resumed = build(tmp_path)
    again = Recorder().attach(resumed)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    epoch = prompts_per_step(record)[5:7] + prompts_per_step(again)
    prompts = [query for step in epoch for query in step]
    assert len(prompts) == len(set(prompts)) == 10
    assert prompts_per_step(record)[:5] != prompts_per_step(record)[5:], "two epochs were meant to differ in order"


def test_resume_rescores_nothing(tmp_path, interrupted):
    """The table is found: no scoring forward, and the columns are those of the start, not of the trained weights."""
    whole, _ = interrupted
    resumed = build(tmp_path)
    with count_forwards(resumed.model) as counter:
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    assert counter.calls == 3  # one per remaining step
    for name in ("ref_query_logps", "ref_query_nll", "query_weight", "query_fingerprint"):
        assert resumed.train_dataset[name] == whole.train_dataset[name]


def test_resume_from_a_model_loaded_from_the_checkpoint(tmp_path, interrupted):
    """A user may build the trainer on the checkpoint's weights: they are the policy at step 7, not the reference."""
    whole, _ = interrupted
    model = tiny_model("qwen2").from_pretrained(checkpoint(tmp_path), attn_implementation="eager")
    resumed = build(tmp_path, model=model)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    assert resumed.train_dataset["ref_query_logps"] == whole.train_dataset["ref_query_logps"]
    assert logged(resumed, "query/kl")[-3:] == pytest.approx(logged(whole, "query/kl")[-3:], rel=1e-6)


def test_missing_table_is_refused_for_trained_weights(tmp_path, interrupted):
    """Table gone and the model at hand is the trained one: never rescored from it; the message says what is missing."""
    shutil.rmtree(tmp_path / "reference")
    model = tiny_model("qwen2").from_pretrained(checkpoint(tmp_path), attn_implementation="eager")
    resumed = build(tmp_path, model=model)
    with pytest.raises(Exception, match="(?i)reference") as error:
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    assert "reference_cache_dir" in str(error.value) or str(tmp_path / "reference") in str(error.value)
    assert resumed.state.global_step in (0, 7)


def test_missing_table_with_the_start_model(tmp_path, interrupted):
    """Table gone but the trainer was built on the very start: refused, or rebuilt to the very same values."""
    whole, _ = interrupted
    shutil.rmtree(tmp_path / "reference")
    resumed = build(tmp_path)
    try:
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    except Exception as error:
        assert "reference" in str(error).lower()
    else:
        assert resumed.train_dataset["ref_query_logps"] == whole.train_dataset["ref_query_logps"]
        assert logged(resumed, "query/kl")[-3:] == pytest.approx(logged(whole, "query/kl")[-3:], rel=1e-6)


def test_another_start_model_is_not_a_reference(tmp_path, interrupted):
    """Resumed on a trainer built from a third model: its weights are not the reference of this run either."""
    whole, _ = interrupted
    resumed = build(tmp_path, model=tiny_model("qwen2", seed=9))
    try:
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    except Exception as error:
        assert "reference" in str(error).lower()
    else:
        assert resumed.train_dataset["ref_query_logps"] == whole.train_dataset["ref_query_logps"]


@pytest.mark.parametrize("change", ["reordered", "removed", "replaced"])
def test_changed_data_is_detected(tmp_path, interrupted, change, caplog):
    """Skipping batches of other data replays the wrong order: an error, or a loud warning that names the data set."""
    prompts = {"reordered": TEN[::-1], "removed": TEN[:-1], "replaced": [*TEN[:-1], "something else?"]}[change]
    resumed = build(tmp_path, dataset=prompts_dataset(prompts))
    message = ""
    with captured_warnings(caplog):
        try:
            resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
        except Exception as error:
            message = str(error)
    text = (message or "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)).lower()
    assert any(name in text for name in ("data set", "dataset", "training data"))
    assert any(word in text for word in ("order", "changed", "differ"))


def test_unchanged_data_raises_no_alarm(tmp_path, interrupted, caplog):
    """The control: the same rows in a new object resume without a word about the data set."""
    resumed = build(tmp_path, dataset=prompts_dataset(list(TEN)))
    with captured_warnings(caplog):
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path))
    records = [r.getMessage().lower() for r in caplog.records if r.name.startswith("erpo_trl")]
    assert not [text for text in records if "data" in text and ("order" in text or "changed" in text)]


@pytest.mark.parametrize(
    "fields, nearest",
    [
        (
            {"steps_per_generation": 4, "save_steps": 3},
            "spans 4 optimizer steps. Set save_steps to 4, or another multiple of 4",
        ),
        ({"num_iterations": 2, "save_steps": 7}, "spans 2 optimizer steps. Set save_steps to 6 or 8, or another"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "save_steps": 6},
            "spans 4 optimizer steps. Set save_steps to 4 or 8, or",
        ),
        ({"steps_per_generation": 4, "save_steps": 0.2}, "save_steps=0.2 would save inside"),
        (
            {"steps_per_generation": 4, "save_strategy": "best", "metric_for_best_model": "reward"},
            "save_strategy='best' would",
        ),
        (
            {"steps_per_generation": 4, "save_steps": 6, "load_best_model_at_end": True}
            | {"eval_strategy": "steps", "eval_steps": 6},
            "multiples of eval_steps=6. Set save_steps to 12, or",
        ),
    ],
)
def test_save_steps_inside_a_generation_are_refused(tmp_path, fields, nearest):
    """A checkpoint inside a generation batch resumes misaligned: refused before anything is loaded, with what is allowed."""
    with pytest.raises(ValueError, match="save_.*cannot be resumed") as error:
        build(tmp_path, **fields)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    "fields, period",
    [
        ({"num_iterations": 2}, 2),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 2),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 1),
    ],
)
def test_window_of_every_layout(tmp_path, fields, period):
    """Whole generations end every lcm(accumulation, steps per generation x iterations) micro-batches."""
    build(tmp_path, save_steps=period, **fields)
    if period > 1:
        with pytest.raises(ValueError, match=f"Set save_steps to {period}, or another multiple of {period}"):
            build(tmp_path, save_steps=1, **fields)


def test_default_save_steps_fit_the_window(tmp_path):
    """Who never asked for save_steps=500 is not asked to change it."""
    assert make_config(tmp_path, save_strategy="steps", steps_per_generation=3).save_steps == 501
    assert make_config(tmp_path, save_strategy="steps").save_steps == 500
    assert make_config(tmp_path, save_strategy="steps", save_steps=0.25).save_steps == 0.25


@pytest.mark.parametrize("saved_run", [8, 4], ids=["running", "finished"])
def test_misaligned_checkpoint_is_refused(tmp_path, saved_run):
    """Checkpoint 4 lies inside a window of 8: resuming there would train on half a generation and skip the other, also
    where the saved run was finished and is now prolonged.
    """
    fields = {"per_device_train_batch_size": 2, "num_train_epochs": 50}
    build(tmp_path, steps_per_generation=4, save_steps=4, max_steps=saved_run, **fields).train()
    resumed = build(tmp_path, steps_per_generation=8, save_steps=8, max_steps=16, **fields)
    with pytest.raises(ValueError, match="(?i)generation") as error:
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path, 4))
    assert "4" in str(error.value)


def test_resume_inside_epoch_one_with_windows(tmp_path, raw_advantages):
    """Off-policy layout: after an aligned checkpoint the remaining steps are those of the whole run."""
    fields = {"num_iterations": 2, "save_steps": 4, "max_steps": 8, "num_train_epochs": 50}
    whole = build(tmp_path, **fields)
    record = Recorder().attach(whole)
    whole.train()
    resumed = build(tmp_path, **fields)
    again = Recorder().attach(resumed)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path, 4))
    assert prompts_per_step(again) == prompts_per_step(record)[4:]
    assert logged(resumed, "loss")[-4:] == pytest.approx(logged(whole, "loss")[-4:], rel=1e-5, abs=1e-7)
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], atol=1e-7, rtol=1e-6)


def test_resume_at_the_end_of_an_epoch(tmp_path, raw_advantages):
    """A checkpoint exactly between two epochs continues with the order of epoch 2, not with that of epoch 1 again."""
    whole = build(tmp_path, save_steps=5)
    record = Recorder().attach(whole)
    whole.train()
    resumed = build(tmp_path, save_steps=5)
    again = Recorder().attach(resumed)
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path, 5))
    assert prompts_per_step(again) == prompts_per_step(record)[5:]
    assert logged(resumed, "loss")[-5:] == pytest.approx(logged(whole, "loss")[-5:], rel=1e-5, abs=1e-7)


def test_a_killed_run_resumes(tmp_path, raw_advantages):
    """An exception right after the checkpoint: a fresh process finds table and checkpoint and ends where a whole run ends."""

    class Kill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 8:
                raise RuntimeError("killed")

    start = tiny_model("qwen2")
    killed = build(tmp_path, model=copy.deepcopy(start))
    killed.add_callback(Kill())
    with pytest.raises(RuntimeError, match="killed"):
        killed.train()
    whole = build(tmp_path / "whole", model=copy.deepcopy(start))
    whole.train()
    resumed = build(tmp_path, model=copy.deepcopy(start))
    resumed.train(resume_from_checkpoint=True)
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("pretrained", [False, True], ids=["fresh", "pretrained"])
def test_resume_with_lora(tmp_path, raw_advantages, pretrained):
    """An adapter in training is loaded from the checkpoint; the reference stays base, or the adapter it started from."""
    fields = {"save_steps": 3, "max_steps": 5, "num_train_epochs": 1, "learning_rate": 1.0}

    def start():
        extra = {} if pretrained else {"trainer_kwargs": {"peft_config": lora_config()}}
        model = lora_model(pretrained=True) if pretrained else tiny_model("llama")
        return build(tmp_path, model=model, **fields, **extra)

    whole = start()
    whole.train()
    resumed = start()
    resumed.train(resume_from_checkpoint=checkpoint(tmp_path, 3))
    assert resumed.train_dataset["ref_query_logps"] == whole.train_dataset["ref_query_logps"]
    for key in ("loss", "query/kl", "query/nll"):
        assert logged(resumed, key)[-2:] == pytest.approx(logged(whole, key)[-2:], rel=1e-5, abs=1e-7), key
    assert logged(resumed, "query/kl")[-1] > 1e-6
    weights = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": 0.5}, "scored with temperature=1.0, this run has 0.5"),
        ({"seed": 4}, "trained with: seed"),
        ({"shuffle_dataset": False}, "trained with: shuffle_dataset"),
        # The passes over the data that the checkpoint has behind it would be cut elsewhere
        (
            {"per_device_train_batch_size": 8, "save_steps": 5},
            r"trained with: prompts per generation batch: per_device_train_batch_size .* \(2, now 4\)",
        ),
        ({"num_generations": 4}, r"trained with: prompts per generation batch: .* \(2, now 1\)"),
    ],
)
def test_settings_that_must_not_change(tmp_path, interrupted, fields, message):
    """Another temperature makes other log-probs than the table's; another order of the data other prompts."""
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **fields).train(resume_from_checkpoint=checkpoint(tmp_path))


def test_short_last_step_of_an_epoch(tmp_path, raw_advantages):
    """Accumulation 3 over 8 micro-batches: steps end inside generations, except where an epoch ends."""
    layout = {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 3,
        "save_steps": 2,
    }
    eight = prompts_dataset(TEN[:8])
    whole = build(tmp_path, eight, **layout)
    whole.train()
    assert whole.state.max_steps == 9  # 3 a epoch, the third of 2 micro-batches
    with pytest.raises(ValueError, match="checkpoint-4 was saved after step 4, inside a generation batch"):
        build(tmp_path, eight, **layout).train(resume_from_checkpoint=checkpoint(tmp_path, 4))
    for step in (2, 6):
        resumed = build(tmp_path, eight, **layout)
        resumed.train(resume_from_checkpoint=checkpoint(tmp_path, step))
        assert logged(resumed, "loss") == logged(whole, "loss")


def test_newest_whole_checkpoint_is_taken(tmp_path, interrupted):
    """A checkpoint cut off by a kill must not stand in the way of the one before it."""
    cut = tmp_path / "run" / "checkpoint-9"
    cut.mkdir()
    (tmp_path / "run" / "checkpoint-best").mkdir()  # somebody's own name is none of a step
    (cut / "erpo_state.json").write_text("{}")
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(interrupted[0], "loss")


@pytest.mark.parametrize("name", ["no/such/checkpoint", True])
def test_missing_checkpoint_is_named(tmp_path, name):
    """`resume_from_checkpoint` with nothing to resume from."""
    with pytest.raises(ValueError, match="There is no checkpoint"):
        build(tmp_path).train(resume_from_checkpoint=name)


def test_settings_that_are_no_json_are_kept_as_text(tmp_path):
    """As a dtype in `model_init_kwargs`: a run must not end at its first checkpoint for it."""
    trainer = build(tmp_path, model_init_kwargs={"torch_dtype": torch.bfloat16}, max_steps=2, save_steps=1)
    trainer.train()
    state = json.loads((Path(checkpoint(tmp_path, 2)) / "erpo_state.json").read_text())
    assert state["args"]["model_init_kwargs"] == {"torch_dtype": "torch.bfloat16"}
