"""Windows of batches that count only when they are complete.

A loop that accumulates gradients takes several batches before it steps, and may take them before
the first one is used. What a loader tells of its place must not count them until then: a run that
is resumed has lost the gradients of an incomplete window. The loader may be hidden in other
iterators (`tqdm`, `zip`, `enumerate`), so it asks here in which window it is being read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol


class Holder(Protocol):
    """Something with a place, such as a loader."""

    def hold(self) -> None:
        """Go on telling the place that it has now."""
        ...

    def release(self) -> None:
        """Tell the true place again."""
        ...


class Window:
    """The loaders that have been read since the last complete window.

    Example:
        >>> window = Window()
        >>> with window.reading():
        ...     current_window() is window
        True
        >>> current_window() is None
        True
    """

    def __init__(self) -> None:
        self._holders: list[Holder] = []

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is read in this block as part of the window."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def hold(self, holder: Holder) -> None:
        """Let something go on telling the place that it had when the window began."""
        if not any(holder is other for other in self._holders):
            self._holders.append(holder)
            holder.hold()

    def complete(self) -> None:
        """Let all of them tell where they are; a new window begins."""
        for holder in self._holders:
            holder.release()
        self._holders.clear()


_current: ContextVar[Window | None] = ContextVar("ddpkit_window", default=None)


def current_window() -> Window | None:
    """Return the window that batches are being read for."""
    return _current.get()
