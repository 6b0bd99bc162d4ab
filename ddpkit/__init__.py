"""Composable primitives that turn a single-device PyTorch script into a distributed one."""

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch then asks NVML whether there are devices, and the CUDA driver stays closed: a process that
# has opened it cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from ddpkit.accumulation import accumulate, loss_weight, sync_gradients
    from ddpkit.agree import all_ranks, any_rank, barrier, broadcast_value, on_rank0, rank0_first
    from ddpkit.checkpoint import barrier_load, latest_checkpoint, rank0_save
    from ddpkit.collect import gather, gather_cat
    from ddpkit.console import get_logger, rank0_print
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
    from ddpkit.loader import ShardedLoader, sharded_loader
    from ddpkit.plan import plan_split
    from ddpkit.preempt import stop_requested
    from ddpkit.reduce import reduce_mean, reduce_sum
    from ddpkit.seeding import seed_everything
    from ddpkit.split import split_model_across_devices
    from ddpkit.wrap import ddp, unwrap

__version__ = "0.1.0.dev0"

__all__ = [
    "ShardedLoader",
    "World",
    "accumulate",
    "all_ranks",
    "any_rank",
    "barrier",
    "barrier_load",
    "broadcast_value",
    "ddp",
    "distributed",
    "gather",
    "gather_cat",
    "get_device",
    "get_local_rank",
    "get_logger",
    "get_rank",
    "get_world_size",
    "is_rank0",
    "latest_checkpoint",
    "loss_weight",
    "on_rank0",
    "plan_split",
    "process_group",
    "rank0_first",
    "rank0_print",
    "rank0_save",
    "reduce_mean",
    "reduce_sum",
    "seed_everything",
    "sharded_loader",
    "split_model_across_devices",
    "stop_requested",
    "sync_gradients",
    "unwrap",
]

# A program pays for what it uses: to import all of it takes longer than to open a group.
_HOMES = {
    "accumulation": "accumulate loss_weight sync_gradients",
    "agree": "all_ranks any_rank barrier broadcast_value on_rank0 rank0_first",
    "checkpoint": "barrier_load latest_checkpoint rank0_save",
    "collect": "gather gather_cat",
    "console": "get_logger rank0_print",
    "entry": "distributed",
    "group": "World get_device get_local_rank get_rank get_world_size is_rank0 process_group",
    "loader": "ShardedLoader sharded_loader",
    "plan": "plan_split",
    "preempt": "stop_requested",
    "reduce": "reduce_mean reduce_sum",
    "seeding": "seed_everything",
    "split": "split_model_across_devices",
    "wrap": "ddp unwrap",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # who would take every name for a public one

    def __getattr__(name: str) -> Any:
        """Import the module that a public name lives in when the name is used first."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List what has been imported, and what will be."""
    return sorted({*globals(), *__all__})


if os.environ.get("DDPKIT_LOG"):
    from ddpkit.console import show_own_lines

    show_own_lines(os.environ["DDPKIT_LOG"])
