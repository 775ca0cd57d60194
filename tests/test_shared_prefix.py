"""Rows that share a prompt run it once: the same log-probs, entropies and gradients as when each runs it alone."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import _COMMON, _TRUNK, PAD, VOCAB, lora_model, tiny_model
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from erpo_trl.forward.branches import additive, sees
from erpo_trl.forward.cost import flops_per_pair, flops_per_token, packed_cost, pays, plain_cost
from erpo_trl.forward.prefix import plan, shared_prefixes
from erpo_trl.forward.support import attention_window, why_not_shared
from erpo_trl.query.fingerprint import base_model
from erpo_trl.query.likelihood import pass_position_ids, scored_token_mask

MORE = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 64}),
    "phi": (PhiForCausalLM, PhiConfig, {"partial_rotary_factor": 0.5}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
    "jamba": (
        JambaForCausalLM,
        JambaConfig,
        {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
}


def model_of(kind: str, attention: str = "sdpa", dtype=torch.float64, **overrides):
    if kind in MORE:
        model_class, config_class, own = MORE[kind]
        torch.manual_seed(0)
        model = model_class(config_class(**_COMMON, **_TRUNK | own | overrides)).to(dtype)
    else:
        model = tiny_model(kind, dtype=dtype, **overrides)
    model.config._attn_implementation = attention
    return model.eval()


def batch_of(groups: list[tuple[list[int], int]], shuffle: bool = True, seed: int = 0):
    """Padded rows of [prompt; completion]; a group is (lengths of its completions, length of its prompt).

    Returns (B, L) ids, (B, L) mask and the columns of the prompt. Padding holds tokens that must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for completions, length in groups:
        prompt = torch.randint(9, VOCAB, (length,), generator=generator)
        rows += [(prompt, torch.randint(9, VOCAB, (n,), generator=generator)) for n in completions]
    if shuffle:
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    prompt_width = max(len(prompt) for prompt, _ in rows)
    width = prompt_width + max(len(completion) for _, completion in rows)
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    ids.random_(9, VOCAB, generator=generator)
    for row, (prompt, completion) in enumerate(rows):
        start, end = prompt_width - len(prompt), prompt_width + len(completion)
        ids[row, start:end] = torch.cat([prompt, completion])
        mask[row, start:end] = 1
    return ids, mask, prompt_width


BATCHES = {
    "one_group": [([3, 5, 1, 4], 6)],
    "ragged": [([3, 5, 1], 6), ([2, 2, 4, 7], 3), ([4, 1], 9)],
    "with_one_row_groups": [([3, 5, 2], 6), ([4], 2), ([6], 8)],
    "one_token_prompts": [([3, 5], 1), ([2, 4], 1)],
    "fully_masked_rows": [([3, 0, 4, 0], 5), ([0, 0], 3)],
}


# ------------------------------------------------------------------------------------------------------------ the layout
@pytest.mark.parametrize("name", BATCHES)
def test_every_token_sees_its_row_and_no_other(name):
    """By brute force: what each token's slot sees is its own row up to itself, in order and at its positions."""
    ids, mask, prompt_width = batch_of(BATCHES[name])
    real = mask.bool().numpy()
    layout = plan(ids.numpy(), real, prompt_width)
    seen = sees(torch.from_numpy(layout.group), torch.from_numpy(layout.branch))[:, 0].numpy()
    tokens = ids.numpy().ravel()[layout.source]
    slots = layout.source.shape[1]
    for row in range(len(ids)):
        columns = np.flatnonzero(real[row])
        for count, column in enumerate(columns, start=1):
            at, slot = divmod(layout.place[row, column], slots)
            visible = np.flatnonzero(seen[at, slot])
            assert tokens[at, visible].tolist() == ids.numpy()[row, columns[:count]].tolist()
            assert layout.position[at, visible].tolist() == list(range(count))
    assert layout.longest == real.sum(1).max()


