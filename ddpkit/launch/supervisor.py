"""Start ranks, watch them, stop them. The state of a launch is visible in `Supervisor`."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import random
import secrets
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, cast

from ddpkit import store as stores
from ddpkit import threads
from ddpkit.launch import pipe
from ddpkit.launch.job import Job, encode
from ddpkit.launch.report import Failure, failure_of_end, is_consequence
from ddpkit.launch.worker import InheritedStreams, RankSpec, run_forked, run_fresh
from ddpkit.serialize import load_value

StartMethod = Literal["fork", "forkserver", "spawn"]

# A fork that went wrong hangs at once; the others import torch, which a cold disk makes slow.
_CHECK_IN_BOUND = {"fork": 8.0, "forkserver": 300.0, "spawn": 300.0}
# How long the victims of a failure are given to be followed by its cause.
_CAUSE_BOUND = 0.5
_KILL_BOUND = 5.0
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # DistributedDataParallel imports it, 1.2 s in every rank otherwise
    "ddpkit.launch.worker",
]

_logger = logging.getLogger(__name__)


class CheckInError(Exception):
    """A started rank did not come as far as user code."""


@dataclass
class _Rank:
    """One started process and what is known of it."""

    rank: int
    process: BaseProcess
    link: connection.Connection
    reader: pipe.Reader
    exit_fd: int | None
    checked_in: bool = False
    result: bytes | None = None
    failure: Failure | None = None
    ended: bool = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def settled(self) -> bool:
        return self.result is not None or self.failure is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the rank and its helpers, where there is still anybody."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return
        if not self.ended:
            # It has not come as far as making a process group of its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """One launch of one job by one start method."""

    def __init__(self, job: Job, method: StartMethod) -> None:
        self._job = job
        self._method = method
        self._call = None if method == "fork" else encode(job)
        self._secret = secrets.token_bytes(32)
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._stopping = False

    def run(self) -> tuple[list[bytes], list[Failure]]:
        """Run the job on all ranks.

        Returns:
            The encoded results by rank, which are complete when the list of failures is empty.

        Raises:
            CheckInError: A rank did not check in; no user code has run.
        """
        try:
            self._start()
            self._await_check_in()
            self._watch()
        finally:
            self._stop()
        failures = [rank.failure for rank in self._ranks if rank.failure is not None]
        return [rank.result or b"" for rank in self._ranks], failures

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        self._listener = stores.listen()
        for rank in range(self._job.nproc):
            self._start_rank(rank)
        # Only now, so that a fork does not find the threads of the server.
        self._store = stores.serve(self._listener, self._job.options.timeout)

    def _start_rank(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        try:
            process = self._make_process(rank, ours, theirs)
            self._start_process(process)
        finally:
            theirs.close()
        started = _Rank(rank, process, ours, pipe.Reader(ours.fileno()), _open_pid(process))
        self._ranks.append(started)
        self._selector.register(ours.fileno(), selectors.EVENT_READ, started)
        if started.exit_fd is not None:
            self._selector.register(started.exit_fd, selectors.EVENT_READ, started)

    def _make_process(
        self, rank: int, ours: connection.Connection, theirs: connection.Connection
    ) -> BaseProcess:
        context = multiprocessing.get_context(self._method)
        spec = self._spec(rank)
        target: Callable[..., None]
        if self._method == "fork":
            inherited = (*(other.link.fileno() for other in self._ranks), ours.fileno())
            inherited += tuple(other.exit_fd for other in self._ranks if other.exit_fd is not None)
            assert self._listener is not None
            target = run_forked
            args: tuple[Any, ...] = (
                spec, theirs, self._job, (*inherited, self._listener.fileno()), random.getstate(),
            )  # fmt: skip
        else:
            target = run_fresh
            args = (spec, theirs, self._call, _streams(self._method))
        if self._method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        name = f"ddpkit-rank-{rank}"
        return cast(BaseProcess, context.Process(target=target, args=args, name=name))  # type: ignore[attr-defined]

    def _start_process(self, process: BaseProcess) -> None:
        # A fork goes on with whatever is in force here, so nothing is patched for it.
        hidden = contextlib.nullcontext() if self._method == "fork" else _main_module_hidden()
        with warnings.catch_warnings(), hidden:
            # Python 3.12 warns of any fork with threads; which there are has been checked.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            process.start()

    def _spec(self, rank: int) -> RankSpec:
        assert self._listener is not None
        user_setting = threads.setting_of_user(os.environ, os.getppid())
        return RankSpec(
            rank=rank,
            world_size=self._job.nproc,
            port=self._listener.getsockname()[1],
            secret=self._secret,
            threads=threads.threads_per_rank(threads.usable_cores(), self._job.nproc, user_setting),
            options=self._job.options,
            environ=dict(os.environ) if self._method == "forkserver" else None,
        )

    def _await_check_in(self) -> None:
        deadline = time.monotonic() + _CHECK_IN_BOUND[self._method]
        while not all(rank.checked_in for rank in self._ranks):
            self._step(deadline - time.monotonic())
            lost = [rank for rank in self._ranks if rank.ended and not rank.checked_in]
            if lost:
                raise CheckInError(f"rank {lost[0].rank} ended with {lost[0].process.exitcode}")
            if time.monotonic() > deadline:
                late = [rank.rank for rank in self._ranks if not rank.checked_in]
                raise CheckInError(f"ranks {late} did not check in")
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # its end is seen in the next step
                os.write(rank.link.fileno(), pipe.GO)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Until every rank has a result, or one has failed and its cause had time to show."""
        stop_at: float | None = None
        while not all(rank.settled for rank in self._ranks):
            self._step(None if stop_at is None else stop_at - time.monotonic())
            failures = [rank.failure for rank in self._ranks if rank.failure is not None]
            if not failures:
                continue
            now = time.monotonic()
            stop_at = min(stop_at or math.inf, now + self._bound_after(failures))
            if now >= stop_at:
                return

    def _bound_after(self, failures: list[Failure]) -> float:
        """How long the other ranks may go on, in seconds, after these failures."""
        if all(failure.system_exit for failure in failures):
            # All of them may be about to exit alike, and one may have something to save first.
            return max(self._job.options.shutdown_grace, _CAUSE_BOUND)
        return _CAUSE_BOUND if all(map(is_consequence, failures)) else 0.0

    def _step(self, timeout: float | None) -> None:
        """Wait for something to happen, and take note of it."""
        happened = self._selector.select(None if timeout is None else max(0.0, timeout))
        for rank in {id(key.data): key.data for key, _ in happened}.values():
            self._take_messages(rank)
            self._note_end(rank)

    def _take_messages(self, rank: _Rank) -> None:
        if rank.reader.has_ended():
            return
        for kind, payload in rank.reader.read():
            if kind == pipe.CHECKED_IN:
                rank.checked_in = True
            elif kind == pipe.RETURNED:
                rank.result = payload
            elif rank.result is None:  # after its value, leaving the group is all that can fail
                rank.failure = load_value(payload)
        if rank.reader.has_ended():
            self._selector.unregister(rank.link.fileno())

    def _note_end(self, rank: _Rank) -> None:
        if rank.ended or not _has_exited(rank):
            return
        rank.ended = True
        while not rank.reader.has_ended():  # what it wrote before its end is all there
            before = rank.reader.size
            self._take_messages(rank)
            if rank.reader.size == before:
                break
        if rank.exit_fd is not None:
            self._selector.unregister(rank.exit_fd)
        exit_code = _exit_code(rank.process)  # reaps it, too
        # What this launch ends itself is no failure.
        if not rank.settled and not self._stopping:
            rank.failure = failure_of_end(rank.rank, exit_code)

    # ------------------------------------------------------------------ stopping

    def _stop(self) -> None:
        """End every rank and every helper, and give everything back."""
        self._stopping = True
        returned = self._ranks and all(rank.result is not None for rank in self._ranks)
        try:
            if returned:
                self._await_exit(self._job.options.shutdown_grace)
            self._signal_all(signal.SIGTERM)
            self._await_exit(self._job.options.shutdown_grace)
        finally:
            # Also when Ctrl-C is pressed a second time: then there is no more grace.
            self._signal_all(signal.SIGKILL)
            self._await_exit(_KILL_BOUND)
            self._release()

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.signal_group(number)

    def _await_exit(self, bound: float) -> None:
        """Wait until every rank, and every member of its process group, has ended."""
        deadline = time.monotonic() + bound
        pause = 0.0005
        while not all(self._is_gone(rank) for rank in self._ranks):
            if time.monotonic() > deadline:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _is_gone(self, rank: _Rank) -> bool:
        self._take_messages(rank)  # one that is writing a result must be able to finish
        self._note_end(rank)
        return rank.ended and not _group_is_alive(rank.pid)

    def _release(self) -> None:
        for rank in self._ranks:
            rank.process.join(_KILL_BOUND)
            rank.link.close()
            if rank.exit_fd is not None:
                os.close(rank.exit_fd)
            with contextlib.suppress(ValueError):  # it outlived SIGKILL, in the kernel
                rank.process.close()
        self._selector.close()
        self._store = None
        if self._listener is not None:
            self._listener.close()


