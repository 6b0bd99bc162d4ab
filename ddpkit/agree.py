"""Agreement between ranks through the side channel: work on rank 0, barriers, small exchanges.

Every call is numbered and named. Rank r announces its call under one key, rank 0 answers with the
outcome of the call, so that ranks which took different paths see each other's name and place, and
a wait depends on no collective and on no collective's time-out.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar, cast

from typing_extensions import ParamSpec

from ddpkit.control import Channel
from ddpkit.errors import ConfigError, GroupError, PeerError
from ddpkit.group import get_channel, name_ranks, require_group, to_seconds
from ddpkit.serialize import ExceptionRecord, dump_value, load_value, record_exception

T = TypeVar("T")
P = ParamSpec("P")

_NOTICE_AFTER = 5.0
_LEADER_AFTER = 0.005  # most answers come sooner, and every look at rank 0 costs a round trip
_INLINE_BYTES = 64 * 1024
_PACKAGE = str(Path(__file__).parent) + os.sep

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """One call of this family, as every rank announces it."""

    number: int
    name: str
    place: str
    contribution: bytes | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 answers in one of its calls: a value or an exception."""

    call: _Call
    value: bytes | None = None
    failure: ExceptionRecord | None = None


# ---------------------------------------------------------------------------------- public calls


