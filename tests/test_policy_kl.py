"""`log_policy_kl_steps`: the Policy-KL of an ERPO run, measured now and then, against TRL's own `kl` and by hand."""

import copy
import math

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    double_copy,
    fixed_rollouts,
    keep_raw_advantages,
    logged,
    lora_config,
    lora_model,
    make_config,
    make_trainer,
    prompts_dataset,
    rows_of,
    tiny_model,
    token_logps,
)

from erpo_trl import ERPORLOOTrainer
from erpo_trl.policy.kl import policy_kl

SETTINGS = {"learning_rate": 0.3, "max_steps": 5, "per_device_train_batch_size": 4}


def run(tmp_path, model, cls=None, **fields):
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        cls=cls,
        dataset=prompts_dataset(UNEQUAL[:4]),
        rollout=fixed_rollouts(),
        **SETTINGS | fields,
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    return trainer, recorder


def test_formula():
    """One nat up everywhere gives e^-1, one down e - 2; masked entries, NaN included, do not count."""
    logps = torch.tensor([[-1.0, -3.0], [-2.0, math.nan]])
    ref = torch.tensor([[-2.0, -2.0], [-2.0, 0.0]])
    total, tokens = policy_kl(logps, ref, torch.tensor([[1, 1], [1, 0]])).tolist()
    assert tokens == 3 and total == pytest.approx(math.exp(-1) + math.e - 2)


def test_equals_the_kl_that_trl_logs(tmp_path):
    """Beside a run with beta > 0, which pays a reference forward in every step, the monitor says the same."""
    adapter = {"trainer_kwargs": {"peft_config": lora_config()}}
    trainer, _ = run(tmp_path, tiny_model("llama"), beta=0.05, log_policy_kl_steps=1, learning_rate=3.0, **adapter)
    assert logged(trainer, "policy/kl") == pytest.approx(logged(trainer, "kl"), rel=1e-4, abs=1e-9)
    assert logged(trainer, "policy/kl")[0] == pytest.approx(0.0, abs=1e-9)
    assert logged(trainer, "policy/kl")[-1] > 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_value(tmp_path, monkeypatch, kind, micro_batches):
    """Every second step, by hand in float64 from the weights of that step, over all micro-batches' tokens."""
    keep_raw_advantages(monkeypatch)
    model = tiny_model(kind)
    trainer, recorder = run(
        tmp_path, model, log_policy_kl_steps=2, gradient_accumulation_steps=micro_batches, max_steps=4
    )
    assert ["policy/kl" in entry for entry in trainer.state.log_history if "loss" in entry] == [
        True,
        False,
        True,
        False,
    ]
    reference = double_copy(model)
    for found, step in zip(logged(trainer, "policy/kl"), recorder.done[::2], strict=True):
        policy, total, tokens = double_copy(model, step.weights), 0.0, 0
        for row in (row for batch in step.batches for row in rows_of(batch)):
            ids, start = row["prompt"] + row["completion"], len(row["prompt"]) - 1
            with torch.no_grad():
                x = (token_logps(reference, ids) - token_logps(policy, ids))[start:]
            total += (x.exp() - x - 1).sum().item()
            tokens += len(x)
        assert found == pytest.approx(total / tokens, rel=1e-3, abs=1e-9)


def test_lora_needs_no_copy(tmp_path, monkeypatch):
    """With a fresh adapter the base model is the reference: no second model, and the training is what it is without."""
    fields = {"trainer_kwargs": {"peft_config": lora_config()}}
    runs = []
    for n, every in enumerate((0, 1)):
        torch.manual_seed(0)
        runs.append(run(tmp_path / str(n), tiny_model("llama"), log_policy_kl_steps=every, **fields)[0])
    assert runs[1]._standby._frozen is None
    assert logged(runs[0], "query/kl") == logged(runs[1], "query/kl")
    measured = logged(runs[1], "policy/kl")
    assert measured[0] == pytest.approx(0.0, abs=1e-9) and measured[-1] > 0


def test_the_training_is_untouched(tmp_path):
    """Measuring costs a forward per micro-batch at its steps, and changes not one bit of the weights."""
    model, finals = tiny_model("qwen2"), []
    for n, every in enumerate((0, 2)):
        trainer, recorder = run(tmp_path / str(n), model, log_policy_kl_steps=every)
        finals.append(trainer.model.state_dict())
        frozen = trainer._standby._frozen if every else None
        assert (frozen is not None) == bool(every)
        assert [sum(step.forwards) for step in recorder.done] == [1] * 5
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())


def test_rloo(tmp_path):
    """The monitor is the mixin's, so RLOO has it, too."""
    trainer, _ = run(tmp_path, tiny_model("llama"), ERPORLOOTrainer, log_policy_kl_steps=4)
    assert len(logged(trainer, "policy/kl")) == 2 and logged(trainer, "policy/kl")[-1] > 0


def test_a_resumed_run_needs_the_model_it_started_from(tmp_path):
    """A trained model cannot stand for the reference: refused, with what to do; the pre-RL model measures on."""
    fields = {"log_policy_kl_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _ = run(tmp_path, tiny_model("llama"), **fields)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    more = {"dataset": prompts_dataset(UNEQUAL[:4]), "rollout": fixed_rollouts(), **SETTINGS, **fields}
    with pytest.raises(
        ValueError, match="log_policy_kl_steps needs the model that the checkpoint's run started from.*pre-RL"
    ):
        make_trainer(tmp_path, model=tiny_model("llama", seed=5), **more).train(resume_from_checkpoint=checkpoint)
    resumed = make_trainer(tmp_path, model=tiny_model("llama"), **more)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert logged(resumed, "policy/kl")[-2:] == logged(whole, "policy/kl")[-2:]


def test_bad_field(tmp_path):
    with pytest.raises(ValueError, match="log_policy_kl_steps must be a whole number of steps >= 0, found -1"):
        make_config(tmp_path, log_policy_kl_steps=-1)


def test_weights_outside_the_adapter_need_a_copy(tmp_path):
    """A fresh adapter whose base trains its norms, too: with the adapter off it is no longer the reference."""
    model = lora_model(pretrained=False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    trainer, _ = run(tmp_path, model, log_policy_kl_steps=1)
    frozen = {n: p for n, p in trainer._standby._frozen.named_parameters() if "norm" in n}
    now = {n: p for n, p in trainer.model.named_parameters() if "norm" in n}
    assert any((now[n] - p).abs().max() > 1e-3 for n, p in frozen.items()), "the norms were meant to move"
    for name, parameter in model.named_parameters():
        if name in frozen:
            torch.testing.assert_close(frozen[name], parameter)
