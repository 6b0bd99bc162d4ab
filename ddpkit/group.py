"""The process group: open it, join it, leave it; and who this process is within it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.torch_version import TorchVersion

from ddpkit import pending
from ddpkit.consequence import UNEVEN, is_likely_consequence
from ddpkit.control import SECRET_VARIABLE, Channel, Departure
from ddpkit.errors import ConfigError, DdpkitError, GroupError, PeerError
from ddpkit.links import ended_when_unreachable
from ddpkit.network import INTERFACE_VARIABLE
from ddpkit.rendezvous import (
    Meeting,
    await_members,
    has_watcher,
    interface_for_gloo,
    meet,
    must_serve,
    open_channel,
    serve_until,
)
from ddpkit.serialize import record_exception
from ddpkit.topology import Topology, describe, read_topology
from ddpkit.watch import PeerWatch, check_peers
from ddpkit.wording import name_ranks

DEFAULT_TIMEOUT = 600.0
"""Seconds that rendezvous and collectives may take."""
_LONGEST_TIME = 1e9  # 31 years; waits of Python and of torch overflow somewhere above
_ERROR_PATH_BOUND = 1.5
_OBITUARY_BOUND = 0.3
_NOTICE_AFTER = 5.0
_READERS_BOUND = 5.0
_OPENED = "opened"
_CLOSES_WITH_LOCK = TorchVersion(torch.__version__) < "2.14"
_UNTIL_DROPPED = 0.02

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World(Topology):
    """An open process group as one rank sees it: a `Topology` with device and backend.

    Example:
        >>> with process_group(device="cpu") as world:
        ...     (world.rank, world.world_size, world.device, world.backend)
        (0, 1, device(type='cpu'), 'gloo')
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of this rank."""
    backend: str = "gloo"
    """Backend of the default group, such as `gloo` or `cpu:gloo,cuda:nccl`."""


@dataclass
class _Opened:
    """What this process holds while a group is open."""

    world: World
    channel: Channel | None
    watch: PeerWatch | None = None
    pid: int = field(default_factory=os.getpid)
    last_words: Departure | None = None


@dataclass
class _ProcessState:
    opened: _Opened | None = None
    adopted: tuple[Any, Channel] | None = None
    left_by_error: _Opened | None = None
    secret: bytes | None = None
    adoptions: int = 0
    past: set[str] = field(default_factory=set)
    servers: dict[tuple[str, int], TCPStore] = field(default_factory=dict)


_state = _ProcessState()


# ------------------------------------------------------------------------------------ who am I


def get_rank() -> int:
    """Return the global rank of this process.

    Works anywhere: within a group it is the group's, under a launcher without a group it is the
    launcher's, and in a plain process (a world of one) it is 0. Does not communicate.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank() if group_is_open() else current_topology().rank


def get_world_size() -> int:
    """Return the number of ranks; 1 in a plain process. Does not communicate.

    Example:
        >>> get_world_size()
        1
    """
    return dist.get_world_size() if group_is_open() else current_topology().world_size


def get_local_rank() -> int:
    """Return the rank among those of this machine; 0 in a plain process. Does not communicate.

    Example:
        >>> get_local_rank()
        0
    """
    if _state.opened is not None:
        return _state.opened.world.local_rank
    return current_topology().local_rank


def is_rank0() -> bool:
    """Tell whether this is rank 0; True in a plain process. Does not communicate.

    For what only one rank has and nobody can send, such as an open file or a tensorboard writer.
    Below such an `if` nothing may communicate: the other ranks would not be there.

    Example:
        >>> lines = [] if is_rank0() else None
        >>> for loss in (0.5, 0.25):
        ...     if lines is not None:
        ...         lines.append(loss)
        >>> lines
        [0.5, 0.25]
    """
    return get_rank() == 0


def get_device() -> torch.device:
    """Return the device of this rank: its accelerator, or the CPU where there is none.

    Works with and without a group, and in a world of one. Does not communicate.

    Example:
        >>> get_device().type in ("cpu", "cuda", "mps", "xpu")
        True
    """
    if _state.opened is not None and group_is_open():
        return _state.opened.world.device
    return _choose_device_here(current_topology(), None)


