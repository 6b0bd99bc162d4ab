"""Which sample goes where, against an oracle that is written from the promises alone."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from ddpkit.permutation import Permutation
from ddpkit.sampler import (
    Batches,
    BlockBatches,
    ComputedBatches,
    DrawnBatches,
    Layout,
    Place,
    ShardSampler,
)

Ids = list[list[int]]
Mode = Literal["pad", "drop"]


def world_of(make: Any, world: int, epoch: int = 0, consumed: int = 0) -> list[Ids]:
    """The batches of every rank."""
    return [[*make(rank).stream(epoch, consumed)] for rank in range(world)]


def together(ranks: list[Ids]) -> Ids:
    """What the ranks get in each step, one after the other."""
    return [[i for share in step for i in share] for step in zip(*ranks, strict=True)]


def computed(
    length: int,
    batch: int,
    world: int,
    mode: Mode,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
) -> Any:
    def make(rank: int) -> ComputedBatches:
        layout = Layout(batch, world, rank, mode, drop_last)
        return ComputedBatches(length, layout, seed=3, shuffle=shuffle)

    return make


def order_of(length: int, epoch: int = 0) -> list[int]:
    return Permutation(length, seed=3, epoch=epoch)(torch.arange(length)).tolist()


def expected_steps(order: list[int], batch: int, world: int, mode: Mode, drop_last: bool) -> Ids:
    """What all ranks together see in each step."""
    whole = batch * world
    steps = [order[start : start + whole] for start in range(0, len(order), whole)]
    if steps and len(steps[-1]) < whole:
        tail = steps.pop()
        head = 0
        while mode == "pad" and len(tail) % world:
            tail = [*tail, order[head % len(order)]]
            head += 1
        while mode == "drop" and len(tail) % world:
            tail = tail[:-1]
        if tail and not drop_last:
            steps.append(tail)
    return steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("mode", ["pad", "drop"])
def test_every_step_is_the_next_slice_of_the_order(
    mode: Mode, shuffle: bool, drop_last: bool
) -> None:
    for length in range(41):
        order = order_of(length) if shuffle else list(range(length))
        for world in range(1, 6):
            for batch in range(1, 5):
                make = computed(length, batch, world, mode, shuffle=shuffle, drop_last=drop_last)
                ranks = world_of(make, world)
                expected = expected_steps(order, batch, world, mode, drop_last)
                assert {len(batches) for batches in ranks} == {make(0).steps()} == {len(expected)}
                for together, *shares in zip(expected, *ranks, strict=True):
                    assert len({len(share) for share in shares}) == 1
                    assert [sample for share in shares for sample in share] == together


@pytest.mark.parametrize("mode", ["pad", "drop"])
def test_repeats_and_drops_are_few_and_announced(mode: Mode) -> None:
    for length in range(41):
        for world in range(1, 6):
            for batch in range(1, 5):
                make = computed(length, batch, world, mode)
                seen = Counter(i for rank in world_of(make, world) for b in rank for i in b)
                extra = sum(seen.values()) - length
                layout = make(0).layout
                assert (layout.repeated(length), layout.dropped(length)) == (
                    max(0, extra),
                    max(0, -extra),
                )
                if mode == "pad":
                    assert 0 <= extra < world
                    assert sorted(seen) == list(range(length))
                else:
                    assert -extra == length % world
                    assert max(seen.values(), default=1) == 1


def test_exact_gives_every_sample_once_in_the_order_of_the_dataset() -> None:
    for length in range(41):
        for world in range(1, 6):
            for batch in range(1, 5):
                ranks = world_of(lambda r: blocks(length, batch, world, r), world)  # noqa: B023
                flat = [[i for b in rank for i in b] for rank in ranks]
                assert [i for rank in flat for i in rank] == list(range(length))
                assert max(map(len, flat)) - min(map(len, flat)) <= 1
                assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
                assert all(len(b) == batch for rank in ranks for b in rank[:-1])
                steps = [blocks(length, batch, world, r).steps() for r in range(world)]
                assert steps == [len(rank) for rank in ranks]


def blocks(length: int, batch: int, world: int, rank: int) -> BlockBatches:
    return BlockBatches(length, batch_size=batch, world_size=world, rank=rank)


@pytest.mark.parametrize("length", [24, 20_000, 70_000])
def test_the_order_does_not_depend_on_the_world(length: int) -> None:
    whole = 24
    one = together(world_of(computed(length, whole, 1, "pad"), 1))
    for world in (2, 3, 4):
        ranks = world_of(computed(length, whole // world, world, "drop"), world)
        steps = together(ranks)
        assert steps[: length // whole] == one[: length // whole]


def test_epochs_differ_and_repeat() -> None:
    make = computed(30, 4, 1, "pad")
    first, second, again = (world_of(make, 1, epoch=e) for e in (0, 1, 0))
    assert first == again != second


def test_a_world_of_ten_thousand_is_partitioned() -> None:
    make = computed(1_000_003, 7, 10_000, "drop")
    ranks = [range(0, 10_000, 997), range(1, 10_000, 997)]
    seen = [i for part in ranks for r in part for b in make(r).stream(0, 0) for i in b]
    assert len(seen) == len(set(seen)) == sum(map(len, ranks)) * (1_000_003 // 10_000)


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 60),
    mode=st.sampled_from(["pad", "drop"]),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), max_size=3),
    last=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    drawn=st.booleans(),
)
def test_what_is_left_of_an_epoch_is_exactly_what_was_not_seen(
    length: int,
    mode: Mode,
    legs: list[tuple[int, int, int]],
    last: tuple[int, int],
    drawn: bool,
) -> None:
    """Legs with other worlds and batches, each stopped after some steps, then the rest."""

    def make(batch: int, world: int, rank: int) -> Batches:
        layout = Layout(batch, world, rank, mode)
        if drawn:
            sampler = RandomSampler(range(length))
            return DrawnBatches(sampler, layout, seed=3, by_batch=False)
        return ComputedBatches(length, layout, seed=3, shuffle=True)

    order = [i for b in make(1, 1, 0).stream(2, 0) for i in b]
    consumed, seen = 0, list[int]()
    for batch, world, stop in legs:
        whole = batch * world
        stop = min(stop, (length - consumed) // whole)
        ranks = [make(batch, world, rank) for rank in range(world)]
        streams = [batches.stream(2, consumed) for batches in ranks]
        for _ in range(stop):
            seen += [i for stream in streams for i in next(stream)]
            consumed = ranks[0].advance(consumed)
    assert seen == order[:consumed]
    batch, world = last
    streams = [make(batch, world, rank).stream(2, consumed) for rank in range(world)]
    rest = [i for step in zip(*streams, strict=True) for share in step for i in share]
    left = order[consumed:]
    if mode == "drop":
        assert rest == left[: len(left) - len(left) % world]
    else:
        assert rest[: len(left)] == left
        repeated = itertools.islice(itertools.cycle(order), -len(left) % world)
        assert rest[len(left) :] == list(repeated)


@pytest.mark.parametrize("mode", ["pad", "drop"])
def test_a_place_at_the_end_is_finished(mode: Mode) -> None:
    for length in range(1, 20):
        for world in (1, 2, 3):
            batches = computed(length, 2, world, mode)(0)
            consumed = 0
            for _ in batches.stream(0, 0):
                assert not batches.is_finished(0, consumed)
                consumed = batches.advance(consumed)
            assert batches.is_finished(0, consumed)


def test_an_exact_epoch_is_finished_for_all_ranks_at_once() -> None:
    ranks = [blocks(5, 1, 2, rank) for rank in range(2)]
    assert [[*r.stream(0, 4)] for r in ranks] == [[[2]], []]
    assert [r.is_finished(0, 4) for r in ranks] == [False, False]
    assert [r.is_finished(0, r.advance(4)) for r in ranks] == [True, True]


# ------------------------------------------------------------------------------------ drawn orders


def drawn(
    sampler: Any, batch: int, world: int, mode: Mode = "pad", *, by_batch: bool = False
) -> Any:
    def make(rank: int) -> DrawnBatches:
        return DrawnBatches(sampler, Layout(batch, world, rank, mode), seed=3, by_batch=by_batch)

    return make


@pytest.mark.parametrize("mode", ["pad", "drop"])
def test_a_drawn_order_is_cut_like_a_computed_one(mode: Mode) -> None:
    for length in range(1, 25):
        for world in range(1, 5):
            for batch in range(1, 4):
                order = list(range(100, 100 + length))
                ranks = world_of(drawn(order, batch, world, mode), world)
                steps = together(ranks)
                assert steps == expected_steps(order, batch, world, mode, drop_last=False)


@pytest.mark.parametrize(("mode", "last"), [("pad", [[[8, 9], [0, 1]]]), ("drop", [])])
def test_a_batch_sampler_is_split_by_batches(mode: Mode, last: list[Ids]) -> None:
    sampler = BatchSampler(range(10), batch_size=2, drop_last=False)
    ranks = world_of(drawn(sampler, 1, 2, mode, by_batch=True), 2)
    assert [list(step) for step in zip(*ranks, strict=True)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        *last,
    ]
    assert drawn(sampler, 1, 2, mode, by_batch=True)(0).steps() == 2 + len(last)


def test_ranks_draw_the_same_whatever_their_global_streams() -> None:
    sampler = WeightedRandomSampler([1.0] * 50, 40)
    shares = []
    for rank in range(2):
        torch.manual_seed(rank)
        shares += [*drawn(sampler, 20, 2)(rank).stream(0, 0)]
    assert len(shares) == 2
    assert shares[0] != shares[1]
    one = next(drawn(sampler, 40, 1)(0).stream(0, 0))
    assert shares[0] + shares[1] == one
    assert next(drawn(sampler, 40, 1)(0).stream(1, 0)) != one


def test_the_weights_count() -> None:
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], 100)
    ranks = world_of(drawn(sampler, 10, 2), 2)
    assert {i for rank in ranks for b in rank for i in b} == {1, 3}


class Careless(Sampler[int]):
    """Draws from every global stream, and has an epoch and a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        import numpy as np

        for _ in range(8):
            yield (
                int(torch.randint(100, ())) * 10**6
                + random.randrange(100) * 10**4
                + (
                    int(np.random.randint(100)) * 100
                    + int(torch.randint(100, (), generator=self.generator))
                )
            )


