"""The wrapper that `ddp()` puts around a model: torch's own, which reads like the model in it."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Generator
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.backward import Averaging, BackwardWatch
from ddpkit.buffers import BufferMessage, buffers_of
from ddpkit.completeness import CompletenessCheck
from ddpkit.errors import ConfigError
from ddpkit.state_names import PlainNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SPECIAL_METHODS = (
    "__len__",
    "__iter__",
    "__contains__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
)


class DistributedModel(DistributedDataParallel):
    """A `DistributedDataParallel` that reads like the model in it. Made by `ddp()`.

    Args:
        model: The model.
        sync_buffers: Whether each averaging backward ends with rank 0's buffers on all ranks.
        number: What tells this model from others, the same on all ranks; None where only a part of
            the ranks shares it.
        **options: Options of `DistributedDataParallel`.
    """

    def __init__(
        self, model: nn.Module, *, sync_buffers: bool, number: int | None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self._syncs_buffers = sync_buffers
        self._buffer_message = BufferMessage(
            self.process_group,
            self._buffers_to_send,
            self._buffers_by_name,
            together=number is not None,
        )
        named = self._parameters_by_name()
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._completeness = CompletenessCheck(self, trained, number)
        self._backwards = BackwardWatch(
            Averaging(
                model,
                trained,
                {name: p for name, p in named.items() if name not in trained},
                named=self._parameters_by_name,
                is_on=lambda: self.require_backward_grad_sync and not self._join_config.enable,
                at_end=self._finish_backward,
                finds_unused=self.find_unused_parameters,
                is_static=self.static_graph,
            )
        )
        self._plain_names = PlainNames(self)
        # Last: from here on, writes go to the model.
        self._is_ready = True

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        named = self.module.named_parameters()
        return {name: item for name, item in named if not self._is_left_alone(name)}

    def _is_left_alone(self, name: str) -> bool:
        # torch joins the module's name and the parameter's, also where the former is empty.
        return (name if "." in name else f".{name}") in self.parameters_to_ignore

    # Attributes: reads, writes and deletes of what the model has.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if model is None:
                raise
            value = getattr(model, name)
        if not self.__dict__.get("_is_ready"):
            return value
        if _leads_to_parts(value):
            return WatchedCall(self._backwards, name, value)
        is_property = isinstance(getattr(type(model), name, None), (property, cached_property))
        if is_property or isinstance(value, (nn.Module, torch.Tensor)):
            self._backwards.hand_out(name, value)
        return value

    def forget_parts(self) -> None:
        """No longer watch parts that were read so far: the plain model is to be used."""
        self._backwards.forget_parts()

    def watched_item(self, item: Any) -> Any:
        """Return what was taken out of a model that is a container, a child mostly."""
        self._backwards.hand_out("an item", item)
        return item

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_models(name):
            setattr(self.module, name, value)
            return
        if isinstance(value, nn.Module) and name not in self._modules:
            self._refuse_new_part(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse a parameter of the wrapper itself."""
        self._refuse_new_part(name)
        super().register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse a part of the wrapper itself."""
        self._refuse_new_part(name)
        super().add_module(name, module)

    def __delattr__(self, name: str) -> None:
        if self._is_the_models(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_the_models(self, name: str) -> bool:
        if not self.__dict__.get("_is_ready") or name in self.__dict__ or name in self._modules:
            return False
        return not hasattr(type(self), name) and hasattr(self.module, name)

    def _refuse_new_part(self, name: str) -> None:
        if not self.__dict__.get("_is_ready"):
            return
        raise ConfigError(
            f"{name} was added to a {type(self.module).__name__} that ddp() has wrapped, which "
            "would neither train nor save it. Add it to the model before ddp(), or wrap again: "
            f"plain = unwrap(model); plain.{name} = ...; model = ddp(plain)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # A copy is for averaging or for keeping, and the reducer cannot be copied.
        return cast("nn.Module", copy.deepcopy(self.module, memo))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Pickles as the plain model. The standard library's identity function, so that reading it
        # needs no ddpkit.
        return operator.itemgetter(0), ((self.module,),)

    # Forward and backward.

    # Without dynamo this frame would be traced, and with it the hooks on the outputs.
    @torch._disable_dynamo(recursive=False)  # noqa: SLF001  # what DDP itself uses
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model as DDP does, and watch the backward that follows."""
        # Ranks that have run out of data mimic torch's collectives inside of join(), not ours.
        is_watched = torch.is_grad_enabled() and not self._join_config.enable
        if is_watched:
            self._backwards.check(averages=self.require_backward_grad_sync)
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if is_watched:
            self._backwards.follow(output, averages=self.require_backward_grad_sync)
        return output

    def _finish_backward(self) -> None:
        self._completeness.run()
        # The ranks agree on the order of buckets once, after the first backward. torch would do it
        # in the next forward, where a rank that validates alone would wait for the others.
        self.reducer._rebuild_buckets()  # noqa: SLF001
        if self._syncs_buffers:
            self.synchronise_buffers()

    def synchronise_buffers(self) -> None:
        """Give every rank the buffers of rank 0. Collective: every rank must call this."""
        self._buffer_message.broadcast()

    def _buffers_to_send(self) -> Iterable[torch.Tensor]:
        some = self.parameters_to_ignore
        return self._buffers_by_name().values() if some else buffers_of(self.module)

    def _buffers_by_name(self) -> dict[str, torch.Tensor]:
        ignored = self.parameters_to_ignore
        return {name: item for name, item in self.module.named_buffers() if name not in ignored}


