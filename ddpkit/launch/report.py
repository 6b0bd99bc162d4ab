"""Failure records, the root cause among them, and the exception that the caller gets."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals
from typing import NoReturn

from ddpkit.errors import GroupError, PeerError, RankFailure, WorkerError
from ddpkit.serialize import ExceptionRecord, record_exception

_CONSEQUENCES = frozenset({"transport", "peer"})
# Where an error of a collective surfaces: in torch.distributed, in DDP, or in the backward pass
# that DDP reduces in. Its text is no evidence, for gloo has many.
_TRANSPORT_PLACES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/autograd/graph.py",
    "ddpkit/control.py",
)


@dataclass(frozen=True)
class Failure:
    """A failed rank: what everybody may read, and the exception itself where there was one."""

    info: RankFailure
    record: ExceptionRecord | None = None
    system_exit: bool = False


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


def failure_of_end(rank: int, exit_code: int | None) -> Failure:
    """Describe a rank whose process ended without a result; called in the parent."""
    signal_name = _signal_name(exit_code)
    if signal_name is not None:
        hint = " (the kernel's out-of-memory killer is the usual cause)"
        summary = f"killed by {signal_name}{hint if signal_name == 'SIGKILL' else ''}"
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


def classify(error: BaseException) -> str:
    """Tell a cause from what is likely a consequence of another rank's end."""
    if isinstance(error, PeerError):
        return "peer"
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, RuntimeError) and _is_transport(error):
        return "transport"
    return "exception"


def _is_transport(error: RuntimeError) -> bool:
    if isinstance(error, GroupError):
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        return any(
            frame.filename.replace("\\", "/").endswith("ddpkit/control.py") for frame in frames
        )
    if type(error).__module__ not in ("builtins", "torch", "torch.distributed", "torch._C"):
        return False
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        place in frame.filename.replace("\\", "/")
        for frame in frames
        for place in _TRANSPORT_PLACES
    )


def is_likely_consequence(error: BaseException) -> bool:
    """Tell whether an exception of this rank likely has its cause in another rank."""
    return classify(error) in _CONSEQUENCES


def is_consequence(failure: Failure) -> bool:
    """Tell whether a failure likely has its cause in another rank."""
    return failure.info.kind in _CONSEQUENCES


def order_by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures: the root cause first, by kind and then by time."""
    return sorted(failures, key=lambda failure: (is_consequence(failure), failure.info.time))


def describe(failures: Sequence[Failure], world_size: int, name: str) -> str:
    """Write the text that a person reads.

    Args:
        failures: Root cause first.
        world_size: Number of ranks that were started.
        name: Name of the function that they ran.
    """
    root, *others = failures
    lines = [
        f"Rank {root.info.rank} of {world_size} running {name}() on {root.info.host} failed: "
        f"{root.info.summary}"
    ]
    lines += [
        f"  also [rank {other.info.rank}/{world_size}]: {_first_line(other.info.summary)}"
        for other in others
    ]
    if root.info.traceback:
        tagged = root.info.traceback.rstrip().replace("\n", f"\n[rank {root.info.rank}] ")
        lines += ["", f"[rank {root.info.rank}] {tagged}"]
    return "\n".join(lines)


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


def raise_failure(failures: Sequence[Failure], world_size: int, name: str) -> NoReturn:
    """Raise the original exception of the root cause, with a WorkerError as its cause.

    Args:
        failures: All failures of the launch, in any order, at least one.
        world_size: Number of ranks that were started.
        name: Name of the function that they ran.

    Raises:
        BaseException: The original exception where it can be rebuilt.
        WorkerError: Otherwise.
    """
    common = common_exit(failures, world_size)
    if common is not None:
        raise common
    ordered = order_by_cause(failures)
    root = ordered[0]
    worker_error = WorkerError(
        describe(ordered, world_size, name),
        rank=root.info.rank,
        host=root.info.host,
        exit_code=root.info.exit_code,
        signal_name=root.info.signal_name,
        traceback=root.info.traceback,
        failures=tuple(failure.info for failure in ordered),
    )
    error = root.record.rebuild() if root.record is not None and not root.system_exit else None
    if error is None:
        raise worker_error
    worker_error.__cause__ = error.__cause__ or error.__context__
    raise error from worker_error
