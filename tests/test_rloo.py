"""ERPO on RLOO: TRL's RLOOTrainer bit for bit with both terms off, the printed objective with both on.

RLOO's policy term is on whole sequences: with r = exp(log π(o) - log π_old(o)) of a completion and A its leave-one-out
advantage, L_PG = -min(r A, clip(r) A), a mean over rows; its KL in the reward (`beta`) is off.
"""

import copy
from dataclasses import fields

import pytest
import torch
from helpers import (
    LAYOUTS,
    UNEQUAL,
    Recorder,
    assert_grads_close,
    assert_same_run,
    byte_tokenizer,
    constant_reward,
    count_forwards,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    logged,
    lora_config,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    prompt_ids,
    prompts_dataset,
    reference_of,
    rows_of,
    shift_reference,
    tiny_model,
    token_logps,
    weights_of,
    write_recipe,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer

from erpo_trl import (
    DatasetMapper,
    ERPOConfig,
    ERPORLOOConfig,
    ERPORLOOTrainer,
    ERPOTrainer,
    EvaluationCallback,
    accuracy_reward,
    cli,
    load_arithmetic,
)
from erpo_trl.demo import MODEL_DIR
from erpo_trl.evaluation.benchmarks import Benchmark
from erpo_trl.query.generation_fields import GenerationFields
from erpo_trl.train import make_trainer as trainer_of
from erpo_trl.train import parse

ALPHA = 0.3


def build(tmp_path, cls=ERPORLOOTrainer, model=None, **settings):
    return make_trainer(tmp_path, model=model, cls=cls, **settings)


# ------------------------------------------------------------------------------------------------- nothing, bit for bit
CASES = {
    "on_policy": {},
    "accumulation_4_generation_4": {"gradient_accumulation_steps": 4, "steps_per_generation": 4},
    "accumulation_2_generation_4": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "accumulation_4_generation_2": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "two_iterations": {"num_iterations": 2},
    "two_iterations_windowed": {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "normalized": {"normalize_advantages": True, "num_iterations": 2},
    "clipped_rewards": {"reward_clip_range": (0.2, 0.7)},
    "masked_truncated": {"mask_truncated_completions": True, "max_completion_length": 3},
    "temperature": {"temperature": 0.7, "gradient_checkpointing": True},
    "adamw_clipped": {"optim": "adamw_torch", "max_grad_norm": 0.1},
}


def both(tmp_path, model, peft_config=None, **settings):
    """Ours with nothing on and TRL's; RLOO's own KL is off in ours by default."""
    runs = []
    for cls, alone in (
        (ERPORLOOTrainer, {"query_kl_coef": 0.0, "query_weight": "uniform"}),
        (RLOOTrainer, {"beta": 0.0}),
    ):
        trainer = build(
            tmp_path / cls.__name__,
            cls,
            copy.deepcopy(model),
            trainer_kwargs={"peft_config": peft_config} if peft_config else None,
            **{"max_steps": 4, "learning_rate": 5e-2, **alone, **settings},
        )
        trainer.train()
        runs.append(trainer)
    runs[1].initial_weights = model.state_dict()
    return runs


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit(tmp_path, case):
    """The same losses, metrics and parameters after four steps as TRL's trainer with the same settings."""
    assert_same_run(*both(tmp_path, tiny_model("qwen2"), **CASES[case]))


def test_bit_for_bit_with_a_router_loss(tmp_path):
    """RLOO adds the router loss unscaled; nothing of ours stands between."""
    assert_same_run(*both(tmp_path, tiny_model("qwen2_moe"), num_iterations=2))


def test_bit_for_bit_with_lora(tmp_path):
    ours, theirs = both(tmp_path, tiny_model("llama"), peft_config=lora_config(), num_iterations=2, learning_rate=1.0)
    theirs.initial_weights = {n: torch.zeros_like(v) for n, v in theirs.model.state_dict().items()}
    assert_same_run(ours, theirs)


def test_bit_for_bit_with_the_kl_in_the_reward(tmp_path):
    """Turned on, `beta` is TRL's: its reference model and its KL are left alone."""
    path = str(tmp_path / "start")
    tiny_model("qwen2").save_pretrained(path)
    model = tiny_model("qwen2").from_pretrained(path, attn_implementation="eager")
    ours, theirs = both(tmp_path, model, beta=0.5, num_iterations=2)
    assert max(abs(value) for value in logged(theirs, "kl")) > 0
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("fields", [{"query_kl_coef": 1.0}, {"query_weight": "nll_ratio"}])
def test_each_term_changes_the_run(tmp_path, fields):
    """The control: either term alone ends elsewhere, so that the equality above is not of an inactive trainer."""
    model = tiny_model("qwen2")
    nothing = {"query_kl_coef": 0.0, "query_weight": "uniform"}
    ends = []
    for name, settings in (("without", nothing), ("with", nothing | fields)):
        trainer = build(tmp_path / name, model=copy.deepcopy(model), max_steps=3, learning_rate=5e-2, **settings)
        trainer.train()
        ends.append(trainer.model.state_dict())
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# ------------------------------------------------------------------------------------------------- the printed objective
def rloo_loss(model, batches: list[dict], weight_of, temperature: float, epsilon: float = 0.2):
    """The sequence-level clipped loss of a whole step, with each advantage times its query's weight; and its ratios."""
    losses, ratios = [], []
    for batch in batches:
        for row, old in zip(rows_of(batch), batch["old_logps"].double()):
            logps = token_logps(model, row["prompt"] + row["completion"], temperature)[len(row["prompt"]) - 1 :]
            ratio = (logps.sum() - old).exp()
            advantage = row["advantage"] * weight_of(tuple(row["prompt"]))
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage))
            ratios.append(ratio.item())
    return torch.stack(losses).mean(), ratios


