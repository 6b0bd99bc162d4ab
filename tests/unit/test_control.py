import dataclasses
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store

from ddpkit import control
from ddpkit import store as stores
from ddpkit.control import Channel, Departure, Member, is_gone, this_member
from ddpkit.errors import GroupError, PeerError
from ddpkit.serialize import load_value

MakeChannel = Callable[..., Channel]


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def make_channel(store: HashStore) -> Iterator[MakeChannel]:
    """Open channels over one store in this process, each as another rank."""
    opened = []

    def make(rank: int, world_size: int = 2, *, over: Store = store, **changes: Any) -> Channel:
        settings = {"label": "world", "secret": b"secret", "bound": 10.0, **changes}
        channel = Channel(over, rank=rank, world_size=world_size, **settings)
        opened.append(channel)
        return channel

    yield make
    for channel in opened:
        channel.close()


@pytest.fixture
def channel(make_channel: MakeChannel) -> Channel:
    return make_channel(0)


def wait(
    channel: Channel,
    awaited: Sequence[int],
    *,
    ready: Callable[[], bool] = lambda: False,
    timeout: float | None = 20.0,
    notice_after: float = 60.0,
    notice: Callable[[Sequence[int]], None] = lambda ranks: None,
) -> bool:
    return channel.wait(
        ready, lambda: awaited, timeout=timeout, notice_after=notice_after, notice=notice
    )


# ------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5])
def test_a_message_arrives(make_channel: MakeChannel, payload: bytes) -> None:
    make_channel(0).publish("key", payload)
    assert make_channel(1).fetch("key") == payload


def test_a_message_that_is_not_there_yet(channel: Channel) -> None:
    assert channel.fetch("key") is None


def test_a_later_message_replaces_an_earlier_one(channel: Channel) -> None:
    channel.publish("key", b"first")
    channel.publish("key", b"second")
    assert channel.fetch("key") == b"second"


def test_a_deleted_message_is_gone(channel: Channel, store: HashStore) -> None:
    before = store.num_keys()
    channel.publish("key", b"x")
    channel.delete("key")
    assert channel.fetch("key") is None
    assert store.num_keys() == before


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CHUNK", 10)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [9, 10, 11, 20, 35])
def test_a_large_message_arrives_whole(make_channel: MakeChannel, size: int) -> None:
    payload = bytes(range(size))
    make_channel(0).publish("key", payload)
    assert make_channel(1).fetch("key") == payload


@pytest.mark.usefixtures("small_chunks")
def test_all_parts_of_a_large_message_are_deleted(
    make_channel: MakeChannel, store: HashStore
) -> None:
    writer, reader = make_channel(0), make_channel(1)
    before = store.num_keys()
    writer.publish("key", bytes(35))
    assert store.num_keys() == before + 5
    reader.fetch("key")
    reader.delete("key")
    assert store.num_keys() == before


class SlowStore(HashStore):
    """Takes its time for each part of a message."""

    def set(self, key: str, value: str) -> None:
        time.sleep(0.2 if "/" in key and key.startswith("key") else 0)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        time.sleep(0.2 if "/" in key and key.startswith("key") else 0)
        return super().get(key)


@pytest.mark.usefixtures("small_chunks")
def test_a_large_message_may_take_longer_than_the_bound_of_an_answer(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HEARTBEAT_EVERY", 0.1)
    store = SlowStore()
    channel = make_channel(0, over=store, bound=0.9, heartbeat=True)
    channel.publish("key", bytes(60))
    assert beats_of(store, 0) >= 3  # nobody takes this rank for dead meanwhile
    assert channel.fetch("key") == bytes(60)


def test_no_part_of_a_message_exceeds_what_the_store_takes() -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=20)
    channel = Channel(
        stores.connect("127.0.0.1", port, 20),
        rank=0,
        world_size=2,
        label="world",
        secret=b"",
        bound=20.0,
    )
    payload = os.urandom(9 << 20)  # one message of this size closes the connection
    channel.publish("key", payload)
    assert channel.fetch("key") == payload
    channel.close()
    del server


