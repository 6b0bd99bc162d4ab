"""Wrapping a model for data-parallel training, and getting it back.

`ddp()` gives a real `DistributedDataParallel` that can be used as if it were the model: attributes,
state dicts and copies are the model's own. Buffers follow rank 0 at the end of each synchronising
backward and at no other time, so that a forward never communicates.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
import operator
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_device, is_rank0, require_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

M = TypeVar("M", bound=nn.Module)

_MODULE = "module."
_COMPILED = "_orig_mod."
_BROADCAST_BYTES = 250 << 20
_MAX_SHOWN = 6
_TORCH_OPTIONS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)
_OWN_OPTIONS = frozenset({"self", "module"})
_SPECIAL_METHODS = (
    "__len__",
    "__iter__",
    "__contains__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
)
_BUFFER_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")
# broadcast_buffers=False, all that torch < 2.13 has, leaves buffers unequal at construction too.
_HAS_FORWARD_SYNC = "forward_sync_buffers" in _TORCH_OPTIONS

_logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------- public calls


def ddp(
    model: M,
    *,
    sync_batchnorm: bool = False,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    **ddp_options: Any,
) -> M:
    """Move a model to this rank's device and make it train in step with the other ranks.

    Collective: every rank must call this, with the same model. In a world of one it returns the
    model itself, on its device.

    What comes back is a `DistributedDataParallel` that reads like the model: attributes and methods
    of the model can be used, names in `state_dict()` have no `module.` in front, and
    `load_state_dict()` takes names with and without it. `copy.deepcopy` of it is the plain model.
    Gradients are averaged whenever a forward ran with gradients enabled, in eval mode too. A
    forward without gradients does not communicate, so validation may run on one rank alone.
    Buffers, such as batch-norm statistics, are rank 0's on all ranks after every backward that
    averages gradients (but not inside torch's `join()`).

    Args:
        model: The model. It is moved to `get_device()`, unless it lies on several devices.
        sync_batchnorm: Compute batch-norm statistics over the batches of all ranks. Skipped with a
            warning on the CPU, where torch has no such layer.
        find_unused_parameters: Allow a step to leave parameters out, at some cost.
        static_graph: Promise that every step uses the same parameters in the same way.
        **ddp_options: Further options of `DistributedDataParallel`. `gradient_as_bucket_view` is on
            by default. `forward_sync_buffers=False` leaves the buffers to each rank. With
            `process_group` or `device_mesh`, models are compared by torch alone.

    Returns:
        The wrapped model. A model without trainable parameters gets rank 0's values and comes back
        unwrapped.

    Raises:
        ConfigError: An option is unknown, the model is wrapped already, or its tensors have no
            data or are on different types of device; they are named.
        GroupError: The ranks have different models or options; the differences are named. Or no
            group is open though several ranks were started.

    Example:
        >>> model = ddp(torch.nn.Linear(4, 2))
        >>> model.in_features
        4
    """
    _check_model(model)
    _check_options(ddp_options)
    several = require_group("ddp")
    placed = _place(model)
    if not several:
        return placed
    if sync_batchnorm:
        placed = _with_sync_batchnorm(placed)
    options = _resolve_options(
        ddp_options,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        device_ids=choose_device_ids({tensor.device for _, tensor in _named_tensors(placed)}),
    )
    if not _names_a_group(options):
        _check_same_everywhere(placed, options)
    if not any(parameter.requires_grad for parameter in placed.parameters()):
        return _synchronised(placed, _group_of(options))
    return cast("M", _wrap(placed, options))


def unwrap(model: M) -> M:
    """Return the plain model inside of DDP, DataParallel and `torch.compile`, in any nesting.

    Does not communicate. In a world of one, or for a plain model, it returns its argument. Children
    of the model are left as they are.

    Args:
        model: A model, wrapped or not.

    Returns:
        The model that was given to the innermost wrapper.

    Raises:
        ConfigError: The argument is not a module.

    Example:
        >>> net = torch.nn.Linear(4, 2)
        >>> unwrap(ddp(net)) is net
        True
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"unwrap() was given a {type(model).__qualname__}; expected a torch.nn.Module."
        )
    inner: nn.Module = model
    while (wrapped := _wrapped_module(inner)) is not None:
        inner = wrapped
    return cast("M", inner)