def use_device(device: torch.device) -> None:
    """Make a device this rank's own, if the group that is open here uses devices of its type.

    A backend of an accelerator knows the ranks by their devices: it waits for ever where one rank
    uses a device that it has used before, and another a new one. So what is not part of a split
    model has to be on the first device of the split, on every rank.

    Args:
        device: A device that exists.
    """
    opened = _state.opened
    if opened is not None and group_is_open() and opened.world.device.type == device.type != "cpu":
        opened.world = replace(opened.world, device=device)
        torch.accelerator.set_device_index(device.index or 0)


def current_topology() -> Topology:
    """Read the topology of this process from its environment."""
    return read_topology(os.environ, os.getpid())


def place_of_this_rank() -> Topology:
    """Say where this process stands among the ranks of its machine, whoever has opened the group.

    Where the launcher's variables do not fit an open group, all its ranks count as on this machine.
    """
    if not group_is_open():
        return current_topology()
    return _state.opened.world if _state.opened is not None else _adopted_topology()


def group_is_open() -> bool:
    """Tell whether a default process group is open here, whoever has opened it."""
    return dist.is_available() and dist.is_initialized()


# ------------------------------------------------------------------------------ pure decisions


def choose_device(
    requested: str | torch.device | None,
    accelerator: str | None,
    device_count: int,
    topology: Topology,
) -> torch.device:
    """Choose the device of a rank.

    Args:
        requested: What the user asked for, or None.
        accelerator: Type of this machine's accelerator, None where it has none.
        device_count: How many of them this process sees.
        topology: The place of the rank.

    Returns:
        The CPU, or the accelerator of this rank with its index.

    Raises:
        ConfigError: The node has more ranks than devices, or the device does not exist.
    """
    wanted = torch.device(requested) if requested is not None else None
    if wanted is not None and (has_index(wanted) or wanted.type != accelerator):
        _check_exists(wanted, accelerator, device_count)
        return wanted
    if accelerator is None:
        return torch.device("cpu")
    if device_count == 1 and topology.local_world_size > 1 and topology.source != "ddpkit":
        # One visible device for each rank is how schedulers bind them; its index is always 0.
        return torch.device(accelerator, 0)
    if topology.local_rank >= device_count:
        raise ConfigError(
            f"Local rank {topology.local_rank} of {topology.local_world_size} has no {accelerator} "
            f"device of its own: this machine shows {device_count}. Start at most {device_count} "
            'ranks per node, or pass device="cpu".'
        )
    return torch.device(accelerator, topology.local_rank)


def has_index(device: torch.device) -> bool:
    """Tell whether a device names one of several, as `cuda:1` does and `cuda` does not."""
    return ":" in str(device)


def _check_exists(device: torch.device, accelerator: str | None, device_count: int) -> None:
    if device.type in ("cpu", "meta"):
        return
    if device.type != accelerator or (device.index or 0) >= device_count:
        available = f"{device_count} x {accelerator}" if accelerator else "only the CPU"
        raise ConfigError(
            f"device={str(device)!r} was given, but this process sees {available}. Pass a device "
            "that exists, or None to choose it."
        )


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Choose the backend for a device.

    Args:
        requested: What the user asked for, or None.
        device: Device of the rank.

    Returns:
        `gloo` for the CPU. For an accelerator its own backend, with gloo beside it for CPU tensors.
    """
    if requested is not None:
        return requested
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def choose_bound_device(
    device: torch.device, device_count: int, local_world_size: int
) -> torch.device | None:
    """Choose the device that a group is bound to, which makes its first collectives faster.

    A bound group refuses tensors on other devices, which a rank has that splits a model.

    Args:
        device: Device of the rank.
        device_count: How many such devices this process sees.
        local_world_size: Number of ranks of this machine.

    Returns:
        The device; None for the CPU, and where a rank may have more than one.
    """
    if device.type == "cpu" or device_count > local_world_size:
        return None
    return device


# --------------------------------------------------------------------------------------- effects


def accelerator_type() -> str | None:
    """Type of this machine's accelerator, None where there is none that can be used."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else None


def _choose_device_here(topology: Topology, requested: str | torch.device | None) -> torch.device:
    accelerator = accelerator_type()
    count = torch.accelerator.device_count() if accelerator else 0
    return choose_device(requested, accelerator, count, topology)


