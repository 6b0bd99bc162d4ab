"""Failure records, the root cause among them, and the exception that the caller gets."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import NoReturn

import torch

from ddpkit.consequence import CONSEQUENCES, UNEVEN, classify
from ddpkit.errors import RankFailure, WorkerError, WorkerTimeoutError
from ddpkit.serialize import ExceptionRecord, origin_of, record_exception
from ddpkit.wording import name_ranks

LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen ",
)
"""How the names of files begin that are not the user's."""

_MOST_LINES = 16
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """A failed rank: what everybody may read, and the exception itself where there was one."""

    info: RankFailure
    record: ExceptionRecord | None = None
    system_exit: bool = False


@dataclass(frozen=True)
class Stack:
    """Where a rank was."""

    place: str
    """One line, such as `barrier at train.py:41`."""
    text: str = ""
    """The stacks of its threads, the main one first; empty where it did not answer."""


def failure_of_exception(rank: int, error: BaseException) -> Failure:
    """Describe an exception that ended a rank; called in that rank."""
    record = record_exception(error)
    is_exit = isinstance(error, SystemExit)
    info = RankFailure(
        rank=rank,
        host=socket.gethostname(),
        kind=classify(error),
        summary=record.summary,
        traceback=record.traceback,
        exit_code=_exit_code(error) if isinstance(error, SystemExit) else None,
        time=time.monotonic(),
    )
    return Failure(info, record, is_exit)


def failure_of_unsendable(rank: int, value: object, error: Exception) -> Failure:
    """Describe a result that cannot be sent to the caller; called in that rank."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    problem = TypeError(
        f"The function returned a {kind}, which cannot be sent to the calling process "
        f"({type(error).__name__}: {error}). Return what can be pickled, or None."
    )
    problem.__cause__ = error
    return failure_of_exception(rank, problem)


def failure_of_end(rank: int, exit_code: int | None, *, out_of_memory: bool = False) -> Failure:
    """Describe a rank whose process ended without a result; called in the parent.

    Args:
        rank: Global rank.
        exit_code: As multiprocessing gives it: the negative number of a signal that ended it.
        out_of_memory: Whether the kernel ran out of memory meanwhile.
    """
    signal_name = _signal_name(exit_code)
    if signal_name is not None:
        summary = f"killed by {signal_name}{_memory_hint(signal_name, out_of_memory)}"
        code = None
    else:
        summary = f"ended with exit code {exit_code} without returning"
        code = exit_code
    info = RankFailure(
        rank=rank,
        host=socket.gethostname(),
        kind="exit" if signal_name is None else "signal",
        summary=summary,
        exit_code=code,
        signal_name=signal_name,
        time=time.monotonic(),
    )
    return Failure(info)


def _memory_hint(signal_name: str, out_of_memory: bool) -> str:
    if signal_name != "SIGKILL":
        return ""
    if out_of_memory:
        return " (memory ran out: the kernel's out-of-memory killer struck at that time)"
    return " (if nobody did that, the kernel's out-of-memory killer is the usual cause)"


def count_memory_kills() -> int:
    """How often the kernel of this machine has killed for want of memory; 0 if it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _signal_name(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _exit_code(error: SystemExit) -> int:
    """Status that Python would end with."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def is_consequence(failure: Failure) -> bool:
    """Tell whether a failure likely has its cause in another rank."""
    return failure.info.kind in CONSEQUENCES


def is_about_others(failure: Failure) -> bool:
    """Tell whether a failure speaks of other ranks, so that one wants to know where they are."""
    return is_consequence(failure) or failure.info.kind == "group"


def order_by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures: the root cause first, by kind and then by time."""
    return sorted(failures, key=lambda failure: (is_consequence(failure), failure.info.time))


def failures_of_unfinished(
    unfinished: Mapping[int, Stack | None], *, reason: str
) -> list[RankFailure]:
    """Describe the ranks that were at work when the launch ended.

    Args:
        unfinished: Where each of them was, None where nobody asked.
        reason: Why they were stopped.
    """
    return [
        RankFailure(
            rank=rank,
            host=socket.gethostname(),
            kind="stopped",
            summary=stack.place if stack is not None else f"stopped {reason}",
            traceback=stack.text if stack is not None else "",
            time=time.monotonic(),
        )
        for rank, stack in sorted(unfinished.items())
    ]


def describe(
    failures: Sequence[RankFailure], world_size: int, name: str, advice: str | None = None
) -> str:
    """Write the text that a person reads: what else happened first, the root cause last, once.

    Args:
        failures: Root cause first.
        world_size: Number of ranks that were started.
        name: Name of the function that they ran.
        advice: What else is to be said of the cause.
    """
    root, *others = failures
    tag = f"[rank {root.rank}/{world_size}]"
    lines = [
        f"{tag} failed on {root.host} while it ran {name}().",
        *(f"  {line}" for line in fold(others)),
        *(
            f"  rank {other.rank} was here: {other.summary}"
            for other in others
            if _has_place(other)
        ),
    ]
    lines.append(_tagged(tag, root.traceback or root.summary))
    return "\n".join(lines if advice is None else [*lines, f"{tag} {advice}"])


def explain_by_returns(root: RankFailure, returned: Sequence[int], name: str) -> str | None:
    """Explain why a collective has lost a rank, although none has failed.

    Args:
        root: The root cause among the failures.
        returned: The ranks that had delivered their results by then.
        name: Name of the function that they ran.

    Returns:
        A sentence; None where that is no explanation.
    """
    if root.kind != "transport" or not returned:
        return None
    return (
        f"{name_ranks(returned)} had returned from {name}() by then, while rank {root.rank} was in "
        f"a call that needs all ranks{_place_of(root)}. {UNEVEN}"
    )


def _tagged(tag: str, text: str) -> str:
    return "\n".join(f"{tag} {line}" for line in text.rstrip().splitlines())


def _has_place(failure: RankFailure) -> bool:
    return failure.kind == "stopped" and bool(failure.traceback)


def fold(failures: Sequence[RankFailure]) -> list[str]:
    """Say in a line for each kind of failure which ranks it concerns, and what the first one said.

    Args:
        failures: All but the root cause.
    """
    alike: dict[str, list[RankFailure]] = {}
    for failure in failures:
        if not _has_place(failure):
            alike.setdefault(_likeness(failure), []).append(failure)
    lines = [
        f"{name_ranks(sorted(each.rank for each in those))}: {_first_line(those[0].summary)}"
        f"{_place_of(those[0]) + ' (a consequence)' if those[0].kind in CONSEQUENCES else ''}"
        for those in alike.values()
    ]
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"and {left_out} more, in .failures"]


