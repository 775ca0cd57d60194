"""With alpha = 0 and uniform weights ERPOTrainer is TRL's GRPOTrainer bit for bit, off-policy too.

Everything in these runs is compared exactly: the losses and rewards of four optimizer steps and every parameter after
them. A single draw from the training RNG, one more rounding or one row out of place would show.
"""

import copy

import pytest
import torch
from helpers import assert_same_run, lora_config, make_trainer, tiny_model
from trl import GRPOTrainer

from erpo_trl import ERPOTrainer

CASES = {
    "on_policy": {},
    "accumulation_4_generation_4": {"gradient_accumulation_steps": 4, "steps_per_generation": 4},
    "accumulation_2_generation_4": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "accumulation_4_generation_2": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "two_iterations": {"num_iterations": 2},
    "two_iterations_windowed": {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "bnpo": {"loss_type": "bnpo", "num_iterations": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "num_iterations": 2},
    "dapo": {"loss_type": "dapo", "num_iterations": 2, "gradient_accumulation_steps": 2},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "sequence_level": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "entropy_bonus": {"entropy_coef": 0.1},
    "high_entropy_tokens": {"top_entropy_quantile": 0.5},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 3},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "temperature": {"temperature": 0.7},
    "unshuffled": {"shuffle_dataset": False},
    "adamw_clipped": {"optim": "adamw_torch", "max_grad_norm": 0.1},
}


def run(tmp_path, cls, model, peft_config=None, **settings):
    erpo = {"query_kl_coef": 0.0, "query_weight": "uniform"} if cls is ERPOTrainer else {}
    trainer = make_trainer(
        tmp_path / cls.__name__,
        model=copy.deepcopy(model),
        cls=cls,
        trainer_kwargs={"peft_config": peft_config} if peft_config else None,
        **{"max_steps": 4, "learning_rate": 5e-2, **settings, **erpo},
    )
    trainer.train()
    return trainer


def both(tmp_path, model, **settings):
    ours = run(tmp_path, ERPOTrainer, model, **settings)
    theirs = run(tmp_path, GRPOTrainer, model, **settings)
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit(tmp_path, case):
    """The same losses and the same parameters after four steps as TRL's trainer with the same settings."""
    model = tiny_model("qwen2")
    ours, theirs = both(tmp_path, model, **CASES[case])
    theirs.initial_weights = model.state_dict()
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "qwen2_moe"])
def test_bit_for_bit_on_other_families(tmp_path, kind):
    """Untied head, soft-capping, logit scale and router loss: none of them passes through other code than TRL's."""
    model = tiny_model(kind)
    ours, theirs = both(tmp_path, model, num_iterations=2)
    theirs.initial_weights = model.state_dict()
    assert_same_run(ours, theirs)


def test_bit_for_bit_with_lora(tmp_path):
    """The adapter's random init is drawn from the seeded RNG: scoring the reference first must not shift it."""
    model = tiny_model("llama")
    ours, theirs = both(tmp_path, model, peft_config=lora_config(), num_iterations=2, learning_rate=1.0)
    name = next(n for n, _ in theirs.model.named_parameters() if "lora_B" in n)
    assert theirs.model.get_parameter(name).abs().max() > 0  # B starts at zero
    theirs.initial_weights = {n: torch.zeros_like(v) for n, v in theirs.model.state_dict().items()}
    assert_same_run(ours, theirs)


def test_bit_for_bit_with_the_policy_kl(tmp_path):
    """beta = 0.04: TRL's own reference model and its KL term are left alone."""
    path = str(tmp_path / "start")
    tiny_model("qwen2").save_pretrained(path)
    runs = []
    for cls in (ERPOTrainer, GRPOTrainer):
        model = tiny_model("qwen2").from_pretrained(path, attn_implementation="eager")
        runs.append(run(tmp_path, cls, model, beta=0.04, num_iterations=2))
    runs[1].initial_weights = tiny_model("qwen2").state_dict()
    assert max(e["kl"] for e in runs[1].state.log_history if "kl" in e) > 0
    assert_same_run(*runs)


def test_a_penalty_does_change_the_run(tmp_path):
    """The control: with alpha > 0 the same settings end elsewhere, so the equality above is not an inactive trainer."""
    model = tiny_model("qwen2")
    parameters = []
    for alpha in (0.0, 1.0):
        trainer = make_trainer(
            tmp_path / str(alpha),
            model=copy.deepcopy(model),
            max_steps=4,
            learning_rate=5e-2,
            query_kl_coef=alpha,
            query_weight="uniform",
        )
        trainer.train()
        parameters.append(trainer.model.state_dict())
    assert any(not torch.equal(parameters[0][name], parameters[1][name]) for name in parameters[0])


def test_weights_do_change_the_run(tmp_path):
    """The control for the weights: `nll_ratio` with alpha = 0 must not equal `uniform`."""
    model = tiny_model("qwen2")
    parameters = []
    for scheme in ("uniform", "nll_ratio"):
        trainer = make_trainer(
            tmp_path / scheme,
            model=copy.deepcopy(model),
            max_steps=2,
            learning_rate=5e-2,
            query_kl_coef=0.0,
            query_weight=scheme,
        )
        trainer.train()
        parameters.append(trainer.model.state_dict())
    assert any(not torch.equal(parameters[0][name], parameters[1][name]) for name in parameters[0])
