import logging
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ddpkit import store as stores
from ddpkit.errors import GroupError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_served_store_answers_its_clients() -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=10)
    client = stores.connect("127.0.0.1", port, timeout=10)
    server.set("key", "value")
    assert client.get("key") == b"value"


def test_it_listens_on_the_loopback_alone() -> None:
    with stores.listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_it_serves_on_the_socket_that_it_was_given() -> None:
    listener = stores.listen()
    address = listener.getsockname()
    server = stores.serve(listener, timeout=10)
    assert listening_sockets(address[1]) == ["0100007F"]  # 127.0.0.1 in the kernel's notation
    assert server.port == address[1]
    assert listener.fileno() == -1


def listening_sockets(port: int) -> list[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [host for host, number in addresses if int(number, 16) == port]


def resolve_by_name(host: str, *args: Any, **options: Any) -> list[Any]:
    if host == "unknown":
        raise socket.gaierror("Name or service not known")
    families = {"only-ipv6": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET]}
    return [(family, None, None, "", ()) for family in families.get(host, [socket.AF_INET])]


@pytest.mark.parametrize(
    ("master", "listened"),
    [
        ("localhost", "127.0.0.1"),
        ("ip6-localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1"),
        ("::1", "::1"),
        ("node0", "0.0.0.0"),
        ("10.0.0.1", "0.0.0.0"),
        ("fe80::1", "::"),
        ("only-ipv6", "::"),
        ("both", "0.0.0.0"),
        ("unknown", "0.0.0.0"),
    ],
)
def test_address_to_listen_on(master: str, listened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolve_by_name)
    assert stores.bind_address(master) == listened


def test_the_port_is_free_again_when_the_store_is_gone() -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=10)
    del server
    stores.listen(port=port).close()


def test_a_taken_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(GroupError, match=rf"127\.0\.0\.1:{other.getsockname()[1]}.*MASTER_PORT"),
    ):
        stores.listen(port=other.getsockname()[1])


def test_a_port_of_ipv6() -> None:
    try:
        listener = stores.listen("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert listener.getsockname()[0] == "::1"


def test_another_error_of_the_system_is_not_called_a_taken_port() -> None:
    with pytest.raises(OSError, match=r"[Cc]annot assign"):
        stores.listen("192.0.2.1")  # an address for documentation, which no machine has


def test_nothing_there_is_an_error_within_the_time() -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(GroupError, match=rf"No store answers at 127\.0\.0\.1:{port} after"):
        stores.connect("127.0.0.1", port, timeout=0.3)
    assert time.monotonic() - started < 10


def test_an_unknown_host_is_an_error_within_the_time() -> None:
    with pytest.raises(GroupError, match=r"No store answers at no\.such\.host\.invalid:1 after"):
        stores.connect("no.such.host.invalid", 1, timeout=0.3)


def test_another_program_on_the_port_is_an_error_within_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(GroupError, match=rf"127\.0\.0\.1:{port} does not answer as a store"):
            stores.connect("127.0.0.1", port, timeout=0.3)


def test_a_server_may_start_later_than_its_client() -> None:
    port = free_port()
    servers: list[TCPStore] = []

    def serve() -> None:
        waiting.wait(20)
        servers.append(stores.serve(stores.listen(port=port), timeout=10))

    waiting = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    refused = socket.socket()
    with refused, pytest.raises(ConnectionRefusedError):
        refused.connect(("127.0.0.1", port))
    waiting.set()
    client = stores.connect("127.0.0.1", port, timeout=20)
    thread.join()
    client.set("key", "value")
    assert servers[0].get("key") == b"value"


def test_a_long_wait_says_once_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "_NOTICE_AFTER", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(GroupError):
        stores.connect("127.0.0.1", free_port(), 0.5, lambda: "waiting for rank 0")
    (message,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(r"waiting for rank 0 \(.*refused\)", message)  # and why it waits


# ------------------------------------------------------------------------------ looking for a store


def test_the_store_that_is_looked_for() -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=10)
    server.set("name", "mine")
    found = stores.look_for("127.0.0.1", port, "name", "mine", 10.0)
    assert found.store is not None
    assert found.store.get("name") == b"mine"


def test_a_look_at_what_is_not_the_store() -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=10)

    def look() -> stores.Found:
        return stores.look_for("127.0.0.1", port, "name", "mine", 10.0)

    assert look() == stores.Found("a store without a name")
    server.set("name", "yours")
    assert look() == stores.Found("the store of yours")
    del server
    assert look() == stores.Found("nobody listens")


def test_a_look_at_a_silent_program_ends_its_own_connection_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        mine = socket.create_connection(("127.0.0.1", port))
        with mine, silent.accept()[0] as theirs:
            found = stores.look_for("127.0.0.1", port, "name", "mine", 0.3)
            assert found.strange
            theirs.sendall(b"still here")
            assert mine.recv(100) == b"still here"


# --------------------------------------------------------------------------------- name look-ups


@pytest.mark.parametrize("of_user", [None, "timeout:9"])
def test_a_store_on_this_machine_does_not_wait_for_a_name_server(
    monkeypatch: pytest.MonkeyPatch, of_user: str | None
) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    if of_user is not None:
        monkeypatch.setenv("RES_OPTIONS", of_user)
    seen = []

    def make(*args: Any, **options: Any) -> str:
        seen.append(os.environ.get("RES_OPTIONS"))
        return "store"

    monkeypatch.setattr(stores, "TCPStore", make)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client: object = stores.connect("127.0.0.1", server.getsockname()[1], 5.0)
    assert client == "store"
    assert seen == [of_user or "timeout:1 attempts:1"]
    assert os.environ.get("RES_OPTIONS") == of_user
