"""What a split leaves on the modules of a model.

A block gets hooks that bring its inputs to its device. A module that is divided into blocks gets a
class of its own, in which its code may meet tensors of several devices. Both find out at each call
where the tensors are, so that copies, pickles and a later `.to()` stay right.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import sys
import types
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ddpkit import mover
from ddpkit.nested import with_items

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ORDER = "_ddpkit_order"
_TWO_DEVICES = "on the same device"


# ------------------------------------------------------------------------------- where a block is


@dataclass(frozen=True)
class Anchor:
    """A tensor by its place below a module; the device of a block is that of its anchor."""

    path: tuple[str, ...]
    """Names of the modules on the way."""
    name: str
    """Name of the tensor in the last of them."""

    def device_in(self, module: nn.Module) -> torch.device | None:
        """Return where the tensor is; of another tensor of the module if it has gone."""
        inner: nn.Module | None = module
        for part in self.path:
            inner = inner._modules.get(part) if inner is not None else None  # noqa: SLF001
        tensor = None if inner is None else _own_tensor(inner, self.name)
        if tensor is None:
            tensor = next(tensors_of(module), None)
        return None if tensor is None else tensor.device


def anchor_of(name: str) -> Anchor:
    """Make an anchor of a tensor's full name."""
    *path, last = name.split(".")
    return Anchor(tuple(path), last)


def _own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)  # noqa: SLF001  # attributes may be computed
    return module._buffers.get(name) if parameter is None else parameter  # noqa: SLF001


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


# -------------------------------------------------------------------------------- hooks of a block


class Entrance:
    """A hook before the forward of a block: it brings the inputs to the block's device.

    Args:
        name: What messages call the block.
        anchor: A tensor of the block.
    """

    def __init__(self, name: str, anchor: Anchor) -> None:
        self.name = name
        self.anchor = anchor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave the code between the blocks, and move what has to be moved."""
        mover.pause(self)  # first, for it would look at each question about a device
        device = self.anchor.device_in(module)
        if device is not None and not _all_on(device, args, kwargs):
            carried = _Carried(device)
            args = tuple(carried.move(item) for item in args)
            carried.update({key: carried.move(item) for key, item in kwargs.items()})
            kwargs = carried
        return args, kwargs


class Exit:
    """A hook after the forward of a block, which runs in any case.

    Args:
        entrance: The hook before it.
    """

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Go back to the code between the blocks."""
        try:
            if isinstance(kwargs, _Carried):
                kwargs.give_back()
        finally:
            mover.resume(self.entrance)
        if output is None:
            self._explain(module, sys.exc_info()[1])

    def _explain(self, module: nn.Module, error: BaseException | None) -> None:
        text = str(error)
        if not isinstance(error, RuntimeError) or _TWO_DEVICES not in text or "(in block" in text:
            return
        device = self.entrance.anchor.device_in(module)
        error.args = (
            f"{text} (in block {self.entrance.name!r}, a {type(module).__name__} on {device}: a "
            "tensor came in by another way than the arguments of its forward. Register it as a "
            "buffer, or pass it as an argument, so that it is moved.)",
        )