@pytest.mark.usefixtures("small_chunks")
def test_the_last_reader_deletes(make_channel: MakeChannel, store: HashStore) -> None:
    channels = [make_channel(rank, 3) for rank in range(3)]
    before = store.num_keys()
    channels[0].publish("key", bytes(35))
    for channel in channels[1:]:
        assert store.check(["key"])
        assert channel.fetch("key") == bytes(35)
        channel.delete_when_read("key", "read", readers=2)
        channel.fetch("key")  # calls are made in order, so the note is taken when this returns
    assert store.num_keys() == before


# ---------------------------------------------------------------------------------- signatures

unpickled: list[str] = []


class Trap:
    """Tells when it is unpickled."""

    def __reduce__(self) -> Any:
        return spring, ()


def spring() -> None:
    unpickled.append("sprung")


@pytest.fixture
def trap() -> Iterator[bytes]:
    unpickled.clear()
    yield pickle.dumps(Trap())
    assert unpickled == []


def test_the_trap_works() -> None:
    unpickled.clear()
    load_value(pickle.dumps(Trap()))
    assert unpickled == ["sprung"]


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "unsigned": lambda payload: payload,
    "zero signature": lambda payload: bytes(36) + payload,
    "too short": lambda payload: b"x",
    "empty": lambda payload: b"",
}
each_forgery = pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)


@each_forgery
def test_a_forged_message_is_not_read(
    channel: Channel, store: HashStore, trap: bytes, forge: Callable[[bytes], bytes]
) -> None:
    control._set(store, "key", forge(trap))
    with pytest.raises(GroupError, match=r"'key'.*not signed.*DDPKIT_SECRET"):
        channel.fetch("key")


@each_forgery
def test_a_forged_member_is_not_unpickled(
    channel: Channel, store: HashStore, trap: bytes, forge: Callable[[bytes], bytes]
) -> None:
    control._set(store, "member/1", forge(trap))
    with pytest.raises(GroupError, match="not signed"):
        channel.absent([1])


@each_forgery
def test_a_forged_departure_is_not_unpickled(
    channel: Channel, store: HashStore, trap: bytes, forge: Callable[[bytes], bytes]
) -> None:
    control._set(store, "left/1", forge(trap))
    control._set(store, "left", b"1")
    with pytest.raises(GroupError, match="not signed"):
        channel.departures()


def test_an_altered_message_is_not_read(channel: Channel, store: HashStore) -> None:
    channel.publish("key", b"payload")
    for position in range(len(b"payload") + 32):
        message = bytearray(store.get("key"))
        message[-1 - position] ^= 1
        control._set(store, "key", bytes(message))
        with pytest.raises(GroupError, match="not signed"):
            channel.fetch("key")
        message[-1 - position] ^= 1
        control._set(store, "key", bytes(message))
    assert channel.fetch("key") == b"payload"


@pytest.mark.usefixtures("small_chunks")
def test_a_message_with_an_altered_part_is_not_read(channel: Channel, store: HashStore) -> None:
    channel.publish("key", bytes(35))
    control._set(store, "key/2", b"0123456789")
    with pytest.raises(GroupError, match="not signed"):
        channel.fetch("key")


@pytest.mark.usefixtures("small_chunks")
def test_a_message_with_exchanged_parts_is_not_read(channel: Channel, store: HashStore) -> None:
    channel.publish("key", bytes(range(20)))
    first, second = store.get("key/0"), store.get("key/1")
    control._set(store, "key/0", second)
    control._set(store, "key/1", first)
    with pytest.raises(GroupError, match="not signed"):
        channel.fetch("key")


def test_a_message_is_not_read_under_another_key(channel: Channel, store: HashStore) -> None:
    channel.publish("out/1", b"payload")
    control._set(store, "out/2", store.get("out/1"))
    with pytest.raises(GroupError, match=r"'out/2'.*not signed"):
        channel.fetch("out/2")


