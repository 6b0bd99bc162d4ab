"""Short digests that are equal where data is equal, to compare between ranks.

Both functions look at little, read no file and load no sample, and leave out what they do not know:
a difference that they report is one, but they do not find every difference.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["digest_of_item", "digests_of_order"]

_PROBES = 32
_BYTES = 2**16
_PLAIN = (bool, int, float, complex, bytes, type(None))


def digest_of_item(item: Any) -> str | None:
    """Return a digest of one item of a dataset.

    Args:
        item: Nested containers of numbers, words, tensors, arrays or images.

    Returns:
        A short word, or None if the item holds something of an unknown kind.

    Example:
        >>> digest_of_item({"x": torch.ones(2)}) == digest_of_item({"x": torch.ones(2)})
        True
        >>> digest_of_item([1]) == digest_of_item([2])
        False
    """
    try:
        parts = list(_parts(item))
    except (_UnknownKindError, RecursionError):
        return None
    return _digest(parts)


def digests_of_order(dataset: Any, length: int) -> dict[str, str]:
    """Return digests of what lists the samples of a dataset, by the name of the attribute.

    What lists the samples is as long as the dataset: paths, labels, indices, whole tensors. A
    dataset that each rank has shuffled for itself differs there. Of a path only the last part
    counts, because nodes may keep their data in different folders.

    Args:
        dataset: Any dataset; those that it wraps are looked at, too.
        length: The number of samples of the dataset.

    Returns:
        Names such as `"Subset.indices"` and digests of a few elements spread over the list.

    Example:
        >>> subset = torch.utils.data.Subset(range(9), [3, 1, 2])
        >>> list(digests_of_order(subset, 3))
        ['Subset.indices', 'range']
    """
    found: dict[str, str] = {}
    for name, value in _lists(dataset, length):
        with contextlib.suppress(RecursionError):  # a list that holds itself
            digest = digest_of_item([_last_part(value[at]) for at in _positions(len(value))])
            if digest is not None:
                found[name] = digest
    return found


class _UnknownKindError(Exception):
    """Something that cannot be compared."""


def _lists(dataset: Any, length: int) -> Iterator[tuple[str, Any]]:
    """Find the attributes that can be indexed by position and are as long as their dataset."""
    seen: list[Any] = []
    while dataset is not None and not any(dataset is other for other in seen):
        seen.append(dataset)
        kind = type(dataset).__qualname__
        attributes = getattr(dataset, "__dict__", {})
        named = {f"{kind}.{name}": value for name, value in attributes.items()}
        for name, value in {kind: dataset, **named}.items():
            yield from _lists_in(name, value, length)
        dataset = attributes.get("dataset")
        length = _length_of(dataset)


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # it has none
        return 0


def _lists_in(name: str, value: Any, length: int) -> Iterator[tuple[str, Any]]:
    if _is_indexed(value) and len(value) == length > 0:
        yield name, value
    elif isinstance(value, (list, tuple)) and len(value) <= _PROBES:  # as TensorDataset.tensors
        for at, part in enumerate(value):
            if _is_indexed(part) and len(part) == length > 0:
                yield f"{name}[{at}]", part


def _is_indexed(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.device.type == "cpu" and value.layout == torch.strided
    # Nothing derived from these: to ask it for an element might load one.
    return type(value) in (list, tuple, range) or (_is_array(value) and value.ndim > 0)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _positions(length: int) -> list[int]:
    return sorted({at * (length - 1) // (_PROBES - 1) for at in range(_PROBES)})


def _last_part(value: Any) -> Any:
    if isinstance(value, (str, pathlib.PurePath)):
        return pathlib.PurePath(value).name
    if isinstance(value, (tuple, list)):  # such as (path, class)
        return [_last_part(part) for part in value]
    return value


def _parts(item: Any) -> Iterator[bytes]:
    """Take an item apart into bytes that tell it from other items."""
    if isinstance(item, torch.Tensor):
        yield from _tensor_parts(item)
    elif _is_array(item):
        yield f"{item.dtype}{item.shape}".encode()
        if item.dtype.hasobject:
            raise _UnknownKindError
        yield item.ravel()[: max(1, _BYTES // max(1, item.itemsize))].tobytes()
    elif isinstance(item, (str, pathlib.PurePath)):
        yield b"word " + str(item).encode(errors="surrogatepass")
    elif isinstance(item, _PLAIN):
        yield f"{type(item).__name__} {item!r}".encode()
    else:
        yield from _container_parts(item)


def _tensor_parts(tensor: torch.Tensor) -> Iterator[bytes]:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise _UnknownKindError
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    head = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    head = head[: max(1, _BYTES // tensor.element_size())].contiguous()
    yield ctypes.string_at(head.data_ptr(), head.numel() * head.element_size())


def _container_parts(item: Any) -> Iterator[bytes]:
    yield type(item).__qualname__.encode()
    if isinstance(item, Mapping):
        children: list[Any] = [part for pair in item.items() for part in pair]
    elif isinstance(item, Sequence):
        children = list(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        children = [getattr(item, field.name) for field in dataclasses.fields(item)]
    elif hasattr(item, "tobytes") and hasattr(item, "mode"):  # an image of PIL
        children = [item.mode, item.size, item.tobytes()[:_BYTES]]
    else:
        raise _UnknownKindError
    yield str(len(children)).encode()
    for child in children:
        yield from _parts(child)


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
