"""A job: the function, its arguments and the options of one launch, and how they travel."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from ddpkit.errors import ConfigError
from ddpkit.launch.inherited import Inherited
from ddpkit.serialize import check_sendable, dump_value, load_value

_registering = threading.Lock()
_registry: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class Options:
    """The options of one launch; they are those of `distributed`."""

    nproc_per_node: int | None = None
    backend: str | None = None
    device: str | torch.device | None = None
    timeout: float = 600.0
    start_method: str = "auto"
    time_limit: float | None = None
    shutdown_grace: float = 5.0
    log_dir: str | os.PathLike[str] | None = None
    init_group: bool = True


@dataclass(frozen=True)
class Job:
    """What to run, how often, and how."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    nproc: int = 1
    options: Options = Options()

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def check_arguments(self) -> None:
        """Raise ConfigError when an argument cannot be sent, under every start method alike."""
        arguments = _name_arguments(self.function, self.args, self.kwargs)
        check_sendable(arguments)
        trained = [name for name, value in arguments.items() if _holds_training_state(value)]
        if trained:
            warnings.warn(
                f"{', '.join(trained)} holds a model or an optimizer. The ranks work on copies of "
                "it: what they train does not come back, unless the function returns or saves it.",
                UserWarning,
                stacklevel=5,
            )

    def __call__(self) -> Any:
        """Run the function in this process."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class _Reference:
    """A function by the key under which its decoration registered it."""

    module: str
    qualname: str

    def resolve(self) -> Callable[..., Any]:
        importlib.import_module(self.module)
        return _registry[(self.module, self.qualname)]


def register(function: Callable[..., Any]) -> None:
    """Remember a decorated function: its name may stand for the decorator's object later."""
    name = getattr(function, "__qualname__", None)  # a functools.partial has none
    if name is not None:
        _registry[(function.__module__, name)] = function


def encode(job: Job) -> bytes:
    """Turn a call and global state into bytes for a process that shares no memory with this one.

    Raises:
        ConfigError: Something cannot be sent; its path and type are named.
    """
    reference = _find_reference(job.function)
    try:
        with _unimportable_by_value(job.function):
            call = (reference or job.function, job.args, dict(job.kwargs))
            return dump_value((Inherited.capture(), dump_value(call)))
    except Exception as error:
        check_sendable({_function_name(job.function): _FunctionParts.of(job.function)})
        raise ConfigError(
            f"{_function_name(job.function)} cannot be sent to another process "
            f"({type(error).__name__}: {error})."
        ) from error


def decode(data: bytes) -> Callable[[], Any]:
    """Rebuild the call that `encode` wrote, and set the global state of this process."""
    inherited, call = load_value(data)
    inherited.restore()  # for what modules make when they are imported
    function, args, kwargs = load_value(call)
    if isinstance(function, _Reference):
        function = function.resolve()
    inherited.restore()  # and as if nothing had been imported here, which may draw numbers
    return lambda: function(*args, **kwargs)


def _find_reference(function: Callable[..., Any]) -> _Reference | None:
    """Refer to a function by name where another process can import its module."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", "<locals>")
    if module is None or "<locals>" in qualname or not _is_importable(module):
        return None
    if _registry.get((module, qualname)) is not function:
        return None
    if _named(module, qualname) is function:
        return None  # not decorated where it is defined: pickle finds it, and no registry has it
    return _Reference(module, qualname)


def _named(module: str, qualname: str) -> object:
    found: object = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _is_importable(name: str) -> bool:
    """Tell whether importing the name again would run the same file; never so for `__main__`."""
    module = sys.modules.get(name)
    if name == "__main__" or module is None:
        return False
    spec = _find_anew(name)
    return spec is not None and _same_file(spec.origin, module)


def _find_anew(name: str) -> ModuleSpec | None:
    """Look for a module as a process would that has not imported it.

    `importlib.util.find_spec` answers from `sys.modules`, which also holds what was loaded from a
    file that no import finds.
    """
    parent = name.rpartition(".")[0]
    if parent and not _is_importable(parent):
        return None
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def _same_file(origin: str | None, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if origin is None or file is None:
        return origin is file  # a package without a file of its own
    with contextlib.suppress(OSError):
        return Path(origin).samefile(file)
    return False


@contextlib.contextmanager
def _unimportable_by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Send what stands beside the function by value too, where its module has no name to import."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_importable(module.__name__):
        yield
        return
    with _registering:  # the registry is the process's, and launches may be made in several threads
        if module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


class _FunctionParts(dict[str, Any]):
    """What a function reads from outside, by name, to find the part that cannot be sent."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _FunctionParts:
        try:
            read = inspect.getclosurevars(function)
        except (TypeError, ValueError):
            return cls()
        return cls({**read.globals, **read.nonlocals})


def _holds_training_state(value: object) -> bool:
    """Tell whether a value is, or has, a model or an optimizer: a trainer that has both, too."""
    values: Iterable[object] = (value, *getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        values = value.values()
    elif isinstance(value, (list, tuple)):
        values = value
    return any(isinstance(item, (torch.nn.Module, torch.optim.Optimizer)) for item in values)


def _function_name(function: Callable[..., Any]) -> str:
    return f"function {getattr(function, '__qualname__', repr(function))}"


def _name_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by the name that a message should show."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        positional = {f"args[{index}]": value for index, value in enumerate(args)}
        return {**positional, **kwargs}
    return {f"argument {name!r}": value for name, value in bound.arguments.items()}
