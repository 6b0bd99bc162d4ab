"""Values and exceptions as bytes: everything that crosses from one process to another.

Values go with cloudpickle, so that closures, lambdas and classes of `__main__` can be sent; tensors
arrive on the CPU and DDP models arrive unwrapped. Exceptions arrive as the same type with the same
attributes, also where their constructor cannot be called again.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import dataclasses
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, cast

import cloudpickle
import torch

from ddpkit.errors import ConfigError

_MAX_DEPTH = 12
_NO_FILE = "<dynamic-code>"
_PACKAGE = str(Path(__file__).parent) + os.sep


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that knows what must change on the way to another process."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return _reduce_code(obj)
        if _is_special_module(obj):
            return importlib.import_module, (obj.__name__,)
        if _memory_is_shared and isinstance(obj, type) and _goes_by_value(obj):
            return _reduce_shared_class(obj)
        if isinstance(obj, BaseException):
            return _reduce_exception(obj)
        if isinstance(obj, torch.Tensor) and _on_accelerator(obj):
            # A device index means another thing, or nothing, in the process that receives it.
            return _reduce_on_cpu(obj)
        if _is_ddp(obj):
            return _same, (obj.module,)
        return super().reducer_override(obj)


class _DiscardingPickler(_Pickler):
    """Goes through an object as pickling would, without copying the data of tensors and arrays."""

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in (str, bytes, bytearray) or kind in (torch.Tensor, torch.nn.Parameter):
            return 0
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not obj.dtype.hasobject:
            return 0
        return None


class _UnlinkedPickler(_Pickler):
    """Sends an exception without its causes, of which one cannot be sent."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and not _has_own_reduce(type(obj)):
            make, args, (fields, _), *rest = _reduce_exception(obj)
            return make, args, (fields, (None, None, False)), *rest
        return super().reducer_override(obj)


