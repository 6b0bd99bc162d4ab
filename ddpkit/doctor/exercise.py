"""The test with two ranks: do they meet, are their sums right, and how fast are they."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from ddpkit.doctor.facts import Exercise
from ddpkit.entry import distributed
from ddpkit.group import get_device

__all__ = ["exercise_ranks"]

RANKS = 2
_LARGE = 8 * 2**20
_LARGE_REPEATS, _SMALL_REPEATS = 5, 50


def exercise_ranks(device: str, time_limit: float) -> Exercise:
    """Start two ranks on this machine, and let them add up tensors.

    Args:
        device: Type of device.
        time_limit: Seconds for everything.

    Returns:
        How fast they were.

    Raises:
        BaseException: What went wrong, as `distributed` raises it.
    """
    launched = distributed(
        exchange, nproc_per_node=RANKS, device=device, timeout=time_limit, time_limit=time_limit
    )
    begin = time.monotonic()
    latency, bandwidth = launched()
    return Exercise(device, RANKS, time.monotonic() - begin, latency, bandwidth, _LARGE)


def exchange() -> tuple[float, float]:
    """Add up tensors with the other ranks.

    Collective: every rank must call this, in a group that is open.

    Returns:
        Seconds for one number, and bytes in a second for a large tensor.

    Raises:
        ValueError: A sum is wrong.
    """
    small = torch.ones(1, device=get_device())
    large = torch.ones(_LARGE // small.element_size(), device=get_device())
    for tensor in (small, large):  # the first messages open connections
        _add_up(tensor)
    latency = statistics.median(_add_up(small) for _ in range(_SMALL_REPEATS))
    return latency, _LARGE / min(_add_up(large) for _ in range(_LARGE_REPEATS))


def _add_up(tensor: torch.Tensor) -> float:
    """Sum a tensor of ones over all ranks, and return the seconds that it took."""
    tensor.fill_(1.0)
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    last = tensor[-1].item()  # an accelerator is waited for here
    seconds = time.perf_counter() - begin
    wrong = torch.count_nonzero(tensor != dist.get_world_size()).item()
    if wrong:
        raise ValueError(
            f"An all-reduce of ones over {dist.get_world_size()} ranks gave {wrong} wrong elements "
            f"of {tensor.numel()}; the last one is {last}."
        )
    return seconds
