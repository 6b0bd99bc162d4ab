"""A model as a tree of modules with weights, and how it is cut into blocks that stay whole.

A module whose parts become blocks of their own is called opened. Nothing is run here, and nothing
of the model is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpkit.errors import ConfigError

__all__ = [
    "Cut",
    "Findings",
    "Node",
    "bytes_of",
    "close",
    "cut",
    "cut_where",
    "read_model",
    "tensors_of",
]

# Their own code calls their children and uses nothing else of them. Other modules of torch use the
# weights of their children directly, as MultiheadAttention does with those of out_proj.
_OPENABLE = (
    *(nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)
_STATE_COPIES = 4
"""What a trained tensor takes: itself, its gradient, and the two averages that Adam keeps."""


@dataclass(frozen=True)
class Findings:
    """What a recorded forward has shown of the modules, by their names."""

    order: Mapping[str, int] = field(default_factory=dict)
    """Place of the first call of each module that was called."""
    bypassed: Collection[str] = ()
    """Modules whose parts were called without them."""
    activations: Mapping[str, int] = field(default_factory=dict)
    """Bytes kept for the backward."""


@dataclass(eq=False)
class Node:
    """A module at one place of the model."""

    name: str
    module: nn.Module
    own: dict[str, torch.Tensor]
    """Parameters and buffers that the module has itself, by their names in the model."""
    children: list[Node] = field(default_factory=list)
    place: int = 0
    """Among all modules, in the order of registration."""
    can_open: bool = False
    must_open: bool = False
    whole: bool = False
    """Its blocks, if it must be opened, go to one device."""
    given: int | None = None
    """The weight that the caller gave."""
    own_weight: int = 0
    weight: int = 0
    """With everything below, but for tensors that are at several places."""
    tied: dict[int, int] = field(default_factory=dict)
    """Identity and weight of the tensors below that are at several places of the model."""

    @property
    def kind(self) -> str:
        """Name of the class."""
        return type(self.module).__name__

    @property
    def total(self) -> int:
        """Weight with all tensors below, each counted once."""
        return self.weight + sum(self.tied.values())

    def below(self) -> Iterator[Node]:
        """Yield this node and all that are below it."""
        yield self
        for child in self.children:
            yield from child.below()


@dataclass(frozen=True)
class Cut:
    """One way to cut a model into blocks."""

    blocks: tuple[Node, ...]
    """In the order in which they run."""
    weights: tuple[int, ...]
    """Of each block, with what opened modules have themselves; each tensor counts once."""
    leaders: tuple[int, ...]
    """For each block the first one of those that have to be on the same device."""
    opened: tuple[Node, ...]
    owned: Mapping[str, int]
    """For each tensor of an opened module itself the block that it goes with."""

    @property
    def heaviest_openable(self) -> int:
        """Weight of the heaviest block that could be opened; 0 if there is none."""
        return max((node.total for node in self.blocks if _may_open(node)), default=0)


# ------------------------------------------------------------------------------ reading the model


def read_model(
    model: nn.Module,
    *,
    found: Findings | None = None,
    weights: Mapping[str, float] | None = None,
    no_split: Sequence[type[nn.Module] | str] = (),
) -> Node:
    """Describe a model as a tree.

    Args:
        model: The model.
        found: What a recorded forward has shown; children are then in the order of their calls.
        weights: Bytes of modules, by name, in place of those that are worked out.
        no_split: Classes, names of classes, or names of modules that stay whole.

    Returns:
        The node of the model itself.

    Raises:
        ConfigError: A name is not of this model, or a parameter is not initialized yet.
    """
    found, weights = found or Findings(), weights or {}
    _check_names(model, weights, no_split)
    root = _make_tree(model)
    repeated = Counter(id(tensor) for node in root.below() for tensor in node.own.values())
    first_names = {id(module): name for name, module in model.named_modules()}
    for node in root.below():
        node.given = round(weights[node.name]) if node.name in weights else None
    for place, node in enumerate(root.below()):
        node.place = place
        node.must_open = bool(node.children) and _needs_opening(node, found)
        node.whole = _is_kept(node, no_split)
        node.can_open = bool(node.children) and _is_openable(node.module) and not node.whole
    _weigh(root, found.activations, {key for key, count in repeated.items() if count > 1})
    if found.order:
        _sort(root, {key: found.order.get(name) for key, name in first_names.items()})
    return root


def _make_tree(model: nn.Module) -> Node:
    own: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of the model has no shape yet. Run one forward with real data before the "
                "model is split."
            )
        own.setdefault(name.rpartition(".")[0], {})[name] = tensor
    nodes: dict[str, Node] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        nodes[name] = Node(name, module, own.get(name, {}))
        if name:
            nodes[name.rpartition(".")[0]].children.append(nodes[name])
    return nodes[""]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names, one at several places each time.

    Args:
        module: The module, with all that is inside.
    """
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_names(
    model: nn.Module, weights: Mapping[str, float], no_split: Sequence[type[nn.Module] | str]
) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {type(module).__name__ for module in modules.values()}
    for name in weights:
        if name not in modules:
            raise ConfigError(
                f"weights= names {name!r}, but {type(model).__name__} has no module of this name."
            )
        if not weights[name] >= 0:
            raise ConfigError(f"weights={{{name!r}: {weights[name]}}} has to be 0 or more.")
    for item in no_split:
        if isinstance(item, str) and item not in modules and item not in kinds:
            raise ConfigError(
                f"no_split= names {item!r}, but {type(model).__name__} has neither a module nor a "
                "class of this name."
            )


