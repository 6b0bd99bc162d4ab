"""The process that looks with torch, as the doctor sees it: it may crash, and it may hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from ddpkit.doctor.torch_side import Failed, Started

__all__ = ["TorchProcess"]

# Not `-m`: whatever options Python was started with, it looks for modules where this process does.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from ddpkit.doctor.torch_side import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]))"
)
_LINES_KEPT = 20
_GRACE = 3.0


class TorchProcess:
    """Starts at once, and sends what it finds until it has finished or its time is over."""

    def __init__(self, time_limit: float, exercise_limit: float) -> None:
        self._time_limit = time_limit
        self._deadline = time.monotonic() + time_limit
        self._pipe, theirs = multiprocessing.Pipe(duplex=False)
        command = (sys.executable, "-c", _PROGRAM)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(exercise_limit), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Whoever asks for ddpkit's own lines sees them; else they are kept for a crash.
                stderr=None if os.environ.get("DDPKIT_LOG") else subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def collect(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Wait for what it finds.

        Returns:
            The sections that were found, and for each that was not, why.
        """
        found: dict[str, Any] = {}
        failures: dict[str, str] = {}
        section = "torch"
        try:
            for message in self._messages(self._pipe):
                if isinstance(message, Started):
                    section = message.section
                elif isinstance(message, Failed):
                    failures[section] = message.why
                else:
                    found[section] = message
        except (EOFError, TimeoutError) as error:
            failures[section] = self._describe_end(error)
        return found, failures

    def _messages(self, pipe: Connection) -> Iterator[Any]:
        while True:
            if not pipe.poll(max(0.0, self._deadline - time.monotonic())):
                raise TimeoutError
            message = pipe.recv()
            if message is None:
                return
            yield message

    def _describe_end(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            what = f"it did not finish within {self._time_limit:g} s, and was stopped"
        else:
            what = f"its process ended {self._describe_exit()}"
        self.close()
        said = "\n".join(self._lines)
        return f"{what}\nIts last words:\n{said}" if said else what

    def _describe_exit(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "what it was to say, but not itself"
        if code >= 0:
            return f"with exit code {code}"
        try:
            return f"by {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.append(line.decode(errors="replace").rstrip())

    def close(self) -> None:
        """End the process, and with it the ranks that it has started."""
        self._pipe.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        self._reader.join(_GRACE)
        assert self._process.stdout is not None
        if not self._reader.is_alive():  # who would hold the stream's lock
            self._process.stdout.close()

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
