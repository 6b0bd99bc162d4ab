"""Gives all ranks the same values of tensors that no gradient keeps alike: those of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_BROADCAST_BYTES = 250 << 20
_MESSAGE_BYTES = 1 << 20


class BufferMessage:
    """Broadcasts a model's buffers of all types in one message, which is made once.

    What torch's own part sends is one message for each type, of which batch norm has two, and it
    packs them anew each time. For the few numbers of batch norm that takes twice as long.

    Args:
        group: The group whose ranks share the model.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] | None = None
        self._message: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []

    def broadcast(self, buffers: list[torch.Tensor]) -> None:
        """Give every rank the values of rank 0. Collective.

        Args:
            buffers: The buffers, in the same order on all ranks; overwritten in place. For the
                graph of a forward they stay what they were: it may be kept for another backward,
                and their values are no part of it.
        """
        # Of `.data` torch counts no versions, in contrast to `.detach()`.
        tensors = [buffer.data for buffer in buffers]
        self._make_room(tensors)
        if self._message is None:
            broadcast_from_rank0(tensors, self._group)
            return
        source = dist.get_global_rank(self._group, 0)
        if dist.get_rank() == source:
            torch._foreach_copy_(self._places, tensors)  # what torch's optimizers use
        dist.broadcast(self._message, source, self._group)
        if dist.get_rank() != source:
            torch._foreach_copy_(tensors, self._places)

    def _make_room(self, tensors: list[torch.Tensor]) -> None:
        layout = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if layout == self._layout:
            return
        self._layout, self._message = layout, None
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        devices = {tensor.device for tensor in tensors}
        if len(devices) == 1 and sum(sizes) <= _MESSAGE_BYTES:
            starts = aligned_starts(sizes, [tensor.element_size() for tensor in tensors])
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=devices.pop())
            self._message = message
            self._places = [
                message[start : start + size].view(tensor.dtype).view(tensor.shape)
                for tensor, start, size in zip(tensors, starts, sizes, strict=True)
            ]


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
