"""Do all ranks hold the same bits? Digests are compared, and only a difference is looked into."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpkit.agree import exchange
from ddpkit.errors import ConfigError
from ddpkit.group import communication_device, require_group
from ddpkit.wording import by_ranks, name_ranks, shortened
from ddpkit.wrap import plain_model

__all__ = ["Entry", "Gap", "assert_replicas_equal", "find_difference", "gap_between"]

_NAME = "assert_replicas_equal"
_BLOCK = 1 << 18  # elements or bytes that are looked at at a time: they stay in the cache
_MAX_WIDTH = 60
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)


def assert_replicas_equal(model: object, *, gradients: bool = False) -> None:
    """Raise on every rank if a model is not the same, bit by bit, on all ranks.

    Collective: every rank must call this. In a world of one it compares nothing. For tests and for
    debugging: each rank reads its parameters and buffers once (0.2 s for 100 MB) and sends a
    digest. Values are sent only when something differs.

    The bits count: a NaN equals the same NaN, and 0.0 differs from -0.0. Devices and strides do not
    count, and neither does what wraps the model as a whole (DDP, `torch.compile`).

    Args:
        model: A model, wrapped or not; or anything else that has a `state_dict()`, such as an
            optimizer; or a dictionary or list of these, such as is given to `rank0_save`. In a
            state dict plain values are compared, too, and of other objects only the type.
        gradients: Whether to compare the gradients of parameters as well.

    Raises:
        AssertionError: Something differs. The text, the same on all ranks, names the first of them,
            the ranks, and where and how far a tensor is from rank 0's.
        ConfigError: There is nothing to compare in what was given, or some tensor has no data (it
            is on the meta device, or belongs to a lazy layer) on some rank; all ranks raise.
        PeerError: Another rank failed meanwhile.
        GroupError: The ranks called different functions, ranks did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> assert_replicas_equal(nn.Linear(4, 2))
    """
    if not _is_comparable(model):
        raise ConfigError(
            f"{_NAME}() was given a {type(model).__qualname__}; expected a torch.nn.Module, "
            "something with a state_dict(), or a dictionary or list of these."
        )
    parts = _by_name(_parts(model, "", gradients=gradients))
    empty = [name for name, part in parts.items() if isinstance(part, Tensor) and _is_empty(part)]
    is_compared = require_group(_NAME) and not empty
    table = {name: _entry(part) for name, part in parts.items()} if is_compared else {}
    summaries = exchange((_digest_of_table(table), shortened(empty)), name=_NAME)
    _check_have_data([missing for _, missing in summaries])
    if len({digest for digest, _ in summaries}) > 1:
        difference = find_difference(exchange(table, name=_NAME))
        raise AssertionError(_message(difference, parts))


# ----------------------------------------------------------------------------- what is compared


def _is_comparable(value: object) -> bool:
    if isinstance(value, type):
        return False
    return isinstance(value, (nn.Module, Mapping, list, tuple)) or _has_state(value)


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _parts(value: Any, path: str, *, gradients: bool) -> Iterator[tuple[str, Any]]:
    """Take apart what was given into tensors and plain values, with their names."""
    if isinstance(value, nn.Module):
        for name, part in _module_parts(plain_model(value), gradients=gradients):
            yield _joined(path, name), part
    elif _has_state(value):
        yield from _parts(value.state_dict(), path, gradients=gradients)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(part, _joined(path, key), gradients=gradients)
    elif isinstance(value, (list, tuple, set, frozenset)):
        is_ordered = isinstance(value, (list, tuple))
        for index, part in enumerate(value if is_ordered else sorted(value, key=repr)):
            yield from _parts(part, _joined(path, index), gradients=gradients)
    else:
        yield path, value


def _by_name(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Number those whose names are alike, such as the keys "a.b" and "b" in "a"."""
    table: dict[str, Any] = {}
    for name, part in parts:
        numbered = (f"{name} #{number}" for number in itertools.count(2))
        free = itertools.chain([name], numbered)
        table[next(each for each in free if each not in table)] = part
    return table


