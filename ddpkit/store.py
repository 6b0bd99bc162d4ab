"""TCP stores without a guessed port and without an unbounded wait."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from ddpkit.errors import GroupError
from ddpkit.sockets import OpenSocket, borrowed, find_sockets
from ddpkit.topology import is_loopback

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# The libuv server of torch 2.6 refuses a listening socket; that of 2.14 takes it (both run).
_LIBUV_ADOPTS_SOCKETS = TorchVersion(torch.__version__) >= "2.7"
_BACKLOG = 4096  # every rank may connect before the server accepts its first client
_PROBE_PAUSE = 0.05
_RESOLVER_VARIABLE = "RES_OPTIONS"
_NOTICE_AFTER = 3.0
_CONNECT_BOUND = 1.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a look at an address has found there."""

    what: str
    """For a message: `nobody listens`, or what answers instead of the store that was looked for."""
    store: TCPStore | None = None
    """A client of the store that was looked for, None where that is not there."""
    strange: bool = False
    """Whether something that does not answer as a store accepts connections there."""


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Bind and listen, so that no other process can take the port before a store serves on it.

    Args:
        host: Address to listen on.
        port: Port, or 0 for a free one.

    Returns:
        The listening socket.

    Raises:
        GroupError: The port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise GroupError(
            f"Rank 0 cannot serve its store on {host}:{port}, because another process holds that "
            "port. Set MASTER_PORT to a free port for all ranks."
        ) from error
    return listener


def serve(listener: socket.socket, timeout: float) -> TCPStore:
    """Serve a store on a listening socket, which is closed with the store.

    Args:
        listener: What `listen` returned; it belongs to the store afterwards.
        timeout: Bound in seconds of the store's own waits.

    Returns:
        The store; its server ends when the object does.
    """
    host, port = listener.getsockname()[:2]

    def start(use_libuv: bool) -> TCPStore:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=use_libuv,
        )

    try:
        return _open_in_thread(host, lambda: start(use_libuv=_LIBUV_ADOPTS_SOCKETS), timeout)
    finally:
        listener.close()


def bind_address(host: str) -> str:
    """Choose what a server listens on: loopback alone where its clients use loopback.

    Args:
        host: The host as the clients know it.

    Returns:
        An address of this machine, or the one that stands for all its addresses.
    """
    if host in ("localhost", "ip6-localhost"):
        return LOOPBACK
    if is_loopback(host):
        return host
    return "::" if ":" in host or _has_ipv6_alone(host) else "0.0.0.0"  # other machines connect


def _has_ipv6_alone(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def serve_kept(
    servers: MutableMapping[tuple[str, int], TCPStore], host: str, port: int, timeout: float
) -> TCPStore:
    """Serve a store until this process ends, for torch cannot close one that a group has used.

    Args:
        servers: The stores that this process serves, by address; a new one is added to it.
        host: The host as the clients know it.
        port: Port to serve on.
        timeout: Bound in seconds of the store's own waits.

    Returns:
        The store, which may have been there before.

    Raises:
        GroupError: The port is taken.
    """
    if (host, port) not in servers:
        servers[host, port] = serve(listen(bind_address(host), port), timeout)
    return servers[host, port]


def connect(
    host: str, port: int, timeout: float, notice: Callable[[], str] | None = None
) -> TCPStore:
    """Connect to a store that may not be served yet.

    Args:
        host: Host of the server.
        port: Port of the server.
        timeout: Seconds to wait for it.
        notice: Makes the text that is logged when the wait has taken a few seconds.

    Returns:
        A client.

    Raises:
        GroupError: Nothing accepts connections there within the time, or it is not a store.
    """
    deadline = time.monotonic() + timeout
    # TCPStore's own retries print stack frames and cannot be interrupted, so probe first.
    _await_server(host, port, timeout, notice)

    def open_client() -> TCPStore:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )

    try:
        # TCPStore waits without a bound for what accepts a connection and then says nothing.
        return _open_in_thread(host, open_client, max(1.0, deadline - time.monotonic()))
    except (RuntimeError, FutureTimeoutError) as error:
        reason = str(error).partition("\n")[0] or f"silent for {timeout:.0f} s"
        raise GroupError(
            f"What listens at {host}:{port} does not answer as a store does ({reason}). Does "
            "another program hold that port? Check MASTER_ADDR and MASTER_PORT."
        ) from error