def _open_pid(process: BaseProcess) -> int | None:
    """A descriptor that tells of the end of the process itself, whatever its helpers do."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    assert process.pid is not None
    with contextlib.suppress(OSError):
        return os.pidfd_open(process.pid)
    return None


def _has_exited(rank: _Rank) -> bool:
    if rank.exit_fd is None:
        return rank.process.exitcode is not None
    with selectors.DefaultSelector() as selector:
        selector.register(rank.exit_fd, selectors.EVENT_READ)
        return bool(selector.select(0))


def _exit_code(process: BaseProcess) -> int | None:
    """Exit code; that of a forkserver's child arrives a moment after its end."""
    deadline = time.monotonic() + 1.0
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return process.exitcode


def _group_is_alive(pgid: int) -> bool:
    """Tell whether a process group has a member that has not ended."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # Zombies count for the kernel, and where process 1 reaps none they stay for ever.
    return sys.platform != "linux" or any(_is_member(stat, pgid) for stat in _process_stats())


def _process_stats() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield (folder / "stat").read_text(encoding="ascii", errors="replace")


def _is_member(stat: str, pgid: int) -> bool:
    state, _, group = stat.rpartition(")")[2].split()[:3]
    return group == str(pgid) and state not in ("Z", "X")


def _streams(method: StartMethod) -> InheritedStreams | None:
    return InheritedStreams() if method == "forkserver" else None


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the main module again in a fresh process.

    What the function needs of `__main__` travels by value, so a script needs no main guard.
    """
    original = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        data = original(name)
        for key in ("init_main_from_path", "init_main_from_name"):
            data.pop(key, None)
        return data

    spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = original
