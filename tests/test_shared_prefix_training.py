"""Training with `shared_prefix="on"` is training without it, up to rounding."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import (
    Recorder,
    fixed_rollouts,
    logged,
    lora_model,
    make_config,
    make_trainer,
    prompts_dataset,
    tiny_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

import erpo_trl
from erpo_trl import ERPORLOOTrainer, ERPOTrainer
from erpo_trl.forward.mixin import SharedPrefixMixin
from erpo_trl.forward.regroup import order_by_query, regroup
from erpo_trl.train import make_trainer as train_maker
from erpo_trl.train import parse

GROUPS = {"num_generations": 4, "per_device_train_batch_size": 4}
ACCUMULATION = GROUPS | {"gradient_accumulation_steps": 4}
LAYOUTS = {
    "one_micro_batch": {"num_generations": 4, "per_device_train_batch_size": 8},
    "accumulation": ACCUMULATION,
    "groups_cut": GROUPS | {"num_generations": 6, "gradient_accumulation_steps": 3},
    "part_of_a_generation": ACCUMULATION | {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "two_generations": ACCUMULATION | {"steps_per_generation": 2},
    "two_iterations": ACCUMULATION | {"num_iterations": 2},
    "two_iterations_in_one_step": ACCUMULATION | {"num_iterations": 2, "steps_per_generation": 2},
    "checkpointing": ACCUMULATION | {"gradient_checkpointing": True},
    "dapo": ACCUMULATION | {"loss_type": "dapo"},
    "dr_grpo": ACCUMULATION | {"loss_type": "dr_grpo"},
    "bnpo": ACCUMULATION | {"loss_type": "bnpo"},
    "entropy_bonus": ACCUMULATION | {"entropy_coef": 0.1},
    "high_entropy_tokens": ACCUMULATION | {"top_entropy_quantile": 0.5},
    "policy_weights": ACCUMULATION | {"query_weight_source": "policy"},
    "trust_region": ACCUMULATION
    | {"trust_region": "drpo", "trust_region_delta": 0.5, "num_iterations": 2}
    | {"trust_region_check_rollout": False},
    "one_row_a_group": {"num_generations": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "masked_rows": ACCUMULATION | {"mask_truncated_completions": True, "max_completion_length": 4},
}


def packed_tokens(trainer):
    """Tokens in each training forward of the layers, by a hook on the first of them."""
    seen = []
    model = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model

    def look(module, args):
        if torch.is_grad_enabled():
            seen.append(args[0].shape[0] * args[0].shape[1])

    model.base_model.layers[0].register_forward_pre_hook(look)
    return seen


def run(tmp_path, model, mode, cls=ERPOTrainer, lengths=(3, 5, 2, 4), **settings):
    settings = {"query_kl_coef": 0.1, "learning_rate": 5e-2, "max_steps": 4} | settings
    trainer = make_trainer(
        tmp_path / mode, model=model, cls=cls, rollout=fixed_rollouts(lengths), shared_prefix=mode, **settings
    )
    recorder = Recorder().attach(trainer)
    tokens = packed_tokens(trainer)
    trainer.train()
    return trainer, recorder, tokens


def assert_same_training(tmp_path, model, shares=True, **settings):
    """Losses, gradients and weights of four steps, and that a prompt really was run once for several rows."""
    (off, plain, plain_tokens), (on, shared, tokens) = (
        run(tmp_path, copy.deepcopy(model), mode, **settings) for mode in ("off", "on")
    )
    assert sum(tokens) < sum(plain_tokens) if shares else tokens == plain_tokens
    for name in ("loss", "query/kl", "query/nll"):
        assert logged(on, name) == pytest.approx(logged(off, name), rel=1e-5, abs=1e-5), name
    assert len(plain.done) == len(shared.done) == 4
    for one, other in zip(plain.done, shared.done):
        scale = max(grad.abs().max() for grad in one.grads.values())
        assert scale > 1e-4 and set(one.grads) == set(other.grads)
        worst = max((one.grads[name] - other.grads[name]).abs().max() for name in one.grads)
        assert worst <= 1e-4 * scale
    for name, value in off.model.state_dict().items():
        torch.testing.assert_close(on.model.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    return on, shared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_follows_off(tmp_path, layout):
    assert_same_training(tmp_path, tiny_model("qwen2"), shares=layout != "one_row_a_group", **LAYOUTS[layout])


@pytest.mark.parametrize("kind", ["gemma2", "llama", "qwen2_moe"])
def test_on_follows_off_in_other_families(tmp_path, kind):
    """A mixture of experts with its balance in the loss, which is of a micro-batch, so that rows stay where they are."""
    assert_same_training(tmp_path, tiny_model(kind), **ACCUMULATION)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_follows_off_with_lora(tmp_path, checkpointing):
    model = lora_model(pretrained=True, kind="qwen2")
    assert_same_training(tmp_path, model, gradient_checkpointing=checkpointing, **ACCUMULATION)


def test_in_bfloat16(tmp_path):
    """Autocast: rounding is coarser, and the comparison at the first forward allows for it."""
    losses = []
    for mode in ("off", "on"):
        trainer, _, tokens = run(tmp_path, tiny_model("qwen2"), mode, bf16=True, max_steps=2, **ACCUMULATION)
        losses.append(logged(trainer, "query/nll"))
    assert trainer._shares_prefix and trainer.accelerator.mixed_precision == "bf16"
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_rloo(tmp_path):
    assert_same_training(tmp_path, tiny_model("qwen2"), cls=ERPORLOOTrainer, **ACCUMULATION)


def test_reference_of_trl(tmp_path):
    """Its forwards share prompts too, and only with its own weights."""
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    on, _ = assert_same_training(tmp_path, model, beta=0.1, **ACCUMULATION)
    assert on._checked == {id(on.model), id(on.ref_model)}
    assert logged(on, "kl")[-1] > 0


def test_off_is_off(tmp_path):
    """The default leaves no trace in a forward."""
    trainer = make_trainer(tmp_path, max_steps=1)
    assert trainer.args.shared_prefix == "off" and not trainer._shares_prefix


@pytest.mark.parametrize("prompt, completion", [(50, 5), (5, 100)])
def test_auto_shares_where_it_pays(tmp_path, prompt, completion):
    """A prompt of 50 tokens is worth sharing among four completions of 5; one of 5 is not among four of 100."""
    dataset = prompts_dataset([end * prompt for end in "abcdefgh"])
    settings = {"max_steps": 1, "max_completion_length": completion, "lengths": (completion,)} | GROUPS
    off, auto = (run(tmp_path, tiny_model("qwen2"), mode, dataset=dataset, **settings)[2] for mode in ("off", "auto"))
    assert off == [4 * (prompt + completion)]
    assert auto == ([prompt + 4 * completion] if prompt > completion else off)


def test_demo_recipe_follows(tmp_path):
    """The embedded model on its arithmetic, completions sampled by itself, step for step."""
    recipe = Path(erpo_trl.__file__).parent / "demo" / "demo.yaml"
    quick = ["--max_steps", "4", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2"]
    logs = []
    for mode in ("off", "on"):
        options = [*quick, "--logging_steps", "1", "--use_cpu", "true", "--output_dir", str(tmp_path / mode)]
        trainer = train_maker(*parse(["--config", str(recipe), *options, "--shared_prefix", mode]))
        trainer.train()
        logs.append(trainer)
    off, on = logs
    assert on._shares_prefix and len(logged(on, "loss")) == 4
    for name in ("loss", "grad_norm", "reward", "query/kl", "query/nll", "completions/mean_length"):
        assert logged(on, name) == pytest.approx(logged(off, name), rel=1e-4, abs=1e-5), name
    assert logged(on, "query/kl")[-1] > 1e-6


# ----------------------------------------------------------------------------------------------------- regrouped steps
def test_order_by_query():
    assert order_by_query(torch.tensor([5, 3, 5, 9, 3, 5])).tolist() == [0, 2, 5, 1, 4, 3]


def test_regroup_moves_whole_rows():
    """Columns stay together; what belongs to the whole batch, and what is absent, stays as it is."""
    keys = [[5, 3], [5, 9], [3, 5]]
    total = torch.tensor(7.0)
    batches = [
        {
            "key": torch.tensor(pair),
            "ids": torch.tensor(pair).unsqueeze(1).repeat(1, 3),
            "texts": [str(key) for key in pair],
            "items": total,
            "absent": None,
        }
        for pair in keys
    ]
    found = regroup(batches, "key")
    assert [batch["key"].tolist() for batch in found] == [[5, 5], [5, 3], [3, 9]]
    for batch in found:
        assert batch["ids"][:, 2].tolist() == batch["key"].tolist()
        assert batch["texts"] == [str(key) for key in batch["key"].tolist()]
        assert batch["items"] is total and batch["absent"] is None
    assert batches[0]["key"].tolist() == [5, 3]


@pytest.mark.parametrize("layout", ["accumulation", "part_of_a_generation", "two_iterations_in_one_step", "bnpo"])
def test_a_step_keeps_its_rows(tmp_path, layout):
    """Row for row the step of TRL, in other micro-batches; fewer (query, micro-batch) pairs, or with bnpo the same."""
    pairs = []
    steps = []
    for mode in ("off", "on"):
        _, recorder, _ = run(tmp_path, tiny_model("qwen2"), mode, **LAYOUTS[layout])
        steps.append(
            [
                sorted(
                    str((row.tolist(), mask.tolist()))
                    for batch in step.batches
                    for row, mask in zip(batch["completion_ids"], batch["completion_mask"])
                )
                for step in recorder.done
            ]
        )
        pairs.append([sum(len(batch["query_key"].unique()) for batch in step.batches) for step in recorder.done])
    assert steps[0] == steps[1]
    if layout == "bnpo":
        assert pairs[0] == pairs[1]
    else:
        assert sum(pairs[1]) < sum(pairs[0])
        assert all(after <= before for before, after in zip(*pairs))


# --------------------------------------------------------------------------------------------------------- falling back
@pytest.fixture
def warnings(caplog):
    return lambda: [r.getMessage() for r in caplog.records if "shared_prefix" in r.getMessage()]


def test_window_shorter_than_a_row(tmp_path, warnings):
    """The forward is the plain one, to the bit, and one line says so."""
    model = tiny_model("gemma2", sliding_window=4)
    runs = [run(tmp_path, copy.deepcopy(model), mode, **GROUPS)[0] for mode in ("off", "on")]
    assert logged(runs[0], "loss") == logged(runs[1], "loss")
    [line] = warnings()
    assert "shared_prefix='on' leaves out batches with rows longer than the sliding window of 4 tokens" in line


class ShiftedModel(LlamaModel):
    """Claims to go by its mask and positions alone, but mixes each token with its neighbour in the row."""

    def forward(self, *args, position_ids=None, **kwargs):
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.roll(1, 1)
        return output


def test_a_model_that_is_not_what_it_says_is_found_out(tmp_path, warnings):
    config = LlamaConfig(**tiny_model("llama").config.to_diff_dict())
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.model = ShiftedModel(config)
    model.generation_config.eos_token_id = tiny_model("llama").generation_config.eos_token_id
    trainer, _, tokens = run(tmp_path, model, "on", **GROUPS)
    [line] = warnings()
    assert line.startswith(
        "shared_prefix='on' does nothing in this run: LlamaForCausalLM gives other log-probs when rows"
    )
    assert not trainer._shares_prefix


def test_unsupported_model_trains_without(tmp_path, warnings):
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    trainer, _, _ = run(tmp_path, model, "auto", max_steps=1, **GROUPS)
    [line] = warnings()
    assert line == (
        "shared_prefix='auto' does nothing in this run: the rotary positions of LlamaForCausalLM (dynamic) depend on the "
        "longest row of a batch."
    )
    assert not trainer._shares_prefix and len(logged(trainer, "loss")) == 1


def test_the_check_leaves_no_trace(tmp_path):
    """No random number drawn, dropout on again as it was."""
    trainer = make_trainer(
        tmp_path, model=tiny_model("qwen2", attention_dropout=0.1), rollout=fixed_rollouts(), shared_prefix="on"
    )
    trainer.model.train()
    trainer.model.model.layers[0].eval()
    before = torch.get_rng_state()
    ids = torch.randint(9, 200, (1, 8), generator=torch.Generator().manual_seed(0))
    forward = super(SharedPrefixMixin, trainer)._get_per_token_logps_and_entropies
    trainer._check_once(forward, trainer.model, ids, torch.ones_like(ids), 4)
    assert trainer._shares_prefix
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.model.model.training and not trainer.model.model.layers[0].training
    assert trainer.model.model.layers[1].training


# ---------------------------------------------------------------------------------------------------------- the config
@pytest.mark.parametrize("written, found", [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_yaml_switches(tmp_path, written, found):
    """YAML 1.1 reads `on` and `off` as true and false."""
    file = tmp_path / "config.yaml"
    keys = {"model_name_or_path": "none", "output_dir": tmp_path / "run", "use_cpu": "true", "bf16": "false"}
    file.write_text("".join(f"{key}: {value}\n" for key, value in (keys | {"shared_prefix": written}).items()))
    assert parse(["--config", str(file)])[1].shared_prefix == found
    other = "off" if found == "on" else "on"
    assert parse(["--config", str(file), "--shared_prefix", other])[1].shared_prefix == other


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="shared_prefix must be one of 'off', 'on', 'auto', found 'always'."):
        make_config(tmp_path, shared_prefix="always")
    with pytest.raises(ValueError, match="shared_prefix='on' changes the rows that the model's layers see"):
        make_config(tmp_path, shared_prefix="on", torch_compile=True)
