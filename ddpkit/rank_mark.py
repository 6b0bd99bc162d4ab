"""What the pytest mark `ranks` asks for: numbers of ranks and the options of their launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpkit.errors import ConfigError

DESCRIPTION = (
    "ranks(*world_sizes, timeout=60, time_limit=None, start_method='auto', init_group=True): run "
    "the body of the test on so many ranks (two, if none is given), once for each number. Fixtures "
    "are set up once, in the process of pytest. The options are those of ddpkit.testing.run_ranks."
)
_OPTIONS = ("timeout", "time_limit", "start_method", "init_group")
_METHODS = ("auto", "fork", "forkserver", "spawn")
_DEFAULT = (2,)


@dataclass(frozen=True)
class RankMark:
    """A mark that was understood."""

    world_sizes: tuple[int, ...]
    """Numbers of ranks; the test runs once for each."""
    options: Mapping[str, Any]
    """Options of `run_ranks` that were given."""


def read_mark(arguments: Sequence[Any], options: Mapping[str, Any]) -> RankMark:
    """Understand the arguments of a mark.

    Args:
        arguments: Its positional arguments.
        options: Its keyword arguments.

    Returns:
        What it asks for.

    Raises:
        ConfigError: It cannot be understood.

    Example:
        >>> read_mark([1, 2], {"timeout": 5}).world_sizes
        (1, 2)
    """
    wrong = [each for each in arguments if type(each) is not int or each < 1]
    if wrong:
        raise ConfigError(
            f"@pytest.mark.ranks({', '.join(map(repr, arguments))}) was given, but numbers of "
            "ranks are whole and at least 1. Write ranks(2), or ranks(1, 2, 3) for three tests."
        )
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"@pytest.mark.ranks has no option {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(_OPTIONS)}."
        )
    for name, value in options.items():
        expected = _problem_of(name, value)
        if expected is not None:
            raise ConfigError(
                f"@pytest.mark.ranks was given {name}={value!r}, but {name} is {expected}."
            )
    sizes = tuple(dict.fromkeys(arguments)) or _DEFAULT
    return RankMark(sizes, dict(options))


def _problem_of(name: str, value: object) -> str | None:
    """Say what an option has to be, None where it is that."""
    if name == "start_method":
        return None if value in _METHODS else f"one of {', '.join(_METHODS)}"
    if name == "init_group":
        return None if isinstance(value, bool) else "True or False"
    if value is None and name == "time_limit":
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return None
    return "a positive number of seconds"
