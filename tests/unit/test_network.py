import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ddpkit import network
from ddpkit.errors import ConfigError
from ddpkit.network import (
    Network,
    can_look,
    check_interfaces,
    choose_interface,
    interface_names,
    is_outside,
    look_at_network,
    this_network,
)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's own files")

LO = {"lo": ["127.0.0.1", "::1"]}
ONE = {**LO, "eth0": ["10.0.0.2", "fe80::2"]}
TWO = {**ONE, "docker0": ["172.17.0.1"]}
IPV6 = {**LO, "eth0": ["fe80::2", "fd00::2"]}


def seen(
    advertised: str | None, route: str | None, interfaces: Mapping[str, Sequence[str]]
) -> Network:
    return Network("node2", advertised, "10.0.0.1", route, interfaces)


@pytest.mark.parametrize(
    ("view", "chosen"),
    [
        # The host name resolves to an address that others may connect to.
        (seen("10.0.0.2", "10.0.0.2", TWO), None),
        (seen("172.17.0.1", "10.0.0.2", TWO), None),  # as gloo has it; it may be meant so
        (seen("fd00::2", "fd00::2", IPV6), None),
        # It resolves to loopback, as in Debian's /etc/hosts, or not at all.
        (seen("127.0.1.1", "10.0.0.2", TWO), "eth0"),
        (seen("127.0.1.1", "172.17.0.1", TWO), "docker0"),
        (seen("::1", "fd00::2", IPV6), "eth0"),
        (seen(None, "10.0.0.2", TWO), "eth0"),
        # On the host of rank 0 its name stands for loopback, too.
        (seen("127.0.1.1", "127.0.0.1", ONE), "eth0"),
        (seen("127.0.1.1", None, ONE), "eth0"),
        (seen(None, "::1", IPV6), "eth0"),
    ],
)
def test_choice_of_interface(view: Network, chosen: str | None) -> None:
    assert choose_interface(view, "node1") == chosen


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (seen("127.0.1.1", "127.0.0.1", TWO), "resolves to 127.0.1.1, which is loopback"),
        (seen(None, "127.0.0.1", TWO), "does not resolve to an address of this machine"),
        (seen("127.0.1.1", "10.9.9.9", TWO), "127.0.1.1"),  # an address that no interface has
        (seen("127.0.1.1", None, LO), "127.0.1.1"),
        (seen("127.0.1.1", None, {**LO, "eth0": ["fe80::2"]}), "127.0.1.1"),
    ],
)
def test_where_it_cannot_be_told_the_interfaces_are_listed(view: Network, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_interface(view, "node1")
    text = str(caught.value)
    assert "'node2'" in text
    assert why in text
    assert "'node1'" in text
    assert "GLOO_SOCKET_IFNAME" in text
    for name, addresses in view.interfaces.items():
        assert (f"{name} ({', '.join(addresses)})" in text) == (name != "lo")


@pytest.mark.parametrize("setting", ["eth0", "lo", "lo,eth0", "eth0:1"])
def test_interfaces_that_exist(setting: str) -> None:
    check_interfaces(setting, ["lo", "eth0"])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("eth1", "'eth1'"),
        ("eth0,ib0", "'ib0'"),
        ("eth", "'eth'"),
        ("", "''"),
        ("eth0, lo", "' lo'"),
    ],
)
def test_interfaces_that_do_not_exist_are_named(setting: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_interfaces(setting, ["lo", "eth0"])
    text = str(caught.value)
    assert text.startswith(f"GLOO_SOCKET_IFNAME={setting!r} was given, but ")
    assert f"no interface {named}; it has lo, eth0" in text
    assert "NCCL" not in text


def test_the_way_to_leave_out_interfaces_is_that_of_nccl() -> None:
    with pytest.raises(ConfigError, match=r"it has lo, eth0\..* known to NCCL alone"):
        check_interfaces("^lo,docker", ["lo", "eth0"])


@pytest.mark.parametrize(
    ("address", "outside"),
    [("10.0.0.1", True), ("127.0.1.1", False), ("::1", False), (None, False)],
)
def test_addresses_for_other_machines(address: str | None, outside: bool) -> None:
    assert is_outside(address) is outside


# --------------------------------------------------------------------------------------- effects


@on_linux
def test_this_machine_as_it_is() -> None:
    assert can_look()
    assert "lo" in interface_names()
    view = look_at_network("127.0.0.1")
    assert view.host == socket.gethostname()
    assert "127.0.0.1" in view.interfaces["lo"]
    assert (view.master, view.route) == ("127.0.0.1", "127.0.0.1")


@on_linux
def test_the_route_to_a_host_is_the_address_of_an_interface() -> None:
    for addresses in look_at_network("127.0.0.1").interfaces.values():
        for address in addresses:
            if ":" not in address:
                view = look_at_network(address)
                assert (view.master, view.route) == (address, address)


@on_linux
def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    view = look_at_network("node1")
    assert (view.advertised, view.master, view.route) == (None, None, None)


@on_linux
@pytest.mark.parametrize(
    ("resolved", "advertised"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["192.0.2.1"], None),  # an address for documentation, which no machine has
        (["192.0.2.1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_host_name_counts_as_gloo_takes_it(
    resolved: list[str], advertised: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert look_at_network("node1").advertised == advertised


@on_linux
def test_processes_of_one_network_share_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_network()
    assert here
    assert this_network() == here
    monkeypatch.setattr(network, "_ipv4_addresses", lambda name: ["10.0.0.7"])
    assert this_network() != here  # a copy of this machine, made while it ran


def test_a_system_that_does_not_tell_its_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "_NAMESPACE", tmp_path / "nothing")
    assert this_network() == ""
