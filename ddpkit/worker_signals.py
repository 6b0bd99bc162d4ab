"""Data workers that go on when a signal asks their rank to stop.

A scheduler that takes a machine back signals every process of a job. A rank that has called
`stop_requested()` takes that for a request; its data workers would end, and it would fail while it
waits for the batch that the step needs, in which the other ranks are, too. So a rank shares one
byte with the workers that are forked from it, which says whether it takes signals for requests.
While it does, a worker that is signalled stays for a while; it ends when its rank has no more use
for it, as ever.
"""

from __future__ import annotations

import mmap
import os
import signal
from types import FrameType

__all__ = ["SharedFlag", "outlast_requests", "shared_flag", "take_requests"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_BOUND = 60  # seconds, as long as ranks have that were asked to stop


class SharedFlag:
    """One bit that a process sets and the children that it forks can see.

    Pickled for a worker that is not forked it is a flag that nobody sets.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 1)

    @property
    def is_set(self) -> bool:
        """Whether it is set."""
        return self._page[0] == 1

    def set(self, value: bool) -> None:
        """Set it, or take that back."""
        self._page[0] = int(value)

    def __reduce__(self) -> tuple[type[SharedFlag], tuple[()]]:
        return SharedFlag, ()


_flags: dict[int, SharedFlag] = {}


def shared_flag() -> SharedFlag:
    """Return this process's flag: whether it takes signals for requests to stop."""
    pid = os.getpid()
    if pid not in _flags:
        _flags.clear()  # that of the process that this one was forked from
        _flags[pid] = SharedFlag()
    return _flags[pid]


def take_requests(taken: bool) -> None:
    """Tell the workers of this process, those that run already too, what signals mean.

    Args:
        taken: Whether this process takes them for requests to stop.
    """
    shared_flag().set(taken)


def outlast_requests(rank: SharedFlag) -> None:
    """Have this worker go on for a while when it is signalled as its rank is.

    Handlers that are there are left alone. Where the rank takes no requests, a worker ends at
    once: quietly after SIGTERM, with which a loader ends workers that it needs no more.

    Args:
        rank: The flag of the rank that this worker belongs to.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if rank.is_set:
            signal.alarm(_BOUND)  # which ends the worker by default
            return
        if number == signal.SIGTERM:
            # As torch's own handler in C does, in whose place this one is. It could tell by whom it
            # was sent; a worker that somebody else has ended is missed by its loader all the same.
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, note)
