"""Let torch's samplers shuffle as `sharded_loader` does, so that two scripts see the same batches.

Also a program: `same_order.py BATCH_SIZE SCRIPT ...` runs a script like that as the main program.
"""

import contextlib
import itertools
import runpy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.utils.data import DistributedSampler, RandomSampler

from ddpkit import sharded_loader


def order_of(
    length: int, *, seed: int, epoch: int, batch_size: int, num_replicas: int = 1, rank: int = 0
) -> list[int]:
    """Return the samples that a rank gets of an epoch, in their order."""
    loader = sharded_loader(
        list(range(length)),
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
    )
    loader.set_epoch(epoch)
    return [int(index) for batch in loader for index in batch]


@contextlib.contextmanager
def order_of_ddpkit(batch_size: int, seed: int = 0) -> Iterator[None]:
    """Replace the shuffling of torch's samplers.

    Args:
        batch_size: Of each rank, for `DistributedSampler`, which deals the samples out one by one.
        seed: For `RandomSampler`, which has none.
    """
    passes = itertools.count()
    unshuffled = DistributedSampler.__iter__

    def in_one_process(sampler: RandomSampler) -> Iterator[int]:
        epoch = next(passes)
        return iter(order_of(len(sampler), seed=seed, epoch=epoch, batch_size=batch_size))

    def on_a_rank(sampler: DistributedSampler[Any]) -> Iterator[int]:
        if not sampler.shuffle:
            return unshuffled(sampler)
        own = order_of(
            len(sampler.dataset),  # type: ignore[arg-type]  # a Dataset need not have a length
            seed=sampler.seed,
            epoch=sampler.epoch,
            batch_size=batch_size,
            num_replicas=sampler.num_replicas,
            rank=sampler.rank,
        )
        return iter(own)

    with (
        mock.patch.object(RandomSampler, "__iter__", in_one_process),
        mock.patch.object(DistributedSampler, "__iter__", on_a_rank),
    ):
        yield


if __name__ == "__main__":
    del sys.argv[0]
    with order_of_ddpkit(batch_size=int(sys.argv.pop(0))):
        runpy.run_path(sys.argv[0], run_name="__main__")