def _all_on(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell quickly whether plain tensors, all on the device, are the only inputs."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.device != device:
                return False
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            return False
    return True


@dataclass(frozen=True)
class _Sent:
    original: Any
    moved: Any
    version: int | None
    """Of the moved tensor, before the block; an operation in place raises it."""


def _version(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version  # noqa: SLF001


class _Carried(dict[str, Any]):
    """Keyword arguments of one call that know what was sent and rebuilt for it.

    A list or dict in which a tensor had to move is handed over as a copy, for the caller's own must
    not change. What the block itself does to it, or to a tensor in place, is carried back.

    Args:
        device: Where tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._sent: dict[int, _Sent] = {}
        self._rebuilt: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []

    def move(self, value: Any) -> Any:
        """Return the value with its tensors on the device; the same object if they are already."""
        if isinstance(value, PackedSequence):
            return value if value.data.device == self._device else self._send(value)
        if isinstance(value, torch.Tensor) or _is_movable(value):
            return value if value.device == self._device else self._send(value)
        if isinstance(value, MutableMapping):
            return self._mapping(value)
        if isinstance(value, (list, tuple)):
            return self._sequence(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._fields(value)
        return value

    def _send(self, value: Any) -> Any:
        # Attention looks whether queries, keys and values are one tensor: it is sent once.
        if id(value) not in self._sent:
            moved = value.to(self._device, non_blocking=self._device.type != "cpu")
            self._sent[id(value)] = _Sent(value, moved, _version(moved))
        return self._sent[id(value)].moved

    def _mapping(self, value: MutableMapping[Any, Any]) -> Any:
        moved = {key: self.move(item) for key, item in value.items()}
        if all(moved[key] is value[key] for key in moved):
            return value
        new = with_items(value, moved)
        self._rebuilt.append((value, new, [(value[key], moved[key]) for key in moved]))
        return new

    def _sequence(self, value: Any) -> Any:
        moved = [self.move(item) for item in value]
        if all(new is old for new, old in zip(moved, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        new = copy.copy(value)
        new[:] = moved
        self._rebuilt.append((value, new, list(zip(value, moved, strict=True))))
        return new

    def _fields(self, value: Any) -> Any:
        named = [field.name for field in dataclasses.fields(value)]
        moved = {name: self.move(getattr(value, name)) for name in named if hasattr(value, name)}
        if all(item is getattr(value, name) for name, item in moved.items()):
            return value
        new = copy.copy(value)
        for name, item in moved.items():
            object.__setattr__(new, name, item)  # a frozen one, too
        return new

    def give_back(self) -> None:
        """Do to the caller's tensors, lists and dicts what the block has done to their copies."""
        for sent in self._sent.values():
            if _version(sent.moved) != sent.version:
                sent.original.copy_(sent.moved)
        for original, copied, pairs in reversed(self._rebuilt):
            mine = {id(moved): kept for kept, moved in pairs}
            if isinstance(copied, list):
                if [id(item) for item in copied] != [id(moved) for _, moved in pairs]:
                    original[:] = [mine.get(id(item), item) for item in copied]
            else:
                _give_back_items(original, copied, mine)


def _give_back_items(original: Any, copied: Any, mine: dict[int, Any]) -> None:
    for key in [key for key in original if key not in copied]:
        del original[key]
    for key, item in copied.items():
        kept = mine.get(id(item), item)
        if key not in original or original[key] is not kept:
            original[key] = kept


def _is_movable(value: Any) -> bool:
    """Tell whether an object is like a tensor: it can be moved, and says where it is."""
    if isinstance(value, (type, nn.Module)):
        return False
    return hasattr(value, "to") and hasattr(value, "device")


def attach(block: nn.Module, name: str, tensor_name: str) -> None:
    """Put the hooks of a block on a module.

    Args:
        block: The module.
        name: What messages call it.
        tensor_name: Name of one of its parameters or buffers.
    """
    entrance = Entrance(name, anchor_of(tensor_name))
    block.register_forward_pre_hook(entrance, prepend=True, with_kwargs=True)
    block.register_forward_hook(Exit(entrance), prepend=True, with_kwargs=True, always_call=True)


# ------------------------------------------------------------------------- code between the blocks


class Opened:
    """What modules become that are divided into blocks: their code may meet several devices."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and bring together what meets in its own code."""
        call = super().__call__  # type: ignore[misc]  # of nn.Module
        return mover.run_own_code(devices_in_order(cast("nn.Module", self)), call, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made, and cannot be found by its name.
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            classes = type(self).__mro__
            base = classes[classes.index(Opened) + 1]
            return (_new_opened, (base, *reduced[1][1:]), *reduced[2:])
        return reduced


def _new_opened(base: type, *args: Any) -> Any:
    made = _opened_class(base)
    return made.__new__(made, *args)


@functools.cache
def _opened_class(base: type) -> type:
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return types.new_class(
        base.__name__, (Opened, base), exec_body=lambda body: body.update(namespace)
    )


def open_up(module: nn.Module, order: Sequence[str]) -> None:
    """Let the own code of a module meet several devices.

    Args:
        module: The module.
        order: For each device, in the order of the blocks, the name of a tensor below the module
            that is there.
    """
    setattr(module, _ORDER, tuple(map(anchor_of, order)))
    module.__class__ = _opened_class(cast("Any", type(module)))


def devices_in_order(module: nn.Module) -> list[torch.device]:
    """Return the devices that the code of an opened module meets, in the order of its blocks."""
    found = (anchor.device_in(module) for anchor in getattr(module, _ORDER))
    return list(dict.fromkeys(device for device in found if device is not None))


def carry_over(before: Mapping[str, nn.Module], model: nn.Module) -> None:
    """Put the hooks of blocks on the modules that have taken their place.

    Args:
        before: The modules by name, as they were.
        model: The model in which some of them were exchanged.
    """
    for name, module in model.named_modules():
        old = before.get(name)
        entrance = None if old is None or old is module else _entrance_of(old)
        if entrance is not None:
            attach(module, entrance.name, ".".join([*entrance.anchor.path, entrance.anchor.name]))


def _entrance_of(module: nn.Module) -> Entrance | None:
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001
    return next((hook for hook in hooks if isinstance(hook, Entrance)), None)


def is_split(model: nn.Module) -> bool:
    """Tell whether a model, or a part of it, has been split over devices."""
    return any(_entrance_of(module) is not None for module in model.modules())
