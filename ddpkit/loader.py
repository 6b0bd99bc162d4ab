"""`sharded_loader()`: a DataLoader that gives each rank its share, epoch after epoch.

`sharded_loader` decides (what is asked for, is it possible, which batches) and `ShardedLoader`
acts: it is torch's DataLoader with a `ShardSampler` for batch sampler, which counts what the loop
receives.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import accelerator_type, get_rank, get_world_size, name_ranks, require_group
from ddpkit.permutation import derive_seed
from ddpkit.sampler import (
    Batches,
    BlockBatches,
    ComputedBatches,
    DrawnBatches,
    Layout,
    Place,
    PrivateRandomness,
    ShardSampler,
    layers,
    tell_epoch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ShardedLoader", "sharded_loader"]

T_co = TypeVar("T_co", covariant=True)

Uneven = Literal["pad", "drop", "exact"]

_logger = logging.getLogger(__name__)

_OPTIONS_OF_TORCH = frozenset(inspect.signature(DataLoader.__init__).parameters) - {"self"}

# What DataLoader refuses unless it has workers.
_OPTIONS_FOR_WORKERS = frozenset(
    {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
)


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

    Collective: every rank must call this, because the ranks compare length, seed and batch size
    once. In a world of one, and where `num_replicas` and `rank` are given, nothing is communicated.
    No rank talks to another during an epoch.

    Step k of an epoch is the k-th global batch of an order that depends on seed and epoch only;
    each rank gets its contiguous slice. The epoch advances by itself after each pass. The state
    (`state_dict()`) is the same on all ranks, and what is left of an epoch goes on from it with any
    number of ranks, any batch size and any number of workers, without loading what it skips.

    Args:
        source: A dataset with a length, or an existing `DataLoader`, whose options are kept unless
            given here: its batch size is per rank, its `RandomSampler` becomes `shuffle=True`,
            other samplers are split between ranks. Its generator is replaced, see `seed`.
        batch_size: Samples of one rank in one step; 1 unless given.
        global_batch_size: Instead of `batch_size`: samples of all ranks in one step.
        shuffle: Whether every epoch has a new order. Not together with a sampler.
        seed: Decides the order, together with the epoch, and the random streams of the workers,
            together with epoch and rank.
        uneven: What happens when ranks do not divide the samples. `"pad"` repeats a few from the
            head of the order (at most one less than there are ranks), `"drop"` leaves a few out;
            both give all ranks equal batches at every step. `"exact"` is for evaluation without
            collectives inside the loop: every sample once, in one contiguous block of the dataset
            for each rank.
        sampler: Any sampler. It is drawn identically on all ranks, then split. A
            `batch_sampler=` is split by batches.
        shard: False for a dataset that each rank has made its own part of: every rank then goes
            through the whole of its dataset.
        num_replicas: Number of ranks, instead of the size of the group; needs `rank`.
        rank: This rank, instead of the rank in the group; needs `num_replicas`.
        device: Where batches are moved, without blocking where memory is pinned.
        **dataloader_options: What `torch.utils.data.DataLoader` takes besides. `drop_last=True`
            leaves out a last step that is not full. Memory is pinned where there is an
            accelerator, unless `pin_memory=False`.

    Returns:
        A loader, which is a `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: If options are wrong or contradict each other, or `source` is an iterable
        dataset.
        GroupError: If ranks were given different lengths or options, or no group is open though a
            launcher started several ranks.

    Example:
        >>> loader = sharded_loader(list(range(10)), batch_size=4, shuffle=True)
        >>> for epoch in range(2):
        ...     seen = torch.cat(list(loader))
        >>> loader.epoch, sorted(seen.tolist())
        (2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    recipe = _read_source(source).override(
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        sampler=sampler,
        options=dataloader_options,
    )
    recipe.check(uneven, seed)
    ranks = _find_ranks(num_replicas, rank)
    share = _plan(recipe, ranks, uneven=uneven, seed=seed, shard=shard)
    if ranks.communicate:
        _compare_ranks(share.fingerprint())
    if ranks.rank == 0:
        _announce(share)
    return ShardedLoader(
        recipe.dataset,
        share,
        random_stream=ranks.rank,
        device=None if device is None else torch.device(device),
        unbatched=recipe.is_unbatched,
        options=_with_pinning(recipe.options),
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
        random_stream: int,
        device: torch.device | None,
        unbatched: bool,
        options: Mapping[str, Any],
    ) -> None:
        shards = ShardSampler(share.batches, unbatched=unbatched)
        kind = {"sampler": shards, "batch_size": None} if unbatched else {"batch_sampler": shards}
        super().__init__(dataset, generator=torch.Generator(), **kind, **options)
        # DataLoader knows no batch size beside a batch sampler, and would show a sequential
        # sampler. Scripts read the one and call set_epoch of the other. It refuses to set them
        # itself.
        vars(self).update(batch_size=share.batch_size, drop_last=share.drop_last, sampler=shards)
        self._shards = shards
        self._share = share
        self._random_stream = random_stream
        self._device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        place = self._shards.begin()
        tell_epoch(layers(self.dataset, "dataset"), place.epoch)
        self.generator.manual_seed(self._seed_of("workers", place))
        return self._run(super().__iter__(), place)

    def _run(self, batches: Iterator[Any], place: Place) -> Iterator[Any]:
        try:
            for batch in batches:
                moved = _move(batch, self._device)
                place = self._shards.receive(place)
                yield moved
        except GeneratorExit:
            self._shards.end(place)
            raise
        self._shards.end(place)

    @property
    def epoch(self) -> int:
        """The epoch of the current or next pass."""
        return self._shards.place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        The current epoch keeps its place, so `set_epoch(loader.epoch)` changes nothing. Calling
        this is never necessary. Not collective, but every rank must set the same epoch.

        Args:
            epoch: At least 0.

        Raises:
            ConfigError: If `epoch` is not such a number.
        """
        _check_number("epoch", epoch, least=0)
        self._shards.set_epoch(epoch)

    def peek(self) -> Any:
        """Return the batch that comes next, and leave everything as it is.

        The batch is loaded in this process, without workers, and random numbers that the dataset
        draws for it come from a stream of their own. Not collective.

        Returns:
            The next batch; at the end of an epoch the first one of the next epoch.

        Raises:
            ConfigError: If this rank has no batch at all.
        """
        found = self._shards.peek()
        if found is None:
            raise ConfigError(
                f"peek() has no batch to return: there are {self._share.length} samples for "
                f"{self._share.world_size} ranks. Check `len(loader)` first."
            )
        epoch, keys = found
        tell_epoch(layers(self.dataset, "dataset"), epoch)
        with PrivateRandomness(self._seed_of("peek", self._shards.place)).borrowed():
            batch = self.collate_fn(_fetch(self.dataset, keys, single=not self._auto_collation))
        return _move(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch and what the order depends on.

        Returns:
            A small dictionary of numbers and words, the same on all ranks.
        """
        place = self._shards.place
        return {"epoch": place.epoch, "consumed": place.consumed, **self._share.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, in the middle of an epoch or between two.

        The rest of the epoch is exactly what was not consumed, for any number of ranks, batch size
        and number of workers. `uneven="exact"` needs the same number of ranks. A place at the end
        of an epoch is the beginning of the next one. A pass that is under way does not count any
        more. Not collective, but every rank must load the same state.

        Args:
            state: What `state_dict()` returned.

        Raises:
            ConfigError: If the state is of a loader with another order, seed or number of samples.
        """
        _check_state(state, self._share.identity())
        self._shards.restore(state["epoch"], state["consumed"])

    def _seed_of(self, purpose: str, place: Place) -> int:
        return derive_seed(
            purpose, self._share.seed, place.epoch, place.consumed, self._random_stream
        )


# -------------------------------------------------------------------------------- what is asked for


@dataclasses.dataclass(frozen=True)
class _Recipe(Generic[T_co]):
    """What a loader is to be made of, before anything is known of ranks."""

    dataset: Dataset[T_co]
    batch_size: int | None = 1
    global_batch_size: int | None = None
    shuffle: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    drop_last: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_unbatched(self) -> bool:
        return (
            self.batch_size is None
            and self.global_batch_size is None
            and self.batch_sampler is None
        )

    def override(
        self,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        shuffle: bool | None,
        sampler: Iterable[Any] | None,
        options: Mapping[str, Any],
    ) -> _Recipe[T_co]:
        """Replace what was given."""
        _check_options(options)
        _check_alternatives(batch_size, global_batch_size, shuffle, sampler)
        changes: dict[str, Any] = {"options": _merge_options(self.options, options)}
        changes |= {k: options[k] for k in ("batch_sampler", "drop_last") if k in options}
        if batch_size is not None or global_batch_size is not None:
            changes |= {"batch_size": batch_size, "global_batch_size": global_batch_size}
        if shuffle is not None or sampler is not None:
            changes |= {"shuffle": bool(shuffle), "sampler": sampler}
        if changes.get("batch_sampler", self.batch_sampler) is not None:
            _check_batch_sampler_alone(changes)
            changes |= {"batch_size": None, "shuffle": False, "sampler": None, "drop_last": False}
        return dataclasses.replace(self, **changes)

    def check(self, uneven: str, seed: object) -> None:
        """Refuse what cannot be done, whatever the ranks."""
        _check_number("seed", seed)
        _check_dataset(self.dataset)
        for sampler in (self.sampler, self.batch_sampler):
            _check_not_split_yet(sampler)
        for name in ("batch_size", "global_batch_size"):
            if (size := getattr(self, name)) is not None:
                _check_number(name, size, least=1)
        if uneven not in ("pad", "drop", "exact"):
            raise ConfigError(f"uneven={uneven!r} is not one of 'pad', 'drop' and 'exact'")
        if uneven == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        names = ("shuffle", "sampler", "batch_sampler", "drop_last")
        asked = [name for name in names if getattr(self, name)]
        if asked:
            raise ConfigError(
                f"uneven='exact' gives every sample once in the order of the dataset, so it cannot "
                f"be used together with {', '.join(asked)}. Leave that out (for an existing "
                "DataLoader pass shuffle=False, drop_last=False), or use uneven='pad' or 'drop'."
            )


def _read_source(source: Dataset[T_co] | Sequence[T_co] | DataLoader[T_co]) -> _Recipe[T_co]:
    if isinstance(source, DataLoader):
        return _adopt(source)
    return _Recipe(cast("Dataset[T_co]", source))


def _adopt(loader: DataLoader[T_co]) -> _Recipe[T_co]:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"a {type(loader).__qualname__} iterates in a way of its own, which sharded_loader "
            "would lose. Pass its dataset and its options instead."
        )
    recipe = _Recipe(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        options=_kept_options(loader),
    )
    if loader.batch_size is None and loader.batch_sampler is not None:
        return dataclasses.replace(recipe, batch_sampler=loader.batch_sampler)
    return dataclasses.replace(recipe, **_read_sampler(loader.sampler, loader.dataset))


