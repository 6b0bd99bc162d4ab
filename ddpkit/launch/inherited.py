"""What a fork takes over from the calling program, for ranks that share no memory with it."""

from __future__ import annotations

import contextlib
import importlib
import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# In this order: a newer name of torch's says more than an older one that it stands beside.
_FLAGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32"),
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision"),
    *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "mkldnn.fp32_precision"),
    *("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)


@dataclass(frozen=True)
class Inherited:
    """The global state of torch and of the random generators that the calling process has.

    Example:
        >>> Inherited.capture().restore()
    """

    settings: dict[str, Any]
    """Settings of torch, such as its default dtype, by their names here."""
    torch_state: torch.Tensor
    """State of torch's generator for the CPU."""
    python_state: tuple[Any, ...]
    """State of Python's generator."""
    numpy_state: Any
    """State of numpy's generator, None where numpy was not loaded."""

    @classmethod
    def capture(cls) -> Inherited:
        """Read the state of this process; an accelerator is not initialised for it."""
        numpy_random: Any = sys.modules.get("numpy.random")
        numpy_state = None if numpy_random is None else numpy_random.get_state()
        return cls(_read_settings(), torch.get_rng_state(), random.getstate(), numpy_state)

    def restore(self) -> None:
        """Make it the state of this process."""
        for name, value in self.settings.items():
            # Some cost seconds to write, so those that are as they should be are left alone.
            if name not in (found := _read_settings([name])) or found[name] != value:
                _SETTINGS[name][1](value)
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            importlib.import_module("numpy.random").set_state(self.numpy_state)


def _read_settings(names: list[str] | None = None) -> dict[str, Any]:
    settings = {}
    for name in _SETTINGS if names is None else names:
        # What this torch does not have, or cannot say where old and new names were mixed.
        with contextlib.suppress(AttributeError, RuntimeError):
            settings[name] = _SETTINGS[name][0]()
    return settings


def _default_device() -> torch.device | None:
    # torch.get_default_device() makes a tensor to tell the index, and so opens the accelerator.
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001
    return None if context is None else context.device


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(setting: tuple[bool, bool]) -> None:
    enabled, warn_only = setting
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _flag(path: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    owner, _, name = f"backends.{path}".rpartition(".")

    def write(value: Any) -> None:
        setattr(operator.attrgetter(owner)(torch), name, value)

    return lambda: operator.attrgetter(f"{owner}.{name}")(torch), write


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    **{path: _flag(path) for path in _FLAGS},
}
