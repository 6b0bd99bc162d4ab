"""Agreement between ranks through the side channel: work on rank 0, barriers, small exchanges.

Every call is numbered and named. Rank r announces its call under one key, rank 0 (or the first rank
of a node) answers with the outcome of the call, so that ranks which took different paths see each
other's name and place. A wait for a rank to reach the call is bounded by the group's time-out; the
work of a rank that has reached it takes as long as it takes, and no collective is involved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar, cast

from typing_extensions import ParamSpec

from ddpkit.errors import ConfigError, GroupError, PeerError
from ddpkit.group import get_channel, require_group, to_seconds
from ddpkit.serialize import (
    ExceptionRecord,
    dump_value,
    load_value,
    origin_of,
    record_exception,
    type_name_of,
)
from ddpkit.wording import name_ranks

T = TypeVar("T")
P = ParamSpec("P")

_NOTICE_AFTER = 5.0
_LEADER_AFTER = 0.005  # most answers come sooner, and every look at the leader costs a round trip
_INLINE_BYTES = 64 * 1024
_PLACES_SHOWN = 8
_LATE_ONES = 16  # of hundreds of ranks not all are asked again and again whether they are here
_READ_AT_ONCE = 64
_PACKAGE = str(Path(__file__).parent) + os.sep
_CONTEXTLIB = contextlib.contextmanager.__code__.co_filename
_ADVICE = (
    "Does the call stand inside `if is_rank0():`, or behind a condition that differs between "
    "ranks? Where a rank only needs longer, raise `timeout=` of process_group or @distributed (or "
    "that of barrier)."
)

_logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------- public calls


def on_rank0(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function on rank 0 and return its value, or raise its exception, on every rank.

    Collective: every rank must call this. Once rank 0 has begun, the others wait as long as it
    lives and works; the time-out of collectives does not matter. In a world of one it is a plain
    call.

    Args:
        function: What rank 0 runs.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The value, which must be picklable. For what is not (an open run, a writer), write
        `if is_rank0(): ...` instead.

    Raises:
        Exception: Whatever the function raised on rank 0, the same on all ranks.
        PeerError: Rank 0, or another rank, failed meanwhile.
        GroupError: The ranks called different functions, rank 0 did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> on_rank0(max, [3, 1, 2])
        3
    """
    return run_on_rank0(lambda: function(*args, **kwargs), name="on_rank0")


@contextlib.contextmanager
def rank0_first(*, per_node: bool = False) -> Iterator[None]:
    """Let rank 0 run a block before the other ranks run it, for downloads and caches.

    Collective: every rank must call this. The others begin when rank 0 has left the block, all at
    the same time, and rank 0 does not wait for them. Its block may take hours; the time-out of
    collectives does not matter. In a world of one the block simply runs.

    Args:
        per_node: Let the first rank of each node go before the other ranks of that node, for what
            lands on a disk of the node.

    Raises:
        Exception: Whatever the block raised on rank 0 (with `per_node`, on the first rank of this
            node). The other ranks raise it in place of running the block.
        PeerError: Rank 0, or another rank, failed meanwhile.
        GroupError: The ranks called different functions, rank 0 did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> with rank0_first():
        ...     print("downloading")
        downloading
    """
    if not require_group("rank0_first"):
        yield
        return
    name = "rank0_first(per_node=True)" if per_node else "rank0_first"
    meeting = _Meeting(name, per_node=per_node)
    if not meeting.leads:
        meeting.await_answer()
        yield
        return
    with meeting.answering():
        meeting.await_rank0()
        yield


def broadcast_value(value: T) -> T:
    """Return rank 0's value on every rank.

    Collective: every rank must call this. In a world of one it returns its argument.

    Args:
        value: Rank 0's is sent and must be picklable; the others' are ignored.

    Returns:
        Rank 0's value. Rank 0 gets the object itself, the others a copy, with tensors on the CPU.

    Raises:
        ConfigError: Rank 0's value cannot be pickled.
        PeerError: Rank 0, or another rank, failed meanwhile.
        GroupError: The ranks called different functions, rank 0 did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> broadcast_value("run-7")
        'run-7'
    """
    return run_on_rank0(lambda: value, name="broadcast_value")


