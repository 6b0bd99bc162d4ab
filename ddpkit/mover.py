"""Bringing the tensors of one operation together, where a model lies on several devices.

Blocks of a split model get their inputs moved. Code between the blocks may still meet tensors of
several devices: a residual that skips a block, a concatenation of skips, a loss that is computed
inside of the model. While such code runs, a mode of torch sees every operation and moves what has
to be moved; within blocks it is off, so that they cost nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from ddpkit.meeting import Operand, is_left_alone, meeting_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")

# The sizes of packed sequences, which these may be given, have to be on the CPU.
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])


class Mover(TorchFunctionMode):
    """A mode that moves the tensors of an operation to one device if they are on several.

    Numbers on the CPU, which torch takes on any device, stay where they are.

    Args:
        order: The devices of the model, in the order of its blocks.
    """

    def __init__(self, order: Sequence[torch.device]) -> None:
        self._order = tuple(order)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[torch.Tensor] = []
        _collect(args, found)
        if kwargs:
            _collect(kwargs.values(), found)
        if len(found) > 1 and _meet(found):
            args, kwargs = self._together(_name_of(func), found, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _together(
        self, name: str, found: list[torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        if is_left_alone(name):
            return args, kwargs
        out = kwargs.get("out")
        place = out.device if isinstance(out, torch.Tensor) else None
        device = meeting_device(name, list(map(_operand, found)), self._order, place)
        if device is None:
            return args, kwargs
        move = _Move(device, _is_sizes if name in _RECURRENT else _is_number)
        return move(args), {key: move(item) for key, item in kwargs.items()}


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.device, isinstance(tensor, nn.Parameter), tensor.dim() == 0)


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _meet(found: list[torch.Tensor]) -> bool:
    first = found[0].device
    for tensor in found:
        if tensor.device != first:
            return sum(not _is_number(item) for item in found) > 1
    return False


def _is_number(tensor: torch.Tensor) -> bool:
    """Tell whether torch takes a tensor beside those of any device."""
    return tensor.device.type == "cpu" and tensor.dim() == 0


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", "")


def _is_sizes(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.int64


class _Move:
    """Moves the arguments of one operation, each tensor once."""

    def __init__(self, device: torch.device, stays: Callable[[torch.Tensor], bool]) -> None:
        self._device = device
        self._stays = stays
        self._sent: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            items = [self(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device or self._stays(tensor):
            return tensor
        if id(tensor) not in self._sent:
            self._sent[id(tensor)] = tensor.to(self._device)
        return self._sent[id(tensor)]


# ------------------------------------------------------------------------------- on and off again


class _Thread(threading.local):
    """Which mover is in charge in this thread, and which block has taken it off for a while."""

    def __init__(self) -> None:
        self.mover: Mover | None = None
        self.holder: object | None = None
        self.depth = 0
        self.above: list[Any] = []


_thread = _Thread()


def run_own_code(
    order: Sequence[torch.device], call: Callable[..., R], args: Any, kwargs: Any
) -> R:
    """Call a function with a mover on, unless one is on already or there is one device only.

    Args:
        order: The devices that the function meets, in the order of blocks.
        call: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns. The mover is off again, however it ends.
    """
    is_on = _thread.mover is not None and _thread.holder is None
    if is_on or len(order) < 2:
        return call(*args, **kwargs)
    before = _thread.mover, _thread.holder, _thread.depth, _thread.above
    mover = Mover(order)
    _thread.mover, _thread.holder, _thread.depth, _thread.above = mover, None, 0, []
    _push_mode(mover)
    try:
        return call(*args, **kwargs)
    finally:
        _take_off(mover)
        _thread.mover, _thread.holder, _thread.depth, _thread.above = before


def pause(holder: object) -> None:
    """Switch this thread's mover off, if it is on, until the holder resumes it.

    Args:
        holder: Whoever pauses; a second pause by the same holder needs a second `resume`.
    """
    if _thread.holder is holder:
        _thread.depth += 1
    elif _thread.mover is not None and _thread.holder is None:
        above = _take_off(_thread.mover)
        if above is not None:
            _thread.holder, _thread.depth, _thread.above = holder, 1, above


def resume(holder: object) -> None:
    """Switch the mover on again that this holder has paused; nothing where it has not.

    Args:
        holder: Whoever has paused.
    """
    if _thread.holder is not holder:
        return
    _thread.depth -= 1
    if _thread.depth > 0 or _thread.mover is None:
        return
    above, _thread.holder, _thread.above = _thread.above, None, []
    _put_on(_thread.mover, above)


def _take_off(mover: Mover) -> list[Any] | None:
    """Take a mode out of the stack and return those that were above it; None if it is not there."""
    if _get_current_function_mode() is mover:
        _pop_mode()
        return []
    stack = _get_current_function_mode_stack()
    if not any(mode is mover for mode in stack):
        return None
    above: list[Any] = []
    while (mode := _pop_mode()) is not mover:
        above.insert(0, mode)
    _push_all(above)
    return above


def _put_on(mover: Mover, above: list[Any]) -> None:
    """Put a mode into the stack below those that were above it."""
    for _ in above:
        _pop_mode()
    _push_all([mover, *above])


def _push_all(modes: list[Any]) -> None:
    for mode in modes:
        _push_mode(mode)
