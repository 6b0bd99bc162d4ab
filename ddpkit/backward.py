"""What happens in each backward of a wrapped model: the end of it, and what must not happen.

torch averages gradients in the first backward after a forward of the wrapper, and only then. Every
other backward adds each rank's own gradients, and the ranks part in silence. So the outputs of
every forward carry a hook, and whatever else could lead to the parameters gets one when it is
handed out. At the end of the backward it is known what it went through.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddpkit.additions import Additions
from ddpkit.errors import ConfigError, GroupError
from ddpkit.wording import shortened

_REENTRANT_NODE = "CheckpointFunctionBackward"
_REENTRANT_REMEDY = (
    "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint. Where that cannot be changed "
    "and all steps are alike, ddp(model, static_graph=True) works too."
)
_STATIC_MESSAGE = (
    "static_graph=True was given to ddp(), and the first forward is inside of accumulate() or "
    "`with sync_gradients(model, when=False):`. torch learns the graph in the first backward, "
    "which must average gradients. Run a step without such a block first, or drop the option."
)


@dataclass(frozen=True)
class Averaging:
    """What a backward needs to know of the wrapper that it belongs to."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    """Those whose gradients are averaged, by name."""
    frozen: dict[str, nn.Parameter]
    """Those that had no gradient when the model was wrapped."""
    named: Callable[[], dict[str, nn.Parameter]]
    """All that the model has now, but for those that are left alone."""
    is_on: Callable[[], bool]
    """Whether gradients are averaged now, and not inside of no_sync()."""
    at_end: Callable[[], None]
    """What an averaging backward ends with."""
    finds_unused: bool
    is_static: bool


@dataclass
class _Backward:
    """One backward that is going on."""

    averages: bool = False
    through_forward: bool = False
    around: str | None = None
    """What ran parameters without a forward of the wrapper."""
    accumulated: set[str] = field(default_factory=set)


class BackwardWatch:
    """Follows the backward passes of one wrapped model.

    Args:
        averaging: The model and how it is averaged.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._nodes = {
            name: get_gradient_edge(parameter).node
            for name, parameter in averaging.parameters.items()
        }
        self._names = {id(item): name for name, item in averaging.parameters.items()}
        self._frozen = dict(averaging.frozen)
        self._additions = Additions()
        self._current: _Backward | None = None
        self._is_awaited = False
        self._has_averaged = False
        self._knows_graph = averaging.is_static
        self._armed: dict[str, RemovableHandle] = {}
        self._refusals: list[RemovableHandle] = []
        # Of an averaging backward, which reaches all parameters, even where it misses the outputs:
        # a penalty on the gradients of inputs does, and a loss that the model has kept.
        for node in list(self._nodes.values())[:1]:
            node.register_prehook(self._calling("_note_parameter"))

    # --------------------------------------------------------------------- what leads to parameters

    @torch._disable_dynamo  # noqa: SLF001  # what DDP itself uses
    def check(self, *, averages: bool) -> None:
        """Look for what torch does not know of, or fails with. Called before each forward.

        Args:
            averages: Whether the backward is to average gradients.

        Raises:
            GroupError: Parameters were made trainable, or added, since the model was wrapped.
            ConfigError: A static graph is to begin with a backward that does not average.
        """
        if self._averaging.is_static and not averages and not self._has_averaged:
            raise ConfigError(_STATIC_MESSAGE)
        if self._additions.happened:
            self._additions.happened = False
            self._look_for_added()
        if any(parameter.requires_grad for parameter in self._frozen.values()):
            names = [name for name, item in self._frozen.items() if item.requires_grad]
            raise GroupError(_not_averaged_message(names, "were frozen", "are trainable now"))

    @torch._disable_dynamo  # noqa: SLF001
    def follow(self, output: object, *, averages: bool) -> None:
        """Put hooks on what a forward of the wrapper has returned.

        Args:
            output: Tensors, in containers and objects.
            averages: Whether the backward through it is to average gradients.

        Raises:
            ConfigError: The model uses re-entrant checkpointing with options that it fails with.
        """
        self._current = None  # one that an error has ended has left it
        enter = self._enter_averaging if averages else self._enter_local
        # A parameter that a model returns as it is would keep every hook.
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(enter)
        if averages:
            self._is_awaited = True
            if not self._knows_graph:
                self._knows_graph = True
                self._look_for_reentrance(tensors)

    @torch._disable_dynamo  # noqa: SLF001
    def hand_out(self, name: str, value: object) -> None:
        """Put hooks on what was read through the wrapper, if it leads to parameters.

        Args:
            name: What messages call it.
            value: An attribute of the model, or what a method of it has returned.
        """
        # Also without gradients: a layer that is read then may be used with them.
        for part in _parts_in(value):
            if isinstance(part, nn.Module):
                self._arm(name, part.parameters())
            elif isinstance(part, nn.Parameter):
                self._arm(name, [part])
            elif part.grad_fn is not None:
                part.register_hook(self._noting_around(name))

    def _arm(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            own = self._names.get(id(parameter))
            if own is not None and own not in self._armed:
                hook = self._noting_around(name)
                self._armed[own] = self._nodes[own].register_prehook(hook)

    def forget_parts(self) -> None:
        """No longer watch what was handed out, because the plain model is used on purpose."""
        while self._armed:
            self._armed.popitem()[1].remove()

    def _noting_around(self, name: str) -> Callable[[object], None]:
        return self._calling("_note_around", name)

    def _calling(self, method: str, *args: Any) -> Callable[[object], None]:
        """Return a hook that calls a method of this object while it lives."""
        # The reducer holds the nodes, and the wrapper the reducer and this object.
        weak = weakref.ref(self)

        def call(_: object) -> None:
            watch = weak()
            if watch is not None:
                getattr(watch, method)(*args)

        return call

    # ------------------------------------------------------------------------------ during backward

    def _enter_averaging(self, _: torch.Tensor) -> None:
        if (current := self._enter()) is not None:
            current.averages = current.through_forward = True

    def _enter_local(self, _: torch.Tensor) -> None:
        if (current := self._enter()) is not None:
            current.through_forward = True
            if self._is_awaited and not current.averages and not self._refusals:
                # It may yet come to the outputs of the other forward, as that of a sum does, but
                # before any parameter that both have used.
                refuse = self._calling("_refuse_local")
                self._refusals = [node.register_prehook(refuse) for node in self._nodes.values()]

    def _refuse_local(self) -> None:
        while self._refusals:
            self._refusals.pop().remove()
        if self._is_awaited and self._current is not None and not self._current.averages:
            self._current = None
            raise GroupError(self._awaited_message())

    def _note_parameter(self) -> None:
        if not self._is_awaited or (current := self._enter()) is None:
            return
        if not current.through_forward:
            current.averages = current.through_forward = True

    def _note_around(self, name: str) -> None:
        if not self._averaging.is_on():
            return
        if (current := self._enter()) is not None:
            current.around = current.around or name

    def _enter(self) -> _Backward | None:
        """Return the record of the backward that goes on; None if it adds to no gradient."""
        if self._current is None:
            # torch.autograd.grad does not accumulate, hence averages nothing.
            if not any(map(_will_run, self._nodes.values())):
                return None
            self._current = _Backward()
            _at_end_of_backward(self._near_end)
        return self._current

    def _near_end(self) -> None:
        _at_end_of_backward(self._end)  # after what the reducer has queued meanwhile

    def _end(self) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        if current.averages:
            is_first, self._is_awaited = self._is_awaited, False
            if not is_first:
                raise GroupError(self._second_backward_message())
            self._averaging.at_end()
            self._has_averaged = True
        elif current.around is not None and not current.through_forward:
            raise GroupError(self._around_message(current.around))

    # ----------------------------------------------------------------------------------- the checks

    def _look_for_added(self) -> None:
        known = {*self._names, *map(id, self._frozen.values())}
        added = {n: item for n, item in self._averaging.named().items() if id(item) not in known}
        trained = [name for name, item in added.items() if item.requires_grad]
        if trained:
            self._additions.happened = True
            raise GroupError(_not_averaged_message(trained, "were not there", "were added later"))
        self._frozen.update(added)

    def _look_for_reentrance(self, outputs: list[torch.Tensor]) -> None:
        """Look once into the graph for checkpointing that the reducer cannot follow."""
        reached, is_reentrant = _walk_graph(outputs)
        if not is_reentrant:
            return
        if self._averaging.finds_unused:
            hidden = [name for own, name in self._names.items() if own not in reached]
            if hidden:
                raise ConfigError(_hidden_message(hidden))
        for name, node in self._nodes.items():
            node.register_prehook(self._calling("_count", name))

    def _count(self, name: str) -> None:
        if self._current is None or not self._averaging.is_on():
            return
        if name in self._current.accumulated:
            raise ConfigError(
                f"{name} gets a gradient more than once in one backward, because re-entrant "
                f"checkpointing runs each part that uses it on its own. {_REENTRANT_REMEDY}"
            )
        self._current.accumulated.add(name)

    def _second_backward_message(self) -> str:
        return (
            "This is a second backward since the last forward of the "
            f"{type(self._averaging.model).__name__} that ddp() wrapped. Gradients are averaged "
            "once after each forward, so this one has added only the gradients of its own rank. "
            "Add the losses and call backward once, or run forward before each backward."
        )

    def _awaited_message(self) -> str:
        return (
            "This backward is not to be averaged, for its forward ran inside of accumulate() or "
            "`with sync_gradients(model, when=False):`. But an earlier forward of the "
            f"{type(self._averaging.model).__name__} that ddp() wrapped ran outside of it, with "
            "gradients enabled, and no backward has followed that one, so torch would average this "
            "one in its place. Run a forward that no backward follows under torch.no_grad(), or, "
            "where only torch.autograd.grad follows, inside of such a block as well."
        )

    def _around_message(self, name: str) -> str:
        return (
            f"{name} of the {type(self._averaging.model).__name__} that ddp() wrapped was used "
            "around forward, so the gradients of this backward were not averaged over the ranks. "
            "Call the wrapped model itself, model(...), and let its forward run that part. Where "
            f"each rank is to keep its own gradients, use unwrap(model).{name}, or put the "
            "backward into `with sync_gradients(model, when=False):`."
        )


def _not_averaged_message(names: list[str], before: str, now: str) -> str:
    return (
        f"Parameters {before} when ddp() wrapped the model and {now}: {shortened(names)}. Their "
        "gradients would not be averaged. Wrap the model again: model = ddp(unwrap(model))."
    )


def _hidden_message(names: list[str]) -> str:
    return (
        "find_unused_parameters=True does not go together with re-entrant checkpointing, which "
        f"hides parameters from the search: {shortened(names)}. {_REENTRANT_REMEDY}"
    )


def _walk_graph(outputs: list[torch.Tensor]) -> tuple[set[int], bool]:
    """Return the ids of the leaves below some tensors, and whether a part of it is re-entrant."""
    pending = [tensor.grad_fn for tensor in outputs]
    seen: set[Node] = set()
    leaves: set[int] = set()
    is_reentrant = False
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_reentrant = is_reentrant or node.name() == _REENTRANT_NODE
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        pending.extend(following for following, _ in node.next_functions)
    return leaves, is_reentrant


def _at_end_of_backward(function: Callable[[], None]) -> None:
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP does
    engine.queue_callback(function)


def _will_run(accumulation: Any) -> bool:
    """Tell whether the backward that is going on will add to a parameter's gradient."""
    try:
        # As torch.autograd.graph does.
        return torch._C._will_engine_execute_node(accumulation)  # noqa: SLF001
    except RuntimeError:
        # What it answers where torch.autograd.grad was asked for this very gradient.
        return False


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Find the tensors in what a model returns: containers, dataclasses, plain objects."""
    return (part for part in _parts_in(output) if isinstance(part, torch.Tensor))


def _parts_in(value: object, depth: int = 6) -> Iterator[torch.Tensor | nn.Module]:
    if isinstance(value, (torch.Tensor, nn.Module)):
        yield value
    elif isinstance(value, (str, bytes, type)) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _parts_in(item, depth - 1)
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        for item in value:
            yield from _parts_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _parts_in(vars(value), depth - 1)
    elif is_dataclass(value):  # one that has slots
        for item in fields(value):
            yield from _parts_in(getattr(value, item.name, None), depth - 1)
