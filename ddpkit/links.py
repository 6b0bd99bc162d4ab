"""How long the other machine of a connection may be unreachable until the connection ends.

A machine that has lost its power or its network says nothing, and who waits for it waits until a
time-out of many minutes. But the kernel of a machine that is there answers, whatever the program on
it does: it may be stopped in a debugger, or in a long call. So the kernels are asked to look, and
then a collective or a call of the store that waits for a lost machine raises within seconds.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from ddpkit.sockets import OpenSocket, borrowed, find_sockets
from ddpkit.topology import is_loopback

LOST_AFTER = 15
"""Seconds without an answer after which a machine counts as lost; shorter outages are survived."""

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


class Links:
    """The connections to other machines that this process opens between the beginning and `end`."""

    def __init__(self) -> None:
        self._before = find_sockets(_leads_away)
        self._opened: set[OpenSocket] = set()

    def end(self) -> None:
        """Have the kernel end those that were opened when the other machine is silent."""
        self._opened = find_sockets(_leads_away) - self._before
        for opened in self._opened:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                _let_end(opened.descriptor)

    def have_broken(self) -> bool:
        """Tell whether one of them, or more, is connected no longer."""
        return not self._opened <= find_sockets(_leads_away)


@contextlib.contextmanager
def ended_when_unreachable() -> Iterator[Links]:
    """Let the connections to other machines end soon after those have gone that a block opens.

    Connections that were open before, and those within this machine, stay as they are. Where the
    system does not list descriptors, nothing is changed.

    Yields:
        These connections, which are known once the block is over.
    """
    links = Links()
    yield links
    links.end()


def _leads_away(connection: socket.socket) -> bool:
    if connection.type != socket.SOCK_STREAM:
        return False
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return here != there and not is_loopback(there.removeprefix("::ffff:"))


def _let_end(descriptor: int) -> None:
    with borrowed(descriptor) as connection:
        for name, level, value in _OPTIONS:
            if hasattr(socket, name):
                connection.setsockopt(level, getattr(socket, name), value)
