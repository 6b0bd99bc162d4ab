"""What runs inside a started rank: guard, set up, call, report."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn

import torch

from ddpkit import pending, preempt, threads
from ddpkit.group import process_group, set_secret
from ddpkit.launch import forksafe, pipe, signals, stacks
from ddpkit.launch.job import Job, Options, decode
from ddpkit.launch.output import StandardStreams, buffer_lines, write_to_descriptors
from ddpkit.launch.report import Failure, failure_of_exception, failure_of_unsendable
from ddpkit.serialize import dump_value, share_classes_with_parent
from ddpkit.store import LOOPBACK, LOOPBACK_INTERFACE
from ddpkit.topology import RANK_MARK

FAILED_STATUS = 1
_OF_TORCHRUN = ("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
COMPILER = "torch._dynamo"
"""What DistributedDataParallel and optimizers import first, which takes longer than all else."""


@dataclass(frozen=True)
class RankSpec:
    """What one started rank needs to know."""

    rank: int
    world_size: int
    port: int
    """Port of the parent's store on the loopback interface."""
    secret: bytes
    """Key that messages of the side channel are signed with."""
    threads: int
    """CPU threads for this rank."""
    options: Options
    environ: dict[str, str] | None = None
    """Environment of the parent, for a process that did not inherit it."""
    helper_method: str | None = None
    """How the parent starts processes by default, as data workers are; None if that is open."""


@dataclass(frozen=True)
class Links:
    """The ends of a rank's pipes."""

    parent: connection.Connection
    """For messages to the parent; its end is the parent's end."""
    stacks: connection.Connection
    """For the stacks that the parent asks for."""


@dataclass(frozen=True)
class ForkState:
    """What a fork takes over from its parent, or has to get rid of."""

    descriptors: tuple[int, ...]
    """What belongs to the parent and to other ranks."""
    random_state: tuple[Any, ...]
    """State of Python's generator, which Python seeds anew in every fork."""
    signal_mask: set[int]
    """The signals that the parent had blocked before the fork."""


def run_forked(
    spec: RankSpec,
    links: Links,
    streams: StandardStreams | None,
    job: Job,
    state: ForkState,
) -> None:
    """Run a rank in a fork of the calling process, which holds the job already."""
    if streams is not None:
        streams.take()
    write_to_descriptors(only_from_memory=streams is None)
    for descriptor in state.descriptors:
        os.close(descriptor)
    forksafe.leave_watchdog_behind()
    random.setstate(state.random_state)
    # What the parent registered for its own end is not this process's to do.
    atexit._clear()  # noqa: SLF001  # there is no public way
    share_classes_with_parent()
    _run(spec, links, state.signal_mask, lambda: job)


def run_fresh(spec: RankSpec, links: Links, streams: StandardStreams | None, call: bytes) -> None:
    """Run a rank in a process that shares no memory with the caller."""
    del streams  # unpickling them has done their work
    # Else it is how this process was started, and data workers would have to be pickled.
    multiprocessing.set_start_method(spec.helper_method, force=True)
    _run(spec, links, None, lambda: decode(call))


def _run(
    spec: RankSpec,
    links: Links,
    signal_mask: set[int] | None,
    load: Callable[[], Callable[[], Any]],
) -> None:
    os.setpgid(0, 0)
    descriptor = links.parent.fileno()
    released = _guard(descriptor)
    signals.reset_in_rank(signal_mask)
    stacks.answer_requests(links.stacks.fileno())
    _set_environment(spec)
    _prove_usable(spec)
    pipe.send(descriptor, pipe.CHECKED_IN, str(threading.get_ident()).encode())
    released.wait()  # the guard ends this process if the parent never says go
    _call_and_report(spec, descriptor, load)


def _set_environment(spec: RankSpec) -> None:
    if spec.environ is not None:
        os.environ.clear()
        os.environ.update(spec.environ)
    for name in left_over(os.environ):
        del os.environ[name]
    os.environ.update(rank_environment(spec, os.getpid()))
    # For helpers that this rank starts; torch itself has read the variable long ago.
    os.environ.setdefault(threads.VARIABLE, str(spec.threads))
    # A host name that resolves wrongly must not matter to a legacy init_process_group() either.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    buffer_lines()
    torch.set_num_threads(spec.threads)
    set_secret(spec.secret)


