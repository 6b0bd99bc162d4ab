"""The process group: open it, join it, leave it; and who this process is within it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
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
from torch.distributed import HashStore, PrefixStore, Store

from ddpkit import pending
from ddpkit import store as stores
from ddpkit.control import SECRET_VARIABLE, Channel, Departure
from ddpkit.errors import ConfigError, GroupError, PeerError
from ddpkit.serialize import record_exception
from ddpkit.topology import Topology, is_loopback, read_topology
from ddpkit.watch import PeerWatch

DEFAULT_TIMEOUT = 600.0
"""Seconds that rendezvous and collectives may take."""
_ERROR_PATH_BOUND = 1.5
_LAST_WORDS_BOUND = 1.0
_FAREWELL_BOUND = 30.0
_READERS_BOUND = 5.0
_OPENED = "opened"
_WATCHED_SOURCES = ("ddpkit", "torchrun")  # a parent or an agent watches the ranks of these
_NOTICE_AFTER = 3.0

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


@dataclass
class _ProcessState:
    opened: _Opened | None = None
    adopted: tuple[Any, Channel] | None = None
    secret: bytes | None = None
    generations: int = 0
    servers: dict[tuple[str, int], Store] = field(default_factory=dict)


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
    if group_is_open():
        yield _join_open_group(backend, device)
        return
    topology = current_topology()
    chosen = _choose_device_here(topology, device)
    world = World(**asdict(topology), device=chosen, backend=choose_backend(backend, chosen))
    with pending.undone_at_end(), _restored_process_settings(topology):
        opened = _open(world, DEFAULT_TIMEOUT if seconds is None else seconds)
        try:
            yield world
            pending.finish()
        except BaseException as error:
            _close_after_error(opened, error)
            raise
        else:
            _close(opened)


def to_seconds(given: float | timedelta | None, *, name: str = "timeout") -> float | None:
    """Convert a time argument to seconds, checking that it is positive."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"{name}={given!r} was given, but it must be more than 0 seconds.")
    return seconds


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
    return set(str(dist.BackendConfig(dist.Backend(requested))).split(",")) <= set(
        actual.split(",")
    )


@contextlib.contextmanager
def _restored_process_settings(topology: Topology) -> Iterator[None]:
    """Put back what opening a group changes in this process."""
    excepthook = sys.excepthook
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None and topology.num_nodes == 1:
        # A host name that resolves wrongly, or not at all, must not matter on one machine.
        os.environ["GLOO_SOCKET_IFNAME"] = stores.LOOPBACK_INTERFACE
    try:
        yield
    finally:
        sys.excepthook = excepthook
        if interface is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _open(world: World, timeout: float) -> _Opened:
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device.index or 0)
    store, channel = _rendezvous(world, timeout)
    opened = _Opened(world, channel)
    here = threading.current_thread() is threading.main_thread()
    if channel is not None and here and world.source not in _WATCHED_SOURCES:
        # Before torch opens the group, which waits until its time-out for one that dies meanwhile.
        opened.watch = PeerWatch(channel)
    count = 0 if world.device.type == "cpu" else torch.accelerator.device_count()
    try:
        dist.init_process_group(
            world.backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=choose_bound_device(world.device, count, world.local_world_size),
        )
    except BaseException as error:
        _close_after_error(opened, error)
        raise
    if channel is not None:
        channel.add(_OPENED, 1)
    _logger.info(
        "[rank %d/%d] local rank %d of %d on node %d of %d (read from: %s), device %s, backend %s",
        *(world.rank, world.world_size, world.local_rank, world.local_world_size),
        *(world.node_rank, world.num_nodes, world.source, world.device, world.backend),
    )
    _state.opened = opened
    return opened


