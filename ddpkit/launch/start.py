"""One launch from its beginning to its end: how to start ranks, and what the caller gets."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from typing import Any, cast

from ddpkit.errors import ConfigError, WorkerError
from ddpkit.launch import forksafe
from ddpkit.launch.job import Job
from ddpkit.launch.report import raise_failure
from ddpkit.launch.supervisor import CheckInError, StartMethod, Supervisor
from ddpkit.serialize import load_value

_logger = logging.getLogger(__name__)


def launch(job: Job) -> list[Any]:
    """Run a job on `job.nproc` ranks of this machine.

    Args:
        job: What to run, and how.

    Returns:
        One value for each rank.

    Raises:
        ConfigError: Something cannot be sent, or the start method cannot be used; no process was
            started then.
        BaseException: What the rank raised that failed first, with a WorkerError as its cause.
        WorkerError: A rank ended without an exception that could be rebuilt.
    """
    job.check_arguments()
    method = _choose_start_method(job.options.start_method)
    results, failures = _run(job, method)
    if failures:
        name = getattr(job.function, "__qualname__", repr(job.function))
        raise_failure(failures, job.nproc, name)
    return [_load_result(data, rank) for rank, data in enumerate(results)]


def _run(job: Job, method: StartMethod) -> Any:
    try:
        return Supervisor(job, method).run()
    except CheckInError as error:
        if method != "fork" or job.options.start_method == "fork":
            raise WorkerError(
                f"The ranks could not be started by {method!r}: {error}. Nothing of the function "
                "has run."
            ) from error
        warnings.warn(
            f"A forked rank hung before it ran anything ({error}), so the ranks are started by "
            "forkserver instead. Set start_method='forkserver' to go there at once.",
            RuntimeWarning,
            stacklevel=5,
        )
    return Supervisor(job, "forkserver").run()


def _choose_start_method(requested: str) -> StartMethod:
    available = multiprocessing.get_all_start_methods()
    if requested != "auto":
        return _check_requested(requested, available)
    reason = forksafe.prepare_fork()
    if reason is None:
        return "fork"
    method: StartMethod = "forkserver" if "forkserver" in available else "spawn"
    _logger.debug("starting ranks by %s and not by fork, because %s", method, reason)
    return method


def _check_requested(requested: str, available: list[str]) -> StartMethod:
    if requested not in available:
        choices = ", ".join(["auto", *available])
        raise ConfigError(
            f"start_method={requested!r} was given; on this machine it must be one of {choices}."
        )
    if requested == "fork":
        reason = forksafe.prepare_fork()
        if reason is not None:
            raise ConfigError(
                f"start_method='fork' was given, but this process cannot be forked safely: "
                f"{reason}. Use 'auto', which forks only when that is safe."
            )
    return cast(StartMethod, requested)


def _load_result(data: bytes, rank: int) -> Any:
    try:
        return load_value(data)
    except Exception as error:
        raise WorkerError(
            f"The result of rank {rank} arrived but cannot be rebuilt here "
            f"({type(error).__name__}: {error}).",
            rank=rank,
        ) from error
