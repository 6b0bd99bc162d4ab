"""What every rank has, brought together: any objects in a list, or tensors in one tensor.

The ranks first tell each other through the side channel what they bring: how much, of which type,
or why it cannot be sent. So ranks on different paths are named, sizes are never garbage, and a rank
that cannot send its value is an error on all of them. Then the data is delivered, to rank 0 alone
unless all are to have it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from ddpkit.agree import exchange
from ddpkit.delivery import Delivery
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import (
    backend_device_types,
    communication_device,
    get_device,
    get_rank,
    group_is_open,
    require_group,
)
from ddpkit.nested import leaves, with_leaves
from ddpkit.serialize import dump_value, load_value, type_name_of
from ddpkit.wording import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


# ---------------------------------------------------------------------------------- public calls


@overload
def gather(obj: T, *, to_all: Literal[True]) -> list[T]: ...


@overload
def gather(obj: T, *, to_all: bool = False) -> list[T] | None: ...


def gather(obj: T, *, to_all: bool = False) -> list[T] | None:
    """Bring one object of every rank together in a list, on rank 0.

    Collective: every rank must call this. In a world of one it is a list of the object. Rank 0
    unpickles the objects one after the other, and the other ranks get none of them.

    Args:
        obj: Anything that can be pickled. For tensors `gather_cat` is faster and needs less memory.
        to_all: Whether every rank gets the list.

    Returns:
        One object for each rank, in the order of ranks, on rank 0 and None elsewhere; with
        `to_all` on every rank. The rank's own is the object itself; the others are copies with
        their tensors on the CPU.

    Raises:
        ConfigError: The object of some rank cannot be pickled or rebuilt. Every rank raises.
        PeerError: Another rank failed meanwhile.
        GroupError: The ranks called different functions, ranks did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> gather({"rank": 0, "worst": "cat-17.png"})
        [{'rank': 0, 'worst': 'cat-17.png'}]
    """
    name = _name("gather", to_all)
    if not require_group(name):
        return [obj]
    payload, letter = _letter(obj, name) if to_all or get_rank() > 0 else (None, _Letter())
    letters = exchange(letter, name=name)
    _check_all_can_send([letter.problem for letter in letters])
    objects = _Objects(obj, letters)
    sizes = [[letter.size] for letter in letters]
    Delivery(name, sizes, communication_device(), to_all=to_all).run([payload], objects)
    return objects.found if to_all or get_rank() == 0 else None


@overload
def gather_cat(tensor: T, *, to_all: Literal[True]) -> T: ...


@overload
def gather_cat(tensor: T, *, to_all: bool = False) -> T | None: ...


def gather_cat(tensor: T, *, to_all: bool = False) -> T | None:
    """Concatenate the tensors of all ranks along their first dimension, on rank 0.

    Collective: every rank must call this. The first dimension may differ and may be 0; a rank that
    has nothing passes an empty tensor of the shape and type of the others. In a world of one it is
    a copy.

    Args:
        tensor: A dense tensor of any type, or a tuple, named tuple, list or dict of them, nested at
            will. Tensors without dimensions count as one row. It is not changed.
        to_all: Whether every rank gets the result.

    Returns:
        The rows of rank 0, then those of rank 1, and so on, in the same structure, on rank 0 and
        None elsewhere; with `to_all` on every rank. Type and device are those of the rank's own
        tensor. Gradients do not flow through it.

    Raises:
        ConfigError: On some rank a part is no dense tensor. Every rank raises.
        PeerError: Another rank failed meanwhile.
        GroupError: The tensors differ in more than the first dimension, the ranks called different
            functions, ranks did not come within the time-out of the group, or no group is open.

    Example:
        >>> gather_cat({"label": torch.tensor([3, 1]), "score": torch.tensor([[0.5], [0.9]])})
        {'label': tensor([3, 1]), 'score': tensor([[0.5000],
                [0.9000]])}

        Predictions for a test set in its own order, each once:

        >>> from ddpkit import sharded_loader
        >>> loader = sharded_loader(list(range(5)), batch_size=2, uneven="exact")
        >>> gather_cat(torch.cat([inputs * 10 for inputs in loader]))
        tensor([ 0, 10, 20, 30, 40])
    """
    name = _name("gather_cat", to_all)
    in_group = require_group(name)
    parts, offer = _offer(tensor)
    offers = exchange(offer, name=name) if in_group else [offer]
    _check_all_can_send([offer.problem for offer in offers])
    _check_alike(offers)
    rows = _Rows(parts, offers)
    if in_group:
        sizes = [[facts.size for facts in offer.parts] for offer in offers]
        delivery = Delivery(name, sizes, _way(offers), to_all=to_all)
        delivery.run([part.data for part in parts], rows)
    else:
        rows.prepare()
    return with_leaves(tensor, iter(rows.results)) if to_all or get_rank() == 0 else None


def _name(function: str, to_all: bool) -> str:
    # It is part of the name, so that ranks that disagree about it are on different paths.
    return f"{function}(to_all=True)" if to_all else function


def _check_all_can_send(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            where = f"[rank {rank}/{len(problems)}] " if len(problems) > 1 else ""
            raise ConfigError(where + problem)


# --------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class _Letter:
    """What a rank says of the object that it is about to send."""

    size: int = 0
    digest: bytes = b""
    """Digest of the pickle: it is sent unsigned and must be what was announced, before it runs."""
    problem: str = ""


def _letter(obj: object, name: str) -> tuple[torch.Tensor | None, _Letter]:
    try:
        payload = bytearray(dump_value(obj))
    except Exception as error:  # noqa: BLE001  # any type may come from a user's __reduce__
        return None, _Letter(
            problem=f"{name} got a {type_name_of(obj)}, which cannot be sent to another rank "
            f"({type(error).__name__}: {error}). Pass what can be pickled."
        )
    data = torch.frombuffer(payload, dtype=torch.uint8)
    return data, _Letter(len(payload), _digest(payload))


def _digest(payload: bytearray) -> bytes:
    return hashlib.blake2b(payload, digest_size=32).digest()


class _Objects:
    """Takes pickles and rebuilds them one after the other."""

    def __init__(self, own: Any, letters: Sequence[_Letter]) -> None:
        self._letters = letters
        self._pickle = bytearray()
        self.found = [own] * len(letters)

    def prepare(self) -> None:
        """Make room for what is kept."""

    def places(self, rank: int) -> list[torch.Tensor]:
        """Say where the data of a rank is to be put."""
        self._pickle = bytearray(self._letters[rank].size)
        return [torch.frombuffer(self._pickle, dtype=torch.uint8)]

    def accept(self, rank: int) -> None:
        """Use the data of a rank, which is there."""
        payload, self._pickle = self._pickle, bytearray()
        if _digest(payload) != self._letters[rank].digest:
            raise GroupError(
                f"What came from rank {rank} is not what it has announced, so it was not read. Do "
                "the ranks exchange other messages meanwhile, in another thread?"
            )
        try:
            self.found[rank] = load_value(memoryview(payload))
        except Exception as error:
            raise ConfigError(
                f"What rank {rank} has sent cannot be rebuilt on rank {get_rank()} "
                f"({type(error).__name__}: {error}). Pass what can be pickled and unpickled."
            ) from error


# --------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Facts:
    """What a rank says of a tensor that it brings."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How much of the first dimension of the result it fills."""
        return self.shape[0] if self.shape else 1

    @property
    def size(self) -> int:
        """Number of bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def common(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self.path, self.dtype, len(self.shape), self.shape[1:]


@dataclass(frozen=True)
class _Part:
    """A tensor of this rank, and its bytes."""

    facts: _Facts
    data: torch.Tensor


@dataclass(frozen=True)
class _Offer:
    """What a rank says of everything that it brings."""

    parts: tuple[_Facts, ...] = ()
    device: str = ""
    """Type of the accelerator that it can be sent from as it is, if there is one."""
    problem: str = ""


def _offer(value: object) -> tuple[list[_Part], _Offer]:
    try:
        parts = [_part(path, leaf) for path, leaf in leaves(value, "value")]
    except ConfigError as error:
        return [], _Offer(problem=str(error))
    facts = tuple(part.facts for part in parts)
    return parts, _Offer(facts, _direct_type({part.data.device for part in parts}))


def _part(path: str, leaf: Any) -> _Part:
    if not isinstance(leaf, torch.Tensor):
        raise ConfigError(
            f"{path} is a {type_name_of(leaf)}; gather_cat expected a dense tensor, or a tuple, "
            "list or dict of them. For other objects there is gather."
        )
    dense = leaf.layout == torch.strided and not leaf.is_nested and not leaf.is_quantized
    if not dense or leaf.device.type == "meta":
        layout = "nested" if leaf.is_nested else str(leaf.layout)
        raise ConfigError(
            f"{path} is a tensor of layout {layout}, type {leaf.dtype} on {leaf.device}; "
            "gather_cat expected a dense tensor with data. Convert it, for example with to_dense() "
            "or dequantize(), or use gather."
        )
    return _Part(_Facts(path, leaf.dtype, tuple(leaf.shape)), _as_bytes(path, leaf))


def _as_bytes(path: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        # Conjugation and negation are flags of the tensor, which its bytes do not show.
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"{path} is a tensor of type {tensor.dtype} that torch cannot copy ({error}). Pass a "
            "contiguous one."
        ) from error
    # One element counts as contiguous whatever its strides are.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _check_alike(offers: Sequence[_Offer]) -> None:
    first = [facts.common for facts in offers[0].parts]
    if all([facts.common for facts in offer.parts] == first for offer in offers):
        return
    described: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        described.setdefault(_describe(offer), []).append(rank)
    everyones = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in described.items())
    raise GroupError(
        f"The tensors of the ranks cannot be concatenated. {everyones}. Only the first dimension "
        "may differ; a rank that has nothing passes an empty tensor, such as x[:0]."
    )


def _describe(offer: _Offer) -> str:
    parts = [f"{facts.path} {facts.dtype} {facts.shape}" for facts in offer.parts]
    return ", ".join(parts) or "nothing"


class _Rows:
    """Takes the rows of every rank right into the tensors that are the result."""

    def __init__(self, own: Sequence[_Part], offers: Sequence[_Offer]) -> None:
        self._own = own
        self._offers = offers
        self.results: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Make room for what is kept."""
        for index, part in enumerate(self._own):
            everyones = [offer.parts[index] for offer in self._offers]
            shape = (sum(facts.rows for facts in everyones), *part.facts.shape[1:])
            result = torch.empty(shape, dtype=part.facts.dtype, device=part.data.device)
            self.results.append(result)
        for place, part in zip(self.places(get_rank()), self._own, strict=True):
            place.copy_(part.data)

    def places(self, rank: int) -> list[torch.Tensor]:
        """Say where the data of a rank is to be put."""
        found = []
        for index, result in enumerate(self.results):
            sizes = [offer.parts[index].size for offer in self._offers]
            begin = sum(sizes[:rank])
            found.append(result.reshape(-1).view(torch.uint8)[begin : begin + sizes[rank]])
        return found

    def accept(self, rank: int) -> None:
        """Use the data of a rank, which is there."""


def _direct_type(devices: set[torch.device]) -> str:
    """Type of the accelerator whose backend can send from these devices, "" where there is none."""
    device = get_device()
    if device.type == "cpu" or devices != {device} or not group_is_open():
        return ""
    # gloo sends and receives from the CPU alone.
    backends = str(dist.get_backend_config()).split(",")
    served = device.type in backend_device_types() and f"{device.type}:gloo" not in backends
    return device.type if served else ""


def _way(offers: Sequence[_Offer]) -> torch.device:
    """Choose the device that data is sent from, the same kind on all ranks."""
    direct = {offer.device for offer in offers} == {get_device().type}
    return get_device() if direct else communication_device()
