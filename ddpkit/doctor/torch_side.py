"""What is found out with torch, in a process of its own, which sends each result as it has it.

The order matters. A fork is judged before anything has been started, and an accelerator is used
last, because a process that has used one cannot fork any more.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from ddpkit.doctor.facts import Accelerators, Device, Exercise, ForkVerdict, GlooView, TorchBuild
from ddpkit.doctor.resolver import LOOKUP_BOUND, bounded
from ddpkit.errors import ConfigError
from ddpkit.topology import RANK_MARK, read_topology
from ddpkit.variables import LAUNCHER_SWITCH

__all__ = ["Failed", "Started", "main"]

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Started:
    """The next section is being looked at."""

    section: str
    """Name of the field of `Facts`."""


@dataclass(frozen=True)
class Failed:
    """A section could not be looked at."""

    why: str
    """The exception in words."""


def main(descriptor: int, exercise_limit: float) -> None:
    """Look at everything that needs torch, and send it.

    Args:
        descriptor: The pipe to the process that asked.
        exercise_limit: Seconds for each test with two ranks, 0 to leave them out.
    """
    os.set_inheritable(descriptor, False)
    with Connection(descriptor, readable=False) as pipe:
        _Examination(pipe, exercise_limit).run()
        pipe.send(None)


class _Examination:
    def __init__(self, pipe: Connection, exercise_limit: float) -> None:
        self._pipe = pipe
        self._limit = exercise_limit

    def run(self) -> None:
        if not self._look("torch", look_at_torch):
            return
        accelerators = self._look("accelerators", look_at_accelerators)
        self._look("fork", judge_fork)
        # Before the ranks are started: afterwards the variables of the launcher are hidden.
        self._look("gloo", look_at_gloo)
        if self._limit:
            self._exercise(accelerators)
        if accelerators and accelerators.kind is not None:
            kind, count = accelerators.kind, accelerators.count
            self._look("devices", lambda: tuple(try_device(kind, each) for each in range(count)))

    def _exercise(self, accelerators: Accelerators | None) -> None:
        # What a launcher has said is not about these ranks.
        os.environ[LAUNCHER_SWITCH] = "none"
        os.environ.pop(RANK_MARK, None)
        self._look("exercise", lambda: _exercise_on("cpu", self._limit))
        if accelerators and accelerators.kind is not None and accelerators.count > 1:
            kind = accelerators.kind
            self._look("accelerator_exercise", lambda: _exercise_on(kind, self._limit))

    def _look(self, section: str, look: Callable[[], _Found]) -> _Found | None:
        self._pipe.send(Started(section))
        try:
            found = look()
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is what is looked for
            self._pipe.send(Failed(describe_error(error)))
            return None
        self._pipe.send(found)
        return found


def describe_error(error: BaseException) -> str:
    """Say what was raised, and by what it was caused.

    Args:
        error: The exception.

    Example:
        >>> describe_error(OSError("no such library"))
        'OSError: no such library'
    """
    return f"{type(error).__name__}: {error}"


def look_at_torch() -> TorchBuild:
    """Import torch, and ask what it was built with."""
    begin = time.monotonic()
    import torch
    import torch.distributed as dist

    seconds = time.monotonic() - begin
    named = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    named |= {"ucc": "is_ucc_available", "xccl": "is_xccl_available"}
    return TorchBuild(
        version=str(torch.__version__),
        folder=str(Path(torch.__file__).parent),
        cuda=torch.version.cuda,
        hip=getattr(torch.version, "hip", None),
        nccl=_nccl_version() if dist.is_available() and dist.is_nccl_available() else None,
        backends=tuple(name for name, ask in named.items() if getattr(dist, ask, bool)()),
        threads=torch.get_num_threads(),
        seconds=seconds,
    )


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def look_at_accelerators() -> Accelerators:
    """Count the accelerators as `distributed` does before it starts ranks."""
    import torch

    from ddpkit.group import accelerator_type

    kind = accelerator_type()
    return Accelerators(kind, torch.accelerator.device_count() if kind is not None else 0)


def judge_fork() -> ForkVerdict:
    """Tell by what method ranks would be started, and why."""
    import multiprocessing

    from ddpkit.launch.forksafe import prepare_fork

    reason = prepare_fork()
    others = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in others else "spawn"
    return ForkVerdict("fork" if reason is None else method, reason)


def look_at_gloo() -> GlooView:
    """Find out which interface gloo uses here, and what ddpkit would say to it."""
    from ddpkit import network

    setting = os.environ.get(network.INTERFACE_VARIABLE)
    if not network.can_look():
        return GlooView(None, {}, refusal=_refusal(lambda: _check_setting(setting)))
    master = _master_of_several()
    host = master or socket.gethostname()
    view = bounded(lambda: network.look_at_network(host), 2 * LOOKUP_BOUND)
    chosen: list[str | None] = []

    def choose() -> None:
        _check_setting(setting)
        if master is not None and setting is None:
            chosen.append(network.choose_interface(view, master))

    refusal = _refusal(choose)
    addresses = {name: tuple(each) for name, each in view.interfaces.items()}
    return GlooView(view.advertised, addresses, chosen[0] if chosen else None, refusal)


def _check_setting(setting: str | None) -> None:
    from ddpkit import network

    if setting is not None:
        network.check_interfaces(setting, network.interface_names())


def _refusal(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _master_of_several() -> str | None:
    """Return the host of rank 0 where there are several machines, else None."""
    try:
        topology = read_topology(os.environ, os.getppid())
    except ConfigError:
        return None
    return topology.master_addr if topology.num_nodes > 1 else None


def _exercise_on(device: str, limit: float) -> Exercise:
    from ddpkit.doctor.exercise import exercise_ranks

    return exercise_ranks(device, limit)


def try_device(kind: str, index: int) -> Device:
    """Compute something small on an accelerator.

    Args:
        kind: Type of device.
        index: Which one.
    """
    import torch

    name = f"{kind}:{index}"
    try:
        ones = torch.ones(64, 64, device=name)
        total = float((ones @ ones).sum().item())
        if total != 64.0**3:
            return Device(name, error=f"a product of matrices is wrong: its sum is {total}")
        module = torch.get_device_module(kind)  # not all of them can tell the rest
        model = getattr(module, "get_device_name", lambda _: "")(index)
        free, memory = getattr(module, "mem_get_info", lambda _: (None, None))(index)
        return Device(name, str(model), memory, free)
    except Exception as error:  # noqa: BLE001  # what is wrong with it is what is asked
        return Device(name, error=describe_error(error))
