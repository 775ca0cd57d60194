"""Models that are spread over processes: whole parameters one at a time, and forwards before training has wrapped the model.

The reference is scored before the first step, when DeepSpeed's engine does not exist and FSDP has not sharded the model.
Both are brought to the state that training gives them, so that scoring needs no more memory and no other precision than
training does. Every process must take part, in the same order.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_partitioned(tensor: Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 has taken the values of a parameter away to spread them over the processes."""
    return getattr(tensor, "ds_shape", None) is not None and not tensor.numel()


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward of `model` waits for the other processes, whose shares of the parameters it needs."""
    return isinstance(model, FSDPModule) or any(hasattr(parameter, "ds_shape") for parameter in model.parameters())


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor, that of the whole for a sharded one."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


@contextlib.contextmanager
def whole(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor, brought together from all processes where it is sharded."""
    if isinstance(tensor, DTensor):
        yield tensor.detach().full_tensor()
    elif is_partitioned(tensor):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            yield tensor.detach()
    else:
        yield tensor.detach()


def compute_device(model: nn.Module) -> torch.device:
    """Where a forward of `model` takes its inputs; FSDP may keep the parameters themselves on the host."""
    return PartialState().device if isinstance(model, FSDPModule) else model.get_input_embeddings().weight.device


def training_precision(accelerator: Accelerator, autocast: torch.dtype | None) -> tuple[torch.dtype | None, str]:
    """What lowers the precision of a forward in training, besides the dtype of the weights.

    Args:
        autocast: the dtype that the training arguments ask for.

    Returns:
        the dtype of autocast around the forward (None for none), and a name of the whole for the reference's fingerprint.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The engine casts the weights themselves, unless its own autocast is on
        settings = accelerator.state.deepspeed_plugin.deepspeed_config.get("torch_autocast", {})
        name = settings.get("dtype", "bfloat16") if settings.get("enabled") else None
        autocast = getattr(torch, name.removeprefix("torch.")) if name else None
    elif accelerator.is_fsdp2:
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        dtype = policy.param_dtype if policy is not None else None
        return None, str(dtype) if dtype is None else f"FSDP {dtype}"
    return autocast, str(autocast)


@contextlib.contextmanager
def prepared_for_scoring(model: nn.Module, accelerator: Accelerator) -> Iterator[nn.Module]:
    """`model` as training will hold it (sharded, cast, on its device), ready for forwards without gradient.

    Yields what to call. DeepSpeed's engine is taken down again, except that the parameters stay cast and partitioned, as
    training would make them; FSDP2's sharding stays, which `Trainer` finds and keeps.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        with _deepspeed_engine(model, accelerator) as engine:
            yield engine
    elif accelerator.distributed_type == DistributedType.FSDP:
        _check_fsdp(accelerator.state.fsdp_plugin)
        model = fsdp2_prepare_model(accelerator, model)
        try:
            yield model
        finally:
            # Some units keep their gathered parameters after a forward, and the optimizer must see the sharded ones
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    else:
        yield model


def _check_fsdp(plugin) -> None:
    """Raise for FSDP settings under which the model cannot be sharded before training."""
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP version 1 is not supported: set fsdp_version: 2 in the accelerate file.")
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing is not supported, since it must wrap the layers before the reference is scored: "
            "set gradient_checkpointing=True in the training arguments instead."
        )


@contextlib.contextmanager
def _deepspeed_engine(model: nn.Module, accelerator: Accelerator) -> Iterator[nn.Module]:
    """An inference engine around `model`, gone afterwards: the training engine must find no hook of this one."""
    import deepspeed

    plugin = accelerator.state.deepspeed_plugin
    config = copy.deepcopy(plugin.deepspeed_config)
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    zero = config["zero_optimization"]
    zero.pop("offload_optimizer", None)
    if zero["stage"] == 3:
        # Parameters that this engine kept whole would stay so in training, which decides by a threshold of its own
        zero["stage3_param_persistence_threshold"] = 0
    else:
        zero["stage"] = 0  # the stages below shard only what an optimizer has
    before = [(module, _attributes(module)) for module in model.modules()]
    plugin.set_moe_leaf_modules(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        yield engine
    finally:
        if zero["stage"] == 3:
            engine.empty_partition_cache()
        engine.destroy()
        # destroy() leaves hooks, closures and parameter containers behind (deepspeed 0.19.8)
        for module, (attributes, contents) in before:
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)
            # Buffers are replaced, not changed, when they move to the device
            attributes["_buffers"] = module._buffers
            vars(module).clear()
            vars(module).update(attributes)


def _attributes(module: nn.Module) -> tuple[dict, dict]:
    """The attributes of a module, and of those that are dicts (hooks, parameters) a copy."""
    attributes = dict(vars(module))
    return attributes, {
        name: copy.copy(value) for name, value in attributes.items() if isinstance(value, dict) and name != "_buffers"
    }
