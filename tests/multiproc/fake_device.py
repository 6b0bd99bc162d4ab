"""A pretended accelerator with several indices, for tests of models on several devices.

Its tensors hold tensors of the CPU, so that numbers are real, but they say that they are on `npx:0`
or `npx:1`, and operations on several of them fail as on a real machine. Registering it is final: do
it in ranks of a test, which are processes of their own, and never in the process of pytest itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration

NAME = "npx"
IS_THERE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
WHY_NOT = "this torch has no devices that are written in Python"

# Operations that take tensors of several devices on real machines, too.
_CROSSING = (
    "copy_",
    "_to_copy",
    "set_",
    "_foreach",
    "index",
    "is_same_size",
    "_pack_padded_sequence",
)


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a pretended device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        made.raw = raw
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copy = DeviceTensor(self.raw.detach().clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(copy, self.requires_grad)
                if is_parameter
                else copy.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self.raw.detach(), str(self.device), self.requires_grad, is_parameter)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors: list[torch.Tensor] = []
        raw_args = [_raw(item, tensors) for item in args]
        raw_kwargs = {key: _raw(item, tensors) for key, item in kwargs.items()}
        ours = [item for item in tensors if isinstance(item, DeviceTensor)]
        target = ours[0].device
        if any(item.device != target for item in tensors):
            _check_one_device(function, tensors)
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            raw_kwargs["device"] = torch.device("cpu")
        known = {id(item.raw): item for item in ours}

        def wrapped(raw: Any) -> Any:
            if isinstance(raw, (list, tuple)):
                return type(raw)(wrapped(item) for item in raw)
            if not isinstance(raw, torch.Tensor) or target.type == "cpu":
                return raw
            return known[id(raw)] if id(raw) in known else DeviceTensor(raw, target)

        result = function(*raw_args, **raw_kwargs)
        if function._schema.name == "aten::_pack_padded_sequence":
            return wrapped(result[0]), result[1]  # sizes of batches stay on the CPU
        return wrapped(result)


def _raw(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace tensors of pretended devices by those that they hold, and note all tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.raw if isinstance(value, DeviceTensor) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_raw(item, tensors) for item in value)
    return value


def _rebuild(raw: torch.Tensor, device: str, requires_grad: bool, is_parameter: bool) -> Any:
    made = DeviceTensor(raw, torch.device(device))
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


def _check_one_device(function: Any, tensors: list[torch.Tensor]) -> None:
    space, operation = function._schema.name.split("::")
    if space == "c10d" or operation.startswith(_CROSSING):
        return
    devices = {t.device for t in tensors if t.dim() > 0 or t.device.type == NAME}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{found}! (when checking {operation})"
        )


class _Module(backend_registration._DummyBackendModule if IS_THERE else object):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self.count = count

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: Any) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_libraries: list[torch.library.Library] = []


def install(count: int) -> list[str]:
    """Register so many devices in this process, for good, and return their names."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(count))
        _register_factories()
        # The engine would ask the guard of such a device for streams, and it has none.
        torch.autograd.set_multithreading_enabled(False).__enter__()
    return [f"{NAME}:{index}" for index in range(count)]


def _register_factories() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def made(raw: torch.Tensor, device: Any) -> torch.Tensor:
        target = torch.device(device)
        return DeviceTensor(raw, torch.device(NAME, target.index or 0))

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
        return made(torch.empty(size, dtype=dtype), device)

    def empty_strided(
        size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> torch.Tensor:
        return made(torch.empty_strided(size, stride, dtype=dtype), device)

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
