"""`sharded_loader` in one process: options, epochs, places, randomness."""

import logging
import multiprocessing
import random
import time
import warnings
from collections import Counter, namedtuple
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from ddpkit.errors import ConfigError
from ddpkit.loader import ShardedLoader, sharded_loader
from ddpkit.sampler import DrawnBatches, Layout, OwnBatches

LENGTH = 23

# torch installs this handler for good with the first worker of a process. Done here, before any
# test, it is not taken for the leak of one.
_set_SIGCHLD_handler()


class Numbers(Dataset[int]):
    """Yields its indices, and knows which of them were loaded in this process."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Dice(Numbers):
    """Yields random numbers of torch's and `random`'s global streams."""

    def __getitem__(self, index: int) -> Any:
        return int(torch.randint(10**9, ())), random.randrange(10**9)


def make(source: Any = None, **options: Any) -> ShardedLoader[Any]:
    defaults: dict[str, Any] = {"shuffle": True, "seed": 4, "batch_size": 2}
    if {"sampler", "batch_sampler"} & options.keys() or isinstance(source, DataLoader):
        defaults = {"seed": 4}
    if "global_batch_size" in options:
        del defaults["batch_size"]
    return sharded_loader(Numbers() if source is None else source, **{**defaults, **options})


def ids(loader: ShardedLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: ShardedLoader[Any]) -> list[int]:
    return [i for batch in ids(loader) for i in batch]


# ------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_ranks_share_the_samples(uneven: Any) -> None:
    options = {"uneven": uneven, "shuffle": uneven != "exact", "num_replicas": 3}
    loaders = [make(rank=rank, **options) for rank in range(3)]
    shares = [ids(loader) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(share) for share in shares]
    seen = sorted(i for share in shares for batch in share for i in batch)
    assert len(seen) == {"pad": 24, "drop": 21, "exact": 23}[uneven]
    assert len(set(seen)) == min(len(seen), LENGTH)


def test_without_ranks_it_is_a_dataloader_of_everything() -> None:
    loader = make(shuffle=False)
    assert isinstance(loader, DataLoader)
    assert ids(loader) == [batch.tolist() for batch in DataLoader(Numbers(), batch_size=2)]


def test_a_global_batch_is_divided() -> None:
    loader = make(global_batch_size=6, num_replicas=3, rank=0)
    assert loader.batch_size == 2
    assert len(loader.peek()) == 2


def test_default_batch_size_is_that_of_torch() -> None:
    assert len(sharded_loader(Numbers()).peek()) == 1


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_an_empty_dataset_has_no_batch_and_its_epochs_advance(uneven: Any) -> None:
    loader = make(Numbers(0), shuffle=False, uneven=uneven, num_replicas=2, rank=1)
    assert (len(loader), ids(loader), loader.epoch) == (0, [], 1)
    with pytest.raises(ConfigError, match="no batch"):
        loader.peek()


@pytest.mark.parametrize("rank", range(3))
def test_fewer_samples_than_ranks(rank: int) -> None:
    options = {"num_replicas": 3, "rank": rank}
    assert flat(make(Numbers(1), **options)) == [0]
    assert flat(make(Numbers(1), shuffle=False, uneven="exact", **options)) == [[0], [], []][rank]


def test_a_dataset_that_splits_itself_is_gone_through_whole() -> None:
    loader = make(shard=False, num_replicas=2, rank=1, shuffle=False)
    assert flat(loader) == list(range(LENGTH))


def test_a_dataset_that_fetches_whole_batches_does() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-i for i in indices]

    loader = make(Whole(4), shuffle=False)
    assert loader.peek().tolist() == [0, -1]
    assert ids(loader) == [[0, -1], [-2, -3]]


def test_the_first_batch_of_a_billion_comes_at_once() -> None:
    loader = make(Numbers(10**9), num_replicas=8, rank=7)
    assert len(next(iter(loader))) == 2


# ------------------------------------------------------------------------------------------- epochs


def test_epochs_advance_by_themselves_and_differ() -> None:
    loader = make()
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(LENGTH))
    assert first != second
    assert loader.epoch == 2


def test_break_ends_the_epoch_and_length_stays_that_of_all() -> None:
    loader = make()
    whole = [flat(make_at(epoch)) for epoch in (0, 1)]
    for epoch in (0, 1):
        for batch in loader:
            assert batch.tolist() == whole[epoch][:2]
            assert loader.epoch == epoch
            break
    assert loader.epoch == 2
    assert len(loader) == 12


def make_at(epoch: int, **options: Any) -> ShardedLoader[Any]:
    loader = make(**options)
    loader.set_epoch(epoch)
    return loader


def test_iterators_that_yield_nothing_end_no_epoch() -> None:
    loader = make()
    iter(loader)
    iter(loader)
    assert loader.epoch == 0


def test_a_kept_iterator_ends_its_epoch_when_the_next_begins() -> None:
    loader = make()
    kept = iter(loader)
    next(kept)
    assert loader.epoch == 0
    assert flat(loader) == flat(make_at(1))
    assert len(list(kept)) == 11
    assert loader.epoch == 2


def test_an_error_of_the_dataset_keeps_the_place() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise RuntimeError("unreadable")
            return index

    loader = make(Broken(), shuffle=False)
    with pytest.raises(RuntimeError, match="unreadable"):
        list(loader)
    assert (loader.epoch, loader.state_dict()["consumed"]) == (0, 4)


def test_set_epoch_wins() -> None:
    loader = make()
    first = flat(loader)
    loader.set_epoch(0)
    assert flat(loader) == first
    sampler: Any = loader.sampler
    sampler.set_epoch(7)
    assert loader.epoch == 7


def test_set_epoch_begins_an_epoch_anew_whose_pass_was_left() -> None:
    loader = make()
    kept = iter(loader)
    first = next(kept).tolist()
    loader.set_epoch(0)
    again = iter(loader)
    assert next(again).tolist() == first
    assert loader.epoch == 0
    assert next(iter(loader)).tolist() != first  # without it the next epoch comes
    assert loader.epoch == 2


def test_set_epoch_of_the_current_epoch_inside_its_pass_changes_nothing() -> None:
    loader, other = make(), make()
    for batch, expected in zip(loader, other, strict=True):
        loader.set_epoch(loader.epoch)
        assert (batch.tolist(), loader.state_dict()) == (expected.tolist(), other.state_dict())
    assert loader.epoch == 1


def test_a_stop_iteration_does_not_end_a_pass_silently() -> None:
    class Ends(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise StopIteration
            return index

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make(Ends(), shuffle=False))


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    one, two, three = map(cast("Any", np.int64), [1, 2, 3])
    loader = sharded_loader(
        Numbers(), batch_size=two, seed=three, num_replicas=two, rank=one, generator=None
    )
    loader.set_epoch(two)
    state = loader.state_dict()
    assert {type(value) for value in state.values()} <= {int, str}
    assert (loader.batch_size, state["epoch"], state["seed"]) == (2, 2, 3)


def test_a_sampler_that_ends_early_is_told_where_ranks_have_parts_of_their_own() -> None:
    class Claims(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 8

    batches = OwnBatches(
        DrawnBatches(Claims(), Layout(2, 1, 0, "pad"), seed=0, by_batch=False),
        Layout(2, 2, 0, "pad"),
        steps=4,
    )
    with pytest.raises(ConfigError, match="ended 2 batches before the end"):
        list(batches.stream(0, 0))


def test_the_dataset_hears_of_the_epoch() -> None:
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset = Told()
    loader = make(Subset(dataset, range(4)))
    for epoch in range(2):
        for _ in loader:
            assert dataset.epoch == epoch


def test_peek_shows_what_comes_and_advances_nothing() -> None:
    dataset = Dice()
    loader = make(dataset)
    before = loader.state_dict(), torch.get_rng_state().tolist(), random.getstate()
    assert str(loader.peek()) == str(loader.peek())
    assert (loader.state_dict(), torch.get_rng_state().tolist(), random.getstate()) == before
    numbers = make()
    peeked = numbers.peek().tolist()
    for batch in numbers:
        assert batch.tolist() == peeked
        peeked = numbers.peek().tolist()
    assert numbers.peek().tolist() == peeked


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_or_not_the_epochs_are_the_same(workers: int) -> None:
    loader = make(num_workers=workers, persistent_workers=workers > 0)
    found = []
    for _ in range(3):
        for batch in loader:
            found.append(batch.tolist())
            break
    found += ids(loader)
    del loader._engine
    assert found == [*(ids(make_at(e))[0] for e in range(3)), *ids(make_at(3))]


# ------------------------------------------------------------------------------------------- places


SOURCES: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "sequential": {"shuffle": False},
    "drop": {"uneven": "drop"},
    "sampler": {"sampler": WeightedRandomSampler([1.0] * LENGTH, 20), "batch_size": 2},
    "batch_sampler": {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), 2, False)},
    "exact": {"uneven": "exact", "shuffle": False},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_saved_place_continues_the_stream(kind: str, workers: int) -> None:
    """The law: state at any point, restored in a fresh loader, continues the stream."""
    options = {**SOURCES[kind], "num_workers": workers}
    unbroken, states = [], []
    loader = make(**options)
    for _ in range(2):
        states.append(loader.state_dict())
        for batch in loader:
            unbroken.append(batch.tolist())
            states.append(loader.state_dict())
    states.append(loader.state_dict())
    steps = len(unbroken) // 2
    done = [0, *range(1, steps + 1), steps, *range(steps + 1, 2 * steps + 1), 2 * steps]
    points = [0, 3, steps, steps + 1, steps + 5, -1] if workers else range(len(states))
    for point in points:
        fresh = make(**options)
        fresh.load_state_dict(states[point])
        rest = []
        while fresh.epoch < 2:
            rest += ids(fresh)
        assert rest == unbroken[done[point] :]


def test_the_state_is_small_plain_and_the_same_on_all_ranks() -> None:
    loaders = [make(num_replicas=2, rank=rank) for rank in range(2)]
    for _ in zip(*loaders, strict=True):
        assert loaders[0].state_dict() == loaders[1].state_dict()
        assert {type(value) for value in loaders[0].state_dict().values()} == {int, str}
        break


def test_workers_load_ahead_but_the_state_counts_what_came() -> None:
    loader = make(num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for received in range(1, 4):
        next(iterator)
        assert loader.state_dict()["consumed"] == 2 * received
    del iterator


@pytest.mark.parametrize("workers", [0, 2])
def test_one_epoch_in_worlds_of_two_three_and_one(workers: int) -> None:
    """Each sample exactly once, over three legs with other batch sizes."""
    order = flat(make_at(1))
    state = make_at(1).state_dict()
    seen = []
    for world, batch, steps in ((2, 2, 2), (3, 1, 3), (1, 4, None)):
        loaders = [
            make(num_replicas=world, rank=rank, batch_size=batch, num_workers=workers)
            for rank in range(world)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for taken, step in enumerate(zip(*loaders, strict=True), 1):
            seen += [i for share in step for i in share.tolist()]
            state = loaders[0].state_dict()
            if taken == steps:
                break
    assert seen == order
    assert make_from(state).epoch == 2


def make_from(state: dict[str, Any], **options: Any) -> ShardedLoader[Any]:
    loader = make(**options)
    loader.load_state_dict(state)
    return loader


def test_resuming_loads_nothing_that_it_skips() -> None:
    for options in ({}, {"sampler": RandomSampler(range(LENGTH)), "batch_size": 2}):
        dataset = Numbers()
        loader = make_from({**make(dataset, **options).state_dict(), "consumed": 20}, **options)
        loader = make(dataset, **options)
        loader.load_state_dict({**loader.state_dict(), "consumed": 20})
        assert flat(loader) == dataset.loaded
        assert len(dataset.loaded) == 3


def test_set_epoch_keeps_a_restored_place() -> None:
    state = {**make().state_dict(), "epoch": 3, "consumed": 20}
    loader = make_from(state)
    loader.set_epoch(loader.epoch)
    assert loader.state_dict() == state
    loader.set_epoch(4)
    assert loader.state_dict()["consumed"] == 0


def test_restoring_inside_a_pass_ends_what_that_pass_counts() -> None:
    loader = make()
    state = {**loader.state_dict(), "epoch": 5, "consumed": 4}
    for _ in loader:
        loader.load_state_dict(state)
        break
    assert loader.state_dict() == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 24}, "length=24"),
        ({"seed": 1}, "seed=1"),
        ({"order": "sequential"}, "order='sequential'"),
        ({"epoch": -1}, "epoch=-1"),
        ({"consumed": 1.5}, "consumed=1.5"),
        ({"split": "by rank"}, "between epochs"),
    ],
)
def test_a_state_of_another_loader_is_refused(change: dict[str, Any], message: str) -> None:
    state = {**make().state_dict(), "consumed": 4, **change}
    loader = make()
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict()["consumed"] == 0


def test_an_incomplete_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="consumed"):
        make().load_state_dict({"epoch": 1})


def test_exact_resumes_in_the_same_world_only() -> None:
    options: dict[str, Any] = {"uneven": "exact", "shuffle": False}
    loader = make(num_replicas=2, rank=1, **options)
    whole = ids(loader)
    middle = {**loader.state_dict(), "epoch": 0, "consumed": 8}
    assert ids(make_from(middle, num_replicas=2, rank=1, **options)) == whole[2:]
    with pytest.raises(ConfigError, match=r"world_size=2.*world_size=3"):
        make_from(middle, num_replicas=3, rank=1, **options)
    assert make_from(loader.state_dict(), num_replicas=3, rank=1, **options).epoch == 1


# --------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_the_global_streams_are_not_consumed(kind: str, workers: int) -> None:
    before = torch.get_rng_state().tolist(), random.getstate()
    loader = make(**SOURCES[kind], num_workers=workers)
    next(iter(loader))
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_workers_draw_other_numbers_by_rank_worker_and_epoch_and_repeatably() -> None:
    def rolls() -> list[tuple[int, int]]:
        found = []
        for rank in range(2):
            loader = make(Dice(8), num_replicas=2, rank=rank, num_workers=2)
            for _ in range(2):
                found += [
                    pair for a, b in loader for pair in zip(a.tolist(), b.tolist(), strict=True)
                ]
        return found

    first = rolls()
    torch.manual_seed(1)
    assert rolls() == first
    assert len(set(first)) == len(first) == 16


# --------------------------------------------------------------------------- an existing DataLoader


def collate_negative(items: list[int]) -> torch.Tensor:
    return -torch.tensor(items)


def test_options_of_an_existing_loader_are_kept() -> None:
    def init(worker: int) -> None:
        del worker

    old = DataLoader(
        Numbers(),
        batch_size=3,
        shuffle=True,
        num_workers=2,
        collate_fn=collate_negative,
        drop_last=True,
        timeout=30,
        worker_init_fn=init,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    loader = make(old, num_replicas=2, rank=0)
    for name in (
        *("dataset", "batch_size", "num_workers", "collate_fn", "drop_last", "timeout"),
        *("worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context"),
    ):
        assert getattr(loader, name) == getattr(old, name)
    assert loader.state_dict()["order"] == "shuffled"
    assert len(loader) == 3


def test_what_is_given_beside_an_existing_loader_overrides() -> None:
    old = DataLoader(
        Numbers(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True, timeout=9
    )
    loader = make(old, batch_size=5, shuffle=False, num_workers=0, drop_last=True)
    assert ids(loader) == [list(range(k, k + 5)) for k in (0, 5, 10, 15)]


def test_samplers_of_an_existing_loader_are_split_and_not_replaced() -> None:
    weighted = DataLoader(
        Numbers(), batch_size=2, sampler=WeightedRandomSampler([0.0] * 22 + [1.0], 8)
    )
    assert ids(make(weighted, num_replicas=2, rank=1)) == [[22, 22], [22, 22]]
    batches = DataLoader(Numbers(), batch_sampler=[[1, 2, 3], [4], [5, 6], [7]])
    assert ids(make(batches, num_replicas=2, rank=1)) == [[4], [7]]
    partial = DataLoader(Numbers(), batch_size=2, sampler=RandomSampler(Numbers(), num_samples=6))
    assert make(partial).state_dict()["order"] == "sampler"
    assert len(make(partial)) == 3


def test_a_loader_without_batches_stays_one() -> None:
    old = DataLoader(Numbers(5), batch_size=None, collate_fn=str)
    loader = make(old, num_replicas=2, rank=1, uneven="drop")
    assert loader.peek() == "1"
    assert list(loader) == ["1", "3"]
    assert ids(make(DataLoader(Numbers(4), batch_size=None), batch_size=2)) == [[0, 1], [2, 3]]


def test_a_loader_with_an_iteration_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="ShardedLoader"):
        make(make())


# ------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2, "global_batch_size": 4}, "Give one of them"),
        ({"global_batch_size": 7, "num_replicas": 2, "rank": 0}, "multiple of 2, such as 6"),
        ({"global_batch_size": 1, "num_replicas": 2, "rank": 0}, "multiple of 2, such as 2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"global_batch_size": -2}, "global_batch_size=-2"),
        ({"seed": None}, "seed=None"),
        ({"uneven": "crop"}, "uneven='crop'"),
        ({"uneven": "exact", "shuffle": True}, "together with shuffle"),
        ({"uneven": "exact", "sampler": [1, 2]}, "together with sampler"),
        ({"uneven": "exact", "batch_sampler": [[1]]}, "together with batch_sampler"),
        ({"uneven": "exact", "drop_last": True}, "together with drop_last"),
        ({"shuffle": True, "sampler": [1, 2]}, "Give one of them"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "decides the batches alone"),
        ({"sampler": (i for i in range(3))}, "only once"),
        ({"batch_sampler": iter([[1]])}, "only once"),
        ({"batch_sampler": [[1]], "drop_last": True}, "decides the batches alone"),
        ({"num_replicas": 2}, "Give both"),
        ({"rank": 0}, "Give both"),
        ({"num_replicas": 2, "rank": 2}, "expected 0 to 1"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas=0"),
        ({"bath_size": 3}, "bath_size"),
        ({"generator": torch.Generator()}, "seed="),
        ({"in_order": False}, "in_order"),
        ({"sampler": DistributedSampler(Numbers(), 2, 0)}, "DistributedSampler.*already"),
    ],
)
def test_bad_requests_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded_loader(Numbers(), **options)


def test_what_has_neither_keys_nor_an_iteration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no __len__.*IterableDataset"):
        sharded_loader(object())  # type: ignore[arg-type]


def test_a_bad_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch=-1"):
        make().set_epoch(-1)


# ---------------------------------------------------------------------------------- what people see


def test_the_effective_batch_size_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ddpkit.loader"):
        for rank in range(2):
            loader = make(num_replicas=2, rank=rank)
            list(loader)
    assert [record.getMessage() for record in caplog.records] == [
        "effective batch size 4 (2 ranks x 2), 23 samples, of which each rank takes 12 in 6 steps; "
        "1 repeated and 0 dropped in each epoch"
    ]


def test_an_unshuffled_loader_that_repeats_samples_names_exact() -> None:
    with pytest.warns(UserWarning, match=r"repeats 1 of 23 .*uneven='exact'") as caught:
        make(shuffle=False, num_replicas=2, rank=0)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(shuffle=True, num_replicas=2, rank=0)
        make(Numbers(24), shuffle=False, num_replicas=2, rank=0)
        make(shuffle=False, uneven="exact", num_replicas=2, rank=0)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"uneven": "drop"}])
def test_a_loader_without_any_batch_says_so(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="yields no batch: 1 samples"):
        loader = make(Numbers(1), num_replicas=2, rank=0, **options)
    assert (ids(loader), loader.epoch) == ([], 1)


# ------------------------------------------------------------------------------------------ devices

Pair = namedtuple("Pair", ["x", "y"])


def collate_nested(items: list[Any]) -> dict[str, Any]:
    x = torch.stack([item[0] for item in items])
    return {"pair": Pair(x, "name"), "list": [x, 3], "tuple": (x, None)}


def test_batches_are_moved_with_their_structure() -> None:
    dataset = TensorDataset(torch.arange(4.0))
    loader = make(dataset, collate_fn=collate_nested, device="meta")
    for batch in (loader.peek(), next(iter(loader))):
        assert isinstance(batch["pair"], Pair)
        moved = [batch["pair"].x, batch["list"][0], batch["tuple"][0]]
        assert [tensor.device.type for tensor in moved] == ["meta"] * 3
        assert (batch["pair"].y, batch["list"][1], batch["tuple"][1]) == ("name", 3, None)


def test_pinning_is_left_out_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for kind in (None, "mps", "cuda"):
        monkeypatch.setattr("ddpkit.recipe.accelerator_type", lambda kind=kind: kind)
        found[kind] = [make().pin_memory, *(make(pin_memory=p).pin_memory for p in (True, False))]
    assert found == {None: [False] * 3, "mps": [False] * 3, "cuda": [True, True, False]}


# ------------------------------------------------------------------- what datasets and workers see


class Told(Numbers):
    """Yields the epoch that it has been told, and who loads."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return self.epoch, -1 if info is None else info.id


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(4)), ConcatDataset])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_reaches_wrapped_datasets_in_workers_that_persist(
    workers: int, wrap: Any
) -> None:
    datasets = [Told(2), Told(2)]
    source = wrap(datasets) if wrap is ConcatDataset else wrap(Told(4))
    loader = make(source, num_workers=workers, persistent_workers=workers > 0)
    found = [[(epochs.tolist(), who.tolist()) for epochs, who in loader] for _ in range(3)]
    loader._engine = None
    who = [[0, 0], [1, 1]] if workers else [[-1, -1]] * 2
    assert found == [[([epoch] * 2, w) for w in who] for epoch in range(3)]


