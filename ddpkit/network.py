"""Which network interface gloo uses, so that every rank can be reached by the others.

gloo tells the other ranks the address that this machine's host name resolves to. Many systems let
their own name stand for loopback; then, on several machines, each rank would be told to connect to
itself. The interface that leads to rank 0 is certain to be right, so it is named to gloo then.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ddpkit.errors import ConfigError
from ddpkit.store import LOOPBACK_INTERFACE
from ddpkit.topology import is_loopback
from ddpkit.wording import shortened

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Interfaces that gloo uses, separated by commas."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_LENGTH_OF_NAME = 16
_ADDRESS_IN_ANSWER = slice(20, 24)
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")
_LINK_LOCAL = ("fe80:", "169.254.")
_ANY_PORT = 9


@dataclass(frozen=True)
class Network:
    """What a rank sees of its network."""

    host: str
    """Host name of this machine."""
    advertised: str | None
    """Address of this machine that its host name resolves to; None where it resolves to none."""
    master: str | None
    """Address that the host of rank 0 resolves to; None where it resolves to none."""
    route: str | None
    """Address of this machine from which that is reached; None where it cannot be."""
    interfaces: Mapping[str, Sequence[str]]
    """Addresses of each interface."""


# ------------------------------------------------------------------------------ pure decisions


def check_interfaces(setting: str, existing: Sequence[str]) -> None:
    """Refuse names of interfaces that this machine does not have.

    Args:
        setting: Value of the variable.
        existing: Names of this machine's interfaces.

    Raises:
        ConfigError: A name does not exist.

    Example:
        >>> check_interfaces("eth0", ["lo", "eth0"])
    """
    # `eth0:1` is an address of its own on eth0, which the list of interfaces does not have.
    wrong = [name for name in setting.split(",") if name.partition(":")[0] not in existing]
    if wrong:
        nccl = "" if "^" not in setting else " Names to leave out, by ^, are known to NCCL alone."
        raise ConfigError(
            f"{INTERFACE_VARIABLE}={setting!r} was given, but this machine has no interface "
            f"{shortened([repr(name) for name in wrong])}; it has {', '.join(existing)}.{nccl} Set "
            "it to the one that the other machines reach this one by, or leave it out."
        )


def choose_interface(network: Network, master: str) -> str | None:
    """Choose the interface that gloo has to use for other machines to reach this rank.

    Args:
        network: What this rank sees.
        master: Host of rank 0, for the message.

    Returns:
        Name of the interface; None where gloo's own choice is right.

    Raises:
        ConfigError: gloo's own choice would be loopback, and no other can be told.

    Example:
        >>> both = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]}
        >>> choose_interface(Network("b", "127.0.1.1", "10.0.0.1", "10.0.0.2", both), "a")
        'eth0'
        >>> choose_interface(Network("b", "10.0.0.2", "10.0.0.1", "10.0.0.2", both), "a")
    """
    if is_outside(network.advertised):
        return None
    if is_outside(network.route):
        found = _with_address(network.interfaces, network.route)
    else:  # rank 0's own host, where its name stands for loopback, too
        found = _with_reachable_address(network.interfaces)
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"Other machines cannot connect to this rank: its host name {network.host!r} "
        f"{_describe_advertised(network.advertised)}, and which interface leads to "
        f"{master!r} cannot be told from here. Set {INTERFACE_VARIABLE} on this machine to one of "
        f"{_describe_interfaces(network.interfaces)}."
    )


def is_outside(address: str | None) -> TypeGuard[str]:
    """Tell whether there is an address, and it is one that other machines may connect to."""
    return address is not None and not is_loopback(address)


def _with_address(interfaces: Mapping[str, Sequence[str]], address: str) -> list[str]:
    return [name for name, addresses in interfaces.items() if address in addresses]


def _with_reachable_address(interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for name, addresses in interfaces.items() if any(map(_is_reachable, addresses))]


def _is_reachable(address: str) -> bool:
    return is_outside(address) and not address.startswith(_LINK_LOCAL)


def _describe_advertised(advertised: str | None) -> str:
    if advertised is None:
        return "does not resolve to an address of this machine"
    return f"resolves to {advertised}, which is loopback"


def _describe_interfaces(interfaces: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(
        f"{name} ({', '.join(addresses) or 'no address'})"
        for name, addresses in interfaces.items()
        if name != LOOPBACK_INTERFACE
    )


# --------------------------------------------------------------------------------------- effects


def interface_names() -> list[str]:
    """List the network interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def look_at_network(master: str) -> Network:
    """Find out how this machine is reached.

    Sends nothing, except for questions to a name server.

    Args:
        master: Host of rank 0.
    """
    host = socket.gethostname()
    addresses = {name: _ipv4_addresses(name) for name in interface_names()}
    for name, address in _ipv6_addresses():
        addresses.setdefault(name, []).append(address)
    towards = [str(address[0]) for _, address in _resolve(master, socket.SOCK_DGRAM)]
    return Network(
        host=host,
        advertised=_usable_address(host),
        master=towards[0] if towards else None,
        route=_route_to(master),
        interfaces=addresses,
    )


def this_network() -> str:
    """Name what ranks share that reach each other by loopback; empty where that is not known."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        namespace = str(_NAMESPACE.readlink())
    except OSError:
        return ""
    # Machines that were made from one image while it ran have the same numbers, but not addresses.
    addresses = sorted(_ipv6_addresses())
    addresses += [(name, each) for name in interface_names() for each in _ipv4_addresses(name)]
    text = f"{boot} {namespace} {socket.gethostname()} {addresses}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def can_look() -> bool:
    """Tell whether the addresses of interfaces can be found out on this system."""
    return sys.platform == "linux"


def _usable_address(host: str) -> str | None:
    """Return the address that gloo takes for a host name: the first that is of this machine."""
    for family, address in _resolve(host, socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return str(address[0])
    return None


def _route_to(master: str) -> str | None:
    """Return the address of this machine that is used towards a host."""
    for family, address in _resolve(master, socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _resolve(
    host: str, kind: socket.SocketKind
) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=kind)
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def _ipv4_addresses(interface: str) -> list[str]:
    import fcntl  # not on every system that can import this module

    request = struct.pack("256s", interface.encode()[: _LENGTH_OF_NAME - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
        except OSError:  # it has none
            return []
    return [socket.inet_ntoa(answer[_ADDRESS_IN_ANSWER])]


def _ipv6_addresses() -> list[tuple[str, str]]:
    """List the IPv6 addresses of all interfaces, as pairs of name and address."""
    try:
        lines = _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
