"""Gives all ranks the same values of tensors that no gradient keeps alike: those of rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.agree import exchange
from ddpkit.errors import GroupError
from ddpkit.wording import by_ranks

_BROADCAST_BYTES = 250 << 20
_MESSAGE_BYTES = 1 << 20
_MAX_SHOWN = 6

Layout = list[tuple[torch.Size, torch.dtype, torch.device]]


class BufferMessage:
    """Broadcasts a model's buffers of all types in one message, which is made once.

    What torch's own part sends is one message for each type, of which batch norm has two, and it
    packs them anew each time. For the few numbers of batch norm that takes twice as long.

    A forward may put other buffers in place (a cache that grows with the longest text), and where
    the ranks have messages of different sizes, the values are garbage or the process ends. So each
    message has the layout that all ranks had before, and a digest of what rank 0 has now.

    Args:
        group: The group whose ranks share the model.
        listed: Lists the buffers, in the same order on all ranks.
        named: Gives their names to them, for messages.
        together: Whether the group has all ranks, which then raise the same error together.
    """

    def __init__(
        self,
        group: Any,
        listed: Callable[[], Iterable[torch.Tensor]],
        named: Callable[[], Mapping[str, torch.Tensor]],
        *,
        together: bool,
    ) -> None:
        self._group = group
        self._listed = listed
        self._named = named
        self._together = together
        self._table = describe_buffers(named())
        self._parcel = _Parcel(_layout(listed()), _digest(self._table), group)

    def broadcast(self) -> None:
        """Give every rank the values of rank 0. Collective.

        For the graph of a forward the buffers stay what they were: it may be kept for another
        backward, and their values are no part of it.

        Raises:
            GroupError: The ranks have different buffers; they are named. A rank that alone has
                others than before raises alone, unless it is rank 0.
        """
        # Of `.data` torch counts no versions, in contrast to `.detach()`.
        tensors = [buffer.data for buffer in self._listed()]
        layout = _layout(tensors)
        if layout != self._parcel.layout:
            self._renew(layout)
        if self._parcel.carry(tensors) != self._parcel.digest:
            raise GroupError(differing_message(self._everyones(self._table)))

    def _renew(self, layout: Layout) -> None:
        """Let the message fit other buffers than before, if all ranks have them."""
        table = describe_buffers(self._named())
        parcel = _Parcel(layout, _digest(table), self._group)
        if parcel.digest != self._parcel.digest:  # and not merely on another device
            told = self._parcel.carry_digest(parcel.digest)
            if told == self._parcel.digest:
                raise GroupError(differing_message({0: self._table, self._rank: table}))
            tables = self._everyones(table)
            if told not in (None, parcel.digest) or any(has != table for has in tables.values()):
                raise GroupError(differing_message(tables))
        self._table, self._parcel = table, parcel

    def _everyones(self, table: dict[str, str]) -> dict[int, dict[str, str]]:
        if not self._together:
            return {self._rank: table}
        # All ranks come here: each has seen by now that rank 0's buffers are others than before.
        return dict(enumerate(exchange(table, name="ddp")))

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group)


class _Parcel:
    """Room for buffers of one layout, and for a digest of it, on their way from rank 0.

    Args:
        layout: Shapes, types and devices.
        digest: What tells the layout from others, on all ranks.
        group: The group whose ranks share the model.
    """

    def __init__(self, layout: Layout, digest: int, group: Any) -> None:
        self.layout = layout
        self.digest = digest
        self._group = group
        self._source = dist.get_global_rank(group, 0)
        self._is_source = dist.get_rank() == self._source
        self._message: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []
        if layout:
            self._make_room()

    def _make_room(self) -> None:
        layout = [(torch.Size([1]), torch.int64, self.layout[0][2]), *self.layout]
        units = [dtype.itemsize for _, dtype, _ in layout]
        sizes = [shape.numel() * unit for (shape, _, _), unit in zip(layout, units, strict=True)]
        devices = {device for _, _, device in layout}
        if len(devices) > 1 or sum(sizes) > _MESSAGE_BYTES:
            return
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=devices.pop())
        self._message = message
        self._digest_place, *self._places = [
            message[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype, _) in zip(
                aligned_starts(sizes, units), sizes, layout, strict=True
            )
        ]
        self._digest_place.fill_(self.digest)

    def carry(self, tensors: list[torch.Tensor]) -> int:
        """Give every rank the values of rank 0. Collective.

        Args:
            tensors: The buffers; overwritten in place, unless rank 0 has others by now.

        Returns:
            The digest of rank 0's layout, as far as it can be looked at for free.
        """
        if not tensors:
            return self.digest
        if self._message is None:
            return self._seen(self._send_in_buckets(tensors, self.digest))
        if self._is_source:
            torch._foreach_copy_(self._places, tensors)  # what torch's optimizers use
        dist.broadcast(self._message, self._source, self._group)
        if self._is_source:
            return self.digest
        told = self._seen(self._digest_place)
        if told == self.digest:
            torch._foreach_copy_(tensors, self._places)
        return told

    def carry_digest(self, digest: int) -> int | None:
        """Take part in a `carry` without values, on a rank that has other buffers by now.

        Args:
            digest: That of the buffers that it has.

        Returns:
            The digest of rank 0's layout; None where nothing is carried.
        """
        if not self.layout:
            return None
        if self._message is None:
            values = [torch.zeros(size, dtype=kind, device=at) for size, kind, at in self.layout]
            return int(self._send_in_buckets(values, digest).item())
        self._digest_place.fill_(digest)
        dist.broadcast(self._message, self._source, self._group)
        told = int(self._digest_place.item())
        self._digest_place.fill_(self.digest)
        return told

    def _send_in_buckets(self, tensors: list[torch.Tensor], digest: int) -> torch.Tensor:
        # In a type that travels anyway, so that it makes no bucket of its own.
        types = (place for place in self.layout if place[1].is_floating_point)
        _, dtype, device = next(types, (None, torch.int64, tensors[0].device))
        first = torch.full((1,), digest, dtype=torch.int64, device=device).view(dtype)
        broadcast_from_rank0([first, *tensors], self._group)
        return first.view(torch.int64)

    def _seen(self, place: torch.Tensor) -> int:
        # On an accelerator the host would wait for it in each step. What is not seen there ends in
        # a time-out of the ranks that are left alone.
        return int(place.item()) if place.device.type == "cpu" else self.digest


def _layout(tensors: Iterable[torch.Tensor]) -> Layout:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def describe_buffers(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describe buffers as far as they must be equal on all ranks.

    Args:
        named: The buffers by name.
    """
    return {name: f"{tuple(item.shape)} {item.dtype}" for name, item in named.items()}


