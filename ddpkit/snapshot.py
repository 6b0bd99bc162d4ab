"""What is saved of an object: plain states, which a safe load takes and no later step changes."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import mmap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.errors import CheckpointError
from ddpkit.nested import with_items
from ddpkit.serialize import type_name_of
from ddpkit.wrap import plain_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CopySpace", "check_loadable", "on_cpu", "one_line", "plain_state"]

_ALIGNMENT = 16
"""Bytes of the largest element, so that cutting a storage there suits every type."""

_MAX_SHOWN = 8
_MOST_BITS = 255 * 8 - 1  # and a sign
_PLAIN_LEAVES = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None)})
_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_PLAIN_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})


def plain_state(value: Any) -> Any:
    """Replace every object that has a `state_dict()` by it, at any depth of plain containers.

    Args:
        value: What the user gave. It is not changed.

    Returns:
        The value with the replacements; the same object where there is nothing to replace.
    """
    return _map_leaves(value, _state_of)


def _state_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return plain_state(plain_model(value).state_dict())
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return plain_state(value.state_dict())
    return value


def _map_leaves(value: Any, function: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """Apply a function to what is in plain containers.

    Containers in which nothing changes stay the same objects, unless all are made `anew`.
    """
    if isinstance(value, dict):
        items = {key: _map_leaves(item, function, anew=anew) for key, item in value.items()}
        if not anew and all(items[key] is value[key] for key in value):
            return value
        return with_items(value, items)
    if isinstance(value, (list, tuple)):
        parts = [_map_leaves(item, function, anew=anew) for item in value]
        if not anew and all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)


def on_cpu(state: Any, *, space: CopySpace | None = None) -> Any:
    """Put the tensors of a state on the CPU, in storages that hold no more than they use.

    A small view of a big storage would take the whole storage to the disk. Tensors that share
    memory still do so afterwards, such as tied weights.

    Args:
        state: Plain containers with tensors. It is not changed.
        space: Where everything is copied to, so that what happens to the state later does not
            matter. Without it, tensors on the CPU that use their whole storage are taken as they
            are.

    Returns:
        The state with other tensors; the same object where nothing had to be done.
    """
    spans: dict[_StorageKey, tuple[int, int]] = {}
    _map_leaves(state, lambda value: _note_span(value, spans))
    if space is not None:
        space.clear(sum(stop - start + _ALIGNMENT for start, stop in spans.values()))
    storages: dict[_StorageKey, torch.UntypedStorage] = {}

    def moved(value: Any) -> Any:
        if not _is_dense(value):
            return value if space is None else copy.deepcopy(value)
        storage = value.untyped_storage()
        start, stop = spans[_key_of(storage)]
        is_whole = (start, stop) == (0, storage.nbytes()) and storage.device.type == "cpu"
        if is_whole and space is None:
            return value
        key = _key_of(storage)
        if key not in storages:
            used = _bytes_of(storage, start, stop)
            storages[key] = _copied(used, space).untyped_storage()
        return _rebased(value, storages[key], start)

    return _map_leaves(state, moved, anew=space is not None)


def _copied(used: torch.Tensor, space: CopySpace | None) -> torch.Tensor:
    return used.to("cpu", copy=True) if space is None else space.copy(used)


class CopySpace:
    """Memory for the copy of a state, kept from one copy to the next.

    To get new memory page by page takes four times as long as to fill it (measured: 0.39 s and
    0.08 s for 512 MB). So it is asked for in huge pages, and used again.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def clear(self, size: int) -> None:
        """Make room for so many bytes; what was copied before is not needed any more."""
        self._used = 0
        if size == 0 or (self._memory is not None and size <= len(self._memory) <= 2 * size):
            return
        self._memory = None  # before there is more
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Copy some bytes, from any device, into a storage of their own."""
        size = data.numel()
        if self._memory is None or size == 0:
            return data.to("cpu", copy=True)
        target = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._used)
        self._used += size + -size % _ALIGNMENT
        return target.copy_(data)


_StorageKey = tuple[str, int, int]


def _key_of(storage: torch.UntypedStorage) -> _StorageKey:
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def _is_dense(value: Any) -> bool:
    if type(value) not in _PLAIN_TENSORS or value.layout != torch.strided or vars(value):
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg() or value.is_meta)


def _note_span(value: Any, spans: dict[_StorageKey, tuple[int, int]]) -> Any:
    """Widen what is known to be used of a storage by what a tensor uses of it, in bytes."""
    if _is_dense(value):
        key = _key_of(value.untyped_storage())
        size = value.element_size()
        first = value.storage_offset() * size
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        stop = first + (last + 1) * size if value.numel() else first
        first -= first % _ALIGNMENT
        start, end = spans.get(key, (first, stop))
        spans[key] = min(start, first), max(end, stop)
    return value


def _bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return data.set_(storage, start, (stop - start,), (1,))


def _rebased(value: torch.Tensor, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
    tensor = torch.empty(0, dtype=value.dtype)
    offset = value.storage_offset() - start // value.element_size()
    tensor.set_(storage, offset if value.numel() else 0, value.shape, value.stride())
    if isinstance(value, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)


def check_loadable(state: object, target: str) -> None:
    """Raise if `torch.load` with its safe defaults would refuse a state.

    Args:
        state: What is going to be saved.
        target: Path for the message.

    Raises:
        CheckpointError: Names each offender with its keys, its type and what to save instead.
    """
    refused = list(_refused(state, "obj", set()))
    if not refused:
        return
    lines = [f"  {path} is a {type_name_of(value)}: {_advice(value)}" for path, value, _ in refused]
    rest = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    raise CheckpointError(
        f"Could not save {target}: a safe load would refuse parts of it.\n"
        + "\n".join(lines[:_MAX_SHOWN] + rest)
        + "\nNothing was written. Types of your own can be allowed with "
        "torch.serialization.add_safe_globals().",
        path=target,
    ) from refused[0][2]


def _refused(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Exception]]:
    """Yield the path, the value and the loader's error for each part that it would refuse."""
    kind = type(value)
    if kind in _PLAIN_LEAVES and not _is_huge(value):
        return
    if kind in _PLAIN_TENSORS and not vars(value):
        return
    if kind in _PLAIN_MAPPINGS or kind in (list, tuple, set):
        if id(value) not in seen:
            seen.add(id(value))
            for part_path, part in _parts(value, path):
                yield from _refused(part, part_path, seen)
        return
    error = _loader_error(value)
    if error is not None:
        yield path, value, error


