"""Which items of an iterable dataset go to which rank at which step.

An iterable dataset has no keys, so every worker of every rank goes through the whole of it and
keeps the items of its own steps: position p of the stream belongs to the step and the rank that it
would belong to in a dataset with keys. All of them iterate under the same random streams, so a
dataset that shuffles by torch's, numpy's or `random`'s global ones does so alike everywhere. Every
rank sees the end by itself.

With `shard=False` a dataset splits itself between ranks and workers, as it would under a plain
DataLoader, and each worker makes batches of all that it gets.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info

from ddpkit.digest import digest_of_item
from ddpkit.permutation import derive_seed
from ddpkit.randomness import PrivateRandomness
from ddpkit.sampler import Layout, Note, begun_once, tell_epoch, wrapped_datasets
from ddpkit.serving import Collate, Pass, Reply, Server

__all__ = ["OwnStreamServer", "StreamBatches", "StreamServer"]


class StreamBatches:
    """The steps of an iterable dataset; see `sampler.Batches`.

    A step is asked for by the position of its first item. There is no last one: that the stream has
    ended is found out by whoever goes through it.

    Args:
        dataset: Its length, if it has one, is that of an epoch. Nothing else relies on it.
        layout: How items are cut into steps, and steps into shares.
    """

    order = "stream"

    def __init__(self, dataset: Any, layout: Layout) -> None:
        self.dataset = dataset
        self.layout = layout

    def stream(self, epoch: int, consumed: int) -> Iterator[int]:
        """Yield the positions at which steps begin."""
        return count(consumed, self.layout.global_batch)

    def steps(self) -> int:
        """Return the number of this rank's batches, by the length that the dataset claims.

        Raises:
            TypeError: If it claims none.
        """
        return self.layout.steps(len(self.dataset))

    def advance(self, consumed: int) -> int:
        """Return what has been consumed after one more full step."""
        return consumed + self.layout.global_batch

    def is_finished(self, epoch: int, consumed: int) -> bool:
        """Tell nothing: only a pass finds out."""
        return False


class StreamServer(Server):
    """Answers requests for steps of an iterable dataset, which it goes through once for each pass.

    Args:
        dataset: An iterable dataset.
        collate_fn: Makes a batch of a list of items, or converts one item.
        layout: How items are cut into steps, and steps into shares.
        seed: The seed of the run, the same on all ranks.
        single: See `Server`.
        reseeds: See `Server`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        *,
        layout: Layout,
        seed: int,
        single: bool,
        reseeds: bool = True,
    ) -> None:
        super().__init__(dataset, collate_fn, single=single, reseeds=reseeds)
        self._layout = layout
        self._seed = seed
        self._walk: _Walk | None = None
        self._end: int | None = None
        self._pristine = _Pristine(dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_walk": None}

    @contextlib.contextmanager
    def preserving_the_dataset(self) -> Iterator[None]:
        """Give a dataset that has a state the one back that it had."""
        before = copy.deepcopy(self.dataset.state_dict()) if self._pristine.has_state else None
        try:
            yield
        finally:
            if before is not None:
                self.dataset.load_state_dict(before)

    def begin(self, current: Pass) -> None:
        """Leave the walk through the stream that belonged to another pass."""
        self._walk = self._end = None

    def answer(self, current: Pass, place: int, wanted: object) -> Reply:
        """Load this rank's share of the step that begins at a position."""
        if self._end is not None and place >= self._end:  # a worker loads ahead beyond the end
            return None, Note(is_empty=True, worker=_worker_id())
        walk, is_first = self._walk_to(current, place)
        step = walk.take(self._layout.global_batch)
        is_last = len(step) < self._layout.global_batch
        self._end = walk.position if is_last else None
        start, stop = self._layout.bounds(len(step))
        note = Note(
            units=len(step),
            is_empty=start == stop,
            is_last=is_last,
            worker=_worker_id(),
            first_item=walk.first_item if is_first else None,
            source_state=None if is_last else walk.state_after_step(),
        )
        if note.is_empty:
            return None, note
        # The head last: asking for it may end the walk.
        padded = step if stop <= len(step) else step + self._head(current, walk, stop - len(step))
        share = padded[start:stop]
        with self.randomness(current, place):
            return self.collated(share), note

    def _walk_to(self, current: Pass, position: int) -> tuple[_Walk, bool]:
        walk = self._walk
        is_first = walk is None or walk.position > position
        if walk is None or is_first:
            walk = self._walk = self._start(current)
        walk.skip(position - walk.position)
        return walk, is_first

    def _start(self, current: Pass) -> _Walk:
        state = current.source_state if self._pristine.has_state else None
        self._pristine.restore(state, current.epoch)
        return _Walk(
            self.dataset,
            seed=derive_seed("stream", self._seed, current.epoch),
            position=0 if state is None else current.consumed,
            head=self._layout.world_size - 1,
        )

    def _head(self, current: Pass, walk: _Walk, size: int) -> list[Any]:
        """Return the first items of the stream once more, in a circle if there are too few."""
        head = walk.head
        if walk.began_at:  # in the middle, by a state
            self._pristine.restore(None, current.epoch)
            anew = _Walk(self.dataset, seed=walk.seed, position=0, head=0)
            head = anew.take(self._layout.world_size - 1)
            self._walk = None
        return [head[at % len(head)] for at in range(size)]


class OwnStreamServer(Server):
    """Answers requests for batches of a dataset that splits itself between ranks and workers.

    A request says whether the batch is wanted, or was received before the state was saved and has
    only to be passed over.

    Args:
        dataset: An iterable dataset.
        collate_fn: Makes a batch of a list of items, or converts one item.
        batch_size: Items in a batch.
        drop_last: Whether a last batch that is not full is left out.
        single: See `Server`.
        reseeds: See `Server`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        *,
        batch_size: int,
        drop_last: bool,
        single: bool,
        reseeds: bool = True,
    ) -> None:
        super().__init__(dataset, collate_fn, single=single, reseeds=reseeds)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._items: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_items": iter(())}

    def may_draw(self) -> bool:
        """Tell that the dataset, which runs under this rank's streams, may draw."""
        return True

    def begin(self, current: Pass) -> None:
        """Begin to iterate."""
        with self.randomness(current, -1):  # no batch has this place
            self._items = begun_once(self.dataset)

    def answer(self, current: Pass, place: int, wanted: bool) -> Reply:
        """Load the next batch, or pass it over."""
        with self.randomness(current, place):
            items = list(islice(self._items, self._batch_size))
            is_empty = not items or (self._drop_last and len(items) < self._batch_size)
            note = Note(is_empty=is_empty, worker=_worker_id())
            if is_empty or not wanted:
                return None, note
            return self.collated(items), note


class _Walk:
    """One way through an iterable dataset, under random streams that are common to all ranks."""

    def __init__(self, dataset: Any, *, seed: int, position: int, head: int) -> None:
        self.seed = seed
        self.began_at = self.position = position
        self.head: list[Any] = []
        self.first_item: str | None = None
        self._head_size = 0 if position else head
        self._dataset = dataset
        self._private = PrivateRandomness(seed)
        with self._as_in_one_process():
            self._items = begun_once(dataset)

    def take(self, size: int) -> list[Any]:
        with self._as_in_one_process():
            items = list(islice(self._items, size))
        if self.position == self.began_at and items:
            self.first_item = digest_of_item(items[0])
        if len(self.head) < self._head_size:
            self.head += items[: self._head_size - len(self.head)]
        self.position += len(items)
        return items

    def skip(self, size: int) -> None:
        # The first items are wanted, the others only pass by.
        wanted = max(self._head_size - len(self.head), int(self.position == self.began_at))
        size -= len(self.take(min(size, wanted)))
        with self._as_in_one_process():
            deque(islice(self._items, size), maxlen=0)
        self.position += size

    def state_after_step(self) -> Any:
        return copy.deepcopy(self._dataset.state_dict()) if _has_state(self._dataset) else None

    @contextlib.contextmanager
    def _as_in_one_process(self) -> Iterator[None]:
        """Hide from the dataset that this is a worker, for it would split itself by workers."""
        info = torch_worker._worker_info  # noqa: SLF001
        torch_worker._worker_info = None  # noqa: SLF001
        try:
            with self._private.borrowed():
                yield
        finally:
            torch_worker._worker_info = info  # noqa: SLF001


class _Pristine:
    """Takes a dataset that has a state of its own to a place, or back to its beginning."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.has_state = _has_state(dataset)
        self._beginning: Any = None
        self._was_used = False

    def restore(self, state: Any, epoch: int) -> None:
        if not self.has_state:
            return
        if not self._was_used:
            self._was_used = True
            self._beginning = copy.deepcopy(self._dataset.state_dict())
            if state is None:
                return
        wanted = self._beginning if state is None else state
        if wanted is not None:
            self._dataset.load_state_dict(copy.deepcopy(wanted))
        if state is None:  # the beginning that is known is that of another epoch
            tell_epoch(wrapped_datasets(self._dataset), epoch)


def _has_state(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def _worker_id() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id
