"""Consecutive blocks divided among devices so that the heaviest share is the smallest possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["heaviest", "partition"]


def partition(weights: Sequence[int], limits: Sequence[int | None]) -> list[int] | None:
    """Divide blocks among devices, in their order, with the smallest possible heaviest share.

    Exact: no other division into consecutive runs has a lighter heaviest share. Within that, each
    device gets about an even part of the rest, and none goes without as long as there are blocks.

    Args:
        weights: Weight of each block, not negative.
        limits: The most that each device takes, not negative, None for as much as there is; one
            for each device.

    Returns:
        How many blocks each device gets, 0 included; None if no division keeps within the limits.

    Example:
        >>> partition([5, 1, 1, 4], [None, None])
        [2, 2]
        >>> partition([5, 1, 1, 4], [4, None, None])
        [0, 2, 2]
        >>> partition([5, 1], [4, 4]) is None
        True
    """
    sums = [0, *accumulate(weights)]
    caps = [sums[-1] if limit is None else limit for limit in limits]
    if not _fits(sums, caps):
        return None
    return _even_runs(sums, _tightened(caps, _smallest_heaviest(sums, caps)))


def heaviest(weights: Sequence[int], counts: Sequence[int]) -> int:
    """Add up the weights of each run and return the heaviest.

    Args:
        weights: Weight of each block.
        counts: Lengths of the runs, as of `partition`.

    Example:
        >>> heaviest([5, 1, 1, 4], [1, 3])
        6
    """
    sums = [0, *accumulate(weights)]
    ends = [0, *accumulate(counts)]
    return max((sums[b] - sums[a] for a, b in pairwise(ends)), default=0)


def _tightened(caps: Sequence[int], most: int) -> list[int]:
    return [min(cap, most) for cap in caps]


def _fits(sums: Sequence[int], caps: Sequence[int]) -> bool:
    """Fill each device as far as it goes: what that leaves over, no other division places."""
    start = 0
    for cap in caps:
        start = bisect_right(sums, sums[start] + cap, lo=start) - 1
    return start == len(sums) - 1


def _smallest_heaviest(sums: Sequence[int], caps: Sequence[int]) -> int:
    low, high = -(-sums[-1] // max(len(caps), 1)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, _tightened(caps, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _even_runs(sums: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Cut where the rest is divided evenly, as far as the caps of all devices allow it."""
    earliest = _earliest_starts(sums, caps)
    counts, start = [], 0
    for index, cap in enumerate(caps):
        latest = bisect_right(sums, sums[start] + cap, lo=start) - 1
        end = _nearest_even(sums, start, len(caps) - index)
        end = min(max(end, earliest[index + 1]), latest)
        counts.append(end - start)
        start = end
    return counts


def _earliest_starts(sums: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Find for each device the first block with which those from it on can take all the rest."""
    earliest = [len(sums) - 1]
    for cap in reversed(caps):
        end = earliest[-1]
        earliest.append(bisect_left(sums, sums[end] - cap, hi=end))
    return earliest[::-1]


def _nearest_even(sums: Sequence[int], start: int, devices: int) -> int:
    """Find the end whose run is closest to an even part of the rest; no device goes without."""
    blocks = len(sums) - 1
    even = sums[start] + (sums[-1] - sums[start]) / devices
    after = min(bisect_left(sums, even, lo=start), blocks)
    nearest = after - 1 if after > start and even - sums[after - 1] < sums[after] - even else after
    return max(min(nearest, blocks - (devices - 1)), min(start + 1, blocks))
