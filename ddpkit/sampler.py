"""Which sample goes to which rank at which step.

Everything here is arithmetic on (length, batch size, world size, rank, epoch, consumed): no
communication and no processes. An epoch is a *global order* of units. Step k takes the units `[k *
G, (k + 1) * G)` of it, G being the batch of all ranks together, and rank r gets its contiguous
slice of those. So what is left of an epoch follows from how many units all ranks have `consumed`,
and the epoch can go on with another world size or another batch size.

Three sources of batches know this, and `ShardSampler` keeps the place in one of them:
- `ComputedBatches`: the order is a formula (in sequence, or shuffled by `Permutation`).
- `DrawnBatches`: the order is what a `Sampler` draws, the same on all ranks. The units are samples,
  or whole batches where a batch sampler draws.
- `BlockBatches`: every sample once, in one contiguous block for each rank (`uneven="exact"`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.utils.data import Sampler

from ddpkit.permutation import BLOCK, Permutation, derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

__all__ = [
    "Batches",
    "BlockBatches",
    "ComputedBatches",
    "DrawnBatches",
    "Layout",
    "Place",
    "PrivateRandomness",
    "ShardSampler",
    "layers",
    "tell_epoch",
]

FIRST_BLOCK = 2**10


@dataclass(frozen=True)
class Layout:
    """How the units of a global order are cut into steps, and a step into equal shares.

    Example:
        >>> layout = Layout(batch_size=2, world_size=2, rank=0, uneven="pad")
        >>> layout.steps(units=9), layout.tail_share(units=9), layout.repeated(units=9)
        (3, 1, 1)
    """

    batch_size: int
    """Units of one rank in one step."""
    world_size: int
    """Number of ranks."""
    rank: int
    """Whose share is meant."""
    uneven: Literal["pad", "drop"]
    """Whether ranks stay together by repeating a few units or by leaving a few out."""
    drop_last: bool = False
    """Whether a last step of fewer than `global_batch` units is left out."""

    @property
    def global_batch(self) -> int:
        """Units of all ranks in one step."""
        return self.batch_size * self.world_size

    def tail_share(self, units: int) -> int:
        """Return how many units each rank gets in the last, partial step; 0 if there is none."""
        tail = units % self.global_batch
        if self.drop_last:
            return 0
        return -(-tail // self.world_size) if self.uneven == "pad" else tail // self.world_size

    def steps(self, units: int) -> int:
        """Return how many steps these units make."""
        return units // self.global_batch + (self.tail_share(units) > 0)

    def repeated(self, units: int) -> int:
        """Return how many units are given out twice."""
        return max(0, self._given_out(units) - units)

    def dropped(self, units: int) -> int:
        """Return how many units nobody gets."""
        return max(0, units - self._given_out(units))

    def _given_out(self, units: int) -> int:
        return units - units % self.global_batch + self.tail_share(units) * self.world_size


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

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return min(self.length, consumed + self.layout.global_batch)

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left of the epoch."""
        return self.layout.steps(self.length - consumed) == 0

    def _order_of(self, epoch: int) -> Callable[[Tensor], Tensor]:
        if self.order == "sequential":
            return lambda positions: positions
        return Permutation(self.length, seed=self.seed, epoch=epoch)

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
        if share := layout.tail_share(tail):
            first = self.length - tail + layout.rank * share
            # Past the end of the order comes its head again: that is the padding.
            yield torch.arange(first, first + share)[None] % self.length


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
        whole = len(step) == self.layout.global_batch
        size = self.layout.batch_size if whole else self.layout.tail_share(len(step))
        padded = chain(step, cycle(head))
        return list(islice(padded, self.layout.rank * size, (self.layout.rank + 1) * size))


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
        size, longer = divmod(length, world_size)
        start = rank * size + min(rank, longer)
        self.block = range(start, start + size + (rank < longer))

    def stream(self, epoch: int, consumed: int) -> Iterator[list[int]]:
        """Yield the batches that are left of the block."""
        for first in range(consumed // self.world_size, len(self.block), self.batch_size):
            yield list(self.block[first : first + self.batch_size])

    def steps(self) -> int:
        """Return the number of batches in the block."""
        return -(-len(self.block) // self.batch_size)

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more step."""
        return min(self.length, consumed + self.batch_size * self.world_size)

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell whether nothing is left on any rank, which need not be this one."""
        return consumed >= self.length


@dataclass(frozen=True)
class Place:
    """Where a loader stands."""

    epoch: int
    """The epoch of the current or next pass."""
    consumed: int = 0
    """Units of this epoch that all ranks together have received."""
    is_open: bool = False
    """Whether a pass has received batches up to here, so that the next pass is a new epoch."""


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
        self.place = Place(epoch=0)

    def __iter__(self) -> Iterator[Any]:
        return self._stream(self.place)

    def __len__(self) -> int:
        return self.batches.steps()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, or stay where we are if it is the current one.

        Args:
            epoch: At least 0.
        """
        if epoch != self.place.epoch:
            self.place = Place(epoch)

    def peek(self) -> tuple[int, Any] | None:
        """Return the next batch and its epoch, or None if this and the next epoch have none."""
        for place in (self.place, Place(self.place.epoch + 1)):
            for batch in self._stream(place):
                return place.epoch, batch
        return None

    def restore(self, epoch: int, consumed: int) -> None:
        """Go to a saved place; one at the end of an epoch is the beginning of the next.

        Args:
            epoch: The saved epoch.
            consumed: The units that all ranks together had received of it.
        """
        finished = consumed > 0 and self.batches.is_finished(epoch, consumed)
        self.place = Place(epoch + 1) if finished else Place(epoch, consumed)

    def begin(self) -> Place:
        """Begin a pass; one that is still open and has received anything ends its epoch here.

        Returns:
            The place of the new pass.
        """
        here = self.place
        self.place = Place(here.epoch + 1) if here.is_open else Place(here.epoch, here.consumed)
        return self.place

    def receive(self, place: Place) -> Place:
        """Count one more step of the pass that stood at this place.

        Args:
            place: What `begin` or the last `receive` of the pass returned.

        Returns:
            The place of the pass now.
        """
        consumed = self.batches.advance(place.consumed)
        return self._move(place, Place(place.epoch, consumed, is_open=True))

    def end(self, place: Place) -> None:
        """End the epoch of the pass that stood at this place.

        Args:
            place: What `begin` or the last `receive` of the pass returned.
        """
        self._move(place, Place(place.epoch + 1))

    def _stream(self, place: Place) -> Iterator[Any]:
        stream = self.batches.stream(place.epoch, place.consumed)
        return (batch[0] for batch in stream) if self.unbatched else stream

    def _move(self, before: Place, after: Place) -> Place:
        if self.place is before:
            self.place = after
        return after


class PrivateRandomness:
    """Random streams of one's own, in the place of the global ones while they are borrowed.

    Args:
        seed: Where torch's, `random`'s and (if it is loaded) numpy's global stream start.
        generators: Generators that are treated likewise.

    Example:
        >>> private = PrivateRandomness(seed=0)
        >>> with private.borrowed():
        ...     first = torch.rand(())
        >>> with PrivateRandomness(seed=0).borrowed():
        ...     bool(first == torch.rand(()))
        True
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        self._numpy = sys.modules.get("numpy")
        fresh = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._generators]
        self._own = (fresh, random.Random(seed).getstate(), self._fresh_numpy(seed))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Go on with the private streams inside the block and with the global ones after it."""
        outer = self._read()
        self._write(self._own)
        try:
            yield
        finally:
            self._own = self._read()
            self._write(outer)

    def _read(self) -> tuple[list[Tensor], Any, Any]:
        states = [generator.get_state() for generator in self._generators]
        return states, random.getstate(), self._numpy and self._numpy.random.get_state()

    def _write(self, states: tuple[list[Tensor], Any, Any]) -> None:
        for generator, state in zip(self._generators, states[0], strict=True):
            generator.set_state(state)
        random.setstate(states[1])
        if self._numpy:
            self._numpy.random.set_state(states[2])

    def _fresh_numpy(self, seed: int) -> Any:
        return self._numpy and self._numpy.random.RandomState(seed % 2**32).get_state()


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
            self._units = iter(sampler)

    def take(self, count: int) -> list[Any]:
        with self._private.borrowed():
            return list(islice(self._units, count))

    def skip(self, count: int) -> None:
        with self._private.borrowed():
            deque(islice(self._units, count), maxlen=0)


def layers(outermost: Any, link: str) -> list[Any]:
    """Return an object and those that it wraps, from the outside inwards.

    Args:
        outermost: A sampler or a dataset.
        link: The attribute that holds the wrapped one. An object that makes attributes up when
        asked
            is taken to wrap nothing.

    Returns:
        At least the outermost object.
    """
    found: list[Any] = []
    while outermost is not None and not any(outermost is layer for layer in found):
        found.append(outermost)
        outermost = getattr(outermost, "__dict__", {}).get(link)
    return found


def tell_epoch(wrapped: Iterable[Any], epoch: int) -> None:
    """Call the `set_epoch` of those that have one.

    Args:
        wrapped: Samplers or datasets, as `layers` returns them.
        epoch: The epoch that begins.
    """
    for layer in wrapped:
        if hasattr(layer, "set_epoch"):
            layer.set_epoch(epoch)
