"""Settings of a launch that cannot work are refused with what to set instead."""

from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from helpers import make_trainer, tiny_model

from erpo_trl.query.sharding import prepared_for_scoring


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"fsdp_version": 1}, "set fsdp_version: 2"),
        ({"activation_checkpointing": True}, "set gradient_checkpointing=True"),
    ],
)
def test_fsdp_settings(fields, message):
    plugin = SimpleNamespace(**{"fsdp_version": 2, "activation_checkpointing": False} | fields)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ValueError, match=message), prepared_for_scoring(tiny_model(), accelerator):
        pass


def test_checkpoints_of_transformers_on_sigterm(tmp_path):
    with pytest.raises(ValueError, match="enable_jit_checkpoint=True may save inside a generation batch"):
        make_trainer(tmp_path, enable_jit_checkpoint=True)
