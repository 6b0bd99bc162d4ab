"""The exceptions that ddpkit raises.

```
DdpkitError(Exception)
├── ConfigError(DdpkitError, ValueError)       bad argument or contradictory launch variables
├── GroupError(DdpkitError, RuntimeError)      group missing or other settings; different paths
├── WorkerError(DdpkitError, RuntimeError)     in the caller of a launch: a rank failed
│   └── WorkerTimeoutError                     the time limit of a launch passed
├── PeerError(DdpkitError, RuntimeError)       on a healthy rank: another rank failed meanwhile
└── CheckpointError(DdpkitError, RuntimeError) saving or loading failed
```

All of them survive pickling, because they cross processes.
"""

from __future__ import annotations

import copyreg
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DdpkitError",
    "GroupError",
    "PeerError",
    "RankFailure",
    "WorkerError",
    "WorkerTimeoutError",
]


class DdpkitError(Exception):
    """Base class of every exception that ddpkit raises itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without calling `__init__`, whose keyword-only arguments pickle cannot pass."""
        rebuild = copyreg.__newobj__  # type: ignore[attr-defined]  # not in its stub
        return rebuild, (type(self), *self.args), self.__dict__


class ConfigError(DdpkitError, ValueError):
    """An argument is wrong, or the variables of a launcher are partial or contradict each other."""


class GroupError(DdpkitError, RuntimeError):
    """The process group is missing, has other settings, or its ranks took different paths."""


@dataclass(frozen=True)
class RankFailure:
    """What is known of one rank that did not deliver its result."""

    rank: int
    """Global rank."""
    host: str
    """Host name of the machine that the rank ran on."""
    kind: str
    """What it is: `exception`; `group` (a GroupError); `transport` (a collective failed) or `peer`
    (PeerError), which are likely consequences; `exit` or `signal` (how the process ended); or
    `stopped` (it was at work when the launch was ended because of another rank or of time)."""
    summary: str
    """One line: exception type and message, how the process ended, or where it was."""
    traceback: str = ""
    """Text of the remote traceback, or of the stacks of a rank that was stopped; else empty."""
    exit_code: int | None = None
    """Exit status of the process, where it ended by one."""
    signal_name: str | None = None
    """Name of the signal that ended the process, such as `SIGKILL`."""
    time: float = 0.0
    """Monotonic time of the failure in seconds, comparable between ranks of one machine."""


class WorkerError(DdpkitError, RuntimeError):
    """A rank that a launch started has failed.

    Attributes:
        rank: Global rank of the failure that was the root cause.
        host: Host name of that rank.
        exit_code: Exit status of its process, or None.
        signal_name: Name of the signal that ended it, or None.
        traceback: Text of its traceback, or an empty string.
        failures: One `RankFailure` for every rank that did not deliver its result, the root cause
            first.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        host: str = "",
        exit_code: int | None = None,
        signal_name: str | None = None,
        traceback: str = "",
        failures: tuple[RankFailure, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.traceback = traceback
        self.failures = failures


class WorkerTimeoutError(WorkerError):
    """The time limit of a launch passed before every rank had delivered its result.

    Attributes:
        stacks: Text of the Python stacks by global rank, where they could be collected.
    """

    def __init__(
        self, message: str, *, stacks: dict[int, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.stacks: dict[int, str] = stacks or {}


class PeerError(DdpkitError, RuntimeError):
    """Another rank failed, or left, while this healthy rank waited for it.

    Attributes:
        rank: Global rank of the one that failed.
        traceback: Text of its traceback, or an empty string where it left none.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class CheckpointError(DdpkitError, RuntimeError):
    """A checkpoint could not be saved or loaded; the original error is the `__cause__`.

    Attributes:
        path: The path that was given.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path