def _rendezvous(world: World, timeout: float) -> tuple[Store, Channel | None]:
    if world.source == "none":
        return HashStore(), None
    label = _next_label(world)
    if _must_serve(world):
        _serve_once(world, timeout)
    assert world.master_addr is not None
    assert world.master_port is not None
    address = (world.master_addr, world.master_port)
    deadline = time.monotonic() + timeout
    client = stores.connect(*address, timeout, lambda: _waiting_for_server(world))
    if world.world_size == 1:
        return PrefixStore(label, client), None
    side = stores.connect(*address, timeout)
    channel = open_channel(PrefixStore(f"{label}/control", side), world, label, timeout)
    try:
        _await_members(channel, world, deadline, timeout)
        channel.check_joined()  # torch would wait for one that has ended until its time-out
    except BaseException:
        # A rank that comes later must not take this one, which has given up, for present.
        with contextlib.suppress(GroupError):
            channel.withdraw()
            if _must_serve(world):
                _serve_until(channel.is_alone)
        channel.close()
        raise
    return PrefixStore(label, client), channel


def _next_label(world: World) -> str:
    """Name a world: a store may serve several in a row, and several attempts of torchrun."""
    _state.generations += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"ddpkit/{world.source}/{attempt}/{_state.generations}"


def _must_serve(world: World) -> bool:
    """Tell whether rank 0 hosts the store, because the launcher does not."""
    if world.source == "torchrun":
        return world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return world.rank == 0 and world.source == "environment"


def bind_address(master_addr: str) -> str:
    """Choose what the store's server listens on: loopback alone where the ranks use loopback."""
    if master_addr in ("localhost", "ip6-localhost"):
        return stores.LOOPBACK
    if is_loopback(master_addr):
        return master_addr
    return "::" if ":" in master_addr else "0.0.0.0"  # other machines connect


def _serve_once(world: World, timeout: float) -> None:
    """Host the store on rank 0; torch cannot close one that a group used, so keep it until exit."""
    assert world.master_addr is not None
    assert world.master_port is not None
    address = (world.master_addr, world.master_port)
    if address not in _state.servers:
        listener = stores.listen(bind_address(world.master_addr), world.master_port)
        _state.servers[address] = stores.serve(listener, timeout)


def open_channel(store: Store, world: World, label: str, bound: float) -> Channel:
    """Open this rank's end of the side channel."""
    return Channel(
        store,
        rank=world.rank,
        world_size=world.world_size,
        label=label,
        secret=_secret(),
        bound=bound,
        # Variables that do not belong to the group tell of no nodes; then each host is one.
        node=_host() if world.source == "group" else str(world.node_rank),
        heartbeat=world.source != "ddpkit",
    )


def set_secret(secret: bytes) -> None:
    """Set the key that the launcher of this rank handed down for signing messages."""
    _state.secret = secret


def _secret() -> bytes:
    return _state.secret or os.environ.get(SECRET_VARIABLE, "").encode()


def _await_members(channel: Channel, world: World, deadline: float, timeout: float) -> None:
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    missing = others
    given_up: list[int] = []

    def everyone_is_here() -> bool:
        nonlocal missing
        missing = channel.absent(missing)
        return not missing and not given_up

    def notice(ranks: object) -> None:
        _logger.warning(
            "[rank %d/%d] waiting for %s of %d at %s:%s (read from: %s)",
            *(world.rank, world.world_size, name_ranks(missing), world.world_size),
            *(world.master_addr, world.master_port, world.source),
        )

    while True:
        try:
            arrived = channel.wait(
                everyone_is_here,
                # One that is here already may end before the last one comes.
                lambda: [rank for rank in others if rank not in given_up],
                timeout=deadline - time.monotonic(),
                notice_after=_NOTICE_AFTER,
                notice=notice,
            )
            break
        except PeerError as error:
            # One whose time was up a moment earlier, and which has said so, is no cause.
            if not channel.has_withdrawn(error.rank):
                raise
            given_up.append(error.rank)
    if not arrived:
        raise GroupError(_describe_missing(world, missing, given_up, timeout))


