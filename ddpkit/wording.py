"""How messages list things."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["name_ranks", "shortened"]


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


def name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """Name ranks in a message.

    Args:
        ranks: The ranks.
        limit: How many are named before the others are counted.

    Example:
        >>> name_ranks([1])
        'rank 1'
        >>> name_ranks([1, 2, 3, 4], limit=3)
        'ranks 1, 2, 3 and 1 more'
    """
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