def rank_environment(spec: RankSpec, pid: int) -> dict[str, str]:
    """The variables of a started rank: torchrun's contract and ddpkit's own mark."""
    return {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.rank),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(spec.port),
        # Makes a legacy init_process_group() of rank 0 a client of the parent's store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RANK_MARK: str(pid),
    }


def left_over(names: Iterable[str]) -> list[str]:
    """Find the variables of another launcher, or of an earlier one, that would be a rank's own.

    Args:
        names: Names of variables.

    Example:
        >>> left_over(["HOME", "ROLE_RANK", "TORCHELASTIC_RUN_ID"])
        ['ROLE_RANK', 'TORCHELASTIC_RUN_ID']
    """
    return [name for name in names if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")]


def _prove_usable(spec: RankSpec) -> None:
    """Run a parallel operation: where a fork went wrong it hangs here, before any user code."""
    if spec.threads > 1:
        torch.ones(1 << 17).add_(1)


def _guard(descriptor: int) -> threading.Event:
    """End this rank and its helpers when the parent has gone, also within a blocked collective.

    Returns:
        An event that is set when the parent lets this rank go on to user code.
    """
    released = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            if os.read(descriptor, 1) == pipe.GO:
                released.set()
                # The parent writes nothing more, so this returns when its end is closed.
                os.read(descriptor, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="ddpkit-guard", daemon=True).start()
    return released


def _call_and_report(
    spec: RankSpec, descriptor: int, load: Callable[[], Callable[[], Any]]
) -> None:
    """Call the user's function and send its value, or send what went wrong and end."""
    options = spec.options
    preempt.tell(_listener_at(descriptor))
    try:
        call = load()
        if not options.init_group:
            _report(call, spec.rank, descriptor)
        else:
            with process_group(options.backend, timeout=options.timeout, device=options.device):
                # Within the group, because leaving it takes time and may wait for other ranks.
                _report(call, spec.rank, descriptor)
        _name_threads(descriptor)
    except BaseException as error:  # noqa: BLE001  # whatever ended the rank is the caller's to see
        _fail(failure_of_exception(spec.rank, error), descriptor)


def _listener_at(descriptor: int) -> preempt.Listener:
    """Tell the parent what this rank does with signals."""

    def holds(numbers: Collection[signal.Signals]) -> None:
        send(pipe.HOLDS, " ".join(str(int(number)) for number in numbers).encode())

    def send(kind: bytes, payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # the parent has gone, and this rank goes with it
            pipe.send(descriptor, kind, payload)

    return preempt.Listener(holds, stops=lambda: send(pipe.STOPS))


def _report(call: Callable[[], Any], rank: int, descriptor: int) -> None:
    try:
        value = call()
        pending.finish()
        result = _encode_result(value)
    except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt, too
        _fail(_describe_failure(rank, error), descriptor)
    if COMPILER in sys.modules:
        pipe.send(descriptor, pipe.USED_COMPILER)
    pipe.send(descriptor, pipe.RETURNED, result)


def _name_threads(descriptor: int) -> None:
    """Tell the parent which threads of the user's this process waits for at its end."""
    threads = [each for each in threading.enumerate() if not each.daemon]
    names = [each.name for each in threads if each is not threading.current_thread()]
    if names:
        pipe.send(descriptor, pipe.THREADS, "\n".join(names).encode())


class _UnsendableResultError(Exception):
    def __init__(self, value: object, error: Exception) -> None:
        super().__init__()
        self.value = value
        self.error = error


def _encode_result(value: object) -> bytes:
    try:
        return dump_value(value)
    except Exception as error:
        raise _UnsendableResultError(value, error) from error


def _describe_failure(rank: int, error: BaseException) -> Failure:
    if isinstance(error, _UnsendableResultError):
        return failure_of_unsendable(rank, error.value, error.error)
    return failure_of_exception(rank, error)


def _fail(failure: Failure, descriptor: int) -> NoReturn:
    """Report, then die at once: a rank that lingers keeps its peers waiting."""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not hide the failure
        sys.stdout.flush()
        sys.stderr.flush()
    pipe.send(descriptor, pipe.FAILED, dump_value(failure))
    os._exit(failure.info.exit_code or FAILED_STATUS)
