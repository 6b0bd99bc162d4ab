"""One seed for a run, from which each rank gets random streams of its own."""

from __future__ import annotations

import contextlib
import importlib
import operator
from typing import SupportsIndex

import torch

from ddpkit.errors import ConfigError
from ddpkit.group import get_rank
from ddpkit.permutation import derive_seed
from ddpkit.randomness import seed_global_streams

__all__ = ["seed_everything", "seed_of_rank"]

_LIMIT = 2**63


def seed_everything(seed: int) -> None:
    """Seed the global random streams of this process: torch's, `random`'s and numpy's.

    Does not communicate: what a rank gets depends on the seed and its number alone. Rank 0, and a
    world of one, get the streams of `torch.manual_seed(seed)` (accelerators included),
    `random.seed(seed)` and `numpy.random.seed(seed)`. The streams of the other ranks are unrelated
    to these and to each other, so that dropout and noise differ between ranks. Models that are
    built from them differ, too, until `ddp()` gives every rank the parameters of rank 0.

    Call it in the function that the ranks run: ranks that are forked after it all start with the
    streams of the calling process. What `sharded_loader` does is not affected, neither its order
    nor what datasets draw: that follows from its own `seed=`.

    Args:
        seed: At least 0 and below 2**63. numpy, whose seeds have 32 bits, gets `seed % 2**32`.

    Raises:
        ConfigError: The seed is not a whole number of that range.

    Example:
        >>> seed_everything(7)
        >>> first = torch.rand(3)
        >>> bool((first == torch.rand(3, generator=torch.Generator().manual_seed(7))).all())
        True
    """
    own = seed_of_rank(_checked(seed), get_rank())
    # A program that imports numpy only later would find an unseeded stream there.
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    seed_global_streams(own)
    torch.manual_seed(own)


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed for the global streams of a rank.

    Args:
        seed: The seed of the run.
        rank: Global rank.

    Returns:
        The seed itself for rank 0, an unrelated one in `[0, 2**63)` for any other rank.

    Example:
        >>> seed_of_rank(7, 0)
        7
        >>> seed_of_rank(7, 1) == seed_of_rank(8, 0)
        False
    """
    return seed if rank == 0 else derive_seed("rank", seed, rank)


def _checked(seed: SupportsIndex) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < _LIMIT:
        raise ConfigError(
            f"seed_everything() was given {seed!r}; expected a whole number of at least 0 and "
            "below 2**63."
        )
    return number
