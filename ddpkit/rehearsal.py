"""A forward that is run without the devices: which modules it calls, what it keeps, what it mixes.

The forward runs in a copy of the model whose tensors have shapes and no values (the meta device).
Each tensor carries a simulated device beside it, which operations hand on as real ones would.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ddpkit.blocks import Findings, tensors_of
from ddpkit.errors import ConfigError
from ddpkit.meeting import Operand, is_left_alone, meeting_device
from ddpkit.nested import leaves, with_items
from ddpkit.randomness import read_global_streams, write_global_streams

__all__ = ["Placement", "Rehearsal"]

_T = TypeVar("_T", bound="_Watch")

_logger = logging.getLogger(__name__)

_META = torch.device("meta")
_CPU = torch.device("cpu")
# Functions of those that are left alone that have results where each of their tensors is, and
# functions that want some tensors on the CPU.
_EACH = {"broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "grad"}
_PACKING = {"_pack_padded_sequence", "_pad_packed_sequence"}
_PARTLY_ON_CPU = {"__getitem__", "lstm", "gru", "rnn_tanh", "rnn_relu", *_PACKING}
_TO_TYPE = {"cuda", "xpu", "cpu"}


@dataclass(frozen=True)
class Placement:
    """Where things are in a rehearsal."""

    devices: Sequence[torch.device]
    """In the order of the plan. What comes from outside is on the first."""
    blocks: Mapping[str, torch.device] = field(default_factory=dict)
    """Modules with tensors, to whose device their arguments are moved, by name."""
    owned: Mapping[str, torch.device] = field(default_factory=dict)
    """Tensors outside of the blocks, by name."""
    judged: bool = True
    """Whether operations that meet several devices matter."""


class Rehearsal:
    """Runs the forward of a model without touching the model.

    Args:
        model: The model. Its values, buffers, gradients and the random streams are left alone.
        sample: Arguments of one forward: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments.
        devices: The devices that the model is planned for.
    """

    def __init__(self, model: nn.Module, sample: Any, devices: Sequence[torch.device]) -> None:
        self._model = model
        self._sample = sample
        self._devices = devices
        self._needs_values = False

    def record(self) -> Findings:
        """Find out which modules are called in which order, and what they keep for the backward.

        Raises:
            ConfigError: The forward failed.
        """
        everything = dict.fromkeys(dict(tensors_of(self._model)), self._devices[0])
        placement = Placement(self._devices, owned=everything, judged=False)
        recorder: _Recorder = self._run(placement, _Recorder)
        return Findings(recorder.order, recorder.bypassed, recorder.activations)

    def crossings(self, placement: Placement) -> tuple[str, ...]:
        """Find operations outside of the blocks that meet tensors of several devices.

        Args:
            placement: Where blocks and tensors are.

        Returns:
            One line for each, in the order in which they come.

        Raises:
            ConfigError: An operation inside a block meets tensors of several devices, or the
                forward failed.
        """
        watch: _Watch = self._run(placement, _Watch)
        return tuple(watch.run.simulation.crossings)

    def _run(self, placement: Placement, make_watch: Callable[[_Run], _T]) -> _T:
        """Run without values if that is possible, else with those of the model."""
        if not self._needs_values:
            try:
                return self._run_on(_META, placement, make_watch)
            except _ForwardFailedError as error:
                if _device_of(self._model) == _META:
                    raise self._failure(error, " Values are missing: the model is on meta.") from (
                        error.__cause__
                    )
                _logger.debug("%s runs with values, because without: %s", self._name, error)
                self._needs_values = True
        try:
            return self._run_on(_device_of(self._model), placement, make_watch)
        except _ForwardFailedError as error:
            raise self._failure(error) from error.__cause__

    def _run_on(
        self, device: torch.device, placement: Placement, make_watch: Callable[[_Run], _T]
    ) -> _T:
        with _same_randomness(device):
            return _Run(self._model, device, placement).forward(self._sample, make_watch)

    def _failure(self, error: _ForwardFailedError, why: str = "") -> ConfigError:
        return ConfigError(
            f"The forward of {self._name} with sample= raised {error}.{why} A tensor or a tuple is "
            "given as positional arguments, a dict as keyword arguments. Without sample= the order "
            "of registration is taken and nothing is run."
        )

    @property
    def _name(self) -> str:
        return type(self._model).__name__


class _ForwardFailedError(Exception):
    """The forward raised; the cause is what."""


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    streams = read_global_streams()
    has_own = device.type not in ("cpu", "meta")
    own = torch.random.fork_rng([device], device_type=device.type) if has_own else nullcontext()
    try:
        with own:
            yield
    finally:
        write_global_streams(streams)


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for _, tensor in tensors_of(model)), _CPU)


# --------------------------------------------------------------------------------------- the copy


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy modules and attributes; parameters are shared, or replaced by some without values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):  # a copy of one that was computed is refused
                memo[id(value)] = value.detach().clone()
    for _, tensor in tensors_of(model):
        memo[id(tensor)] = _stand_in(tensor, device)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied for the rehearsal that sample= asks for "
            f"({type(error).__name__}: {error}). Leave sample= out."
        ) from error


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device == _META:
        new = tensor.detach().to(_META)
    elif isinstance(tensor, nn.Parameter):
        new = tensor.detach()  # the same values, and a gradient of its own
    else:
        new = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


class _Run:
    """One forward of a copy on one device, where other devices are simulated."""

    def __init__(self, model: nn.Module, device: torch.device, placement: Placement) -> None:
        self.copy = _copy(model, device)
        self.device = device
        self.placement = placement
        self.stack: list[str] = []
        self.simulation = _Simulation(self)
        self._failure: tuple[BaseException | None, str] = None, ""
        self._outer_error = sys.exc_info()[1]
        self._tag_tensors()

    def forward(self, sample: Any, make_watch: Callable[[_Run], _T]) -> _T:
        args, kwargs = _arguments(_map_tensors(self._prepared, sample))
        watch = make_watch(self)
        for name, module in self.copy.named_modules():
            module.register_forward_pre_hook(self._enter(name, watch), with_kwargs=True)
            module.register_forward_hook(self._leave(watch), always_call=True)
        try:
            with self.simulation, watch.watching():
                self.copy(*args, **kwargs)
        except _MixError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:
            raised, name = self._failure
            where = _place(name if raised is error else "", self.copy)
            text = f"{type(error).__name__} in {where}: {error}"
            raise _ForwardFailedError(text) from error
        return watch

    def _tag_tensors(self) -> None:
        """Parameters and buffers are where the plan has them, other attributes where they are."""
        tags = self.simulation.tags
        for module in self.copy.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    tags[value] = value.device
        # What blocks have comes first: it is there for the opened modules, too.
        for name, device in self.placement.blocks.items():
            for _, tensor in tensors_of(self.copy.get_submodule(name)):
                tags.setdefault(tensor, device)
        named = dict(tensors_of(self.copy))
        for name, device in self.placement.owned.items():
            tags.setdefault(named[name], device)

    def _prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().to(self.device, copy=True).requires_grad_(tensor.requires_grad)
        self.simulation.tags[new] = self.placement.devices[0]
        return new

    def _enter(self, name: str, watch: _Watch) -> Callable[..., Any]:
        device = self.placement.blocks.get(name)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            watch.enter(name)
            self.stack.append(name)
            if device is None:
                return None
            return self.simulation.moved((args, kwargs), device)

        return hook

    def _leave(self, watch: _Watch) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            name = self.stack.pop()
            error = sys.exc_info()[1]
            if error not in (None, self._outer_error, self._failure[0]):
                self._failure = error, name  # the innermost module comes first
            watch.leave()

        return hook

    @property
    def block(self) -> str | None:
        """The block whose code is running, if any."""
        return next((name for name in self.stack[::-1] if name in self.placement.blocks), None)

    @property
    def where(self) -> str:
        """The module whose code is running."""
        return _place(self.stack[-1] if self.stack else "", self.copy)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, dict):
        return (), sample
    return (sample if type(sample) is tuple else (sample,)), {}


def _place(name: str, model: nn.Module) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else f"the model itself ({kind})"


# ------------------------------------------------------------------------------- simulated devices


class _MixError(Exception):
    """An operation met tensors that nothing will bring together."""


class _Simulation(TorchFunctionMode):
    """Hands simulated devices on from the arguments of an operation to its results."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.tags: Any = WeakTensorKeyDictionary()
        self.crossings: dict[str, None] = {}
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return self._device(args[0]) or args[0].device
        request = self._requested(func, args, options)
        if request is not None:
            return request
        device = self._meeting(func, args, options)
        result = func(*self._alike(args), **self._alike(options))
        name = _name_of(func)
        if name in _EACH and len(args) > 1:
            return self._tagged_each(result, args[1] if name == "grad" else args)
        self._tagged(result, device, args)
        if name in _PACKING:  # the lengths of packed sequences are always on the CPU
            self.tags[result[1]] = _CPU
        return result

    def moved(self, values: Any, device: torch.device) -> Any:
        """Return values whose tensors are on a device; those that were elsewhere are new ones."""
        sent: dict[int, torch.Tensor] = {}  # attention looks whether arguments are the same

        def send(tensor: torch.Tensor) -> torch.Tensor:
            if self._device(tensor) == device:
                return tensor
            if id(tensor) not in sent:
                sent[id(tensor)] = tensor.view_as(tensor)
                self.tags[sent[id(tensor)]] = device
            return sent[id(tensor)]

        return _map_tensors(send, values)

    def _device(self, tensor: torch.Tensor) -> torch.device | None:
        """The simulated device; None where nothing is known, as of what C++ code has made."""
        found: torch.device | None = self.tags.get(tensor)
        if found is None and tensor.device != self._run.device:
            return tensor.device
        return found

    def _requested(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Run what names a device on the one that there is; None for everything else."""
        name, target = _name_of(func), None
        if name in _TO_TYPE and len(args) == 1 and getattr(torch.Tensor, name) is func:
            return self.moved(args[0], self._exact(options.get("device"), name))
        other = args[1] if len(args) > 1 else options.get("other")
        if func in (torch.Tensor.to, torch.Tensor.type_as) and isinstance(other, torch.Tensor):
            options.pop("other", None)
            func, args = torch.Tensor.to, (args[0], other.dtype, *args[2:])
            target = self._device(other)
        elif func is torch.Tensor.to and isinstance(other, (str, int, torch.device)):
            target = self._exact(other)
            args = args[0], self._run.device, *args[2:]
        elif func is torch.Tensor.cuda and len(args) > 1:
            return self.moved(args[0], self._exact(other, "cuda"))
        elif options.get("device") is not None:
            target = self._exact(options["device"])
            options["device"] = self._run.device
        if target is None:
            return None
        result = func(*args, **options)
        is_same = any(result is argument for argument in args)
        return self.moved(result, target) if is_same else self._tagged(result, target, ())

    def _exact(self, given: Any, kind: str | None = None) -> torch.device:
        """Read a device; a kind alone means the first of that kind in the plan."""
        devices = self._run.placement.devices
        if given is None or isinstance(given, int):
            kind = kind or devices[0].type
            found = torch.device(kind) if given is None else torch.device(kind, given)
        else:
            found = torch.device(given)
        if ":" in str(found):
            return found
        return next((device for device in devices if device.type == found.type), found)

    def _meeting(self, func: Any, args: Any, options: Any) -> torch.device | None:
        """Decide where an operation runs, and note or refuse it if it meets several devices."""
        tensors = [x for _, x in leaves((args, options), "") if isinstance(x, torch.Tensor)]
        if not tensors:
            return torch.get_default_device()
        name = _name_of(func)
        met = {device: None for x in tensors if (device := self._counting_device(x, name))}
        if len(met) < 2:
            return next(iter(met), self._device(tensors[0]))
        # Within a block torch itself takes values of any device for a part of a tensor.
        if is_left_alone(name) or name == "__setitem__":
            return self._device(tensors[0])
        self._note(name, list(met))
        order = self._run.placement.devices
        out = options.get("out")
        place = self._device(out) if isinstance(out, torch.Tensor) else None
        return meeting_device(name, self._operands(tensors), order, place) or order[0]

    def _counting_device(self, tensor: torch.Tensor, name: str) -> torch.device | None:
        device = self._device(tensor)
        if device == _CPU and (tensor.dim() == 0 or name in _PARTLY_ON_CPU):
            return None  # torch lets numbers on the CPU meet everything
        return device

    def _note(self, name: str, met: list[torch.device]) -> None:
        run = self._run
        if not run.placement.judged:
            return
        line = f"{name} in {run.where}: meets {' and '.join(map(str, met))}"
        if run.block is None:
            self.crossings[line] = None
            return
        strange = next((device for device in met if device not in run.placement.devices), None)
        if strange is None:
            why = (
                "A tensor has come into it by another way than as an argument, and only arguments "
                "are moved. Pass it as an argument, or keep what belongs together on one device "
                "with no_split=."
            )
        else:
            why = (
                f"{strange} is no device of the plan. A tensor that forward makes needs a device, "
                "as in torch.arange(n, device=x.device); one that a module keeps has to be a "
                "buffer."
            )
        raise _MixError(f"{line}, inside the block {run.block!r}. {why}")

    def _operands(self, tensors: list[torch.Tensor]) -> list[Operand]:
        return [
            Operand(device, isinstance(tensor, nn.Parameter), tensor.dim() == 0)
            for tensor in tensors
            if (device := self._device(tensor)) is not None
        ]

    def _alike(self, values: Any) -> Any:
        """Where some tensors have no values, give it none that has."""
        if self._run.device != _META:
            return values
        kinds = {x.device for _, x in leaves(values, "") if isinstance(x, torch.Tensor)}
        if len(kinds) < 2:
            return values
        return _map_tensors(_without_values, values)

    def _tagged(self, result: Any, device: torch.device | None, args: Any) -> Any:
        if device is None:
            return result
        known = [x for _, x in leaves(args, "") if isinstance(x, torch.Tensor)]
        for _, leaf in leaves(result, ""):
            if isinstance(leaf, torch.Tensor) and not any(leaf is x for x in known):
                self.tags[leaf] = device
        return result

    def _tagged_each(self, results: Any, sources: Any) -> Any:
        for (_, leaf), (_, source) in zip(leaves(results, ""), leaves(sources, ""), strict=False):
            if isinstance(leaf, torch.Tensor) and (device := self._device(source)) is not None:
                self.tags[leaf] = device
        return results


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_META) if tensor.dim() else tensor


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Rebuild what a split model looks into for tensors, with others in their place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        parts = value.data, value.sorted_indices, value.unsorted_indices
        data, order, back = _map_tensors(function, parts)
        return value._replace(data=data, sorted_indices=order, unsorted_indices=back)
    if isinstance(value, MutableMapping):
        return with_items(value, {k: _map_tensors(function, v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(function, value)
    return value


def _with_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    new = copy.copy(value)
    for field_ in dataclasses.fields(value):
        if hasattr(value, field_.name):
            item = _map_tensors(function, getattr(value, field_.name))
            object.__setattr__(new, field_.name, item)  # a frozen one, too
    return new


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", name)
    return name


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# ------------------------------------------------------------------------------------ the recording


class _Watch:
    """Looks on while a forward runs."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def enter(self, name: str) -> None:
        """Called before each module."""

    def leave(self) -> None:
        """Called after each module, also if it raised."""

    def watching(self) -> AbstractContextManager[object]:
        """Be around the whole forward."""
        return nullcontext()


class _Recorder(_Watch):
    """Notes the order of calls, calls around a module, and what is kept for the backward."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run)
        self.order: dict[str, int] = {}
        self.bypassed: set[str] = set()
        self.activations: dict[str, int] = {}
        self._around = _modules_around(run.copy)
        self._stack: list[tuple[str, str | None]] = []
        self._kept = dict(_storage(tensor) for _, tensor in tensors_of(run.copy))

    def enter(self, name: str) -> None:
        self.order.setdefault(name, len(self.order))
        running = {outer for outer, _ in self._stack}
        missing = [around - running for around in self._around[name]]
        self.bypassed |= min(missing, key=len)
        self._stack.append((name, None))

    def leave(self) -> None:
        name, last = self._stack.pop()
        if self._stack:
            self._stack[-1] = self._stack[-1][0], last or name

    def watching(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(self._keep, _identity)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor for the module that has just run, which is where it was made."""
        key, storage = _storage(tensor)
        if key not in self._kept and self._stack:
            self._kept[key] = storage
            name, last = self._stack[-1]
            target = last or name
            self.activations[target] = self.activations.get(target, 0) + storage.nbytes()
        return tensor.detach()  # the tensor itself would refer to the graph that keeps it


def _storage(tensor: torch.Tensor) -> tuple[int, Any]:
    """A storage, and its identity for as long as it is held."""
    storage = tensor.untyped_storage()
    return id(storage), storage


def _modules_around(model: nn.Module) -> dict[str, list[set[str]]]:
    """Find for each module by which modules it is held, one set for each of its places."""
    first = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[set[str]]] = {name: [] for name in first.values()}

    def visit(module: nn.Module, around: tuple[str, ...]) -> None:
        name = first[id(module)]
        found[name].append(set(around))
        for child in module.children():
            if first[id(child)] not in (*around, name):
                visit(child, (*around, name))

    visit(model, ())
    return found