def _digest(table: Mapping[str, str]) -> int:
    text = repr(list(table.items())).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def differing_message(tables: Mapping[int, Mapping[str, str]]) -> str:
    """Say how the buffers of ranks differ.

    Args:
        tables: What ranks have, by name; or what the only one that is known has.
    """
    names = dict.fromkeys(name for table in tables.values() for name in table)
    by_name = {name: {r: t.get(name, "not there") for r, t in tables.items()} for name in names}
    lines = [
        f"  {name}: {by_ranks(found)}"
        for name, found in by_name.items()
        if len(tables) == 1 or len(set(found.values())) > 1
    ]
    details = "\n".join(lines[:_MAX_SHOWN] or ["  the order differs"])
    return (
        "Buffers of the model that ddp() wrapped differ between ranks by now, so that those of "
        f"rank 0 cannot be given to all:\n{details}\nLet forward make the same buffers on every "
        "rank. What each rank makes for itself, such as a cache, should be a plain attribute, or "
        "leave all buffers to the ranks: ddp(model, forward_sync_buffers=False)."
    )


def aligned_starts(sizes: Sequence[int], units: Sequence[int]) -> list[int]:
    """Say where in one piece of memory each of several arrays can begin, without gaps.

    Args:
        sizes: Bytes of each array.
        units: Bytes of an element of each array, powers of two.

    Returns:
        For each array an offset that is a multiple of its unit.
    """
    order = sorted(range(len(sizes)), key=lambda index: -units[index])
    offsets = accumulate((sizes[index] for index in order), initial=0)
    by_index = dict(zip(order, offsets, strict=False))
    return [by_index[index] for index in range(len(sizes))]


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """List a model's buffers, each once.

    Like `model.buffers()` in a fifth of the time, for it is called in every step.

    Args:
        model: The model.
    """
    pending, seen = [model], {id(model)}
    found: dict[int, torch.Tensor] = {}
    for module in pending:
        for buffer in module._buffers.values():  # noqa: SLF001  # as of named_buffers()
            if buffer is not None:
                found.setdefault(id(buffer), buffer)
        for child in module._modules.values():  # noqa: SLF001
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return list(found.values())


def broadcast_from_rank0(tensors: list[torch.Tensor], group: Any) -> None:
    """Give every rank of a group the values of its rank 0, packed. Collective.

    Args:
        tensors: The tensors, which are overwritten.
        group: The group.
    """
    if not tensors:
        return  # torch asserts that there is something to send
    # torch's own part of DDP: packs the tensors in C++, in buckets of bounded size.
    real = [torch.view_as_real(item) if item.is_complex() else item for item in tensors]
    with torch.no_grad():
        dist._broadcast_coalesced(  # noqa: SLF001
            group, [item.detach() for item in real], _BROADCAST_BYTES, 0
        )
