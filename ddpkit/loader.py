"""`sharded_loader()`: a DataLoader that gives each rank its share, epoch after epoch.

`sharded_loader` decides who gets what, and `ShardedLoader` acts: it asks torch's DataLoader for the
batches that a `ShardSampler` names, and counts what the loop receives.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from ddpkit.agree import exchange
from ddpkit.digest import digests_of_order
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_channel, get_rank, get_world_size, require_group
from ddpkit.lockstep import PassCheck, PassFacts, while_all_have_one
from ddpkit.permutation import derive_seed
from ddpkit.prefetch import move, moved_ahead, moves_ahead
from ddpkit.recipe import Recipe, check_number, read_source, with_pinning
from ddpkit.sampler import (
    Batches,
    BlockBatches,
    ComputedBatches,
    DrawnBatches,
    Layout,
    Note,
    OwnBatches,
    Place,
    ShardSampler,
    Uneven,
    tell_epoch,
    wrapped_datasets,
)
from ddpkit.serving import MapServer, Pass, Reply, Request, Server, WorkerSetup
from ddpkit.stream import OwnStreamServer, StreamBatches, StreamServer
from ddpkit.wording import name_ranks

__all__ = ["ShardedLoader", "sharded_loader"]

T_co = TypeVar("T_co", covariant=True)

_logger = logging.getLogger(__name__)


def sharded_loader(
    source: Dataset[T_co] | Sequence[T_co] | DataLoader[T_co],
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    uneven: Uneven = "pad",
    sampler: Iterable[Any] | None = None,
    shard: bool = True,
    num_replicas: int | None = None,
    rank: int | None = None,
    device: str | torch.device | None = None,
    **dataloader_options: Any,
) -> ShardedLoader[T_co]:
    """Make a DataLoader that yields this rank's share of every batch.

    Collective: every rank must call this, because the ranks compare once what they were given. In
    a world of one, and where `num_replicas` and `rank` are given, nothing is communicated. In an
    epoch no rank waits for another (but see `shard`): each says where it begins, and ranks that
    turn out to be in different epochs or places get an error at their second step.

    Step k of an epoch is the k-th global batch of an order that depends on seed and epoch only;
    each rank gets its contiguous slice. The epoch advances by itself after each pass. The state
    (`state_dict()`) is the same on all ranks, and what is left of an epoch goes on from it with any
    number of ranks, any batch size and any number of workers, without loading what it skips.

    An iterable dataset is split by position exactly like one with keys. Every worker of every rank
    iterates over the whole of it and keeps its own items, so this pays where making a batch costs
    more than reading an item; it sees neither ranks nor workers while it iterates, and torch's,
    numpy's and `random`'s global streams are the same everywhere then. To go on inside an epoch it
    is iterated up to there once more, unless it has `state_dict()` and `load_state_dict()`: then
    its state travels with each batch and in the state of the loader.

    Random numbers that a dataset with keys draws from torch's, numpy's or `random`'s global stream
    follow from `seed`, epoch, rank and the place of the batch: they differ between all of these,
    and are the same with any number of workers and after a resume. Without workers the streams are
    exchanged for each batch (less than 0.1 ms) and those of this process are not consumed. A
    `worker_init_fn` seeds as it likes.

    Args:
        source: A dataset with a length, an iterable dataset, or an existing `DataLoader`, whose
            options are kept unless given here: its batch size is per rank, its `RandomSampler`
            becomes `shuffle=True`, other samplers are split between ranks. Its generator is
            replaced, see `seed`.
        batch_size: Samples of one rank in one step; 1 unless given.
        global_batch_size: Instead of `batch_size`: samples of all ranks in one step.
        shuffle: Whether every epoch has a new order. Not together with a sampler, and not for an
            iterable dataset.
        seed: Decides the order, together with the epoch, and what a dataset draws.
        uneven: What happens when ranks do not divide the samples. `"pad"` repeats a few from the
            head of the order (at most one less than there are ranks), `"drop"` leaves a few out;
            both give all ranks equal batches at every step. `"exact"` is for evaluation without
            collectives inside the loop: every sample once, in one contiguous block of the dataset
            for each rank. Of an iterable dataset it divides the last batch as evenly as it goes.
        sampler: Any sampler. It is drawn identically on all ranks, then split. A
            `batch_sampler=` is split by batches.
        shard: False for a dataset (or a sampler) that gives each rank its own part already: every
            rank then goes through all that it has. The ranks stop together when the first has no
            more, which for an iterable dataset they agree on with a small all-reduce while the
            step before is computed; with `uneven="exact"` each goes to its own end. Such an epoch
            is continued with the same number of ranks and workers only.
        num_replicas: Number of ranks, instead of the size of the group; needs `rank`.
        rank: This rank, instead of the rank in the group; needs `num_replicas`.
        device: Where batches are moved, nested containers too: copied while the step before is
            computed where there is an accelerator. On the CPU nothing is done.
        **dataloader_options: What `torch.utils.data.DataLoader` takes besides. `drop_last=True`
            leaves out a last step that is not full. Memory is pinned where there is an
            accelerator, unless `pin_memory=False`.

    Returns:
        A loader, which is a `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: If options are wrong or contradict each other.
        GroupError: If ranks were given different lengths, orders or options, or no group is open
            though a launcher started several ranks. When it is iterated: if it was made before
            there were several ranks.

    Example:
        >>> loader = sharded_loader(list(range(10)), batch_size=4, shuffle=True)
        >>> for epoch in range(2):
        ...     seen = torch.cat(list(loader))
        >>> loader.epoch, sorted(seen.tolist())
        (2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    recipe = read_source(source).override(
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        sampler=sampler,
        options=dataloader_options,
    )
    recipe.check(uneven, shard=shard)
    ranks = _find_ranks(num_replicas, rank)
    seed = check_number("seed", seed)
    share = _plan(recipe, ranks, uneven=uneven, seed=seed, shard=shard)
    check = None
    if ranks.communicate:
        share, check = _agree_on(share, recipe.dataset)
    if ranks.rank == 0:
        _announce(share)
    return ShardedLoader(
        recipe.dataset,
        share,
        check=check,
        device=None if device is None else torch.device(device),
        options=with_pinning(recipe.options),
        made_alone=num_replicas is None and not ranks.communicate,
    )


class ShardedLoader(DataLoader[T_co]):
    """A `DataLoader` that yields one rank's share and knows its place; `sharded_loader` makes it.

    A pass that yields anything ends its epoch, also by `break` or by an exception in the loop's
    body, so a state for going on inside an epoch is to be taken inside the loop. The state counts
    what the loop has received, not what workers have loaded ahead.

    Example:
        >>> loader = sharded_loader(list(range(6)), batch_size=2)
        >>> for batch in loader:
        ...     break
        >>> loader.epoch, len(loader), loader.peek().tolist()
        (1, 3, [0, 1])
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        share: _Share,
        *,
        check: PassCheck | None,
        device: torch.device | None,
        options: Mapping[str, Any],
        made_alone: bool = False,
    ) -> None:
        shards = ShardSampler(share.batches, unbatched=share.is_unbatched and not share.is_stream)
        super().__init__(dataset, generator=torch.Generator(), **_kind(share, shards), **options)
        # DataLoader knows no batch size beside a batch sampler, and would show a sampler of its
        # own. Scripts read the one and call set_epoch of the other. It refuses to set them itself.
        vars(self).update(batch_size=share.batch_size, drop_last=share.drop_last, sampler=shards)
        self._shards = shards
        self._share = share
        self._check = check
        self._device = device
        self._made_alone = made_alone
        self._passes = count()
        self._server = self._make_server()
        self._engine: _Engine | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._made_alone and get_world_size() > 1:
            raise GroupError(
                f"this loader was made before there were {get_world_size()} ranks, so each of them "
                "would go through all samples. Make it inside the function that the ranks run; for "
                "one that gives every rank everything pass num_replicas=1, rank=0."
            )
        place = self._shards.begin()
        tell_epoch(wrapped_datasets(self.dataset), place.epoch)
        wanted = self._pass_at(place, next(self._passes))
        replies = self._batches_of(self._ask(wanted), place.consumed)
        return self._run(self._moved(replies), place, wanted)

    def __len__(self) -> int:
        return len(self._shards)

    def _run(self, replies: Iterator[Reply], place: Place, wanted: Pass) -> Iterator[Any]:
        check, receive = self._check, self._shards.receive
        is_first = True
        try:
            for batch, note in replies:
                if check is not None:
                    self._compare(check, wanted, note, is_first=is_first)
                    is_first = False
                place = receive(place, note)
                yield batch
        except GeneratorExit:
            self._shards.end(place)
            raise
        self._shards.end(place)

    def _compare(
        self, check: PassCheck, wanted: Pass, note: Note | None, *, is_first: bool
    ) -> None:
        if not is_first:
            check.look()
            return
        first_item = None if note is None else note.first_item
        check.publish(PassFacts(wanted.number, wanted.epoch, wanted.consumed, first_item))

    # ------------------------------------------------------------- what comes out of the DataLoader

    def _ask(self, wanted: Pass) -> Iterator[Reply]:
        """Start torch's DataLoader on the requests of one pass."""
        self._server.collate_fn = self.collate_fn
        self._server.epoch = wanted.epoch
        if self.num_workers == 0 and not self.pin_memory:  # DataLoader would only cost time
            return map(self._server.__getitem__, self._requests(wanted))
        self.generator.manual_seed(wanted.seed)
        engine = _Engine(self, self._server) if self._engine is None else self._engine
        if self.persistent_workers:
            self._engine = engine
        engine.requests.pending = self._requests(wanted)
        return iter(engine)

    def _requests(self, wanted: Pass) -> Iterator[Request]:
        step = self._share.layout.global_batch
        places: Iterator[int] = count(wanted.consumed, step)
        if self._share.is_stream and not self._share.shard:
            # From the beginning: what was received is passed over by whoever has it.
            places = count(0, step)
            keys: Iterator[Any] = chain(repeat(False, wanted.consumed // step), repeat(True))
        else:
            keys = self._shards.keys(wanted.epoch, wanted.consumed)
        return zip(repeat(tuple(wanted)), places, keys)

    def _batches_of(self, replies: Iterator[Reply], consumed: int) -> Iterator[Reply]:
        """Take the batches out of the replies, those that were received before left out."""
        share, own = self._share, replies
        if share.is_stream:
            workers = 1 if share.shard else max(1, self.num_workers)
            own = _until_the_end(replies, share.layout, workers=workers)
        if share.shard:
            return own
        if share.is_stream:
            for _ in range(consumed // share.layout.global_batch):
                next(own, None)
        return while_all_have_one(own) if self._ends_together() else own

    def _ends_together(self) -> bool:
        """Whether ranks with parts of their own, of unknown length, agree on each batch."""
        share = self._share
        known = isinstance(share.batches, OwnBatches) and share.batches.limit is not None
        return self._check is not None and share.uneven != "exact" and not known

    def _moved(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        device = self._device
        if moves_ahead(device):
            return moved_ahead(replies, cast("torch.device", device))
        if device is None or device.type == "cpu":
            return replies
        return ((move(batch, device), note) for batch, note in replies)

    def _make_server(self) -> Server:
        share = self._share
        reseeds = self.worker_init_fn is None
        if not share.is_stream:
            return MapServer(
                self.dataset, self.collate_fn, single=share.is_unbatched, reseeds=reseeds
            )
        if share.shard:
            return StreamServer(
                self.dataset,
                self.collate_fn,
                layout=share.layout,
                seed=share.seed,
                single=share.is_unbatched,
                reseeds=reseeds,
            )
        return OwnStreamServer(
            self.dataset,
            self.collate_fn,
            batch_size=share.layout.batch_size,
            drop_last=share.drop_last,
            single=share.is_unbatched,
            reseeds=reseeds,
        )

    def _pass_at(self, place: Place, number: int) -> Pass:
        seed = derive_seed("rank", self._share.seed, place.epoch, self._share.rank)
        return Pass(number, place.epoch, place.consumed, seed, place.source_state)

    # ------------------------------------------------------------------------------------ the place

    @property
    def epoch(self) -> int:
        """The epoch of the current or next pass."""
        return self._shards.told_place.epoch

    def steps_left(self) -> int | None:
        """Return how many batches the next pass yields.

        Unlike `len()`, which is that of a whole epoch, this counts from the place where a resumed
        epoch goes on. Not collective.

        Returns:
            The number, which is the same on all ranks unless `uneven="exact"`; None where only
            the end of the pass tells: with samplers, iterable datasets and `shard=False`.
        """
        return self._shards.steps_left()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        The current epoch keeps its place, so `set_epoch(loader.epoch)` changes nothing. Calling
        this is never necessary. Not collective, but every rank must set the same epoch: ranks that
        differ get a `GroupError` at the second step of the pass.

        Args:
            epoch: At least 0.

        Raises:
            ConfigError: If `epoch` is not such a number.
        """
        self._shards.set_epoch(check_number("epoch", epoch, least=0))

    def peek(self) -> Any:
        """Return the batch that comes next, and leave everything as it is.

        The batch is loaded in this process, without workers. An iterable dataset is iterated for it
        from its beginning, or from its state. Not collective.

        Returns:
            The next batch; at the end of an epoch the first one of the next epoch.

        Raises:
            ConfigError: If this rank has no batch at all, or an iterable dataset splits itself
                between workers (`shard=False`), which only they can see, or is its own iterator
                and used by a pass.
        """
        if self._share.is_stream and not self._share.shard:
            raise ConfigError(
                "peek() cannot tell what comes next of an iterable dataset that splits itself "
                "(shard=False). Look at a batch inside the loop."
            )
        if self._share.is_stream and self._shards.place.is_open and _is_own_iterator(self.dataset):
            raise ConfigError(
                f"peek() would take the {type(self.dataset).__qualname__} away from the pass that "
                "is under way, for it is its own iterator. Let its __iter__ return a new one."
            )
        server = copy.copy(self._server)
        server.collate_fn = self.collate_fn
        with server.preserving_the_dataset():
            for number, (place, keys) in enumerate(self._shards.upcoming()):
                # Negative, for these are none of the passes that ranks compare.
                current = self._pass_at(place, -1 - number)
                batch, note = server[tuple(current), place.consumed, keys]
                if note is None or not note.is_empty:
                    return move(batch, self._device)
        raise ConfigError(
            f"peek() has no batch to return: there are {self._share.length or 0} samples for "
            f"{self._share.world_size} ranks. Check `len(loader)` first."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and what the order depends on.

        Returns:
            A small dictionary of numbers and words, the same on all ranks; with the state of an
            iterable dataset that has one, as `"dataset"`.
        """
        place = self._shards.told_place
        if place.is_end:
            place = Place(place.epoch + 1)
        state = {"epoch": place.epoch, "consumed": place.consumed, **self._identity()}
        return state if place.source_state is None else {**state, "dataset": place.source_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, in the middle of an epoch or between two.

        The rest of the epoch is exactly what was not consumed, for any number of ranks, batch size
        and number of workers. `uneven="exact"` over a dataset with keys, and `shard=False`, need
        the same number of ranks. A place at the end of an epoch is the beginning of the next one;
        for an iterable dataset, whose end only a pass finds, that pass yields nothing. A pass that
        is under way does not count any more. Not collective, but every rank must load the same
        state.

        Args:
            state: What `state_dict()` returned.

        Raises:
            ConfigError: If the state is of a loader with another order, seed or number of samples.
        """
        _check_state(state, self._identity())
        source_state = state.get("dataset") if state["consumed"] else None
        self._shards.restore(state["epoch"], state["consumed"], source_state)

    def _identity(self) -> dict[str, Any]:
        identity = self._share.identity()
        if self._share.is_stream and not self._share.shard:
            identity["num_workers"] = self.num_workers
        return identity


def _kind(share: _Share, shards: ShardSampler) -> dict[str, Any]:
    """Return what makes DataLoader see the same kind of loader as the user does."""
    if share.is_stream:
        return {"batch_size": share.batch_size, "drop_last": share.drop_last}
    if share.is_unbatched:
        return {"sampler": shards, "batch_size": None}
    return {"batch_sampler": shards}


def _is_own_iterator(dataset: object) -> bool:
    return hasattr(type(dataset), "__next__")


class _Requests:
    """What torch's DataLoader takes for a sampler: the requests of the current pass."""

    pending: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.pending


class _Engine(DataLoader[Reply]):
    """The DataLoader that starts the workers, with the options of the one that users see."""

    def __init__(self, loader: ShardedLoader[Any], server: Server) -> None:
        self.requests = _Requests()
        options = {}
        if loader.num_workers:
            options = {
                "timeout": loader.timeout,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
                "worker_init_fn": WorkerSetup(loader.worker_init_fn),
            }
        super().__init__(
            server,
            batch_size=None,
            sampler=self.requests,
            collate_fn=_as_it_is,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            **options,
        )

    def check_worker_number_rationality(self) -> None:
        """Leave the warning to the loader that users see, which has given it once."""


def _as_it_is(reply: Any) -> Any:
    return reply


def _until_the_end(replies: Iterator[Reply], layout: Layout, *, workers: int) -> Iterator[Reply]:
    """Yield replies with batches until as many workers as needed have no more."""
    ended: set[int] = set()
    first_items: set[str] = set()
    for batch, note in replies:
        assert note is not None  # streams have something to say of each batch
        if note.first_item is not None:
            first_items.add(note.first_item)
        if len(first_items) > 1:
            raise GroupError(
                "The workers of this rank began to iterate with different items, so the dataset "
                "cannot be split by positions. If a worker_init_fn splits it between workers, "
                "leave that out; if it splits itself between ranks too, pass shard=False. If it "
                "shuffles, let it do so by torch's, numpy's or random's global stream, which is "
                "the same in all workers there, or by a seed of its own and the epoch."
            )
        if note.is_last:
            _announce_tail(layout, note.units or 0)
        if not note.is_empty:
            yield batch, note
            continue
        ended.add(note.worker)
        if len(ended) >= workers:
            return


def _announce_tail(layout: Layout, units: int) -> None:
    """Say what only the end of a stream tells."""
    repeated, dropped = layout.repeated(units), layout.dropped(units)
    if layout.rank == 0 and (repeated or dropped):
        _logger.info("%d repeated and %d dropped at the end of this pass", repeated, dropped)


# ------------------------------------------------------------------------------------ who gets what


@dataclasses.dataclass(frozen=True)
class _Ranks:
    rank: int
    size: int
    communicate: bool = False


def _find_ranks(num_replicas: int | None, rank: int | None) -> _Ranks:
    if num_replicas is None and rank is None:
        if require_group("sharded_loader"):
            return _Ranks(get_rank(), get_world_size(), communicate=True)
        return _Ranks(0, 1)
    if num_replicas is None or rank is None:
        raise ConfigError(
            f"num_replicas={num_replicas} and rank={rank} were given. Give both, or neither to use "
            "the process group."
        )
    size = check_number("num_replicas", num_replicas, least=1)
    place = check_number("rank", rank, least=0)
    if place >= size:
        raise ConfigError(f"rank={rank} was given; expected 0 to {size - 1}")
    return _Ranks(place, size)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The batches of one rank and what they depend on."""

    batches: Batches
    layout: Layout
    length: int | None
    """Samples of all ranks together; None for an iterable dataset."""
    seed: int
    batch_size: int | None
    is_stream: bool
    is_unbatched: bool
    shard: bool

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def uneven(self) -> Uneven:
        return self.layout.uneven

    @property
    def drop_last(self) -> bool:
        return self.layout.drop_last

    @property
    def needs_same_ranks(self) -> bool:
        """Whether a place inside an epoch means nothing to another number of ranks."""
        return not self.shard or (self.uneven == "exact" and not self.is_stream)

    def identity(self) -> dict[str, Any]:
        """Return what a saved place depends on."""
        return {
            "length": self.length,
            "seed": self.seed,
            "order": self.batches.order,
            "split": "by rank" if self.needs_same_ranks else "by step",
            "world_size": self.world_size,
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by the names that a message shows."""
        return {
            "shard": self.shard,
            **({"number of samples": self.length} if self.shard else {}),
            "seed": self.seed,
            "order": self.batches.order,
            "uneven": self.uneven,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }


def _plan(recipe: Recipe[Any], ranks: _Ranks, *, uneven: Uneven, seed: int, shard: bool) -> _Share:
    batch_size = _batch_size_of_a_rank(recipe, ranks.size)
    layout = Layout(batch_size or 1, ranks.size, ranks.rank, uneven, recipe.drop_last)
    batches = _choose_batches(recipe, layout, seed, shard=shard)
    return _Share(
        batches if shard else OwnBatches(batches, layout, steps=None),
        layout,
        length=None if recipe.is_stream else len(cast("Any", recipe.dataset)),
        seed=seed,
        batch_size=batch_size,
        is_stream=recipe.is_stream,
        is_unbatched=recipe.is_unbatched,
        shard=shard,
    )


def _batch_size_of_a_rank(recipe: Recipe[Any], world_size: int) -> int | None:
    if recipe.global_batch_size is None:
        return recipe.batch_size
    if recipe.global_batch_size % world_size:
        lower = recipe.global_batch_size // world_size * world_size
        raise ConfigError(
            f"global_batch_size={recipe.global_batch_size} cannot be divided between {world_size} "
            f"ranks. Expected a multiple of {world_size}, such as {lower or lower + world_size}."
        )
    return recipe.global_batch_size // world_size


def _choose_batches(recipe: Recipe[Any], layout: Layout, seed: int, *, shard: bool) -> Batches:
    if not shard:
        layout = dataclasses.replace(layout, world_size=1, rank=0)
    if recipe.is_stream:
        return StreamBatches(recipe.dataset, layout)
    length = len(cast("Any", recipe.dataset))
    if recipe.batch_sampler is not None:
        return DrawnBatches(recipe.batch_sampler, layout, seed=seed, by_batch=True)
    if recipe.sampler is not None:
        return DrawnBatches(recipe.sampler, layout, seed=seed, by_batch=False)
    if layout.uneven == "exact":
        return BlockBatches(
            length, batch_size=layout.batch_size, world_size=layout.world_size, rank=layout.rank
        )
    return ComputedBatches(length, layout, seed=seed, shuffle=recipe.shuffle)


def _agree_on(share: _Share, dataset: Any) -> tuple[_Share, PassCheck]:
    """Compare the ranks, and let those that have parts of their own agree on an epoch."""
    orders = {}
    if share.shard and share.length is not None:
        orders = digests_of_order(dataset, share.length)
    known_steps = None if share.is_stream or share.shard else _steps_or_none(share.batches)
    mine = (share.fingerprint(), orders, share.length, known_steps)
    fingerprints, all_orders, lengths, steps = zip(
        *exchange(mine, name="sharded_loader"), strict=True
    )
    _compare_fingerprints(fingerprints)
    _compare_orders(all_orders)
    check = PassCheck(get_channel(), equal_steps=share.uneven != "exact")
    if share.shard or share.is_stream:
        return share, check
    own = cast("OwnBatches", share.batches).batches
    fewest = None if share.uneven == "exact" or None in steps else min(steps)
    batches = OwnBatches(own, share.layout, steps=fewest)
    return dataclasses.replace(share, batches=batches, length=sum(lengths)), check


def _steps_or_none(batches: Batches) -> int | None:
    try:
        return batches.steps()
    except TypeError:  # a sampler without a length
        return None


def _compare_fingerprints(fingerprints: Sequence[Mapping[str, Any]]) -> None:
    for name, value in fingerprints[0].items():
        others = [rank for rank, other in enumerate(fingerprints) if other[name] != value]
        if others:
            raise GroupError(
                f"sharded_loader: {name} is {value} on rank 0, but {fingerprints[others[0]][name]} "
                f"on {name_ranks(others)}. Every rank must see the same dataset and the same "
                "options; split nothing by rank before, or pass shard=False."
            )


def _compare_orders(orders: Sequence[Mapping[str, str]]) -> None:
    for name, digest in orders[0].items():
        others = [rank for rank, other in enumerate(orders) if other.get(name, digest) != digest]
        if others:
            raise GroupError(
                f"sharded_loader: {name} has other elements on {name_ranks(others)} than on rank "
                "0, so samples would be seen twice or never. Does the dataset shuffle or list its "
                "files in a random order when it is made? Let it sort them, or draw from a "
                "generator of its own with the same seed on all ranks (after seed_everything() the "
                "global ones differ); pass shard=False if each rank has made its own part."
            )


# --------------------------------------------------------------------------------- what people see


def _announce(share: _Share) -> None:
    batch_size, ranks = share.batch_size or 1, share.world_size
    if share.batches.order == "batch_sampler":
        _logger.info("%d batches of the batch sampler in one step", ranks)
    else:
        _logger.info(
            "effective batch size %d (%d ranks x %d), %s",
            *(batch_size * ranks, ranks, batch_size, _describe(share)),
        )
    if isinstance(share.batches, ComputedBatches):
        _warn_of_surprises(share.batches)


def _describe(share: _Share) -> str:
    if share.is_stream:
        how = "split by position" if share.shard else "split by the dataset itself"
        return f"an iterable dataset, {how}"
    samples = f"{share.length} samples"
    if isinstance(share.batches, BlockBatches):
        return f"{samples}, of which rank 0 takes the first {len(share.batches.block)}"
    if isinstance(share.batches, ComputedBatches):
        return f"{samples}, {_describe_steps(share.batches)}"
    return f"{samples}, {'as drawn' if share.shard else 'in parts that ranks had before'}"


def _describe_steps(batches: ComputedBatches) -> str:
    layout, length = batches.layout, batches.length
    each = (length - layout.dropped(length) + layout.repeated(length)) // layout.world_size
    return (
        f"of which each rank takes {each} in {batches.steps()} steps; "
        f"{layout.repeated(length)} repeated and {layout.dropped(length)} dropped in each epoch"
    )


def _warn_of_surprises(batches: ComputedBatches) -> None:
    layout, length = batches.layout, batches.length
    if batches.order == "sequential" and layout.repeated(length):
        warnings.warn(
            f"this unshuffled loader repeats {layout.repeated(length)} of {length} samples so that "
            f"{layout.world_size} ranks get equal batches, which makes sums and scores slightly "
            "wrong. For evaluation use uneven='exact'.",
            stacklevel=4,
        )
    if length and not batches.steps():
        warnings.warn(
            f"this loader yields no batch: {length} samples are fewer than one step needs "
            f"({layout.world_size} ranks x {layout.batch_size}, uneven={layout.uneven!r}, "
            f"drop_last={layout.drop_last}). Use a smaller batch or uneven='pad'.",
            stacklevel=4,
        )


# ------------------------------------------------------------------------------------- saved places


def _check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    missing = [name for name in ("epoch", "consumed", *identity) if name not in state]
    if missing:
        raise ConfigError(
            f"this is not the state of such a loader: {', '.join(missing)} is missing in "
            f"{dict(state)!r}. Expected what state_dict() of a sharded_loader returns."
        )
    check_number("epoch", state["epoch"], least=0)
    check_number("consumed", state["consumed"], least=0)
    for name in ("length", "seed", "order"):
        if state[name] != identity[name]:
            raise ConfigError(
                f"the state was saved with {name}={state[name]!r}, but this loader has "
                f"{name}={identity[name]!r}, so its order is another one. Make the loader as it "
                "was, or begin anew without loading the state."
            )
    if state["consumed"]:
        _check_split(state, identity)


def _check_split(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    names = ["split"]
    if identity["split"] == "by rank":
        names += [name for name in ("world_size", "num_workers") if name in identity]
    for name in names:
        if state[name] != identity[name]:
            raise ConfigError(
                f"the state was saved inside an epoch with {name}={state[name]!r}, but this loader "
                f"has {name}={identity[name]!r}. With uneven='exact' and with shard=False a place "
                "is one in the part of each rank: resume with the same number of ranks and "
                "workers, or save between epochs."
            )
