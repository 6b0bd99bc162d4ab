"""What the benchmarks share: contestants in processes of their own, the machine, and tables.

An `Arena` holds everything that one benchmark starts. Each process in it carries a variable with
the arena's name, which all its descendants inherit, however they were started. A guardian process
waits for the end of the benchmark, whatever ends it, and then kills every process that still
carries the name, by its id, and no other.

Run as a script this file is that guardian.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import psutil
from contestants import WAYS
from task import Task

HERE = Path(__file__).resolve().parent
MARK = "LAUNCH_BENCHMARK_MARK"
REFERENCES = ("bare fork", "mp.spawn", "torchrun")

START_BOUND = 120.0
LAUNCH_BOUND = 120.0
_GUARDIAN_BOUND = 30.0
_BEGAN = time.monotonic()

# A launcher would take the first for its own launch; the last makes torch check every collective.
_VARIABLES_OF_LAUNCHES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "DDPKIT_NPROC_PER_NODE"),
    "TORCH_DISTRIBUTED_DEBUG",
)
_SHOWN_PACKAGES = (
    *("torch", "ddpkit", "torchrunx", "accelerate", "lightning-fabric", "pytorch-ignite", "psutil"),
)


# --------------------------------------------------------------------------------- the processes


@dataclass
class Arena:
    """Everything that one benchmark starts, and the folder that it works in."""

    name: str
    folder: Path
    started: int = 0

    def new_mark(self) -> str:
        """Make a mark that one process and its descendants carry."""
        self.started += 1
        return f"{self.name}:{self.started}:"

    def new_folder(self) -> str:
        """Make a folder for the files of one launch."""
        return tempfile.mkdtemp(dir=self.folder)

    def start(
        self, mark: str, *arguments: str, served: bool = True, sigint_ignored: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the contestants' program under a mark, with pipes where it is to be served."""
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "contestants.py"), *arguments],
                stdin=subprocess.PIPE if served else subprocess.DEVNULL,
                stdout=subprocess.PIPE if served else log,
                stderr=log,
                env=self.environment(mark),
                start_new_session=True,  # Ctrl-C on the terminal is for the benchmark alone
                preexec_fn=_ignore_sigint if sigint_ignored else _heed_sigint,
            )

    def environment(self, mark: str) -> dict[str, str]:
        """Make the variables of a process under a mark."""
        kept = {k: v for k, v in os.environ.items() if k not in _VARIABLES_OF_LAUNCHES}
        return kept | {
            MARK: mark,
            "OMP_NUM_THREADS": "1",  # alike for all ranks, so that threads distort nothing
            "GLOO_SOCKET_IFNAME": "lo",
            # Fresh interpreters find the workloads there.
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.getenv("PYTHONPATH")])]),
            "TMPDIR": str(self.folder),  # what launchers leave there goes with it
        }

    def last_output(self) -> str:
        """Return the end of what contestants and ranks have printed."""
        text = (self.folder / "log.txt").read_text(errors="replace")
        return "\n".join(text.splitlines()[-15:])


def _ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _heed_sigint() -> None:
    # A shell that started the benchmark with & has it ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def open_arena() -> Iterator[Arena]:
    """Make an arena, and see to it that nothing of it is left."""
    arena = Arena(uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="launch-bench-")))
    guardian = subprocess.Popen(
        [sys.executable, __file__, arena.name, str(arena.folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    previous = signal.signal(signal.SIGTERM, _exit_at_once)
    try:
        yield arena
    finally:
        signal.signal(signal.SIGTERM, previous)
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(_GUARDIAN_BOUND)


def _exit_at_once(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)


def guard(name: str, folder: str) -> None:
    """Wait until the benchmark has ended, however that was, and clear up after it."""
    sys.stdin.read()
    kill_marked(name + ":")
    shutil.rmtree(folder, ignore_errors=True)


def kill_marked(prefix: str, bound: float = 20.0) -> None:
    """Kill the processes whose mark begins with this, until there is none."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        marked = [process for group in find_marked(prefix).values() for process in group]
        if not marked:
            return
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)  # one that was just being started is found in the next pass


def find_marked(prefix: str) -> dict[str, list[psutil.Process]]:
    """Find the processes whose mark begins with this, by their mark; zombies carry none."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.environ().get(MARK, "")
            if mark.startswith(prefix):
                found.setdefault(mark, []).append(process)
    return found


# ------------------------------------------------------------------------------- the contestants


class StillRunningError(Exception):
    """A launch has not come back within its bound."""


class ContestantEndedError(Exception):
    """The process that was to launch has ended, which a launcher has no business to do."""


class LaunchFailedError(Exception):
    """A launch that was to succeed has failed."""


@dataclass(frozen=True)
class Reply:
    """What came of one launch. Times are monotonic, which all processes of a machine share."""

    began: float
    ended: float
    result: dict[str, float] | None
    """What rank 0 returned: its `value`, and the time at which it was `done_at` with it."""
    error: dict[str, Any] | None
    """What the caller got instead, see `contestants.describe`."""
    task: Task

    @property
    def seconds(self) -> float:
        """Time of the whole call."""
        return self.ended - self.began

    def expect_result(self) -> dict[str, float]:
        """Return the result of a launch that was to succeed."""
        if self.result is None:
            raise LaunchFailedError((self.error or {}).get("text"))
        return self.result


class Contestant:
    """A process that launches in one way when it is asked to, and keeps its state in between.

    Attributes:
        name: The way in which it launches.
        imports: Seconds that it took to import torch and the launcher.
        note: What a reader has to know about its figures, or None.
    """

    def __init__(self, arena: Arena, name: str) -> None:
        self.name = name
        self._arena = arena
        self._mark = arena.new_mark()
        self._process = arena.start(self._mark, "serve", name)
        self._unread = b""
        self.imports = 0.0
        self.note: str | None = None

    def await_ready(self) -> None:
        """Wait until it has imported what it needs."""
        hello = self._read(START_BOUND)
        self.imports, self.note = hello["imports"], hello["note"]

    def launch(self, workload: str, ranks: int = 2, bound: float = LAUNCH_BOUND) -> Reply:
        """Have it launch once.

        Raises:
            StillRunningError: The bound has passed; only `close` is of use then.
            ContestantEndedError: Its process has ended.
        """
        task = Task(workload, ranks, self._arena.new_folder())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task._asdict()).encode() + b"\n")
        self._process.stdin.flush()
        return Reply(**self._read(bound), task=task)

    def close(self) -> None:
        """End it and whatever it has started."""
        kill_marked(self._mark)
        self._process.communicate()

    def _read(self, bound: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + bound
        while b"\n" not in self._unread:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], remaining)[0]:
                raise StillRunningError(f"{self.name}: still running after {bound:.0f} s")
            self._take(os.read(self._process.stdout.fileno(), 65536))
        line, self._unread = self._unread.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _take(self, data: bytes) -> None:
        if not data:
            raise ContestantEndedError(f"{self.name} has ended:\n{self._arena.last_output()}")
        self._unread += data


