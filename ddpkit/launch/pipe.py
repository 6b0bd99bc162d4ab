"""Messages of any size over a socket, read without ever blocking on a process that stopped."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

CHECKED_IN = b"I"
USED_COMPILER = b"C"
RETURNED = b"R"
FAILED = b"F"
HOLDS = b"H"
STOPS = b"S"
THREADS = b"T"
GO = b"G"

_HEADER = struct.Struct("!cQ")
_READ_SIZE = 1 << 20


def send(descriptor: int, kind: bytes, payload: bytes = b"") -> None:
    """Write one message to a blocking descriptor."""
    _write_all(descriptor, _HEADER.pack(kind, len(payload)))
    _write_all(descriptor, payload)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_READ_SIZE]) :]


class Reader:
    """Collects the messages that arrive on a descriptor, which it makes non-blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._taken = 0
        self._ended = False

    def has_ended(self) -> bool:
        """Tell whether the other side has closed its end, and all it sent was read."""
        return self._ended

    @property
    def size(self) -> int:
        """Bytes taken so far."""
        return self._taken

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Take what is there, and yield the messages that are whole by now."""
        # A bounded number of reads, so that a flood from one rank does not starve the others.
        for _ in range(64):
            try:
                data = os.read(self._descriptor, _READ_SIZE)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._ended = True
                break
            self._buffer += data
            self._taken += len(data)
        yield from self._whole_messages()

    def _whole_messages(self) -> Iterator[tuple[bytes, bytes]]:
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                message = bytes(view[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, message
