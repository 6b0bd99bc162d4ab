"""How ranks meet: at a store that a launcher serves, or rank 0, and where nobody waits for ever."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, MutableMapping, MutableSet, Sequence
from dataclasses import dataclass, replace

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from ddpkit import store as stores
from ddpkit.attempts import AttemptNamer, ask_for_attempt
from ddpkit.control import Channel
from ddpkit.errors import GroupError, PeerError
from ddpkit.network import (
    INTERFACE_VARIABLE,
    can_look,
    check_interfaces,
    choose_interface,
    interface_names,
    is_outside,
    look_at_network,
    this_network,
)
from ddpkit.search import Search
from ddpkit.topology import Topology
from ddpkit.wording import name_ranks

LAST_WORDS_BOUND = 1.0
"""Seconds that rank 0 serves its store after a failure, so that the others learn of it."""

_SERVED_BY_LAUNCHER = ("ddpkit", "torchrun")  # a parent or an agent also watches these ranks
_NOTICE_AFTER = 3.0
_NETWORK_KEY = "network/"
_GAVE_UP_KEY = "gave up/"
_MASTER_KEY = "master"
_CHOSEN_KEY = "chosen"
_MASTER_BOUND = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """What a rank holds when all have met."""

    store: Store
    """Store of this world, for torch."""
    channel: Channel | None = None
    """Side channel of this world, None in a world of one."""
    by_loopback: bool = True
    """Whether all ranks reach each other by loopback."""


def must_serve(place: Topology) -> bool:
    """Tell whether this rank hosts the store, because it is rank 0 and the launcher does not."""
    if place.rank != 0 or place.source in ("none", "group"):
        return False
    if place.source == "torchrun":
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return not has_watcher(place)


def has_watcher(place: Topology) -> bool:
    """Tell whether a launcher watches the ranks, and ends those that are left over."""
    return place.source in _SERVED_BY_LAUNCHER


def meet(
    place: Topology,
    *,
    label: str,
    secret: bytes,
    timeout: float,
    servers: MutableMapping[tuple[str, int], TCPStore],
    past: MutableSet[str],
) -> Meeting:
    """Wait until all ranks of a world have joined.

    Collective: every rank must call this. In a world of one there is nobody to wait for.

    Args:
        place: The place of this rank.
        label: What the names of the worlds of these ranks begin with.
        secret: Key of the messages' signatures.
        timeout: Seconds for everything.
        servers: The stores that this process serves, by address; a new one is added to it. They
            have to be kept until exit, because torch cannot close one that a group has used.
        past: Names of the worlds that this process has met in before; the new one is added to it.

    Returns:
        The store and the side channel of the world.

    Raises:
        GroupError: Ranks are missing, or no store was found, or rank 0 has no port to serve on.
        PeerError: A rank that had joined has ended.
    """
    if place.source == "none" or (place.world_size == 1 and place.master_port is None):
        return Meeting(HashStore())
    deadline = time.monotonic() + timeout
    place, client = _reach_store(place, timeout, servers)
    assert place.master_addr is not None
    assert place.master_port is not None
    attempt, answer = _find_attempt(place, client, label, deadline, timeout, past)
    label = f"{label}/{attempt}"
    if place.world_size == 1:
        return Meeting(PrefixStore(label, client))
    left = max(1.0, deadline - time.monotonic())
    side = stores.connect(place.master_addr, place.master_port, left)
    control = PrefixStore(f"{label}/control", side)
    network = _note_network(place, control)  # before this rank can be seen to have joined
    channel = open_channel(control, place, label, secret, timeout)
    try:
        await_members(channel, place, deadline, timeout, meanwhile=answer)
        channel.check_joined()  # torch would wait for one that has ended until its time-out
        by_loopback = network is None or channel.add(network, 0) == place.world_size
    except BaseException:
        _withdraw(channel, place)
        raise
    past.add(attempt)  # one that was not met in may be joined again
    return Meeting(PrefixStore(label, client), channel, by_loopback)


def _note_network(place: Topology, store: Store) -> str | None:
    """Count this rank among those of its network, and return the name of the count.

    Several nodes may be virtual ones of one machine. None where there is only one.
    """
    if place.num_nodes == 1:
        return None
    key = _NETWORK_KEY + this_network()
    if key != _NETWORK_KEY:
        store.add(key, 1)
    return key


def _find_attempt(
    place: Topology,
    client: Store,
    label: str,
    deadline: float,
    timeout: float,
    past: Collection[str],
) -> tuple[str, Callable[[], None]]:
    """Return the name of this attempt, and what answers the other ranks meanwhile."""
    if place.source == "ddpkit":
        # Its ranks begin together, over a store of their own: they count alike, and need not ask.
        return str(len(past)), lambda: None
    shared = PrefixStore(label, client)
    if place.rank == 0:
        namer = AttemptNamer(shared)
        return namer.name, namer.answer
    notice_at = time.monotonic() + _NOTICE_AFTER

    def notice() -> None:
        nonlocal notice_at
        if time.monotonic() > notice_at:
            notice_at = deadline + 1.0  # once is enough
            _logger.warning("%s", _waiting_for_server(place))

    name = ask_for_attempt(shared, deadline, notice, past)
    if name is None:
        raise GroupError(_describe_missing(place, [0], [], timeout))
    return name, lambda: None


def _withdraw(channel: Channel, place: Topology) -> None:
    # A rank that comes later must not take this one, which has given up, for present.
    with contextlib.suppress(GroupError):
        channel.publish(_GAVE_UP_KEY + str(place.rank), b"")
        channel.withdraw()
        if must_serve(place):
            serve_until(channel.is_alone)
    channel.close()


def serve_until(ready: Callable[[], bool]) -> None:
    """Keep the store of this process up for a moment, so that the others learn why it goes."""
    deadline = time.monotonic() + LAST_WORDS_BOUND
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)


def open_channel(store: Store, place: Topology, label: str, secret: bytes, bound: float) -> Channel:
    """Open this rank's end of the side channel."""
    return Channel(
        store,
        rank=place.rank,
        world_size=place.world_size,
        label=label,
        secret=secret,
        bound=bound,
        # Variables that do not belong to the group tell of no nodes; then each host is one.
        node=str(place.node_rank) if _knows_nodes(place) else socket.gethostname(),
        heartbeat=place.source != "ddpkit",
    )


