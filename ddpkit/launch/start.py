"""One launch from its beginning to its end: how to start ranks, and what the caller gets."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import multiprocessing
import signal
import sys
import time
import warnings
from typing import Any, cast

from ddpkit.errors import ConfigError, WorkerError
from ddpkit.launch import forksafe
from ddpkit.launch.job import Job
from ddpkit.launch.output import RankLogs
from ddpkit.launch.report import raise_failure, raise_timeout
from ddpkit.launch.signals import SignalWatch
from ddpkit.launch.supervisor import CheckInError, Outcome, StartMethod, Supervisor
from ddpkit.launch.worker import COMPILER
from ddpkit.serialize import load_value

_logger = logging.getLogger(__name__)


class _Experience:
    """What earlier launches of this program have shown."""

    ranks_use_compiler = False


def launch(job: Job) -> list[Any]:
    """Run a job on `job.nproc` ranks of this machine.

    Args:
        job: What to run, and how.

    Returns:
        One value for each rank.

    Raises:
        ConfigError: Something cannot be sent or written, or the start method cannot be used; no
            process was started then.
        BaseException: What the rank raised that failed first, with a WorkerError as its cause.
        WorkerError: A rank ended without an exception that could be rebuilt.
        WorkerTimeoutError: The time limit passed.
        KeyboardInterrupt: Ctrl-C was pressed; the ranks have ended.
    """
    limit = job.options.time_limit
    deadline = math.inf if limit is None else time.monotonic() + limit
    job.check_arguments()
    method = _choose_start_method(job.options.start_method)
    launching = _Launch(job, deadline)
    try:
        outcome = launching.run(method)
    finally:
        # Whatever else has happened, and at the last moment, too: a signal is not lost.
        launching.watch.pass_on()
    if launching.watch.received and not outcome.complete:
        raise _stopped_by_signal(launching.watch, job)
    if outcome.timed_out:
        assert limit is not None
        raise_timeout(outcome.failures, outcome.unfinished, job.name, limit)
    if outcome.failures:
        raise_failure(outcome.failures, job.nproc, job.name, outcome.unfinished)
    _warn_of_threads(outcome, job)
    _Experience.ranks_use_compiler |= outcome.used_compiler
    return [_load_result(data, rank) for rank, data in enumerate(outcome.results)]


def _warn_of_threads(outcome: Outcome, job: Job) -> None:
    if not outcome.ended_threads:
        return
    which = "; ".join(
        f"rank {rank}: {', '.join(map(repr, names))}"
        for rank, names in outcome.ended_threads.items()
    )
    warnings.warn(
        f"{job.name}() has returned, but threads that it started were still at work after the "
        f"shutdown_grace of {job.options.shutdown_grace:g} s and were ended ({which}). Join them "
        "before it returns, or raise shutdown_grace.",
        RuntimeWarning,
        stacklevel=5,
    )


class _Launch:
    """The attempts to start one job, and what they share."""

    def __init__(self, job: Job, deadline: float) -> None:
        self._job = job
        self._deadline = deadline
        self._supervisor: Supervisor | None = None
        self.watch = SignalWatch(self._signal_ranks)

    def run(self, method: StartMethod) -> Outcome:
        """Run the job, starting over where a fork turns out to hang."""
        with self.watch:
            return self._run(method)

    def _run(self, method: StartMethod) -> Outcome:
        try:
            return self._attempt(method)
        except CheckInError as error:
            if method != "fork" or self._job.options.start_method == "fork":
                raise WorkerError(
                    f"The ranks could not be started by {method!r}: {error}. Nothing of the "
                    "function has run."
                ) from error
            warnings.warn(
                f"A forked rank hung before it ran anything ({error}), so the ranks are started "
                "by forkserver instead. Set start_method='forkserver' to go there at once.",
                RuntimeWarning,
                stacklevel=6,
            )
        return self._attempt("forkserver")

    def _attempt(self, method: StartMethod) -> Outcome:
        job = self._job
        with contextlib.closing(RankLogs(job.options.log_dir, job.nproc, job.name)) as logs:
            self._supervisor = Supervisor(
                job, method, deadline=self._deadline, watch=self.watch, logs=logs
            )
            return self._supervisor.run()

    def _signal_ranks(self, number: signal.Signals) -> None:
        if self._supervisor is not None:
            self._supervisor.signal_all(number)


def _stopped_by_signal(watch: SignalWatch, job: Job) -> WorkerError:
    """The error for a caller whose own handler has let the program go on."""
    name = watch.received[0].name
    return WorkerError(
        f"{job.name}() was stopped, because this program got {name} while its ranks ran.",
        signal_name=name,
    )


def _choose_start_method(requested: str) -> StartMethod:
    if requested != "auto":
        return _check_requested(cast(StartMethod, requested))
    reason = _reason_against_fork()
    if reason is None:
        return "fork"
    available = multiprocessing.get_all_start_methods()
    method: StartMethod = "forkserver" if "forkserver" in available else "spawn"
    _logger.debug("starting ranks by %s and not by fork, because %s", method, reason)
    return method


def _reason_against_fork() -> str | None:
    reason = forksafe.prepare_fork()
    if reason is not None or not _Experience.ranks_use_compiler or COMPILER in sys.modules:
        return reason
    # Once here, so that not every rank of every launch pays for it again. What it brings may
    # start threads, so it comes before the fork is found safe.
    importlib.import_module(COMPILER)
    return forksafe.prepare_fork()


def _check_requested(requested: StartMethod) -> StartMethod:
    if requested == "fork":
        reason = _reason_against_fork()
        if reason is not None:
            raise ConfigError(
                f"start_method='fork' was given, but this process cannot be forked safely: "
                f"{reason}. Use 'auto', which forks only when that is safe."
            )
    return requested


def _load_result(data: bytes, rank: int) -> Any:
    try:
        return load_value(data)
    except Exception as error:
        raise WorkerError(
            f"The result of rank {rank} arrived but cannot be rebuilt here "
            f"({type(error).__name__}: {error}).",
            rank=rank,
        ) from error