@pytest.mark.parametrize("name", BATCHES)
def test_each_prompt_is_held_once(name):
    ids, mask, prompt_width = batch_of(BATCHES[name])
    layout = plan(ids.numpy(), mask.bool().numpy(), prompt_width)
    held = layout.group >= 0
    assert held.sum() == sum(length + sum(completions) for completions, length in BATCHES[name])
    assert (held & (layout.branch == 0)).sum() == sum(length for _, length in BATCHES[name])
    assert layout.source.shape[1] == max(length + sum(completions) for completions, length in BATCHES[name])
    assert (np.diff(held.astype(int), axis=1) <= 0).all()  # padding at the ends only


def test_short_groups_fill_up_a_row():
    """Lengths 14, 8 and 6 take two rows of 14, not three."""
    ids, mask, prompt_width = batch_of([([4, 4], 6), ([2, 2], 4), ([2], 4)])
    assert plan(ids.numpy(), mask.bool().numpy(), prompt_width).source.shape == (2, 14)


def test_nothing_to_share():
    ids, mask, prompt_width = batch_of([([3], 4), ([2], 4), ([5], 4)])
    assert plan(ids.numpy(), mask.bool().numpy(), prompt_width) is None


def test_prompts_of_unequal_length_with_equal_tokens_at_the_end_are_apart():
    """[7, 8, 9] and [8, 9] fill the same last columns."""
    ids = np.array([[7, 8, 9, 1], [7, 8, 9, 2], [0, 8, 9, 3], [0, 8, 9, 4]])
    real = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]], dtype=bool)
    layout = plan(ids, real, 3)
    assert sorted((layout.group == g).sum() for g in (0, 1)) == [4, 5]


def test_additive_mask():
    mask = additive(torch.tensor([[True, False]]), torch.bfloat16)
    assert mask.dtype == torch.bfloat16 and mask.tolist() == [[0.0, torch.finfo(torch.bfloat16).min]]


def labels_of(ids, mask):
    """Every token whose predecessor is real too, of prompt and completion."""
    scored = torch.nn.functional.pad(scored_token_mask(mask), (1, 0))
    return ids.masked_fill(~scored, -100)


# ----------------------------------------------------------------------------------------------------------- exactness
# Weights are float64, but the norms, the softmax and the head of these models compute in float32
def outputs_of(model, batch, shared: bool, aux: bool = False):
    """Log-probs, entropies and aux loss as TRL asks for them, prompts labelled too; and the gradient of a mix of them."""
    ids, mask, prompt_width = batch
    model = copy.deepcopy(model)
    base = base_model(model)
    add_fused_lm_head(base, temperature=0.9, outputs=("log_probs", "entropy"))
    labels = labels_of(ids, mask)
    kwargs = {"output_router_logits": True} if aux else {}
    eager = model.config._attn_implementation == "eager"
    used = []

    def wanted(layout):
        used.append(layout)
        return shared

    with shared_prefixes(base.base_model, prompt_width, eager, wanted):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **kwargs)
    assert used, "no rows share a prompt: the comparison would be empty"
    weight = torch.linspace(-1, 1, outputs.log_probs.numel(), dtype=outputs.log_probs.dtype).view_as(outputs.log_probs)
    loss = (outputs.log_probs * weight).sum() + (outputs.entropy * weight.flip(1)).sum()
    if aux:
        loss = loss + 10 * outputs.aux_loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs, grads


def assert_equal_outputs(model, batch, rel: float, aux: bool = False):
    (plain, plain_grads), (shared, shared_grads) = (outputs_of(model, batch, x, aux) for x in (False, True))
    assert plain.log_probs.abs().max() > 1
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name), rtol=rel, atol=rel)
    assert torch.equal(shared.label_mask, plain.label_mask)
    if aux:
        torch.testing.assert_close(shared.aux_loss, plain.aux_loss, rtol=rel, atol=rel)
    assert set(shared_grads) == set(plain_grads)
    scale = max(grad.abs().max() for grad in plain_grads.values())
    for name, grad in plain_grads.items():
        assert (shared_grads[name] - grad).abs().max() <= rel * scale, name


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "cohere", "mistral", "phi", "gpt_neox"]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gemma2"])  # soft-capped attention has no sdpa
def test_equal_to_the_plain_forward(kind, name):
    assert_equal_outputs(model_of(kind), batch_of(BATCHES[name]), 2e-6)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_equal_with_eager_attention(kind, name):
    """In float32: under left padding transformers' own mask makes eager attention NaN in float64."""
    assert_equal_outputs(model_of(kind, "eager", torch.float32), batch_of(BATCHES[name]), 3e-5)


