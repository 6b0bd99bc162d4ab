"""Values that are made of others: tuples, named tuples, lists and dicts, nested at will.

What stands at the ends is a leaf. The order of leaves does not depend on the order in which a dict
was filled, so that the ranks bring theirs in the same one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

T = TypeVar("T")
M = TypeVar("M", bound="MutableMapping[Any, Any]")


def leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Yield everything that is not a container, with its path.

    Args:
        value: A container or a leaf.
        path: What messages call the value.
    """
    if isinstance(value, dict):
        for key in _ordered_keys(value):
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild a value with every leaf replaced, in the order of `leaves`."""
    if isinstance(value, dict):
        new = {key: map_leaves(function, value[key]) for key in _ordered_keys(value)}
        return with_items(value, new)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item) for item in value]
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named_tuple else type(value)(items)
    return function(value)


def with_leaves(value: T, new_leaves: Iterator[Any]) -> T:
    """Rebuild a value with other leaves, which come in the order of `leaves`."""
    rebuilt: T = map_leaves(lambda _: next(new_leaves), value)
    return rebuilt


def with_items(mapping: M, items: Mapping[Any, Any]) -> M:
    """Copy a mapping, of whatever class, and set items of the copy.

    One by one, because `update` is something else in some classes: that of `Counter` adds.
    """
    new = copy.copy(mapping)
    for key, item in items.items():
        new[key] = item
    return new


def _ordered_keys(value: dict[Any, Any]) -> list[Any]:
    return sorted(value, key=repr)
