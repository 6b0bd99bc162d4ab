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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from ddpkit.errors import GroupError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# The libuv server of torch 2.6 refuses a listening socket; that of 2.14 takes it (both run).
_LIBUV_ADOPTS_SOCKETS = TorchVersion(torch.__version__) >= "2.7"
_BACKLOG = 4096  # every rank may connect before the server accepts its first client
_PROBE_PAUSE = 0.05
_RESOLVER_VARIABLE = "RES_OPTIONS"
_NOTICE_AFTER = 3.0

_logger = logging.getLogger(__name__)


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


def _open_in_thread(host: str, make: Callable[[], TCPStore], bound: float) -> TCPStore:
    """Make a store in a thread of its own, for a bound and for that thread's resolver."""
    opened: Future[TCPStore] = Future()

    def work() -> None:
        try:
            opened.set_result(make())
        except BaseException as error:  # noqa: BLE001  # it is raised again in the caller
            opened.set_exception(error)

    # The name of a server on another machine has to be found, however long that takes.
    local = host == "localhost" or host.startswith("127.")
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
            _logger.warning(notice())
            notice = None
        time.sleep(_PROBE_PAUSE)