@contextlib.contextmanager
def process_group(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
) -> Iterator[World]:
    """Open the default process group for a block or a function, or join the one that is open.

    Collective: every rank must call this. In a plain process it opens a group of one rank, in which
    real collectives work. A group that was open before stays open; one that this call opened is
    destroyed at the end of the block. When the block raises, the other ranks are told why, and
    the exception leaves the block without waiting for them.

    Args:
        backend: Name of a torch.distributed backend. Default: gloo for the CPU; the
            accelerator's own with gloo beside it otherwise.
        timeout: Bound of the rendezvous, of collectives, and of waits for a rank to come to a call
            such as `barrier` or `on_rank0`, in seconds or as a timedelta. Default: 600 seconds.
            A group that is open already keeps its own.
        device: Device of this rank. Default: its accelerator, or the CPU.

    Yields:
        The world as this rank sees it.

    Raises:
        ConfigError: The launcher's variables are wrong, or there are more ranks than devices.
        GroupError: An open group has other settings, or ranks are missing at the rendezvous.

    Example:
        >>> with process_group() as world:
        ...     world.world_size
        1
    """
    seconds = to_seconds(timeout)
    check_backend(backend)
    check_device(device)
    if group_is_open():
        yield _join_open_group(backend, device)
        return
    topology = current_topology()
    chosen = _choose_device_here(topology, device)
    world = World(**asdict(topology), device=chosen, backend=choose_backend(backend, chosen))
    with pending.undone_at_end(), _restored_process_settings():
        with ended_when_unreachable() if world.num_nodes > 1 else contextlib.nullcontext() as links:
            opened = _open(world, DEFAULT_TIMEOUT if seconds is None else seconds)
        if links is not None and opened.channel is not None:
            opened.channel.observe_links(links.have_broken)
        try:
            yield world
            pending.finish()
        except BaseException as error:
            if _is_open_here(opened):
                _close(opened) if _is_in_order(error) else _close_after_error(opened, error)
            raise
        else:
            if _is_open_here(opened):
                _close(opened)


def to_seconds(
    given: float | timedelta | None, *, name: str = "timeout", zero: bool = False
) -> float | None:
    """Convert a time argument to seconds.

    Args:
        given: A number of seconds, a timedelta, or None.
        name: Name of the argument.
        zero: Whether it may be 0.

    Raises:
        ConfigError: It is no number, or not positive, or too large for a wait.

    Example:
        >>> to_seconds(timedelta(minutes=2))
        120.0
    """
    if given is None:
        return None
    seconds: Any = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise ConfigError(f"{name}={given!r} was given, but it must be seconds or a timedelta.")
    if not (0 < float(seconds) <= _LONGEST_TIME or (zero and seconds == 0)):
        least = "at least 0" if zero else "more than 0 seconds"
        raise ConfigError(
            f"{name}={given!r} was given, but it must be {least} and at most {_LONGEST_TIME:.0e} s."
        )
    return float(seconds)


def check_backend(backend: object) -> None:
    """Raise ConfigError if torch knows no such backend."""
    if backend is None:
        return
    text = backend.lower() if isinstance(backend, str) else ""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    if not all(item.rpartition(":")[2] in known for item in text.split(",")):
        raise ConfigError(
            f"backend={backend!r} was given, but the backends here are {', '.join(known)}, or such "
            "as 'cpu:gloo,cuda:nccl'. Import the package first that brings another one."
        )


def check_device(device: object) -> None:
    """Raise ConfigError if there is no such kind of device, or its name cannot be read."""
    if device is None or isinstance(device, torch.device):
        return
    try:
        torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device={device!r} was given, but it must be a device such as 'cpu', 'cuda' or "
            f"'cuda:1', or None ({reason})."
        ) from None


def _join_open_group(backend: str | None, device: str | torch.device | None) -> World:
    actual = _open_backend()
    if backend is not None and not _same_backend(backend, actual):
        raise GroupError(
            f"backend={backend!r} was given, but a process group with {actual!r} is already open. "
            "Leave backend out to join it, or close that group first."
        )
    opened = _state.opened
    world = opened.world if opened is not None else _adopted_world(device, actual)
    if device is not None and torch.device(device).type != world.device.type:
        raise GroupError(
            f"device={str(device)!r} was given, but the open process group uses {world.device}. "
            "Leave device out to join it, or close that group first."
        )
    return world