@pytest.mark.parametrize("changes", [{"label": "later world"}, {"secret": b"other"}])
def test_a_message_of_another_world_or_launch_is_not_read(
    make_channel: MakeChannel, changes: dict[str, Any]
) -> None:
    make_channel(0).publish("key", b"payload")
    other = make_channel(1, **changes)
    with pytest.raises(GroupError, match="not signed"):
        other.fetch("key")


def test_names_and_payloads_cannot_flow_into_each_other(make_channel: MakeChannel) -> None:
    first, second = make_channel(0, label="a"), make_channel(1, label="ab")
    assert first._sign("bc", 0, b"d") != second._sign("c", 0, b"d")
    assert first._sign("b", 0, b"cd") != first._sign("bc", 0, b"d")


# ------------------------------------------------------------------------------ who is alive


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def member_of(pid: int) -> Member:
    started = control._process_start(pid)
    assert started
    return dataclasses.replace(this_member(), pid=pid, started=started)


def end_as_zombie(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_this_process_is_alive() -> None:
    assert not is_gone(this_member())


def test_a_running_process_is_alive(other_process: subprocess.Popen[bytes]) -> None:
    assert not is_gone(member_of(other_process.pid))


def test_a_stopped_process_is_alive(other_process: subprocess.Popen[bytes]) -> None:
    other_process.send_signal(signal.SIGSTOP)
    assert not is_gone(member_of(other_process.pid))


def test_an_ended_process_is_gone(other_process: subprocess.Popen[bytes]) -> None:
    member = member_of(other_process.pid)
    other_process.kill()
    other_process.wait()
    assert is_gone(member)


def test_a_zombie_is_gone(other_process: subprocess.Popen[bytes]) -> None:
    member = member_of(other_process.pid)
    end_as_zombie(other_process)
    assert is_gone(member)


def test_a_process_with_a_recycled_id_is_another_one() -> None:
    assert is_gone(dataclasses.replace(this_member(), started="1"))


@pytest.mark.parametrize(
    "changes", [{"machine": "elsewhere"}, {"machine": ""}, {"started": ""}], ids=str
)
def test_nothing_is_known_of_a_process_that_cannot_be_seen(changes: dict[str, str]) -> None:
    assert not is_gone(dataclasses.replace(this_member(), pid=2**22 + 1, **changes))


def test_a_name_with_spaces_and_brackets_does_not_confuse(
    other_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = ["S", *map(str, range(1, 19)), "777", "20"]
    text = f"{other_process.pid} (a) Z (b c) {' '.join(fields)}"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    assert control._process_start(other_process.pid) == "777"


# ---------------------------------------------------------------------------------- members


def test_members_that_have_not_joined(make_channel: MakeChannel) -> None:
    first = make_channel(0, 3)
    assert first.absent([1, 2]) == [1, 2]
    make_channel(2, 3)
    assert first.absent([1, 2]) == [1]


def join_as(make_channel: MakeChannel, member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 join with this description of its process."""
    with monkeypatch.context() as patch:
        patch.setattr(control, "this_member", lambda: member)
        make_channel(1, 3)


def test_a_wait_for_an_ended_process_ends_with_its_name(
    make_channel: MakeChannel,
    other_process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, member_of(other_process.pid), monkeypatch)
    end_as_zombie(other_process)
    message = rf"\[rank 0/3\] Rank 1 \(process {other_process.pid} .* ended without a word"
    with pytest.raises(PeerError, match=message) as caught:
        wait(channel, [1], timeout=None)
    assert caught.value.rank == 1


def test_an_ended_process_that_is_not_awaited_does_not_matter(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), started="1"), monkeypatch)
    make_channel(2, 3)
    assert not wait(channel, [2], timeout=0.8)


def test_what_an_ended_process_left_counts(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, this_member(), monkeypatch)

    def ends_right_after_its_answer(member: Member) -> bool:
        channel.publish("answer", b"x")
        return True

    monkeypatch.setattr(control, "is_gone", ends_right_after_its_answer)
    assert wait(channel, [1], ready=lambda: channel.fetch("answer") is not None)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_HEARTBEAT_LIMIT", 0.3)
    monkeypatch.setattr(control, "_LIVENESS_EVERY", 0.05)


@pytest.mark.usefixtures("short_limit")
def test_a_remote_rank_without_heartbeats_is_lost(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), machine="elsewhere"), monkeypatch)
    with pytest.raises(PeerError, match="Rank 1"):
        wait(channel, [1], timeout=None)


@pytest.fixture
def silent_channel(make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch) -> Channel:
    """Rank 0's end; rank 1 is on another machine and gives no signs of life."""
    monkeypatch.setattr(control, "_CUT_OFF_LIMIT", 0.3)
    monkeypatch.setattr(control, "_LIVENESS_EVERY", 0.05)
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), machine="elsewhere"), monkeypatch)
    return channel


