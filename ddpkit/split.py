"""Splitting a model over several devices of one rank."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpkit.entrance import attach, is_split, open_up
from ddpkit.errors import ConfigError
from ddpkit.group import accelerator_type, has_index, place_of_this_rank, use_device
from ddpkit.plan import SplitPlan, checked_plan, plan_split
from ddpkit.wording import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

M = TypeVar("M", bound=nn.Module)
Device = torch.device | str


_logger = logging.getLogger(__name__)


def split_model_across_devices(
    model: M,
    devices: Sequence[Device] | None = None,
    *,
    devices_per_rank: int | None = None,
    plan: SplitPlan | Mapping[str, Device] | None = None,
) -> M:
    """Spread a model that is too large for one device over several devices of this rank.

    Works in a plain process and in a rank; does not communicate. The model is changed and returned:
    its blocks lie on the devices, one after another, so that the heaviest device has as little as
    possible (see `plan_split`), and inputs of a block are moved to its device, in nested containers
    and keyword arguments, too. What meets between the blocks is brought together. Results and
    gradients are those of the unsplit model, and so are the names in its `state_dict()`.

    The output stays on the device of the last block. Inputs may lie anywhere; labels follow the
    output: `loss_fn(output, labels.to(output.device))`. Then `ddp(model)` works as for any model,
    and leaves it where it is. In a group, `get_device()` is the first of the devices from here on;
    send nothing from another accelerator before.

    Parameters keep their identity, so that tied weights stay tied and an optimizer may be built
    before or after. One that has stepped already has its state on the old device:
    `optimizer.load_state_dict(optimizer.state_dict())` brings it along.

    Only calls of modules are looked after. Another method of the model that runs its blocks, and
    combines results of several devices itself, has to move them itself.

    Args:
        model: The model, on any device, before `ddp()` and `torch.compile`.
        devices: Devices of this rank, in the order in which they are filled; they need not be
            neighbours, and one may come twice. `["cpu", "cpu"]` tries a split without accelerators.
            Default: the accelerators of this machine, divided among its ranks.
        devices_per_rank: Take so many accelerators for each rank of this machine: local rank 0 the
            first ones, local rank 1 the next.
        plan: A plan that `plan_split` has made for this model, or a mapping from names of modules
            (and of parameters that modules above them own) to devices.

    Returns:
        The same model.

    Raises:
        ConfigError: A device does not exist, there are too few, a block fits nowhere, the plan does
            not cover the model or is one for another, the model is split, wrapped or compiled
            already, or has tensors without data.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> model = split_model_across_devices(net, ["cpu", "cpu"])
        >>> model is net, sorted(model.state_dict())
        (True, ['0.bias', '0.weight', '2.bias', '2.weight'])
        >>> output = model(torch.ones(3, 4))
        >>> output.shape, output.device
        (torch.Size([3, 2]), device(type='cpu'))

        With a plan by hand, as for two GPUs:

        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> model = split_model_across_devices(net, plan={"0": "cpu", "1": "cpu", "2": "cpu"})
    """
    _check_model(model)
    _check_one_way_to_say_it(devices, devices_per_rank, plan)
    made = _plan(model, devices, devices_per_rank, plan)
    _check_exist([*made.devices, *made.assignment.values()])
    targets = _targets(model, made)
    _place(model, made, targets)
    _check_placed(model, targets)
    _attach(model, made)
    use_device(_resolved(made.devices[0]))
    _logger.info("%s is split over %s.", type(model).__name__, _loads(made))
    return model


# ----------------------------------------------------------------------------------- the arguments


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"split_model_across_devices() was given a {type(model).__qualname__}; expected a "
            "torch.nn.Module."
        )
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ConfigError(
            f"split_model_across_devices() was given a model that is wrapped in "
            f"{type(model).__name__} already. Split the plain model first, and wrap it then: "
            "ddp(split_model_across_devices(net))."
        )
    if _is_compiled(model):
        raise ConfigError(
            "split_model_across_devices() was given a model that torch.compile has wrapped "
            "already. Split the plain model first, and compile it then."
        )
    if is_split(model):
        raise ConfigError(
            "split_model_across_devices() was given a model that is split already, or has a part "
            "that is. Split a model once, and as a whole; to split it in another way, build it "
            "anew and load its state."
        )
    _check_have_data(model)


def _is_compiled(model: nn.Module) -> bool:
    # Looked up and not imported: whoever has compiled a model has imported the compiler.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(model, compiler.OptimizedModule)


def _check_have_data(model: nn.Module) -> None:
    empty = [
        name
        for name, tensor in _named_tensors(model)
        if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta"
    ]
    if empty:
        raise ConfigError(
            "split_model_across_devices() was given a model whose tensors have no data yet: "
            f"{shortened(empty)}. Run one batch through lazy layers first, and materialise a "
            "model made on the meta device (plan_split() can plan it before)."
        )


def _check_one_way_to_say_it(
    devices: object, devices_per_rank: object, plan: SplitPlan | Mapping[str, Device] | None
) -> None:
    given = {"devices": devices, "devices_per_rank": devices_per_rank, "plan": plan}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigError(
            f"split_model_across_devices() was given {' and '.join(names)}, which say the same "
            "thing in different ways. Give one of them."
        )
    if isinstance(devices, (str, torch.device)):
        raise ConfigError(
            f"devices={str(devices)!r} was given, but a split needs a list of devices, such as "
            '["cuda:0", "cuda:1"].'
        )
    if devices is not None and not devices:
        raise ConfigError("devices=[] was given; expected at least one device, or None.")
    if plan is not None and not isinstance(plan, (SplitPlan, Mapping)):
        raise ConfigError(
            f"plan was given as a {type(plan).__qualname__}; expected what plan_split() returns, "
            'or a mapping such as {"net1": "cuda:0", "net2": "cuda:1"}.'
        )


def _plan(
    model: nn.Module,
    devices: Sequence[Device] | None,
    devices_per_rank: int | None,
    plan: SplitPlan | Mapping[str, Device] | None,
) -> SplitPlan:
    if isinstance(plan, SplitPlan):
        return plan
    if plan is not None:
        return checked_plan(model, {name: _resolved(device) for name, device in plan.items()})
    if devices is None:
        devices = _devices_here(devices_per_rank)
    resolved = [_resolved(device) for device in devices]
    _check_exist(resolved)
    return plan_split(model, resolved)


# ------------------------------------------------------------------------------------- the devices


def choose_devices(
    accelerator: str | None,
    count: int,
    local_rank: int,
    local_world_size: int,
    devices_per_rank: int | None,
) -> list[torch.device]:
    """Choose the devices of a rank.

    Args:
        accelerator: Type of this machine's accelerator, None where it has none.
        count: How many of them this process sees.
        local_rank: Rank among those of this machine.
        local_world_size: Number of ranks of this machine.
        devices_per_rank: How many each rank takes; None divides them.

    Returns:
        The rank's own group of neighbours.

    Raises:
        ConfigError: There are too few, or none.
    """
    if devices_per_rank is not None and not _is_positive(devices_per_rank):
        raise ConfigError(
            f"devices_per_rank={devices_per_rank!r} was given; expected a whole number, at least 1."
        )
    if accelerator is None:
        raise ConfigError(
            "This machine shows no accelerator to split a model over. To try the split without, "
            'pass devices=["cpu", "cpu"].'
        )
    each = devices_per_rank or max(count // local_world_size, 1)
    if each * local_world_size > count:
        raise ConfigError(
            f"{local_world_size} ranks x {each} devices = {each * local_world_size}, but this "
            f"machine has {count} {accelerator} devices. Start fewer ranks on it, or take fewer "
            "devices for each; devices=[...] names those of this rank."
        )
    first = local_rank * each
    return [torch.device(accelerator, index) for index in range(first, first + each)]


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _devices_here(devices_per_rank: int | None) -> list[torch.device]:
    accelerator = accelerator_type()
    count = torch.accelerator.device_count() if accelerator else 0
    place = place_of_this_rank()
    return choose_devices(
        accelerator, count, place.local_rank, place.local_world_size, devices_per_rank
    )


def _resolved(device: Device) -> torch.device:
    """Name a device as tensors do that are on it."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{device!r} was given as a device; expected one such as 'cuda:0'."
        ) from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if has_index(wanted) or wanted.type != accelerator_type():
        return wanted
    return torch.device(wanted.type, torch.accelerator.current_device_index())