def check_every_step(tmp_path, model, rel=1e-4, penalty=None, **settings):
    """Gradient and loss of every step against float64 autograd of the objective; returns the ratios seen."""
    trainer = build(
        tmp_path,
        model=copy.deepcopy(model),
        **{"query_kl_coef": ALPHA, "learning_rate": 5e-2, "max_steps": 3, **settings},
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    assert len(recorder.done) == trainer.state.max_steps
    queries = prompt_ids(byte_tokenizer(), UNEQUAL)
    reference = reference_of(model, set(queries), trainer.temperature)
    weights = weights_of(reference, queries)
    assert len(set(weights.values())) > 3
    seen = []
    for step in recorder.done:
        policy = double_copy(model, step.weights)
        for parameter, template in zip(policy.parameters(), model.parameters()):
            parameter.requires_grad_(template.requires_grad)
            parameter.grad = None
        inner, ratios = rloo_loss(policy, step.batches, weights.__getitem__, trainer.temperature)
        distinct = distinct_queries([rows_of(batch) for batch in step.batches])
        outer = penalty_of(policy, distinct, reference, ALPHA, trainer.temperature, **(penalty or {}))
        (inner + outer).backward()
        assert_grads_close(step.grads, policy, rel)
        # The Trainer takes the mean over the step's micro-batches, as RLOO leaves it to
        found = sum(step.losses) / len(step.losses)
        assert found == pytest.approx((inner + outer).item(), rel=1e-4, abs=2e-6)
        assert step.forwards == [1] * len(step.batches)
        seen += ratios
    assert logged(trainer, "query/loss")[-1] == pytest.approx(outer.item(), rel=1e-3)
    assert outer > 1e-5, "the penalty vanishes: the test would prove nothing"
    return seen


@pytest.mark.parametrize("accumulation, steps_per_generation", LAYOUTS)
def test_step_gradient_is_the_printed_objective(tmp_path, raw_advantages, accumulation, steps_per_generation):
    """Weights, policy term and penalty, for every relation of accumulation to generation."""
    check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )


@pytest.mark.parametrize("accumulation, steps_per_generation", [(1, 1), (2, 4)])
def test_step_gradient_off_policy(tmp_path, raw_advantages, accumulation, steps_per_generation):
    """With two iterations the policy has moved since generation: the sequence ratios differ from 1 and the clip acts."""
    ratios = check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        num_iterations=2,
        learning_rate=0.2,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    )
    assert any(abs(ratio - 1) > 0.2 for ratio in ratios), "the clip was meant to act"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_step_gradient_of_other_heads(tmp_path, raw_advantages, kind, temperature):
    """Soft-capping, absolute positions and the sampling temperature."""
    check_every_step(
        tmp_path,
        tiny_model(kind),
        rel=2e-4,
        temperature=temperature,
        max_steps=2,
        gradient_accumulation_steps=2,
    )


