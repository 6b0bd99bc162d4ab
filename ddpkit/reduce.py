"""Sums and means over all ranks, of numbers, tensors and containers of them.

A value is taken apart into leaves. Small ones (metrics, counts) travel in one all-gather of a block
of fixed size and are added on every rank in the order of ranks; larger ones follow in one
all-reduce per type that sums are kept in. The block begins with a digest of what is being reduced.
Because its size is the same whatever the value is, ranks that bring different structures, shapes
or types read each other's digest, and all of them raise, where a plain all-reduce would hang or
return rubbish. A rank whose value cannot be reduced says so in the same way. The guard cannot see
ranks that are in a collective of another kind.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist

from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import (
    backend_device_types,
    communication_device,
    get_world_size,
    require_group,
)
from ddpkit.nested import leaves, map_leaves, with_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_BLOCK_BYTES = 1024
_DIGEST_BYTES = 32
_REFUSED = bytes(_DIGEST_BYTES)
"""Stands in place of the digest where a rank has nothing that could be reduced."""
_REFUSAL = "refused: "
# A Python int is sent as two halves, so that no sum over ranks can leave the range of an int64.
_HALF = 1 << 32
_TOO_LARGE = (
    "integers from -2**63 to 2**63 - 1 can be summed. Convert larger ones to float where that is "
    "exact enough."
)


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
        ConfigError: On some rank a part of the value is neither a number nor a dense tensor nor a
            container, or an integer of more than 64 bits (signed). Every rank raises.
        GroupError: The ranks passed different structures, shapes or types, or no group is open.

    Example:
        >>> reduce_sum({"correct": 90, "loss": 12.5})
        {'correct': 90, 'loss': 12.5}

        A metric keeps sums, adds to them batch by batch on its own rank, and is reduced once:

        >>> confusion = torch.zeros(2, 2, dtype=torch.int64)
        >>> for predicted, label in [(0, 0), (1, 0), (1, 1)]:  # this rank's share of the data
        ...     confusion[label, predicted] += 1
        >>> confusion = reduce_sum(confusion)
        >>> int(confusion.trace()), int(confusion.sum())
        (2, 3)
    """
    return cast("T", _reduce("reduce_sum", lambda: value))


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
        ConfigError: On some rank the weight is negative or not finite, or a part of the value is
            neither a number nor a dense tensor nor a container. Every rank raises.
        GroupError: The ranks passed different structures, shapes or types, or no group is open.

    Example:
        >>> reduce_mean(0.25, weight=64)
        0.25
    """
    total, total_weight = _reduce("reduce_mean", lambda: _weighted(value, weight))
    originals = (leaf for _, leaf in leaves(value, "value"))
    return map_leaves(lambda part: _quotient(part, total_weight, next(originals)), total)


def _weighted(value: Any, weight: float | torch.Tensor) -> tuple[Any, float]:
    factor = _checked_weight(weight)
    if get_world_size() == 1:
        factor = float(factor > 0)  # any other would only round, or overflow
    scaled = (_scaled(path, leaf, factor) for path, leaf in leaves(value, "value"))
    return with_leaves(value, scaled), factor


def _checked_weight(weight: float | torch.Tensor) -> float:
    try:
        factor = float(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
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


def _scaled(path: str, leaf: Any, factor: float) -> Any:
    """Multiply in the type that sums are kept in: nothing is rounded before the division."""
    if isinstance(leaf, torch.Tensor):
        _check_dense(path, leaf)
        wide_type = torch.float64 if _is_integral(leaf.dtype) else _sum_type(leaf.dtype)
        wide = leaf.detach().to(wide_type)
        return wide * factor if factor else torch.zeros_like(wide)
    number = _checked_number(path, leaf)
    wide_number = complex(number) if _is_complex(number) else _as_float(path, number)
    return wide_number * factor if factor else type(wide_number)(0)


def _quotient(total: Any, weight: float, original: Any) -> Any:
    if not isinstance(total, torch.Tensor):
        return total / weight if weight else total * math.nan
    integral = _is_integral(original.dtype)
    dtype = torch.get_default_dtype() if integral else original.dtype
    return (total / weight if weight else total * math.nan).to(dtype)


# ------------------------------------------------------------------------------ taking values apart


def _checked_number(path: str, leaf: Any) -> Any:
    """Return a leaf that is a number, numpy's bool (which Python does not know as one) too."""
    if isinstance(leaf, numbers.Number):
        return leaf
    if type(leaf).__module__ == "numpy" and type(leaf).__name__ in ("bool", "bool_"):
        return bool(leaf)
    raise ConfigError(
        f"{path} is a {type(leaf).__qualname__}; expected a number, a dense tensor, or a "
        "tuple, list or dict of them. Pass only what can be added."
    )


def _as_float(path: str, number: Any) -> float:
    try:
        return float(number)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path} is {type(number).__qualname__} and cannot be summed as a float: {error}."
        ) from error


def _check_dense(path: str, leaf: torch.Tensor) -> None:
    dense = leaf.layout == torch.strided and not leaf.is_nested and not leaf.is_quantized
    if not dense or leaf.device.type == "meta":
        layout = "nested" if leaf.is_nested else str(leaf.layout)
        raise ConfigError(
            f"{path} is a tensor of layout {layout}, type {leaf.dtype} on {leaf.device}; expected "
            "a dense tensor with data. Convert it, for example with to_dense() or dequantize()."
        )
    if not _can_be_summed(leaf.dtype):
        raise ConfigError(
            f"{path} is a tensor of type {leaf.dtype}, which torch cannot add. Convert it to a "
            "type of numbers."
        )