def set_scale(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.scale = 10 + worker_id


class Scaled(Numbers):
    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


def test_a_worker_that_is_needed_no_more_ends_quietly() -> None:
    """A loader terminates what does not end in time, and Python the workers left at its end."""

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            if index:
                time.sleep(20)
            return index

    iterator = iter(make(Slow(), shuffle=False, batch_size=1, num_workers=1))
    next(iterator)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iterator)


def test_worker_init_fn_finds_the_dataset() -> None:
    loader = make(Scaled(4), shuffle=False, num_workers=2, worker_init_fn=set_scale)
    assert ids(loader) == [[0, 10], [22, 33]]
    assert isinstance(loader.dataset, Scaled)


def test_options_that_a_script_changes_later_count() -> None:
    loader = make(Numbers(4), shuffle=False)
    loader.collate_fn = collate_negative
    assert ids(loader) == [[0, -1], [-2, -3]]
    assert loader.peek().tolist() == [0, -1]


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_draw_what_fresh_ones_draw(workers: int) -> None:
    def rolls(persistent: bool) -> list[Any]:
        loader = make(Dice(8), num_workers=workers, persistent_workers=persistent and workers > 0)
        found = [[(a.tolist(), b.tolist()) for a, b in loader] for _ in range(3)]
        loader._engine = None
        return found

    assert rolls(True) == rolls(False)
    assert len({str(epoch) for epoch in rolls(True)}) == 3


