"""Asking the resolver of names, which may take its time, and never waiting longer than a bound."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ddpkit.doctor.facts import Launcher, Lookup, Master, Names

T = TypeVar("T")

LOOKUP_BOUND = 5.0
"""Seconds after which a question counts as not answered."""

_LOOPBACK = "127.0.0.1"


def bounded(function: Callable[[], T], bound: float) -> T:
    """Call a function that may hang, and give up when the bound has passed.

    Args:
        function: What to call. It runs in a thread, which is left to itself then.
        bound: Seconds.

    Returns:
        What it returns.

    Raises:
        TimeoutError: The bound has passed.
        Exception: What the function raised.

    Example:
        >>> bounded(lambda: 1, 5.0)
        1
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # it is raised in the caller
            future.set_exception(error)

    threading.Thread(target=call, name="ddpkit doctor", daemon=True).start()
    try:
        return future.result(bound)
    except FutureTimeoutError:
        raise TimeoutError(f"there was no answer within {bound:g} s") from None


def look_up(host: str, bound: float = LOOKUP_BOUND) -> Lookup:
    """Ask what addresses a host has.

    Args:
        host: Its name.
        bound: Seconds to wait.
    """
    return _asked(host, lambda: _addresses(host), bound)


def look_up_address(address: str, bound: float = LOOKUP_BOUND) -> Lookup:
    """Ask what name an address has, as torch's store does for each connection.

    Args:
        address: The address.
        bound: Seconds to wait.
    """
    return _asked(address, lambda: [socket.getnameinfo((address, 0), 0)[0]], bound)


def _asked(asked: str, question: Callable[[], list[str]], bound: float) -> Lookup:
    begin = time.monotonic()
    answers: list[str] = []
    error, timed_out = None, False
    try:
        answers = bounded(question, bound)
    except socket.gaierror as problem:
        error = str(problem.strerror or problem)
    except TimeoutError as problem:
        error, timed_out = str(problem), True
    except (OSError, UnicodeError) as problem:  # a label of more than 63 letters, for one
        error = str(problem)
    return Lookup(asked, tuple(answers), time.monotonic() - begin, error, timed_out)


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def read_names() -> Names:
    """Ask for this host's own name, and for that of its loopback."""
    return Names(look_up(socket.gethostname()), look_up_address(_LOOPBACK))


def read_master(environ: Mapping[str, str], launcher: Launcher | None) -> Master | None:
    """Find out about the host of rank 0, and whether a store could be served there.

    Args:
        environ: Environment variables.
        launcher: What they tell of the launcher.

    Returns:
        None where nothing names a host or a port.
    """
    topology = launcher.topology if launcher is not None else None
    host = environ.get("MASTER_ADDR") or (topology.master_addr if topology else None)
    port = _port_of(environ.get("MASTER_PORT"))
    if host is None and port is None:
        return None
    lookup = look_up(host or _LOOPBACK)
    here = [address for address in lookup.answers if _bind_error(address, 0) is None]
    is_here = bool(here) if lookup.answers else None
    error = _bind_error(here[0], port) if here and port is not None else None
    return Master(lookup, is_here, port, error)


def _port_of(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) < 65_536 else None


def _bind_error(address: str, port: int) -> str | None:
    """Listen on a port for a moment; return what the system says against that."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    host, _, scope = address.partition("%")
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # As torch's store does: a connection that has just ended does not hold a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            scope_id = (0, socket.if_nametoindex(scope)) if scope else ()
            probe.bind((host, port, *scope_id))
            probe.listen(1)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "?") + ": " + os.strerror(error.errno or 0)
    return None
