"""Moving batches to the device, ahead of their use where that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch

from ddpkit.nested import with_items

__all__ = ["move", "moved_ahead", "moves_ahead"]

T = TypeVar("T")


def moves_ahead(device: torch.device | None) -> bool:
    """Decide whether batches are copied while the step before is computed.

    Args:
        device: Where batches go.

    Returns:
        True where copies can run on a stream of their own.
    """
    return device is not None and device.type in ("cuda", "xpu")


def move(batch: Any, device: torch.device | None) -> Any:
    """Move what can be moved in nested containers, keeping their types.

    Args:
        batch: Tensors, or whatever has a `to`, in mappings, sequences and named tuples.
        device: Where to; None leaves everything as it is.

    Returns:
        The batch; the very same object where nothing has to be moved.
    """
    if device is None or device.type == "cpu":
        return batch
    return _map(batch, lambda part: part.to(device, non_blocking=True))


def moved_ahead(batches: Iterator[tuple[Any, T]], device: torch.device) -> Iterator[tuple[Any, T]]:
    """Copy each batch on a stream of its own, one batch ahead of its use.

    Args:
        batches: Pairs of a batch and something that belongs to it. Batches in pinned memory are
            copied without holding up this thread.
        device: An accelerator with streams, see `moves_ahead`.

    Yields:
        The same pairs with the batch on the device, safe to use on the current stream.
    """
    stream = torch.Stream(device)
    ahead = _copied(batches, device, stream)
    while ahead is not None:
        current, ahead = ahead, None
        batch, rest, copied = current
        failure: BaseException | None = None
        try:
            ahead = _copied(batches, device, stream)
        except Exception as error:  # noqa: BLE001  # it belongs to the batch after this one
            failure = error
        _await_copy(batch, device, copied)
        yield batch, rest
        if failure is not None:
            raise failure


def _copied(
    batches: Iterator[tuple[Any, T]], device: torch.device, stream: torch.Stream
) -> tuple[Any, T, torch.Event] | None:
    pair = next(batches, None)
    if pair is None:
        return None
    batch, rest = pair
    outer = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        return move(batch, device), rest, stream.record_event()
    finally:
        torch.accelerator.set_stream(outer)


def _await_copy(batch: Any, device: torch.device, copied: torch.Event) -> None:
    """Let the current stream wait for the copy, and the allocator know that it uses the memory."""
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)
    _map(batch, lambda part: _used_on(part, current))


def _used_on(part: Any, stream: torch.Stream) -> Any:
    if isinstance(part, torch.Tensor) and part.device.type != "cpu":
        part.record_stream(stream)
    return part


def _map(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to whatever can be moved, in containers like those that torch pins."""
    if hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, MutableMapping):
        return with_items(batch, {key: _map(value, function) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map(value, function) for value in batch)
    return batch