class Team:
    """The contestants of a benchmark; all of them stay until its end, so that turns can be taken.

    Attributes:
        missing: Ways that cannot be measured here, and why.
    """

    def __init__(self, arena: Arena, names: Iterable[str]) -> None:
        self._arena = arena
        self.missing: dict[str, str] = {}
        self.members: dict[str, Contestant] = {}
        for name in names:
            absent = WAYS[name].missing()
            if absent is None:
                self.members[name] = Contestant(arena, name)
                self.members[name].await_ready()  # one by one, for the time of the imports
            else:
                self.missing[name] = "not installed"

    def launch(self, name: str, workload: str, **options: Any) -> Reply:
        """Have one of them launch."""
        return self.members[name].launch(workload, **options)

    def drop(self, name: str, reason: str) -> None:
        """Go on without one."""
        self.members.pop(name).close()
        self.missing[name] = reason

    def renew(self, name: str) -> None:
        """Put a fresh process in the place of one."""
        self.members[name].close()
        self.members[name] = Contestant(self._arena, name)
        self.members[name].await_ready()

    def close(self) -> None:
        """End all of them."""
        for member in self.members.values():
            member.close()

    def notes(self) -> list[str]:
        """Collect what a reader has to know."""
        return [f"{name}: {m.note}" for name, m in self.members.items() if m.note is not None]


# ------------------------------------------------------------------------ the machine and tables


def describe_machine() -> dict[str, Any]:
    """Name what the figures depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": _versions(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    found = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    return dict(sorted(found.items()))


def print_machine(machine: dict[str, Any]) -> None:
    """Print what the figures depend on; the file has the versions of everything installed."""
    shown = {key: value for key, value in machine.items() if key != "packages"}
    print(", ".join(f"{key} {value}" for key, value in shown.items()))
    packages = machine["packages"]
    print(", ".join(f"{name} {packages.get(name, 'not installed')}" for name in _SHOWN_PACKAGES))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose columns are as wide as they have to be; the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *rows):
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def show_time(seconds: float | None) -> str:
    """Write a time so that its size is seen at a glance."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_range(values: Sequence[float]) -> str:
    """Write the smallest and the largest time."""
    return f"{show_time(min(values))} .. {show_time(max(values))}" if values else "-"


def median(values: Sequence[float]) -> float | None:
    """Compute the median, None where nothing was measured."""
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Target:
    """Something that ddpkit promises, and what was measured; None where nothing was."""

    promise: str
    measured: str
    holds: bool | None

    def __str__(self) -> str:
        verdict = {True: "holds", False: "does not hold", None: "was not measured"}[self.holds]
        return f"target {self.promise} {verdict} ({self.measured})"


def print_targets(targets: Sequence[Target]) -> None:
    """Print one line for each target."""
    print()
    for target in targets:
        print(target)


# ------------------------------------------------------------------------------ the command line


def make_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Make the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME",
        help=f"contestants to measure, of: {', '.join(WAYS)}",
    )  # fmt: skip
    return parser


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Write the figures to the file that was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def tell(text: str) -> None:
    """Say what is going on; the tables alone go to standard output."""
    print(f"{time.monotonic() - _BEGAN:4.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    guard(*sys.argv[1:])
