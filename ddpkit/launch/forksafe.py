"""Can this process be forked safely, and how is it made so.

What makes a fork of a torch process hang is the pool of OpenMP threads: the child inherits the
bookkeeping of a pool whose threads do not exist in it. `omp_pause_resource_all(omp_pause_hard)`
(OpenMP 5.0) ends the pool; parent and child start a new one when they next need it. OpenBLAS does
the same with its own pool in a handler that runs before each fork, so it is only called earlier.
Once both have gone, a thread that is left over is one that nobody knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ddpkit.group import group_is_open

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")
_OPENBLAS = re.compile(r"/lib[^/]*openblas[^/]*\.so[^/]*$")
_CUDA_DRIVER = re.compile(r"/libcuda\.so[^/]*$")
_THREAD_COUNT_SYMBOLS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
)
# What a closed group leaves behind; none of these threads is needed by, or known to, a child.
_HARMLESS_THREADS = frozenset({"gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv"})
_OMP_PAUSE_HARD = 2
# Signal n is bit n - 1, as in /proc; nobody can block these two.
_ALL_SIGNALS = sum(
    1 << (number - 1)
    for number in signal.valid_signals()
    if number not in (signal.SIGKILL, signal.SIGSTOP)
)
_WAIT_FOR_THREADS = 0.2


@dataclass(frozen=True)
class ForkFacts:
    """What is known of this process with regard to a fork."""

    platform: str
    """`sys.platform`."""
    accelerator_in_use: bool
    """Whether an accelerator context exists or a CUDA driver is loaded."""
    group_is_open: bool
    """Whether a default process group is open here."""
    python_threads: int
    """Python threads, the calling one included."""
    unpaused_openmp: tuple[str, ...]
    """OpenMP runtimes that may hold a pool and could not be made to put it away."""
    native_threads: tuple[str, ...]
    """Names of all threads but faulthandler's watchdog, the main one included."""
    main_thread_name: str
    """Name of the main thread, which threads without a name of their own share."""
    openblas_workers: int
    """Threads that OpenBLAS libraries put away only when the fork comes."""


def reason_against_fork(facts: ForkFacts) -> str | None:
    """Decide whether a process may be forked.

    Args:
        facts: What is known of it.

    Returns:
        None when a fork is safe, else the reason why it is not.
    """
    if facts.platform != "linux":
        return f"fork is used on Linux only, this is {facts.platform}"
    if facts.accelerator_in_use:
        return "an accelerator was used, or its driver opened, in this process"
    if facts.group_is_open:
        return "a process group is open in this process"
    if facts.python_threads > 1:
        return f"{facts.python_threads - 1} more Python threads are running"
    if facts.unpaused_openmp:
        return f"OpenMP threads cannot be put away: {', '.join(facts.unpaused_openmp)}"
    return _reason_of_native_threads(facts)


def _reason_of_native_threads(facts: ForkFacts) -> str | None:
    unknown = Counter(facts.native_threads)
    for name in _HARMLESS_THREADS:
        unknown.pop(name, None)
    unnamed = unknown.pop(facts.main_thread_name, 0) - 1
    if unknown:
        return f"unknown native threads are running: {', '.join(sorted(unknown))}"
    if unnamed > facts.openblas_workers:
        return f"{unnamed - facts.openblas_workers} unknown native threads are running"
    return None


def prepare_fork() -> str | None:
    """Put away what makes a fork hang, and tell whether a fork is safe then.

    Returns:
        None when it is, else the reason why it is not.
    """
    # Cheap and final reasons first: a fork that will not happen needs no preparation.
    reason = reason_against_fork(_facts(python_threads=1, unpaused=(), native_threads=("",)))
    if reason is not None:
        return reason
    libraries = _loaded_libraries()
    python_threads = _await_python_threads()
    if python_threads > 1:  # one of them may be using the pools
        return reason_against_fork(_gather(libraries, python_threads, ()))
    _put_openblas_away(libraries)
    deadline = time.monotonic() + _WAIT_FOR_THREADS
    while True:
        # Threads that were told to end take a moment to disappear.
        reason = reason_against_fork(_gather(libraries, 1, pause_openmp(libraries)))
        if reason is None:
            _watchdog.was_running = any(map(_is_watchdog, _tasks()))
            return None
        if time.monotonic() > deadline:
            return reason
        time.sleep(0.001)


def _gather(libraries: list[str], python_threads: int, unpaused: tuple[str, ...]) -> ForkFacts:
    return _facts(
        python_threads=python_threads,
        unpaused=unpaused,
        native_threads=_native_thread_names(),
        main_thread_name=_thread_name(os.getpid()),
        openblas_workers=_count_openblas_workers(libraries),
        libraries=libraries,
    )


def _facts(
    *,
    python_threads: int,
    unpaused: tuple[str, ...],
    native_threads: tuple[str, ...],
    main_thread_name: str = "",
    openblas_workers: int = 0,
    libraries: list[str] | None = None,
) -> ForkFacts:
    return ForkFacts(
        platform=sys.platform,
        accelerator_in_use=_accelerator_in_use(libraries or []),
        group_is_open=group_is_open(),
        python_threads=python_threads,
        unpaused_openmp=unpaused,
        native_threads=native_threads,
        main_thread_name=main_thread_name,
        openblas_workers=openblas_workers,
    )


