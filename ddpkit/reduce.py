"""Sums and means over all ranks, of numbers, tensors and containers of them.

A value is taken apart into leaves. Small ones (metrics, counts) travel in one all-gather of a block
of fixed size and are added on every rank in the order of ranks; larger ones follow in one
all-reduce per type that sums are kept in. The block begins with a digest of what is being reduced.
Because its size is the same whatever the value is, ranks that bring different structures, shapes
or types read each other's digest, and all of them raise, where a plain all-reduce would hang or
return rubbish. The guard cannot see ranks that are in a collective of another kind.
"""

from __future__ import annotations

import copy
import hashlib
import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist

from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import backend_device_types, communication_device, require_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_BLOCK_BYTES = 1024
_DIGEST_BYTES = 32
_DESCRIPTION_BYTES = 2048
# A Python int is sent as two halves, so that no sum over ranks can leave the range of an int64.
_HALF = 1 << 32


# ---------------------------------------------------------------------------------- public calls


def reduce_sum(value: T) -> T:
    """Add up a value over all ranks.

    Collective: every rank must call this, with the same structure, shapes and types; if they
    differ, every rank raises. A value of up to about a hundred numbers takes one collective. The
    result has the same bits on all ranks. In a world of one it is the value itself.

    Args:
        value: A number, a tensor, or a tuple, named tuple, list or dict of them, nested at will.
            It is not changed. A dict is matched by its keys, not by their order.

    Returns:
        The same structure. Python numbers stay Python numbers: ints are added exactly, floats in
        float64, and bools are counted. Tensors keep shape and device and have the type that
        `torch.sum` gives: floating and complex ones their own (16 bits and less are added in
        float32), integers and bools int64. Gradients do not flow through it.

    Raises:
        ConfigError: A part of the value is neither a number nor a dense tensor nor a container.
        GroupError: The ranks passed different structures, shapes or types, or no group is open.

    Example:
        >>> reduce_sum({"correct": 90, "loss": 12.5})
        {'correct': 90, 'loss': 12.5}
    """
    return cast("T", _reduce("reduce_sum", value))


@overload
def reduce_mean(value: float, weight: float | torch.Tensor = 1.0) -> float: ...


@overload
def reduce_mean(value: T, weight: float | torch.Tensor = 1.0) -> T: ...


def reduce_mean(value: Any, weight: float | torch.Tensor = 1.0) -> Any:
    """Average a value over all ranks: sum(value * weight) / sum(weight).

    Collective: every rank must call this, with the same structure, shapes and types; if they
    differ, every rank raises. In a world of one it is the value itself, unless the weight is 0.

    Args:
        value: A number, a tensor, or a tuple, named tuple, list or dict of them, nested at will.
        weight: How much this rank counts: how many samples its value was computed from. With 0
            the value is ignored, NaN and infinity too; only its structure matters.

    Returns:
        The same structure. Numbers come back as float (or complex). Tensors keep shape and device;
        floating and complex ones keep their type, others get the default floating type. If the
        weights of all ranks are 0, every entry is NaN.

    Raises:
        ConfigError: The weight is negative or not finite, or a part of the value is neither a
            number nor a dense tensor nor a container.
        GroupError: The ranks passed different structures, shapes or types, or no group is open.

    Example:
        >>> reduce_mean(0.25, weight=64)
        0.25
    """
    factor = _checked_weight(weight)
    scaled = _map_leaves(lambda leaf: _scaled(leaf, factor), value)
    total, total_weight = _reduce("reduce_mean", (scaled, factor))
    leaves = iter([leaf for _, leaf in _leaves(value, "value")])
    return _map_leaves(lambda part: _quotient(part, total_weight, next(leaves)), total)


def _checked_weight(weight: float | torch.Tensor) -> float:
    try:
        factor = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"weight={weight!r} was given to reduce_mean; expected one number, such as the number "
            "of samples that the value was computed from."
        ) from error
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"weight={factor} was given to reduce_mean; expected a finite number of at least 0. A "
            "rank that has nothing to contribute passes 0."
        )
    return factor


def _scaled(leaf: Any, factor: float) -> Any:
    """Multiply in the type that sums are kept in: nothing is rounded before the division."""
    if isinstance(leaf, torch.Tensor):
        wide_type = torch.float64 if _is_integral(leaf.dtype) else _sum_type(leaf.dtype)
        wide = leaf.detach().to(wide_type)
        return wide * factor if factor else torch.zeros_like(wide)
    number = complex(leaf) if _is_complex(leaf) else float(leaf)
    return number * factor if factor else type(number)(0)