def _adopted_topology() -> Topology:
    """Place this rank in a group that somebody else opened; variables for it may be missing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = current_topology()
    if (topology.rank, topology.world_size) == (rank, size):
        return topology
    return Topology(rank, size, rank, size, source="group")


def _adopted_world(device: str | torch.device | None, backend: str) -> World:
    topology = _adopted_topology()
    return World(**asdict(topology), device=_choose_device_here(topology, device), backend=backend)


def _open_backend() -> str:
    # get_backend() says "undefined" for a group that was opened without naming one.
    return str(dist.get_backend_config())


def _same_backend(requested: str, actual: str) -> bool:
    requested, served = requested.lower(), actual.split(",")
    if ":" in requested:
        return set(requested.split(",")) <= set(served)
    return any(item.endswith(f":{requested}") for item in served)


@contextlib.contextmanager
def _restored_process_settings() -> Iterator[None]:
    """Put back what opening a group changes in this process."""
    excepthook = sys.excepthook
    interface = os.environ.get(INTERFACE_VARIABLE)
    try:
        yield
    finally:
        sys.excepthook = excepthook
        if interface is None:
            os.environ.pop(INTERFACE_VARIABLE, None)


def _open(world: World, timeout: float) -> _Opened:
    _drop_left_by_error()
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index or 0)
    meeting = meet(
        world,
        label=f"ddpkit/{world.source}",
        secret=_secret(),
        timeout=timeout,
        servers=_state.servers,
        past=_state.past,
    )
    opened = _Opened(world, meeting.channel)
    here = threading.current_thread() is threading.main_thread()
    if meeting.channel is not None and here and not has_watcher(world):
        # Before torch opens the group, which waits until its time-out for one that dies meanwhile.
        opened.watch = PeerWatch(meeting.channel)
    count = 0 if world.device.type == "cpu" else torch.accelerator.device_count()
    try:
        _set_interface(world, meeting)
        dist.init_process_group(
            world.backend,
            store=meeting.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=choose_bound_device(world.device, count, world.local_world_size),
        )
    except BaseException as error:
        _close_after_error(opened, error)
        raise
    if meeting.channel is not None:
        meeting.channel.add(_OPENED, 1)
    _logger.info(
        "[rank %d/%d] opened a group: %s, device %s, backend %s",
        *(world.rank, world.world_size, describe(world), world.device, world.backend),
    )
    _state.opened = opened
    _close_at_exit()
    return opened


def _set_interface(world: World, meeting: Meeting) -> None:
    """Name the interface to gloo that the other ranks reach this one by."""
    if "gloo" not in world.backend and not meeting.by_loopback:
        return  # NCCL finds its interface by itself
    chosen = interface_for_gloo(world, meeting, os.environ.get(INTERFACE_VARIABLE))
    if chosen is not None:
        os.environ[INTERFACE_VARIABLE] = chosen


def set_secret(secret: bytes) -> None:
    """Set the key that the launcher of this rank handed down for signing messages."""
    _state.secret = secret


def _secret() -> bytes:
    return _state.secret or os.environ.get(SECRET_VARIABLE, "").encode()


# ------------------------------------------------------------------------------------- closing


def _close(opened: _Opened) -> None:
    world, channel = opened.world, opened.channel
    _stop_watching(opened)
    try:
        if channel is not None:
            _await_all_open(channel)
        if group_is_open():
            _destroy_group()
        if channel is not None:
            channel.leave(Departure(world.rank, socket.gethostname(), failed=False))
            if must_serve(world):
                _await_farewells(channel)
    finally:
        _forget(opened)


def _is_in_order(error: BaseException) -> bool:
    """Tell whether it is no failure by which a block is left: an exit with 0, or a generator's end.

    The other ranks may be at work for a while yet, as after the end of a block.
    """
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, GeneratorExit)


def _is_open_here(opened: _Opened) -> bool:
    """Tell whether a group is still to be closed, and by this process: a fork of it has none."""
    return _state.opened is opened and opened.pid == os.getpid()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_close_what_was_not_left)


def _close_what_was_not_left() -> None:
    """Close a group whose block is left only when the interpreter clears away what holds it.

    Threads cannot be started any more by then, and closing would wait for one for ever.
    """
    opened, error = _state.opened, getattr(sys, "last_value", None)
    if opened is None or not _is_open_here(opened):
        return
    if error is not None:
        _close_after_error(opened, error, ends=True)
        return
    with contextlib.suppress(GroupError, RuntimeError):  # nobody is there any more to be told
        _close(opened)


def _destroy_group() -> None:
    # torch 2.6 keeps the interpreter's lock while it waits for the threads of gloo, and one that
    # drops the tensor of the last collective needs that lock: both wait for ever. It takes a few
    # thousand groups of one rank until that happens (2.14: not in 5,000).
    if _CLOSES_WITH_LOCK:
        time.sleep(_UNTIL_DROPPED)
    dist.destroy_process_group()


def _await_all_open(channel: Channel) -> None:
    """Stay until every rank has opened the group.

    gloo connects pair by pair: a rank that leaves at once, after a short function without a
    collective, would break the connections of one that is still opening.
    """
    others = [rank for rank in range(channel.world_size) if rank != channel.rank]
    with contextlib.suppress(GroupError, PeerError):  # one that failed opens nothing any more
        channel.wait(
            lambda: channel.add(_OPENED, 0) >= channel.world_size,
            lambda: others,
            timeout=channel.bound,
            notice_after=channel.bound,
            notice=lambda ranks: None,
        )


def _await_farewells(channel: Channel) -> None:
    """Serve until the others have left too, for this process may be about to end."""

    def notice(ranks: Sequence[int]) -> None:
        _logger.warning(
            "[rank %d/%d] waiting for %s to leave, as this rank serves the store (at most %.0f s)",
            *(channel.rank, channel.world_size, name_ranks(ranks), channel.bound),
        )

    with contextlib.suppress(GroupError):  # a server that does not answer is none
        channel.await_departures(notice_after=_NOTICE_AFTER, notice=notice)


def _close_after_error(opened: _Opened, error: BaseException, *, ends: bool = False) -> None:
    """Tell the others, then leave without waiting for anybody.

    Args:
        opened: What is open.
        error: By which the block is left.
        ends: Whether it is known that this process ends of it.
    """
    world, channel = opened.world, opened.channel
    _stop_watching(opened)

    def close() -> None:
        if channel is not None:
            if _may_come_of_an_end(error):
                _tell_who_has_ended(channel, world, error)
            record = record_exception(error)
            opened.last_words = Departure(
                world.rank, socket.gethostname(), True, record.summary, record.traceback, ends
            )
            with contextlib.suppress(GroupError):  # the store has gone, and whom would it concern
                channel.leave(opened.last_words)
        if group_is_open():
            _destroy_group()
        if channel is not None and must_serve(world):
            serve_until(lambda: len(channel.departures()) == world.world_size)

    # Both steps can block: the store's process may be stopped, NCCL may wait for queued work.
    if not _within_bound(close, _ERROR_PATH_BOUND):
        _logger.warning("the process group could not be closed in %.1f s", _ERROR_PATH_BOUND)
    _forget(opened)


def _may_come_of_an_end(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, DdpkitError)


def _tell_who_has_ended(channel: Channel, world: World, error: BaseException) -> None:
    """Name the rank behind an error of torch's, which only says that a connection was closed."""
    if world.source == "ddpkit":
        return  # the parent knows what became of every rank
    cause = _find_who_has_ended(channel, world)
    if cause is None:
        return
    if not has_watcher(world):
        _logger.warning("%s", cause)
    if error.__cause__ is None and is_likely_consequence(error):
        error.__cause__ = cause  # and so it is in torchrun's report