def _is_huge(value: Any) -> bool:
    """Whether this is an integer that pickle writes in a way that the safe loader does not know."""
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"the key {key!r} of {path}", key
            yield f"{path}[{key!r}]", item
        # torch keeps the versions of modules as an attribute of the state dict.
        yield from (
            (f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()
        )
    else:
        template = "{}{{...}}" if isinstance(value, set) else "{}[{}]"
        yield from ((template.format(path, index), item) for index, item in enumerate(value))


def _loader_error(value: object) -> Exception | None:
    """Ask the safe loader itself, which knows every type that it allows."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # a user's type may raise anything
        return error
    return None


def _advice(value: object) -> str:
    """Say what to save instead of a value that the safe loader refuses."""
    kinds = [kind.__name__ for kind in type(value).__mro__]
    if hasattr(value, "_fields"):
        return "save tuple(x) or x._asdict()"
    if hasattr(value, "__dataclass_fields__"):
        return "save dataclasses.asdict(x)"
    return next((_ADVICE[kind] for kind in kinds if kind in _ADVICE), _GENERAL_ADVICE)


_GENERAL_ADVICE = "save what it is made from, as numbers, strings, tensors, dicts and lists"
_ADVICE = {
    "ndarray": "save torch.from_numpy(x)",
    "generic": "save x.item()",
    "Enum": "save x.value or x.name",
    "PurePath": "save str(x)",
    "TorchVersion": "save str(x)",
    "UUID": "save str(x)",
    "Decimal": "save str(x)",
    "date": "save x.isoformat()",
    "time": "save x.isoformat()",
    "timedelta": "save x.total_seconds()",
    "Namespace": "save vars(x)",
    "defaultdict": "save dict(x)",
    "deque": "save list(x)",
    "frozenset": "save set(x)",
    "range": "save list(x)",
}


def one_line(error: BaseException) -> str:
    """Describe an error by its type and the first line of its text."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}".rstrip(".")
