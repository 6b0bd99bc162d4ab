"""The sockets that this process has open, also those that only C++ code knows of."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path("/dev/fd")


@dataclass(frozen=True)
class OpenSocket:
    """A socket that is open; one that takes the descriptor of another later is not equal to it."""

    descriptor: int
    """File descriptor."""
    inode: int
    """Number of the socket itself."""


def find_sockets(matches: Callable[[socket.socket], bool]) -> set[OpenSocket]:
    """List the open sockets of this process that match.

    Args:
        matches: Tells whether a socket is looked for. For one that it raises `OSError` of, such as
            for the peer of what is not connected, the answer is no.

    Returns:
        The sockets; none where the system does not list descriptors.
    """
    try:
        descriptors = [int(entry.name) for entry in _FOLDER.iterdir()]
    except OSError:
        return set()
    found = set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # such as the one that the listing itself had open
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and _does_match(descriptor, matches):
                found.add(OpenSocket(descriptor, status.st_ino))
    return found


def _does_match(descriptor: int, matches: Callable[[socket.socket], bool]) -> bool:
    with borrowed(descriptor) as connection:
        return matches(connection)


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Wrap the socket of somebody else for a block, and leave it as it was.

    With a default time-out Python would change whether it blocks.
    """
    blocking = os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        try:
            yield connection
        finally:
            os.set_blocking(descriptor, blocking)