def _find_who_has_ended(channel: Channel, world: World) -> PeerError | GroupError | None:
    deadline = time.monotonic() + _OBITUARY_BOUND
    while time.monotonic() < deadline:
        try:
            # The store of torchrun is not rank 0's, so its end says nothing of that.
            channel.check_processes() if has_watcher(world) else check_peers(channel)
        except PeerError as cause:
            return cause
        except GroupError:
            return None
        time.sleep(0.05)  # connections are closed a moment before a process has ended
    return _find_who_has_left(channel)


def _find_who_has_left(channel: Channel) -> GroupError | None:
    with contextlib.suppress(GroupError):
        gone = sorted(departure.rank for departure in channel.departures() if not departure.failed)
        if gone:
            return GroupError(
                f"[rank {channel.rank}/{channel.world_size}] {name_ranks(gone)} had left the group "
                f"in order while this rank was in a call that needs all ranks. {UNEVEN}"
            )
    return None


def _stop_watching(opened: _Opened) -> None:
    if opened.watch is not None:
        opened.watch.stop()


def _within_bound(function: Callable[[], None], bound: float) -> bool:
    """Run a function in a thread of its own; tell whether it has ended within so many seconds."""
    thread = threading.Thread(target=_quietly, args=(function,), name="ddpkit-close", daemon=True)
    thread.start()
    thread.join(timeout=bound)
    return not thread.is_alive()