def _knows_nodes(place: Topology) -> bool:
    return place.source != "group" and place.nodes_are_known


def _reach_store(
    place: Topology, timeout: float, servers: MutableMapping[tuple[str, int], TCPStore]
) -> tuple[Topology, TCPStore]:
    """Connect to the store, which rank 0 serves first if the launcher does not.

    The place that comes back says where that is.
    """
    if place.master_addr is None or place.master_port is None:
        search = Search.for_place(place)
        if must_serve(place):
            port = search.serve(servers, timeout)
            client = stores.connect(search.host, port, timeout)
        else:
            port, client = search.find(timeout)
        return replace(place, master_addr=search.host, master_port=port), client
    address = (place.master_addr, place.master_port)
    if must_serve(place):
        stores.serve_kept(servers, *address, timeout)
    return place, stores.connect(*address, timeout, lambda: _waiting_for_server(place))


def _waiting_for_server(place: Topology) -> str:
    return (
        f"[rank {place.rank}/{place.world_size}] waiting for the store of rank 0 at "
        f"{place.master_addr}:{place.master_port} (read from: {place.source})"
    )


def await_members(
    channel: Channel,
    place: Topology,
    deadline: float,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every rank has opened its end of the side channel.

    Collective: every rank must call this.

    Args:
        channel: This rank's end.
        place: The place of this rank, for messages.
        deadline: Monotonic time at which the wait ends.
        timeout: Seconds that there were for it, for the message.
        meanwhile: Called again and again until then.

    Raises:
        GroupError: Ranks are missing.
        PeerError: A rank that had joined has ended.
    """
    others = [rank for rank in range(place.world_size) if rank != place.rank]
    following = [(place.rank + 1) % place.world_size]
    watched = others if place.rank == 0 else [0, *following]  # who sees an end tells all ranks
    given_up: list[int] = []

    def everyone_is_here() -> bool:
        meanwhile()
        # They are counted, but one may have given up since, or not belong here.
        return not given_up and channel.everyone_joined() and not channel.absent(following)

    def notice(ranks: object) -> None:
        _logger.warning(
            "[rank %d/%d] waiting for %s of %d at %s:%s (read from: %s)",
            *(place.rank, place.world_size, name_ranks(channel.absent(others)), place.world_size),
            *(place.master_addr, place.master_port, place.source),
        )

    while True:
        try:
            arrived = channel.wait(
                everyone_is_here,
                # One that is here already may end before the last one comes.
                lambda: [rank for rank in watched if rank not in given_up],
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
        absent = channel.absent(others)
        had_come = [rank for rank in absent if channel.fetch(_GAVE_UP_KEY + str(rank)) is not None]
        given_up = sorted({*given_up, *had_come})
        missing = [rank for rank in absent if rank not in given_up]
        raise GroupError(_describe_missing(place, missing, given_up, timeout))


def _describe_missing(
    place: Topology, missing: Sequence[int], given_up: Sequence[int], timeout: float
) -> str:
    before = f" ({name_ranks(given_up)} gave up before)" if given_up else ""
    return (
        f"[rank {place.rank}/{place.world_size}] {name_ranks([*missing] or given_up)} did not join "
        f"within {timeout:.0f} s at {place.master_addr}:{place.master_port}{before}. WORLD_SIZE="
        f"{place.world_size} was read from: {place.source}. Start the missing ranks or correct "
        "WORLD_SIZE."
    )


def interface_for_gloo(place: Topology, meeting: Meeting, setting: str | None) -> str | None:
    """Choose the network interface that gloo has to use on this rank.

    Collective where the ranks are on several machines: every rank must call this.

    Args:
        place: The place of this rank.
        meeting: What came of the rendezvous.
        setting: What the user has set, None where it was not.

    Returns:
        Name of the interface, None where gloo needs none.

    Raises:
        ConfigError: The user has named an interface that this machine does not have; or gloo would
            use loopback, which other machines cannot reach, and no other can be told.
    """
    if setting is not None:
        check_interfaces(setting, interface_names())
    if meeting.channel is None or meeting.by_loopback:
        # A host name that resolves wrongly, or not at all, must not matter on one machine.
        return stores.LOOPBACK_INTERFACE if setting is None else None
    chosen = _interface_to_master(place, meeting.channel, setting) if can_look() else None
    _await_choices(meeting.channel)
    return chosen


def _interface_to_master(place: Topology, channel: Channel, setting: str | None) -> str | None:
    master = place.master_addr or ""
    network = look_at_network(master)
    if place.local_rank == 0 and is_outside(network.master):
        channel.publish(_MASTER_KEY, network.master.encode())
    if setting is not None:
        return None
    if not is_outside(network.advertised) and not is_outside(network.route):
        # On rank 0's own host its name may stand for loopback; the others know its address.
        network = replace(network, route=_hear_of_master(channel))
    chosen = choose_interface(network, master)
    if chosen is not None:
        _logger.info(
            "[rank %d/%d] gloo uses the interface %s, because the host name %r stands for %s; set "
            "%s to choose another one",
            *(place.rank, place.world_size, chosen, network.host, network.advertised or "nothing"),
            INTERFACE_VARIABLE,
        )
    return chosen


def _await_choices(channel: Channel) -> None:
    """Wait for the other ranks, one of which may have to raise: torch would not notice that."""
    channel.add(_CHOSEN_KEY, 1)
    channel.wait(
        lambda: channel.add(_CHOSEN_KEY, 0) >= channel.world_size,
        lambda: range(1, channel.world_size) if channel.rank == 0 else [0],
        timeout=channel.bound,
        notice_after=channel.bound,
        notice=lambda ranks: None,
    )


def _hear_of_master(channel: Channel) -> str | None:
    """Wait for the address of rank 0's host as another machine knows it."""
    heard: bytes | None = None

    def has_come() -> bool:
        nonlocal heard
        heard = channel.fetch(_MASTER_KEY)
        return heard is not None

    channel.wait(
        has_come, list, timeout=_MASTER_BOUND, notice_after=_MASTER_BOUND, notice=lambda ranks: None
    )
    return None if heard is None else heard.decode()