def _quotient(total: Any, weight: float, original: Any) -> Any:
    if not isinstance(total, torch.Tensor):
        return total / weight if weight else total * math.nan
    integral = _is_integral(original.dtype)
    dtype = torch.get_default_dtype() if integral else original.dtype
    return (total / weight if weight else total * math.nan).to(dtype)


# ------------------------------------------------------------------------------ taking values apart


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves with their path, in an order that does not depend on the order of keys."""
    if isinstance(value, (torch.Tensor, numbers.Number)):
        yield path, value
    elif isinstance(value, dict):
        for key in _ordered_keys(value):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        raise ConfigError(
            f"{path} is a {type(value).__qualname__}; expected a number, a dense tensor, or a "
            "tuple, list or dict of them. Pass only what can be added."
        )


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild a structure with every leaf replaced, in the order of `_leaves`."""
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update({key: _map_leaves(function, value[key]) for key in _ordered_keys(value)})
        return new
    if isinstance(value, (tuple, list)):
        items = [_map_leaves(function, item) for item in value]
        is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named_tuple else type(value)(items)
    return function(value)


def _ordered_keys(value: dict[Any, Any]) -> list[Any]:
    return sorted(value, key=repr)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_complex(number: Any) -> bool:
    return isinstance(number, numbers.Complex) and not isinstance(number, numbers.Real)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a tensor of this type is summed in."""
    if _is_integral(dtype):
        return torch.int64
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _result_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if _is_integral(dtype) else dtype


@dataclass(frozen=True)
class _Slot:
    """Where one leaf lies among the values that are summed, and how it is made again."""

    leaf: Any
    stream: torch.dtype
    """Real type that the sum is kept in."""
    count: int
    """How many values of that type it takes."""

    def describe(self) -> str:
        """Say what must be equal on all ranks."""
        if isinstance(self.leaf, torch.Tensor):
            return f"tensor {self.leaf.dtype} {tuple(self.leaf.shape)}"
        if self.stream == torch.int64:
            return "int"
        return "complex" if self.count == 2 else "float"

    def encode(self) -> torch.Tensor:
        """Return the leaf as a flat tensor of real values, on the leaf's own device."""
        if isinstance(self.leaf, torch.Tensor):
            wide = self.leaf.detach().to(_sum_type(self.leaf.dtype))
            # Conjugation is a flag of the tensor; the real and imaginary parts do not have it.
            wide = torch.view_as_real(wide.resolve_conj()) if wide.is_complex() else wide
            return wide.reshape(-1)
        if self.stream == torch.int64:
            return torch.tensor(divmod(int(self.leaf), _HALF), dtype=torch.int64)
        number = complex(self.leaf)
        return torch.tensor((number.real, number.imag)[: self.count], dtype=torch.float64)

    def decode(self, total: torch.Tensor) -> Any:
        """Make the leaf's counterpart from the sum of its encodings."""
        if isinstance(self.leaf, torch.Tensor):
            if self.leaf.is_complex():
                total = torch.view_as_complex(total.reshape(-1, 2))
            shaped = total.reshape(self.leaf.shape).to(_result_type(self.leaf.dtype))
            return shaped.to(self.leaf.device, copy=True)
        parts = total.tolist()
        if self.stream == torch.int64:
            return parts[0] * _HALF + parts[1]
        return complex(*parts) if self.count == 2 else parts[0]


def _slot(path: str, leaf: Any) -> _Slot:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
            raise ConfigError(
                f"{path} is a tensor of layout {leaf.layout}, type {leaf.dtype} on {leaf.device}; "
                "expected a dense tensor with data. Convert it, for example with to_dense()."
            )
        parts = 2 if leaf.is_complex() else 1
        return _Slot(leaf, _sum_type(leaf.dtype).to_real(), leaf.numel() * parts)
    if isinstance(leaf, numbers.Integral):
        if not -(1 << 63) <= int(leaf) < 1 << 63:
            raise ConfigError(f"{path} is {leaf}; ints of up to 64 bits can be summed.")
        return _Slot(leaf, torch.int64, 2)
    return _Slot(leaf, torch.float64, 2 if _is_complex(leaf) else 1)


# --------------------------------------------------------------------------------------- summation


def _reduce(caller: str, value: Any) -> Any:
    paths_and_leaves = list(_leaves(value, "value"))
    slots = [_slot(path, leaf) for path, leaf in paths_and_leaves]
    streams = sorted({slot.stream for slot in slots}, key=str)
    by_stream = {stream: [slot for slot in slots if slot.stream == stream] for stream in streams}
    if require_group(caller):
        paths = [path for path, _ in paths_and_leaves]
        sums = _sum_over_ranks(caller, paths, slots, by_stream)
    else:
        sums = {stream: _packed(parts) for stream, parts in by_stream.items()}
    decoded = _decoded(by_stream, sums)
    results = iter([decoded[id(slot)] for slot in slots])
    return _map_leaves(lambda _: next(results), value)


