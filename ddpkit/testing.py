"""Helpers for tests of distributed code on a machine without accelerators.

With ddpkit installed, pytest knows a mark that runs the body of a test on several ranks:

    @pytest.mark.ranks(2)
    def test_the_mean_is_that_of_all_ranks():
        assert reduce_mean(float(get_rank())) == 0.5

`ranks(1, 2, 3)` makes a test for each number. Options are those of `run_ranks`: `timeout=`,
`time_limit=`, `start_method=` and `init_group=`. Fixtures and parameters are set up once, in the
process of pytest, and each rank has copies of their values: what it changes in them stays there.
Where ranks cannot be forked, the values have to be picklable. A failure shows the report of the
rank that failed first. A test is skipped, or expected to fail, on all ranks or on none.

Where a test needs what the ranks return, it calls `run_ranks` itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ddpkit.entry import distributed
from ddpkit.replicas import assert_replicas_equal

__all__ = ["assert_replicas_equal", "run_ranks"]

R = TypeVar("R")


def run_ranks(
    function: Callable[..., R],
    world_size: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    start_method: str = "auto",
    time_limit: float | None = None,
    shutdown_grace: float = 1.0,
    log_dir: str | os.PathLike[str] | None = None,
    init_group: bool = True,
) -> list[R]:
    """Run a function on several CPU ranks and return one value for each.

    With `world_size=1` it runs in the calling process.

    Args:
        function: A function, also one that is local to a test.
        world_size: Number of ranks.
        args: Positional arguments, the same on all ranks.
        kwargs: Keyword arguments, the same on all ranks.
        timeout: Bound of rendezvous and collectives in seconds.
        start_method: As for `distributed`.
        time_limit: As for `distributed`.
        shutdown_grace: As for `distributed`.
        log_dir: As for `distributed`.
        init_group: As for `distributed`.

    Returns:
        One value for each rank, in the order of ranks.

    Raises:
        BaseException: What the rank raised that failed first, with a `WorkerError` as its cause.

    Example:
        >>> import torch.distributed
        >>> run_ranks(torch.distributed.get_rank, 1)
        [0]
    """
    launched = distributed(
        function,
        nproc_per_node=world_size,
        device="cpu",
        timeout=timeout,
        start_method=start_method,
        time_limit=time_limit,
        shutdown_grace=shutdown_grace,
        log_dir=log_dir,
        init_group=init_group,
    )
    return launched.run_all(*args, **(kwargs or {}))
