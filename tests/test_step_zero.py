"""The drift is 0 before the first update, whatever sits between hidden state and probability, and not vacuously:
the reference that the trainer holds equals plain float64 logits of the same model at the sampling temperature.
"""

import pytest
import torch
from helpers import (
    UNEQUAL,
    VOCAB,
    byte_tokenizer,
    double_copy,
    logged,
    lora_config,
    lora_model,
    make_trainer,
    prompts_dataset,
    tiny_model,
    token_logps,
)
from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

from erpo_trl import DatasetMapper

FLOAT32 = 1e-9  # k3 of a rounding difference of 1e-5 nats is 5e-11
# bf16 keeps 8 bits: a hidden state rounds by 2^-8, a log-prob of some nats by some hundredths, and k3 is half its square.
# Scoring and training pad differently, which changes the rounding; with equal shapes the drift would be 0.
BFLOAT16 = 5e-3

FAMILIES = ["llama", "llama_tied", "qwen2", "gemma2", "cohere", "gpt2"]


def first_step(tmp_path, model, **settings):
    settings = {"per_device_train_batch_size": 16, "max_steps": 1} | settings  # all eight prompts, padded together
    trainer = make_trainer(tmp_path, model=model, **settings)
    trainer.train()
    return trainer


def assert_reference(trainer, model, temperature=1.0, atol=2e-5):
    tokenizer = byte_tokenizer()
    rows = trainer.train_dataset
    for prompt, column in zip(rows["prompt"], rows["ref_query_logps"]):
        with torch.no_grad():
            expected = token_logps(model, tokenizer(prompt)["input_ids"], temperature)
        torch.testing.assert_close(torch.tensor(column, dtype=torch.float64), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_drift_before_the_first_update(tmp_path, kind, temperature):
    """Temperature, soft-capping, logit scale, tied head and absolute positions under left padding, in float32."""
    model = tiny_model(kind)
    plain = double_copy(model)
    trainer = first_step(tmp_path, model, temperature=temperature)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert logged(trainer, "query/kl_max")[0] < FLOAT32
    assert_reference(trainer, plain, temperature)


@pytest.mark.parametrize("kind", ["gemma2", "cohere"])
def test_head_settings_matter(kind):
    """The control: without its soft-cap or scale the model gives other log-probs, so the test above can fail."""
    field = {"gemma2": {"final_logit_softcapping": None}, "cohere": {"logit_scale": 1.0}}[kind]
    ids = byte_tokenizer()(UNEQUAL[1])["input_ids"]
    with torch.no_grad():
        with_setting = token_logps(tiny_model(kind).eval(), ids)
        without = token_logps(tiny_model(kind, **field).eval(), ids)
    assert (with_setting - without).abs().max() > 0.1


def test_padding_shifts_gpt2_without_position_ids():
    """The control for absolute positions: left padding without position ids changes the likelihood."""
    model = tiny_model("gpt2").eval()
    ids = torch.tensor([byte_tokenizer()(UNEQUAL[1])["input_ids"]])
    padded = torch.nn.functional.pad(ids, (6, 0))
    attention = torch.nn.functional.pad(torch.ones_like(ids), (6, 0))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        shifted = model(input_ids=padded, attention_mask=attention).logits[:, 6:]
    assert (plain - shifted).abs().max() > 0.1


@pytest.mark.parametrize("batch_tokens", [1, 64, 16384])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_scoring_batches_do_not_matter(tmp_path, kind, batch_tokens):
    """One prompt per forward or all in one: the table is the same and so is the zero drift."""
    model = tiny_model(kind)
    plain = double_copy(model)
    trainer = first_step(tmp_path, model, reference_batch_tokens=batch_tokens)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert_reference(trainer, plain)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_fresh_lora(tmp_path, temperature):
    """A fresh adapter does nothing yet: the reference is the base model."""
    model = tiny_model("llama")
    base = double_copy(model)
    trainer = first_step(tmp_path, model, temperature=temperature, trainer_kwargs={"peft_config": lora_config()})
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert_reference(trainer, base, temperature)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_pretrained_lora(tmp_path, temperature):
    """An adapter with random lora_B is the starting policy: disabling it would score another model."""
    model = lora_model(pretrained=True)
    policy = double_copy(model)
    with model.disable_adapter(), torch.no_grad():
        ids = byte_tokenizer()(UNEQUAL[1])["input_ids"]
        base = token_logps(model, ids)
    with torch.no_grad():
        assert (base.double() - token_logps(policy, ids)).abs().max() > 0.05, "the adapter was meant to matter"
    trainer = first_step(tmp_path, model, temperature=temperature)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert_reference(trainer, policy, temperature)


def test_pretrained_lora_beside_the_policy_kl(tmp_path):
    """With beta > 0 TRL adds a frozen copy named `ref`; both references are the starting adapter, both drifts are 0."""
    model = lora_model(pretrained=True)
    policy = double_copy(model)
    trainer = first_step(tmp_path, model, beta=0.04)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-7)
    assert_reference(trainer, policy)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_bfloat16_weights(tmp_path, kind):
    """A model in bf16: the drift stays below the stated rounding."""
    trainer = first_step(tmp_path, tiny_model(kind, dtype=torch.bfloat16))
    assert logged(trainer, "query/kl")[0] < BFLOAT16


