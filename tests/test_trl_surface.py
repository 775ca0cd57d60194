"""TRL's private names that the package stands on. Runs against every supported TRL."""

import importlib
import inspect
import re
from importlib.metadata import version

import pytest
import torch
from helpers import make_config, make_trainer
from preference_helpers import make_preference_trainer

import erpo_trl._trl as surface
from erpo_trl import ERPORLOOTrainer, ERPOTrainer

# TRL 1.15's fused head exists only where Triton does, so beside it the tests here read and do not run
both_trls = pytest.mark.both_trls


@both_trls
@pytest.mark.parametrize("module", surface.PRIVATE_NAMES)
def test_names_exist(module):
    """A renamed private name must fail here, by name, and not as a missing column in somebody's run."""
    loaded = importlib.import_module(module)
    for owner, names in surface.PRIVATE_NAMES[module].items():
        holder = loaded if owner is None else getattr(loaded, owner)
        missing = [name for name in names if not hasattr(holder, name)]
        assert not missing, f"TRL {version('trl')} has no {module}.{owner or ''} {missing}: the hook must be adapted"


@both_trls
@pytest.mark.parametrize("trainer", surface.PRIVATE_ATTRIBUTES)
def test_attributes_are_set(trainer):
    """Attributes exist on instances only; a renamed one would be created anew by an assignment and do nothing."""
    import transformers
    import trl

    source = inspect.getsource(getattr(trl, trainer)) + inspect.getsource(transformers.Trainer)
    names = surface.PRIVATE_ATTRIBUTES[trainer]
    missing = [name for name in names if not re.search(rf"self\.{name} (=|\+=)", source)]
    assert not missing, f"TRL {version('trl')} sets no {trainer}.{missing}: the hook must be adapted"


@pytest.mark.parametrize(
    "trainer, ours", [("GRPOTrainer", ERPOTrainer), ("RLOOTrainer", ERPORLOOTrainer), ("DPOTrainer", None)]
)
def test_attributes_exist(tmp_path, trainer, ours):
    """The same after one step of a real run."""
    run = make_trainer(tmp_path, cls=ours, max_steps=1) if ours else make_preference_trainer(tmp_path)
    run.train()
    missing = [name for name in surface.PRIVATE_ATTRIBUTES[trainer] if not hasattr(run, name)]
    assert not missing, f"TRL {version('trl')} sets no {trainer}.{missing}: the hook must be adapted"


@both_trls
@pytest.mark.parametrize("trainer", ["GRPOTrainer", "RLOOTrainer"])
def test_forward_is_called_as_the_reader_expects(trainer):
    """The query reader needs `labels` and `fused_lm_head` by keyword and one call per loss."""
    import trl

    cls = getattr(trl, trainer)
    assert "labels=labels, fused_lm_head=True" in inspect.getsource(cls._get_per_token_logps_and_entropies)
    assert inspect.getsource(cls._compute_loss).count("_get_per_token_logps_and_entropies(") == 1


@both_trls
def test_preference_forward_is_called_as_the_reader_expects():
    """One forward of the model that `compute_loss` was given, before the reference's; whatever is not named goes to it."""
    from trl import DPOTrainer

    source = inspect.getsource(DPOTrainer._compute_loss)
    assert source.count(" model(**model_kwargs, labels=labels, fused_lm_head=True)") == 1
    assert source.count("fused_lm_head=True") == source.count("_model(**ref_model_kwargs, labels=labels") + 2
    assert "for k, v in inputs.items() if k not in _non_model_keys" in source
    assert inspect.getsource(DPOTrainer.compute_loss).count("self._compute_loss(model, inputs, return_outputs)") == 1


@both_trls
def test_preference_collator_lays_pairs_out_as_the_reader_expects():
    """[chosen; rejected] rows, prompt and completion in one, padded on the right."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    batch = DataCollatorForPreference(pad_token_id=0)(
        [
            {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
            {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 0], [1, 2, 3, 6, 0], [7, 8, 10, 11, 0]]
    assert batch["completion_mask"].tolist()[:2] == [[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]]


@both_trls
def test_rloo_batches_carry_what_the_mixin_reads():
    """Generation returns one advantage a row, and the columns that the query side reads beside it."""
    from trl import RLOOTrainer

    source = inspect.getsource(RLOOTrainer._generate_and_score_completions)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
        assert f'"{name}": {name}' in source
    assert "coef_1 * advantages" in inspect.getsource(RLOOTrainer._compute_loss)


@both_trls
def test_advantages_may_be_per_token():
    """Weights multiply (B,) advantages; trust regions will hand over (B, T)."""
    from trl import GRPOTrainer

    assert "advantages.dim() == 1" in inspect.getsource(GRPOTrainer._compute_loss)


@pytest.mark.parametrize(
    "found, supported", [("1.14.2", False), ("1.15.0", True), ("1.16.3", True), ("1.17.0", False)]
)
def test_unsupported_versions_are_refused(monkeypatch, found, supported):
    """An untested TRL must be refused at import, with the range that works."""
    monkeypatch.setattr(surface, "version", lambda name: found)
    if supported:
        surface.require_supported_trl()
        return
    with pytest.raises(ImportError, match=rf"supports TRL .*1\.15.* found {found}"):
        surface.require_supported_trl()


@both_trls
def test_loss_scale_is_known(tmp_path):
    """GRPO scales its own loss for accumulation, RLOO and DPO leave that to the Trainer; the penalty follows each."""
    from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

    assert GRPOTrainer.loss_is_scaled_for_ga is True
    assert RLOOTrainer.loss_is_scaled_for_ga is False
    assert DPOTrainer.loss_is_scaled_for_ga is False
    assert make_config(tmp_path).gradient_accumulation_steps >= 1


def test_fused_head_returns_next_token_log_probs():
    """(B, T-1) log-probs, entry t about token t+1, zero where the label is -100."""
    from helpers import tiny_model
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_model("qwen2").eval()
    ids = torch.tensor([[20, 31, 42, 53]])
    with torch.no_grad():
        expected = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        add_fused_lm_head(model)
        labels = ids.clone()
        labels[0, 2] = -100
        found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
    assert found.shape == (1, 3)
    assert found[0, 1] == 0
    torch.testing.assert_close(found[0, [0, 2]], expected[0, [0, 2]])