def _check_exist(devices: Sequence[torch.device]) -> None:
    accelerator = accelerator_type()
    count = torch.accelerator.device_count() if accelerator else 0
    missing = [
        str(device)
        for device in dict.fromkeys(devices)
        if device.type != "cpu" and (device.type != accelerator or (device.index or 0) >= count)
    ]
    if missing:
        there = f"{count} x {accelerator}" if accelerator else "only the CPU"
        raise ConfigError(
            f"The model was to be split over {', '.join(missing)}, but this process sees {there}. "
            "Name devices that exist."
        )


# ----------------------------------------------------------------------------------- the placement


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _targets(model: nn.Module, plan: SplitPlan) -> dict[str, torch.device]:
    """Say where each tensor goes, by name; one with several names is there under each of them."""
    assignment = {name: _resolved(device) for name, device in plan.assignment.items()}
    _check_names(model, assignment)
    by_tensor: dict[int, tuple[str, torch.device]] = {}
    for name, tensor in _named_tensors(model):
        device = _device_of(name, assignment)
        if device is None:
            continue
        first, before = by_tensor.setdefault(id(tensor), (name, device))
        if before != device:
            raise ConfigError(
                f"{first} and {name} are one tensor, but the plan puts them on {before} and "
                f"{device}. Put both on the same device."
            )
    named = list(_named_tensors(model))
    left = [name for name, tensor in named if id(tensor) not in by_tensor]
    if left:
        raise ConfigError(
            f"The plan says nothing of {shortened(left)}. It was made for another model, or this "
            "one has changed since; make it anew."
        )
    return {name: by_tensor[id(tensor)][1] for name, tensor in named}