def any_rank(flag: object) -> bool:
    """Tell whether a flag is true on at least one rank.

    Collective: every rank must call this. In a world of one it is the flag itself, as a bool.

    Args:
        flag: A bool, or anything that has a truth value, such as a tensor of one element.

    Returns:
        The same answer on every rank.

    Raises:
        ConfigError: The flag of some rank has no truth value; every rank raises.
        PeerError: Another rank failed meanwhile.
        GroupError: The ranks called different functions, ranks did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> any_rank(False)
        False
    """
    return any(_flags_of_all(flag, "any_rank"))


def all_ranks(flag: object) -> bool:
    """Tell whether a flag is true on every rank.

    Collective: every rank must call this. In a world of one it is the flag itself, as a bool.

    Args:
        flag: A bool, or anything that has a truth value, such as a tensor of one element.

    Returns:
        The same answer on every rank.

    Raises:
        ConfigError: The flag of some rank has no truth value; every rank raises.
        PeerError: Another rank failed meanwhile.
        GroupError: The ranks called different functions, ranks did not come within the time-out of
            the group, or no group is open.

    Example:
        >>> all_ranks(True)
        True
    """
    return all(_flags_of_all(flag, "all_ranks"))


def barrier(timeout: float | timedelta | None = None) -> None:
    """Wait until every rank is here.

    Collective: every rank must call this. It waits for processes, not for work that is queued on
    an accelerator. In a world of one it returns at once.

    Args:
        timeout: Bound in seconds or as a timedelta. Default: the time-out of the group.

    Raises:
        GroupError: Ranks are missing after the time, or are in another call; they are named with
            their place.
        PeerError: Another rank failed meanwhile.

    Example:
        >>> barrier()
    """
    seconds = to_seconds(timeout)
    if not require_group("barrier"):
        return
    meeting = _Meeting("barrier")
    if not meeting.leads:
        meeting.await_answer(seconds)
        return
    with meeting.answering():
        meeting.collect(b"", seconds)


# ------------------------------------------------------------------------- for ddpkit's own parts


def run_on_rank0(function: Callable[[], T], *, name: str) -> T:
    """Do what `on_rank0` does under another name in messages."""
    if not require_group(name):
        return function()
    meeting = _Meeting(name)
    if not meeting.leads:
        return cast(T, load_value(meeting.await_answer()))
    with meeting.answering() as answer:
        value = function()
        answer.payload = _dump_for_others(value, name)
    return value


def exchange(value: T, *, name: str) -> list[T]:
    """Return every rank's value, in the order of ranks, on every rank.

    Collective: every rank must call this. In a world of one it returns a list of one.

    Args:
        value: A picklable value.
        name: What messages call it.

    Returns:
        One value for each rank.
    """
    if not require_group(name):
        return [value]
    payloads = _gather_bytes(name, _dump_for_others(value, name))
    return [cast(T, load_value(payload)) for payload in payloads]


def _gather_bytes(name: str, own: bytes) -> list[bytes]:
    """Bring every rank's bytes to rank 0, and all of them to every rank."""
    meeting = _Meeting(name, own)
    if not meeting.leads:
        return cast("list[bytes]", load_value(meeting.await_answer()))
    with meeting.answering() as answer:
        everyones = meeting.collect(own)
        answer.payload = dump_value(everyones)
    return everyones


def _flags_of_all(flag: object, name: str) -> list[bool]:
    # What is wrong with a flag is exchanged like a flag, so that no rank waits for one that failed.
    flags = exchange(_truth(flag), name=name)
    for rank, found in enumerate(flags):
        if isinstance(found, str):
            raise ConfigError(
                f"{name} got a flag on rank {rank} that is neither true nor false: {found}. Pass a "
                "bool, or reduce a tensor to one element first."
            )
    return cast("list[bool]", flags)