def _describe_missing(
    world: World, missing: Sequence[int], given_up: Sequence[int], timeout: float
) -> str:
    before = f" ({name_ranks(given_up)} gave up before)" if given_up else ""
    return (
        f"[rank {world.rank}/{world.world_size}] {name_ranks([*missing] or given_up)} did not join "
        f"within {timeout:.0f} s at {world.master_addr}:{world.master_port}{before}. WORLD_SIZE="
        f"{world.world_size} was read from: {world.source}. Start the missing ranks or correct "
        "WORLD_SIZE."
    )


def _waiting_for_server(world: World) -> str:
    return (
        f"[rank {world.rank}/{world.world_size}] waiting for the store of rank 0 at "
        f"{world.master_addr}:{world.master_port} (read from: {world.source})"
    )


def name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """Name ranks in a message: `rank 1`, or `ranks 1, 2, 3 and 40 more`."""
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


# ------------------------------------------------------------------------------------- closing


def _close(opened: _Opened) -> None:
    world, channel = opened.world, opened.channel
    _stop_watching(opened)
    try:
        if channel is not None:
            _await_all_open(channel)
        if group_is_open():
            dist.destroy_process_group()
        if channel is not None:
            channel.leave(Departure(world.rank, _host(), failed=False))
            if _must_serve(world):
                _await_farewells(channel)
    finally:
        _forget(opened)


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
            timeout=_FAREWELL_BOUND,
            notice_after=_FAREWELL_BOUND,
            notice=lambda ranks: None,
        )


def _await_farewells(channel: Channel) -> None:
    """Serve until the others have left too, for this process may be about to end."""
    others = range(1, channel.world_size)
    remaining: list[int] = list(others)

    def everyone_has_left() -> bool:
        nonlocal remaining
        gone = {departure.rank for departure in channel.departures()}
        remaining = [rank for rank in others if rank not in gone]
        return not remaining

    with contextlib.suppress(GroupError, RuntimeError):  # one that died needs no store any more
        channel.wait(
            everyone_has_left,
            lambda: remaining,
            timeout=_FAREWELL_BOUND,
            notice_after=_FAREWELL_BOUND,
            notice=lambda ranks: None,
        )


def _close_after_error(opened: _Opened, error: BaseException) -> None:
    """Tell the others, then leave without waiting for anybody."""
    world, channel = opened.world, opened.channel
    _stop_watching(opened)

    def close() -> None:
        if channel is not None:
            record = record_exception(error)
            channel.leave(Departure(world.rank, _host(), True, record.summary, record.traceback))
        if group_is_open():
            dist.destroy_process_group()
        if channel is not None and _must_serve(world):
            _serve_until(lambda: len(channel.departures()) == world.world_size)

    # Both steps can block: the store's process may be stopped, NCCL may wait for queued work.
    closer = threading.Thread(target=_quietly, args=(close,), name="ddpkit-close", daemon=True)
    closer.start()
    closer.join(timeout=_ERROR_PATH_BOUND)
    if closer.is_alive():
        _logger.warning("the process group could not be closed in %.1f s", _ERROR_PATH_BOUND)
    _forget(opened)


def _stop_watching(opened: _Opened) -> None:
    if opened.watch is not None:
        opened.watch.stop()


def _serve_until(ready: Callable[[], bool]) -> None:
    """Keep the store of this process up for a moment, so that the others learn why it goes."""
    deadline = time.monotonic() + _LAST_WORDS_BOUND
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)


def _quietly(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:  # noqa: BLE001  # the user's exception is the one that matters
        _logger.debug("while closing the group after an error: %r", error)


def _forget(opened: _Opened) -> None:
    _state.opened = None
    if opened.channel is not None:
        opened.channel.close()


def _host() -> str:
    return socket.gethostname()


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
    _state.generations += 1
    label = f"ddpkit/adopted/{_state.generations}"
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public way
    # A connection of its own where torch can make one (2.7 and newer), so that a wait inside torch
    # does not hold the channel up.
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        store = store.clone()
    _leave_at_exit()
    channel = open_channel(PrefixStore(label, store), world, label, DEFAULT_TIMEOUT)
    _await_members(channel, world, time.monotonic() + DEFAULT_TIMEOUT, DEFAULT_TIMEOUT)
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