def _read_sampler(sampler: Any, dataset: Any) -> dict[str, Any]:
    """Recognise the samplers that DataLoader makes itself, and keep any other."""
    if isinstance(dataset, IterableDataset):
        return {}
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return {"sampler": sampler}
    once = len(sampler) == len(sampler.data_source) == len(dataset)
    if once and not getattr(sampler, "replacement", False):
        return {"shuffle": type(sampler) is RandomSampler}
    return {"sampler": sampler}


_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def _kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Read the options that a loader was made with, less those that DataLoader chose itself."""
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS if hasattr(loader, name)}
    if options["collate_fn"] in (default_collate, default_convert):
        del options["collate_fn"]
    return options


def _merge_options(kept: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**kept, **given}
    if not merged.get("num_workers"):
        merged = {k: v for k, v in merged.items() if k in given or k not in _OPTIONS_FOR_WORKERS}
    return {k: v for k, v in merged.items() if k not in ("batch_sampler", "drop_last")}


def _with_pinning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pin memory where that is of use: torch warns in every pass where it is not."""
    can_pin = accelerator_type() not in (None, "mps")
    return {**options, "pin_memory": can_pin and options.get("pin_memory", True)}


# --------------------------------------------------------------------------------- what is possible


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - _OPTIONS_OF_TORCH)
    if unknown:
        raise ConfigError(
            f"sharded_loader got {', '.join(unknown)}, which neither it nor DataLoader knows. "
            f"DataLoader takes {', '.join(sorted(_OPTIONS_OF_TORCH))}."
        )
    if options.get("generator") is not None:
        raise ConfigError(
            "generator= would make the random streams of all ranks alike. Pass seed= instead: the "
            "order and a generator for each rank follow from it."
        )
    if not options.get("in_order", True):
        raise ConfigError(
            "in_order=False lets batches come in any order, so no place in the epoch could be "
            "saved. Leave it out."
        )