def _quietly(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:  # noqa: BLE001  # the user's exception is the one that matters
        _logger.debug("while closing the group after an error: %r", error)


def _forget(opened: _Opened) -> None:
    _state.opened = None
    if opened.channel is None:
        return
    if opened.last_words is None or opened.last_words.ended or has_watcher(opened.world):
        opened.channel.close()
        return
    # Whether the exception is caught is not known yet. Those on other machines, where nobody
    # watches the ranks, have to hear it from this one if it is not.
    _state.left_by_error = opened
    _tell_at_exit()


@functools.cache
def _tell_at_exit() -> None:
    atexit.register(_tell_that_it_ends)


def _tell_that_it_ends() -> None:
    """Tell the others that this process, which has left the group by an exception, ends now."""
    left = _state.left_by_error
    if left is None or left.pid != os.getpid():
        return
    channel, last_words = left.channel, left.last_words
    assert channel is not None
    assert last_words is not None
    _within_bound(lambda: channel.leave(replace(last_words, ended=True)), _OBITUARY_BOUND)
    _drop_left_by_error()


def _drop_left_by_error() -> None:
    left, _state.left_by_error = _state.left_by_error, None
    if left is not None and left.channel is not None and left.pid == os.getpid():
        left.channel.close()


# ----------------------------------------------------------------------------- for collectives


def require_group(caller: str) -> bool:
    """Tell whether there is somebody to talk to.

    Args:
        caller: Name of the public function that asks, for the message.

    Returns:
        False in a world of one, True when a group of several ranks is open.

    Raises:
        GroupError: A launcher started several ranks, but no group is open.
    """
    if group_is_open():
        return dist.get_world_size() > 1
    topology = current_topology()
    if topology.world_size == 1:
        return False
    raise GroupError(
        f"{caller}() was called on rank {topology.rank} of {topology.world_size} (read from: "
        f"{topology.source}), but no process group is open. Call it inside `with process_group():` "
        "or inside a function decorated with @distributed."
    )


def backend_device_types() -> list[str]:
    """Return the types of device that the open group has a backend for."""
    return [item.split(":")[0] for item in _open_backend().split(",")]


def communication_device() -> torch.device:
    """Return a device whose tensors the open group can send: the CPU where that is possible."""
    return torch.device("cpu") if "cpu" in backend_device_types() else get_device()


def get_channel() -> Channel:
    """Return the side channel of the open group of several ranks, opening it on first use."""
    if _state.opened is not None and _state.opened.channel is not None:
        return _state.opened.channel
    group = dist.group.WORLD
    if _state.adopted is not None and _state.adopted[0] is not group:
        _state.adopted[1].close()
        _state.adopted = None
    if _state.adopted is None:
        _state.adopted = (group, _adopt_channel())
    return _state.adopted[1]


def _adopt_channel() -> Channel:
    """Open a side channel beside a group that the user's own code has opened."""
    world = _adopted_world(None, _open_backend())
    _state.adoptions += 1
    label = f"ddpkit/adopted/{_state.adoptions}"
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public way
    # A connection of its own where torch can make one (2.7 and newer), so that a wait inside torch
    # does not hold the channel up.
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        store = store.clone()
    _leave_at_exit()
    channel = open_channel(PrefixStore(label, store), world, label, _secret(), DEFAULT_TIMEOUT)
    await_members(channel, world, time.monotonic() + DEFAULT_TIMEOUT, DEFAULT_TIMEOUT)
    return channel


@functools.cache
def _leave_at_exit() -> None:
    atexit.register(_leave_adopted)


def _leave_adopted() -> None:
    """Close what was opened beside the user's own group, at the end of the process.

    This process may hold the store, in which others have not yet read the answer to their last
    call. And a helper thread that comes back from a store call while Python ends aborts the
    process, so it ends first.
    """
    if _state.adopted is None:
        return
    _, channel = _state.adopted
    _state.adopted = None
    with contextlib.suppress(GroupError, RuntimeError):  # the store has gone: nobody reads there
        channel.await_readers(_READERS_BOUND)
    channel.close()