@pytest.mark.parametrize("name", BATCHES)
def test_router_loss_counts_a_prompt_as_often_as_it_has_rows(name):
    """The balance of a mixture's experts is over the rows' tokens, float32 in transformers."""
    assert_equal_outputs(model_of("qwen2_moe"), batch_of(BATCHES[name]), 1e-5, aux=True)
    assert_equal_outputs(model_of("qwen2_moe"), batch_of(BATCHES[name]), 2e-6)


def test_absolute_positions_are_counted_from_the_first_real_token():
    """GPT-2 type, told its positions as in training."""
    ids, mask, prompt_width = batch_of(BATCHES["ragged"])
    labels = labels_of(ids, mask)
    logps = []
    for shared in (False, True):
        other = model_of("gpt2")
        add_fused_lm_head(other)
        pass_position_ids(other)
        with shared_prefixes(other.base_model, prompt_width, False, lambda layout, use=shared: use):
            logps.append(other(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs)
    torch.testing.assert_close(*logps, rtol=2e-6, atol=2e-6)


def test_with_lora_and_checkpointing():
    """Layers that are run again in the backward see the packed rows again."""
    model = lora_model(pretrained=True).double()
    model.config._attn_implementation = "sdpa"
    model.train()
    assert_equal_outputs(model, batch_of(BATCHES["ragged"]), 2e-6)
    model.get_base_model().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert_equal_outputs(model, batch_of(BATCHES["ragged"]), 2e-6)


def test_layers_see_the_prompt_once():
    """The work itself: tokens that the first layer gets."""
    model = model_of("qwen2")
    add_fused_lm_head(model)
    ids, mask, prompt_width = batch_of([([4, 4, 4, 4], 20)])
    sizes = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda m, args: sizes.append(args[0].shape[:2]))
    with shared_prefixes(model.model, prompt_width, False, lambda layout: True):
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)  # and outside nothing is packed
    handle.remove()
    assert sizes == [(1, 36), (4, 24)]


def test_hooks_are_gone_after_an_error():
    model = model_of("qwen2")
    with pytest.raises(ZeroDivisionError), shared_prefixes(model.model, 3, True, lambda layout: True):
        raise ZeroDivisionError
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks


# -------------------------------------------------------------------------------------------------------- recognition
@pytest.mark.parametrize("kind", [*FAMILIES, "qwen2_moe", "gpt2"])
def test_supported(kind):
    assert why_not_shared(model_of(kind)) is None


def with_attention(name):
    model = model_of("qwen2")
    model.config._attn_implementation = name
    return model


UNSUPPORTED = {
    "convolutions": (lambda: model_of("lfm2"), "Lfm2ForCausalLM has layers of type conv"),
    "state_space": (
        lambda: model_of("jamba"),
        "JambaForCausalLM carries a state from token to token beside attention",
    ),
    "alibi": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)),
        "BloomForCausalLM has an attention of its own",
    ),
    "flash_attention": (
        lambda: with_attention("flash_attention_2"),
        "prompts are shared with attention 'sdpa' or 'eager', and this is 'flash_attention_2'",
    ),
    "flex_attention": (
        lambda: with_attention("flex_attention"),
        "prompts are shared with attention 'sdpa' or 'eager', and this is 'flex_attention'",
    ),
    "dynamic_rope": (
        lambda: model_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "the rotary positions of LlamaForCausalLM (dynamic) depend on the longest row of a batch",
    ),
    "prompt_learning": (
        lambda: get_peft_model(tiny_model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "a prompt-learning adapter puts virtual tokens before every row",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_is_named(name):
    make, why = UNSUPPORTED[name]
    assert why_not_shared(make()) == why


def test_window():
    assert attention_window(model_of("mistral").config) == 64
    assert attention_window(model_of("gemma2").config) == 64
    assert attention_window(model_of("qwen2").config) == math.inf
    # Set, but no layer slides
    whole = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}
    config = model_of("qwen3", **whole).config
    assert config.sliding_window == 8 and attention_window(config) == math.inf


def test_rows_longer_than_the_window_differ():
    """Why such batches are left out: the packed mask knows no window. At the window's length both are equal."""
    batch = batch_of([([6, 4, 5], 10)])
    assert_equal_outputs(model_of("mistral", sliding_window=16), batch, 2e-6)
    (plain, _), (shared, _) = (outputs_of(model_of("mistral", sliding_window=8), batch, x) for x in (False, True))
    assert (plain.log_probs - shared.log_probs).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------------------- cost
def test_operations():
    """Llama of two layers: q, o 32x32, k, v 16x32, three of 48x32; four heads of 8."""
    model = model_of("llama")
    assert flops_per_token(model.base_model) == 2 * 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert flops_per_pair(model.config) == 2 * 4 * 32
    # Layers of two kinds, with heads of 8 and of 16
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 16}
    gemma4 = Gemma4TextConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, **kinds)
    assert flops_per_pair(gemma4) == 4 * 4 * (8 + 16)
    # Of four experts (gate and up 32x32, down 32x16) a token meets two; router 4x32, shared expert 3x16x32 and its gate 32
    moe = model_of("qwen2_moe")
    attention = 2 * 32 * 32 + 2 * 16 * 32
    assert flops_per_token(moe.base_model) == 2 * 2 * (attention + 2 * (32 * 32 + 32 * 16) + 4 * 32 + 3 * 16 * 32 + 32)


