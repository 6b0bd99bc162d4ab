"""Wrapping a model for data-parallel training, and getting it back.

`ddp()` gives a real `DistributedDataParallel` that can be used as if it were the model: attributes,
state dicts and copies are the model's own (see `wrapper`). Before it is made, the ranks compare
their models, because torch would hang or misread where they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpkit.agree import exchange
from ddpkit.buffers import broadcast_from_rank0, describe_buffers
from ddpkit.entrance import carry_over, is_split
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_channel, get_device, is_rank0, require_group
from ddpkit.wording import by_ranks, shortened
from ddpkit.wrapper import DistributedModel, wrapper_class

if TYPE_CHECKING:
    from collections.abc import Iterator

M = TypeVar("M", bound=nn.Module)
Compression = Literal["fp16", "bf16", "powersgd"]

_MAX_SHOWN = 6
_TORCH_OPTIONS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)
_OWN_OPTIONS = frozenset({"self", "module"})
_OPTIONS_OF_A_RANK = frozenset({"device_ids", "output_device"})
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
    compress: Compression | None = None,
    **ddp_options: Any,
) -> M:
    """Move a model to this rank's device and make it train in step with the other ranks.

    Collective: every rank must call this, with the same model. In a world of one it returns the
    model itself, on its device.

    What comes back is a `DistributedDataParallel` that reads like the model: attributes and methods
    of the model can be used, names in `state_dict()` have no `module.` in front, and
    `load_state_dict()` takes names with and without it (that of the model itself, in a world of
    one, takes its own names alone; `barrier_load(into=...)` takes both in every world).
    `copy.deepcopy` of it is the plain model.

    Gradients are averaged whenever a forward ran with gradients enabled, in eval mode too. A
    forward without gradients does not communicate, so validation may run on one rank alone.
    Buffers, such as batch-norm statistics, are rank 0's on all ranks after every backward that
    averages gradients (but not inside torch's `join()`).

    What would leave the ranks with different gradients raises instead: a step that leaves
    parameters out (at its own backward, on all ranks, with the names), a second backward after one
    forward, a backward that is not to be averaged (see `sync_gradients()`) between a forward that
    is and the backward of that, a backward from a method or part of the model that went around
    `forward` (`unwrap(model).method(x)` is the way out), and parameters that were frozen or added
    when it was too late.

    The mean over the ranks is that of the whole batch if each rank brings as many samples; where
    the numbers differ, see `loss_weight()`. For `torch.distributed.checkpoint` pass
    `unwrap(model)`.

    Args:
        model: The model. It is moved to `get_device()`, unless it lies on several devices. It may
            be compiled before or after, with `torch.compile`.
        sync_batchnorm: Compute batch-norm statistics over the batches of all ranks. Skipped with a
            warning on the CPU, where torch has no such layer.
        find_unused_parameters: Allow a step to leave parameters out, at some cost.
        static_graph: Promise that every step uses the same parameters in the same way. The first
            one must average gradients, so it cannot be inside of `accumulate()`.
        compress: Send gradients in fewer bits, by torch's own hooks: as `"fp16"`, as `"bf16"`, or
            as matrices of low rank, `"powersgd"` (from the 1000th step on). This changes them a
            little.
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

        With mixed precision, as in a script for one device; the scaler looks at averaged gradients,
        so that all ranks skip the same steps:

        >>> scaler = torch.amp.GradScaler("cpu")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(8, 4)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()

        An average of the weights, which is the same on all ranks as the weights are:

        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> average.update_parameters(model)
        >>> sorted(average.module.state_dict())
        ['bias', 'weight']
    """
    _check_model(model)
    _check_options(ddp_options)
    _check_compression(compress)
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
        _check_same_everywhere(placed, {**options, "compress": compress})
    if not any(parameter.requires_grad for parameter in placed.parameters()):
        return _synchronised(placed, _group_of(options))
    return cast("M", _wrap(placed, options, compress))


def unwrap(model: M) -> M:
    """Return the plain model inside of DDP, DataParallel and `torch.compile`, in any nesting.

    Does not communicate. In a world of one, or for a plain model, it returns its argument. Children
    of the model are left as they are. What was read through the wrapper before, such as a layer
    whose parameters an optimizer got, may go around `forward` from now on.

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
    for part in _layers_of(model):
        if isinstance(part, DistributedModel):
            part.forget_parts()
    return plain_model(model)


def plain_model(model: M) -> M:
    """Return what `unwrap` does, to look at it: parts that were read before stay watched.

    Args:
        model: A model, wrapped or not.
    """
    *_, inner = _layers_of(model)
    return cast("M", inner)


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Go through the wrappers of a model, from the outermost on, to the model itself."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        inner = _wrapped_module(inner)


def _wrapped_module(model: nn.Module) -> nn.Module | None:
    """Return the module inside the outermost wrapper, None if there is no wrapper."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return cast("nn.Module", model.module)
    # Looked up and not imported: whoever has compiled a model has imported the compiler.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(model, compiler.OptimizedModule):
        return cast("nn.Module", model._orig_mod)  # noqa: SLF001  # the only way in
    return None


# ----------------------------------------------------------------------------------- the arguments


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"ddp() was given a {type(model).__qualname__}; expected a torch.nn.Module."
        )
    for part in _layers_of(model):
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            raise ConfigError(
                f"ddp() was given a model that is wrapped in {type(part).__name__} already. Wrap "
                "it once: drop the other wrapper, or pass unwrap(model)."
            )
    _check_parts(model)


def _check_parts(model: nn.Module) -> None:
    named = model.named_modules()
    wrapped = [name for name, part in named if isinstance(part, DistributedDataParallel)]
    # Where torch was told to leave parameters alone, they may be those.
    if wrapped and not hasattr(model, "_ddp_params_and_buffers_to_ignore"):
        raise ConfigError(
            f"ddp() was given a {type(model).__name__} with parts that are wrapped in "
            f"DistributedDataParallel already: {shortened(wrapped)}. Wrap the whole of the plain "
            "parts, or the parts alone."
        )


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - (_TORCH_OPTIONS - _OWN_OPTIONS) - set(_BUFFER_OPTIONS))
    if unknown:
        raise ConfigError(
            f"ddp() was given {', '.join(unknown)}; expected options of DistributedDataParallel: "
            f"{', '.join(sorted(_TORCH_OPTIONS - _OWN_OPTIONS))}."
        )


def _check_compression(how: object) -> None:
    if how is not None and how not in get_args(Compression):
        raise ConfigError(
            f"compress={how!r} was given to ddp(); expected None or one of "
            f"{', '.join(map(repr, get_args(Compression)))}."
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
    stays = spans_devices or is_split(model)  # a split may have put everything on one device
    return model if stays else model.to(get_device())


def _check_have_data(tensors: Mapping[str, torch.Tensor]) -> None:
    empty = [
        name
        for name, tensor in tensors.items()
        if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta"
    ]
    if empty:
        raise ConfigError(
            f"ddp() was given a model whose tensors have no data yet: {shortened(empty)}. Run one "
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
            f"not: {shortened(strays)}. Move the whole model to one type of device; register "
            "tensors that must follow the model as buffers."
        )


def _with_sync_batchnorm(model: M) -> M:
    if all(tensor.device.type == "cpu" for _, tensor in _named_tensors(model)):
        if is_rank0():
            warnings.warn(
                "sync_batchnorm=True has no effect: torch has no synchronised batch norm for the "
                "CPU. Each rank uses the statistics of its own batches.",
                stacklevel=3,
            )
        return model
    before = dict(model.named_modules())
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    carry_over(before, converted)
    return cast("M", converted)


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
        f"option {name}: {value}"
        for name, value in options.items()
        if value is None or (name not in _OPTIONS_OF_A_RANK and _is_plain(value))
    ]
    place = _places(model)
    parameters = [
        f"parameter {name}: {tuple(tensor.shape)} {tensor.dtype} "
        f"{'trainable' if tensor.requires_grad else 'frozen'}{place[tensor.device]}"
        for name, tensor in model.named_parameters()
    ]
    buffers = [
        f"buffer {name}: {what}"
        for name, what in describe_buffers(dict(model.named_buffers())).items()
    ]
    # Under DETAIL on gloo a group is made, which all ranks must do or none.
    level = f"TORCH_DISTRIBUTED_DEBUG: {dist.get_debug_level().name}"
    return [level, *sorted(flags), *parameters, *buffers]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _places(model: nn.Module) -> dict[torch.device, str]:
    """Number the devices of a model that lies on several: DDP makes buckets for each of them."""
    devices = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    several = len(devices) > 1
    return {
        device: f", on device {number} of {len(devices)}" if several else ""
        for number, device in enumerate(devices, 1)
    }


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
        shown = [f"  {name}: {_who_has(tables, name)}" for name in differing[:_MAX_SHOWN]]
        rest = len(differing) - len(shown)
        details = "\n".join([*shown, *([f"  and {rest} more"] if rest else [])])
    else:
        details = _order_difference(descriptions)
    return (
        f"ddp() was given different models or options on different ranks:\n{details}\nBuild the "
        "model from the same settings on every rank; only its values may differ, rank 0's are used."
    )


def _who_has(tables: list[dict[str, str]], name: str) -> str:
    return by_ranks({rank: table.get(name, "not there") for rank, table in enumerate(tables)})


def _order_difference(descriptions: list[list[str]]) -> str:
    other = next(rank for rank, lines in enumerate(descriptions) if lines != descriptions[0])
    pairs = zip(descriptions[0], descriptions[other], strict=True)
    here, there = next((a, b) for a, b in pairs if a != b)
    return (
        "  the order differs: where rank 0 has "
        f"{here.split(': ')[0]}, rank {other} has {there.split(': ')[0]}"
    )


def _synchronised(model: M, group: Any) -> M:
    broadcast_from_rank0([tensor for _, tensor in _named_tensors(model)], group)
    _logger.info(
        "%s has no parameter that requires a gradient: it got rank 0's values and is not wrapped.",
        type(model).__name__,
    )
    return model


# ---------------------------------------------------------------------------------- construction


def _wrap(model: nn.Module, options: dict[str, Any], compress: Compression | None) -> nn.Module:
    sync_buffers = options.pop("sync_buffers")
    options["forward_sync_buffers" if _HAS_FORWARD_SYNC else "broadcast_buffers"] = False
    number = None if _names_a_group(options) else get_channel().calls
    if not _names_a_group(options) and _crashes_in_detail_mode():
        options["process_group"] = _group_without_detail()
    # At the level "info", torch names the parameters that a step leaves out; at "off" it does not.
    with _debug_level(_at_least_info(dist.get_debug_level())):
        wrapped = wrapper_class(type(plain_model(model)))(
            model, sync_buffers=sync_buffers, number=number, **options
        )
    if sync_buffers and not _HAS_FORWARD_SYNC:
        wrapped.synchronise_buffers()
    if compress is not None:
        _compress(wrapped, compress)
    _warn_of_shadowed(wrapped)
    return wrapped


def _compress(wrapped: DistributedModel, how: Compression) -> None:
    """Register torch's own hook for sending gradients in fewer bits."""
    # Only here, for it takes time to import them.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if how == "powersgd":
        state = powerSGD_hook.PowerSGDState(wrapped.process_group)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    wrapped.register_comm_hook(wrapped.process_group, hooks[how])


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
