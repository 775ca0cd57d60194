"""A sample belongs to its seed: not to its batch, its order, its process or the global random state."""

import math

import pytest
import torch
from helpers import EAGER_EOS, byte_tokenizer, lora_model, tiny_model

from erpo_trl.evaluation.backends import Request, TransformersBackend
from erpo_trl.evaluation.sampling import PASS_AT_1_DRAW, draw_tokens, sample_seed, uniforms

PROMPTS = [(9, 40, 60), (12,), (70, 71, 72, 73, 74, 75, 76, 77), (9, 40, 60)]


def requests(temperature, samples=3, room=12):
    return [
        Request(row, sample, sample_seed(0, "b", row, sample, temperature), temperature, ids, room)
        for row, ids in enumerate(PROMPTS)
        for sample in range(samples)
    ]


def backend(model=None, batch_tokens=10_000):
    return TransformersBackend((model or tiny_model("qwen2")).eval(), byte_tokenizer(), batch_tokens)


def draw_all(engine, wanted):
    return {
        (request.row, request.sample): draw
        for batch in engine.plan(wanted)
        for request, draw in zip(batch, engine.generate(batch))
    }


def test_seeds_are_distinct_and_fixed():
    names = [
        (seed, benchmark, row, sample, temperature)
        for seed in range(2)
        for benchmark in ("a", "b")
        for row in range(20)
        for sample in (PASS_AT_1_DRAW, *range(8))
        for temperature in (0.1, 0.7, 1.0)
    ]
    seeds = {sample_seed(*name) for name in names}
    assert len(seeds) == len(names) and all(0 <= seed < 2**63 for seed in seeds)
    # A change of the derivation would change every published sample
    assert sample_seed(0, "math500", 0, 0, 0.1) == 3004162924075465010
    assert sample_seed(0, "a", 0, 0, 1) == sample_seed(0, "a", 0, 0, 1.0)


def test_uniforms_use_the_whole_seed():
    """torch's CPU generator keeps 32 bits, so seeds that differ above them would give copies."""
    assert uniforms(5, 4).tolist() != uniforms(5 + 2**32, 4).tolist()
    assert uniforms(5, 9)[:4].tolist() == uniforms(5, 4).tolist()


def test_tokens_follow_the_softmax():
    """Over an even grid of uniform numbers every token's share is its probability, to the width of the grid."""
    logits = torch.tensor([2.0, -math.inf, 0.5, -1.0, 0.0, -math.inf])
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for temperature in (0.3, 1.0, 1.5):
        tokens = draw_tokens(logits.expand(len(grid), -1), grid, temperature)
        shares = torch.bincount(tokens, minlength=6) / len(grid)
        assert torch.allclose(shares, torch.softmax(logits / temperature, 0), atol=1e-4)
    ends = draw_tokens(logits.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert ends.tolist() == [0, 4]  # never an impossible token


def test_samples_are_those_of_a_plain_loop():
    """Token by token without batch, cache or `generate`."""
    model = tiny_model("qwen2").eval()
    found = draw_all(backend(model), requests(0.9))
    for request in requests(0.9):
        ids, picked = list(request.prompt_ids), []
        for uniform in uniforms(request.seed, request.max_new_tokens):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[:, -1]
            cumulative = torch.softmax(logits[0].double() / 0.9, 0).cumsum(0)
            picked.append(int((cumulative <= uniform).sum()))
            ids.append(picked[-1])
            if picked[-1] in EAGER_EOS:
                break
        draw = found[request.row, request.sample]
        assert draw.token_ids == picked
        assert draw.finished == (picked[-1] in EAGER_EOS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batching_and_order_do_not_matter(temperature):
    wanted = requests(temperature)
    whole = draw_all(backend(), wanted)
    assert draw_all(backend(batch_tokens=1), wanted) == whole
    assert draw_all(backend(batch_tokens=45), wanted[::-1]) == whole


def test_samples_differ_and_greedy_ones_do_not():
    sampled = draw_all(backend(), requests(1.0))
    # Rows 0 and 3 have the same prompt: they are two problems with draws of their own
    assert len({tuple(sampled[row, sample].token_ids) for row in (0, 3) for sample in range(3)}) == 6
    greedy = draw_all(backend(), requests(0.0))
    assert len({tuple(greedy[row, sample].token_ids) for row in (0, 3) for sample in range(3)}) == 1


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = draw_all(backend(), requests(1.0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert draw_all(backend(), requests(1.0)) == first


def test_the_models_own_generation_settings_do_not_bend_the_distribution():
    """Hub models ship a repetition penalty, top_p and the like; they come back afterwards."""
    plain = draw_all(backend(), requests(1.2))
    model = tiny_model("qwen2")
    config = model.generation_config
    config.update(repetition_penalty=3.0, top_p=0.1, top_k=1, do_sample=True, no_repeat_ngram_size=1, min_length=11)
    assert draw_all(backend(model), requests(1.2)) == plain
    assert model.generation_config is config and config.repetition_penalty == 3.0


def test_adapter_takes_part_and_its_config_comes_back():
    plain, adapted = lora_model(pretrained=False), lora_model(pretrained=True)
    config = adapted.get_base_model().generation_config
    config.repetition_penalty = 3.0
    # Large tilts, so that the adapter shows in every draw
    assert draw_all(backend(plain), requests(0.0)) != draw_all(backend(adapted), requests(0.0))
    assert adapted.get_base_model().generation_config is config


def test_plan_keeps_to_the_budget_and_to_equal_rooms():
    wanted = requests(1.0, room=12) + [
        Request(row, 0, 1, 1.0, (8,) * length, 64 - length) for row, length in ((4, 60), (5, 60), (6, 58))
    ]
    batches = backend(batch_tokens=60).plan(wanted)
    assert sorted((r.row, r.sample) for b in batches for r in b) == sorted((r.row, r.sample) for r in wanted)
    for batch in batches:
        longest = max(len(r.prompt_ids) for r in batch)
        assert len(batch) == 1 or len(batch) * (longest + batch[0].max_new_tokens) <= 60
        assert len({r.max_new_tokens for r in batch}) == 1


def test_a_model_without_end_of_sequence_is_refused():
    model, tokenizer = tiny_model("qwen2"), byte_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names an end-of-sequence token"):
        TransformersBackend(model, tokenizer, 100)


def test_absolute_positions_run_to_the_end_of_the_table_and_no_further():
    """GPT-2 has no position beyond its table; a row of full room beside a longer one would run past it."""
    model = tiny_model("gpt2", n_positions=32)
    model.generation_config.eos_token_id = None
    wanted = [
        Request(0, 0, 1, 1.0, (20,) * 28, 4),
        Request(1, 0, 2, 1.0, (21,) * 25, 7),
        Request(2, 0, 3, 1.0, (22,) * 3, 20),
    ]
    found = draw_all(TransformersBackend(model.eval(), byte_tokenizer(), 10_000), wanted)
    assert [len(found[row, 0].token_ids) for row in range(3)] == [4, 7, 20]