def layout_of(prompt: int, completion: int, rows: int = 8):
    ids, mask, prompt_width = batch_of([([completion] * rows, prompt)])
    return plan(ids.numpy(), mask.bool().numpy(), prompt_width)


# Eight layers of hidden size 512, intermediate size 1408 and eight heads
TOKEN, PAIR = 8 * 2 * (3 * 512**2 + 3 * 512 * 1408), 8 * 4 * 512


@pytest.mark.parametrize(
    "prompt, completion, expected, measured",
    [(64, 64, True, 1.7), (256, 64, True, 3.4), (64, 256, True, 1.2), (64, 512, True, 1.0), (1024, 128, True, 3.8)],
)
def test_auto_on_a_cpu(prompt, completion, expected, measured):
    """Against the speed that was measured of the layers, forward and backward, on one thread."""
    arguments = (layout_of(prompt, completion), TOKEN, PAIR, "cpu", "sdpa")
    assert plain_cost(*arguments) / packed_cost(*arguments) == pytest.approx(measured, rel=0.12)
    assert pays(*arguments) == expected


def test_auto_elsewhere():
    """Not measured there: shared where much is saved."""
    assert pays(layout_of(256, 64), TOKEN, PAIR, "cuda", "sdpa")
    assert not pays(layout_of(64, 64), TOKEN, PAIR, "cuda", "sdpa")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dense_mask_costs_more(device):
    """Eager attention pays for every pair."""
    assert pays(layout_of(256, 16), TOKEN, PAIR, device, "eager")
    assert pays(layout_of(128, 128), TOKEN, PAIR, "cpu", "sdpa")
    assert not pays(layout_of(128, 256), TOKEN, PAIR, device, "eager")


def test_cost_by_hand():
    """Eight rows of 6 tokens against one of 4 + 16, a pair costs 1 and a token t.

    Eager: 48 t + 288 against 20 t + 3 · 400. By branches 1.3 · 288 against 20 t + 1.3 · 4² + 1.6 · 8 · 2 · 6 + 70 · (4 + 48), or
    as rows, which have fewer to move, 20 t + 1.3 · 288 + 70 · 48. The edge is where a twentieth is saved.
    """
    layout = layout_of(4, 2)
    assert layout.source.shape == (1, 20) and layout.place.shape == (8, 6)
    packed = {"eager": 3 * 400, "sdpa": min(1.3 * 16 + 1.6 * 96 + 70 * 52, 1.3 * 288 + 70 * 48)}
    plain = {"eager": 288, "sdpa": 1.3 * 288}
    for attention in ("eager", "sdpa"):
        edge = (packed[attention] - 0.95 * plain[attention]) / (0.95 * 48 - 20)
        assert pays(layout, edge + 0.01, 1.0, "cpu", attention)
        assert not pays(layout, edge - 0.01, 1.0, "cpu", attention)
