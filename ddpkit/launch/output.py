"""Where the output of ranks goes: to the terminal, or to one log file for each rank.

Everything happens with file descriptors, so that output of C code and of subprocesses is in the
logs, too. A rank writes to its file itself; rank 0, which is also shown on the terminal, writes
into pipes that a thread of the parent empties, so that its last words arrive however it ends.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from ddpkit.errors import ConfigError

_STDOUT, _STDERR = 1, 2
_DRAIN_BOUND = 2.0
_READ_SIZE = 1 << 16

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StandardStreams:
    """Descriptors that a rank is to use as its standard output and error.

    Pickled for a new process it sends duplicates, and what arrives there has been taken already: a
    forkserver keeps what was open when it started, and other ranks would inherit it.
    """

    stdout: int = _STDOUT
    stderr: int = _STDERR

    def take(self) -> None:
        """Make them the standard streams of this process."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os.dup2(self.stdout, _STDOUT)
        os.dup2(self.stderr, _STDERR)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, tuple(reduction.DupFd(stream) for stream in (self.stdout, self.stderr))


def _arrive(*duplicates: Any) -> StandardStreams:
    streams = StandardStreams(*(duplicate.detach() for duplicate in duplicates))
    streams.take()
    os.close(streams.stdout)
    os.close(streams.stderr)
    return StandardStreams()


def write_to_descriptors(*, only_from_memory: bool = False) -> None:
    """Let Python's streams write to the standard descriptors, whatever stood in their place.

    A fork inherits what the parent had put there, such as a test runner's capture.

    Args:
        only_from_memory: Whether this is for streams that keep all in memory alone: those of a fork
            are copies, which nobody reads.
    """
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        stream = getattr(sys, name)
        if only_from_memory and not _is_in_memory(stream):
            continue
        if not _writes_to(stream, descriptor):
            stream = open(  # noqa: SIM115  # it is the rank's stream from now on
                descriptor, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)


def _is_in_memory(stream: Any) -> bool:
    # Not a text over BytesIO, with which pytest's capsys lets a rank read what it has printed.
    return isinstance(stream, io.StringIO)


def _writes_to(stream: Any, descriptor: int) -> bool:
    try:
        return bool(stream.fileno() == descriptor)
    except (AttributeError, OSError, ValueError):
        return False


def buffer_lines() -> None:
    """Write whole lines at once.

    A rank that is stopped loses what is in a block buffer, and what is written piece by piece mixes
    with the lines of other ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


# ------------------------------------------------------------------------------------ log files


def open_log(folder: Path, rank: int, world_size: int, name: str) -> int:
    """Open the log file of a rank for appending, and write a line that says whose it is.

    Raises:
        ConfigError: It cannot be written.
    """
    path = folder / f"rank-{rank}.log"
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"--- {now} rank {rank} of {world_size}, {name}()\n")
        return os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise ConfigError(
            f"log_dir={str(folder)!r} was given, but {path} cannot be written ({error}). Give a "
            "folder that this user may write to."
        ) from error


def terminal_of(stream: Any, standard: int, descriptor: int) -> Callable[[bytes], object]:
    """Return what shows bytes to the person at this program.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
        standard: The standard descriptor that it usually writes to.
        descriptor: A descriptor of the terminal.
    """
    if stream is None or _writes_to(stream, standard):
        return lambda data: _write_all(descriptor, data)
    # A notebook shows what is written to the stream, and nothing else.
    return lambda data: stream.write(data.decode("utf-8", "replace"))


def show_here() -> tuple[Callable[[bytes], object], Callable[[bytes], object]]:
    """Return what shows bytes as this program's standard output and error."""
    return terminal_of(sys.stdout, _STDOUT, _STDOUT), terminal_of(sys.stderr, _STDERR, _STDERR)


