import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from ddpkit import links
from ddpkit.links import LOST_AFTER, ended_when_unreachable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there is 127.0.0.2, too")


@pytest.fixture
def _loopback_leads_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "is_loopback", lambda host: False)


@contextlib.contextmanager
def connected(to: str = "127.0.0.2") -> Iterator[socket.socket]:
    """Connect to another address of this machine."""
    with (
        socket.create_server((to, 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as here,
        server.accept()[0],
    ):
        yield here


def is_watched(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@pytest.mark.usefixtures("_loopback_leads_away")
def test_a_connection_that_a_block_opens_ends_when_the_other_machine_is_unreachable() -> None:
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable():
            opened = stack.enter_context(connected())
            assert not is_watched(opened)
        assert is_watched(opened)
        bound = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert bound == LOST_AFTER * 1000
        silent = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        every = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        times = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert silent + every * times == LOST_AFTER


@pytest.mark.usefixtures("_loopback_leads_away")
def test_a_connection_that_was_open_before_stays_as_it_is() -> None:
    with connected() as earlier:
        with ended_when_unreachable():
            pass
        assert not is_watched(earlier)


@pytest.mark.usefixtures("_loopback_leads_away")
def test_what_is_no_connection_is_left_alone() -> None:
    pair = socket.socketpair()
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable():
            others = [*pair, socket.socket(), socket.socket(type=socket.SOCK_DGRAM)]
            others.append(socket.create_server(("127.0.0.1", 0)))
            for other in others:
                stack.enter_context(other)
            others[3].connect(("127.0.0.2", 9))
        assert not any(map(is_watched, others))


def test_a_connection_within_this_machine_is_left_alone() -> None:
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable():
            opened = stack.enter_context(connected())
        assert not is_watched(opened)


@pytest.mark.usefixtures("_loopback_leads_away")
def test_the_mode_of_a_descriptor_is_kept() -> None:
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable():
            opened = stack.enter_context(connected())
            # With it every socket that Python makes of a descriptor stops blocking.
            socket.setdefaulttimeout(5.0)
            stack.callback(socket.setdefaulttimeout, None)
        assert is_watched(opened)
        assert opened.getblocking()
        assert os.get_blocking(opened.fileno())


@pytest.mark.usefixtures("_loopback_leads_away")
def test_a_connection_that_has_broken_is_noticed() -> None:
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable() as links:
            opened, other = stack.enter_context(connected()), stack.enter_context(connected())
        assert not links.have_broken()
        other.shutdown(socket.SHUT_WR)  # half of it goes on
        assert not links.have_broken()
        opened.close()
        assert links.have_broken()


@pytest.mark.usefixtures("_loopback_leads_away")
def test_a_connection_that_was_made_later_may_end() -> None:
    with contextlib.ExitStack() as stack:
        with ended_when_unreachable() as links:
            stack.enter_context(connected())
        with connected():
            pass
        assert not links.have_broken()
