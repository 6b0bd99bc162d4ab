"""Where the operands of one operation meet, if a model has them on several devices.

A split model brings them together while it runs, and the rehearsal of a plan foretells it: both ask
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# These take tensors of several devices by themselves, return views that must stay views, or want
# some of their tensors on the CPU.
_LEFT_ALONE = frozenset(
    [
        *("to", "type_as", "copy_", "set_", "__set__", "__get__", "backward", "grad"),
        *("is_set_to", "is_same_size", "result_type", "can_cast"),
        *("view_as", "expand_as", "reshape_as", "broadcast_tensors", "meshgrid"),
        *("atleast_1d", "atleast_2d", "atleast_3d"),
        *("tensor_split", "_pack_padded_sequence", "_pad_packed_sequence"),
    ]
)
_IN_PLACE_OPERATORS = frozenset(
    [
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__idiv__"),
        *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
        *("__irshift__", "__setitem__"),
    ]
)
# What these select from is larger than the indices, and statistics are changed in place.
_FOLLOWS_THE_FIRST = frozenset(["__getitem__"])
_FOLLOWS_THE_SECOND = frozenset(["batch_norm", "instance_norm"])


@dataclass(frozen=True)
class Operand:
    """What matters of a tensor that an operation is given."""

    device: torch.device
    is_parameter: bool = False
    is_number: bool = False
    """Whether it has no dimensions."""


def is_left_alone(name: str) -> bool:
    """Tell whether an operation sees to tensors of several devices by itself.

    Args:
        name: Name of the function of torch, or of the method.
    """
    return name in _LEFT_ALONE or name.startswith("_foreach")


def meeting_device(
    name: str,
    operands: Sequence[Operand],
    order: Sequence[torch.device],
    out: torch.device | None = None,
) -> torch.device | None:
    """Choose the device where the operands of an operation meet.

    For an operation in place that is where the tensor is that is changed, then where parameters
    are; else the latest device of the model among theirs.

    Args:
        name: Name of the function of torch, or of the method.
        operands: The tensors that it is given, in their order, at least one.
        order: The devices of the model, in the order of its blocks.
        out: Where the tensor is that was given for the result.

    Returns:
        The device; None if none of them is the model's, and torch is to decide.
    """
    if all(operand.device not in order for operand in operands):
        return None
    if out is not None:
        return out
    if name in _FOLLOWS_THE_FIRST or _is_in_place(name):
        return operands[0].device
    parameters = [operand for operand in operands if operand.is_parameter]
    if parameters:
        return parameters[0].device
    if name in _FOLLOWS_THE_SECOND:
        return operands[1].device
    return _latest(operands, order)


def _latest(operands: Sequence[Operand], order: Sequence[torch.device]) -> torch.device:
    ours = [operand for operand in operands if operand.device in order]
    # A number on an accelerator is not like others: where there are tensors, it follows them.
    large = [operand for operand in ours if not operand.is_number]
    return max((operand.device for operand in large or ours), key=order.index)


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