def _wrapped_module(model: nn.Module) -> nn.Module | None:
    """Return the module inside the outermost wrapper, None if there is no wrapper."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return cast("nn.Module", model.module)
    # Looked up and not imported: whoever has compiled a model has imported the compiler.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(model, compiler.OptimizedModule):
        return cast("nn.Module", model._orig_mod)  # noqa: SLF001  # the only way in
    return None


# -------------------------------------------------------------------------------- names in states


def wrapper_prefix(names: Iterable[str], expected: Iterable[str]) -> str:
    """Find what wrappers have put in front of all names of a state dict.

    Args:
        names: Names in a state dict, of a wrapped or of a plain model.
        expected: Names that the plain model has. They settle what is a wrapper's prefix and what is
            a child that happens to be called `module`.

    Returns:
        The prefix to remove, such as `module.` or `_orig_mod.module.`; empty for plain names.
    """
    given, known = list(names), set(expected)
    candidates = [""]
    while given and (more := _next_prefix(given, candidates[-1])):
        candidates.append(more)

    def matches(prefix: str) -> int:
        return sum(name[len(prefix) :] in known for name in given)

    best = max(candidates, key=matches)
    # Where no name fits, the state is of another model. Its names are easier to read without.
    return best if matches(best) or not known else candidates[-1]


def _next_prefix(names: list[str], prefix: str) -> str:
    for wrapper in (_MODULE, _COMPILED):
        longer = prefix + wrapper
        if all(name.startswith(longer) for name in names):
            return longer
    return ""


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a copy of a state dict without a prefix, its version metadata included."""
    new = copy.copy(dict(state)) if not isinstance(state, dict) else copy.copy(state)
    new.clear()
    new.update({name.removeprefix(prefix): value for name, value in state.items()})
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        setattr(new, "_metadata", _renamed_metadata(metadata, prefix))  # noqa: B010
    return new


