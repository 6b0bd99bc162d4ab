"""Stopping together: a signal to any rank makes all ranks leave at the same step.

A handler only notes that a signal has come. What the ranks do about it is agreed in
`stop_requested()`, so that none of them leaves while another goes on to the next collective.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddpkit import pending
from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import communication_device, require_group
from ddpkit.worker_signals import take_requests

__all__ = ["Listener", "stop_requested", "tell"]

_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listener:
    """Whom a started rank tells what it does with signals: its parent."""

    holds: Callable[[Collection[signal.Signals]], None]
    """Called with the signals that are requests to stop from now on; with none at the end."""
    stops: Callable[[], None]
    """Called when the ranks have agreed to stop."""


# ---------------------------------------------------------------------------------- the public call


def stop_requested(*, every: int = 1) -> bool:
    """Tell whether the training shall stop, because a rank or the launching program was signalled.

    Collective: every rank must call this, once in each training step. SIGTERM or SIGUSR1 to any
    rank makes it true on all ranks at the same call, and it stays true. Then save and leave:

        for x, y in train:
            ...
            if stop_requested():
                rank0_save(state, "last.pt")
                return None

    The first call sets the handlers, so a signal that comes before does what it does by default.
    They are put back when the function of `@distributed`, or the block of `process_group`, ends; in
    a plain script they stay. A handler of your own that was there is called as well, and a signal
    that was ignored stays ignored. Children do not have the handlers; data workers that a
    `sharded_loader` has forked go on for a minute if they are signalled, too, so that no rank waits
    in vain for the batch that finishes the step. A signal that came after the last call, so that
    nobody has followed it, takes effect at the end.

    Where `@distributed` has started the ranks, both signals to the calling program are passed on
    to the ranks once one has called this, and the ranks have 60 seconds to end by themselves. Then
    the call returns the function's value, so that the program decides with which status it ends.

    A call communicates by one all-reduce of one number on the CPU: about 0.4 ms between two ranks
    of one machine whose two cores had other work as well (a group that has no backend for the CPU
    synchronises the device). In a world of one nothing is communicated.

    Args:
        every: Communicate on each n-th call only, so that the ranks stop up to n - 1 steps later.
            The same on all ranks.

    Returns:
        The same answer on every rank.

    Raises:
        ConfigError: `every` is not a whole number of at least 1.
        GroupError: The ranks passed different values of `every`, a data worker called this, or no
            group is open.
        PeerError: Another rank failed before its first call.
        RuntimeError: What torch raises where another rank fails or does not come to a later call.

    Warns:
        RuntimeWarning: The first call is made in another than the main thread, where Python cannot
            set handlers. Signals to this rank then keep their meaning; it stops with the others.

    Example:
        >>> from ddpkit import process_group
        >>> with process_group():
        ...     for step in range(100):
        ...         if stop_requested():
        ...             break
        >>> step
        99
    """
    _check_every(every)
    several = require_group("stop_requested")
    _listen()
    answer = _ask_all(every) if several else _has_come()
    if answer:
        _note_answer()
    return answer


def tell(listener: Listener) -> None:
    """Have somebody told of what this process does with signals; for started ranks."""
    _state.listener = listener


def _check_every(every: object) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"every={every!r} was given to stop_requested; expected a whole number of at least 1: "
            "on each n-th call the ranks ask each other."
        )


# -------------------------------------------------------------------------------------- agreement


@dataclass
class _Agreement:
    """What the ranks of one group have agreed on."""

    group: object = None
    every: int | None = None
    calls: int = 0
    answer: bool = False


def _ask_all(every: int) -> bool:
    """Return the answer of this call: it depends only on what the ranks have sent in it or before.

    So it is the same on all ranks, and a signal that arrives meanwhile counts for the next one.
    """
    if _state.agreement.group is not dist.group.WORLD:
        _state.agreement = _Agreement(dist.group.WORLD)
    agreement = _state.agreement
    if agreement.answer:
        return True
    if agreement.every != every:
        agreement.answer = _exchange_first(every)
        agreement.every, agreement.calls = every, 0
        return agreement.answer
    agreement.calls += 1
    if agreement.calls % every == 0:
        agreement.answer = _is_true_anywhere(_has_come())
    return agreement.answer


def _exchange_first(every: int) -> bool:
    """Agree through the side channel, and make sure that all will communicate in the same calls."""
    values, flags = zip(*exchange((every, _has_come()), name="stop_requested"), strict=True)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise GroupError(
                f"stop_requested got every={values[0]} on rank 0 and every={value} on rank {rank}. "
                "All ranks must pass the same number, or they would wait for each other in "
                "different steps."
            )
    return any(flags)


def _is_true_anywhere(flag: bool) -> bool:
    vote = torch.tensor([int(flag)], dtype=torch.int32, device=communication_device())
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


# ---------------------------------------------------------------------------------------- signals


class _Handlers:
    """The handlers of this process, from the first call until they are put back."""

    def __init__(self) -> None:
        self.came = False
        self.followed = False
        self._unfollowed: signal.Signals | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        for number in _REQUESTS:
            before = signal.getsignal(number)
            if before is signal.SIG_DFL or callable(before):
                self._before[number] = signal.signal(number, self._note)

    @property
    def held(self) -> frozenset[signal.Signals]:
        """The signals that are requests to stop."""
        return frozenset(self._before) & set(_REQUESTS)

    def follow(self) -> None:
        """Note that somebody has been told to stop."""
        self.followed = True
        self._unfollowed = None

    def put_back(self) -> None:
        """Put back what was there before, unless it has been replaced meanwhile."""
        self._pid = 0  # from another thread it cannot be put back; then it acts as if it were
        for number, before in self._before.items():
            if signal.getsignal(number) in (self._note, self._note_child):
                with contextlib.suppress(ValueError):
                    signal.signal(number, before)

    def pass_on(self) -> None:
        """Let a signal that nobody has followed do what it would have done."""
        if self._unfollowed is not None:
            os.kill(os.getpid(), self._unfollowed)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(number)]
        if os.getpid() == self._pid:
            self.came = True
            self._excuse_workers()
            if not callable(before) and not self.followed:
                self._unfollowed = signal.Signals(number)
        elif not callable(before):
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)

    def _excuse_workers(self) -> None:
        """Let data workers that the same signal ends not be a failure, from now on.

        A signal to a whole process group ends them. DataLoader then raises in the rank, wherever it
        is, and the step that the other ranks are in, too, would never be finished.
        """
        if signal.SIGCHLD not in self._before and callable(signal.getsignal(signal.SIGCHLD)):
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._note_child)

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[signal.SIGCHLD](number, frame)
        except RuntimeError as error:
            endings = [f"killed by signal: {signal.strsignal(number)}" for number in self.held]
            if not any(ending in str(error) for ending in endings):
                raise
            _logger.info("the signal that asks to stop has ended a data worker, too: %s", error)


@dataclass
class _State:
    handlers: _Handlers | None = None
    agreement: _Agreement = field(default_factory=_Agreement)
    listener: Listener | None = None
    warned: bool = False


_state = _State()


def _has_come() -> bool:
    return _state.handlers is not None and _state.handlers.came


def _listen() -> None:
    """Set the handlers, if that has not been done."""
    if _state.handlers is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        _warn_of_thread()
        return
    _reset_in_forks()
    _state.handlers = _Handlers()
    pending.undo_at_end(_stop_listening)
    take_requests(True)
    # Only now: what is passed on to this rank from here on finds the handlers.
    if _state.listener is not None:
        _state.listener.holds(_state.handlers.held)


def _warn_of_thread() -> None:
    if not _state.warned:
        _state.warned = True
        warnings.warn(
            "stop_requested() was called in another than the main thread before it was called in "
            "the main thread. Python can set signal handlers in the main thread only, so SIGTERM "
            "and SIGUSR1 to this process keep their meaning; it still stops with the other ranks. "
            "Call it once in the main thread before.",
            RuntimeWarning,
            stacklevel=4,
        )


def _note_answer() -> None:
    """Note that this rank has been told to stop, which is what the signal was for."""
    handlers, listener = _state.handlers, _state.listener
    if handlers is None or handlers.followed:
        return
    handlers.follow()
    if listener is not None:
        listener.stops()


def _stop_listening() -> None:
    """Put the handlers back and begin anew."""
    handlers, _state.handlers, _state.agreement = _state.handlers, None, _Agreement()
    if handlers is None:
        return
    if _state.listener is not None:
        _state.listener.holds(())
    take_requests(False)
    handlers.put_back()
    handlers.pass_on()


@functools.cache
def _reset_in_forks() -> None:
    """Have children made like those that know nothing of this; once for a process."""
    os.register_at_fork(after_in_child=_reset_in_child)


def _reset_in_child() -> None:
    handlers = _state.handlers
    _state.handlers, _state.agreement, _state.listener = None, _Agreement(), None
    if handlers is not None:
        handlers.put_back()