def look_for(host: str, port: int, key: str, value: str, bound: float) -> Found:
    """Look whether the store that is wanted is at an address where anything may be.

    Only what says of itself that it is a store is read, and nothing is written to it.

    Args:
        host: Host of the server.
        port: Port of the server.
        key: Key that a store of a known launch has.
        value: What the wanted store holds there.
        bound: Seconds for an answer.

    Returns:
        What is there.
    """
    try:
        socket.create_connection((host, port), timeout=min(bound, _CONNECT_BOUND)).close()
    except ConnectionRefusedError:
        return Found("nobody listens")
    except OSError as error:
        return Found(f"cannot be reached: {error}")

    def ask() -> tuple[TCPStore, str | None]:
        within = timedelta(seconds=bound)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=within)
        return store, store.get(key).decode(errors="replace") if store.check([key]) else None

    before = _connections(port)
    try:
        store, found = _open_in_thread(host, ask, bound)
    except FutureTimeoutError:
        _hang_up(port, before)
        return Found("accepts connections and stays silent", strange=True)
    except RuntimeError:
        return Found("does not answer as a store", strange=True)
    if found == value:
        return Found("the store", store)
    return Found(f"the store of {found}" if found else "a store without a name")


def _connections(port: int) -> set[OpenSocket]:
    """Find the sockets of this process that are connected to a port."""

    def matches(connection: socket.socket) -> bool:
        peer = connection.getpeername()
        return isinstance(peer, tuple) and peer[1] == port

    return find_sockets(matches)


def _hang_up(port: int, before: set[OpenSocket]) -> None:
    """End the connections to a port that were opened since, so that who waits there goes on.

    A client of torch's waits in C without a bound; its thread would stay as long as the server.
    """
    for opened in _connections(port) - before:
        with contextlib.suppress(OSError), borrowed(opened.descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _open_in_thread(host: str, make: Callable[[], T], bound: float) -> T:
    """Make a store in a thread of its own, for a bound and for that thread's resolver."""
    opened: Future[T] = Future()

    def work() -> None:
        try:
            opened.set_result(make())
        except BaseException as error:  # noqa: BLE001  # it is raised again in the caller
            opened.set_exception(error)

    # The name of a server on another machine has to be found, however long that takes.
    local = host in ("localhost", "::1") or host.startswith("127.")
    with _impatient_resolver() if local else contextlib.nullcontext():
        threading.Thread(target=work, name="ddpkit-connect", daemon=True).start()
        return opened.result(bound)


@contextlib.contextmanager
def _impatient_resolver() -> Iterator[None]:
    """Let a new thread give up name look-ups early.

    torch's client asks for the name of the server's address, to log it: under the IPv6 form of the
    address, which /etc/hosts does not have, so that the question goes to a name server. Where one
    is lost, the usual 5 s of waiting are the store's (seen with 32 ranks that ask at once). Each
    thread reads this variable at its first look-up; those of the user keep what they have.
    """
    before = os.environ.get(_RESOLVER_VARIABLE)
    if before is None:
        os.environ[_RESOLVER_VARIABLE] = "timeout:1 attempts:1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_RESOLVER_VARIABLE, None)


def _await_server(host: str, port: int, timeout: float, notice: Callable[[], str] | None) -> None:
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        try:
            with contextlib.closing(socket.create_connection((host, port), timeout=2.0)):
                return
        except OSError as error:
            if waited > timeout:
                raise GroupError(
                    f"No store answers at {host}:{port} after {waited:.0f} s ({error}). Check that "
                    "rank 0 has started, and that MASTER_ADDR and MASTER_PORT are right."
                ) from error
            if notice is not None and waited > _NOTICE_AFTER:
                _logger.warning("%s (%s)", notice(), error)
                notice = None
        time.sleep(_PROBE_PAUSE)