def _renamed_metadata(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Metadata has one entry for each module, whose names lack the dot at the end."""
    return {
        _dotted(path)[len(prefix) : -1]: entry
        for path, entry in metadata.items()
        if _dotted(path).startswith(prefix)
    }


# ----------------------------------------------------------------------------------- the arguments


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"ddp() was given a {type(model).__qualname__}; expected a torch.nn.Module."
        )
    plain: nn.Module | None = model
    while plain is not None:
        if isinstance(plain, (DistributedDataParallel, DataParallel)):
            raise ConfigError(
                f"ddp() was given a model that is wrapped in {type(plain).__name__} already. Wrap "
                "it once: drop the other wrapper, or pass unwrap(model)."
            )
        plain = _wrapped_module(plain)


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - (_TORCH_OPTIONS - _OWN_OPTIONS) - set(_BUFFER_OPTIONS))
    if unknown:
        raise ConfigError(
            f"ddp() was given {', '.join(unknown)}; expected options of DistributedDataParallel: "
            f"{', '.join(sorted(_TORCH_OPTIONS - _OWN_OPTIONS))}."
        )


def choose_device_ids(devices: set[torch.device]) -> list[int] | None:
    """Say which `device_ids` DDP needs for a model on these devices.

    Args:
        devices: Devices of all parameters and buffers.

    Returns:
        The index of the one accelerator; None for the CPU and for several devices, where DDP must
        not be told.
    """
    if len(devices) != 1:
        return None
    (device,) = devices
    return None if device.type == "cpu" or device.index is None else [device.index]


def _resolve_options(given: Mapping[str, Any], **ours: Any) -> dict[str, Any]:
    """Merge the options; buffers are never torch's business during a forward."""
    options = {"gradient_as_bucket_view": True, **ours, **given}
    wishes = [options.pop(name) for name in _BUFFER_OPTIONS if name in options]
    options["sync_buffers"] = all(wish is None or bool(wish) for wish in wishes)
    return options


def _names_a_group(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("process_group", "device_mesh"))


def _group_of(options: Mapping[str, Any]) -> Any:
    if options.get("device_mesh") is not None:
        return options["device_mesh"].get_group()
    return options.get("process_group") or dist.group.WORLD


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _place(model: M) -> M:
    tensors = dict(_named_tensors(model))
    _check_have_data(tensors)
    _check_one_device_type(tensors)
    spans_devices = len({tensor.device for tensor in tensors.values()}) > 1
    return model if spans_devices else model.to(get_device())


def _check_have_data(tensors: Mapping[str, torch.Tensor]) -> None:
    empty = [
        name
        for name, tensor in tensors.items()
        if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta"
    ]
    if empty:
        raise ConfigError(
            f"ddp() was given a model whose tensors have no data yet: {_shortened(empty)}. Run one "
            "batch through lazy layers first, and materialise a model made on the meta device."
        )


def _check_one_device_type(tensors: Mapping[str, torch.Tensor]) -> None:
    by_type: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        by_type.setdefault(tensor.device.type, []).append(name)
    if len(by_type) > 1:
        most = max(by_type, key=lambda kind: len(by_type[kind]))
        strays = [
            f"{name} on {tensor.device}"
            for name, tensor in tensors.items()
            if tensor.device.type != most
        ]
        raise ConfigError(
            f"ddp() was given a model on several types of device. Most of it is on {most}, but "
            f"not: {_shortened(strays)}. Move the whole model to one type of device; register "
            "tensors that must follow the model as buffers."
        )


def _shortened(items: list[str]) -> str:
    rest = len(items) - _MAX_SHOWN
    return ", ".join(items[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _with_sync_batchnorm(model: M) -> M:
    if all(tensor.device.type == "cpu" for _, tensor in _named_tensors(model)):
        if is_rank0():
            warnings.warn(
                "sync_batchnorm=True has no effect: torch has no synchronised batch norm for the "
                "CPU. Each rank uses the statistics of its own batches.",
                stacklevel=3,
            )
        return model
    return cast("M", nn.SyncBatchNorm.convert_sync_batchnorm(model))


# -------------------------------------------------------------------------- the same on all ranks


def _check_same_everywhere(model: nn.Module, options: Mapping[str, Any]) -> None:
    description = _describe(model, options)
    digest = hashlib.blake2b("\n".join(description).encode()).hexdigest()
    # The whole description is sent only when something is wrong: it is long for a large model.
    if len(set(exchange(digest, name="ddp"))) > 1:
        raise GroupError(difference_message(exchange(description, name="ddp")))


def _describe(model: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Describe what must be equal on all ranks, one line a thing, in the order that DDP uses."""
    flags = [
        f"option {name}: {value}" for name, value in options.items() if isinstance(value, bool)
    ]
    parameters = [
        f"parameter {name}: {tuple(tensor.shape)} {tensor.dtype} "
        f"{'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in model.named_parameters()
    ]
    buffers = [
        f"buffer {name}: {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in model.named_buffers()
    ]
    # Under DETAIL on gloo a group is made, which all ranks must do or none.
    level = f"TORCH_DISTRIBUTED_DEBUG: {dist.get_debug_level().name}"
    return [level, *sorted(flags), *parameters, *buffers]


def difference_message(descriptions: list[list[str]]) -> str:
    """Say how the models of the ranks differ.

    Args:
        descriptions: One line `name: what it is` for each thing, for each rank.

    Returns:
        The first differences, with the value of every group of ranks.
    """
    tables = [dict(line.split(": ", 1) for line in lines) for lines in descriptions]
    names = dict.fromkeys(name for table in tables for name in table)
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    if differing:
        shown = [f"  {name}: {_by_ranks(tables, name)}" for name in differing[:_MAX_SHOWN]]
        rest = len(differing) - len(shown)
        details = "\n".join([*shown, *([f"  and {rest} more"] if rest else [])])
    else:
        details = _order_difference(descriptions)
    return (
        f"ddp() was given different models or options on different ranks:\n{details}\nBuild the "
        "model from the same settings on every rank; only its values may differ, rank 0's are used."
    )


def _by_ranks(tables: list[dict[str, str]], name: str) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table.get(name, "not there"), []).append(str(rank))
    return "; ".join(
        f"{what} on rank{'s' * (len(who) > 1)} {_shortened(who)}" for what, who in ranks.items()
    )


def _order_difference(descriptions: list[list[str]]) -> str:
    other = next(rank for rank, lines in enumerate(descriptions) if lines != descriptions[0])
    pairs = zip(descriptions[0], descriptions[other], strict=True)
    here, there = next((a, b) for a, b in pairs if a != b)
    return (
        "  the order differs: where rank 0 has "
        f"{here.split(': ')[0]}, rank {other} has {there.split(': ')[0]}"
    )


def _synchronised(model: M, group: Any) -> M:
    _broadcast_from_rank0([tensor for _, tensor in _named_tensors(model)], group)
    _logger.info(
        "%s has no parameter that requires a gradient: it got rank 0's values and is not wrapped.",
        type(model).__name__,
    )
    return model


def _broadcast_from_rank0(tensors: list[torch.Tensor], group: Any) -> None:
    if not tensors:
        return  # torch asserts that there is something to send
    # torch's own part of DDP: packs the tensors in C++, in buckets of bounded size.
    real = [torch.view_as_real(item) if item.is_complex() else item for item in tensors]
    with torch.no_grad():
        dist._broadcast_coalesced(  # noqa: SLF001
            group, [item.detach() for item in real], _BROADCAST_BYTES, 0
        )


# ---------------------------------------------------------------------------------- construction


def _wrap(model: nn.Module, options: dict[str, Any]) -> DistributedModel:
    sync_buffers = options.pop("sync_buffers")
    options["forward_sync_buffers" if _HAS_FORWARD_SYNC else "broadcast_buffers"] = False
    if not _names_a_group(options) and _crashes_in_detail_mode():
        options["process_group"] = _group_without_detail()
    # At the level "info", torch names the parameters that a step leaves out; at "off" it does not.
    with _debug_level(_at_least_info(dist.get_debug_level())):
        wrapped = _wrapper_class(type(model))(model, sync_buffers=sync_buffers, **options)
    if sync_buffers and not _HAS_FORWARD_SYNC:
        wrapped.synchronise_buffers()
    _warn_of_shadowed(wrapped)
    return wrapped


def _crashes_in_detail_mode() -> bool:
    """Tell whether DDP would read the wrapper that the level "detail" puts around gloo as gloo."""
    is_detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    return is_detail and "gloo" in dist.get_backend_config()


def _group_without_detail() -> Any:
    if is_rank0():
        warnings.warn(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch crash in DDP on gloo. This model uses a "
            "group of its own whose collectives are not checked.",
            stacklevel=4,
        )
    with _debug_level(dist.DebugLevel.OFF):
        return dist.new_group()


def _at_least_info(level: dist.DebugLevel) -> dist.DebugLevel:
    return dist.DebugLevel.INFO if level == dist.DebugLevel.OFF else level


@contextlib.contextmanager
def _debug_level(level: dist.DebugLevel) -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def shadowed_names(wrapped: DistributedModel) -> list[str]:
    """Name the public attributes of a model that its wrapper's own hide.

    Args:
        wrapped: The wrapped model.

    Returns:
        Sorted names: `dim`, `device`, `join` and the like.
    """
    names = _attribute_names(wrapped) & _attribute_names(wrapped.module)
    return sorted(name for name in names - set(dir(nn.Module())) if not name.startswith("_"))


def _attribute_names(module: nn.Module) -> set[str]:
    return set(nn.Module.__dir__(module)) | set(dir(type(module)))


def _warn_of_shadowed(wrapped: DistributedModel) -> None:
    names = shadowed_names(wrapped)
    if names and is_rank0():
        warnings.warn(
            f"DistributedDataParallel has attributes of its own named {', '.join(names)}, which "
            f"hide those of {type(wrapped.module).__name__}. Read and write them as "
            "unwrap(model).NAME.",
            stacklevel=4,
        )


# ------------------------------------------------------------------------------------ the wrapper


class DistributedModel(DistributedDataParallel):
    """A `DistributedDataParallel` that reads like the model in it. Made by `ddp()`."""

    def __init__(self, model: nn.Module, *, sync_buffers: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self._sync_buffers_in_backward = sync_buffers
        self._sync_is_queued = False
        self._gradient_nodes = [
            get_gradient_edge(parameter).node
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        self._load_prefix = ""
        self._lent_metadata: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.register_state_dict_post_hook(_drop_module_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_module_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_finish_load)  # type: ignore[no-untyped-call]
        # Last: from here on, writes go to the model.
        self._is_ready = True

    # Attributes: reads, writes and deletes of what the model has.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if model is None:
                raise
            return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self.module if self._is_the_models(name) else None
        if target is None:
            super().__setattr__(name, value)
        else:
            setattr(target, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_the_models(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_the_models(self, name: str) -> bool:
        if not self.__dict__.get("_is_ready") or name in self.__dict__ or name in self._modules:
            return False
        return not hasattr(type(self), name) and hasattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # A copy is for averaging or for keeping, and the reducer cannot be copied.
        return cast("nn.Module", copy.deepcopy(self.module, memo))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Pickles as the plain model. The standard library's identity function, so that reading it
        # needs no ddpkit.
        return operator.itemgetter(0), ((self.module,),)

    # Buffers: rank 0's everywhere at the end of a backward that averages gradients.

    # Without dynamo this frame would be traced, and with it the hooks on the outputs.
    @torch._disable_dynamo(recursive=False)  # noqa: SLF001  # what DDP itself uses
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model as DDP does, and see to it that a backward makes the buffers equal."""
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self._must_sync_buffers():
            self._sync_is_queued = False
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue_sync)
        return output

    def _must_sync_buffers(self) -> bool:
        return (
            self._sync_buffers_in_backward
            and torch.is_grad_enabled()
            and self.require_backward_grad_sync
            # Ranks that have run out of data mimic DDP's collectives, not this one.
            and not self._join_config.enable
            and next(self.module.buffers(), None) is not None
        )

    def _queue_sync(self, _: torch.Tensor) -> None:
        # torch.autograd.grad does not accumulate, hence averages nothing.
        if self._sync_is_queued or not any(map(_will_run, self._gradient_nodes)):
            return
        self._sync_is_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001  # as DDP does
            self._sync_at_end_of_backward
        )

    def _sync_at_end_of_backward(self) -> None:
        self._sync_is_queued = False
        self.synchronise_buffers()

    def synchronise_buffers(self) -> None:
        """Give every rank the buffers of rank 0. Collective: every rank must call this."""
        buffers = [
            buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        ]
        # A graph that is kept for another backward may hold a buffer; its value is no part of it.
        with contextlib.ExitStack() as versions:
            for buffer in buffers:  # one by one, for torch 2.6 takes a single tensor
                keep = torch.autograd._unsafe_preserve_version_counter(buffer)  # noqa: SLF001
                versions.enter_context(keep)
            _broadcast_from_rank0(buffers, self.process_group)


def _wrapper_class(model_class: type[nn.Module]) -> type[DistributedModel]:
    """Return a wrapper that has the special methods of containers which the model has.

    Python looks for those on the class alone, past `__getattr__`.
    """
    methods = {name: _forwarding(name) for name in _SPECIAL_METHODS if hasattr(model_class, name)}
    return type("DistributedModel", (DistributedModel,), methods) if methods else DistributedModel


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: DistributedModel, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return method


def _will_run(accumulation: Any) -> bool:
    """Tell whether the backward that is going on will add to a parameter's gradient."""
    try:
        # As torch.autograd.graph does.
        return torch._C._will_engine_execute_node(accumulation)  # noqa: SLF001
    except RuntimeError:
        # What it answers where torch.autograd.grad was asked for this very gradient.
        return False


def _tensors_in(output: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Find the tensors in what a model returns: containers, dataclasses, plain objects."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (str, bytes, nn.Module)) or depth == 0:
        return
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors_in(item, depth - 1)
    elif isinstance(output, (tuple, list, set, frozenset)):
        for item in output:
            yield from _tensors_in(item, depth - 1)
    elif hasattr(output, "__dict__") and not isinstance(output, type):
        yield from _tensors_in(vars(output), depth - 1)


# ------------------------------------------------------------------------------- state-dict hooks


def _drop_module_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Rename what the model has just written to the names that it has without the wrapper."""
    long = prefix + _MODULE
    moved = {name: state.pop(name) for name in list(state) if name.startswith(long)}
    state.update({prefix + name.removeprefix(long): value for name, value in moved.items()})
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        paths = [path for path in metadata if (path + ".").startswith(long)]
        entries = {path: metadata.pop(path) for path in paths}
        for path, entry in entries.items():
            metadata[(prefix + (path + ".").removeprefix(long))[:-1]] = entry


def _add_module_prefix(
    module: DistributedModel, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Rename to what torch looks for below the wrapper, whatever wrappers wrote the names."""
    module._load_prefix = prefix  # noqa: SLF001  # this module's own
    given = [name for name in state if name.startswith(prefix)]
    plain_names = module.module.state_dict(keep_vars=True)
    old = prefix + wrapper_prefix([name.removeprefix(prefix) for name in given], plain_names)
    new = prefix + _MODULE
    if old == new:
        return
    moved = {name: state.pop(name) for name in given}
    state.update({new + name.removeprefix(old): value for name, value in moved.items()})
    # torch hands metadata to the outermost module alone.
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        _lend_long_paths(module, metadata, old, new)


def _lend_long_paths(
    module: DistributedModel, metadata: dict[str, Any], old: str, new: str
) -> None:
    """Name the versions for the load that is going on in a dict that is the caller's."""
    module._lent_metadata = metadata, dict(metadata)  # noqa: SLF001
    renamed = {
        (new + _dotted(path).removeprefix(old))[:-1]: entry
        for path, entry in metadata.items()
        if _dotted(path).startswith(old)
    }
    metadata.clear()
    metadata.update(renamed)


def _dotted(path: str) -> str:
    return path + "." if path else ""


def _finish_load(module: DistributedModel, incompatible: Any) -> None:
    """Give the metadata back, and report missing and unexpected names without the wrapper's."""
    if module._lent_metadata is not None:  # noqa: SLF001
        metadata, original = module._lent_metadata  # noqa: SLF001
        metadata.clear()
        metadata.update(original)
        module._lent_metadata = None  # noqa: SLF001
    plain = module._load_prefix  # noqa: SLF001
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [_replaced_prefix(name, plain + _MODULE, plain) for name in names]


def _replaced_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
