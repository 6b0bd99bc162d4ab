import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ddpkit.launch import pipe


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def read_all(reader: pipe.Reader, count: int) -> list[tuple[bytes, bytes]]:
    messages: list[tuple[bytes, bytes]] = []
    while len(messages) < count and not reader.has_ended():
        messages += reader.read()
    return messages


def test_messages_arrive_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    pipe.send(theirs.fileno(), pipe.CHECKED_IN)
    pipe.send(theirs.fileno(), pipe.RETURNED, b"value")
    assert read_all(reader, 2) == [(b"I", b""), (b"R", b"value")]


def test_reading_does_not_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    reader = pipe.Reader(ends[0].fileno())
    assert list(reader.read()) == []
    assert not reader.has_ended()


@pytest.mark.parametrize("cut", [1, 8, 9, 10, 13])
def test_a_message_that_arrives_in_pieces(
    ends: tuple[socket.socket, socket.socket], cut: int
) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    message = pipe._HEADER.pack(pipe.FAILED, 5) + b"value"
    theirs.sendall(message[:cut])
    assert list(reader.read()) == []
    theirs.sendall(message[cut:])
    assert list(reader.read()) == [(pipe.FAILED, b"value")]
    assert reader.size == len(message)


def test_a_message_larger_than_any_buffer(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    payload = os.urandom(5 << 20)
    writer = threading.Thread(
        target=pipe.send, args=(theirs.fileno(), pipe.RETURNED, payload), daemon=True
    )
    writer.start()
    assert read_all(reader, 1) == [(pipe.RETURNED, payload)]
    writer.join()


def test_the_end_is_noticed_and_what_came_before_is_kept(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    pipe.send(theirs.fileno(), pipe.RETURNED, b"value")
    theirs.close()
    assert read_all(reader, 1) == [(pipe.RETURNED, b"value")]
    assert list(reader.read()) == []
    assert reader.has_ended()


def test_half_a_message_before_the_end_is_no_message(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    theirs.sendall(pipe._HEADER.pack(pipe.RETURNED, 5) + b"val")
    theirs.close()
    assert list(reader.read()) == []
    assert list(reader.read()) == []
    assert reader.has_ended()


def test_a_reset_connection_is_an_end(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    reader = pipe.Reader(ours.fileno())
    pipe.send(ours.fileno(), pipe.GO)
    theirs.close()  # with unread data on its side: the other side sees a reset
    assert list(reader.read()) == []
    assert reader.has_ended()