def test_step_gradient_with_lora(tmp_path, raw_advantages):
    check_every_step(
        tmp_path, lora_model(pretrained=True), learning_rate=0.5, max_steps=2, gradient_accumulation_steps=2
    )


def test_step_gradient_on_the_sequence(tmp_path, raw_advantages):
    check_every_step(
        tmp_path,
        tiny_model("qwen2"),
        penalty={"level": "sequence", "estimator": "k2"},
        query_kl_level="sequence",
        query_kl_estimator="k2",
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
    )


def test_the_same_gradient_for_every_cut_of_one_batch(tmp_path, raw_advantages):
    """One batch of fixed completions, cut into 1, 2, 4 or 8 micro-batches and shuffled differently each time."""
    steps, orders = [], []
    for i, (per_device, accumulation) in enumerate([(16, 1), (8, 2), (4, 4), (2, 8)]):
        trainer = build(
            tmp_path / str(i),
            rollout=fixed_rollouts(),
            query_kl_coef=ALPHA,
            learning_rate=5e-2,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            seed=i,  # another order within the batch; the batch holds the whole data set
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        steps.append([step.grads for step in recorder.done])
        orders.append([row["prompt"] for batch in recorder.done[0].batches for row in rows_of(batch)])
    assert orders[0] != orders[1], "the order was meant to differ"
    for first, second in steps[1:]:
        for name, expected in steps[0][0].items():
            torch.testing.assert_close(first[name], expected, atol=2e-6, rtol=1e-4)
        for name, expected in steps[0][1].items():
            torch.testing.assert_close(second[name], expected, atol=5e-6, rtol=1e-3)


@pytest.mark.parametrize("accumulation, steps_per_generation", LAYOUTS)
def test_a_constant_drift_costs_alpha(tmp_path, accumulation, steps_per_generation):
    """A reference one nat too low makes k1 = 1 for every query while the policy stands still, and equal rewards leave no
    policy term: what the Trainer logs for every step, the epoch's short tail included, is alpha = 0.1.
    """
    model = tiny_model("qwen2")
    prompts = UNEQUAL[: 5 if accumulation == 3 else 7]  # no multiple of the accumulation
    mapper = DatasetMapper(copy.deepcopy(model), byte_tokenizer(), make_config(tmp_path, ERPORLOOConfig))
    trainer = build(
        tmp_path,
        model=model,
        dataset=shift_reference(mapper(prompts_dataset(prompts)), -1.0),
        reward=constant_reward,
        query_kl_estimator="k1",
        query_kl_coef=0.1,
        learning_rate=0.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        max_steps=-1,
        num_train_epochs=2,
    )
    recorder = Recorder().attach(trainer)
    trainer.train()
    if (accumulation, steps_per_generation) in ((4, 2), (3, 2)):
        assert min(len(step.batches) for step in recorder.done) < accumulation, "a short step was meant to be there"
    losses = logged(trainer, "loss")
    assert len(losses) == trainer.state.global_step
    assert losses == pytest.approx([0.1] * len(losses), abs=1e-6)
    assert logged(trainer, "query/loss") == pytest.approx([0.1] * len(losses), abs=1e-6)


# ------------------------------------------------------------------------------------------------- drift, rows, resume
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "cohere", "gpt2", "fresh_lora", "pretrained_lora"])
def test_no_drift_before_the_first_update(tmp_path, kind, temperature):
    """The reference is scored through RLOO's own head and settings; the second step shows that the drift is measured."""
    model = {"fresh_lora": lambda: tiny_model("llama"), "pretrained_lora": lambda: lora_model(True)}.get(
        kind, lambda: tiny_model(kind)
    )()
    trainer = build(
        tmp_path,
        model=model,
        per_device_train_batch_size=16,
        max_steps=2,
        learning_rate=0.5,
        temperature=temperature,
        trainer_kwargs={"peft_config": lora_config()} if kind == "fresh_lora" else None,
    )
    trainer.train()
    before, after = logged(trainer, "query/kl")
    assert before < 1e-9
    assert after > 1e-6
    assert trainer.ref_model is None


