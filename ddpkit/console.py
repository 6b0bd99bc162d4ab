"""Text for the person who watches: printed once, not once for each rank."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import MutableMapping
from typing import IO, TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.group import get_rank, get_world_size, is_rank0
from ddpkit.topology import RANK_MARK, read_topology

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscript it

__all__ = ["RankLogger", "get_logger", "rank0_print", "show_own_lines"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_OFF = ("", "0", "false", "no", "off")
_TAG = "[rank "


# ---------------------------------------------------------------------------------- public calls


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


def get_logger(name: str | None = None) -> RankLogger:
    """Return a logger for a program that runs on several ranks.

    Debug and info lines come from rank 0 alone, warnings and errors from every rank, and each line
    begins with `[rank r/w]`. In a world of one it logs as `logging.getLogger(name)` does. Does not
    communicate. The rank is looked up at each line, so a logger that is made before the group
    opens, or at the top of a module, is right afterwards. Data workers log as the rank they belong
    to.

    Set the environment variable `DDPKIT_LOG_ALL_RANKS=1` to see the debug and info lines of all
    ranks.

    Levels, handlers and formats are those of `logging`, which this neither configures nor changes:
    call `logging.basicConfig(level="INFO")` in the function that the ranks run. Code that logs to
    the same name by `logging.getLogger` is not affected.

    Args:
        name: Name of the logger. Default: the name of the module that calls.

    Returns:
        A `logging.LoggerAdapter`: it has `info`, `warning`, `exception` and the rest, and what it
        writes to is its attribute `logger` (as for `.logger.addHandler`). It can be pickled.

    Raises:
        ConfigError: The name is not a string.

    Example:
        >>> log = get_logger("train")
        >>> log.info("epoch %d", 3)
    """
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__", "__main__")  # noqa: SLF001
    if not isinstance(name, str):
        raise ConfigError(
            f"get_logger() was given a {type(name).__qualname__}; expected the name of a logger, "
            "such as __name__, or nothing."
        )
    return RankLogger(logging.getLogger(name), {})


class RankLogger(_Adapter):
    """What `get_logger` returns: asks before each line which rank this is."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # logging's name
        """Tell whether this rank shows a line of this level."""
        return super().isEnabledFor(level) and _rank_shows(level)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of a message."""
        tag = _tag()
        return (f"{tag}{msg}" if tag else msg), kwargs


# --------------------------------------------------------------------------- which lines, which tag


def _rank_shows(level: int) -> bool:
    if level >= logging.WARNING or _rank_and_size()[0] == 0:
        return True
    return os.environ.get("DDPKIT_LOG_ALL_RANKS", "").strip().lower() not in _OFF


def _tag() -> str:
    rank, size = _rank_and_size()
    return f"{_TAG}{rank}/{size}] " if size > 1 else ""


def _rank_and_size() -> tuple[int, int]:
    """Say which rank a line comes from; nothing that is wrong there may stop a program."""
    try:
        rank, size = get_rank(), get_world_size()
        if size == 1 and RANK_MARK in os.environ and multiprocessing.parent_process() is not None:
            # A data worker is no rank itself, but what it says is said by the rank it works for.
            owner = read_topology(os.environ, int(os.environ[RANK_MARK]))
            return owner.rank, owner.world_size
    except ValueError:  # ConfigError is one: the variables of a launcher are partial
        return 0, 1
    return rank, size


# ---------------------------------------------------------------------------------- ddpkit's lines


def show_own_lines(level: str) -> None:
    """Show what ddpkit itself logs, on standard error as long as `logging` is not configured.

    Sets the level of the logger "ddpkit", unless that has one, and gives it a handler that is
    silent where another handler gets the lines, so that no line appears twice.

    Args:
        level: What `DDPKIT_LOG` holds: a level in words, or nothing.
    """
    word = level.strip().lower()
    if not word:
        return
    if word not in _LEVELS:
        _warn_of_level(level)
        return
    logger = logging.getLogger(__package__)
    if logger.level == logging.NOTSET:
        logger.setLevel(word.upper())
    if not any(isinstance(handler, _OwnLines) for handler in logger.handlers):
        logger.addHandler(_OwnLines())


def _warn_of_level(level: str) -> None:
    if _rank_and_size()[0] == 0:
        warnings.warn(
            f"DDPKIT_LOG={level!r} was given; expected one of {', '.join(_LEVELS)}. What ddpkit "
            "logs is not shown.",
            stacklevel=3,
        )


class _OwnLines(logging.Handler):
    """Writes to whatever is standard error now: a forked rank has another one than its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_TaggingFormatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not _rank_shows(record.levelno) or self._is_shown_elsewhere(record.name):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # one write, so that lines stay whole
            sys.stderr.flush()
        except Exception:  # noqa: BLE001  # what logging makes of an error is the user's choice
            self.handleError(record)

    def _is_shown_elsewhere(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


class _TaggingFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        # Some lines say the rank themselves, because they are needed in logs of other formats.
        if not record.message.startswith(_TAG):
            record.message = _tag() + record.message
        return super().formatMessage(record)
