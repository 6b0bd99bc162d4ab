"""`sharded_loader` on real ranks: what each of them sees, and what they agree on."""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from ddpkit.agree import barrier
from ddpkit.errors import ConfigError, GroupError, WorkerError
from ddpkit.group import get_rank, get_world_size, is_rank0, process_group
from ddpkit.loader import sharded_loader
from ddpkit.testing import run_ranks

LENGTH = 23
# torch installs this handler for good with the first worker of a process; see unit/test_loader.py.
_set_SIGCHLD_handler()


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


# ------------------------------------------------------------------------------- iterable datasets


class Stream(IterableDataset[int]):
    """Yields its numbers, shuffled by the global stream if it is asked to."""

    def __init__(self, numbers: Iterable[int], *, shuffle: bool = False) -> None:
        self.numbers = list(numbers)
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        numbers = list(self.numbers)
        if self.shuffle:
            random.shuffle(numbers)
        yield from numbers


def numbers_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_share_a_stream(workers: int) -> None:
    def passes() -> list[list[list[int]]]:
        random.seed(get_rank())
        stream = Stream(range(LENGTH), shuffle=True)
        loader = sharded_loader(stream, batch_size=4, num_workers=workers)
        return [numbers_of(loader), numbers_of(loader)]

    first, second = run_ranks(passes)
    alone = sharded_loader(Stream(range(LENGTH), shuffle=True), batch_size=8)
    for mine, others in zip(first, second, strict=True):
        whole = numbers_of(alone)
        steps = [a + b for a, b in zip(mine, others, strict=True)]
        assert sorted(i for step in whole for i in step) == list(range(LENGTH))
        assert [step[: len(w)] for step, w in zip(steps, whole, strict=True)] == whole


Source = dict[str, Any]
SOURCES: dict[str, Callable[[], Source]] = {
    "keys": lambda: {"source": range(LENGTH), "shuffle": True},
    "stream": lambda: {"source": Stream(range(LENGTH), shuffle=True)},
}
Plan = Iterable[tuple[int, int | None, dict[str, Any]]]


def go_on_in(plan: Plan, kind: str) -> list[list[int]]:
    """Go through one epoch in worlds of several sizes, each stopped after some steps."""

    def leg(
        state: dict[str, Any] | None, stop: int | None, options: dict[str, Any]
    ) -> tuple[list[list[int]], dict[str, Any]]:
        loader = sharded_loader(**SOURCES[kind](), **options)
        if state is not None:
            loader.load_state_dict(state)
        seen, state = [], loader.state_dict()
        for batch in loader:
            seen.append(batch.tolist())
            state = loader.state_dict()
            if len(seen) == stop:
                break
        return seen, state

    state: dict[str, Any] | None = None
    steps: list[list[int]] = []
    for world, stop, options in plan:
        legs = run_ranks(leg, world, args=(state, stop, options))
        steps += [
            [i for share in step for i in share]
            for step in zip(*(seen for seen, _ in legs), strict=True)
        ]
        state = legs[0][1]
        assert all(other == state for _, other in legs)
    return steps


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_goes_on_in_other_worlds_with_other_batches(kind: str) -> None:
    plan: Plan = [
        (2, 3, {"batch_size": 2, "num_workers": 2, "uneven": "drop"}),
        (3, 1, {"batch_size": 2, "uneven": "drop"}),
        (1, None, {"batch_size": 5, "num_workers": 2}),
    ]
    (order,) = go_on_in([(1, None, {"batch_size": LENGTH})], kind)
    assert [i for step in go_on_in(plan, kind) for i in step] == order
    assert sorted(order) == list(range(LENGTH))