def test_evaluation_counts_each_query_once(tmp_path):
    trainer = build(
        tmp_path,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        trainer_kwargs={"eval_dataset": prompts_dataset(UNEQUAL[:3])},
        query_weight_clip=[0.0, 9.0],
    )
    trainer.train()
    assert logged(trainer, "eval_query/kl")[0] > 0
    weights = weights_of(
        reference_of(tiny_model("qwen2"), set(prompt_ids(byte_tokenizer(), UNEQUAL))),
        prompt_ids(byte_tokenizer(), UNEQUAL),
        clip=(0.0, 9.0),
    )
    expected = [weights[query] for query in prompt_ids(byte_tokenizer(), UNEQUAL[:3])]
    assert logged(trainer, "eval_query/weight_mean")[0] == pytest.approx(sum(expected) / 3, rel=1e-4)


def test_a_stream_is_scored_as_it_arrives(tmp_path):
    """The same mixin serves RLOO's streams: one frozen copy scores, and the drift starts at 0."""
    trainer = build(tmp_path, dataset=prompts_dataset().to_iterable_dataset(), max_steps=2, learning_rate=0.5)
    trainer.train()
    before, after = logged(trainer, "query/kl")
    assert before < 1e-9 < after


def test_the_evaluation_callback_runs(tmp_path, monkeypatch):
    """It draws from the policy through the trainer's own parts, which RLOO's are too."""
    monkeypatch.setattr("erpo_trl.evaluation.run.plot_sweeps", lambda *args: False)
    trainer = build(
        tmp_path,
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        tokenizer=AutoTokenizer.from_pretrained(MODEL_DIR),
        dataset=load_arithmetic("train", n=8),
        reward=accuracy_reward,
        max_completion_length=24,
        max_steps=2,
    )
    benchmark = Benchmark("arithmetic", load_arithmetic("test", n=8))
    trainer.add_callback(EvaluationCallback(trainer, [benchmark], temperatures=[0], samples=1, every=2))
    trainer.train()
    accuracies = logged(trainer, "eval/arithmetic/avg@1@T0")
    assert len(accuracies) == 2
    gap = logged(trainer, "rewards/accuracy_reward/mean")[0] - accuracies[0]
    assert logged(trainer, "gap/train_eval")[0] == pytest.approx(gap)


RESUMED = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "num_iterations": 2,
    "save_strategy": "steps",
    "save_steps": 6,  # in the middle of epoch 2
    "learning_rate": 5e-2,
    "query_kl_coef": ALPHA,
    "seed": 5,
}


def test_a_resumed_run_is_the_whole_run(tmp_path):
    """Same prompts, losses, drift and weights from the checkpoint on, against the same table, without scoring again."""
    model = tiny_model("qwen2")
    settings = RESUMED | {"dataset": prompts_dataset(UNEQUAL[:4]), "rollout": fixed_rollouts()}
    whole = build(tmp_path, model=copy.deepcopy(model), **settings)
    whole.train()
    assert whole.state.global_step == 8
    resumed = build(tmp_path, model=copy.deepcopy(model), **settings)
    with count_forwards(resumed.model) as counter:
        resumed.prepare_reference()
    assert counter.calls == 0
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert resumed.state.global_step == 8
    for key in ("loss", "query/kl", "query/weight_mean", "grad_norm"):
        assert logged(resumed, key) == logged(whole, key), key
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_checkpoint_inside_a_generation_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"save_steps=3 would save inside a generation batch.*Set save_steps to 2 or 4"
    ):
        make_config(tmp_path, ERPORLOOConfig, num_iterations=2, save_strategy="steps", save_steps=3)


# ------------------------------------------------------------------------------------------------- configs, command line
@pytest.mark.parametrize(
    "trainer, config, message",
    [
        (ERPORLOOTrainer, ERPOConfig, "args of ERPORLOOTrainer must be an ERPORLOOConfig, found ERPOConfig"),
        (ERPORLOOTrainer, RLOOConfig, "args of ERPORLOOTrainer must be an ERPORLOOConfig, found RLOOConfig"),
        (ERPOTrainer, ERPORLOOConfig, "args of ERPOTrainer must be an ERPOConfig, found ERPORLOOConfig"),
    ],
)
def test_another_trainers_config_is_refused(tmp_path, trainer, config, message):
    with pytest.raises(TypeError, match=message):
        make_trainer(tmp_path, cls=trainer, args=make_config(tmp_path, config))