def test_a_silent_rank_whose_connection_has_broken_is_lost(silent_channel: Channel) -> None:
    silent_channel.observe_links(lambda: True)
    with pytest.raises(PeerError, match="or its machine cannot be reached"):
        wait(silent_channel, [1], timeout=None)


def test_a_silent_rank_whose_connections_hold_is_awaited(silent_channel: Channel) -> None:
    silent_channel.observe_links(lambda: False)
    assert not wait(silent_channel, [1], timeout=1.2)


@pytest.mark.usefixtures("short_limit")
def test_a_remote_rank_with_heartbeats_is_awaited(
    make_channel: MakeChannel, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), machine="elsewhere"), monkeypatch)

    def beat() -> bool:
        store.set("beat/1", str(time.monotonic()))
        return False

    assert not wait(channel, [1], ready=beat, timeout=1.2)


def beats_of(store: HashStore, rank: int) -> int:
    return int(store.get(f"beat/{rank}")) if store.check([f"beat/{rank}"]) else 0


def await_true(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


def test_an_idle_rank_gives_signs_of_life(
    make_channel: MakeChannel, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HEARTBEAT_EVERY", 0.02)
    make_channel(1, heartbeat=True)
    await_true(lambda: beats_of(store, 1) > 2, "no heartbeats")


def test_a_waiting_rank_gives_signs_of_life(
    make_channel: MakeChannel, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It calls the store every few milliseconds, so its helper thread is never idle for long.
    monkeypatch.setattr(control, "_HEARTBEAT_EVERY", 0.2)
    make_channel(0)
    waiting = make_channel(1, heartbeat=True)
    assert wait(
        waiting, [0], ready=lambda: waiting.fetch("answer") is not None or beats_of(store, 1) > 1
    )


def test_no_heartbeats_where_nobody_needs_them(
    make_channel: MakeChannel, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HEARTBEAT_EVERY", 0.01)
    beating, quiet = make_channel(0, heartbeat=True), make_channel(1)
    await_true(lambda: beats_of(store, 0) > 2, "no heartbeats")
    assert beats_of(store, 1) == 0
    assert beating.rank != quiet.rank


# ------------------------------------------------------------------------- a store that is gone


def test_a_server_whose_process_has_ended_is_named(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), started="1"), monkeypatch)
    channel.check_server(1)  # of which this rank has not read who it is
    channel.absent([1])
    with pytest.raises(PeerError, match=r"Rank 1 \(.* has ended, and with it the store"):
        channel.check_server(1)


def test_a_server_that_runs_is_not(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, this_member(), monkeypatch)
    channel.absent([1])
    channel._cut_off = True
    channel.check_server(1)


@pytest.mark.parametrize("failed", [True, False])
def test_a_server_that_had_left_before_is_named_only_if_it_had_failed(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), started="1"), monkeypatch)
    channel.absent([1])
    make_channel(2, 3).leave(Departure(1, "node1", failed, "KeyError: 'x'"))
    channel.departures()
    if failed:
        with pytest.raises(PeerError, match="KeyError: 'x'"):
            channel.check_server(1)
    else:
        channel.check_server(1)