def _check_names(model: nn.Module, assignment: Mapping[str, torch.device]) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in _named_tensors(model)}
    unknown = [name for name in assignment if name not in known]
    if unknown:
        raise ConfigError(
            f"The plan names {shortened(unknown)}, which this {type(model).__name__} does not "
            "have. It was made for another model, or this one has changed since; make it anew."
        )


def _device_of(name: str, assignment: Mapping[str, torch.device]) -> torch.device | None:
    """Find the device of a tensor: that of its own name, else of the nearest block around it."""
    while name:
        if name in assignment:
            return assignment[name]
        name = name.rpartition(".")[0]
    return assignment.get("")


def _place(model: nn.Module, plan: SplitPlan, targets: Mapping[str, torch.device]) -> None:
    wanted: dict[int, torch.device] = {}
    grads: list[torch.Tensor] = []  # their ids stay theirs while they are here
    for name, tensor in _named_tensors(model):
        wanted[id(tensor)] = targets[name]
        if tensor.is_leaf and tensor.grad is not None:
            grads.append(tensor.grad)
            wanted[id(tensor.grad)] = targets[name]
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for block in plan.blocks:
        send = _sender(wanted, moved, _resolved(block.device))
        _apply(model.get_submodule(block.name), send, wanted, recurse=True)
    for name in plan.opened:
        _apply(model.get_submodule(name), _sender(wanted, moved, None), wanted, recurse=False)


def _sender(
    wanted: dict[int, torch.device],
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]],
    default: torch.device | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function that moves a tensor to its place, the same tensor only once."""

    def send(tensor: torch.Tensor) -> torch.Tensor:
        target = wanted.get(id(tensor), default)
        if target is None or tensor.device == target:
            return tensor
        if id(tensor) not in moved:
            there = tensor.to(target)
            moved[id(tensor)] = tensor, there
            wanted[id(there)] = target  # what is in several blocks comes again
        return moved[id(tensor)][1]

    return send


def _apply(
    module: nn.Module,
    send: Callable[[torch.Tensor], torch.Tensor],
    wanted: Mapping[int, torch.device],
    *,
    recurse: bool,
) -> None:
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    strays = [tensor for tensor in tensors if tensor.device != wanted[id(tensor)]]
    if not strays:
        return
    with _swapping(any(_needs_swap(tensor, wanted[id(tensor)]) for tensor in strays)):
        if recurse:
            module._apply(send)  # noqa: SLF001  # modules with more to move override it
        else:
            nn.Module._apply(module, send, recurse=False)  # noqa: SLF001


def _needs_swap(tensor: torch.Tensor, target: torch.device) -> bool:
    """Tell whether a parameter keeps its identity only if its whole inside is exchanged."""
    there = torch.empty(0, dtype=tensor.dtype, device=target)
    if type(there) is not torch.Tensor or type(tensor) not in (torch.Tensor, nn.Parameter):
        return True
    return not torch._has_compatible_shallow_copy_type(tensor, there)  # noqa: SLF001


@contextlib.contextmanager
def _swapping(needed: bool) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(needed or before)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _check_placed(model: nn.Module, targets: Mapping[str, torch.device]) -> None:
    left = [
        f"{name} on {tensor.device} and not {targets[name]}"
        for name, tensor in _named_tensors(model)
        if tensor.device != targets[name]
    ]
    if left:
        raise ConfigError(
            f"The model could not be split: after the move there is still {shortened(left)}. A "
            "module keeps its tensors from being moved; see its _apply()."
        )


# --------------------------------------------------------------------------------------- the hooks


def _attach(model: nn.Module, plan: SplitPlan) -> None:
    anchors: dict[str, tuple[str, torch.device]] = {}
    for block in plan.blocks:
        module = model.get_submodule(block.name)
        tensor = next(_named_tensors(module), None)
        if tensor is not None:
            attach(module, block.name, tensor[0])
            anchors[block.name] = f"{block.name}.{tensor[0]}".lstrip("."), _resolved(block.device)
    anchors |= {name: (name, _resolved(device)) for name, device in plan.owned.items()}
    for name in plan.opened:
        module = model.get_submodule(name)
        if _has_own_code(module, is_root=not name):
            open_up(module, _order_below(name, anchors.values()))


def _has_own_code(module: nn.Module, *, is_root: bool) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return is_root or type(module) is not nn.Sequential


def _order_below(name: str, anchors: Any) -> list[str]:
    """Return one tensor for each device, by its name below a module, in the order of the blocks."""
    prefix = f"{name}." if name else ""
    first: dict[torch.device, str] = {}
    for tensor, device in anchors:
        if tensor.startswith(prefix):
            first.setdefault(device, tensor.removeprefix(prefix))
    return list(first.values())


def _loads(plan: SplitPlan) -> str:
    total = sum(plan.loads.values()) or 1
    return ", ".join(f"{device} ({load / total:.0%})" for device, load in plan.loads.items())