def _check_alternatives(
    batch_size: object, global_batch_size: object, shuffle: object, sampler: object
) -> None:
    if batch_size is not None and global_batch_size is not None:
        raise ConfigError(
            f"batch_size={batch_size} (of each rank) and global_batch_size={global_batch_size} (of "
            "all ranks together) were both given. Give one of them."
        )
    if shuffle and sampler is not None:
        raise ConfigError(
            "shuffle=True and sampler= were both given, and both decide the order. Give one "
            "of them."
        )


def _check_batch_sampler_alone(changes: Mapping[str, Any]) -> None:
    names = ("batch_size", "global_batch_size", "shuffle", "sampler", "drop_last")
    given = [name for name in names if changes.get(name)]
    if given:
        raise ConfigError(
            f"a batch sampler decides the batches alone, but {', '.join(given)} was given too. "
            "Leave that out, or pass the dataset without the batch sampler."
        )


def _check_number(name: str, value: Any, *, least: int | None = None) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or (least is not None and value < least):
        expected = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigError(f"{name}={value!r} was given; expected {expected}")


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"sharded_loader does not split iterable datasets such as {type(dataset).__qualname__} "
            "yet. Use a plain DataLoader and let the dataset skip what other ranks take "
            "(get_rank(), get_world_size()), or give it __getitem__ and __len__."
        )
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"a {type(dataset).__qualname__} has no __len__, and ranks cannot share what has no "
            "length. Give the dataset __len__ and __getitem__."
        )