def test_a_server_elsewhere_has_ended_if_its_connection_was_closed(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, dataclasses.replace(this_member(), machine="elsewhere"), monkeypatch)
    channel.absent([1])

    def fail(*args: object) -> None:
        raise errors.pop()

    errors: list[Exception] = [DistNetworkError("broken"), GroupError("has not answered")]
    monkeypatch.setattr(channel._thread, "call", fail)
    with pytest.raises(GroupError, match="not answered"):
        channel.fetch("key")
    channel.check_server(1)
    with pytest.raises(GroupError, match="broken"):
        channel.fetch("key")
    with pytest.raises(PeerError, match="Rank 1"):
        channel.check_server(1)


def test_a_store_that_is_gone_is_not_asked_again(channel: Channel) -> None:
    asked = 0

    def ask(store: Store) -> None:
        nonlocal asked
        asked += 1
        raise DistNetworkError("broken")

    for _ in range(3):
        with pytest.raises(GroupError, match="has gone: broken"):
            channel._call(ask)
    assert asked == 1  # torch prints its C++ frames each time


# -------------------------------------------------------------------------------- departures


def test_departures(make_channel: MakeChannel) -> None:
    first, second = make_channel(0), make_channel(1)
    assert first.departures() == []
    departure = Departure(1, "node1", True, "KeyError: 'x'", "Traceback ...")
    second.leave(departure)
    assert first.departures() == [departure]


def test_a_wait_ends_when_a_rank_has_failed(make_channel: MakeChannel) -> None:
    first, second = make_channel(0, 3), make_channel(2, 3)
    second.leave(Departure(2, "node1", True, "KeyError: 'x'", "Traceback ..."))
    message = r"\[rank 0/3\] Rank 2 on node1 failed .*KeyError: 'x'"
    with pytest.raises(PeerError, match=message) as caught:
        wait(first, [1], timeout=None)
    assert (caught.value.rank, caught.value.traceback) == (2, "Traceback ...")


def test_a_wait_ends_when_the_awaited_rank_has_left(make_channel: MakeChannel) -> None:
    first, second = make_channel(0), make_channel(1)
    second.leave(Departure(1, "node1", False))
    with pytest.raises(GroupError, match="waits for rank 1, which has already left the group"):
        wait(first, [1], timeout=None)


def test_a_rank_that_left_in_order_and_is_not_awaited_does_not_matter(
    make_channel: MakeChannel,
) -> None:
    first, second = make_channel(0, 3), make_channel(2, 3)
    make_channel(1, 3)
    second.leave(Departure(2, "node1", False))
    assert not wait(first, [1], timeout=0.2)


def test_a_rank_that_left_by_an_exception_has_ended_only_when_it_says_so(
    make_channel: MakeChannel,
) -> None:
    first, second = make_channel(0), make_channel(1)
    departure = Departure(1, "node1", True, "KeyError: 'x'")
    second.leave(departure)
    first.check_ends()
    with pytest.raises(PeerError, match="KeyError: 'x'"):
        first.check_processes()
    second.leave(dataclasses.replace(departure, ended=True))
    with pytest.raises(PeerError, match="KeyError: 'x'"):
        first.check_ends()


