"""Attention by branches: the dense mask's numbers without its pairs, and the dense mask for whoever asks for it."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import lora_model
from test_shared_prefix import (
    BATCHES,
    assert_equal_outputs,
    batch_of,
    labels_of,
    model_of,
    outputs_of,
)
from torch.nn.functional import scaled_dot_product_attention
from trl.trainer.utils import add_fused_lm_head

from erpo_trl.forward import branches
from erpo_trl.forward.branches import BranchMask, Parts, Price, attend, branches_of, price, sees
from erpo_trl.forward.prefix import plan, shared_prefixes

CPU = torch.device("cpu")
SDPA = ["llama", "qwen2", "qwen3", "cohere", "mistral", "phi", "gpt_neox", "qwen2_moe", "gpt2"]


@pytest.fixture(params=["rows", "branches"])
def way(request, monkeypatch):
    """Prices under which only one of the two ways is ever taken."""
    free = Price(0.0, 1.0, 0.0) if request.param == "rows" else Price(1.0, 0.0, 0.0)
    monkeypatch.setitem(branches._PRICES, "cpu", free)
    return request.param


def layout_of(name):
    ids, mask, prompt_width = batch_of(BATCHES[name])
    return plan(ids.numpy(), mask.bool().numpy(), prompt_width)


def inputs_of(layout, heads=4, key_heads=4, size=6, value_size=6):
    """Random float64 queries, keys and values of the packed slots, as a model hands them over: transposed."""
    rows, slots = layout.group.shape
    generator = torch.Generator().manual_seed(0)

    def states(count, width):
        x = torch.randn(rows, slots, count, width, generator=generator, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    return states(heads, size), states(key_heads, size), states(key_heads, value_size)


def tensors_of(layout):
    return torch.from_numpy(layout.group), torch.from_numpy(layout.branch)


def both_ways(layout, inputs, **options):
    """(output, gradients of queries, keys and values) at real slots, by branches and under the dense mask."""
    group, branch = tensors_of(layout)
    mask = BranchMask.of(group, branch, branches_of(layout.group, layout.branch, CPU))
    real = (group >= 0)[:, None, :, None]
    found = []
    for seen in (mask, sees(group, branch)):
        out = scaled_dot_product_attention(*inputs, attn_mask=seen, **options).masked_fill(~real, 0.0)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    return found


# --------------------------------------------------------------------------------------------------------- the numbers
@pytest.mark.parametrize("name", BATCHES)
def test_equal_to_the_dense_mask(name, way):
    """Output and gradients in float64, for groups of unequal number and length in several packed rows."""
    layout = layout_of(name)
    assert (branches_of(layout.group, layout.branch, CPU).seen is None) == (way == "rows")
    for one, other in zip(*both_ways(layout, inputs_of(layout))):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_options_are_passed_on(way):
    """Grouped heads, another scale, values of another size."""
    layout = layout_of("ragged")
    inputs = inputs_of(layout, heads=6, key_heads=2, value_size=4)
    for one, other in zip(*both_ways(layout, inputs, enable_gqa=True, scale=0.7)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_dropout_is_passed_on(way):
    """Of one token to itself only: attention is 1, so that dropout leaves 0 or 1 / (1 - p) times the value."""
    layout = layout_of("one_token_prompts")
    group, branch = tensors_of(layout)
    query, key, value = inputs_of(layout)
    value = torch.ones_like(value)
    parts = branches_of(layout.group, layout.branch, CPU)
    torch.manual_seed(0)
    out = attend(query, key, value, parts, dropout_p=0.75, scale=None, enable_gqa=False)
    first = out.transpose(1, 2)[(group >= 0) & (branch == 0)]
    assert set(first.unique().tolist()) == {0.0, 4.0}


def test_causal_and_a_mask_exclude_each_other():
    layout = layout_of("ragged")
    mask = BranchMask.of(*tensors_of(layout), branches_of(layout.group, layout.branch, CPU))
    with pytest.raises(ValueError, match="is_causal must be False where there is a mask"):
        scaled_dot_product_attention(*inputs_of(layout), attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("name", BATCHES)
def test_no_more_pairs_than_in_plain_rows(name, way):
    """Counted in the calls of the kernel: a square counts in full, as under a causal kernel in plain rows."""
    layout = layout_of(name)
    pairs = []

    def count(query, key, value, **options):
        pairs.append(query.shape[0] * query.shape[2] * key.shape[2])
        return scaled_dot_product_attention(query, key, value, **options)

    parts = branches_of(layout.group, layout.branch, CPU)
    with mock.patch.object(branches, "scaled_dot_product_attention", count):
        attend(*inputs_of(layout), parts, dropout_p=0.0, scale=None, enable_gqa=False)
    taken = Parts.of(layout.group, layout.branch).cheapest("cpu")
    assert sum(pairs) == taken.causal + taken.masked
    rows, columns = layout.place.shape
    assert sum(pairs) <= rows * columns**2
    assert len(pairs) == (1 if way == "rows" else 2)


# ----------------------------------------------------------------------------------------------------------- in models
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "cohere", "mistral", "phi", "gpt_neox"])
def test_equal_to_the_plain_forward(kind, name, way):
    assert_equal_outputs(model_of(kind), batch_of(BATCHES[name]), 2e-6)


@pytest.mark.parametrize("kind", SDPA)
def test_no_model_makes_the_mask(kind, way):
    """A model that did anything else with it than hand it to the kernel would get the dense one, and pay for it."""
    model = model_of(kind)
    add_fused_lm_head(model)
    ids, mask, prompt_width = batch_of(BATCHES["ragged"])
    with (
        mock.patch.object(branches, "sees", side_effect=AssertionError("the dense mask was made")),
        mock.patch.object(branches, "attend", side_effect=attend) as called,
        shared_prefixes(model.base_model, prompt_width, False, lambda layout: True),
    ):
        model(input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask), fused_lm_head=True)
    assert called.call_count == model.config.num_hidden_layers


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_run_again_attend_by_branches(reentrant, way):
    """Gradient checkpointing runs layers again in the backward, after the forward's end; with LoRA."""
    model = lora_model(pretrained=True).double()
    model.config._attn_implementation = "sdpa"
    model.train()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with mock.patch.object(branches, "attend", side_effect=attend) as called:
        assert_equal_outputs(model, batch_of(BATCHES["ragged"]), 2e-6)
    assert called.call_count == 2 * model.get_base_model().config.num_hidden_layers


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_under_autocast(kind, way):
    """Norms of queries and keys give float32 beside values of bfloat16, which the kernel's autocast sorts out."""
    model, batch = model_of(kind, dtype=torch.float32), batch_of(BATCHES["ragged"])
    exact, _ = outputs_of(model, batch, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (plain, plain_grads), (shared, grads) = (outputs_of(model, batch, x) for x in (False, True))
    rounding = (plain.log_probs - exact.log_probs).abs().max()
    assert 0 < rounding
    assert (shared.log_probs - exact.log_probs).abs().max() <= 2 * rounding
    scale = max(grad.abs().max() for grad in plain_grads.values())
    for name, grad in plain_grads.items():
        assert (grads[name] - grad).abs().max() <= 0.05 * scale, name


# ------------------------------------------------------------------------------------------------------------ the mask
def test_a_mask_that_is_looked_into_is_the_dense_one():
    layout = layout_of("ragged")
    group, branch = tensors_of(layout)
    mask, dense = BranchMask.of(group, branch, branches_of(layout.group, layout.branch, CPU)), sees(group, branch)
    assert mask.shape == dense.shape and mask.dtype == torch.bool and mask.device == CPU and mask.ndim == 4
    assert not mask.is_floating_point() and mask.size(2) == dense.shape[2]
    for look in (
        lambda x: x[:, :, 2:, :5],
        lambda x: x.to(torch.float32),
        lambda x: torch.where(x, 0.0, -math.inf),
        lambda x: x & torch.ones_like(x),
        lambda x: x.detach(),
        lambda x: x.clone(),
        lambda x: x.mT,
        lambda x: torch.cat([x, x], dim=0),
    ):
        found = look(mask)
        assert type(found) is torch.Tensor and torch.equal(found, look(dense))


def test_a_mask_holds_no_pairs():
    layout = layout_of("ragged")
    mask = BranchMask.of(*tensors_of(layout), branches_of(layout.group, layout.branch, CPU))
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.untyped_storage().nbytes() == 1


# ---------------------------------------------------------------------------------------------------------- the prices
def test_ways_by_hand():
    """Three completions of up to 5 behind a prompt of 6, two of up to 7 behind one of 3, in batches of five."""
    ids, mask, prompt_width = batch_of([([3, 5, 1], 6), ([2, 7], 3)])
    layout = plan(ids.numpy(), mask.bool().numpy(), prompt_width)
    parts = Parts.of(layout.group, layout.branch)
    assert sorted(map(len, parts.prompts)) == [3, 6] and sorted(map(len, parts.completions)) == [1, 2, 3, 5, 7]
    with mock.patch.dict(branches._PRICES, {"cpu": Price(0.0, 1.0, 0.0), "other": Price(1.0, 0.0, 0.0)}):
        rows, apart = parts.cheapest("cpu"), parts.cheapest("other")
    assert (rows.as_rows, rows.causal, rows.masked, rows.moved) == (True, 5 * 11**2, 0, 5 * 11)
    assert (apart.as_rows, apart.causal, apart.masked, apart.moved) == (False, 2 * 6**2, 5 * 7 * 13, 2 * 6 + 5 * 13)


@pytest.mark.parametrize(
    "device, prompt, completion, as_rows",
    [("cpu", 64, 512, True), ("cpu", 64, 64, False), ("cpu", 1024, 128, False)]
    + [("cuda", 64, 64, True), ("cuda", 256, 64, True), ("cuda", 4096, 64, False)],
)
def test_masks_are_used_where_they_save_most(device, prompt, completion, as_rows):
    ids = np.random.default_rng(0).integers(9, 99, (8, prompt + completion))
    ids[:, :prompt] = ids[0, :prompt]
    layout = plan(ids, np.ones_like(ids, dtype=bool), prompt)
    assert Parts.of(layout.group, layout.branch).cheapest(device).as_rows == as_rows


def test_price_of_an_unknown_device():
    assert price("cuda") == price("mps") != price("cpu")