def test_what_is_drawn_does_not_depend_on_workers_nor_on_a_resume() -> None:
    def rolls(loader: ShardedLoader[Any]) -> list[Any]:
        return [(a.tolist(), b.tolist()) for a, b in loader]

    unbroken = rolls(make(Dice(12)))
    assert rolls(make(Dice(12), num_workers=2)) == unbroken
    resumed = make_from({**make(Dice(12)).state_dict(), "consumed": 4}, source=Dice(12))
    assert resumed.peek()[0].tolist() == unbroken[2][0]
    assert rolls(resumed) == unbroken[2:]


def seed_alike(worker_id: int) -> None:
    torch.manual_seed(worker_id)
    random.seed(worker_id)


def test_what_a_worker_init_fn_has_seeded_stays() -> None:
    loader = make(
        Dice(4),
        shuffle=False,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_alike,
    )
    first = [a.tolist() for a, _ in loader]
    generator = torch.Generator().manual_seed(0)
    expected = [int(torch.randint(10**9, (), generator=generator)) for _ in range(4)]
    assert first[0] == expected[:2]
    assert next(iter(loader))[0].tolist() == expected[2:]
    loader._engine = None


def test_a_dataset_in_this_process_draws_from_streams_of_its_own() -> None:
    def rolls(rank: int) -> list[tuple[int, int]]:
        loader = make(Dice(8), num_replicas=2, rank=rank)
        return [
            pair
            for _ in range(2)
            for a, b in loader
            for pair in zip(a.tolist(), b.tolist(), strict=True)
        ]

    torch.manual_seed(1)
    before = torch.get_rng_state().tolist(), random.getstate()
    first, second = rolls(0), rolls(1)
    assert (torch.get_rng_state().tolist(), random.getstate()) == before
    torch.manual_seed(2)
    assert rolls(0) == first
    assert len({*first, *second}) == 16


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_ten_thousand_ranks_share_every_sample(uneven: Any) -> None:
    """In one process, each rank with a loader of its own."""
    world, length = 10_000, 123_457
    numbers = Numbers(length)
    seen = torch.zeros(length, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in range(world):
            loader = make(
                *(numbers,),
                batch_size=4,
                uneven=uneven,
                shuffle=uneven != "exact",
                num_replicas=world,
                rank=rank,
            )
            share = torch.tensor([i for batch in loader.sampler for i in batch])
            seen.index_add_(0, share, torch.ones_like(share))
    counts = Counter(seen.tolist())
    assert counts[1] + counts[0] + counts[2] == length
    if uneven == "exact":
        assert counts == {1: length}
    if uneven == "pad":
        assert (counts[0], counts[2]) == (0, -length % world)
    if uneven == "drop":
        assert (counts[0], counts[2]) == (length % world, 0)
