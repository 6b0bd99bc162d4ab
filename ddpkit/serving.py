"""What runs where samples are loaded: in a data worker, or in the process of the rank.

`ShardedLoader` hands torch's DataLoader a `Server` in place of the dataset, and requests in place
of indices. A request says all that there is to know (which pass, which samples), so workers that
persist, and workers that load ahead, never hold a stale epoch or place. What comes back is the
batch together with what the loader wants to know of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    Dataset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from ddpkit.permutation import derive_seed
from ddpkit.randomness import SeededRandomness, seed_global_streams
from ddpkit.sampler import Note, tell_epoch, wrapped_datasets
from ddpkit.worker_signals import outlast_requests, shared_flag

__all__ = ["MapServer", "Pass", "Reply", "Request", "Server", "WorkerSetup"]

Collate = Callable[[Any], Any]


class Pass(NamedTuple):
    """What the requests of one pass through a loader have in common."""

    number: int
    """Tells the passes of a loader apart."""
    epoch: int
    """The epoch."""
    consumed: int
    """Units that all ranks together had received of it when the pass began."""
    seed: int
    """Where the random streams of this rank in this epoch start."""
    source_state: Any = None
    """The state of an iterable dataset that has one, at `consumed`."""


Request = tuple[tuple[Any, ...], int, Any]
"""The fields of a `Pass`, the place of a step in the epoch, and what is wanted there.

A plain tuple, because it is pickled for each batch."""

Reply = tuple[Any, "Note | None"]
"""A batch and what there is to say of it."""


class Server(Dataset[Reply]):
    """Answers requests: the dataset that torch's DataLoader sees.

    Random numbers that are drawn for a batch follow from the place of the batch, so they are the
    same with any number of workers and after a resume.

    Args:
        dataset: What samples come from.
        collate_fn: Makes a batch of a list of samples, or converts one sample.
        single: Whether a batch is the one sample of it.
        reseeds: Whether a worker seeds its global streams for each batch. A user's own
            `worker_init_fn` may have other plans.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate, *, single: bool, reseeds: bool = True
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.single = single
        self.epoch: int | None = None  # what the dataset has been told
        self._reseeds = reseeds
        self._open: Pass | None = None
        self._streams: SeededRandomness | None = None
        self._seeds_each_batch = False

    def __getstate__(self) -> dict[str, Any]:
        # Another process, or a copy, begins its passes itself.
        return {**vars(self), "_open": None, "_streams": None}

    def __getitem__(self, request: Request) -> Reply:
        fields, place, wanted = request
        if self._open is None or self._open.number != fields[0]:
            self._begin(Pass(*fields))
            self._open = Pass(*fields)
        try:
            return self.answer(self._open, place, wanted)
        except StopIteration as error:  # would end the pass as if there were no more batches
            raise RuntimeError(
                "a dataset or collate_fn raised StopIteration while it made a batch. Let it raise "
                "IndexError, or whatever says what is wrong."
            ) from error

    def answer(self, current: Pass, place: int, wanted: Any) -> Reply:
        """Load one batch of the pass that has begun."""
        raise NotImplementedError

    def collated(self, samples: list[Any]) -> Any:
        """Make a batch of samples, or convert the one of them."""
        return self.collate_fn(samples[0] if self.single else samples)

    def begin(self, current: Pass) -> None:
        """Prepare for a pass whose epoch the dataset knows."""

    def may_draw(self) -> bool:
        """Tell whether random numbers may be drawn; the exchange of the streams takes time."""
        return self.collate_fn not in (default_collate, default_convert)

    def preserving_the_dataset(self) -> contextlib.AbstractContextManager[None]:
        """Leave the dataset as it was, whatever is answered inside the block."""
        return contextlib.nullcontext()

    def randomness(self, current: Pass, place: int) -> contextlib.AbstractContextManager[None]:
        """Give the block the random streams of one batch of this rank."""
        if self._streams is not None:
            return self._streams.borrowed(derive_seed(current.seed, place))
        if self._seeds_each_batch:
            seed_global_streams(derive_seed(current.seed, place))
        return contextlib.nullcontext()

    def _begin(self, current: Pass) -> None:
        if current.epoch != self.epoch:
            tell_epoch(wrapped_datasets(self.dataset), current.epoch)
            self.epoch = current.epoch
        in_worker = get_worker_info() is not None  # where nobody else draws
        self._streams = SeededRandomness() if self.may_draw() and not in_worker else None
        self._seeds_each_batch = self.may_draw() and in_worker and self._reseeds
        self.begin(current)


class MapServer(Server):
    """Answers requests for samples by their keys; see `Server`."""

    def answer(self, current: Pass, place: int, wanted: Any) -> Reply:
        """Load the samples of these keys."""
        with self.randomness(current, place):
            return self.collate_fn(self._fetch(wanted)), None

    def may_draw(self) -> bool:
        """Tell whether random numbers may be drawn; torch's own datasets draw none."""
        *outer, inner = wrapped_datasets(self.dataset)
        plain = all(type(layer).__module__ == Dataset.__module__ for layer in outer)
        in_memory = type(inner) in (TensorDataset, list, tuple, range)
        return super().may_draw() or not (plain and in_memory)

    def _fetch(self, keys: Any) -> Any:
        dataset = self.dataset
        if self.single:
            return dataset[keys]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(keys)
        return [dataset[key] for key in keys]


class WorkerSetup:
    """The `worker_init_fn` of all loaders: what the user's own expects to find.

    Args:
        worker_init_fn: The user's, if there is one.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._worker_init_fn = worker_init_fn
        self._rank = shared_flag()

    def __call__(self, worker_id: int) -> None:
        """Run in a worker before it gets requests."""
        outlast_requests(self._rank)
        info = get_worker_info()
        # Users ask `get_worker_info().dataset` for their dataset. torch has frozen the object.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[union-attr]
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
