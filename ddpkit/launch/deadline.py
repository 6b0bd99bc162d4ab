"""A time limit for a function that runs in this process, where no parent can end it.

When the time has passed, the calling thread is made to raise. Python code, sleeps and waits of
Python end at once; a blocked call in C, such as a collective, when it returns. A rank of a launcher
that does not come back from one is ended; a plain program, which may hold the user's work, is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ddpkit.errors import WorkerTimeoutError
from ddpkit.watch import end_process

_WAKE_UP: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None
_LAUNCH = str(Path(__file__).parent) + os.sep


class _TimeLimitPassed(BaseException):
    """Raised in the thread whose time has passed; no `except Exception` of the user's stops it."""


class _Alarm:
    """Interrupts one thread after some time, unless it is cancelled before."""

    def __init__(self, seconds: float, end_after: float | None) -> None:
        self.stack = ""
        self._seconds = seconds
        self._end_after = end_after
        self._target = threading.get_ident()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="ddpkit-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """After this, the thread is not interrupted any more."""
        with self._lock:
            self._cancelled.set()
        self._thread.join()

    def _watch(self) -> None:
        if self._cancelled.wait(self._seconds):
            return
        with self._lock:
            if self._cancelled.is_set():
                return
            self.stack = _format_stack(self._target)
            _interrupt(self._target)
        if self._end_after is not None and not self._cancelled.wait(self._end_after):
            end_process("ddpkit: the time limit has passed, and this rank is in a call:")


def _format_stack(thread: int) -> str:
    """Format the stack of a thread from the user's function on."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  # the only way to another thread's
    frames = traceback.extract_stack(frame)
    inner = [index for index, each in enumerate(frames) if each.filename.startswith(_LAUNCH)]
    return "".join(traceback.format_list(frames[max(inner, default=-1) + 1 :] or frames))


def _interrupt(thread: int) -> None:
    if thread == threading.main_thread().ident and _WAKE_UP is not None:
        signal.pthread_kill(thread, _WAKE_UP)  # its handler raises, also out of a sleep
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(_TimeLimitPassed)
        )


def _raise(number: int, frame: FrameType | None) -> None:
    raise _TimeLimitPassed


@contextlib.contextmanager
def time_limit(
    seconds: float | None, *, name: str, rank: int, end_after: float | None = None
) -> Iterator[None]:
    """Bound the time of a block.

    Args:
        seconds: The limit; None for none.
        name: Name of the function that runs in the block.
        rank: Global rank of this process.
        end_after: Seconds after the limit when this process is ended if the block has not been left
            by then; None for never.

    Raises:
        WorkerTimeoutError: The time has passed; `stacks` says where this rank was.
    """
    if seconds is None:
        yield
        return
    alarm = _Alarm(seconds, end_after)
    try:
        with _wake_up_handler():
            alarm.start()
            try:
                yield
            finally:
                alarm.cancel()
    except _TimeLimitPassed:
        raise _timeout_error(seconds, name, rank, alarm.stack) from None
    if alarm.stack:  # the block has swallowed even this exception
        raise _timeout_error(seconds, name, rank, alarm.stack)


@contextlib.contextmanager
def _wake_up_handler() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or _WAKE_UP is None:
        yield
        return
    before: Any = signal.signal(_WAKE_UP, _raise)
    try:
        yield
    finally:
        signal.signal(_WAKE_UP, before)


def _timeout_error(seconds: float, name: str, rank: int, stack: str) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"{name}() did not end within its time_limit of {seconds:g} s. Rank {rank} was here:\n"
        f"{stack.rstrip()}",
        stacks={rank: stack},
        rank=rank,
    )
