"""Start ranks, watch them, stop them. The state of a launch is visible in `Supervisor`."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import secrets
import selectors
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, spawn
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

from ddpkit import store as stores
from ddpkit import threads
from ddpkit.launch import pipe, signals, stacks
from ddpkit.launch.job import Job, encode
from ddpkit.launch.output import RankLogs, StandardStreams
from ddpkit.launch.process import RankProcess, adopt, open_pid
from ddpkit.launch.report import (
    Failure,
    Stack,
    count_memory_kills,
    failure_of_end,
    is_about_others,
    is_consequence,
)
from ddpkit.launch.worker import ForkState, Links, RankSpec, run_forked, run_fresh
from ddpkit.serialize import load_value

StartMethod = Literal["fork", "forkserver", "spawn"]

# A fork that went wrong hangs at once; the others import torch, which a cold disk makes slow.
_CHECK_IN_BOUND = {"fork": 8.0, "forkserver": 300.0, "spawn": 300.0}
# How long the victims of a failure are given to be followed by its cause.
_CAUSE_BOUND = 0.5
_KILL_BOUND = 5.0
_LONGEST_STEP = 3600.0  # epoll refuses more than 24 days
# For ranks that were asked to stop together, to save and to end by themselves.
_REQUEST_BOUND = 60.0
_PRELOAD = ["ddpkit.launch.preload"]

# A fork has one thread, and its child must not find this taken; so it is not for forks.
_starting = threading.Lock()


class CheckInError(Exception):
    """A started rank did not come as far as user code."""


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    results: list[bytes]
    """The encoded results by rank, empty where there is none."""
    complete: bool
    """Whether every rank has a result."""
    failures: list[Failure] = field(default_factory=list)
    """What is known of the ranks that failed."""
    unfinished: dict[int, Stack | None] = field(default_factory=dict)
    """The ranks that were stopped, with the place where they were if it was asked for."""
    timed_out: bool = False
    """Whether the time limit of the launch had passed."""
    used_compiler: bool = False
    """Whether a rank has imported torch's compiler."""
    ended_threads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The threads, by rank, that went on after its function had returned, until they were ended."""


class Supervisor:
    """One launch of one job by one start method.

    Args:
        job: What to run.
        method: How to start the ranks.
        deadline: Monotonic time at which the launch has to be over.
        watch: Notes the signals that this program gets.
        logs: Where the output of the ranks goes.
    """

    def __init__(
        self,
        job: Job,
        method: StartMethod,
        *,
        deadline: float,
        watch: signals.SignalWatch,
        logs: RankLogs,
    ) -> None:
        self._job = job
        self._method = method
        self._deadline = deadline
        self._watch_for = watch
        self._logs = logs
        self._call = None if method == "fork" else encode(job)
        self._secret = secrets.token_bytes(32)
        self._memory_kills = count_memory_kills()
        self._ranks: list[RankProcess] = []
        self._unfinished: dict[int, Stack | None] = {}
        self._ended_threads: dict[int, tuple[str, ...]] = {}
        self._timed_out = False
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._stopping = False
        self._request_until = math.inf

    def run(self) -> Outcome:
        """Run the job on all ranks.

        Raises:
            CheckInError: A rank did not check in; no user code has run.
        """
        self._selector.register(self._watch_for.fileno(), selectors.EVENT_READ)
        try:
            self._start()
            if self._await_check_in():
                self._watch()
            self._note_unfinished()
        finally:
            self._stop()
        results = [rank.result or b"" for rank in self._ranks]
        return Outcome(
            results=results,
            complete=len(results) == self._job.nproc and all(results),
            failures=[rank.failure for rank in self._ranks if rank.failure is not None],
            unfinished=self._unfinished,
            timed_out=self._timed_out,
            used_compiler=any(rank.used_compiler for rank in self._ranks),
            ended_threads=self._ended_threads,
        )

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every rank and its helpers."""
        for rank in self._ranks:
            rank.signal_group(number)

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        self._listener = stores.listen()
        for rank in range(self._job.nproc):
            if self._is_interrupted():
                return
            self._start_rank(rank)
        # Only now, so that a fork finds neither the threads of the server nor that of the logs.
        self._store = stores.serve(self._listener, self._job.options.timeout)
        self._logs.start_copying()

    def _start_rank(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        stacks_reader, stacks_writer = multiprocessing.Pipe(duplex=False)
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            stack.callback(stacks_writer.close)
            links = Links(theirs, stacks_writer)
            process = self._start_process(rank, links, (ours, stacks_reader))
        reader = pipe.Reader(ours.fileno())
        started = RankProcess(rank, process, ours, stacks_reader, reader, open_pid(process))
        self._ranks.append(started)
        self._selector.register(ours.fileno(), selectors.EVENT_READ, started)
        if started.exit_fd is not None:
            self._selector.register(started.exit_fd, selectors.EVENT_READ, started)

    def _start_process(
        self, rank: int, links: Links, ours: tuple[connection.Connection, ...]
    ) -> BaseProcess:
        streams = self._logs.streams(rank)
        if self._method == "fork":
            with signals.blocked() as mask:
                state = ForkState(self._descriptors_of_parent(ours), random.getstate(), mask)
                return self._start_one(rank, run_forked, links, streams, self._job, state)
        if streams is None and self._method == "forkserver":
            streams = StandardStreams()  # a forkserver's own are those of the time it started
        with _starting, _main_module_hidden():
            return self._start_one(rank, run_fresh, links, streams, self._call)

    def _start_one(self, rank: int, target: Callable[..., None], *args: Any) -> BaseProcess:
        context = multiprocessing.get_context(self._method)
        if self._method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        name = f"ddpkit-rank-{rank}"
        process: Any = context.Process(  # type: ignore[attr-defined]
            target=target, args=(self._spec(rank), *args), name=name
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork with threads; which there are has been checked.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            process.start()
        adopt(process)
        return cast(BaseProcess, process)

    def _descriptors_of_parent(self, ours: tuple[connection.Connection, ...]) -> tuple[int, ...]:
        """What a fork inherits and has to close, so that an end of a pipe is seen as one."""
        assert self._listener is not None
        connections = [*ours]
        for rank in self._ranks:
            connections += [rank.link, rank.stacks]
        exits = [rank.exit_fd for rank in self._ranks if rank.exit_fd is not None]
        return (
            *(each.fileno() for each in connections),
            *exits,
            self._listener.fileno(),
            *self._logs.descriptors(),
            *self._watch_for.descriptors(),
        )

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
            helper_method=multiprocessing.get_start_method(allow_none=True),
        )

    def _await_check_in(self) -> bool:
        """Wait until every rank is ready and let all go on, or return False at an early end."""
        bound = time.monotonic() + _CHECK_IN_BOUND[self._method]
        while not self._is_over():
            if all(rank.checked_in for rank in self._ranks):
                self._let_go_on()
                return True
            self._step(min(bound, self._deadline))
            lost = [rank for rank in self._ranks if rank.ended and not rank.checked_in]
            if lost:
                raise CheckInError(f"rank {lost[0].rank} ended with {lost[0].process.exitcode}")
            if time.monotonic() > bound:
                late = [rank.rank for rank in self._ranks if not rank.checked_in]
                raise CheckInError(f"ranks {late} did not check in")
        return False

    def _let_go_on(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # its end is seen in the next step
                os.write(rank.link.fileno(), pipe.GO)

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Until every rank has a result, or one has failed and its cause had time to show."""
        stop_at = math.inf
        while not all(rank.settled for rank in self._ranks) and not self._is_over():
            self._step(min(stop_at, self._deadline))
            failures = self._failures()
            if not failures:
                continue
            now = time.monotonic()
            stop_at = min(stop_at, now + self._bound_after(failures))
            if now >= stop_at:
                return

    def _failures(self) -> list[Failure]:
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    def _bound_after(self, failures: list[Failure]) -> float:
        """How long the other ranks may go on, in seconds, after these failures."""
        if all(failure.system_exit for failure in failures):
            # All of them may be about to exit alike, and one may have something to save first.
            return max(self._job.options.shutdown_grace, _CAUSE_BOUND)
        return _CAUSE_BOUND if all(map(is_consequence, failures)) else 0.0

    def _is_interrupted(self) -> bool:
        return bool(self._watch_for.received)

    def _is_over(self) -> bool:
        """Tell whether a signal or the time limit ends the launch."""
        self._timed_out = self._timed_out or time.monotonic() > self._deadline
        return self._timed_out or self._is_interrupted()

    def _note_unfinished(self) -> None:
        """Note who is still at work, and where, if that is what went wrong."""
        working = [rank for rank in self._ranks if not rank.settled and not rank.ended]
        self._unfinished = {rank.rank: None for rank in working}
        if self._is_interrupted() or not working:
            return
        if self._timed_out or all(map(is_about_others, self._failures())):
            self._unfinished.update(stacks.collect(working))

    def _step(self, until: float) -> None:
        """Wait for something to happen, and take note of it."""
        until = min(until, self._request_until)
        left = until - time.monotonic()
        timeout = None if until == math.inf else min(max(0.0, left), _LONGEST_STEP)
        happened = self._selector.select(timeout)
        self._watch_for.drain()
        self._follow_request()
        for rank in {id(key.data): key.data for key, _ in happened if key.data}.values():
            self._take_messages(rank)
            self._note_end(rank)

    def _follow_request(self) -> None:
        """Pass a request to stop on to the ranks, and end those that do not follow it in time."""
        number = self._watch_for.request
        if number is None:
            return
        if self._request_until == math.inf:
            self._request_until = time.monotonic() + _REQUEST_BOUND
            for rank in self._ranks:
                if number in rank.held:  # it would end another one, and these tell the others
                    rank.signal_process(number)
        elif time.monotonic() > self._request_until:
            self._watch_for.refuse_request()

    def _take_messages(self, rank: RankProcess) -> None:
        if rank.reader.has_ended():
            return
        for kind, payload in rank.reader.read():
            if kind == pipe.CHECKED_IN:
                rank.checked_in, rank.main_thread = True, int(payload)
            elif kind == pipe.USED_COMPILER:
                rank.used_compiler = True
            elif kind == pipe.HOLDS:
                rank.held = frozenset(signal.Signals(int(number)) for number in payload.split())
                self._take_requests()
            elif kind == pipe.THREADS:
                rank.threads = tuple(payload.decode().split("\n"))
            elif kind == pipe.STOPS:
                self._watch_for.followed = True
            elif kind == pipe.RETURNED:
                rank.result = payload
            elif rank.result is None:  # after its value, leaving the group is all that can fail
                rank.failure = load_value(payload)
        if rank.reader.has_ended():
            self._selector.unregister(rank.link.fileno())

    def _take_requests(self) -> None:
        if not self._stopping:
            self._watch_for.take_as_requests(frozenset().union(*(r.held for r in self._ranks)))

    def _note_end(self, rank: RankProcess) -> None:
        if rank.ended or not rank.has_exited():
            return
        rank.ended = True
        while not rank.reader.has_ended():  # what it wrote before its end is all there
            before = rank.reader.size
            self._take_messages(rank)
            if rank.reader.size == before:
                break
        if rank.exit_fd is not None:
            self._selector.unregister(rank.exit_fd)
        exit_code = rank.exit_code()
        rank.look_for_group()
        # What this launch ends itself is no failure.
        if not rank.settled and not self._stopping:
            out_of_memory = count_memory_kills() > self._memory_kills
            rank.failure = failure_of_end(rank.rank, exit_code, out_of_memory=out_of_memory)

    # ------------------------------------------------------------------ stopping

    def _stop(self) -> None:
        """End every rank and every helper, and give everything back."""
        self._stopping = True
        self._watch_for.take_as_requests(())
        returned = self._ranks and all(rank.result is not None for rank in self._ranks)
        grace = self._job.options.shutdown_grace
        # Ctrl-C has been pressed before this, or not; once more, and there is no further grace.
        enough = len(self._watch_for.received[:1]) + 1
        try:
            if returned:
                self._await_exit(grace, enough)
                self._note_threads()
            self._ask_to_end()
            self._await_exit(grace, enough)
        finally:
            self.signal_all(signal.SIGKILL)
            self._await_exit(_KILL_BOUND)
            for rank in self._ranks:
                rank.release(_KILL_BOUND)
            self._selector.close()
            self._store = None
            if self._listener is not None:
                self._listener.close()

    def _note_threads(self) -> None:
        for rank in self._ranks:
            if not self._is_gone(rank) and not rank.ended and rank.threads:
                self._ended_threads[rank.rank] = rank.threads

    def _ask_to_end(self) -> None:
        """Let ranks end in order; those that would take it for a request to stop end at once."""
        for rank in self._ranks:
            self._take_messages(rank)
            holds = signal.SIGTERM in rank.held
            rank.signal_group(signal.SIGKILL if holds else signal.SIGTERM)

    def _await_exit(self, bound: float, enough_signals: float = math.inf) -> None:
        """Wait until every rank, and every member of its process group, has ended.

        Args:
            bound: Seconds.
            enough_signals: How many signals to this program end the wait at once.
        """
        deadline = time.monotonic() + bound
        pause = 0.0005
        while not all(self._is_gone(rank) for rank in self._ranks):
            if time.monotonic() > deadline or len(self._watch_for.received) >= enough_signals:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _is_gone(self, rank: RankProcess) -> bool:
        self._take_messages(rank)  # one that is writing a result must be able to finish
        self._note_end(rank)
        rank.look_for_group()
        return rank.gone


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
