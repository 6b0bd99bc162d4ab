"""Iterable datasets: who gets which item, without processes and with real workers."""

import copy
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from ddpkit.errors import ConfigError, GroupError
from ddpkit.loader import ShardedLoader, sharded_loader
from ddpkit.sampler import Layout

# torch installs this handler for good with the first worker of a process; see test_loader.py.
_set_SIGCHLD_handler()

Mode = Literal["pad", "drop", "exact"]
Steps = list[list[int]]


class Stream(IterableDataset[int]):
    """Yields 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class Shuffled(Stream):
    """Shuffles by every global stream that there is, anew in each epoch."""

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        yield from order


class Resumable(Stream):
    """Has a state of its own, and remembers what was read in this process."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.position = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        while self.position < self.length:
            self.position += 1
            self.read.append(order[self.position - 1])
            yield self.read[-1]
        self.position = 0

    def order(self) -> list[int]:
        shuffled: list[int] = torch.randperm(self.length).tolist()
        return shuffled

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class RemembersEpoch(Resumable):
    """Is told the epoch, which is a part of its state, too."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        shuffled = list(range(self.length))
        random.Random(self.epoch).shuffle(shuffled)
        return shuffled

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class ItsOwnIterator(Stream):
    """Begins anew whenever it is asked for an iterator."""

    position = -1

    def __iter__(self) -> Iterator[int]:
        self.position = -1
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position >= self.length:
            raise StopIteration
        return self.position


class ByWorker(Stream):
    """Splits itself between workers, as the documentation of torch shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(worker, self.length, workers)


