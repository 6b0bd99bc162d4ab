"""The side channel: small signed messages between ranks, over a store, beside the collectives.

A collective that waits for a dead or a lost rank says nothing. The channel can: it carries what
every rank is doing, the outcomes of work on rank 0, and the last words of a rank that leaves. Store
calls run on a helper thread, because torch's own time-out does not bound a server that is silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store

from ddpkit.errors import GroupError, PeerError
from ddpkit.serialize import dump_value, load_value

T = TypeVar("T")

SECRET_VARIABLE = "DDPKIT_SECRET"
"""Key of the signatures, for ranks that ddpkit did not start itself."""

_CHUNK = 4 * 1024 * 1024  # the store's server refuses payloads of more than 8 MiB
_HEADER = struct.Struct("!32sI")
_DEPARTURES_AFTER = 0.005  # most waits are shorter, and every look costs a round trip
_LIVENESS_AFTER = 0.1
_LIVENESS_EVERY = 0.5
_HEARTBEAT_EVERY = 5.0
_HEARTBEAT_LIMIT = 60.0
_CUT_OFF_LIMIT = 12.0  # seconds without a heartbeat, for when a connection has broken as well
_FIRST_PAUSE = 0.00005
_FEW_RANKS = 8  # which may all poll as fast as they can
_SLOW_LOOK = 0.02  # seconds; where a look takes longer, the store or this machine is overloaded,
_RELIEF = 5.0  # and is left alone for so many times as long
_USUAL = "if nobody stopped it, the kernel's out-of-memory killer is the usual cause."
_IF_NOT_STOPPED = _USUAL[0].upper() + _USUAL[1:]


@dataclass(frozen=True)
class Member:
    """The process behind a rank, as evidence of whether it is alive."""

    host: str
    """Host name."""
    machine: str
    """Boot id and process namespace; process ids mean the same where it is the same."""
    pid: int
    """Process id."""
    started: str
    """Start time of the process in clock ticks, so that a recycled id is not taken for it."""
    node: str = ""
    """Which node it belongs to; the ranks of one node share the name."""


@dataclass(frozen=True)
class Departure:
    """The last words of a rank that left the group."""

    rank: int
    """Global rank."""
    host: str
    """Host name."""
    failed: bool
    """Whether it left by an exception."""
    summary: str = ""
    """Exception type and message."""
    traceback: str = ""
    """Formatted traceback."""
    ended: bool = False
    """Whether its process has ended as well, or says that it is about to."""


def this_member() -> Member:
    """Describe this process."""
    pid = os.getpid()
    return Member(socket.gethostname(), this_machine(), pid, _process_start(pid) or "")


def is_gone(member: Member) -> bool:
    """Tell whether a process has certainly ended; False where that cannot be known from here."""
    if member.machine != this_machine() or not member.started:
        return False
    return _process_start(member.pid) != member.started


def this_machine() -> str:
    """Name this machine as long as it runs; containers on it share the name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """Start time of a running process, None when it has ended, also as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


class _StoreThread:
    """Runs store calls in order on a thread of its own; callers wait with a bound."""

    def __init__(self, store: Store, bound: float, beat: Callable[[], None] | None) -> None:
        self._store: Store | None = store
        self._bound = bound
        self._beat = beat
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._silent_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="ddpkit-control", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Store], T]) -> T:
        if self._silent_since is not None:
            raise GroupError(self._silence())
        started = time.monotonic()
        future = self.post(function)
        try:
            return future.result(timeout=self._bound)
        except FutureTimeoutError:
            self._silent_since = started
            raise GroupError(self._silence()) from None

    def post(self, function: Callable[[Store], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def _silence(self) -> str:
        waited = time.monotonic() - (self._silent_since or 0.0)
        return (
            f"The store that the ranks talk through has not answered for {waited:.0f} s. Its "
            "process (the launcher, or rank 0) is stopped, or its machine cannot be reached."
        )

    def _work(self) -> None:
        due = time.monotonic() + _HEARTBEAT_EVERY
        while True:
            if self._beat is not None and time.monotonic() >= due:
                # Also between calls: a rank that waits makes so many that it is never idle.
                self._try_beat()
                due = time.monotonic() + _HEARTBEAT_EVERY
            idle = max(0.0, due - time.monotonic()) if self._beat is not None else None
            try:
                item = self._calls.get(timeout=idle)
            except queue.Empty:
                continue
            if item is None:
                self._store = None
                return
            self._answer(*item)

    def _answer(self, future: Future[Any], function: Callable[[Store], Any]) -> None:
        assert self._store is not None
        try:
            future.set_result(function(self._store))
        except BaseException as error:  # noqa: BLE001  # it is raised again in the caller
            future.set_exception(error)

    def _try_beat(self) -> None:
        try:
            assert self._beat is not None
            self._beat()
        except RuntimeError:
            self._beat = None  # the server has gone; whoever waits next is told so

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(timeout=1.0)


class Channel:
    """One rank's end of the side channel of one world.

    Args:
        store: A client connection that nothing else waits on.
        rank: Global rank of this process.
        world_size: Number of ranks.
        label: Name of this world; it is signed with every message.
        secret: Key of the signatures.
        bound: Seconds after which a store that does not answer is an error, and a rank that does
            not come to a call.
        node: Name of the node that this rank belongs to.
        heartbeat: Whether to give signs of life, for ranks on other machines.

    Raises:
        GroupError: Another process has opened the same rank's end.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        label: str,
        secret: bytes,
        bound: float,
        node: str = "",
        heartbeat: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bound = bound
        self.calls = 0
        self.leading = ""  # the call whose work this rank does alone at the moment
        self.last_answer: str | None = None  # its readers remove it; some may not have come yet
        self.label = label
        self._secret = secret
        self._pid = os.getpid()
        self._parts: dict[str, int] = {}
        self._lasting: set[str] = set()
        self._members: dict[int, Member] = {}
        self._departures: dict[int, Departure] = {}
        self._neighbours: list[int] | None = None
        self._cut_off = False
        self._has_gone = ""  # why no further call is made, each of which would print C++ frames
        self._links_have_broken: Callable[[], bool] = lambda: False
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._beat_count = 0
        self._raw = store
        self._thread = _StoreThread(store, bound, self._beat if heartbeat else None)
        self._claim_rank()
        self._publish_member(node)

    # ------------------------------------------------------------------ messages

    def publish(self, key: str, payload: bytes) -> None:
        """Write a signed message of any size."""
        chunks = [payload[at : at + _CHUNK] for at in range(0, len(payload), _CHUNK)]
        parts = 0 if len(chunks) <= 1 else len(chunks)
        # In place of chunks their digest is signed, so that the header is checked before them.
        body = hashlib.sha256(payload).digest() if parts else payload
        message = _HEADER.pack(self._sign(key, parts, body), parts) + body
        # One call for each: the bound is that of an answer, and signs of life are given in between.
        for index in range(parts):
            self._write(f"{key}/{index}", chunks[index])
        self._write(key, message)  # last: where it stands, the message is whole

    def _write(self, key: str, value: bytes) -> None:
        self._call(lambda store: _set(store, key, value))

    def fetch(self, key: str, *, lasting: bool = False) -> bytes | None:
        """Read a message and check its signature; None where there is none yet.

        Args:
            key: Its key.
            lasting: Whether the key is overwritten but never deleted: where it was seen once, one
                round trip is spared.
        """
        seen = lasting and key in self._lasting

        def read(store: Store) -> bytes | None:
            return store.get(key) if seen or store.check([key]) else None

        message = self._call(read)
        if message is None:
            return None
        if lasting:
            self._lasting.add(key)
        return self._verified(key, message)

    def fetch_lasting(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read several messages that are overwritten but never deleted, in the order of the keys.

        Takes one round trip where all were seen before, as in every call of a world but the first.
        """
        if not self._lasting.issuperset(keys):
            return [self.fetch(key, lasting=True) for key in keys]

        def read(store: Store) -> list[bytes]:
            if store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
                return store.multi_get(list(keys))
            return [store.get(key) for key in keys]

        messages = self._call(read)
        return [self._verified(*item) for item in zip(keys, messages, strict=True)]

    def _verified(self, key: str, message: bytes) -> bytes:
        if len(message) < _HEADER.size:
            message = bytes(_HEADER.size)  # a forgery without room for a signature
        signature, parts = _HEADER.unpack_from(message)
        body = message[_HEADER.size :]
        genuine = hmac.compare_digest(signature, self._sign(key, parts, body))
        payload = body
        if genuine and parts:
            names = [f"{key}/{index}" for index in range(parts)]
            payload = b"".join([self._read(name) for name in names])
            genuine = hmac.compare_digest(hashlib.sha256(payload).digest(), body)
            self._parts[key] = parts
        if not genuine:
            raise GroupError(
                f"The message {key!r} in the store is not signed by a rank of this launch, so it "
                "was not read. Another program writes to the same store, or the ranks have "
                f"different values of {SECRET_VARIABLE}."
            )
        return payload

    def _read(self, key: str) -> bytes:
        return self._call(lambda store: store.get(key))

    def delete(self, key: str) -> None:
        """Remove a message."""
        keys = [key, *(f"{key}/{index}" for index in range(self._parts.pop(key, 0)))]
        self._call(lambda store: [store.delete_key(name) for name in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._call(lambda store: store.add(key, amount))

    def delete_when_read(self, key: str, counter: str, readers: int) -> None:
        """Note that this rank has read a message; the last of its readers removes it."""
        keys = [key, *(f"{key}/{index}" for index in range(self._parts.pop(key, 0))), counter]

        def note(store: Store) -> None:
            if store.add(counter, 1) == readers:
                for name in keys:
                    store.delete_key(name)

        # Nobody waits for it; should the store be gone, the next call says so.
        self._thread.post(note)

    def _sign(self, key: str, parts: int, body: bytes) -> bytes:
        signer = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in (self.label.encode(), key.encode(), str(parts).encode()):
            signer.update(len(part).to_bytes(4, "big") + part)
        signer.update(body)
        return signer.digest()

    def _call(self, function: Callable[[Store], T]) -> T:
        if os.getpid() != self._pid:
            raise GroupError(
                f"A helper process of rank {self.rank} (a data worker?) called a function that "
                "only the rank itself may call."
            )
        if self._has_gone:
            raise GroupError(self._has_gone)
        try:
            return self._thread.call(function)
        except GroupError:
            raise
        except RuntimeError as error:  # what torch's stores raise when the connection is lost
            text = (
                f"[rank {self.rank}/{self.world_size}] The store that the ranks talk through has "
                f"gone: {str(error).splitlines()[0]}. The process that served it (the launcher, or "
                "rank 0) has ended."
            )
            self._cut_off = isinstance(error, DistNetworkError)
            self._has_gone = text if self._cut_off else ""
            raise GroupError(text) from error

    # ------------------------------------------------------------------ members and departures

    def _claim_rank(self) -> None:
        if self.add(f"claims/{self.rank}", 1) == 1:
            return
        problem = (
            f"Two processes say that they are rank {self.rank} of {self.world_size}, one of them "
            f"process {os.getpid()} on {socket.gethostname()}. Give each process a RANK of its own."
        )
        self.leave(Departure(self.rank, socket.gethostname(), failed=True, summary=problem))
        self.close()
        raise GroupError(problem)

    def _publish_member(self, node: str) -> None:
        self.publish(f"member/{self.rank}", dump_value(replace(this_member(), node=node)))
        self._call(lambda store: _append(store, _machine_key(), f"{self.rank} "))
        self.add("joined", 1)

    def withdraw(self) -> None:
        """Take back that this rank has joined."""
        # Not deleted: another rank that reads it at this moment would wait for it to come back.
        self.publish(f"member/{self.rank}", b"")
        self.add("joined", -1)
        self.add(f"claims/{self.rank}", -1)

    def everyone_joined(self) -> bool:
        """Tell whether all ranks have joined, by one message however many there are."""
        return self.add("joined", 0) >= self.world_size

    def is_alone(self) -> bool:
        """Tell whether every other rank has withdrawn, or never joined."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        return all(map(self.has_withdrawn, others))

    def has_withdrawn(self, rank: int) -> bool:
        """Tell whether a rank has taken back that it joined, or never did."""
        return not self.fetch(f"member/{rank}")

    def absent(self, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks have not joined yet."""
        return [rank for rank in ranks if self._member(rank) is None]

    def nodes(self) -> list[list[int]]:
        """Which ranks are on one node together, once all have joined; rank 0's node is first."""
        ranks: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            member = self._member(rank)
            ranks.setdefault(member.node if member is not None else "", []).append(rank)
        return list(ranks.values())

    def _member(self, rank: int) -> Member | None:
        if rank not in self._members:
            payload = self.fetch(f"member/{rank}")
            if not payload:
                return None
            self._members[rank] = load_value(payload)
        return self._members[rank]

    def leave(self, departure: Departure) -> None:
        """Tell the other ranks that this one leaves, and why."""
        number = self.add("left", 1)
        self.publish(f"left/{number}", dump_value(departure))

    def departures(self) -> list[Departure]:
        """Who has left so far, in the order in which they did."""
        # Each is read once: with hundreds of ranks that all look, looking must cost little.
        for number in range(1, self.add("left", 0) + 1):
            if number in self._departures:
                continue
            payload = self.fetch(f"left/{number}")
            if payload is not None:  # else it is on its way, or its rank has died in between
                self._departures[number] = load_value(payload)
        first: dict[int, Departure] = {}  # several may have seen the same one end
        for number in sorted(self._departures):
            departure = self._departures[number]
            before = first.setdefault(departure.rank, departure)
            # One that has left by an exception may end later, or not at all.
            first[departure.rank] = replace(before, ended=before.ended or departure.ended)
        return list(first.values())

    def _beat(self) -> None:
        # Runs on the helper thread itself.
        self._beat_count += 1
        self._raw.set(f"beat/{self.rank}", str(self._beat_count))

    def observe_links(self, have_broken: Callable[[], bool]) -> None:
        """Let broken connections count as evidence that the machine of a silent rank is cut off.

        Args:
            have_broken: Tells whether a connection of this process to another machine has broken.
        """
        self._links_have_broken = have_broken

    # ------------------------------------------------------------------ waiting

    def wait(
        self,
        ready: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        *,
        timeout: float | None,
        notice_after: float,
        notice: Callable[[Sequence[int]], None],
    ) -> bool:
        """Wait until something is ready, or until it is certain that it will never be.

        Args:
            ready: Asks whether the wait is over.
            awaited: Names the ranks that it depends on.
            timeout: Seconds, or None for as long as the awaited ranks live.
            notice_after: Seconds after which `notice` is called, once.
            notice: Tells a person whom this rank waits for.

        Returns:
            True when ready, False when the time has passed.

        Raises:
            PeerError: A rank has failed or an awaited one has ended.
            GroupError: An awaited rank has left the group.
        """
        started = checked = time.monotonic()
        pause = _FIRST_PAUSE * max(1, self.world_size / _FEW_RANKS)
        told = False
        while not ready():
            now = time.monotonic()
            waited = now - started
            if waited > _LIVENESS_AFTER and now - checked > _LIVENESS_EVERY:
                self._check_alive(ready, awaited())
                checked = time.monotonic()
            took = 0.0
            if waited > _DEPARTURES_AFTER:
                self._check_departures(ready, awaited)
                took = time.monotonic() - max(now, checked)
            if timeout is not None and waited > timeout:
                return ready()
            if waited > notice_after and not told:
                told = True
                notice(awaited())
            time.sleep(max(pause, min(_RELIEF * (took - _SLOW_LOOK), 1.0)))
            pause = min(pause * 1.5, _longest_pause(waited, self.world_size))
        return True

    def check_processes(self) -> None:
        """Raise `PeerError` if another rank's process has ended and has not left in order.

        Each rank looks after those of its machine, which takes no messages, after rank 0 and after
        the next one, and tells all what it finds. So hundreds of ranks send hundreds of messages,
        and not the square of that.
        """
        lost = self._lost()
        self._check_departures(lambda: False, list)  # one that failed tells the reason
        self._check_alive(lambda: False, lost)

    def check_ends(self) -> None:
        """Raise `PeerError` if another rank's process has ended, or says so, not in order.

        As `check_processes`; but a rank that has left by an exception which its program caught has
        not ended, and nobody has to end for it.
        """
        self._check_alive(lambda: False, self._lost())
        for departure in self.departures():
            if departure.failed and (departure.ended or self._has_ended_since(departure)):
                raise self._failure(departure)

    def _has_ended_since(self, departure: Departure) -> bool:
        member = self._member(departure.rank)
        if member is None or not is_gone(member):
            return False
        with contextlib.suppress(GroupError):  # the store may have gone with it
            self.leave(replace(departure, ended=True))  # for those on other machines
        return True

    def _lost(self) -> list[int]:
        members = {rank: self._member(rank) for rank in self._looked_after()}
        return [rank for rank, member in members.items() if member and self._is_lost(rank, member)]

    def _looked_after(self) -> set[int]:
        if self._neighbours is None and self.everyone_joined():
            self._neighbours = self._ranks_of_this_machine()
        following = (self.rank + 1) % self.world_size
        # Rank 0 may serve the store, and then cannot say any more that it ends.
        return {0, following, *(self._neighbours or ())} - {self.rank}

    def _ranks_of_this_machine(self) -> list[int]:
        text = self._call(lambda store: store.get(_machine_key())).decode(errors="replace")
        return [int(word) for word in text.split() if word.isdigit()]

    def await_departures(
        self, *, notice_after: float, notice: Callable[[Sequence[int]], None]
    ) -> None:
        """Wait until every other rank has left, or has ended; no longer than `bound`.

        Args:
            notice_after: Seconds after which `notice` is called, once.
            notice: Tells a person whom this rank waits for.
        """
        started = checked = time.monotonic()
        remaining = set(range(self.world_size)) - {self.rank}
        told = False
        while remaining := remaining - {departure.rank for departure in self.departures()}:
            now = time.monotonic()
            if now - started > self.bound:
                return
            if now - checked > _LIVENESS_EVERY:
                remaining = {rank for rank in remaining if not self._is_missing(rank)}
                checked = time.monotonic()
            if now - started > notice_after and not told:
                told = True
                notice(sorted(remaining))
            time.sleep(_longest_pause(now - started, self.world_size))

    def _is_missing(self, rank: int) -> bool:
        member = self._member(rank)
        return member is None or self._is_lost(rank, member)

    def check_server(self, rank: int) -> None:
        """Raise `PeerError` if the rank that served the store has certainly ended, not in order.

        For when the store is gone; nothing is asked, what was learned before has to do. The
        evidence is its process, or from another machine that the connection was closed.

        Args:
            rank: Who served it.
        """
        member = self._members.get(rank)
        departures = [each for each in self._departures.values() if each.rank == rank]
        if rank == self.rank or member is None or any(not each.failed for each in departures):
            return
        visible = bool(member.started) and member.machine == this_machine()
        if not (is_gone(member) if visible else self._cut_off):
            return
        last = departures[0] if departures else Departure(rank, member.host, True, _USUAL)
        ended = "has ended" if visible else "has ended, or its machine cannot be reached any more"
        raise PeerError(
            f"[rank {self.rank}/{self.world_size}] Rank {rank} (process {member.pid} on "
            f"{member.host}) {ended}, and with it the store that the ranks talk through: "
            f"{last.summary}",
            rank=rank,
            traceback=last.traceback,
        )

    def check_joined(self) -> None:
        """Raise `PeerError` if a rank that has joined has ended since, as far as is seen here."""
        members = {rank: self._member(rank) for rank in self._looked_after()}
        gone = [rank for rank, member in members.items() if member and is_gone(member)]
        if gone:
            self._check_departures(lambda: False, lambda: gone)  # these tell the reason
            self._check_alive(lambda: False, gone)

    def _check_departures(
        self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]
    ) -> None:
        for departure in self.departures():
            is_own = departure.rank == self.rank and not departure.failed
            if is_own or ready():
                continue
            if departure.failed:
                raise self._failure(departure)
            if departure.rank in awaited():
                raise GroupError(
                    f"[rank {self.rank}/{self.world_size}] This rank waits for rank "
                    f"{departure.rank}, which has already left the group. All ranks must make the "
                    "same calls; check conditions that differ between ranks."
                )

    def _failure(self, departure: Departure) -> PeerError:
        return PeerError(
            f"[rank {self.rank}/{self.world_size}] Rank {departure.rank} on "
            f"{departure.host} failed while this rank waited for it: {departure.summary}",
            rank=departure.rank,
            traceback=departure.traceback,
        )

    def _check_alive(self, ready: Callable[[], bool], awaited: Sequence[int]) -> None:
        for rank in awaited:
            member = self._member(rank)
            # What a rank wrote just before its end counts, so ask again after the evidence.
            if member is None or not self._is_lost(rank, member) or ready() or self._has_left(rank):
                continue
            found = _describe_lost(rank, member)
            with contextlib.suppress(GroupError):  # the store may have gone with it
                if not self.has_withdrawn(rank):  # for those who do not look after it
                    self.leave(Departure(rank, member.host, True, found, ended=True))
            raise PeerError(f"[rank {self.rank}/{self.world_size}] {found}", rank=rank)

    def _has_left(self, rank: int) -> bool:
        return any(departure.rank == rank for departure in self.departures())

    def _is_lost(self, rank: int, member: Member) -> bool:
        if member.machine == this_machine():
            return is_gone(member)
        key = f"beat/{rank}"
        beat = self._call(lambda store: store.get(key) if store.check([key]) else b"")
        last, since = self._beats.get(rank, (None, 0.0))
        if beat != last:
            self._beats[rank] = (beat, time.monotonic())
            return False
        silent = time.monotonic() - since
        return silent > _HEARTBEAT_LIMIT or (silent > _CUT_OFF_LIMIT and self._links_have_broken())

    def await_readers(self, bound: float) -> None:
        """Wait a while for the others to read this rank's last answer.

        Args:
            bound: Seconds.
        """
        deadline = time.monotonic() + bound
        answer = self.last_answer
        while answer is not None and time.monotonic() < deadline:
            if not self._call(lambda store: store.check([answer])):
                return
            time.sleep(_longest_pause(0.0, self.world_size))

    def close(self) -> None:
        """End the helper thread and drop the connection."""
        self._thread.close()
        del self._raw


def _describe_lost(rank: int, member: Member) -> str:
    who = f"Rank {rank} (process {member.pid} on {member.host})"
    if member.machine == this_machine():
        return f"{who} has ended without a word. {_IF_NOT_STOPPED}"
    return (
        f"{who} gives no signs of life any more: it has ended without a word, or its machine "
        f"cannot be reached. {_IF_NOT_STOPPED}"
    )


def _machine_key() -> str:
    """Name where the ranks of this machine write that they are on it."""
    return "on/" + hashlib.sha256(this_machine().encode()).hexdigest()[:16]


def _set(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch's stub knows str alone


def _append(store: Store, key: str, text: str) -> None:
    store.append(key, text)  # type: ignore[attr-defined]  # torch's stub does not know it


def _longest_pause(waited: float, world_size: int) -> float:
    """Poll briskly at first; after that a wait is long and the store has other clients.

    Hundreds of ranks that wait ask a few thousand times a second in all.
    """
    if waited < 5.0:
        return max(0.01, 0.0002 * world_size)
    return max(0.1 if waited < 60.0 else 0.5, 0.0002 * world_size)