def _needs_opening(node: Node, found: Findings) -> bool:
    """A hook on a module that is never called itself would move nothing."""
    forward = type(node.module).forward
    return forward is nn.Module.forward or (
        node.name in found.bypassed and _is_openable(node.module)
    )


def _is_kept(node: Node, no_split: Sequence[type[nn.Module] | str]) -> bool:
    if node.given is not None and all(n.given is None for n in node.below() if n is not node):
        return True
    return any(
        item in (node.name, node.kind) if isinstance(item, str) else isinstance(node.module, item)
        for item in no_split
    )


def _is_openable(module: nn.Module) -> bool:
    return all(
        base in _OPENABLE or issubclass(base, torch.fx.GraphModule)
        for base in type(module).__mro__
        if issubclass(base, nn.Module) and base.__module__.split(".")[0] == "torch"
    )


def _weigh(root: Node, activations: Mapping[str, int], repeated: set[int]) -> None:
    for node in reversed(list(root.below())):
        node.own_weight = activations.get(node.name, 0)
        for tensor in node.own.values():
            if id(tensor) in repeated:
                node.tied[id(tensor)] = bytes_of(tensor)
            else:
                node.own_weight += bytes_of(tensor)
        node.weight = node.own_weight + sum(child.weight for child in node.children)
        for child in node.children:
            node.tied.update(child.tied)
        if node.given is not None and (node.whole or not node.children):
            node.weight = node.given
            node.tied = dict.fromkeys(node.tied, 0)


def bytes_of(tensor: torch.Tensor) -> int:
    """Work out what a tensor weighs: with gradient and optimizer state if it is trained."""
    copies = _STATE_COPIES if tensor.requires_grad else 1
    return tensor.numel() * tensor.element_size() * copies


def _sort(root: Node, calls: Mapping[int, int | None]) -> None:
    """Put children in the order of their first calls; one never called stays where it was."""
    firsts: dict[Node, int] = {}
    for node in reversed(list(root.below())):
        inside = [firsts[child] for child in node.children if child in firsts]
        call = calls[id(node.module)]
        if call is not None or inside:
            firsts[node] = call if call is not None else min(inside)
    for node in root.below():
        keys, last = {}, -1
        for child in node.children:
            last = firsts.get(child, last)
            keys[child] = last
        node.children.sort(key=keys.__getitem__)


# ----------------------------------------------------------------------------------------- cutting


def cut(root: Node, threshold: float) -> Cut:
    """Cut a model into blocks.

    Args:
        root: The model, which is opened in any case if it can be.
        threshold: What is heavier is opened. So are modules that are never called themselves, and
            those that share a tensor with an earlier block, so that only what uses it goes there.

    Returns:
        The blocks, and which of them belong together because they share a tensor.
    """

    def opens(node: Node, tie: bool) -> bool:
        return _may_open(node) and (node is root or tie or node.total > threshold)

    return _Cutter(opens).run(root)


def _may_open(node: Node) -> bool:
    return node.can_open and bool(node.children)