@functools.cache
def _can_be_summed(dtype: torch.dtype) -> bool:
    """Try it: torch has types of a few bits or of raw bits, and later versions have more."""
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
    try:
        one.to(_sum_type(dtype))
    except (NotImplementedError, RuntimeError):
        return False
    return True


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
        _check_dense(path, leaf)
        _check_range(path, leaf)
        parts = 2 if leaf.is_complex() else 1
        return _Slot(leaf, _sum_type(leaf.dtype).to_real(), leaf.numel() * parts)
    number = _checked_number(path, leaf)
    if isinstance(number, numbers.Integral):
        if not -(1 << 63) <= int(number) < 1 << 63:
            raise ConfigError(f"{path} is {number}; {_TOO_LARGE}")
        return _Slot(number, torch.int64, 2)
    if _is_complex(number):
        return _Slot(number, torch.float64, 2)
    return _Slot(_as_float(path, number), torch.float64, 1)


def _check_range(path: str, leaf: torch.Tensor) -> None:
    if leaf.dtype == torch.uint64 and bool((leaf.contiguous().view(torch.int64) < 0).any()):
        raise ConfigError(f"{path} has entries of 2**63 or more; {_TOO_LARGE}")


# --------------------------------------------------------------------------------------- summation


@dataclass(frozen=True)
class _Plan:
    """What one rank brings to a sum."""

    value: Any
    paths: list[str]
    slots: list[_Slot]
    by_stream: dict[torch.dtype, list[_Slot]]

    @property
    def fits(self) -> bool:
        """Whether everything has room in one block."""
        size = sum(slot.count * slot.stream.itemsize for slot in self.slots)
        return size <= _BLOCK_BYTES - _DIGEST_BYTES

    def describe(self, caller: str) -> str:
        """Say in lines what must be equal on all ranks."""
        pairs = zip(self.paths, self.slots, strict=True)
        parts = [f"{path}: {slot.describe()}" for path, slot in pairs]
        # An all-reduce goes another way for each type of device; a block does not.
        streams = {} if self.fits else self.by_stream
        ways = [f"sums in {key} on {_home(slots).type}" for key, slots in streams.items()]
        return "\n".join([f"{caller} of {len(self.slots)} parts", *parts, *ways])


def _plan(value: Any) -> _Plan:
    paths_and_leaves = list(leaves(value, "value"))
    slots = [_slot(path, leaf) for path, leaf in paths_and_leaves]
    streams = sorted({slot.stream for slot in slots}, key=str)
    by_stream = {stream: [slot for slot in slots if slot.stream == stream] for stream in streams}
    return _Plan(value, [path for path, _ in paths_and_leaves], slots, by_stream)


def _reduce(caller: str, make: Callable[[], Any]) -> Any:
    """Sum what a function makes; where it raises `ConfigError` on one rank, every rank raises."""
    in_group = require_group(caller)
    try:
        plan = _plan(make())
    except ConfigError as error:
        if in_group:
            _refuse(error)
        raise
    if not in_group:
        return with_leaves(plan.value, (slot.decode(slot.encode()) for slot in plan.slots))
    sums = _sum_over_ranks(plan, plan.describe(caller))
    decoded = _decoded(plan.by_stream, sums)
    return with_leaves(plan.value, (decoded[id(slot)] for slot in plan.slots))


def _refuse(error: ConfigError) -> NoReturn:
    blocks = _all_gather_bytes(_block(_REFUSED, []))
    _check_digests(blocks, _REFUSED, f"{_REFUSAL}{error}")
    raise AssertionError("a refusal is always told")


def _home(slots: list[_Slot]) -> torch.device:
    """Choose the device on which a stream is summed."""
    devices = (slot.leaf.device for slot in slots if isinstance(slot.leaf, torch.Tensor))
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    return device if device.type in backend_device_types() else communication_device()


def _packed(slots: list[_Slot], home: torch.device) -> torch.Tensor:
    """Return the encodings of some slots in one flat tensor."""
    return torch.cat([slot.encode().to(home) for slot in slots])


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


def _sum_over_ranks(plan: _Plan, description: str) -> dict[torch.dtype, torch.Tensor]:
    digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_BYTES).digest()
    cpu = torch.device("cpu")
    payload = [_packed(slots, cpu) for slots in plan.by_stream.values()] if plan.fits else []
    blocks = _all_gather_bytes(_block(digest, payload))
    _check_digests(blocks, digest, description)
    if plan.fits:
        return _add_blocks(blocks, plan.by_stream)
    return {key: _all_reduce(_packed(slots, _home(slots))) for key, slots in plan.by_stream.items()}


def _block(digest: bytes, payload: list[torch.Tensor]) -> torch.Tensor:
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    content = torch.cat([_as_tensor(digest), *(part.view(torch.uint8) for part in payload)])
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
    # Always on storage of our own: the input must not change.
    values = values.clone()
    dist.all_reduce(values)
    return values


def _check_digests(blocks: torch.Tensor, digest: bytes, description: str) -> None:
    alike = bool((blocks[:, :_DIGEST_BYTES] == _as_tensor(digest)).all())
    if alike and digest != _REFUSED:
        return
    # Every rank has seen the same blocks and comes here, so that another collective is safe.
    texts = _all_gather_text(description)
    for rank, text in enumerate(texts):
        if text.startswith(_REFUSAL):
            raise ConfigError(f"[rank {rank}/{len(texts)}] {text.removeprefix(_REFUSAL)}")
    raise GroupError(_mismatch_message(texts))


def _all_gather_text(text: str) -> list[str]:
    encoded = text.encode()
    lengths = _all_gather_bytes(torch.tensor([len(encoded)]).view(torch.uint8)).view(torch.int64)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: len(encoded)] = _as_tensor(encoded)
    rows = _all_gather_bytes(padded)
    pairs = zip(rows, lengths.flatten().tolist(), strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in pairs]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