class Told(Stream):
    """Its order follows from the epoch that it has been told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (1000 * self.epoch + i for i in range(self.length))


def make(
    source: Any, batch: int | None = 2, world: int = 1, rank: int = 0, **options: Any
) -> ShardedLoader[Any]:
    options = {"batch_size": batch, "num_replicas": world, "rank": rank, "seed": 4, **options}
    return sharded_loader(source, **options)


def ids(loader: ShardedLoader[Any]) -> Steps:
    return [batch.tolist() for batch in loader]


def flat(steps: Steps) -> list[int]:
    return [i for step in steps for i in step]


def world_of(source: Callable[[], Any], batch: int, world: int, **options: Any) -> list[Steps]:
    """What each rank gets of the next pass, with a dataset of its own as in a real world."""
    return [ids(make(source(), batch, world, rank, **options)) for rank in range(world)]


def together(ranks: list[Steps]) -> Steps:
    """What all ranks get in each step, one after the other."""
    return [flat([*step]) for step in itertools.zip_longest(*ranks, fillvalue=[])]


def expected(length: int, batch: int, world: int, uneven: Mode, drop_last: bool) -> Steps:
    whole, order = batch * world, list(range(length))
    steps = [order[start : start + whole] for start in range(0, length, whole)]
    if steps and len(steps[-1]) < whole:
        tail = steps.pop()
        if uneven == "pad":
            tail = [*tail, *itertools.islice(itertools.cycle(order), -len(tail) % world)]
        if uneven == "drop":
            tail = tail[: len(tail) // world * world]
        if tail and not drop_last:
            steps.append(tail)
    return steps


# --------------------------------------------------------------------------------- who gets what


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_items_are_split_by_position(uneven: Mode, drop_last: bool) -> None:
    if uneven == "exact" and drop_last:
        return
    for length, world, batch in itertools.product([*range(9), 23], (1, 2, 3), (1, 2, 4)):
        ranks = world_of(
            lambda: Stream(length),  # noqa: B023
            *(batch, world),
            uneven=uneven,
            drop_last=drop_last,
        )
        assert together(ranks) == expected(length, batch, world, uneven, drop_last)
        sizes = [[len(share) for share in steps] for steps in ranks]
        if uneven == "exact":
            totals = [sum(size) for size in sizes]
            assert max(totals) - min(totals) <= 1
        else:
            assert sizes == [sizes[0]] * world


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_workers_change_nothing(uneven: Mode, workers: int) -> None:
    ranks = world_of(lambda: Stream(23), 2, 2, uneven=uneven, num_workers=workers)
    assert together(ranks) == expected(23, 2, 2, uneven, drop_last=False)


@pytest.mark.parametrize("persistent", [False, True])
def test_all_shuffle_alike_and_every_epoch_differs(persistent: bool) -> None:
    epochs = []
    loaders = [
        make(Shuffled(24), 3, 2, rank, num_workers=2 * rank, persistent_workers=persistent * rank)
        for rank in range(2)
    ]
    for _ in range(3):
        epochs.append(flat(together([ids(loader) for loader in loaders])))
        assert sorted(epochs[-1]) == list(range(24))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    loaders[1]._engine = None


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_splits_itself_between_workers_is_not_split_twice(persistent: bool) -> None:
    loader = make(ByWorker(10), 2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert ids(loader) == expected(10, 2, 1, "pad", drop_last=False)
    loader._engine = None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_reaches_datasets_also_in_workers_that_persist(workers: int) -> None:
    loader = make(Told(4), 2, num_workers=workers, persistent_workers=workers > 0)
    found = [ids(loader) for _ in range(3)]
    assert found == [[[1000 * e, 1000 * e + 1], [1000 * e + 2, 1000 * e + 3]] for e in range(3)]
    loader._engine = None


def split_between_workers(worker_id: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.offset = 5 * worker_id


class Offset(Stream):
    offset = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.offset, self.offset + self.length))


def test_a_worker_init_fn_that_splits_is_noticed() -> None:
    loader = make(Offset(5), 1, num_workers=2, worker_init_fn=split_between_workers)
    with pytest.raises(GroupError, match=r"different items.*worker_init_fn"):
        ids(loader)


def test_single_items_and_conversion() -> None:
    named = DataLoader(Stream(3), batch_size=None, collate_fn=str)
    assert list(make(named, None)) == ["0", "1", "2"]
    single = DataLoader(Stream(5), batch_size=None)
    assert list(make(single, None, 2, 1)) == [1, 3, 0]
    assert list(make(single, 2, 2, 1))[-1].tolist() == [0]


@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        ("pad", ["1 repeated and 0 dropped at the end of this pass"]),
        ("drop", ["0 repeated and 2 dropped at the end of this pass"]),
        ("exact", []),
    ],
)
def test_what_the_end_repeats_or_drops_is_logged_once(
    uneven: Mode, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    loaders = [make(Stream(8), 2, 3, rank, uneven=uneven) for rank in range(3)]
    with caplog.at_level(logging.INFO, logger="ddpkit.loader"):
        for loader in loaders:
            ids(loader)
    assert [record.getMessage() for record in caplog.records] == expected


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 4),
    world=st.integers(1, 3),
    workers=st.integers(1, 4),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    consumed=st.integers(0, 5),
    kind=st.sampled_from([Shuffled, Resumable]),
)
def test_any_number_of_workers_gives_the_same(
    length: int,
    batch: int,
    world: int,
    workers: int,
    uneven: Mode,
    consumed: int,
    kind: Callable[[int], Any],
) -> None:
    """Workers without processes: copies of the server that answer the requests in turn."""
    for rank in range(world):
        loader = make(kind(length), batch, world, rank, uneven=uneven)
        state = {**loader.state_dict(), "consumed": consumed * batch * world}
        loader.load_state_dict(state)
        place = loader._shards.place
        servers = [copy.deepcopy(loader._server) for _ in range(workers)]
        requests = loader._requests(loader._pass_at(place, 0))
        replies = (servers[step % workers][request] for step, request in enumerate(requests))
        found = [batch.tolist() for batch, _ in loader._batches_of(replies, place.consumed)]
        # Workers load ahead beyond the end, and then find nothing.
        ahead = [
            servers[step % workers][request]
            for step, request in zip(range(9), requests, strict=False)
        ]
        assert all(note is not None and note.is_empty for _, note in ahead)
        assert found == ids(loader)


def test_an_existing_loader_of_a_stream() -> None:
    old = DataLoader(Stream(7), batch_size=3, drop_last=True, num_workers=1)
    loader = make(old, None)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (3, True, 1)
    assert ids(loader) == [[0, 1, 2], [3, 4, 5]]


# ----------------------------------------------------------------------------------------- lengths


class Claims(Stream):
    claimed = 23

    def __len__(self) -> int:
        return self.claimed


def test_the_length_is_what_the_dataset_claims_and_nothing_relies_on_it() -> None:
    assert [len(make(Claims(23), 2, 2, rank, uneven="exact")) for rank in range(2)] == [6, 6]
    assert len(make(Claims(23), 2, 2, uneven="drop")) == 6
    with pytest.raises(TypeError, match="len"):
        len(make(Stream(5)))
    for really in (5, 30):
        assert flat(ids(make(Claims(really)))) == list(range(really))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_stream_and_an_empty_one(workers: int) -> None:
    loader = make(Stream(10**9), num_workers=workers)
    assert [batch.tolist() for batch, _ in zip(loader, range(2), strict=False)] == [[0, 1], [2, 3]]
    assert loader.epoch == 1
    empty = make(Stream(0), world=2, num_workers=workers)
    assert (ids(empty), empty.epoch) == ([], 1)
    with pytest.raises(ConfigError, match="no batch"):
        empty.peek()


def test_layout_of_an_exact_step_is_even() -> None:
    shares = [Layout(4, 3, rank, "exact").bounds(5) for rank in range(3)]
    assert shares == [(0, 2), (2, 4), (4, 5)]


# ------------------------------------------------------------------------------------------ places


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Stream(23),
    "shuffled": lambda: Shuffled(23),
    "resumable": lambda: Resumable(23),
    "told": lambda: Told(23),
    "its own iterator": lambda: ItsOwnIterator(23),
    "remembers the epoch": lambda: RemembersEpoch(23),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_place_continues_the_stream(kind: str, uneven: Mode, workers: int) -> None:
    """The law: state at any point, restored in a fresh loader, continues the stream."""
    options: dict[str, Any] = {"uneven": uneven, "world": 2, "rank": 1, "num_workers": workers}
    loader = make(KINDS[kind](), **options)
    unbroken, states = [], [loader.state_dict()]
    for _ in range(2):
        for batch in loader:
            unbroken.append(batch.tolist())
            states.append(loader.state_dict())
    points = [0, 1, 5, 6, 8, 12] if workers else range(len(states))
    for point in points:
        fresh = make(KINDS[kind](), **options)
        fresh.load_state_dict(states[point])
        rest = []
        while fresh.epoch < 2:
            rest += ids(fresh)
        assert rest == unbroken[point:], point


def test_a_dataset_with_a_state_reads_nothing_that_it_skips() -> None:
    loader = make(Resumable(23))
    for step, _ in enumerate(loader):
        state = loader.state_dict()
        if step == 7:
            break
    assert state["dataset"] == {"position": 16}
    dataset = Resumable(23)
    fresh = make(dataset)
    fresh.load_state_dict(state)
    assert flat(ids(fresh)) == dataset.read
    assert len(dataset.read) == 7
    plain = make(Stream(23))
    plain.load_state_dict({k: v for k, v in state.items() if k != "dataset"})
    assert flat(ids(plain)) == list(range(16, 23))


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_is_its_own_iterator_ends(workers: int, shard: bool) -> None:
    loader = make(ItsOwnIterator(5), num_workers=workers, shard=shard)
    for _ in range(2):
        seen = [batch.tolist() for batch in itertools.islice(loader, 10)]
        assert seen == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_part_of_the_state_goes_on(workers: int) -> None:
    loader = make(RemembersEpoch(8), num_workers=workers, persistent_workers=workers > 0)
    for epoch in (0, 1, 2, 5):
        loader.set_epoch(epoch)
        expected = RemembersEpoch(8)
        expected.set_epoch(epoch)
        assert flat(ids(loader)) == expected.order()


def test_a_broken_epoch_of_a_dataset_with_a_state_does_not_shift_the_next() -> None:
    for workers in (0, 2):
        loader = make(Resumable(8), num_workers=workers, persistent_workers=workers > 0)
        for _ in loader:
            break
        whole = make(Resumable(8))
        whole.set_epoch(1)
        assert ids(loader) == ids(whole)
        loader._engine = None


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 40),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)), max_size=3),
    last=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    kind=st.sampled_from([Shuffled, Resumable]),
)
def test_what_is_left_is_what_was_not_seen_in_any_world(
    length: int,
    uneven: Mode,
    legs: list[tuple[int, int, int]],
    last: tuple[int, int],
    kind: Callable[[int], Any],
) -> None:
    order = flat(ids(make(kind(length), 1)))
    state, seen = make(kind(length)).state_dict(), list[int]()
    for batch, world, stop in [*legs, (*last, None)]:
        loaders = [make(kind(length), batch, world, rank, uneven=uneven) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        left = length - state["consumed"]
        stop = None if stop is None else min(stop, left // (batch * world))
        for step in itertools.islice(itertools.zip_longest(*loaders), stop):
            seen += [i for share in step if share is not None for i in share.tolist()]
            state = loaders[0].state_dict()
            if stop is not None:
                assert all(loader.state_dict() == state for loader in loaders)
    missing = left % (batch * world) % world
    if uneven == "drop":
        assert seen == order[: length - missing]
    else:
        assert seen[:length] == order
        extra = (-left % world) if uneven == "pad" and length else 0
        assert seen[length:] == list(itertools.islice(itertools.cycle(order), extra))


def test_peek_takes_nothing_away_from_a_dataset_that_is_its_own_iterator() -> None:
    loader = make(ItsOwnIterator(5))
    assert loader.peek().tolist() == [0, 1]
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        with pytest.raises(ConfigError, match="its own iterator"):
            loader.peek()
    assert seen == [[0, 1], [2, 3], [4]]


def test_peek_shows_what_comes_and_changes_nothing() -> None:
    for name in KINDS.keys() - {"its own iterator"}:
        loader = make(KINDS[name]())
        outer = torch.get_rng_state().tolist(), random.getstate()
        peeked = loader.peek().tolist()
        assert loader.peek().tolist() == peeked
        for batch in loader:
            assert batch.tolist() == peeked
            peeked = loader.peek().tolist()
        assert loader.peek().tolist() == peeked == ids(loader)[0]
        assert (torch.get_rng_state().tolist(), random.getstate()) == outer


# ------------------------------------------------------------------- datasets that split themselves


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_shard_false_goes_through_all_that_a_rank_has(workers: int) -> None:
    loader = make(ByWorker(20), 2, 2, 1, shard=False, num_workers=workers)
    plain = DataLoader(ByWorker(20), batch_size=2, num_workers=workers)
    for _ in range(2):
        assert ids(loader) == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_in_a_part_of_ones_own(workers: int) -> None:
    options: dict[str, Any] = {"world": 2, "rank": 1, "shard": False, "num_workers": workers}
    loader = make(ByWorker(20), **options)
    unbroken, states = [], []
    for batch in loader:
        unbroken.append(batch.tolist())
        states.append(loader.state_dict())
    for point in (0, 4, len(states) - 1):
        fresh = make(ByWorker(20), **options)
        fresh.load_state_dict(states[point])
        assert ids(fresh) == unbroken[point + 1 :]
        assert fresh.epoch == 1
    for other in ({"world": 3}, {"num_workers": 1}):
        with pytest.raises(ConfigError, match=r"world_size|num_workers"):
            make(ByWorker(20), **{**options, **other}).load_state_dict(states[0])
    with pytest.raises(ConfigError, match="shard=False"):
        loader.peek()


# ------------------------------------------------------------------------------------ bad requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle was given for a Stream.*iterable"),
        ({"sampler": [1, 2]}, "sampler was given for a Stream"),
        ({"batch_sampler": [[1]], "batch_size": None}, "batch_sampler was given for a Stream"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"uneven": "exact", "drop_last": True}, "together with drop_last"),
    ],
)
def test_bad_requests_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded_loader(Stream(3), **options)


def test_a_state_of_a_stream_fits_no_other_loader() -> None:
    state = make(Stream(3)).state_dict()
    with pytest.raises(ConfigError, match="length=None"):
        sharded_loader([1, 2, 3], seed=4).load_state_dict(state)