def _accelerator_in_use(libraries: list[str]) -> bool:
    if torch.cuda.is_initialized() or any(_CUDA_DRIVER.search(path) for path in libraries):
        return True
    # Other accelerators have no way to tell that is known to be free of effects.
    return any(
        getattr(torch, name, None) is not None and getattr(torch, name).is_available()
        for name in ("xpu", "mtia")
    )


def _await_python_threads() -> int:
    """Count Python threads, giving the queue feeders of finished data workers time to end."""
    deadline = time.monotonic() + _WAIT_FOR_THREADS
    while True:
        # Threads that were not made by `threading` have a frame, but are not enumerated.
        count = max(_count_enumerated(), len(sys._current_frames()))  # noqa: SLF001
        if count == 1 or time.monotonic() > deadline:
            return count
        time.sleep(0.005)


def _count_enumerated() -> int:
    """Count the threads that `threading` knows, without its dummies.

    A dummy stands for a native thread that once asked for its name, by logging in a callback of
    gloo's for one, and stays after that thread has ended. While it runs Python it has a frame.
    """
    dummy = threading._DummyThread  # noqa: SLF001  # there is no public way to tell
    return sum(not isinstance(thread, dummy) for thread in threading.enumerate())


def pause_openmp(libraries: list[str]) -> tuple[str, ...]:
    """End the pools of all OpenMP runtimes; return those that cannot do so.

    A runtime without the call (that of torch 2.6, for one) is fine as long as it has no pool, which
    the census of native threads shows, so it counts only where there are more threads than known.
    """
    runtimes = (path for path in libraries if _OPENMP.search(path))
    unable = [Path(path).name for path in runtimes if not _pause(path)]
    return tuple(unable) if _has_unnamed_threads(libraries) else ()


def _pause(path: str) -> bool:
    try:
        pause = _library(path).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return bool(pause(_OMP_PAUSE_HARD) == 0)


def _has_unnamed_threads(libraries: list[str]) -> bool:
    own_name = _thread_name(os.getpid())
    unnamed = sum(name == own_name for name in _native_thread_names()) - 1
    return unnamed > _count_openblas_workers(libraries)


@functools.cache  # each ctypes.CDLL costs some bytes that nothing gives back
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def _loaded_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    return sorted({parts[5] for parts in fields if len(parts) == 6 and ".so" in parts[5]})


def _native_thread_names() -> tuple[str, ...]:
    try:
        tasks = _tasks()
    except OSError:
        return ("unknown (no /proc)",)
    watchdog = next(filter(_is_watchdog, tasks), None)  # there is one at most
    return tuple(_thread_name(task) for task in tasks if task != watchdog)


def _is_watchdog(task: int) -> bool:
    """Tell faulthandler's watchdog: it has no name of its own, blocks every signal and sleeps.

    The C library starts every thread with all signals blocked, but such a one is running.
    """
    if task == os.getpid() or _thread_name(task) != _thread_name(os.getpid()):
        return False
    with contextlib.suppress(OSError):
        status = Path(f"/proc/self/task/{task}/status").read_text(encoding="utf-8")
        return _describes_watchdog(status)
    return False


def _describes_watchdog(status: str) -> bool:
    sleeps = re.search(r"^State:\s*S\b", status, re.MULTILINE)
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(sleeps and blocked and int(blocked[1], 16) & _ALL_SIGNALS == _ALL_SIGNALS)


def _tasks() -> list[int]:
    return [int(task) for task in os.listdir("/proc/self/task")]  # noqa: PTH208


def _thread_name(task: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8").strip()
    return ""


def _put_openblas_away(libraries: list[str]) -> None:
    """Do now what each OpenBLAS does by itself when the fork comes; its workers come back."""
    for path in filter(_OPENBLAS.search, libraries):
        with contextlib.suppress(OSError, AttributeError):
            _library(path).blas_thread_shutdown_()


def _count_openblas_workers(libraries: list[str]) -> int:
    """Count the workers of OpenBLAS libraries that could not be put away before the fork."""
    return sum(_openblas_workers(path) for path in libraries if _OPENBLAS.search(path))


def _openblas_workers(path: str) -> int:
    try:
        library = _library(path)
    except OSError:
        return 0
    if hasattr(library, "blas_thread_shutdown_"):
        return 0
    for symbol in _THREAD_COUNT_SYMBOLS:
        if hasattr(library, symbol):
            return max(0, int(getattr(library, symbol)()) - 1)  # one is the calling thread
    return 0


# ---------------------------------------------------------------- faulthandler's watchdog


@dataclass
class _Watchdog:
    """What a fork has to know of the process that it was made from."""

    was_running: bool = False


_watchdog = _Watchdog()


def leave_watchdog_behind() -> None:
    """Keep a forked rank from waiting for a thread that it does not have.

    faulthandler takes its watchdog for running there too. Calling it off, which is also the first
    step of arming it, would wait for its end for ever, and hold the interpreter's lock meanwhile.
    """
    if not _watchdog.was_running:
        return
    stand_ins: dict[str, Callable[..., None]] = {
        "cancel_dump_traceback_later": lambda: None,
        "dump_traceback_later": _refuse_to_arm,
    }
    for name, stand_in in stand_ins.items():
        setattr(faulthandler, name, stand_in)


def _refuse_to_arm(*args: object, **kwargs: object) -> None:
    warnings.warn(
        "faulthandler.dump_traceback_later() does nothing in this forked process, because it was "
        "called before the fork too. Call it in the ranks alone, or use start_method='forkserver'.",
        RuntimeWarning,
        stacklevel=2,
    )
