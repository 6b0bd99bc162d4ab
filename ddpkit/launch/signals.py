"""What signals mean for a program while it has ranks running.

- SIGINT (Ctrl-C), SIGTERM and SIGHUP are noted; the ranks are stopped first, and then the signal
  does to this program what it would have done. A second one ends the ranks without further grace.
- SIGTSTP (Ctrl-Z) stops the ranks together with this program, and SIGCONT lets all of them go on.
- Whatever was ignored before (SIGHUP under nohup, SIGINT in a script's background job) stays so.
- All others, SIGUSR1 among them, keep the meaning that they had. Where they end this program, its
  ranks go with it.
- Once a rank has called `stop_requested()`, SIGTERM and SIGUSR1 are requests to stop together. The
  first one is passed on to the ranks, which then have a minute to end by themselves. If they do,
  and have followed it, that was its meaning, and only a handler of the program's own is still to
  run. If they do not, or if another signal comes, the ranks are stopped as above.

Handlers can be set in the main thread alone. A launch in another thread leaves signals as they are:
SIGTERM ends the program and the ranks with it, and Ctrl-C is the main thread's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BLOCKED_IN_FORKS = frozenset({*_ENDING, signal.SIGTSTP})


class SignalWatch:
    """Notes the signals that would end this program, for as long as a `with` block lasts.

    Args:
        signal_ranks: Sends a signal to every rank; used where this program is stopped by Ctrl-Z.
    """

    def __init__(self, signal_ranks: Callable[[signal.Signals], None]) -> None:
        self.received: list[signal.Signals] = []
        """Those that end the launch, in the order of their arrival."""
        self.request: signal.Signals | None = None
        """The one that has asked the ranks to stop together."""
        self.followed = False
        """Whether the ranks have agreed to stop."""
        self._held: frozenset[signal.Signals] = frozenset()
        self._signal_ranks = signal_ranks
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> SignalWatch:
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if _is_ours_to_note(number):
                    self._before[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop_together)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wake.close()
        self._woken.close()

    def fileno(self) -> int:
        """A descriptor that becomes readable when a signal has arrived."""
        return self._woken.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable again, until the next signal."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass

    def descriptors(self) -> tuple[int, int]:
        """What a forked rank has to close."""
        return self._wake.fileno(), self._woken.fileno()

    def take_as_requests(self, numbers: Collection[signal.Signals]) -> None:
        """Take the first of these signals, from now on, for a request to stop together.

        Args:
            numbers: Those that the ranks know what to do with; none of them at the end.
        """
        self._held = frozenset(numbers)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._held - self._before.keys():
            if _is_ours_to_note(number):
                self._before[number] = signal.signal(number, self._note)
        for number in self._before.keys() - self._held - {*_ENDING, signal.SIGTSTP}:
            signal.signal(number, self._before.pop(number))

    def refuse_request(self) -> None:
        """Have the request end the launch, as such a signal does without `stop_requested()`."""
        if self.request is not None:
            self.received.append(self.request)

    def pass_on(self) -> None:
        """Let the first signal, if any, do what it does without ddpkit's handlers."""
        number = self._to_pass_on()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            os.kill(self._pid, number)

    def _to_pass_on(self) -> signal.Signals | None:
        if self.received or self.request is None:
            return next(iter(self.received), None)
        has_own_handler = callable(signal.getsignal(self.request))
        return self.request if has_own_handler or not self.followed else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._held and self.request is None:
            self.request = signal.Signals(number)
        else:
            self.received.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"!")

    def _stop_together(self, number: int, frame: FrameType | None) -> None:
        self._signal_ranks(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(self._pid, signal.SIGTSTP)  # this program stands here until SIGCONT
        signal.signal(signal.SIGTSTP, self._stop_together)
        self._signal_ranks(signal.SIGCONT)


def _is_ours_to_note(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        # A handler of the user's own decides itself what Ctrl-C is to do.
        return handler is signal.default_int_handler
    return handler is signal.SIG_DFL or callable(handler)


@contextlib.contextmanager
def blocked() -> Iterator[set[int]]:
    """Hold signals back during a fork, so that none reaches a child with the parent's handlers.

    Yields:
        The mask that was in force, for the child to set.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_FORKS)
    try:
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_in_rank(mask: set[int] | None) -> None:
    """Undo the parent's Python handlers, which a fork inherits; what is ignored stays ignored.

    Args:
        mask: The signals to hold back from now on; None where nothing was blocked for the fork.
    """
    for number in (*_BLOCKED_IN_FORKS, signal.SIGUSR1):
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.set_wakeup_fd(-1)
    # A rank is in a background process group: writing must not stop it where `stty tostop` is set.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
