"""One started rank as the parent sees it: its pipes, its process group, its end."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from ddpkit.launch import pipe
from ddpkit.launch.report import Failure


def adopt(process: BaseProcess) -> None:
    """Take a started process out of multiprocessing's care.

    Its bookkeeping joins every child when the interpreter ends, for ever where ranks are at work
    in a thread that was left behind, and looks at every child whenever any thread starts one, which
    may take the exit code from the thread that waits for it.
    """
    children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]  # noqa: SLF001
    children.discard(process)


@dataclass
class RankProcess:
    """One started process and what is known of it."""

    rank: int
    process: BaseProcess
    link: connection.Connection
    stacks: connection.Connection
    reader: pipe.Reader
    exit_fd: int | None
    main_thread: int = 0
    checked_in: bool = False
    used_compiler: bool = False
    threads: tuple[str, ...] = ()
    """The threads that it waits for before it ends, once it has delivered its result."""
    held: frozenset[signal.Signals] = frozenset()
    """The signals that it takes for requests to stop."""
    result: bytes | None = None
    failure: Failure | None = None
    ended: bool = False
    gone: bool = False
    """Whether its process group has no member left; its number may be another's soon."""

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def settled(self) -> bool:
        """Whether its outcome is known."""
        return self.result is not None or self.failure is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the rank and its helpers, where there is still anybody."""
        if self.gone:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return
        # It may not have come as far as making a process group of its own.
        self.signal_process(number)

    def signal_process(self, number: signal.Signals) -> None:
        """Signal the rank itself and not its helpers, where it has not ended."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def look_for_group(self) -> None:
        """Note whether its process group has any member left, once the rank itself has ended."""
        self.gone = self.gone or (self.ended and not self._group_is_alive())

    def _group_is_alive(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        # Zombies count for the kernel, and where process 1 reaps none they stay for ever.
        return sys.platform != "linux" or any(
            _is_member(stat, self.pid) for stat in _process_stats()
        )

    def has_exited(self) -> bool:
        """Tell whether the process itself has ended, whatever its helpers do."""
        if self.exit_fd is None:
            return self.process.exitcode is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.exit_fd, selectors.EVENT_READ)
            return bool(selector.select(0))

    def exit_code(self) -> int | None:
        """Reap the process; the code of a forkserver's child arrives a moment after its end."""
        deadline = time.monotonic() + 1.0
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.process.exitcode

    def release(self, bound: float) -> None:
        """Give back what this process holds for it."""
        self.process.join(bound)
        self.link.close()
        self.stacks.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        with contextlib.suppress(ValueError):  # it outlived SIGKILL, in the kernel
            self.process.close()


def open_pid(process: BaseProcess) -> int | None:
    """Return a descriptor that tells of the end of the process itself, where there are such."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    assert process.pid is not None
    with contextlib.suppress(OSError):
        return os.pidfd_open(process.pid)
    return None


def _process_stats() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield (folder / "stat").read_text(encoding="ascii", errors="replace")


def _is_member(stat: str, pgid: int) -> bool:
    state, _, group = stat.rpartition(")")[2].split()[:3]
    return group == str(pgid) and state not in ("Z", "X")
