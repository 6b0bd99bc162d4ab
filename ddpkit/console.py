"""Text for the person who watches: printed once, not once for each rank."""

from __future__ import annotations

from typing import IO

from ddpkit.group import is_rank0


def rank0_print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = True,
) -> None:
    """Print on rank 0 and do nothing on the others; takes what `print` takes.

    Does not communicate: call it on any rank, as often as you like. In a world of one it is
    `print`. Unlike `print` it flushes unless told otherwise, because the output of ranks goes
    through pipes, where it would appear only when a buffer of some kilobytes is full.

    Args:
        *values: What to print.
        sep: Text between the values.
        end: Text after the last value.
        file: Where to print; standard output by default.
        flush: Whether the text must be out before the call returns.

    Example:
        >>> rank0_print("epoch", 3)
        epoch 3
    """
    if is_rank0():
        print(*values, sep=sep, end=end, file=file, flush=flush)