class _Cutter:
    """Walks through a tree and collects blocks."""

    def __init__(self, opens: Callable[[Node, bool], bool]) -> None:
        self._opens = opens
        self._blocks: list[Node] = []
        self._weights: list[int] = []
        self._leaders: list[int] = []
        self._opened: list[tuple[Node, int]] = []
        self._modules: set[int] = set()
        self._homes: dict[int, int] = {}

    def run(self, root: Node) -> Cut:
        self._expand(root)
        owned: dict[str, int] = {}
        for node, first in reversed(self._opened):  # what is inside has it before what is around
            index = min(first, len(self._blocks) - 1)
            self._weights[index] += self._own_weight(node)
            for name, tensor in node.own.items():
                owned[name] = self._home(node, tensor, index)
        leaders = [self._leader(index) for index in range(len(self._blocks))]
        opened = tuple(node for node, _ in self._opened)
        return Cut(tuple(self._blocks), tuple(self._weights), tuple(leaders), opened, owned)

    def _expand(self, node: Node) -> None:
        if id(node.module) in self._modules:
            return
        self._modules.add(id(node.module))
        tie = any(key in self._homes for key in node.tied)
        if not (node.must_open or self._opens(node, tie)):
            self._add(node)
            return
        first = len(self._blocks)
        self._opened.append((node, first))
        for child in node.children:
            self._expand(child)
        if node.whole:
            self._keep_together(node, first)

    def _add(self, node: Node) -> None:
        index = len(self._blocks)
        self._blocks.append(node)
        self._leaders.append(index)
        weight = node.weight
        for key, size in node.tied.items():
            if key in self._homes:
                self._join(self._homes[key], index)
            else:
                self._homes[key] = index
                weight += size
        self._weights.append(weight)

    def _keep_together(self, node: Node, first: int) -> None:
        for index in range(first + 1, len(self._blocks)):
            self._join(first, index)
        if node.given is not None and first < len(self._blocks):
            self._weights[first:] = [node.given, *[0] * (len(self._blocks) - first - 1)]

    def _own_weight(self, node: Node) -> int:
        return 0 if node.whole and node.given is not None else node.own_weight

    def _home(self, node: Node, tensor: torch.Tensor, index: int) -> int:
        """A tensor that a block has, too, is there already."""
        if id(tensor) in node.tied and id(tensor) not in self._homes:
            self._homes[id(tensor)] = index
            self._weights[index] += node.tied[id(tensor)]
        return self._homes.get(id(tensor), index)

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self._leader(one), self._leader(other)))
        self._leaders[second] = first

    def _leader(self, index: int) -> int:
        while self._leaders[index] != index:
            index = self._leaders[index]
        return index


# ----------------------------------------------------------------------------------------- closing


def close(root: Node, found: Cut, positions: Sequence[int]) -> tuple[Cut, list[int]]:
    """Close opened modules again all of whose blocks are at one position.

    Args:
        root: The model, which stays open.
        found: The cut.
        positions: Where each block of it is.

    Returns:
        A cut with fewer blocks, the same weight at each position, and where each block is.
    """
    closer = _Closer(root, found, positions)
    closer.visit(root)
    return closer.result()


class _Closer:
    def __init__(self, root: Node, found: Cut, positions: Sequence[int]) -> None:
        self._root = root
        self._found = found
        self._position = {node: positions[i] for i, node in enumerate(found.blocks)}
        self._index = {node: i for i, node in enumerate(found.blocks)}
        self._opened = set(found.opened)
        self._homes: dict[int, set[int]] = {}
        for node, position in self._position.items():
            for key in node.tied:
                self._homes.setdefault(key, set()).add(position)
        for node in found.opened:
            for name, tensor in node.own.items():
                home = positions[found.owned[name]]
                self._homes.setdefault(id(tensor), set()).add(home)
        self._groups: list[tuple[Node, list[int]]] = []
        self._left_open: list[Node] = []

    def visit(self, node: Node) -> None:
        inside = [self._index[n] for n in node.below() if n in self._index]
        if node in self._index or (node in self._opened and self._closes(node, inside)):
            self._groups.append((node, inside))
        elif node in self._opened:
            self._left_open.append(node)
            for child in node.children:
                self.visit(child)

    def _closes(self, node: Node, inside: list[int]) -> bool:
        if node is self._root or node.must_open or not inside:
            return False
        here = {self._position[self._found.blocks[index]] for index in inside}
        here.update(*(self._homes[key] for key in node.tied))
        return len(here) == 1

    def result(self) -> tuple[Cut, list[int]]:
        group_of = {i: g for g, (_, inside) in enumerate(self._groups) for i in inside}
        old = self._found
        blocks = tuple(node for node, _ in self._groups)
        new = replace(
            old,
            blocks=blocks,
            weights=tuple(sum(old.weights[i] for i in inside) for _, inside in self._groups),
            leaders=tuple(group_of[old.leaders[inside[0]]] for _, inside in self._groups),
            opened=tuple(self._left_open),
            owned={
                name: group_of[old.owned[name]] for node in self._left_open for name in node.own
            },
        )
        return new, [self._position[old.blocks[inside[0]]] for _, inside in self._groups]


def cut_where(root: Node, opens: Callable[[Node], bool]) -> Cut:
    """Cut a model where the caller wants it; see `cut`.

    Args:
        root: The model.
        opens: Says which nodes are opened.
    """
    return _Cutter(lambda node, _: opens(node)).run(root)