def _module_parts(model: nn.Module, *, gradients: bool) -> Iterator[tuple[str, Any]]:
    # Not its state dict, which leaves buffers out that are not persistent.
    for name, parameter in model.named_parameters():
        yield name, parameter
        if gradients:
            yield f"{name}.grad", parameter.grad
    yield from model.named_buffers()


def _joined(path: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _is_empty(tensor: Tensor) -> bool:
    return nn.parameter.is_lazy(tensor) or tensor.device.type == "meta"


def _check_have_data(missing: Sequence[str]) -> None:
    ranks = [rank for rank, names in enumerate(missing) if names]
    if ranks:
        raise ConfigError(
            f"{_NAME}() was given tensors that have no data on {name_ranks(ranks)}: "
            f"{missing[ranks[0]]}. Materialise a model that was made on the meta device, and run "
            "one batch through lazy layers, before it is compared."
        )


# ------------------------------------------------------------------------------------ the digests


@dataclass(frozen=True)
class Entry:
    """What the ranks tell each other of one tensor or value."""

    what: str
    """Type and shape of a tensor; the value itself, where it is plain."""
    digest: bytes
    """Digest of all its bits."""
    is_dense: bool = False
    """Whether it is a tensor whose elements can be compared one by one."""


def _entry(part: Any) -> Entry:
    digest = hashlib.sha256()  # in the instructions of most processors, hence faster than others
    if isinstance(part, Tensor):
        for piece in _dense_pieces(part):
            for block in _blocks(_flat(piece).view(torch.uint8)):
                digest.update(_memory(block))
        is_dense = part.layout == torch.strided and not part.is_quantized
        return Entry(_description(part), digest.digest(), is_dense)
    text = repr(part) if isinstance(part, _PLAIN) else f"a {type(part).__qualname__}"
    digest.update(text.encode(errors="surrogatepass"))
    short = text if len(text) <= _MAX_WIDTH else f"{text[:_MAX_WIDTH]}..."
    return Entry(short, digest.digest())


def _description(tensor: Tensor) -> str:
    layout = [] if tensor.layout == torch.strided else [str(tensor.layout)]
    words = [str(tensor.dtype), str(tuple(tensor.shape)), *layout]
    return " ".join(word.removeprefix("torch.") for word in words)


def _dense_pieces(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_quantization(tensor)]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def _quantization(tensor: Tensor) -> list[Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """Yield the elements in parts of bounded size, on the host."""
    yield from (block.cpu() for block in flat.split(_BLOCK) if block.numel())


def _memory(block: Tensor) -> ctypes.Array[ctypes.c_char]:
    # Read where it lies: numpy, which could do that, may be missing.
    return (ctypes.c_char * block.numel()).from_address(block.data_ptr())


def _digest_of_table(table: Mapping[str, Entry]) -> bytes:
    # Sorted, because ranks whose models are registered in another order hold the same.
    lines = [(name, entry.what, entry.digest) for name, entry in sorted(table.items())]
    return hashlib.sha256(repr(lines).encode(errors="surrogatepass")).digest()


# --------------------------------------------------------------------------------- the difference


@dataclass(frozen=True)
class Difference:
    """The first thing that differs between ranks, and how many do."""

    name: str
    entries: tuple[Entry | None, ...]
    """What each rank has of it."""
    count: int
    """How many things differ."""
    total: int

    @property
    def others(self) -> list[int]:
        """The ranks that have something else than rank 0."""
        return [rank for rank, entry in enumerate(self.entries) if entry != self.entries[0]]

    @property
    def kinds(self) -> set[str]:
        """What the ranks have, as far as type, shape or plain value tell."""
        return {_what(entry) for entry in self.entries}

    @property
    def is_in_elements(self) -> bool:
        """Whether all ranks have a dense tensor of the same type and shape."""
        return len(self.kinds) == 1 and all(entry and entry.is_dense for entry in self.entries)


def find_difference(tables: Sequence[Mapping[str, Entry]]) -> Difference:
    """Find the first thing, in rank 0's order, that is not the same on all ranks.

    Args:
        tables: What each rank has, by name. They differ.

    Returns:
        The difference.
    """
    names = dict.fromkeys(name for table in tables for name in table)
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    name = differing[0]
    entries = tuple(table.get(name) for table in tables)
    return Difference(name, entries, len(differing), len(names))


def _what(entry: Entry | None) -> str:
    return "missing" if entry is None else entry.what


def _message(difference: Difference, parts: Mapping[str, Any]) -> str:
    """Describe a difference. Collective, where the elements of a tensor are compared."""
    text = _headline(difference)
    if difference.is_in_elements:
        tensor = parts[difference.name]
        rank = difference.others[0]
        gap = exchange(_gap(tensor), name=_NAME)[rank]
        text += f"; {_describe_gap(gap, rank, tensor.shape)}"
    return (
        f"The replicas are not equal: {difference.count} of {difference.total} tensors or values "
        f"differ between ranks. The first: {text}. Replicas come apart when a rank changes them "
        "for itself: by a step or a load on one rank alone, or by gradients that were not averaged."
    )


def _headline(difference: Difference) -> str:
    if len(difference.kinds) == 1:
        (what,) = difference.kinds
        return (
            f"{difference.name} ({what}) differs on {name_ranks(difference.others)} from rank 0's"
        )
    return f"{difference.name} is {by_ranks(dict(enumerate(map(_what, difference.entries))))}"


# ------------------------------------------------------------------------ how far tensors are apart


@dataclass(frozen=True)
class Gap:
    """Where a tensor of one rank is farthest from rank 0's."""

    count: int = 0
    """How many elements differ in their bits."""
    size: float = -1.0
    """The largest difference; infinite where one of the two is not a number."""
    at: int = 0
    """Place of the largest difference in the flat tensor."""
    values: tuple[str, str] = ("", "")
    """What rank 0 and the other rank have there."""


def _gap(tensor: Tensor) -> Gap:
    """Compare a tensor of this rank with rank 0's. Collective."""
    largest = Gap()
    for index, block in enumerate(_blocks(_flat(*_dense_pieces(tensor)))):
        gap = gap_between(_rank0s(block), block, offset=index * _BLOCK)
        count = largest.count + gap.count
        largest = max(largest, gap, key=lambda found: found.size)
        largest = Gap(count, largest.size, largest.at, largest.values)
    return largest


def _rank0s(block: Tensor) -> Tensor:
    # By a collective, because the side channel is slow for much data (14 s for 100 MB, this 1.3 s),
    # and as bytes, because collectives do not know all types.
    sent = block.view(torch.uint8).to(communication_device(), copy=True)
    dist.broadcast(sent, src=0)
    return sent.cpu().view(block.dtype)


def gap_between(expected: Tensor, found: Tensor, *, offset: int = 0) -> Gap:
    """Compare two flat tensors of the same type and length.

    Args:
        expected: Rank 0's.
        found: Another rank's.
        offset: What to add to places.

    Returns:
        Where they are farthest apart.
    """
    differs = (_as_words(expected) != _as_words(found)).any(1)
    if not differs.any():
        return Gap()
    numbers = [_as_numbers(tensor) for tensor in (expected, found)]
    apart = (numbers[0] - numbers[1]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(apart.masked_fill(~differs, -1.0).argmax())
    values = str(numbers[0][at].item()), str(numbers[1][at].item())
    return Gap(int(differs.sum()), float(apart[at]), at + offset, values)


def _as_words(flat: Tensor) -> Tensor:
    """Return the bits of each element, in one number or several."""
    width = flat.element_size()
    word = _WORDS[min(width, 8)]
    return flat.contiguous().view(word).view(-1, width // word.itemsize)


def _as_numbers(tensor: Tensor) -> Tensor:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except RuntimeError:  # torch computes nothing with the smallest types
        return _as_words(tensor)[:, 0].to(torch.float64)


def _describe_gap(gap: Gap, rank: int, shape: Sequence[int]) -> str:
    return (
        f"on rank {rank} in {gap.count} of {math.prod(shape)} elements, most of all at "
        f"{_position(gap.at, shape)}: {gap.values[0]} on rank 0, {gap.values[1]} on rank {rank} "
        f"(a difference of {gap.size:.6g})"
    )


def _position(index: int, shape: Sequence[int]) -> list[int]:
    """Convert the place in a flat tensor to a place in one of this shape."""
    position = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        position.append(place)
    return position[::-1]