class _Discard(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def dump_value(value: object) -> bytes:
    """Turn a value into bytes.

    Args:
        value: Anything that cloudpickle can send.

    Returns:
        Bytes for `load_value`.

    Raises:
        Exception: Whatever the value raises when it is pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def load_value(data: bytes | memoryview) -> Any:
    """Rebuild what `dump_value` turned into bytes."""
    return cloudpickle.loads(data)


def check_sendable(arguments: Mapping[str, object]) -> None:
    """Raise unless every argument can be sent to another process.

    Args:
        arguments: The values by the name that a message should show.

    Raises:
        ConfigError: One cannot be sent; the message names its path and type.
    """
    for name, value in arguments.items():
        error = _sending_error(value)
        if error is not None:
            path, culprit, error = _find_unsendable(name, value, error)
            raise ConfigError(
                f"{path} is a {type_name_of(culprit)}, which cannot be sent to another process "
                f"({type(error).__name__}: {error}). Create it inside the decorated function, or "
                "pass what it is made from."
            )


def _sending_error(value: object) -> Exception | None:
    try:
        _DiscardingPickler(_Discard()).dump(value)
    except Exception as error:  # noqa: BLE001  # any type may come from a user's __reduce__
        return error
    return None


def _find_unsendable(path: str, value: object, error: Exception) -> tuple[str, object, Exception]:
    """Follow the first part that cannot be sent down to the innermost one."""
    for _ in range(_MAX_DEPTH):
        for suffix, part in _parts(value):
            part_error = _sending_error(part)
            if part_error is not None:
                path, value, error = path + suffix, part, part_error
                break
        else:
            break
    return path, value, error


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", item) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif callable(value) and getattr(value, "__closure__", None):
        names = value.__code__.co_freevars  # type: ignore[attr-defined]
        for name, cell in zip(names, value.__closure__, strict=True):  # type: ignore[attr-defined]
            yield f".<closure {name}>", cell.cell_contents
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def type_name_of(value: object) -> str:
    """Name the type of a value with its module, unless it is built in."""
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _reduce_on_cpu(tensor: torch.Tensor) -> Any:
    copy = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter, (copy, tensor.requires_grad)
    return _same, (copy.requires_grad_(tensor.requires_grad),)


def _is_ddp(obj: object) -> bool:
    # Looked up, not imported: torch.nn.parallel is slow to import, and a model that is wrapped
    # has imported it.
    module = sys.modules.get("torch.nn.parallel.distributed")
    return module is not None and isinstance(obj, module.DistributedDataParallel)


def _same(value: Any) -> Any:
    return value


def _is_special_module(obj: object) -> bool:
    """Tell an imported module of a class of its own, such as `torch.backends.cudnn`.

    cloudpickle knows plain modules alone, and finds this one behind every function that names it.
    """
    return (
        isinstance(obj, ModuleType)
        and type(obj) is not ModuleType
        and sys.modules.get(obj.__name__) is obj
    )


def _reduce_code(code: CodeType) -> Any:
    """Keep the file name, which cloudpickle drops: tracebacks and messages name it."""
    if code.co_filename == _NO_FILE:
        return NotImplemented
    return _name_code, (code.replace(co_filename=_NO_FILE), code.co_filename)


def _name_code(code: CodeType, filename: str) -> CodeType:
    return code.replace(co_filename=filename)


# ------------------------------------------------------------------------ classes across a fork

_memory_is_shared = False


def share_classes_with_parent() -> None:
    """Say that this process is a fork, so that its values come back with the parent's own classes.

    A class that cannot be imported by name (one of `__main__`, or local to a function) would
    arrive as a copy, and `except` and `isinstance` in the caller would not know it.
    """
    global _memory_is_shared  # a fact about this process
    _memory_is_shared = True


def _goes_by_value(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not kind or kind.__module__ == "__main__"


def _reduce_shared_class(kind: type) -> Any:
    try:
        copy = cloudpickle.dumps(kind)
    except Exception:  # noqa: BLE001  # it need not be sendable where the parent has it
        copy = None
    return _find_class, (id(kind), kind.__module__, kind.__qualname__, copy)


def _find_class(address: int, module: str, qualname: str, copy: bytes | None) -> type:
    """Find the class that stood at this address before the fork, or rebuild a newer one.

    The caller has waited since, so what was alive at the fork is alive still, at its address.
    """
    for kind in _all_classes():
        if id(kind) == address and (kind.__module__, kind.__qualname__) == (module, qualname):
            return kind
    if copy is None:
        raise TypeError(f"class {module}.{qualname} cannot be sent to another process")
    return cast(type, cloudpickle.loads(copy))


def _all_classes() -> Iterator[type]:
    seen: set[type] = set()
    stack: list[type] = [object]
    kind: type
    while stack:
        for kind in type.__subclasses__(stack.pop()):
            if kind not in seen:
                seen.add(kind)
                stack.append(kind)
                yield kind


# ---------------------------------------------------------------------------------- exceptions


def _reduce_exception(error: BaseException) -> Any:
    if _has_own_reduce(type(error)):
        return error.__reduce_ex__(4)
    # The built-in type knows what belongs to it beyond `args`: a file name, the name of a module.
    reduced: Any = _builtin_base(type(error)).__reduce__(error)
    extra: dict[str, Any] = (reduced[2:] or ({},))[0] or {}
    args, fields = reduced[1], {**vars(error), **_slots(error), **extra}
    links = (error.__cause__, error.__context__, error.__suppress_context__)
    return _new_exception, (type(error), args), (fields, links), None, None, _set_exception_state


def _slots(error: BaseException) -> dict[str, Any]:
    names: list[str] = copyreg._slotnames(type(error))  # type: ignore[attr-defined]  # noqa: SLF001
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def _has_own_reduce(kind: type[BaseException]) -> bool:
    """Tell whether a class of the user's says itself how it is pickled."""
    for name in ("__reduce__", "__reduce_ex__"):
        for base in kind.__mro__:
            if name in vars(base):
                if base.__module__ not in ("builtins", "ddpkit.errors"):
                    return True
                break
    return False


def _new_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an exception without its own constructor, which may need other arguments than `args`."""
    error = kind.__new__(kind, *args)
    # The constructors of the built-in types set fields that are not in __dict__ (SystemExit.code).
    _builtin_base(kind).__init__(error, *args)
    return error


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == builtins.__name__)


def _set_exception_state(
    error: BaseException, state: tuple[dict[str, Any], tuple[Any, ...]]
) -> None:
    fields, (cause, context, suppress) = state
    error.__setstate__(fields)
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppress


@dataclass(frozen=True)
class ExceptionRecord:
    """An exception on its way to another process."""

    type_name: str
    """Qualified name of its type."""
    message: str
    """`str()` of the exception."""
    traceback: str
    """Formatted traceback, causes included."""
    data: bytes | None
    """The exception itself, None where it cannot be pickled."""

    @property
    def summary(self) -> str:
        """Type and message on one line, as Python prints them."""
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def rebuild(self) -> BaseException | None:
        """Make the exception again, or return None where that cannot be done."""
        if self.data is None:
            return None
        try:
            error = load_value(self.data)
        except Exception:  # noqa: BLE001  # a constructor of the user's may raise anything
            return None
        return error if isinstance(error, BaseException) else None


def origin_of(error: BaseException) -> BaseException | None:
    """Return what an exception says that it came from, None where it suppresses that."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def record_exception(error: BaseException) -> ExceptionRecord:
    """Describe an exception so that it can be sent, whatever it is made of."""
    return ExceptionRecord(
        type_name=type_name_of(error),
        message=_safe_str(error),
        traceback="".join(
            traceback.format_exception(type(error), error, _from_users_code(error.__traceback__))
        ),
        data=_dump_exception(error),
    )


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Leave out ddpkit's own frames above the user's function."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        inner = inner.tb_next
    return inner or trace


def _dump_exception(error: BaseException) -> bytes | None:
    for pickler in (_Pickler, _UnlinkedPickler):
        buffer = io.BytesIO()
        with contextlib.suppress(Exception):  # the record then carries the text alone
            pickler(buffer).dump(error)
            return buffer.getvalue()
    return None


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001  # a broken __str__ must not hide the failure
        return f"<str() failed with {type(problem).__name__}>"