def on_rank0(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function on rank 0 and return its value, or raise its exception, on every rank.

    Collective: every rank must call this. The other ranks wait as long as rank 0 lives and works;
    the time-out of collectives does not matter. In a world of one it is a plain call.

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
        GroupError: The ranks called different functions, or no group is open.

    Example:
        >>> on_rank0(max, [3, 1, 2])
        3
    """
    return run_on_rank0(lambda: function(*args, **kwargs), name="on_rank0")


def barrier(timeout: float | timedelta | None = None) -> None:
    """Wait until every rank is here.

    Collective: every rank must call this. It waits for processes, not for work that is queued on
    an accelerator. In a world of one it returns at once.

    Args:
        timeout: Bound in seconds or as a timedelta. Default: wait as long as all ranks live.

    Raises:
        GroupError: Ranks are missing after the time, or are in another call; they are named with
            their place.
        PeerError: Another rank failed meanwhile.

    Example:
        >>> barrier()
    """
    seconds = to_seconds(timeout)
    if require_group("barrier"):
        _meet("barrier", gather=b"", lead=lambda _: b"", timeout=seconds)


# ------------------------------------------------------------------------- for ddpkit's own parts


def run_on_rank0(function: Callable[[], T], *, name: str) -> T:
    """Do what `on_rank0` does under another name in messages."""
    if not require_group(name):
        return function()
    value: list[T] = []

    def lead(_: object) -> bytes:
        value.append(function())
        return _dump_for_others(value[0], name)

    payload = _meet(name, gather=None, lead=lead)
    return value[0] if value else cast(T, load_value(payload))


def broadcast_value(value: T) -> T:
    """Return rank 0's value on every rank.

    Collective: every rank must call this. In a world of one it returns its argument.

    Args:
        value: Rank 0's is sent and must be picklable; the others' are ignored.

    Returns:
        Rank 0's value.

    Example:
        >>> broadcast_value("run-7")
        'run-7'
    """
    return run_on_rank0(lambda: value, name="broadcast_value")


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
    payload = _meet(name, gather=_dump_for_others(value, name), lead=dump_value)
    return [cast(T, load_value(item)) for item in load_value(payload)]


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


def _meet(
    name: str,
    *,
    gather: bytes | None,
    lead: Callable[[list[bytes]], bytes],
    timeout: float | None = None,
) -> bytes:
    """Go through one numbered call.

    Args:
        name: What messages call it.
        gather: This rank's contribution; None for a call in which rank 0 waits for nobody.
        lead: What rank 0 does with the contributions; its value goes to all ranks.
        timeout: Bound in seconds of the wait for others, or None.
    """
    channel = get_channel()
    place = _calling_place()
    if channel.leading:
        raise GroupError(
            f"[rank 0/{channel.world_size}] {name} ({place}) was called within {channel.leading}, "
            "which rank 0 runs alone while the other ranks wait. Call it outside of that."
        )
    channel.calls += 1
    call = _Call(channel.calls, name, place)
    if gather and channel.rank != 0:
        call = _with_contribution(channel, call, gather)
    channel.publish(f"at/{channel.rank}", dump_value(call))
    if channel.rank == 0:
        return _answer(channel, call, gather, lead, timeout)
    return _await_answer(channel, call, timeout)


def _answer(
    channel: Channel,
    call: _Call,
    gather: bytes | None,
    lead: Callable[[list[bytes]], bytes],
    timeout: float | None,
) -> bytes:
    """Rank 0: collect what the call needs, do the work, publish the outcome."""
    key = f"out/{call.number}"
    try:
        contributions = [] if gather is None else _collect(channel, call, gather, timeout)
        channel.leading = str(call)
        payload = lead(contributions)
    except BaseException as error:
        channel.publish(key, dump_value(_Outcome(call, failure=record_exception(error))))
        raise
    finally:
        channel.leading = ""
    channel.publish(key, dump_value(_Outcome(call, value=payload)))
    return payload


def _collect(channel: Channel, call: _Call, own: bytes, timeout: float | None) -> list[bytes]:
    arrived = {0: own}
    missing = list(range(1, channel.world_size))

    def everyone_is_here() -> bool:
        for rank in tuple(missing):
            other = _announced(channel, rank)
            if other is None or other.number < call.number:
                continue
            _check_same(call, other, rank, channel)
            _check_not_ahead(call, other, rank)
            arrived[rank] = _contribution(channel, other, rank) if own else b""
            missing.remove(rank)
        return not missing

    if not _wait(channel, call, everyone_is_here, missing, timeout):
        places = "; ".join(f"rank {rank}: {_last_place(channel, rank)}" for rank in missing)
        raise GroupError(
            f"[rank 0/{channel.world_size}] {name_ranks(missing)} did not reach {call} within "
            f"{timeout:.1f} s. Last seen: {places}."
        )
    return [arrived[rank] for rank in range(channel.world_size)]


def _await_answer(channel: Channel, call: _Call, timeout: float | None) -> bytes:
    """Every other rank: wait for rank 0's outcome, looking at what rank 0 does meanwhile."""
    key = f"out/{call.number}"
    answers: list[bytes] = []
    started = time.monotonic()

    def answered() -> bool:
        payload = channel.fetch(key)
        if payload is not None:
            answers.append(payload)
            return True
        if time.monotonic() - started < _LEADER_AFTER:
            return False
        leader = _announced(channel, 0)
        if leader is not None and leader.number == call.number:
            _check_same(call, leader, 0, channel)
        return False

    # Rank 0 applies the time-out and names who is missing; this one only outlasts it.
    limit = None if timeout is None else timeout + _NOTICE_AFTER
    if not _wait(channel, call, answered, [0], limit):
        raise GroupError(
            f"[rank {channel.rank}/{channel.world_size}] Rank 0 did not reach {call} within "
            f"{timeout:.1f} s. Last seen: rank 0: {_last_place(channel, 0)}."
        )
    channel.delete_when_read(key, f"read/{call.number}", readers=channel.world_size - 1)
    return _unpack(load_value(answers[0]), call, channel)


def _unpack(outcome: _Outcome, call: _Call, channel: Channel) -> bytes:
    if outcome.failure is None:
        # Rank 0 may have gone through a call of another name without waiting for anybody.
        _check_same(call, outcome.call, 0, channel)
        assert outcome.value is not None
        return outcome.value
    peer = PeerError(
        f"[rank {channel.rank}/{channel.world_size}] {call} failed on rank 0: "
        f"{outcome.failure.summary}\n\n{outcome.failure.traceback}",
        rank=0,
        traceback=outcome.failure.traceback,
    )
    error = outcome.failure.rebuild()
    if error is None:
        raise peer
    peer.__cause__ = error.__cause__ or error.__context__
    raise error from peer


def _with_contribution(channel: Channel, call: _Call, contribution: bytes) -> _Call:
    """Put a small contribution into the announcement itself, and a large one beside it."""
    if len(contribution) <= _INLINE_BYTES:
        return replace(call, contribution=contribution)
    channel.publish(f"in/{call.number}/{channel.rank}", contribution)
    return call


def _contribution(channel: Channel, call: _Call, rank: int) -> bytes:
    if call.contribution is not None:
        return call.contribution
    key = f"in/{call.number}/{rank}"
    payload = channel.fetch(key)
    assert payload is not None, f"{key} is announced but not there"
    channel.delete(key)
    return payload


def _announced(channel: Channel, rank: int) -> _Call | None:
    payload = channel.fetch(f"at/{rank}", lasting=True)
    return None if payload is None else cast(_Call, load_value(payload))


def _last_place(channel: Channel, rank: int) -> str:
    call = _announced(channel, rank)
    return "no call of this family yet" if call is None else f"{call}, call {call.number}"


def _check_same(call: _Call, other: _Call, rank: int, channel: Channel) -> None:
    if call.name == other.name:
        return
    here = f"rank {channel.rank} is in {call}"
    there = f"rank {rank} in {other}"
    raise GroupError(
        f"The ranks took different paths: {here}, {there}. All ranks must make the same calls in "
        "the same order; does one of them stand inside `if is_rank0():`, or behind a condition "
        "that differs between ranks?"
    )


def _check_not_ahead(call: _Call, other: _Call, rank: int) -> None:
    if other.number > call.number:
        raise GroupError(
            f"The ranks took different paths: rank 0 is in {call}, call {call.number}, and rank "
            f"{rank} is already in call {other.number}. Did it catch an error that rank 0 has not "
            "seen?"
        )


def _wait(
    channel: Channel,
    call: _Call,
    ready: Callable[[], bool],
    awaited: Sequence[int],
    timeout: float | None,
) -> bool:
    def notice(ranks: Sequence[int]) -> None:
        _logger.warning(
            "[rank %d/%d] %s has waited %.0f s for %s. Does the call stand inside "
            "`if is_rank0():`, or are the others in an ordinary collective?",
            *(channel.rank, channel.world_size, call, _NOTICE_AFTER, name_ranks(ranks)),
        )

    return channel.wait(
        ready, lambda: awaited, timeout=timeout, notice_after=_NOTICE_AFTER, notice=notice
    )


def _calling_place() -> str:
    """File and line of the code outside ddpkit that made this call."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads the sources
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
