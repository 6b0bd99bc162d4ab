"""How long the other machine of a connection may be unreachable until the connection ends.

A machine that has lost its power or its network says nothing, and who waits for it waits until a
time-out of many minutes. But the kernel of a machine that is there answers, whatever the program on
it does: it may be stopped in a debugger, or in a long call. So the kernels are asked to look, and
then a collective or a call of the store that waits for a lost machine raises within seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from ddpkit.topology import is_loopback

LOST_AFTER = 15
"""Seconds without an answer after which a machine counts as lost; shorter outages are survived."""

_FOLDER = Path("/dev/fd")
_QUIET_FOR = 5  # seconds after which the kernel asks the other one whether it is there
_ASK_EVERY = 2
# What has been sent and not been acknowledged is a question, too. (Where it is not Linux, that is
# given up when the kernel thinks fit.)
_OPTIONS = (
    ("SO_KEEPALIVE", socket.SOL_SOCKET, 1),
    ("TCP_KEEPIDLE", socket.IPPROTO_TCP, _QUIET_FOR),
    ("TCP_KEEPINTVL", socket.IPPROTO_TCP, _ASK_EVERY),
    ("TCP_KEEPCNT", socket.IPPROTO_TCP, (LOST_AFTER - _QUIET_FOR) // _ASK_EVERY),
    ("TCP_USER_TIMEOUT", socket.IPPROTO_TCP, LOST_AFTER * 1000),
)


@contextlib.contextmanager
def ended_when_unreachable() -> Iterator[None]:
    """Let the connections to other machines end soon after those have gone that a block opens.

    Connections that were open before, and those within this machine, stay as they are. Where the
    system does not list descriptors, nothing is changed.
    """
    before = _connections()
    yield
    for descriptor in _connections() - before:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            _let_end(descriptor[0])


def _connections() -> set[tuple[int, int]]:
    """List the connections of this process to other machines: descriptor and inode."""
    try:
        descriptors = [int(entry.name) for entry in _FOLDER.iterdir()]
    except OSError:
        return set()
    found = set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # such as the one that the listing itself had open
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and _leads_away(descriptor):
                found.add((descriptor, status.st_ino))
    return found


def _leads_away(descriptor: int) -> bool:
    with _borrowed(descriptor) as connection:
        if connection.type != socket.SOCK_STREAM:
            return False
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        here, there = connection.getsockname()[0], connection.getpeername()[0]
        return here != there and not is_loopback(there.removeprefix("::ffff:"))


def _let_end(descriptor: int) -> None:
    with _borrowed(descriptor) as connection:
        for name, level, value in _OPTIONS:
            if hasattr(socket, name):
                connection.setsockopt(level, getattr(socket, name), value)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Wrap a descriptor of somebody else; with a default time-out Python would change its mode."""
    blocking = os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        try:
            yield connection
        finally:
            os.set_blocking(descriptor, blocking)