def _check_not_split_yet(sampler: object) -> None:
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise ConfigError(
            f"the {type(sampler).__qualname__} splits the samples between ranks already, and "
            "sharded_loader would split them once more. Leave the sampler out and pass "
            "shuffle=True or False."
        )


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
    _check_number("num_replicas", num_replicas, least=1)
    _check_number("rank", rank, least=0)
    if rank >= num_replicas:
        raise ConfigError(f"rank={rank} was given; expected 0 to {num_replicas - 1}")
    return _Ranks(rank, num_replicas)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The batches of one rank and what they depend on."""

    batches: Batches
    length: int
    seed: int
    uneven: Uneven
    batch_size: int | None
    world_size: int
    drop_last: bool

    def identity(self) -> dict[str, Any]:
        """Return what a saved place depends on."""
        return {
            "length": self.length,
            "seed": self.seed,
            "order": self.batches.order,
            "uneven": self.uneven,
            "world_size": self.world_size,
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by the names that a message shows."""
        return {
            "number of samples": self.length,
            "seed": self.seed,
            "order": self.batches.order,
            "uneven": self.uneven,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "share": f"1/{self.world_size}",
        }


def _plan(recipe: _Recipe[Any], ranks: _Ranks, *, uneven: Uneven, seed: int, shard: bool) -> _Share:
    batch_size = _batch_size_of_a_rank(recipe, ranks.size)
    if not shard:
        ranks = _Ranks(0, 1)
    length = len(cast("Sized", recipe.dataset))
    return _Share(
        _choose_batches(recipe, length, batch_size or 1, ranks, uneven=uneven, seed=seed),
        length=length,
        seed=seed,
        uneven=uneven,
        batch_size=batch_size,
        world_size=ranks.size,
        drop_last=recipe.drop_last,
    )


def _batch_size_of_a_rank(recipe: _Recipe[Any], world_size: int) -> int | None:
    if recipe.global_batch_size is None:
        return recipe.batch_size
    if recipe.global_batch_size % world_size:
        lower = recipe.global_batch_size // world_size * world_size
        raise ConfigError(
            f"global_batch_size={recipe.global_batch_size} cannot be divided between {world_size} "
            f"ranks. Expected a multiple of {world_size}, such as {lower or lower + world_size}."
        )
    return recipe.global_batch_size // world_size


