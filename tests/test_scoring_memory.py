"""A scoring forward that does not fit into memory."""

import pytest
import torch
from helpers import UNEQUAL, byte_tokenizer, out_of_memory_above, prompts_dataset, tiny_model
from transformers.utils import logging as transformers_logging

from erpo_trl import DatasetMapper


def test_out_of_memory_halves_the_budget(config, caplog):
    """Scoring goes on with half the tokens until a forward fits, and the table is that of a large device."""
    expected = DatasetMapper(tiny_model("qwen2"), byte_tokenizer(), config(query_kl_coef=0.0))(
        prompts_dataset(UNEQUAL)
    )
    model = tiny_model("qwen2")
    tried = out_of_memory_above(model, 40)
    settings = config(reference_batch_tokens=400, reference_cache_dir=config().reference_cache_dir + "_small")
    mapper = DatasetMapper(model, byte_tokenizer(), settings)
    transformers_logging.enable_propagation()
    try:
        found = mapper(prompts_dataset(UNEQUAL))
    finally:
        transformers_logging.disable_propagation()
    for row, other in zip(found["ref_query_logps"], expected["ref_query_logps"], strict=True):
        assert row == pytest.approx(other, abs=1e-5)
    assert tried[:2] == [7 * 18, 3 * 18], tried
    assert max(tried[2:]) <= 40 and mapper.report.forwards == len(tried)
    assert "going on with 27 tokens a forward" in caplog.text


def test_one_prompt_too_large_for_memory(config):
    """Nothing to halve: the message names the size and the field."""
    model = tiny_model("qwen2")
    out_of_memory_above(model, 17)
    mapper = DatasetMapper(model, byte_tokenizer(), config(reference_batch_tokens=400))
    with pytest.raises(torch.OutOfMemoryError, match="with one prompt of 18 tokens: set max_prompt_length"):
        mapper(prompts_dataset(UNEQUAL))
