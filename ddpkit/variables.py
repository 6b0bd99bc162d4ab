"""Reading environment variables: numbers, and sets that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddpkit.errors import ConfigError

__all__ = ["LAUNCHER_SWITCH", "first_set", "incomplete", "integer", "require", "shown"]

LAUNCHER_SWITCH = "DDPKIT_LAUNCHER"
"""`none` switches the detection of launchers off."""

_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)


def integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number.

    Args:
        environ: Environment variables.
        name: Which one.
        default: What it is where it is not set. Without one it has to be set.

    Raises:
        ConfigError: It is not a whole number, or not set and without a default.

    Example:
        >>> integer({"RANK": "3"}, "RANK")
        3
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _WHOLE_NUMBER.fullmatch(text):
        raise ConfigError(f"{name}={text!r} was given, but it must be a whole number.")
    return int(text)


def shown(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """List variables with their values; those that are not set are left out.

    Args:
        environ: Environment variables.
        names: Which ones.

    Example:
        >>> shown({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
        "RANK='0', WORLD_SIZE='2'"
    """
    return ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ) or "none"


def first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of several names that is set, or None.

    Example:
        >>> first_set({"SLURM_JOBID": "12"}, "SLURM_JOB_ID", "SLURM_JOBID")
        'SLURM_JOBID'
    """
    return next((name for name in names if name in environ), None)


def require(
    environ: Mapping[str, str],
    names: Sequence[str],
    source: str,
    *,
    also_shown: Iterable[str] = (),
) -> None:
    """Check that variables which belong together are all set.

    Args:
        environ: Environment variables.
        names: Those that have to be set.
        source: Whose variables they are, for the message.
        also_shown: Others that the message lists if they are set.

    Raises:
        ConfigError: Some are missing; it lists what is set and what is missing.

    Example:
        >>> require({"RANK": "0"}, ["RANK"], "torchrun")
    """
    if any(name not in environ for name in names):
        raise incomplete(environ, names, source, also_shown=also_shown)


def incomplete(
    environ: Mapping[str, str],
    names: Sequence[str],
    source: str,
    *,
    also_shown: Iterable[str] = (),
) -> ConfigError:
    """Return the error that lists which variables are set and which are missing.

    Args:
        environ: Environment variables.
        names: Those that have to be set.
        source: Whose variables they are.
        also_shown: Others that are listed if they are set.

    Example:
        >>> print(incomplete({"RANK": "0"}, ["RANK", "WORLD_SIZE"], "torchrun"))
        The variables of torchrun are incomplete: set are RANK='0'; missing are WORLD_SIZE. Set ...
    """
    missing = [name for name in names if name not in environ]
    return ConfigError(
        f"The variables of {source} are incomplete: set are "
        f"{shown(environ, [*names, *also_shown])}; missing are {', '.join(missing)}. Set all of "
        f"them, or none, or {LAUNCHER_SWITCH}=none to ignore them."
    )