def _place_of(failure: RankFailure) -> str:
    """Say in which line of the user's an exception was raised, if that is known."""
    for file, line in reversed(_FRAME.findall(failure.traceback)):
        if not file.startswith(LIBRARIES):
            return f" at {Path(file).name}:{line}"
    return ""


def _likeness(failure: RankFailure) -> str:
    """What failures have in common that one line tells of; transport texts name their own peer."""
    line = _first_line(failure.summary)
    return line.partition(":")[0] if failure.kind in CONSEQUENCES else line


def describe_places(unfinished: Mapping[int, Stack | None]) -> str:
    """Say on one line where ranks were: `rank 0: barrier at train.py:41; rank 1: ...`."""
    return "; ".join(
        f"rank {rank}: {stack.place if stack is not None else 'unknown'}"
        for rank, stack in sorted(unfinished.items())
    )


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def common_exit(failures: Sequence[Failure], world_size: int) -> SystemExit | None:
    """Return the SystemExit that every single rank raised with the same code, if that is so."""
    codes = {failure.info.exit_code for failure in failures if failure.system_exit}
    everyone = sum(failure.system_exit for failure in failures) == world_size
    if not everyone or len(codes) != 1:
        return None
    record = failures[0].record
    error = record.rebuild() if record is not None else None
    return error if isinstance(error, SystemExit) else SystemExit(codes.pop())


def raise_failure(
    failures: Sequence[Failure],
    world_size: int,
    name: str,
    unfinished: Mapping[int, Stack | None] | None = None,
) -> NoReturn:
    """Raise the original exception of the root cause, with a WorkerError as its cause.

    Args:
        failures: All failures of the launch, in any order, at least one.
        world_size: Number of ranks that were started.
        name: Name of the function that they ran.
        unfinished: The ranks that were stopped because of it, with their places where known.

    Raises:
        BaseException: The original exception where it can be rebuilt.
        WorkerError: Otherwise.
    """
    common = common_exit(failures, world_size)
    if common is not None:
        raise common
    root, *others = order_by_cause(failures)
    everybody = (
        root.info,
        *(other.info for other in others),
        *failures_of_unfinished(unfinished or {}, reason=f"after rank {root.info.rank} had failed"),
    )
    returned = sorted(set(range(world_size)) - {info.rank for info in everybody})
    advice = explain_by_returns(root.info, returned, name)
    worker_error = WorkerError(
        describe(everybody, world_size, name, advice),
        rank=root.info.rank,
        host=root.info.host,
        exit_code=root.info.exit_code,
        signal_name=root.info.signal_name,
        traceback=root.info.traceback,
        failures=everybody,
    )
    error = root.record.rebuild() if root.record is not None and not root.system_exit else None
    if error is None:
        raise worker_error
    worker_error.__cause__ = origin_of(error)
    if advice is not None and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(advice)
    raise error from worker_error


def raise_timeout(
    failures: Sequence[Failure],
    unfinished: Mapping[int, Stack | None],
    name: str,
    time_limit: float,
) -> NoReturn:
    """Raise the error of a launch whose time limit has passed, with the stacks of its ranks."""
    stacks = {rank: stack.text for rank, stack in unfinished.items() if stack is not None}
    everybody = (
        *(failure.info for failure in order_by_cause(failures)),
        *failures_of_unfinished(unfinished, reason="at the time limit"),
    )
    tagged = "\n".join(_tagged(f"[rank {rank}]", text) for rank, text in stacks.items() if text)
    raise WorkerTimeoutError(
        f"{name}() did not end within its time_limit of {time_limit:g} s: "
        f"{describe_places(unfinished) or 'no rank had started'}\n{tagged}",
        stacks=stacks,
        rank=min(unfinished, default=-1),
        host=socket.gethostname(),
        failures=everybody,
    )