def global_state() -> tuple[Any, ...]:
    import numpy as np

    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def test_drawing_is_repeatable_and_leaves_no_trace() -> None:
    sampler = Careless()
    make = drawn(sampler, 2, 1)
    own, outer = sampler.generator.get_state(), global_state()
    first = [*make(0).stream(4, 0)]
    assert global_state() == outer
    assert len({i for batch in first for i in batch}) == 8
    assert torch.equal(sampler.generator.get_state(), own)
    interrupted = make(0).stream(4, 0)
    start = [next(interrupted)]
    torch.rand(3)
    random.random()
    assert [*start, *interrupted] == first == [*make(0).stream(4, 0)]
    assert [*make(0).stream(4, 4)] == first[2:]
    assert [*make(0).stream(5, 0)] != first
    assert set(sampler.epochs) == {4, 5}


class OwnIterator:
    """Begins anew whenever it is asked for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn = 0
        return self

    def __next__(self) -> list[int]:
        self.drawn += 1
        if self.drawn > 3:
            raise StopIteration
        return [self.drawn]


def test_a_batch_sampler_that_is_its_own_iterator_ends() -> None:
    layout = Layout(1, 1, 0, "pad")
    drawn = DrawnBatches(OwnIterator(), layout, seed=0, by_batch=True)
    assert list(itertools.islice(drawn.stream(0, 0), 10)) == [[1], [2], [3]]
    assert list(itertools.islice(drawn.stream(1, 1), 10)) == [[2], [3]]


def test_samplers_inside_a_batch_sampler_get_the_epoch_too() -> None:
    inner = Careless()
    batches = drawn(BatchSampler(inner, 2, drop_last=False), 1, 2, by_batch=True)
    assert len([*batches(0).stream(6, 0)]) == 2
    assert inner.epochs == [6]


def test_an_endless_sampler_is_drawn_step_by_step() -> None:
    def endless() -> Iterator[int]:
        k = 0
        while True:
            yield k
            k += 1

    stream = drawn(endless(), 2, 2)(1).stream(0, 0)
    assert [next(stream), next(stream)] == [[2, 3], [6, 7]]
    with pytest.raises(TypeError, match="len"):
        drawn(endless(), 2, 2)(0).steps()


def test_a_length_that_lies_moves_no_place() -> None:
    class Lying(list[int]):
        def __len__(self) -> int:
            return 2

    batches = drawn(Lying(range(9)), 2, 1)(0)
    assert not batches.is_finished(0, 4)
    assert not batches.is_finished(0, 8)
    assert batches.is_finished(0, 10)


# ------------------------------------------------------------------------------------- the place


def sampler_of(length: int = 6) -> ShardSampler:
    return ShardSampler(computed(length, 2, 1, "pad", shuffle=False)(0))


def test_a_pass_moves_the_place() -> None:
    sampler = sampler_of()
    place = sampler.begin()
    place = sampler.receive(place)
    assert sampler.place == Place(0, 2, is_open=True)
    place = sampler.receive(place)
    sampler.end(place)
    assert sampler.place == Place(1, 0)


def test_a_new_pass_ends_the_epoch_of_an_open_one() -> None:
    sampler = sampler_of()
    old = sampler.receive(sampler.begin())
    sampler.begin()
    assert sampler.place == Place(1, 0)
    sampler.end(sampler.receive(old))
    assert sampler.place == Place(1, 0)


def test_a_pass_that_received_nothing_keeps_the_place() -> None:
    sampler = sampler_of()
    sampler.begin()
    second = sampler.begin()
    assert sampler.receive(second) == Place(0, 2, is_open=True)


def test_set_epoch_wins_and_the_same_epoch_changes_nothing() -> None:
    sampler = sampler_of()
    place = sampler.receive(sampler.begin())
    sampler.set_epoch(0)
    assert sampler.place is place
    sampler.set_epoch(5)
    sampler.end(sampler.receive(place))
    assert sampler.place == Place(5, 0)


def test_restoring_rolls_over_at_the_end() -> None:
    sampler = sampler_of()
    sampler.restore(3, 4)
    assert [*sampler] == [[4, 5]]
    assert [(place.epoch, keys) for place, keys in sampler.upcoming()] == [(3, [4, 5]), (4, [0, 1])]
    sampler.restore(3, 6)
    assert sampler.place == Place(4, 0)


def test_peek_finds_the_next_epoch_and_nothing_in_nothing() -> None:
    sampler = sampler_of(2)
    sampler.receive(sampler.begin())
    assert [(place.epoch, keys) for place, keys in sampler.upcoming()] == [(1, [0, 1])]
    assert [*sampler_of(0).upcoming()] == []
