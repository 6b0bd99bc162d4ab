"""Which sample goes to which rank at which step.

Everything here is arithmetic on (length, batch size, world size, rank, epoch, consumed): no
communication and no processes. An epoch is a *global order* of units. Step k takes the units `[k *
G, (k + 1) * G)` of it, G being the batch of all ranks together, and rank r gets its contiguous
slice of those. So what is left of an epoch follows from how many units all ranks have `consumed`,
and the epoch can go on with another world size or another batch size.

Sources of batches know this, and `ShardSampler` keeps the place in one of them:
- `ComputedBatches`: the order is a formula (in sequence, or shuffled by `Permutation`).
- `DrawnBatches`: the order is what a `Sampler` draws, the same on all ranks. The units are samples,
  or whole batches where a batch sampler draws.
- `BlockBatches`: every sample once, in one contiguous block for each rank (`uneven="exact"`).
- `OwnBatches`: what a rank has of its own already (`shard=False`).
- `stream.StreamBatches`: the positions in an iterable dataset.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.data import Sampler

from ddpkit.errors import ConfigError
from ddpkit.permutation import BLOCK, Permutation, derive_seed
from ddpkit.randomness import PrivateRandomness
from ddpkit.windows import current_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

__all__ = [
    "Batches",
    "BlockBatches",
    "ComputedBatches",
    "DrawnBatches",
    "Layout",
    "Note",
    "OwnBatches",
    "Place",
    "ShardSampler",
    "Uneven",
    "begun_once",
    "even_part",
    "layers",
    "tell_epoch",
    "wrapped_datasets",
]

FIRST_BLOCK = 2**10

Uneven = Literal["pad", "drop", "exact"]


@dataclass(frozen=True)
class Layout:
    """How the units of a global order are cut into steps, and a step into shares.

    Example:
        >>> layout = Layout(batch_size=2, world_size=2, rank=0, uneven="pad")
        >>> layout.steps(9), layout.bounds(1), layout.repeated(9)
        (3, (0, 1), 1)
    """

    batch_size: int
    """Units of one rank in one step."""
    world_size: int
    """Number of ranks."""
    rank: int
    """Whose share is meant."""
    uneven: Uneven
    """Whether the last step gives ranks equal shares, by repeating a few units or by leaving a few
    out, or shares that differ by at most one."""
    drop_last: bool = False
    """Whether a last step of fewer than `global_batch` units is left out."""

    @property
    def global_batch(self) -> int:
        """Units of all ranks in one step."""
        return self.batch_size * self.world_size

    def padded(self, size: int) -> int:
        """Return how many units all ranks get in a step of this size, repeated ones included."""
        if size == self.global_batch or (self.uneven == "exact" and not self.drop_last):
            return size
        if self.drop_last:
            return 0
        up = self.world_size - 1 if self.uneven == "pad" else 0
        return (size + up) // self.world_size * self.world_size

    def bounds(self, size: int) -> tuple[int, int]:
        """Return where this rank's share of a step of this size begins and ends."""
        return even_part(self.padded(size), self.world_size, self.rank)

    def steps(self, units: int) -> int:
        """Return how many steps these units make for this rank."""
        start, stop = self.bounds(units % self.global_batch)
        return units // self.global_batch + (stop > start)

    def repeated(self, units: int) -> int:
        """Return how many units are given out twice."""
        return max(0, self._given_out(units) - units)

    def dropped(self, units: int) -> int:
        """Return how many units nobody gets."""
        return max(0, units - self._given_out(units))

    def _given_out(self, units: int) -> int:
        tail = units % self.global_batch
        return units - tail + self.padded(tail)


