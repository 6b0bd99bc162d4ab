"""`sharded_loader` on real ranks: what each of them sees, and what they agree on."""

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset, WeightedRandomSampler

from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_rank, get_world_size
from ddpkit.loader import sharded_loader
from ddpkit.testing import run_ranks

LENGTH = 23
# A place to write down how far a rank came, and where to go on.
Leg = tuple[list[list[int]], dict[str, Any]]


def dataset(length: int = LENGTH) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def ids(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_every_epoch_whatever_their_global_streams(workers: int) -> None:
    def passes() -> list[list[list[int]]]:
        torch.manual_seed(get_rank())
        random.seed(get_rank())
        loader = sharded_loader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
        return [ids(loader), ids(loader)]

    first, second = run_ranks(passes)
    alone = sharded_loader(dataset(), batch_size=8, shuffle=True)
    for mine, others in zip(first, second, strict=True):
        steps = [a + b for a, b in zip(mine, others, strict=True)]
        whole = ids(alone)
        assert steps[:-1] == whole[:-1]
        assert steps[-1][: len(whole[-1])] == whole[-1]
        assert len(steps[-1]) == len(whole[-1]) + 1


def test_exact_covers_the_dataset_once_and_in_order() -> None:
    def evaluate() -> list[list[int]]:
        return ids(sharded_loader(dataset(), batch_size=3, uneven="exact"))

    shares = run_ranks(evaluate, 3)
    assert [i for share in shares for batch in share for i in batch] == list(range(LENGTH))


def test_a_weighted_sampler_is_drawn_alike_and_split() -> None:
    def draw() -> list[list[int]]:
        torch.manual_seed(get_rank())
        sampler = WeightedRandomSampler([1.0] * LENGTH, 20)
        return ids(sharded_loader(dataset(), batch_size=5, sampler=sampler))

    first, second = run_ranks(draw)
    alone = sharded_loader(
        dataset(), batch_size=10, sampler=WeightedRandomSampler([1.0] * LENGTH, 20)
    )
    assert [a + b for a, b in zip(first, second, strict=True)] == ids(alone)


def test_an_epoch_goes_on_in_other_worlds() -> None:
    def leg(state: dict[str, Any] | None, stop: int | None, batch_size: int, workers: int) -> Leg:
        loader = sharded_loader(
            dataset(), batch_size=batch_size, shuffle=True, uneven="drop", num_workers=workers
        )
        if state is not None:
            loader.load_state_dict(state)
        seen, state = [], loader.state_dict()
        for (batch,) in loader:
            seen.append(batch.tolist())
            state = loader.state_dict()
            if len(seen) == stop:
                break
        return seen, state

    state: dict[str, Any] | None = None
    order: list[int] = []
    for world, *options in ((2, 3, 2, 2), (3, 1, 2, 0), (1, None, 5, 0)):
        legs = run_ranks(leg, world, args=(state, *options))
        order += [
            i for step in zip(*(seen for seen, _ in legs), strict=True) for b in step for i in b
        ]
        state = legs[0][1]
        assert all(other == state for _, other in legs)
    unbroken = sharded_loader(dataset(), batch_size=LENGTH, shuffle=True)
    assert [order] == ids(unbroken)


def test_no_length_leaves_a_rank_waiting_in_a_collective() -> None:
    def count(length: int, uneven: Any, drop_last: bool) -> int:
        warnings.simplefilter("ignore")
        loader = sharded_loader(dataset(length), batch_size=2, uneven=uneven, drop_last=drop_last)
        steps = torch.zeros(1)
        for _ in loader:
            one = torch.ones(1)
            dist.all_reduce(one)
            steps += one / get_world_size()
        dist.all_reduce(steps)
        return int(steps) // get_world_size()

    def counts() -> list[int]:
        return [
            count(length, uneven, drop_last)
            for uneven in ("pad", "drop")
            for drop_last in (False, True)
            for length in range(9)
        ]

    expected = [
        *(0, 1, 1, 1, 1, 1, 1, 2, 2),
        *(0, 0, 0, 0, 0, 0, 1, 1, 1),
        *(0, 0, 0, 1, 1, 1, 1, 1, 1),
        *(0, 0, 0, 0, 0, 0, 1, 1, 1),
    ]
    assert run_ranks(counts, 3) == [expected] * 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("length", "number of samples is 23 on rank 0, but 24 on rank 1"),
        ("seed", "seed is 0 on rank 0, but 1 on rank 1"),
        ("batch_size", "batch_size is 1 on rank 0, but 2 on rank 1"),
        ("shuffle", "order is sequential on rank 0, but shuffled on rank 1"),
    ],
)
def test_ranks_that_differ_all_get_the_difference(option: str, message: str) -> None:
    def differ() -> str:
        rank = get_rank()
        options: dict[str, Any] = {"length": LENGTH, "seed": 0, "batch_size": 1, "shuffle": False}
        options[option] += rank
        options["shuffle"] = bool(options["shuffle"])
        source = dataset(options.pop("length"))
        try:
            sharded_loader(source, uneven="drop", **options)
        except GroupError as error:
            return str(error)
        return "no error"

    first, second = run_ranks(differ)
    assert first == second
    assert message in first


def test_a_bad_request_is_the_same_error_on_all_ranks_and_nobody_waits() -> None:
    def ask() -> str:
        with pytest.raises(ConfigError) as caught:
            sharded_loader(dataset(), global_batch_size=5)
        return str(caught.value)

    first, second = run_ranks(ask)
    assert first == second
    assert "global_batch_size=5" in first


def test_given_ranks_need_nobody() -> None:
    def alone() -> list[list[int]]:
        if get_rank() == 1:
            return []
        return ids(sharded_loader(dataset(6), batch_size=3, num_replicas=2, rank=1))

    assert run_ranks(alone)[0] == [[3, 4, 5]]
