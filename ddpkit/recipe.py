"""What a loader is asked to be: a dataset or an existing DataLoader, and options.

Nothing here knows of ranks. `read_source` and `Recipe.override` put together what is asked for,
`Recipe.check` refuses what cannot be done.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar, cast, get_args

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from ddpkit.errors import ConfigError
from ddpkit.group import accelerator_type
from ddpkit.sampler import Uneven, layers

__all__ = ["Recipe", "check_number", "read_source", "with_pinning"]

T_co = TypeVar("T_co", covariant=True)

_OPTIONS_OF_TORCH = frozenset(inspect.signature(DataLoader.__init__).parameters) - {
    "self",
    "dataset",
}

# What DataLoader refuses unless it has workers.
_OPTIONS_FOR_WORKERS = frozenset(
    {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
)


@dataclasses.dataclass(frozen=True)
class Recipe(Generic[T_co]):
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
    def is_stream(self) -> bool:
        """Whether the dataset has no keys and is iterated."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def is_unbatched(self) -> bool:
        """Whether single samples are asked for in place of batches."""
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
    ) -> Recipe[T_co]:
        """Replace what was given."""
        _check_options(options)
        _check_alternatives(batch_size, global_batch_size, shuffle, sampler)
        changes: dict[str, Any] = {"options": _merge_options(self.options, options)}
        changes |= {k: options[k] for k in ("batch_sampler", "drop_last") if k in options}
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        if any(size is not None for size in sizes.values()):
            changes |= {name: _size(name, size) for name, size in sizes.items()}
        if shuffle is not None or sampler is not None:
            changes |= {"shuffle": bool(shuffle), "sampler": sampler}
        if changes.get("batch_sampler", self.batch_sampler) is not None:
            _check_batch_sampler_alone(changes)
            changes |= {"batch_size": None, "shuffle": False, "sampler": None, "drop_last": False}
        return dataclasses.replace(self, **changes)

    def check(self, uneven: str, *, shard: bool) -> None:
        """Refuse what cannot be done, whatever the ranks."""
        if self.is_stream:
            self._check_stream()
        else:
            _check_dataset(self.dataset)
        for sampler in (self.sampler, self.batch_sampler):
            _check_begins_anew(sampler)
            if shard:
                _check_not_split_yet(sampler)
        if uneven not in get_args(Uneven):
            raise ConfigError(f"uneven={uneven!r} is not one of 'pad', 'drop' and 'exact'")
        if uneven == "exact":
            self._check_exact()

    def _check_stream(self) -> None:
        names = ("shuffle", "sampler", "batch_sampler")
        asked = [name for name in names if getattr(self, name)]
        if asked:
            raise ConfigError(
                f"{', '.join(asked)} was given for a {type(self.dataset).__qualname__}, which is "
                "iterable: its order is its own, and it has no keys that a sampler could draw. "
                "Leave that out and shuffle inside the dataset, by torch's, numpy's or random's "
                "global stream (the same on all ranks there) or in set_epoch()."
            )

    def _check_exact(self) -> None:
        names = ("shuffle", "sampler", "batch_sampler", "drop_last")
        asked = [name for name in names if getattr(self, name)]
        if asked:
            raise ConfigError(
                f"uneven='exact' gives every sample once in the order of the dataset, so it cannot "
                f"be used together with {', '.join(asked)}. Leave that out (for an existing "
                "DataLoader pass shuffle=False, drop_last=False), or use uneven='pad' or 'drop'."
            )


def read_source(source: Dataset[T_co] | Sequence[T_co] | DataLoader[T_co]) -> Recipe[T_co]:
    """Read what is asked for from a dataset, or from a DataLoader with its options.

    Args:
        source: What `sharded_loader` was given.

    Raises:
        ConfigError: A DataLoader iterates in a way of its own.
    """
    if isinstance(source, DataLoader):
        return _adopt(source)
    return Recipe(cast("Dataset[T_co]", source))


def _adopt(loader: DataLoader[T_co]) -> Recipe[T_co]:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"a {type(loader).__qualname__} iterates in a way of its own, which sharded_loader "
            "would lose. Pass its dataset and its options instead."
        )
    recipe = Recipe(
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
    # The generator is the loader's own: all that may be given is None.
    ours = ("batch_sampler", "drop_last", "generator")
    return {k: v for k, v in merged.items() if k not in ours}


def with_pinning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Pin memory where that is of use: torch warns in every pass where it is not.

    Args:
        options: What DataLoader is to be given.

    Returns:
        The same with `pin_memory` decided.
    """
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


def _size(name: str, given: int | None) -> int | None:
    return None if given is None else check_number(name, given, least=1)


def check_number(name: str, value: Any, *, least: int | None = None) -> int:
    """Refuse what is no integer, or too small a one.

    Args:
        name: How the message calls it.
        value: What was given.
        least: The least that is allowed.

    Returns:
        The number as an `int`: those of numpy would spread into what is saved.

    Raises:
        ConfigError: If it is.
    """
    is_number = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_number or (least is not None and value < least):
        expected = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigError(f"{name}={value!r} was given; expected {expected}")
    return operator.index(value)


def _check_dataset(dataset: object) -> None:
    if not isinstance(dataset, Sized):
        raise ConfigError(
            f"a {type(dataset).__qualname__} has no __len__, and ranks cannot share what has no "
            "length. Give the dataset __len__ and __getitem__, or derive it from IterableDataset."
        )


def _check_begins_anew(sampler: object) -> None:
    if isinstance(sampler, Iterator) and type(sampler).__module__ in ("builtins", "itertools"):
        raise ConfigError(
            f"a {type(sampler).__qualname__} was given as a sampler, which can be gone through "
            "only once. Give a list, or an object whose __iter__ begins anew in each epoch."
        )


def _check_not_split_yet(sampler: object) -> None:
    for layer in layers(sampler, "sampler"):
        if hasattr(layer, "num_replicas") and hasattr(layer, "rank"):
            raise ConfigError(
                f"the {type(layer).__qualname__} splits the samples between ranks already, and "
                "sharded_loader would split them once more. Leave the sampler out and pass "
                "shuffle=True or False, or keep it and pass shard=False."
            )
