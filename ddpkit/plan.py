"""Which device each part of a model goes to: the plan of a split, worked out without the devices.

Nothing here looks at the machine or changes the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ddpkit.blocks import Cut, Node, bytes_of, close, cut, cut_where, read_model, tensors_of
from ddpkit.errors import ConfigError
from ddpkit.partition import heaviest, partition
from ddpkit.rehearsal import Placement, Rehearsal

__all__ = ["Block", "SplitPlan", "checked_plan", "placement_of", "plan_split"]

_logger = logging.getLogger(__name__)

_TOLERANCE = 1.05
"""How much heavier than possible the heaviest device may be where that saves finer cuts."""
_MAX_SHOWN = 6


@dataclass(frozen=True)
class Block:
    """A part of a model that stays whole."""

    name: str
    """Name of the module, such as `layers.3`; empty for a model that cannot be divided."""
    device: torch.device
    """Where it goes."""
    position: int
    """Which of the devices that is; tells apart two with the same name, as in `["cpu", "cpu"]`."""
    bytes: int
    """What it weighs, with the tensors that opened modules around it own themselves."""


@dataclass(frozen=True)
class SplitPlan:
    """Which device each part of a model goes to. Prints as a table."""

    devices: tuple[torch.device, ...]
    """The devices in the order of the blocks, as given."""
    blocks: tuple[Block, ...]
    """The parts in the order in which they run."""
    opened: tuple[str, ...]
    """Names of the modules that are divided into blocks; the model itself is the empty name. Their
    own code, and that of blocks without tensors, may meet tensors of several devices."""
    owned: Mapping[str, torch.device] = field(default_factory=dict)
    """Where the parameters and buffers go that opened modules own themselves, by their names."""
    crossings: tuple[str, ...] = ()
    """Operations outside of blocks that meet several devices, as a rehearsal has found them. A
    split model brings their arguments together."""

    @property
    def assignment(self) -> dict[str, torch.device]:
        """The device of each block, and of each tensor that an opened module owns, by name."""
        return {block.name: block.device for block in self.blocks} | dict(self.owned)

    @property
    def loads(self) -> dict[torch.device, int]:
        """The bytes of each device; one that is given twice has the sum of both."""
        found = dict.fromkeys(self.devices, 0)
        for device, load in zip(self.devices, self.shares, strict=True):
            found[device] += load
        return found

    @property
    def shares(self) -> tuple[int, ...]:
        """The bytes of each of `devices`, by position."""
        found = [0] * len(self.devices)
        for block in self.blocks:
            found[block.position] += block.bytes
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(_table(self))


# ---------------------------------------------------------------------------------- public calls


def plan_split(
    model: nn.Module,
    devices: Sequence[torch.device | str],
    *,
    weights: Mapping[str, float] | None = None,
    limits: Mapping[torch.device | str, int] | Sequence[int | None] | None = None,
    sample: Any = None,
    no_split: Sequence[type[nn.Module] | str] = (),
) -> SplitPlan:
    """Work out which device each part of a model goes to, as evenly as can be.

    Not collective, the same in a world of one: every rank works out the same plan. Nothing looks at
    the machine, so the devices need not exist, and the model is left alone; it may be on any
    device, `meta` included.

    The model is cut into consecutive blocks. A module is *opened*, so that its children are blocks,
    as long as it is heavier than an even share of the devices. If the heaviest device is then more
    than 5 % above that share, smaller modules are opened, too, as far as that makes it lighter. Of
    all cuts between the blocks the one with the lightest heaviest device is taken; this is exact.
    Modules that ended up on one device are closed again. Modules of torch itself are never opened,
    because they may use the weights of their children directly; containers and stacks of
    transformer layers are. A `ModuleList` is always opened, because it is never called.

    Parameters and buffers that an opened module has itself go with its first block. A tensor that
    is at several places of the model counts once, and all blocks that have it go to one device,
    even if that is not the one of their neighbours.

    Args:
        model: The model.
        devices: Devices in the order in which the model runs through them, such as
            `["cuda:0", "cuda:1"]`. One may be given twice, which tries a split without devices:
            `["cpu", "cpu"]`.
        weights: Bytes of modules by name, in place of what is worked out. Such a module stays whole
            if none inside it is named. By default a tensor that is trained counts four times its
            bytes (itself, its gradient, and two averages of Adam), and a frozen one or a buffer
            once; with `sample` the bytes that a module keeps for the backward are added.
        limits: The most bytes for each device: by device, or in their order with None for no limit.
        sample: Arguments of one forward: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments. The forward then runs in a copy, without values where that is
            possible. The order of its calls decides, and not that of registration, and `crossings`
            tells which operations meet several devices. Its tensors are taken to come on the first
            device.
        no_split: What stays whole: classes, names of classes, or names of modules.

    Returns:
        The plan, for `split_model_across_devices`; `print(plan)` shows a table.

    Raises:
        ConfigError: An argument is wrong, something does not fit within the limits, the forward
            failed, or an operation inside a block would meet tensors of two devices. It is named.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(4)))
        >>> plan = plan_split(model, ["cuda:0", "cuda:1"], sample=torch.zeros(1, 10))
        >>> print(plan)
        block  device  bytes  share
        0      cuda:0  1,800    25%
        1      cuda:0  1,800    25%
        2      cuda:1  1,800    25%
        3      cuda:1  1,800    25%
        <BLANKLINE>
        total  cuda:0  3,600    50%
        total  cuda:1  3,600    50%
    """
    targets = _read_devices(devices)
    most = _read_limits(limits, targets)
    rehearsal = None if sample is None else Rehearsal(model, sample, targets)
    found = None if rehearsal is None else rehearsal.record()
    root = read_model(model, found=found, weights=weights, no_split=no_split)
    best, positions = _best_cut(root, most)
    if len(best.blocks) == 1 < len(targets):
        _logger.warning("%s cannot be divided: all of it goes to one device.", root.kind)
    plan = _make_plan(targets, *close(root, best, positions))
    if rehearsal is None:
        return plan
    _tell_order(root, plan)
    return replace(plan, crossings=rehearsal.crossings(placement_of(model, plan)))


def checked_plan(model: nn.Module, mapping: Mapping[str, torch.device | str]) -> SplitPlan:
    """Complete a mapping from names of modules to devices, and check that nothing is left over.

    Not collective, the same in a world of one. Nothing looks at the machine.

    Args:
        model: The model.
        mapping: Names of modules, or of tensors that an opened module has itself, and where they
            go; the most exact name counts, and the empty one is the model itself. Tensors that an
            opened module has itself go with its first block if they are not named.

    Returns:
        The plan, with bytes as `plan_split` works them out.

    Raises:
        ConfigError: A name or device is wrong, something has no device, or a tensor that is at
            several places would be on two. It is named.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> checked_plan(model, {"0": "cuda:0", "1": "cuda:1"}).loads
        {device(type='cuda', index=0): 96, device(type='cuda', index=1): 96}
    """
    given = {name: _read_device(device) for name, device in mapping.items()}
    root = read_model(model)
    _check_given_names(root, given)
    around = {name.rpartition(".")[0] for name in given if name}
    while outer := {name.rpartition(".")[0] for name in around} - around:
        around |= outer
    found = cut_where(root, lambda node: bool(node.children) and node.name in around)
    _check_reachable(root, found, given)
    places = _inherited(root, given)
    at_block = _block_devices(found, places)
    found = _with_own_tensors(found, at_block, _own_devices(found, given, places))
    devices = tuple(dict.fromkeys([*at_block, *given.values()]))
    _check_ties(found, at_block)
    return _make_plan(devices, found, [devices.index(device) for device in at_block])


def placement_of(model: nn.Module, plan: SplitPlan) -> Placement:
    """Say where blocks that have tensors are, and the tensors outside of blocks.

    Args:
        model: The model.
        plan: A plan for it.
    """
    blocks = {
        block.name: block.device
        for block in plan.blocks
        if any(True for _ in tensors_of(model.get_submodule(block.name)))
    }
    return Placement(plan.devices, blocks, plan.owned)


# ------------------------------------------------------------------------------- reading arguments


def _read_devices(devices: Sequence[torch.device | str]) -> tuple[torch.device, ...]:
    if isinstance(devices, (str, torch.device)) or not devices:
        raise ConfigError(
            f"devices={devices!r} has to be a list of devices, such as ['cuda:0', 'cuda:1']."
        )
    return tuple(map(_read_device, devices))


def _read_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{device!r} is no device; expected one such as 'cuda:0' ({error})."
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")  # which is how tensors on cpu:0 call it
    if ":" not in str(found) and found.type not in ("meta", "mps"):
        raise ConfigError(
            f"{device!r} does not say which device of its kind; write '{found.type}:0'."
        )
    return found


def _read_limits(
    limits: Mapping[torch.device | str, int] | Sequence[int | None] | None,
    devices: tuple[torch.device, ...],
) -> list[int | None]:
    if limits is None:
        return [None] * len(devices)
    if isinstance(limits, Mapping):
        found = _limits_by_device(limits, devices)
    elif len(limits) == len(devices):
        found = list(limits)
    else:
        raise ConfigError(
            f"limits= has {len(limits)} entries for {len(devices)} devices; give one for each, "
            "None for no limit."
        )
    for limit in found:
        if limit is not None and not limit >= 0:
            raise ConfigError(f"limits= has {limit}; expected bytes, or None for no limit.")
    return found


def _limits_by_device(
    limits: Mapping[torch.device | str, int], devices: tuple[torch.device, ...]
) -> list[int | None]:
    by_device = {_read_device(device): limit for device, limit in limits.items()}
    for device in by_device:
        count = devices.count(device)
        if count != 1:
            raise ConfigError(
                f"limits= names {device}, which is {count} times in devices=. Give a list with one "
                "limit for each device."
            )
    return [by_device.get(device) for device in devices]


# ------------------------------------------------------------------------------- finding the plan


def _best_cut(root: Node, limits: Sequence[int | None]) -> tuple[Cut, list[int]]:
    """Cut coarsely, then finer while that helps; take the coarsest that is nearly the best."""
    tried: list[tuple[int, Cut, list[int]]] = []
    threshold = even = root.total / len(limits)
    while True:
        found = cut(root, threshold)
        counts = partition(_group_weights(found), limits)
        if counts is not None:
            load = heaviest(_group_weights(found), counts)
            tried.append((load, found, counts))
            if load <= _TOLERANCE * even:
                break
        if not found.heaviest_openable:
            break
        threshold = min(threshold / 2, found.heaviest_openable - 1)
    if not tried:
        raise _does_not_fit(found, limits)
    lightest = min(load for load, _, _ in tried)
    best = next(entry for entry in tried if entry[0] <= _TOLERANCE * lightest)
    return best[1], _positions(best[1], best[2])


def _group_weights(found: Cut) -> list[int]:
    """Add up the blocks that have to be together, in the place of the first of them."""
    sums = dict.fromkeys(found.leaders, 0)
    for leader, weight in zip(found.leaders, found.weights, strict=True):
        sums[leader] += weight
    return list(sums.values())


def _positions(found: Cut, counts: Sequence[int]) -> list[int]:
    in_order = [position for position, count in enumerate(counts) for _ in range(count)]
    of_group = dict(zip(dict.fromkeys(found.leaders), in_order, strict=True))
    return [of_group[leader] for leader in found.leaders]


def _does_not_fit(found: Cut, limits: Sequence[int | None]) -> ConfigError:
    weights = _group_weights(found)
    largest = max((limit for limit in limits if limit is not None), default=0)
    advice = "Raise limits=, give more devices, or name smaller weights."
    if None not in limits and max(weights) > largest:
        leader = list(dict.fromkeys(found.leaders))[weights.index(max(weights))]
        together = [n.name for n, i in zip(found.blocks, found.leaders, strict=True) if i == leader]
        what = f"{_named(together)} weighs {max(weights):,} bytes"
        if len(together) > 1:
            what = f"{_named(together)}, which belong together, weigh {max(weights):,} bytes"
        return ConfigError(f"{what}, and no device takes more than {largest:,}. {advice}")
    if None not in limits and sum(weights) > sum(limit or 0 for limit in limits):
        room = sum(limit or 0 for limit in limits)
        return ConfigError(
            f"The model weighs {sum(weights):,} bytes, and the devices take {room:,}. {advice}"
        )
    return ConfigError(
        f"No cut of {len(weights)} blocks into consecutive parts keeps within the limits "
        f"{[limit if limit is None else f'{limit:,}' for limit in limits]}; together they weigh "
        f"{sum(weights):,} bytes, the heaviest {max(weights):,}. {advice} The order of devices "
        "may be changed, too."
    )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) if name else "the model itself" for name in names[:_MAX_SHOWN])
    rest = len(names) - _MAX_SHOWN
    return shown + (f" and {rest} more" if rest > 0 else "")


def _make_plan(
    devices: tuple[torch.device, ...], found: Cut, positions: Sequence[int]
) -> SplitPlan:
    blocks = tuple(
        Block(node.name, devices[position], position, weight)
        for node, weight, position in zip(found.blocks, found.weights, positions, strict=True)
    )
    owned = {name: devices[positions[index]] for name, index in sorted(found.owned.items())}
    return SplitPlan(devices, blocks, tuple(node.name for node in found.opened), owned)


def _tell_order(root: Node, plan: SplitPlan) -> None:
    places = {node.name: node.place for node in root.below()}
    order = [block.name for block in plan.blocks]
    registered = sorted(order, key=places.__getitem__)
    for runs, was_expected in zip(order, registered, strict=True):
        if runs != was_expected:
            _logger.info(
                "The plan follows the order in which blocks are called: %r runs before %r, though "
                "it is registered after it.",
                runs,
                was_expected,
            )
            return


# ----------------------------------------------------------------------------------- given by hand


def _check_given_names(root: Node, given: Mapping[str, torch.device]) -> None:
    known = {name for node in root.below() for name in (node.name, *node.own)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            f"The plan names {_named(unknown)}, but {root.kind} has no such module or tensor. It "
            f"has the modules {_named([child.name for child in root.children])}."
        )
    if not given:
        raise ConfigError("The plan is empty; give names of modules and where they go.")
    first: dict[int, str] = {}
    for node in root.below():
        name = first.setdefault(id(node.module), node.name)
        if given.get(node.name, None) not in (None, given.get(name)):
            raise ConfigError(
                f"{name!r} and {node.name!r} are one module, and the plan gives it to both "
                f"{given.get(name)} and {given[node.name]}. Give it one device, by the first name."
            )


def _check_reachable(root: Node, found: Cut, given: Mapping[str, torch.device]) -> None:
    """What is inside of a block cannot go elsewhere."""
    reached = {node.name for node in (*found.blocks, *found.opened)} | found.owned.keys()
    for node in found.opened:
        inside = [name for name in given if name.startswith(f"{node.name}." if node.name else "")]
        if not (node.can_open or node.must_open) and inside:
            raise ConfigError(
                f"The plan names {_named(inside)} inside of {node.name or 'the model itself'}, "
                f"a {node.kind}, which may use the weights of its parts directly. Give the whole "
                "of it one device."
            )
    for name in given:
        if name not in reached and not any(n.name == name for n in root.below()):
            raise ConfigError(
                f"The plan names {name!r}, which is only a part of what one module has. Name the "
                f"module, {name.rpartition('.')[0]!r}."
            )


def _inherited(
    node: Node, given: Mapping[str, torch.device], outer: torch.device | None = None
) -> dict[Node, torch.device | None]:
    """Give each module the device of the innermost one around it that is named."""
    here = given.get(node.name, outer)
    found: dict[Node, torch.device | None] = {node: here}
    for child in node.children:
        found |= _inherited(child, given, here)
    return found


def _block_devices(found: Cut, places: Mapping[Node, torch.device | None]) -> list[torch.device]:
    """Look up the device of each block; one without tensors is where the one before it is."""
    missing = [
        node.name
        for node in found.blocks
        if places[node] is None and any(True for _ in tensors_of(node.module))
    ]
    if missing:
        raise ConfigError(
            f"The plan leaves {_named(missing)} without a device. Name them, or what is around "
            "them; the empty name is everything."
        )
    devices: list[torch.device] = []
    last = next(place for node in found.blocks if (place := places[node]) is not None)
    for node in found.blocks:
        last = places[node] or last
        devices.append(last)
    return devices


def _own_devices(
    found: Cut, given: Mapping[str, torch.device], places: Mapping[Node, torch.device | None]
) -> Iterator[tuple[str, torch.Tensor, torch.device]]:
    """Yield what opened modules have themselves and what the plan says where that goes."""
    for node in found.opened:
        for name, tensor in node.own.items():
            inherited = None if id(tensor) in node.tied else places[node]
            device = given.get(name, inherited)
            if device is not None:
                yield name, tensor, device


def _with_own_tensors(
    found: Cut,
    at_block: Sequence[torch.device],
    wanted: Iterator[tuple[str, torch.Tensor, torch.device]],
) -> Cut:
    """Let tensors of opened modules go with a block of the device that is wanted for them."""
    owned, weights = dict(found.owned), list(found.weights)
    for name, tensor, device in wanted:
        if at_block[owned[name]] == device:
            continue
        if device not in at_block:
            raise ConfigError(
                f"The plan gives {name!r} to {device}, where no module goes. Give it to one of "
                f"{', '.join(map(str, dict.fromkeys(at_block)))}."
            )
        weights[owned[name]] -= bytes_of(tensor)
        owned[name] = at_block.index(device)
        weights[owned[name]] += bytes_of(tensor)
    return replace(found, owned=owned, weights=tuple(weights))


def _check_ties(found: Cut, at_block: Sequence[torch.device]) -> None:
    """A tensor cannot be on two devices."""
    homes: dict[int, tuple[str, torch.device]] = {}
    places = [
        (prefix + name, tensor, device)
        for node, device in zip(found.blocks, at_block, strict=True)
        if node.tied
        for prefix in [node.name + "." if node.name else ""]
        for name, tensor in tensors_of(node.module)
    ]
    places += [
        (name, tensor, at_block[found.owned[name]])
        for node in found.opened
        for name, tensor in node.own.items()
    ]
    for name, tensor, device in places:
        first, home = homes.setdefault(id(tensor), (name, device))
        if home != device:
            raise ConfigError(
                f"{first!r} and {name!r} are one tensor, and the plan gives it to both {home} and "
                f"{device}. Give both to the same device."
            )


# -------------------------------------------------------------------------------------- the table


def _table(plan: SplitPlan) -> Iterator[str]:
    total = sum(plan.shares) or 1
    labels = _labels(plan.devices)
    rows = [
        (block.name or "(model)", labels[block.position], f"{block.bytes:,}", block.bytes)
        for block in plan.blocks
    ]
    sums = [
        ("total", label, f"{share:,}", share)
        for label, share in zip(labels, plan.shares, strict=True)
    ]
    own = [(name, str(device), "", None) for name, device in plan.owned.items()]
    form = _row_form([*rows, *own, *sums])
    yield form("block", "device", "bytes", "share")
    for name, label, size, share in rows:
        yield form(name, label, size, f"{share / total:.0%}")
    if own:
        yield "with the first block of their module:"
        yield from (form(name, label, "", "") for name, label, _, _ in own)
    yield ""
    for name, label, size, share in sums:
        yield form(name, label, size, f"{share / total:.0%}")
    if plan.crossings:
        yield ""
        yield "moved between devices outside of blocks:"
        yield from plan.crossings


def _labels(devices: Sequence[torch.device]) -> list[str]:
    """Number devices that are given twice."""
    return [
        f"{device} #{index}" if devices.count(device) > 1 else str(device)
        for index, device in enumerate(devices)
    ]


def _row_form(rows: Sequence[tuple[str, str, str, Any]]) -> Callable[..., str]:
    names, labels, sizes = (max(len(row[i]) for row in rows) for i in range(3))
    names, labels, sizes = max(names, 5), max(labels, 6), max(sizes, 5)

    def form(name: str, label: str, size: str, share: str) -> str:
        return f"{name:<{names}}  {label:<{labels}}  {size:>{sizes}}  {share:>5}".rstrip()

    return form