@pytest.mark.parametrize("kind", SOURCES)
def test_the_global_batches_stay_the_same_from_two_ranks_to_three_to_one(kind: str) -> None:
    whole = {"global_batch_size": 6}
    plan: Plan = [
        (2, 1, {**whole, "num_workers": 2}),
        (3, 2, whole),
        (1, None, {**whole, "num_workers": 2}),
    ]
    assert go_on_in(plan, kind) == go_on_in([(1, None, whole)], kind)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_splits_itself_is_noticed_and_the_remedy_named(workers: int) -> None:
    def split() -> tuple[list[list[int]], str]:
        stream = Stream(range(get_rank(), 12, 2))
        loader = sharded_loader(stream, batch_size=2, num_workers=workers)
        seen: list[list[int]] = []
        try:
            for batch in loader:
                seen.append(batch.tolist())
                dist.all_reduce(torch.ones(1))
        except GroupError as error:
            return seen, str(error)
        return seen, "no error"

    for seen, text in run_ranks(split):
        assert len(seen) == 1
        assert "shard=False" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_with_parts_of_their_own_stop_together(workers: int) -> None:
    def go_through() -> tuple[int, list[list[int]]]:
        stream = Stream(range(100 * get_rank(), 100 * get_rank() + 5 + 6 * get_rank()))
        loader = sharded_loader(stream, batch_size=2, shard=False, num_workers=workers)
        seen: list[list[int]] = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                dist.all_reduce(torch.ones(1))  # would wait for a rank that has stopped
        return loader.epoch, sorted(seen)

    (first_epoch, first), (second_epoch, second) = run_ranks(go_through)
    assert first_epoch == second_epoch == 2
    assert len(first) == len(second)
    if workers == 0:
        assert first == sorted(2 * [[0, 1], [2, 3], [4]])
        assert second == sorted(2 * [[100, 101], [102, 103], [104, 105]])


@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_without_data_ends_the_epoch_of_all(empty: int) -> None:
    def go_through() -> tuple[int, int]:
        stream = Stream([] if get_rank() == empty else range(9))
        loader = sharded_loader(stream, batch_size=2, shard=False)
        return len(list(loader)), loader.epoch

    assert run_ranks(go_through) == [(0, 1)] * 2


def test_exact_parts_go_on_where_each_of_them_was() -> None:
    """One rank had come to its end when the state was saved, the other had not."""

    def go_through(state: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, Any]]:
        part = list(range(10 * get_rank(), 10 * get_rank() + 3 + 4 * get_rank()))
        loader = sharded_loader(part, batch_size=2, shard=False, uneven="exact")
        if state is not None:
            loader.load_state_dict(state)
        seen, states = [], []
        for batch in loader:
            seen.append(batch.tolist())
            states.append(loader.state_dict())
        for _ in loader:  # the next epoch, in which the ranks compare where they are
            barrier()
            break
        assert loader.epoch == 2
        return seen, states[2] if len(states) > 2 else {}

    (first, _), (second, state) = run_ranks(go_through, args=(None,))
    rest = run_ranks(go_through, args=(state,))
    assert [seen for seen, _ in rest] == [first[3:], second[3:]] == [[], [[16]]]


def test_exact_parts_end_where_they_end() -> None:
    def go_through() -> int:
        stream = Stream(range(3 + 4 * get_rank()))
        return len(list(sharded_loader(stream, batch_size=2, shard=False, uneven="exact")))

    assert run_ranks(go_through) == [2, 4]


@pytest.mark.parametrize(("uneven", "expected"), [("pad", [2, 2]), ("exact", [2, 4])])
def test_parts_with_keys_agree_on_the_length_beforehand(uneven: Any, expected: list[int]) -> None:
    def go_through() -> tuple[int, int, dict[str, Any]]:
        part = dataset(3 + 4 * get_rank())
        loader = sharded_loader(part, batch_size=2, shard=False, uneven=uneven)
        return len(loader), len(list(loader)), loader.state_dict()

    found = run_ranks(go_through)
    assert [(length, seen) for length, seen, _ in found] == [(n, n) for n in expected]
    assert found[0][2] == found[1][2]
    assert found[0][2]["length"] == 10


def test_a_distributed_sampler_is_kept_where_nothing_else_splits() -> None:
    def go_through() -> list[list[list[int]]]:
        sampler: Any = DistributedSampler(dataset(), seed=3)
        old = DataLoader(dataset(), batch_size=4, sampler=sampler)
        loader = sharded_loader(old, shard=False)
        return [ids(loader), ids(loader)]

    for rank, epochs in enumerate(run_ranks(go_through)):
        for epoch, seen in enumerate(epochs):
            sampler: Any = DistributedSampler(dataset(), 2, rank, seed=3)
            sampler.set_epoch(epoch)
            assert [i for batch in seen for i in batch] == list(sampler)


