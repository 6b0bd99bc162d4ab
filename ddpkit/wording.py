"""How messages list things."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shortened"]


def shortened(items: Sequence[str], limit: int = 6) -> str:
    """List the first few of many things.

    Args:
        items: What to list.
        limit: How many of them.

    Example:
        >>> shortened(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
