"""Imported by the launched scripts first: what DeepSpeed and FSDP2 need on a CPU."""

import os

import accelerate
from accelerate.utils import DistributedType

FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed

    # A faster all-reduce within one host, compiled at first use; the launch works without it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if FSDP:
    # On a CPU accelerate turns FSDP into DDP, without a word
    accelerate.PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
