"""What has to be finished before a rank reports its end."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["finish", "finish_before_end"]

_unfinished: list[Callable[[], None]] = []


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