def test_bfloat16_autocast(tmp_path):
    """float32 weights under bf16 autocast: scoring runs under the same autocast, else the drift starts above 0."""
    trainer = first_step(tmp_path, tiny_model("qwen2"), bf16=True)
    assert logged(trainer, "query/kl")[0] < BFLOAT16


def test_head_cast_to_float32(tmp_path):
    """`cast_lm_head_to_fp32` is part of the head: scored with it as well."""
    trainer = first_step(tmp_path, tiny_model("llama", dtype=torch.bfloat16), cast_lm_head_to_fp32=True)
    assert logged(trainer, "query/kl")[0] < BFLOAT16


def test_gradient_checkpointing(tmp_path):
    """Checkpointing recomputes the layers in backward; the forward's values are the same."""
    trainer = first_step(tmp_path, tiny_model("qwen2"), gradient_checkpointing=True)
    assert logged(trainer, "query/kl")[0] < FLOAT32


def test_mixture_of_experts(tmp_path):
    """Routing depends on the tokens only, not on how they are batched."""
    model = tiny_model("qwen2_moe")
    plain = double_copy(model)
    trainer = first_step(tmp_path, model)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert_reference(trainer, plain)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_conversational_prompts(tmp_path, pad_is_eos):
    """Template and generation prompt belong to the query; eos tokens inside it are scored even when they are the pad."""
    tokenizer = byte_tokenizer(pad_is_eos=pad_is_eos)
    model = tiny_model("qwen2")
    plain = double_copy(model)
    data = prompts_dataset([[{"role": "user", "content": p}] for p in UNEQUAL])
    trainer = first_step(tmp_path, model, dataset=data, tokenizer=tokenizer)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    for prompt, column in zip(trainer.train_dataset["prompt"], trainer.train_dataset["ref_query_logps"]):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        with torch.no_grad():
            expected = token_logps(plain, ids)
        torch.testing.assert_close(torch.tensor(column, dtype=torch.float64), expected, atol=2e-5, rtol=0)


def test_dropout_does_not_reach_the_reference(tmp_path, config):
    """A model left in train mode with dropout 0.5 is scored without dropout, and gets its mode and RNG back."""
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    plain = double_copy(model)
    model.train()
    model.transformer.h[0].eval()  # a mode per module: restored per module
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    tokenizer = byte_tokenizer()
    data = DatasetMapper(model, tokenizer, config())(prompts_dataset())
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for prompt, column in zip(data["prompt"], data["ref_query_logps"]):
        with torch.no_grad():
            expected = token_logps(plain, tokenizer(prompt)["input_ids"])
        torch.testing.assert_close(torch.tensor(column, dtype=torch.float64), expected, atol=2e-5, rtol=0)


def test_scoring_leaves_gradients_and_cache_settings(config):
    """Scoring builds no graph, touches no gradient and no config of the model."""
    model = tiny_model("qwen2")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.config.to_dict()
    DatasetMapper(model, byte_tokenizer(), config())(prompts_dataset())
    assert model.config.to_dict() == before
    assert all(parameter.requires_grad and (parameter.grad == 1).all() for parameter in model.parameters())
    ids = torch.tensor([[20, 21, 22]])
    assert model(input_ids=ids).logits.shape == (1, 3, model.config.vocab_size)


def test_mapper_then_trainer_at_another_temperature(tmp_path, config):
    """A mapper at temperature 1 leaves nothing on the model: a trainer at 0.7 built on it afterwards still starts at 0."""
    model = tiny_model("qwen2")
    plain = double_copy(model)
    DatasetMapper(model, byte_tokenizer(), config())(prompts_dataset())
    trainer = first_step(tmp_path, model, temperature=0.7)
    assert logged(trainer, "query/kl")[0] < FLOAT32
    assert_reference(trainer, plain, 0.7)


def test_a_scale_after_the_rotation(tmp_path):
    """HunYuan scales queries and keys per dimension after rotating them, so that their scores depend on where tokens stand and left
    padding would change a prompt's likelihood.
    """
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = HunYuanDenseV1Config(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, **shape
    )
    model = HunYuanDenseV1ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "query_layernorm" in name or "key_layernorm" in name:
            torch.nn.init.normal_(parameter, mean=1.5, std=0.3)
    trainer = first_step(tmp_path, model, query_kl_coef=0.3)
    assert logged(trainer, "query/kl_max")[0] < FLOAT32