def _packed(slots: list[_Slot], device: torch.device | None = None) -> torch.Tensor:
    """Return the encodings of some slots in one flat tensor."""
    parts = [slot.encode() for slot in slots]
    home = device or next((part.device for part in parts if part.device.type != "cpu"), None)
    return torch.cat([part.to(home) if home else part for part in parts])


def _decoded(
    by_stream: dict[torch.dtype, list[_Slot]], sums: dict[torch.dtype, torch.Tensor]
) -> dict[int, Any]:
    return {
        id(slot): slot.decode(part)
        for stream, slots in by_stream.items()
        for slot, part in zip(slots, _split(sums[stream], slots), strict=True)
    }


def _split(total: torch.Tensor, slots: list[_Slot]) -> tuple[torch.Tensor, ...]:
    return torch.split(total, [slot.count for slot in slots])


def _sum_over_ranks(
    caller: str, paths: list[str], slots: list[_Slot], by_stream: dict[torch.dtype, list[_Slot]]
) -> dict[torch.dtype, torch.Tensor]:
    description = _describe(caller, paths, slots)
    digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_BYTES).digest()
    size = sum(slot.count * slot.stream.itemsize for slot in slots)
    fits = size <= _BLOCK_BYTES - _DIGEST_BYTES
    cpu = torch.device("cpu")
    payload = [_packed(parts, cpu) for parts in by_stream.values()] if fits else []
    blocks = _all_gather_bytes(_block(digest, payload))
    _check_digests(blocks, digest, description)
    if fits:
        return _add_blocks(blocks, by_stream)
    return {stream: _all_reduce(_packed(parts)) for stream, parts in by_stream.items()}


def _describe(caller: str, paths: list[str], slots: list[_Slot]) -> str:
    lines = [f"{path}: {slot.describe()}" for path, slot in zip(paths, slots, strict=True)]
    return "\n".join([f"{caller} of {len(slots)} parts", *lines])


def _block(digest: bytes, payload: list[torch.Tensor]) -> torch.Tensor:
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    head = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    content = torch.cat([head, *(part.view(torch.uint8) for part in payload)])
    block[: len(content)] = content
    return block


def _add_blocks(
    blocks: torch.Tensor, by_stream: dict[torch.dtype, list[_Slot]]
) -> dict[torch.dtype, torch.Tensor]:
    sums = {}
    start = _DIGEST_BYTES
    for stream, slots in by_stream.items():
        end = start + sum(slot.count for slot in slots) * stream.itemsize
        rows = blocks[:, start:end].contiguous().view(stream)
        sums[stream] = _add_in_order(rows)
        start = end
    return sums


def _add_in_order(rows: torch.Tensor) -> torch.Tensor:
    # One after the other: the order of a vectorised sum depends on the processor, and the ranks
    # of one job may run on different ones.
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


# ------------------------------------------------------------------------------------- collectives


def _all_gather_bytes(block: torch.Tensor) -> torch.Tensor:
    """Return every rank's block, one a row, on the CPU."""
    device = communication_device()
    world = dist.get_world_size()
    rows = torch.empty((world, block.numel()), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows.unbind(0)), block.to(device))
    return rows.cpu()


def _all_reduce(values: torch.Tensor) -> torch.Tensor:
    if values.device.type not in backend_device_types():
        values = values.to(communication_device())
    # Always on storage of our own: the input must not change.
    values = values.clone()
    dist.all_reduce(values)
    return values


def _check_digests(blocks: torch.Tensor, digest: bytes, description: str) -> None:
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    if bool((blocks[:, :_DIGEST_BYTES] == own).all()):
        return
    # Every rank has seen the same blocks and comes here, so that another collective is safe.
    text = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
    encoded = description.encode()[:_DESCRIPTION_BYTES]
    text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = _all_gather_bytes(text)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    raise GroupError(_mismatch_message(texts))


def _mismatch_message(texts: list[str]) -> str:
    """Say which rank differs from rank 0, and in which part."""
    differing = [rank for rank, text in enumerate(texts) if text != texts[0]]
    other = differing[0] if differing else len(texts) - 1
    ours, theirs = texts[0].splitlines(), texts[other].splitlines()
    pairs = zip(ours, theirs, strict=False)
    here, there = next(((a, b) for a, b in pairs if a != b), (ours[0], theirs[0]))
    return (
        f"The ranks reduce different things: rank 0 has {here!r}, rank {other} has {there!r}. "
        "Every rank must call the same function with the same structure, shapes and types; a rank "
        "that has nothing passes zeros."
    )