def _choose_batches(
    recipe: _Recipe[Any],
    length: int,
    batch_size: int,
    ranks: _Ranks,
    *,
    uneven: Uneven,
    seed: int,
) -> Batches:
    if uneven == "exact":
        return BlockBatches(length, batch_size=batch_size, world_size=ranks.size, rank=ranks.rank)
    layout = Layout(batch_size, ranks.size, ranks.rank, uneven, recipe.drop_last)
    if recipe.batch_sampler is not None:
        return DrawnBatches(recipe.batch_sampler, layout, seed=seed, by_batch=True)
    if recipe.sampler is not None:
        return DrawnBatches(recipe.sampler, layout, seed=seed, by_batch=False)
    return ComputedBatches(length, layout, seed=seed, shuffle=recipe.shuffle)


def _compare_ranks(fingerprint: Mapping[str, Any]) -> None:
    everyone = exchange(fingerprint, name="sharded_loader")
    for name, value in everyone[0].items():
        others = [rank for rank, other in enumerate(everyone) if other[name] != value]
        if others:
            raise GroupError(
                f"sharded_loader: {name} is {value} on rank 0, but {everyone[others[0]][name]} on "
                f"{name_ranks(others)}. Every rank must see the same dataset and the same options; "
                "split nothing by rank before."
            )


def _announce(share: _Share) -> None:
    if share.batches.order == "batch_sampler":
        _logger.info("%d batches of the batch sampler in one step", share.world_size)
    else:
        batch_size = share.batch_size or 1
        _logger.info(
            "effective batch size %d (%d ranks x %d), %d samples, %s",
            batch_size * share.world_size,
            share.world_size,
            batch_size,
            share.length,
            _describe_rest(share.batches),
        )
    if isinstance(share.batches, ComputedBatches):
        _warn_of_surprises(share.batches)


def _describe_rest(batches: Batches) -> str:
    if not isinstance(batches, ComputedBatches):
        return "in one block for each rank" if isinstance(batches, BlockBatches) else "as drawn"
    layout, length = batches.layout, batches.length
    return f"{layout.repeated(length)} repeated and {layout.dropped(length)} dropped in each epoch"


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


# ------------------------------------------------------------------------------------- small
# effects


def _check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    missing = [name for name in ("epoch", "consumed", *identity) if name not in state]
    if missing:
        raise ConfigError(
            f"this is not the state of a loader: {', '.join(missing)} is missing in "
            f"{dict(state)!r}. Expected what state_dict() of a sharded_loader returns."
        )
    _check_number("epoch", state["epoch"], least=0)
    _check_number("consumed", state["consumed"], least=0)
    for name in ("length", "seed", "order"):
        if state[name] != identity[name]:
            raise ConfigError(
                f"the state was saved with {name}={state[name]!r}, but this loader has "
                f"{name}={identity[name]!r}, so its order is another one. Make the loader as it "
                "was, or begin anew without loading the state."
            )
    if "exact" in (state["uneven"], identity["uneven"]):
        _check_same_blocks(state, identity)


def _check_same_blocks(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    saved, here = [(s["uneven"], s["world_size"]) for s in (state, identity)]
    if saved != here and state["consumed"]:
        raise ConfigError(
            f"the state was saved inside an epoch with uneven={saved[0]!r} on {saved[1]} ranks, "
            f"but this loader has uneven={here[0]!r} on {here[1]} ranks. With uneven='exact' a "
            "place is one in the block of each rank: resume with the same number of ranks, or save "
            "between epochs."
        )


def _fetch(dataset: Any, keys: Any, *, single: bool) -> Any:
    if single:
        return dataset[keys]
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(keys)
    return [dataset[key] for key in keys]


def _move(batch: Any, device: torch.device | None) -> Any:
    """Move what can be moved in nested containers, keeping their types."""
    if device is None:
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update({key: _move(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_move(value, device) for value in batch)
    return batch