def _leads_to_parts(value: object) -> bool:
    """Tell whether to call it may run the model: a method, or a function that the model keeps."""
    if inspect.ismethod(value):
        return isinstance(value.__self__, nn.Module)
    return isinstance(value, (FunctionType, functools.partial))


class WatchedCall:
    """A method or function of the model that was read through the wrapper.

    What it returns is watched: a backward from there would go around the wrapper's forward.

    Args:
        watch: What watches.
        name: Under which name it was read.
        function: A method, bound to the model or to a part of it, or a function.
    """

    __wrapped__: Any

    def __init__(self, watch: BackwardWatch, name: str, function: Any) -> None:
        functools.update_wrapper(self, function)
        self._watch = watch
        self._label = f"{name}()"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        value = self.__wrapped__(*args, **kwargs)
        if isinstance(value, Generator):
            return _WatchedGenerator(self._watch, self._label, value)
        self._watch.hand_out(self._label, value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not there yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        mine = self.__wrapped__
        return bool(mine == (other.__wrapped__ if isinstance(other, WatchedCall) else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles as what it wraps, for data workers and the like.
        return operator.itemgetter(0), ((self.__wrapped__,),)


class _WatchedGenerator(Generator[Any, Any, Any]):
    """A generator of the model, each of whose items is watched."""

    def __init__(self, watch: BackwardWatch, label: str, items: Generator[Any, Any, Any]) -> None:
        self._watch = watch
        self._label = label
        self._items = items

    def send(self, value: Any) -> Any:
        return self._watched(self._items.send(value))

    def throw(self, *error: Any) -> Any:
        return self._watched(self._items.throw(*error))

    def close(self) -> None:
        self._items.close()

    def _watched(self, item: Any) -> Any:
        self._watch.hand_out(self._label, item)
        return item


def wrapper_class(model_class: type[nn.Module]) -> type[DistributedModel]:
    """Return a wrapper that has the special methods of containers which the model has.

    Python looks for those on the class alone, past `__getattr__`.
    """
    methods = {name: _forwarding(name) for name in _SPECIAL_METHODS if hasattr(model_class, name)}
    return type("DistributedModel", (DistributedModel,), methods) if methods else DistributedModel


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: DistributedModel, *args: Any) -> Any:
        value = getattr(self.module, name)(*args)
        if name == "__iter__":
            return map(self.watched_item, value)
        return self.watched_item(value)

    return method
