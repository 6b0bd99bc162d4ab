"""What a test may not leave behind, and how that is found out.

`take_snapshot()` before a test and `find_leaks(before, take_snapshot())` after it: pure data in
between, so that the guards themselves can be tested. `conftest.py` runs them around every test.
"""

import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

# Variables that a test may change: pytest's own, those that scikit-learn and torch's compiler
# (which comes with the first optimizer) set when they are imported first, and the one that torch
# 2.6 sets when it first looks for a GPU.
FREE_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "CUDA_MODULE_LOADING",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)

# Helpers that multiprocessing starts once and keeps until the interpreter ends.
KEPT_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")

# What ends by itself (a feeder thread, a reaped process) may take this long to do it.
PATIENCE = 1.0


@dataclass(frozen=True)
class Snapshot:
    """The state of this process that a test has to restore; mappings go from key to description."""

    environment: Mapping[str, str]
    group: str | None
    processes: Mapping[int, str]
    threads: Mapping[int, str]
    handlers: Mapping[str, object]
    listening: Mapping[int, str]
    folder: str
    files: frozenset[str]


def take_snapshot() -> Snapshot:
    """Read everything that the guards compare; about a millisecond."""
    return Snapshot(
        environment={k: v for k, v in os.environ.items() if k not in FREE_VARIABLES},
        group=_default_group(),
        processes=_descendants(),
        threads={id(thread): thread.name for thread in threading.enumerate()},
        handlers=_handlers(),
        listening=_listening_sockets(),
        folder=str(Path.cwd()),
        files=frozenset(_files()),
    )


def find_leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """Say what `after` has and `before` had not, one sentence for each leak."""
    leaks = _changed_variables(before.environment, after.environment)
    if after.group != before.group:
        leaks.append(f"the default process group was {before.group} and is {after.group} now")
    leaks += _added("process", before.processes, after.processes)
    leaks += _added("thread", before.threads, after.threads)
    leaks += [
        f"the handler of {name} was not restored"
        for name, handler in after.handlers.items()
        if handler is not before.handlers[name]
    ]
    leaks += _added("listening socket", before.listening, after.listening)
    if after.folder != before.folder:
        leaks.append(f"the current folder was {before.folder} and is {after.folder} now")
    else:
        leaks += [f"a file is left: {name}" for name in sorted(after.files - before.files)]
    return leaks


def find_lasting_leaks(
    before: Snapshot, take: Callable[[], Snapshot] = take_snapshot, patience: float = PATIENCE
) -> list[str]:
    """Find leaks, and give what is about to end some time to do so."""
    leaks = find_leaks(before, take())
    deadline = time.monotonic() + patience
    while leaks and time.monotonic() < deadline:
        gc.collect()  # a socket in a reference cycle is closed by nothing else
        time.sleep(0.02)
        leaks = find_leaks(before, take())
    return leaks


def restore(before: Snapshot) -> None:
    """Undo the leaks that would make later tests fail for a reason of their own."""
    for name in os.environ.keys() - before.environment.keys() - FREE_VARIABLES:
        del os.environ[name]
    os.environ.update(before.environment)
    os.chdir(before.folder)
    if before.group is None and _default_group() is not None:
        sys.modules["torch.distributed"].destroy_process_group()


def _changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [
        f"environment variable {name} was {before.get(name)!r} and is {after.get(name)!r} now"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _added(kind: str, before: Mapping[int, str], after: Mapping[int, str]) -> list[str]:
    return [f"a {kind} is left: {text}" for key, text in after.items() if key not in before]


def _default_group() -> str | None:
    """Describe the default process group, without importing torch for the question."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    return f"{distributed.get_backend()} with {distributed.get_world_size()} ranks"


def _descendants() -> dict[int, str]:
    """Find the processes below this one, except for the helpers that multiprocessing keeps."""
    me = os.getpid()
    found: dict[int, str] = {}
    to_visit = [me]
    while to_visit:
        parent = to_visit.pop()
        for child in _children(parent):
            to_visit.append(child)
            description = _describe(child)
            # What the forkserver starts carries its command line: only direct children are excused.
            if parent != me or not any(helper in description for helper in KEPT_HELPERS):
                found[child] = description
    return found


def _children(pid: int) -> list[int]:
    """List the children of a process: from the kernel's own list where there is one (fast)."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        return [] if sys.platform == "linux" else _children_by_scan(pid)
    children: list[int] = []
    for task in tasks.iterdir():
        try:
            children += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
    return children


def _children_by_scan(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _describe(pid: int) -> str:
    try:
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.ZombieProcess:
        return f"{pid}: a zombie, which nobody has waited for"
    except psutil.NoSuchProcess:
        return f"{pid}: has ended meanwhile"


def _handlers() -> dict[str, object]:
    # pytest-timeout owns SIGALRM, and takes its handler away as soon as a test has failed.
    signals = [number for number in signal.Signals if number != signal.SIGALRM]
    handlers: dict[str, object] = {number.name: signal.getsignal(number) for number in signals}
    return {**handlers, "sys.excepthook": sys.excepthook}


def _listening_sockets() -> dict[int, str]:
    """Find the descriptors of this process that are sockets somebody could connect to."""
    found = {}
    kept_ports = _ports_of_kept_stores()
    for entry in Path("/dev/fd").iterdir():
        descriptor = int(entry.name)
        try:
            status = os.fstat(descriptor)
        except OSError:  # the descriptor that the listing itself had open
            continue
        address = _listening_address(descriptor) if stat.S_ISSOCK(status.st_mode) else None
        if address is not None and address[1] not in kept_ports:
            found[status.st_ino] = str(address)
    return found


def _listening_address(descriptor: int) -> tuple[object, ...] | None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        address = connection.getsockname()  # of a Unix socket: its path
        return address if isinstance(address, tuple) else ("unix", address)


def _ports_of_kept_stores() -> set[int]:
    """List the ports of stores that process_group() keeps until exit, as it says it does."""
    group = sys.modules.get("ddpkit.group")
    return {port for _, port in group._state.servers} if group is not None else set()


def _files() -> list[str]:
    """List what is in the current folder, and what in the temporary folder is named after us."""
    here = [path.name for path in Path().iterdir() if not path.name.startswith((".", "__"))]
    return here + [str(path) for path in Path(tempfile.gettempdir()).glob("ddpkit*")]