def test_default_config(tmp_path, monkeypatch):
    """Without `args`: the paper's settings, no reference model, a folder named after the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.TrainingArguments._validate_args", lambda self: None)
    tiny_model("qwen2").save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    trainer = ERPORLOOTrainer("small", constant_reward, train_dataset=prompts_dataset())
    assert type(trainer.args) is ERPORLOOConfig
    assert trainer.args.output_dir == "small-ERPO"
    assert (trainer.args.query_kl_coef, trainer.args.query_weight, trainer.beta) == (1e-2, "nll_ratio", 0.0)


def test_both_configs_have_the_same_query_fields(tmp_path):
    grpo, rloo = make_config(tmp_path), make_config(tmp_path, ERPORLOOConfig)
    for field in fields(GenerationFields):
        assert getattr(grpo, field.name) == getattr(rloo, field.name), field.name
    assert not hasattr(rloo, "trust_region")
    with pytest.raises(ValueError, match="query_kl_estimator must be one of 'k1', 'k2', 'k3', found 'k4'"):
        make_config(tmp_path, ERPORLOOConfig, query_kl_estimator="k4")


def test_the_preset_of_a_trust_region_is_refused(tmp_path):
    message = (
        "preset='drpo' sets trust_region, .*which ERPORLOOConfig does not have: use preset='paper', or train with GRPO"
    )
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, ERPORLOOConfig, preset="drpo")


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, "trainer: rloo\n")


def test_the_trainer_option_decides_the_config(recipe):
    """In the file, and on the command line, which beats it; the default is GRPO."""
    _, args, _ = parse(["--config", str(recipe)])
    assert type(args) is ERPORLOOConfig and args.query_kl_coef == 1e-3
    for option in (["--trainer", "grpo"], ["--trainer=grpo"]):
        _, args, _ = parse(["--config", str(recipe), *option])
        assert type(args) is ERPOConfig
    _, args, _ = parse(["--output_dir", "out", "--use_cpu", "true"])
    assert type(args) is ERPOConfig
    _, args, _ = parse(["--output_dir", "out", "--use_cpu", "true", "--trainer", "rloo"])
    assert type(args) is ERPORLOOConfig


def test_help_shows_the_options_of_the_trainer(recipe, capsys):
    """The first look at the options must not answer `--help` itself."""
    for argv, shown, hidden in (
        (["--config", str(recipe)], "--normalize_advantages", "--trust_region"),
        ([], "--trust_region", "--normalize_advantages"),
    ):
        with pytest.raises(SystemExit):
            parse([*argv, "--help"])
        text = capsys.readouterr().out
        assert shown in text and "--dataset" in text and "--trainer" in text
        assert hidden not in text


@pytest.mark.parametrize(
    "options, message",
    [
        (["--trainer", "ppo"], "trainer must be one of 'grpo', 'rloo', 'dpo', found 'ppo'"),
        (["--trust_region", "drpo"], "unknown option in the command line: trust_region (an option of trainer grpo)"),
        (["--query_kl_coeff", "1"], "query_kl_coeff (did you mean query_kl_coef?)"),
        (["--preset", "drpo"], "preset='drpo' sets trust_region"),
        (["--num_generations", "1"], "at least 2 generations"),
    ],
)
def test_bad_options_are_refused(recipe, options, message, capsys):
    assert cli.main(["train", "--config", str(recipe), *options]) == 2
    assert message in capsys.readouterr().err


def test_score_then_train(recipe, tmp_path, capsys):
    """`score` makes the table that training finds; GRPO finds the same one. The model card names the paper and the method."""
    assert cli.main(["score", "--config", str(recipe), "--beta", "0.05"]) == 0
    assert "8 queries scored, 0 reused" in capsys.readouterr().out
    for option in ("rloo", "grpo"):
        trainer = trainer_of(*parse(["--config", str(recipe), "--trainer", option]))
        trainer.prepare_reference()
        assert (trainer.dataset_mapper.report.scored, trainer.dataset_mapper.report.reused) == (0, 8)
    assert cli.main(["train", "--config", str(recipe)]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2608.23311" in card and "- erpo" in card and "- rloo" in card