def _truth(flag: object) -> bool | str:
    try:
        return bool(flag)
    except Exception as error:  # noqa: BLE001  # any type may come from a user's __bool__
        return f"{type_name_of(flag)} ({error})"


def _dump_for_others(value: object, name: str) -> bytes:
    try:
        return dump_value(value)
    except Exception as error:
        raise ConfigError(
            f"{name} got a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            f"sent to the other ranks ({type(error).__name__}: {error}). Return what can be "
            "pickled, or write `if is_rank0(): ...` for what only rank 0 needs."
        ) from error


# ------------------------------------------------------------------------------------ the protocol


@dataclass(frozen=True)
class _Call:
    """One call of this family, as every rank announces it."""

    number: int
    name: str
    place: str
    contribution: bytes | None = None
    """What this rank brings; None where it is too large to be announced and lies beside."""
    given_up: bool = False
    """Whether this rank has waited in vain and left the call by an error."""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


@dataclass(frozen=True)
class _Outcome:
    """What the leader answers in one of its calls: a value or an exception."""

    call: _Call
    value: bytes = b""
    failure: ExceptionRecord | None = None


@dataclass
class _Answer:
    """Where the leader puts the value that it answers with."""

    payload: bytes = b""


class _Meeting:
    """One numbered call as this rank goes through it; making it announces the call.

    The first rank of a party leads: it answers the others, who wait for that.

    Args:
        name: What messages call it.
        contribution: What this rank brings.
        per_node: Whether the party is this node's ranks; otherwise it is all ranks.
    """

    def __init__(self, name: str, contribution: bytes = b"", *, per_node: bool = False) -> None:
        self._channel = channel = get_channel()
        place = _calling_place()
        if channel.leading:
            raise GroupError(
                f"{self._who()} {name} ({place}) was called within {channel.leading}, which rank "
                f"{channel.rank} runs alone while the other ranks wait. Call it outside of that."
            )
        channel.calls += 1
        self._nodes = channel.nodes() if per_node else [range(channel.world_size)]
        self._party = next(ranks for ranks in self._nodes if channel.rank in ranks)
        self._call = _Call(channel.calls, name, place)
        # Only those who count as readers may look at an answer, because the last one removes it.
        # So ranks that took different paths must not find each other's.
        self._answers = "node-out" if per_node else "out"
        if channel.rank == 0 and len(self._nodes) > 1:
            channel.publish(self._nodes_key, b"")  # before what follows tells them to look for it
        self._announce(replace(self._call, contribution=self._small_enough(contribution)))

    @property
    def _nodes_key(self) -> str:
        """Where rank 0 tells the first ranks of other nodes that it came to a call per node."""
        return f"nodes/{self._call.number}"

    @property
    def leads(self) -> bool:
        """Whether this rank answers the others."""
        return self._channel.rank == self._party[0]

    @contextlib.contextmanager
    def answering(self) -> Iterator[_Answer]:
        """Answer the others with how a block ends: the payload, or its exception."""
        answer = _Answer()
        self._channel.leading = str(self._call)
        try:
            yield answer
        except BaseException as error:
            with contextlib.suppress(GroupError):  # the store may be gone, but this is the cause
                self._publish(_Outcome(self._call, failure=record_exception(error)))
            raise
        finally:
            self._channel.leading = ""
        self._publish(_Outcome(self._call, answer.payload))

    def collect(self, own: bytes, timeout: float | None = None) -> list[bytes]:
        """Wait for every rank of the party and take what it brings."""
        arrived = {self._party[0]: own}
        missing = list(self._party[1:])

        def everyone_is_here() -> bool:
            late = 0
            for rank, other in self._all_announced(tuple(missing)):
                if not self._has_reached(other, rank):
                    late += 1
                    if late == _LATE_ONES:
                        break
                    continue
                assert other is not None
                self._check_still_there(other, rank)
                arrived[rank] = self._contribution(other, rank)
                missing.remove(rank)
            return not missing

        self._await_ranks(everyone_is_here, missing, timeout)
        return [arrived[rank] for rank in self._party]

    def await_answer(self, timeout: float | None = None) -> bytes:
        """Wait for the leader to come, and then, however long it works, for its answer."""
        leader, channel = self._party[0], self._channel
        key = f"{self._answers}/{leader}/{self._call.number}"
        answers: list[bytes] = []
        started = time.monotonic()

        def answered() -> bool:
            payload = channel.fetch(key)
            answers.extend([] if payload is None else [payload])
            return payload is not None

        def leader_is_here() -> bool:
            if answered() or time.monotonic() - started < _LEADER_AFTER:
                return bool(answers)
            other = self._reached(leader)
            if other is not None and not answered():
                self._check_still_there(other, leader)
            return other is not None

        self._await_ranks(leader_is_here, [leader], timeout)
        if not answers:
            self._await_work(answered, leader)
        channel.delete_when_read(key, f"read/{key}", readers=len(self._party) - 1)
        return self._unpack(load_value(answers[0]), leader)

    def await_rank0(self) -> None:
        """Wait until rank 0 is in this call, too, so that nodes cannot take different paths."""
        if self._channel.rank == 0:
            return
        self._await_ranks(lambda: self._reached(0) is not None, [0], None)
        if self._channel.fetch(self._nodes_key) is None:
            # Rank 0 is further already, and in this call it has answered all ranks.
            answer = self._fetch(f"out/0/{self._call.number}")
            self._check_same(load_value(answer).call, 0)
        readers = len(self._nodes) - 1
        self._channel.delete_when_read(self._nodes_key, f"read/{self._nodes_key}", readers)

    # ------------------------------------------------------------------ messages

    def _announce(self, call: _Call) -> None:
        self._channel.publish(f"at/{self._channel.rank}", dump_value(call))

    def _announced(self, rank: int) -> _Call | None:
        payload = self._channel.fetch(f"at/{rank}", lasting=True)
        return None if payload is None else cast(_Call, load_value(payload))

    def _all_announced(self, ranks: Sequence[int]) -> Iterator[tuple[int, _Call | None]]:
        """Read what many ranks are in, some at once, as far as one goes on asking."""
        for first in range(0, len(ranks), _READ_AT_ONCE):
            some = ranks[first : first + _READ_AT_ONCE]
            payloads = self._channel.fetch_lasting([f"at/{rank}" for rank in some])
            for rank, payload in zip(some, payloads, strict=True):
                yield rank, None if payload is None else cast(_Call, load_value(payload))

    def _publish(self, outcome: _Outcome) -> None:
        if len(self._party) > 1:  # what nobody reads nobody would remove
            key = f"{self._answers}/{self._channel.rank}/{self._call.number}"
            self._channel.publish(key, dump_value(outcome))
            self._channel.last_answer = key

    def _small_enough(self, contribution: bytes) -> bytes | None:
        """Return what goes into the announcement itself; a large contribution goes beside it."""
        if self.leads:
            return b""
        if len(contribution) <= _INLINE_BYTES:
            return contribution
        self._channel.publish(f"in/{self._call.number}/{self._channel.rank}", contribution)
        return None

    def _contribution(self, call: _Call, rank: int) -> bytes:
        if call.contribution is not None:
            return call.contribution
        key = f"in/{call.number}/{rank}"
        payload = self._fetch(key)
        self._channel.delete(key)
        return payload

    def _fetch(self, key: str) -> bytes:
        payload = self._channel.fetch(key)
        assert payload is not None, f"{key} is announced but not there"
        return payload

    def _unpack(self, outcome: _Outcome, leader: int) -> bytes:
        # The leader may have gone through a call of another name without waiting for anybody.
        self._check_same(outcome.call, leader)
        if outcome.failure is None:
            return outcome.value
        peer = PeerError(
            f"{self._who()} {self._call} failed on rank {leader}: {outcome.failure.summary}\n\n"
            f"{outcome.failure.traceback}",
            rank=leader,
            traceback=outcome.failure.traceback,
        )
        error = outcome.failure.rebuild()
        if error is None:
            raise peer
        peer.__cause__ = origin_of(error)
        raise error from peer

    # ------------------------------------------------------------------ paths

    def _reached(self, rank: int) -> _Call | None:
        """What another rank is in, if it has come as far as this call, checking that it is this."""
        other = self._announced(rank)
        return other if self._has_reached(other, rank) else None

    def _has_reached(self, other: _Call | None, rank: int) -> bool:
        if other is None or other.number < self._call.number:
            return False
        if other.number == self._call.number:
            self._check_same(other, rank)
        return True

    def _check_same(self, other: _Call, rank: int) -> None:
        if self._call.name == other.name:
            return
        raise GroupError(
            f"The ranks took different paths: rank {self._channel.rank} is in {self._call}, rank "
            f"{rank} in {other}. All ranks must make the same calls in the same order; does one of "
            "them stand inside `if is_rank0():`, or behind a condition that differs between ranks?"
        )

    def _check_still_there(self, other: _Call, rank: int) -> None:
        if other.given_up:
            raise GroupError(
                f"{self._who()} rank {rank} has waited in {other} until its time-out and given up, "
                f"before this rank came to {self._call}. {_ADVICE}"
            )
        if other.number > self._call.number:
            raise GroupError(
                f"The ranks took different paths: rank {self._channel.rank} is in {self._call}, "
                f"call {self._call.number}, and rank {rank} is already in {other}, call "
                f"{other.number}. Did it catch an error that the others have not seen?"
            )

    def _last_place(self, rank: int) -> str:
        call = self._announced(rank)
        return "no call of this family yet" if call is None else f"{call}, call {call.number}"

    def _who(self) -> str:
        return f"[rank {self._channel.rank}/{self._channel.world_size}]"

    # ------------------------------------------------------------------ waits

    def _await_ranks(
        self, ready: Callable[[], bool], missing: Sequence[int], timeout: float | None
    ) -> None:
        """Wait for ranks to reach this call, at most as long as the group's time-out allows."""
        bound = self._channel.bound if timeout is None else timeout

        def notice(ranks: Sequence[int]) -> None:
            _logger.warning(
                "%s %s has waited %.0f s for %s. Does the call stand inside `if is_rank0():`, or "
                "are the others in an ordinary collective?",
                *(self._who(), self._call, _NOTICE_AFTER, name_ranks(ranks)),
            )

        if not self._channel.wait(
            ready, lambda: missing, timeout=bound, notice_after=_NOTICE_AFTER, notice=notice
        ):
            self._announce(replace(self._call, given_up=True))
            places = (f"rank {rank}: {self._last_place(rank)}" for rank in missing[:_PLACES_SHOWN])
            raise GroupError(
                f"{self._who()} {name_ranks(missing)} did not reach {self._call} within "
                f"{bound:g} s. Last seen: {'; '.join(places)}. {_ADVICE}"
            )

    def _await_work(self, ready: Callable[[], bool], leader: int) -> None:
        """Wait for a leader that has reached this call, as long as it lives."""

        def notice(_: object) -> None:
            _logger.info(
                "%s %s waits for rank %d, which has reached it and is at work or waits for others",
                *(self._who(), self._call, leader),
            )

        self._channel.wait(
            ready, lambda: [leader], timeout=None, notice_after=_NOTICE_AFTER, notice=notice
        )


def _calling_place() -> str:
    """File and line of the code outside ddpkit that made this call."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads the sources
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_between(filename: str) -> bool:
    """Tell whether a file is ddpkit's, or the one that runs its context managers."""
    return filename.startswith(_PACKAGE) or filename == _CONTEXTLIB
