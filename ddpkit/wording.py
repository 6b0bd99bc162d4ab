"""How messages list things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["by_ranks", "name_ranks", "shortened"]


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


def by_ranks(values: Mapping[int, str]) -> str:
    """Say which ranks have what.

    Args:
        values: What each rank has.

    Example:
        >>> by_ranks({0: "red", 1: "green", 2: "red"})
        'red on ranks 0, 2; green on rank 1'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {name_ranks(who)}" for value, who in ranks.items())