class Copier:
    """A thread that copies what arrives in two pipes to the terminal and to a log file.

    Args:
        log: Descriptor of the log file, which belongs to the copier from now on.
        terminal: What shows standard output and error.
    """

    def __init__(
        self, log: int, terminal: tuple[Callable[[bytes], object], Callable[[bytes], object]]
    ) -> None:
        self._log: int = log
        self._log_works = True
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        self._targets: dict[int, Callable[[bytes], object] | None]
        self._targets = dict(zip(readers, terminal, strict=True))
        self.streams: StandardStreams | None = StandardStreams(*writers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="ddpkit-output", daemon=True)

    def descriptors(self) -> tuple[int, ...]:
        """What a forked rank has to close."""
        writers = () if self.streams is None else (self.streams.stdout, self.streams.stderr)
        return (self._log, *self._targets, *writers)

    def start(self) -> None:
        """Begin to copy; what was written before is not lost."""
        self._thread.start()

    def close_writers(self) -> None:
        """Let go of the ends that a rank writes to, so that its end is the end of the pipes."""
        if self.streams is not None:
            os.close(self.streams.stdout)
            os.close(self.streams.stderr)
            self.streams = None

    def close(self) -> bool:
        """Copy what is still there, and end.

        Returns:
            Whether the thread has ended. Where the terminal takes nothing it goes on waiting, and
            keeps its descriptors: their numbers must not become another file's meanwhile.
        """
        self.close_writers()
        self._stop.set()
        if self._thread.ident is None:
            self._release()
            return True
        # A helper that left the rank's process group may hold the pipes open for ever.
        self._thread.join(_DRAIN_BOUND)
        return not self._thread.is_alive()

    def _release(self) -> None:
        for descriptor in (self._log, *self._targets):
            os.close(descriptor)

    def _copy(self) -> None:
        try:
            self._copy_until_the_end()
        finally:
            self._release()

    def _copy_until_the_end(self) -> None:
        with selectors.DefaultSelector() as selector:
            for reader in self._targets:
                selector.register(reader, selectors.EVENT_READ)
            deadline: float | None = None
            while selector.get_map():
                if self._stop.is_set() and deadline is None:
                    deadline = time.monotonic() + _DRAIN_BOUND / 2
                ready = selector.select(0.05)
                if deadline is not None and (not ready or time.monotonic() > deadline):
                    return
                for key, _ in ready:
                    data = os.read(key.fd, _READ_SIZE)
                    if not data:
                        selector.unregister(key.fd)
                    self._write(key.fd, data)

    def _write(self, reader: int, data: bytes) -> None:
        show = self._targets[reader]
        if show is not None:
            try:
                show(data)
            except (OSError, ValueError):
                self._targets[reader] = None  # the terminal has gone; the log goes on
        if self._log_works:
            try:
                _write_all(self._log, data)
            except OSError as error:
                self._log_works = False
                _logger.warning("the log file of rank 0 can no longer be written: %s", error)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class RankLogs:
    """The log files of the ranks of one launch.

    Args:
        folder: Where they go; None for no logs.
        world_size: Number of ranks.
        name: Name of the function that they run.

    Raises:
        ConfigError: A file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, world_size: int, name: str) -> None:
        self._files: dict[int, int] = {}
        self._copier: Copier | None = None
        if folder is None:
            return
        try:
            for rank in range(world_size):
                self._files[rank] = open_log(Path(folder), rank, world_size, name)
        except ConfigError:
            self.close()
            raise
        self._copier = Copier(self._files.pop(0), show_here())

    def streams(self, rank: int) -> StandardStreams | None:
        """What a rank is to write to; None for what the parent writes to."""
        if self._copier is None:
            return None
        if rank == 0:
            return self._copier.streams
        return StandardStreams(self._files[rank], self._files[rank])

    def descriptors(self) -> tuple[int, ...]:
        """What a forked rank has to close."""
        return (*self._files.values(), *(self._copier.descriptors() if self._copier else ()))

    def start_copying(self) -> None:
        """Begin to show rank 0's output; called after the forks, because it starts a thread."""
        if self._copier is not None:
            self._copier.close_writers()
            self._copier.start()

    def close(self) -> None:
        """Show what is left of rank 0's output, and close the files."""
        if self._copier is not None:
            self._copier.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._copier = None


@contextlib.contextmanager
def logged_here(
    folder: str | os.PathLike[str] | None, rank: int, world_size: int, name: str
) -> Iterator[None]:
    """Write the output of this process, which is itself a rank, to its log file for a block.

    Rank 0 is also shown on the terminal.
    """
    if folder is None:
        yield
        return
    log = open_log(Path(folder), rank, world_size, name)
    before = os.dup(_STDOUT), os.dup(_STDERR)
    python_streams = sys.stdout, sys.stderr
    shown = (
        terminal_of(sys.stdout, _STDOUT, before[0]),
        terminal_of(sys.stderr, _STDERR, before[1]),
    )
    copier = Copier(log, shown) if rank == 0 else None
    streams = copier.streams if copier is not None else StandardStreams(log, log)
    assert streams is not None
    streams.take()
    try:
        write_to_descriptors()
        if copier is not None:
            copier.close_writers()
            copier.start()
        yield
    finally:
        StandardStreams(*before).take()
        sys.stdout, sys.stderr = python_streams
        if copier is None:
            os.close(log)
        if copier is None or copier.close():
            for descriptor in before:
                os.close(descriptor)
