"""Composable primitives that turn a single-device PyTorch script into a distributed one."""

import os

# torch then asks NVML whether there are devices, and the CUDA driver stays closed: a process that
# has opened it cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from ddpkit.agree import barrier, on_rank0
from ddpkit.entry import distributed
from ddpkit.group import (
    World,
    get_device,
    get_local_rank,
    get_rank,
    get_world_size,
    is_rank0,
    process_group,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "World",
    "barrier",
    "distributed",
    "get_device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_rank0",
    "on_rank0",
    "process_group",
]