class Unknown(Sampler[int]):
    """Does not tell how many samples it yields."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_parts_of_unknown_length_end_together() -> None:
    def go_through() -> list[list[list[int]]]:
        sampler = Unknown(10 if get_rank() else 6)
        loader = sharded_loader(dataset(), batch_size=2, shard=False, sampler=sampler)
        return [ids(loader), ids(loader)]

    assert run_ranks(go_through) == [[[[0, 1], [2, 3], [4, 5]]] * 2] * 2


# ------------------------------------------------------------------------------ ranks that differ


def test_ranks_that_were_told_otherwise_who_splits_the_data_are_refused() -> None:
    def make() -> str:
        with pytest.raises(GroupError) as caught:
            sharded_loader(dataset(), batch_size=2, shard=is_rank0())
        return str(caught.value)

    for text in run_ranks(make):
        assert "shard is True on rank 0, but False on rank 1" in text


def second_step_of(prepare: Callable[[Any], None], **options: Any) -> tuple[int, str]:
    """How many steps a rank made before it was told, and what it was told."""
    loader = sharded_loader(dataset(), batch_size=2, shuffle=True, **options)
    prepare(loader)
    steps = 0
    try:
        for _ in loader:
            steps += 1
            dist.all_reduce(torch.ones(1))
    except GroupError as error:
        return steps, str(error)
    return steps, "no error"


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_in_different_epochs_are_told_at_the_second_step(workers: int) -> None:
    def differ() -> tuple[int, str]:
        return second_step_of(lambda loader: loader.set_epoch(get_rank()), num_workers=workers)

    for steps, text in run_ranks(differ):
        assert steps == 1
        assert "epoch 0" in text
        assert "epoch 1" in text
        assert "set_epoch" in text


def test_ranks_in_different_places_are_told_at_the_second_step() -> None:
    def differ() -> tuple[int, str]:
        def prepare(loader: Any) -> None:
            loader.load_state_dict({**loader.state_dict(), "consumed": 4 * get_rank()})

        return second_step_of(prepare)

    for steps, text in run_ranks(differ, 3):
        assert steps == 1
        assert "began" in text
        assert "load_state_dict" in text


@pytest.mark.parametrize("looks", [1, 3])
def test_a_look_at_some_batches_on_one_rank_alone_is_told(looks: int, tmp_path: Path) -> None:
    def look_first() -> None:
        loader = sharded_loader(dataset(), batch_size=1, shuffle=True)
        if is_rank0():
            list(zip(range(looks), loader, strict=False))
        for step, _ in enumerate(loader):
            (tmp_path / f"step-{step}").touch()
            dist.all_reduce(torch.ones(1))

    with pytest.raises(GroupError, match=r"rank 0 has begun pass 2 .* use loader.peek\(\)"):
        run_ranks(look_first)
    assert len(list(tmp_path.iterdir())) <= 2 * looks


def test_passes_that_ranks_end_at_different_steps_go_well_if_they_meet_in_between() -> None:
    def stop_early() -> list[int]:
        loader, epochs = sharded_loader(dataset(16), batch_size=1), []
        for _ in range(3):
            for step, _ in enumerate(loader):
                if step == 2 + 3 * get_rank():
                    break
            barrier()
            epochs.append(loader.epoch)
        return epochs

    assert run_ranks(stop_early) == [[1, 2, 3]] * 2


def test_a_loader_that_was_made_before_the_ranks_is_refused() -> None:
    loader = sharded_loader(dataset(), batch_size=1)
    whole = sharded_loader(dataset(), batch_size=1, num_replicas=1, rank=0)

    def use() -> int:
        with pytest.raises(GroupError, match="before there were 2 ranks"):
            iter(loader)
        return len(list(whole))

    assert run_ranks(use) == [LENGTH] * 2


def test_a_loader_of_an_earlier_group_is_not_compared_with_one_of_the_next() -> None:
    def use() -> int:
        with process_group():
            old = sharded_loader(dataset(22), batch_size=1)
            ids(old)
        with process_group():
            new = sharded_loader(dataset(22), batch_size=1)
            for epoch in (10, 13, 16):
                new.set_epoch(epoch)
                old.set_epoch(1)
                for _ in zip(old, new, strict=True):
                    pass
                barrier()
        return new.epoch

    assert run_ranks(use, init_group=False) == [17, 17]


def test_ranks_that_agree_go_through_many_passes() -> None:
    def agree() -> int:
        loader = sharded_loader(dataset(4), batch_size=1, shuffle=True)
        for _ in range(20):
            for _ in loader:
                dist.all_reduce(torch.ones(1))
        return loader.epoch

    assert run_ranks(agree, 3) == [20] * 3


def test_a_rank_that_is_ahead_is_no_difference() -> None:
    def hurry() -> int:
        loader = sharded_loader(dataset(8), batch_size=1, shuffle=True)
        for _ in range(3):
            for _ in loader:
                time.sleep(0.05 * get_rank())
        return loader.epoch

    assert run_ranks(hurry) == [3, 3]


@pytest.mark.parametrize("kind", ["list", "subset"])
def test_a_dataset_that_each_rank_has_shuffled_is_noticed_and_the_attribute_named(
    kind: str,
) -> None:
    def make() -> str:
        random.seed(get_rank())
        order = random.sample(range(LENGTH), LENGTH)
        source: Any = Listed(order) if kind == "list" else Subset(dataset(), order)
        try:
            sharded_loader(source, batch_size=1)
        except GroupError as error:
            return str(error)
        return "no error"

    first, second = run_ranks(make)
    assert first == second
    assert ("Listed.files" if kind == "list" else "Subset.indices") in first
    assert "rank 1" in first


class Listed(Dataset[int]):
    """Has a list of files, in a folder that differs by rank."""

    def __init__(self, order: Iterable[int]) -> None:
        self.files = [f"/node-{get_rank()}/file-{number}" for number in order]
        self.cache: list[Any] = [None] * len(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        return index


def test_folders_may_differ_between_ranks() -> None:
    def make() -> int:
        return len(list(sharded_loader(Listed(range(22)), batch_size=1)))

    assert run_ranks(make) == [11, 11]


def test_ranks_draw_different_random_numbers_although_their_global_streams_are_alike() -> None:
    def roll() -> tuple[list[float], bool]:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        loader = sharded_loader(Noise(), batch_size=2)
        drawn = [value for batch in loader for value in batch.tolist()]
        return drawn, torch.equal(torch.get_rng_state(), before)

    first, second = run_ranks(roll)
    assert run_ranks(roll) == [first, second]
    assert first[1]
    assert second[1]
    assert len({*first[0], *second[0]}) == 8


class Noise(Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_on_one_rank_is_the_error_of_the_launch(workers: int) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            if get_rank_of_environment() == 1:
                raise OSError("disk on fire")
            yield from range(4, 12)

    def train() -> None:
        for _ in sharded_loader(Broken([]), batch_size=1, num_workers=workers):
            dist.all_reduce(torch.ones(1))

    with pytest.raises(OSError, match="disk on fire") as caught:
        run_ranks(train)
    cause: Any = caught.value.__cause__
    assert cause.rank == 1


def get_rank_of_environment() -> int:
    return int(os.environ["RANK"])  # a data worker has no group to ask


def test_a_rank_that_dies_does_not_leave_the_other_waiting_for_its_vote() -> None:
    def train() -> None:
        for step, _ in enumerate(sharded_loader(Stream(range(50)), batch_size=1, shard=False)):
            if step == 3 and get_rank() == 1:
                os._exit(7)

    began = time.monotonic()
    with pytest.raises(WorkerError, match="exit code 7"):
        run_ranks(train)
    assert time.monotonic() - began < 20


def test_a_worker_that_is_killed_is_named() -> None:
    class Deadly(Stream):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for _ in sharded_loader(Deadly([]), batch_size=1, num_workers=1):
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed|exited)"):
        run_ranks(train)


@pytest.mark.drill
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_load_the_same(method: str) -> None:
    for source in (range(LENGTH), Stream(range(LENGTH), shuffle=True)):
        loader = sharded_loader(
            source,
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=method,
        )
        loader.peek()
        alone = sharded_loader(source, batch_size=4)
        for _ in range(2):
            assert numbers_of(loader) == numbers_of(alone)
        loader._engine = None
