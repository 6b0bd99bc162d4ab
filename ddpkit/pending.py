"""What has to be finished before a rank reports its end, and what is put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["finish", "finish_before_end", "undo_at_end", "undone_at_end"]

_unfinished: list[Callable[[], None]] = []
_undo: list[Callable[[], None]] = []


def finish_before_end(callback: Callable[[], None]) -> None:
    """Have something finished before the group is left and before a rank reports its result.

    Args:
        callback: Waits for it, and raises what went wrong with it. Called each time; once is enough
            to register it.
    """
    if callback not in _unfinished:
        _unfinished.append(callback)


def finish() -> None:
    """Wait for everything that has been registered.

    Raises:
        Exception: What the first one that has failed raises.
    """
    for callback in _unfinished:
        callback()


def undo_at_end(callback: Callable[[], None]) -> None:
    """Have something put back at the end of the innermost group or function that is running.

    Args:
        callback: Called once; never, where this is called outside of all of them.
    """
    _undo.append(callback)


@contextlib.contextmanager
def undone_at_end() -> Iterator[None]:
    """Put back, after a block, what has been registered within it."""
    kept = len(_undo)
    try:
        yield
    finally:
        while len(_undo) > kept:
            _undo.pop()()