def even_part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where one of several contiguous parts begins and ends; sizes differ by at most one.

    Args:
        size: What is divided.
        parts: Into how many.
        index: Which part is meant.

    Example:
        >>> [even_part(5, 3, index) for index in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    share, longer = divmod(size, parts)
    start = index * share + min(index, longer)
    return start, start + share + (index < longer)


class Batches(Protocol):
    """This rank's batches of any epoch, from any place: `consumed` units of all ranks together."""

    order: str
    """What decides the global order; a saved place means nothing in another order."""

    def stream(self, epoch: int, consumed: int) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        ...

    def steps(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        ...

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        ...

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left of the epoch, on any rank."""
        ...


class ComputedBatches:
    """Batches of an order that is a formula.

    Args:
        length: The number of samples.
        layout: How they are cut.
        seed: The seed of the run.
        shuffle: Whether every epoch has a permutation of its own; else the order is the dataset's.

    Example:
        >>> layout = Layout(batch_size=2, world_size=2, rank=1, uneven="pad")
        >>> list(ComputedBatches(5, layout, seed=0, shuffle=False).stream(epoch=0, consumed=0))
        [[2, 3], [0]]
    """

    def __init__(self, length: int, layout: Layout, *, seed: int, shuffle: bool) -> None:
        self.length = length
        self.layout = layout
        self.seed = seed
        self.order = "shuffled" if shuffle else "sequential"

    def stream(self, epoch: int, consumed: int) -> Iterator[list[int]]:
        """Yield the batches that are left of the epoch."""
        samples_at = self._order_of(epoch)
        for positions in self._positions(consumed):
            yield from samples_at(positions).tolist()

    def steps(self) -> int:
        """Return the number of batches in a whole epoch, the same for every rank."""
        return self.layout.steps(self.length)

    def steps_from(self, consumed: int) -> int:
        """Return the number of batches that are left of the epoch."""
        return self.layout.steps(self.length - consumed)

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return min(self.length, consumed + self.layout.global_batch)

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left of the epoch."""
        return self.steps_from(consumed) == 0

    def _order_of(self, epoch: int) -> Callable[[Tensor], Tensor]:
        if self.order == "sequential":
            return lambda positions: positions
        return _permutation(self.length, self.seed, epoch)

    def _positions(self, consumed: int) -> Iterator[Tensor]:
        """Yield this rank's positions, a row for each step and many rows at a time."""
        layout = self.layout
        full_steps, tail = divmod(self.length - consumed, layout.global_batch)
        first_row = consumed + layout.rank * layout.batch_size + torch.arange(layout.batch_size)
        # The first batch need not wait for a whole block.
        step, rows = 0, max(1, FIRST_BLOCK // layout.batch_size)
        while step < full_steps:
            end = min(full_steps, step + rows)
            yield torch.arange(step, end)[:, None] * layout.global_batch + first_row
            step, rows = end, max(1, BLOCK // layout.batch_size)
        start, stop = layout.bounds(tail)
        if stop > start:
            first = self.length - tail
            # Past the end of the order comes its head again: that is the padding.
            yield torch.arange(first + start, first + stop)[None] % self.length


@functools.lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    """Keep the last few, for `peek()`, for several loaders and for simulated worlds."""
    return Permutation(length, seed=seed, epoch=epoch)


class DrawnBatches:
    """Batches of the order that a sampler draws.

    The sampler is drawn from step by step, under random streams that depend on seed and epoch only:
    its own generators, torch's, `random`'s and numpy's. All of them are as before afterwards. Every
    rank draws everything and keeps its share, and a `set_epoch` that the sampler has is called. To
    start inside an epoch, indices are drawn and left out; no sample is loaded for that.

    Args:
        sampler: A sampler, a batch sampler, or any iterable of indices or batches, also endless.
        layout: How the drawn units are cut. For a batch sampler the batch size is 1 (batch).
        seed: The seed of the run.
        by_batch: Whether the units are whole batches.

    Example:
        >>> layout = Layout(batch_size=2, world_size=2, rank=1, uneven="drop")
        >>> batches = DrawnBatches([5, 3, 8, 0, 7], layout, seed=0, by_batch=False)
        >>> list(batches.stream(epoch=0, consumed=0))
        [[8, 0]]
    """

    def __init__(
        self, sampler: Iterable[Any], layout: Layout, *, seed: int, by_batch: bool
    ) -> None:
        self.sampler = sampler
        self.layout = layout
        self.seed = seed
        self.by_batch = by_batch
        self.order = "batch_sampler" if by_batch else "sampler"

    def stream(self, epoch: int, consumed: int) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        units = _Drawn(self.sampler, derive_seed("sampler", self.seed, epoch), epoch)
        head = units.take(min(consumed, self.layout.world_size - 1))
        units.skip(consumed - len(head))
        while step := units.take(self.layout.global_batch):
            head = (head + step)[: self.layout.world_size - 1]
            if share := self._share(step, head):
                yield share[0] if self.by_batch else share

    def steps(self) -> int:
        """Return the number of batches in a whole epoch, by the sampler's own length.

        Raises:
            TypeError: If the sampler has no length.
        """
        return self.layout.steps(len(self.sampler))  # type: ignore[arg-type]

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return consumed + self.layout.global_batch

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left, by drawing: the length of a sampler may be a guess."""
        return next(self.stream(epoch, consumed), None) is None

    def _share(self, step: list[Any], head: list[Any]) -> list[Any]:
        return list(islice(chain(step, cycle(head)), *self.layout.bounds(len(step))))


class BlockBatches:
    """Batches in which every sample comes once, for evaluation.

    Each rank has one contiguous block of the dataset. The blocks differ by at most one sample, and
    the numbers of batches by at most one batch.

    Args:
        length: The number of samples.
        batch_size: Samples in one batch of one rank.
        world_size: Number of ranks.
        rank: Whose block is meant.

    Example:
        >>> list(BlockBatches(5, batch_size=2, world_size=2, rank=0).stream(epoch=0, consumed=0))
        [[0, 1], [2]]
    """

    order = "sequential"

    def __init__(self, length: int, *, batch_size: int, world_size: int, rank: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.world_size = world_size
        self.block: range = range(*even_part(length, world_size, rank))

    def stream(self, epoch: int, consumed: int) -> Iterator[list[int]]:
        """Yield the batches that are left of the block."""
        for first in range(consumed // self.world_size, len(self.block), self.batch_size):
            yield list(self.block[first : first + self.batch_size])

    def steps(self) -> int:
        """Return the number of batches in the block."""
        return self.steps_from(0)

    def steps_from(self, consumed: int) -> int:
        """Return the number of batches that are left of the block."""
        left = max(0, len(self.block) - consumed // self.world_size)
        return -(-left // self.batch_size)

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return min(self.length, consumed + self.batch_size * self.world_size)

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left on any rank, which need not be this one."""
        return consumed >= self.length


class OwnBatches:
    """The first batches of a part of the data that is this rank's own already.

    What has been consumed is counted as if all ranks had the same amount, so that they agree on it
    whatever they have.

    Args:
        batches: The batches of that part, in a world of one.
        layout: Their layout.
        steps: How many batches an epoch has; None for all that there are.
    """

    def __init__(self, batches: Batches, layout: Layout, steps: int | None) -> None:
        self.batches = batches
        self.layout = layout
        self.limit = steps
        self.order: str = batches.order

    def stream(self, epoch: int, consumed: int) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        own = consumed // self.layout.world_size
        if own and self.batches.is_finished(epoch, own):
            return iter(())
        batches = self.batches.stream(epoch, own)
        if self.limit is None:
            return batches
        return _exactly(max(0, self.limit - consumed // self.layout.global_batch), batches)

    def steps(self) -> int:
        """Return the number of batches in an epoch."""
        return self.batches.steps() if self.limit is None else self.limit

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return consumed + self.layout.global_batch

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left on any rank; where each has its own end, nobody knows."""
        return self.limit is not None and consumed >= self.limit * self.layout.global_batch


def _exactly(count: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield so many batches: the other ranks would wait for those that are missing."""
    missing = count
    for batch in islice(batches, count):
        yield batch
        missing -= 1
    if missing:
        raise ConfigError(
            f"a sampler ended {missing} batches before the end that its length promises. Let its "
            "__len__ return how many samples it yields; without __len__ the ranks agree on the end."
        )


@dataclass(frozen=True)
class Note:
    """What only those who have loaded a batch can say of it; nothing for data with keys."""

    units: int | None = None
    """Units that all ranks together receive in this step; None for a full step."""
    is_empty: bool = False
    """Whether there is no batch, because nothing is left."""
    is_last: bool = False
    """Whether it is known that no step comes after this one."""
    worker: int = 0
    """Who loaded it."""
    first_item: str | None = None
    """A digest of the first item of the pass, with the first batch of each worker."""
    source_state: Any = None
    """The state of an iterable dataset that has one, after this step."""


class Place(NamedTuple):
    """Where a loader stands."""

    epoch: int
    """The epoch of the current or next pass."""
    consumed: int = 0
    """Units of this epoch that all ranks together have received."""
    is_open: bool = False
    """Whether a pass has received batches up to here, so that the next pass is a new epoch."""
    is_end: bool = False
    """Whether it is known that the epoch ends here, which only a stream finds out on its way."""
    source_state: Any = None
    """The state here of a dataset that has one of its own."""


class ShardSampler(Sampler[Any]):
    """The batch sampler of one rank: a source of batches and the place in it.

    A pass announces itself by `begin`, reports each received batch by `receive` and its end by
    `end`. Each hands the place on; a pass whose place is no longer the current one (because of
    another pass, `set_epoch` or a restored state) changes nothing any more.

    Args:
        batches: Where the batches come from.
        unbatched: Yield the one element of each batch instead of the batch.

    Example:
        >>> sampler = ShardSampler(BlockBatches(3, batch_size=2, world_size=1, rank=0))
        >>> list(sampler), len(sampler)
        ([[0, 1], [2]], 2)
    """

    def __init__(self, batches: Batches, *, unbatched: bool = False) -> None:
        self.batches = batches
        self.unbatched = unbatched
        self.place: Place = Place(epoch=0)
        self._held: Place | None = None
        self._begins_anew = False

    def __iter__(self) -> Iterator[Any]:
        return self.keys(self.place.epoch, self.place.consumed)

    def __len__(self) -> int:
        return self.batches.steps()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, or stay where we are if it is the current one.

        Args:
            epoch: At least 0.
        """
        if epoch != self.told_place.epoch:
            self._go_to(Place(epoch))
        else:  # a pass that nobody goes on with, as with an iterator that was left, stays open
            self._begins_anew = self.place.is_open

    @property
    def told_place(self) -> Place:
        """Where it stands without the batches of a window that is not complete."""
        return self.place if self._held is None else self._held

    def hold(self) -> None:
        """Go on telling the place of now until `release`."""
        self._held = self.place

    def release(self) -> None:
        """Tell the true place again."""
        self._held = None

    def steps_left(self) -> int | None:
        """Return the number of batches of the next pass; None if only its end tells."""
        if not isinstance(self.batches, (ComputedBatches, BlockBatches)):
            return None
        return self.batches.steps_from(0 if self.place.is_open else self.place.consumed)

    def keys(self, epoch: int, consumed: int) -> Iterator[Any]:
        """Yield what is left of an epoch from a place on, batch by batch.

        Args:
            epoch: The epoch.
            consumed: The units that all ranks together have received of it.
        """
        stream = self.batches.stream(epoch, consumed)
        return (batch[0] for batch in stream) if self.unbatched else stream

    def upcoming(self) -> Iterator[tuple[Place, Any]]:
        """Yield what may come next: the first batch from here on, and that of the next epoch."""
        following = Place(self.place.epoch + 1)
        for place in (following,) if self.place.is_end else (self.place, following):
            for batch in self.keys(place.epoch, place.consumed):
                yield place, batch
                break

    def restore(self, epoch: int, consumed: int, source_state: Any = None) -> None:
        """Go to a saved place; one at the end of an epoch is the beginning of the next.

        Args:
            epoch: The saved epoch.
            consumed: The units that all ranks together had received of it.
            source_state: The state there of a dataset that has one of its own.
        """
        finished = consumed > 0 and self.batches.is_finished(epoch, consumed)
        here = Place(epoch, consumed, source_state=source_state)
        self._go_to(Place(epoch + 1) if finished else here)

    def _go_to(self, place: Place) -> None:
        self.place, self._held, self._begins_anew = place, None, False

    def begin(self) -> Place:
        """Begin a pass; one that is still open and has received anything ends its epoch here.

        But `set_epoch` of that very epoch since then begins it anew.

        Returns:
            The place of the new pass.
        """
        here, step = self.place, int(not self._begins_anew)
        self.place = Place(here.epoch + step) if here.is_open else here._replace()
        self._begins_anew = False
        return self.place

    def receive(self, place: Place, note: Note | None = None) -> Place:
        """Count one more step of the pass that stood at this place.

        Args:
            place: What `begin` or the last `receive` of the pass returned.
            note: What there is to say of the step, if it was no ordinary one.

        Returns:
            The place of the pass now.
        """
        window = current_window()
        if window is not None:
            window.hold(self)
        if note is None:
            after = Place(place.epoch, self.batches.advance(place.consumed), is_open=True)
        else:
            after = self._place_after(place, note)
        return self._move(place, after)

    def _place_after(self, place: Place, note: Note) -> Place:
        here, units = place.consumed, note.units
        consumed = self.batches.advance(here) if units is None else here + units
        return Place(place.epoch, consumed, True, note.is_last, note.source_state)

    def end(self, place: Place) -> None:
        """End the epoch of the pass that stood at this place.

        Args:
            place: What `begin` or the last `receive` of the pass returned.
        """
        self._move(place, Place(place.epoch + 1))

    def _move(self, before: Place, after: Place) -> Place:
        if self.place is before:
            self.place = after
        return after


class _Drawn:
    """The units that a sampler yields in one epoch, under random streams of their own."""

    def __init__(self, sampler: Iterable[Any], seed: int, epoch: int) -> None:
        samplers = layers(sampler, "sampler")
        generators = [getattr(layer, "generator", None) for layer in samplers]
        self._private = PrivateRandomness(
            seed, [g for g in generators if isinstance(g, torch.Generator)]
        )
        tell_epoch(samplers, epoch)
        with self._private.borrowed():
            self._units = begun_once(sampler)

    def take(self, count: int) -> list[Any]:
        with self._private.borrowed():
            return list(islice(self._units, count))

    def skip(self, count: int) -> None:
        with self._private.borrowed():
            deque(islice(self._units, count), maxlen=0)


def begun_once(source: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate, and return an iterator that never begins anew.

    `islice` and `for` call `iter()` on the iterator once more, with which one begins again that is
    dataset or sampler at the same time.
    """
    return map(next, repeat(iter(source)))


def layers(outermost: Any, *links: str) -> list[Any]:
    """Return an object and those that it wraps, from the outside inwards.

    Args:
        outermost: A sampler or a dataset.
        *links: The attributes that hold the wrapped one; those that end in "s" hold several in a
            container. An object that makes attributes up when asked is taken to wrap nothing.

    Returns:
        At least the outermost object.
    """
    found: list[Any] = []
    waiting = [outermost]
    while waiting:
        layer = waiting.pop(0)
        if layer is None or any(layer is other for other in found):
            continue
        found.append(layer)
        attributes = getattr(layer, "__dict__", {})
        waiting += [attributes.get(link) for link in links if not link.endswith("s")]
        for link in links:
            if link.endswith("s"):
                waiting += _members(attributes.get(link))
    return found


def _members(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(container.values())
    return list(container) if isinstance(container, (list, tuple)) else []


def wrapped_datasets(dataset: Any) -> list[Any]:
    """Return a dataset and those that it wraps, as `Subset` and `ConcatDataset` do."""
    return layers(dataset, "dataset", "datasets")


def tell_epoch(wrapped: Iterable[Any], epoch: int) -> None:
    """Call the `set_epoch` of those that have one.

    Args:
        wrapped: Samplers or datasets, as `layers` returns them.
        epoch: The epoch that begins.
    """
    for layer in wrapped:
        if hasattr(layer, "set_epoch"):
            layer.set_epoch(epoch)