def test_a_rank_that_left_by_an_exception_and_whose_process_is_gone_has_ended(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (make_channel(rank, 3) for rank in range(3))
    second.leave(Departure(1, "node1", True, "KeyError: 'x'"))
    third.leave(Departure(2, "node1", False))
    monkeypatch.setattr(control, "is_gone", lambda member: True)
    with pytest.raises(PeerError, match="KeyError: 'x'"):
        first.check_ends()
    monkeypatch.setattr(control, "is_gone", lambda member: False)
    with pytest.raises(PeerError, match="KeyError: 'x'"):
        third.check_ends()  # which would not see it by itself from another machine


def test_a_rank_that_ended_without_a_word_has_ended(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_channel(0), make_channel(1)
    monkeypatch.setattr(control, "is_gone", lambda member: True)
    with pytest.raises(PeerError, match=r"Rank 1 .* has ended without a word"):
        first.check_ends()
    monkeypatch.setattr(control, "is_gone", lambda member: False)
    assert [departure.ended for departure in second.departures()] == [True]


def await_departures(channel: Channel) -> tuple[float, list[Sequence[int]]]:
    """Wait for all to leave; return how long it took, and the notices."""
    notices: list[Sequence[int]] = []
    started = time.monotonic()
    channel.await_departures(notice_after=0.2, notice=notices.append)
    return time.monotonic() - started, notices


def test_others_are_awaited_until_they_have_left_in_whatever_way(
    make_channel: MakeChannel,
) -> None:
    first, second, third = (make_channel(rank, 3, bound=20.0) for rank in range(3))
    second.leave(Departure(1, "node1", True, "KeyError: 'x'"))
    timer = threading.Timer(0.6, third.leave, [Departure(2, "node1", False)])
    timer.start()
    seconds, notices = await_departures(first)
    timer.join()
    assert 0.5 < seconds < 15
    assert notices == [[2]]


def test_others_that_never_leave_are_awaited_as_long_as_the_bound(
    make_channel: MakeChannel,
) -> None:
    channel, _ = make_channel(0, bound=0.5), make_channel(1)
    assert 0.5 < await_departures(channel)[0] < 15


def test_others_that_have_ended_are_not_awaited(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = make_channel(0, bound=60.0), make_channel(1)
    monkeypatch.setattr(control, "is_gone", lambda member: True)
    assert await_departures(channel)[0] < 15


def test_an_answer_before_the_departure_counts(make_channel: MakeChannel) -> None:
    first, second = make_channel(0), make_channel(1)
    asked = 0

    def answered() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            second.publish("answer", b"x")
            second.leave(Departure(1, "node1", True, "KeyError"))
        return first.fetch("answer") is not None

    assert wait(first, [1], ready=answered)


# ------------------------------------------------------------------------------------- waiting


def test_a_wait_for_what_is_ready_asks_once(channel: Channel) -> None:
    answers = iter([True])
    assert wait(channel, [1], ready=lambda: next(answers))


def test_a_wait_ends_after_its_time(channel: Channel) -> None:
    assert not wait(channel, [1], timeout=0.05)


def test_a_long_wait_is_noticed_once(channel: Channel) -> None:
    noticed: list[Sequence[int]] = []
    assert not wait(channel, [1], timeout=0.2, notice_after=0.02, notice=noticed.append)
    assert noticed == [[1]]


def test_a_long_wait_polls_less_often() -> None:
    pauses = [control._longest_pause(waited, 2) for waited in (0.0, 10.0, 100.0)]
    assert pauses == sorted(set(pauses))


# --------------------------------------------------------------------------- a lost connection


def serve_store(connection: Connection) -> None:
    listener = stores.listen()
    port = listener.getsockname()[1]
    server = stores.serve(listener, timeout=60)
    connection.send(port)
    connection.poll(None)  # until the parent has closed its end
    del server


@pytest.fixture
def served() -> Iterator[tuple[int, int]]:
    """Process id and port of a store that another process serves."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_store, args=(theirs,))
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ours.close()
    theirs.close()


no_fork_warning = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@no_fork_warning
def test_a_silent_server_is_an_error_within_the_bound_and_nobody_is_declared_dead(
    served: tuple[int, int], make_channel: MakeChannel
) -> None:
    pid, port = served
    client = PrefixStore("a", stores.connect("127.0.0.1", port, 20))
    channel = make_channel(0, over=client, bound=0.5)
    make_channel(1, over=PrefixStore("a", stores.connect("127.0.0.1", port, 20)))
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(GroupError, match=r"has not answered for \d+ s.*stopped"):
        wait(channel, [1], timeout=None, ready=lambda: channel.fetch("x") is not None)
    with pytest.raises(GroupError, match="has not answered"):  # at once, from now on
        channel.fetch("x")
    assert time.monotonic() - started < 10
    os.kill(pid, signal.SIGKILL)


@no_fork_warning
def test_a_server_that_has_ended_is_named(
    served: tuple[int, int], make_channel: MakeChannel
) -> None:
    pid, port = served
    channel = make_channel(1, over=stores.connect("127.0.0.1", port, 20))
    os.kill(pid, signal.SIGKILL)
    message = r"\[rank 1/2\] The store .* has gone: .*\. The process that served it"
    with pytest.raises(GroupError, match=message):
        wait(channel, [0], timeout=None, ready=lambda: channel.fetch("x") is not None)


@no_fork_warning
def test_a_forked_helper_may_not_use_the_channel(channel: Channel) -> None:
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            channel.fetch("x")
            os.write(write_end, b"no error")
        except BaseException as error:  # noqa: BLE001
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(helper, 0)
    text = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.close(write_end)
    assert text.startswith("GroupError: A helper process of rank 0 (a data worker?) called")


def test_closing_ends_the_helper_thread(store: HashStore) -> None:
    before = threading.active_count()
    channel = Channel(store, rank=0, world_size=2, label="", secret=b"", bound=10.0)
    assert threading.active_count() == before + 1
    channel.close()
    assert threading.active_count() == before


# ----------------------------------------------------------------------------------- joining


def test_two_processes_cannot_be_the_same_rank(make_channel: MakeChannel) -> None:
    first, other = make_channel(1, 3), make_channel(0, 3)
    with pytest.raises(GroupError, match="Two processes say that they are rank 1 of 3"):
        make_channel(1, 3)
    for channel in (first, other):  # and all of them hear of it
        with pytest.raises(PeerError, match="Two processes say that they are rank 1 of 3"):
            wait(channel, [2])


def test_a_rank_that_has_withdrawn_may_join_again(make_channel: MakeChannel) -> None:
    make_channel(1).withdraw()
    assert not make_channel(0).everyone_joined()
    again = make_channel(1)
    assert again.everyone_joined()


def test_an_ended_rank_is_named_although_it_can_be_told_to_nobody(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel(0, 3)
    join_as(make_channel, this_member(), monkeypatch)

    def fail(departure: Departure) -> None:
        raise GroupError("the store has gone with it")

    monkeypatch.setattr(control, "is_gone", lambda member: True)
    monkeypatch.setattr(channel, "leave", fail)
    with pytest.raises(PeerError, match=r"Rank 1 .* has ended without a word"):
        wait(channel, [1])


def test_an_end_that_one_rank_sees_is_told_to_those_who_do_not_look(
    make_channel: MakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = [make_channel(rank, 4) for rank in range(4)]
    monkeypatch.setattr(control, "is_gone", lambda member: True)
    with pytest.raises(PeerError, match=r"Rank 3 .* has ended without a word"):
        wait(channels[0], [3])
    monkeypatch.setattr(control, "is_gone", lambda member: False)
    with pytest.raises(PeerError, match=r"Rank 3 .* has ended without a word"):
        wait(channels[1], [0])
    assert [departure.rank for departure in channels[2].departures()] == [3]


def test_what_ranks_do_about_each_other_takes_messages_in_proportion(
    make_channel: MakeChannel,
) -> None:
    counts = []
    for world_size in (4, 16):
        store = CountingStore()
        channels = [
            make_channel(rank, world_size, over=store, label=f"{world_size}", bound=20.0)
            for rank in range(world_size)
        ]
        for channel in channels:
            channel.check_processes()  # the first look learns who is where
        store.calls = 0
        for channel in channels:
            assert channel.everyone_joined()
            channel.check_processes()
        counts.append(store.calls / world_size)
    assert 0 < counts[1] <= counts[0]


class CountingStore(HashStore):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        return super().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.calls += 1
        return super().get(key)
