"""Programs that a test starts through a launcher: their lines as they come, and how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANK = (sys.executable, str(Path(__file__).with_name("rank_program.py")))

Line = dict[str, Any]

_END_BOUND = 100.0  # above what the ranks' own time-outs are
_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "HYD", "MPI", "TORCHELASTIC", "MASTER_")


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    lines: list[Line]
    """What its ranks have said, by rank."""
    stderr: str
    seconds: float
    """How long it took from the call that waited for its end."""


class Started:
    """A program that runs; its lines of JSON are what its ranks say."""

    def __init__(self, process: subprocess.Popen[str], stderr: Path) -> None:
        self.process = process
        self._stderr = stderr
        self._lines: list[Line] = []

    def await_lines(self, count: int) -> list[Line]:
        """Wait until the ranks have said so many lines in all, and return those of this call."""
        assert self.process.stdout is not None
        before = len(self._lines)
        while len(self._lines) < before + count:
            text = self.process.stdout.readline()
            assert text, f"ended after {self._lines}:\n{self.errors()}"
            self._lines += read_lines(text)
        return by_rank(self._lines[before:])

    def end(self) -> Ended:
        """Wait until the program has ended."""
        assert self.process.stdout is not None
        start = time.monotonic()
        try:
            self.process.wait(_END_BOUND)  # what is said until then fits into the pipe
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end after {self._lines}:\n{self.errors()}") from None
        seconds = time.monotonic() - start
        self._lines += read_lines(self.process.stdout.read())
        return Ended(self.process.returncode, by_rank(self._lines), self.errors(), seconds)

    def errors(self) -> str:
        return self._stderr.read_text(errors="replace")


@contextlib.contextmanager
def started(
    folder: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """Start a program for a block, in a folder; what still runs at the end of it is ended."""
    stderr = folder / f"stderr-{len(list(folder.glob('stderr-*')))}"
    with (
        stderr.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**clean_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Started(process, stderr)
        finally:
            if process.poll() is None:
                process.terminate()  # which a launcher passes on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            process.kill()


def run_ranks_of(
    folder: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a program until its end."""
    with started(folder, *command, environment=environment) as program:
        return program.end()


def clean_environment() -> dict[str, str]:
    """Return the variables of this process without those of launchers that it may be under."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT)}


def read_lines(output: str) -> list[Line]:
    """Read what ranks have said; a launcher says things of its own, which are left out."""
    return by_rank([json.loads(text) for text in output.splitlines() if text.startswith("{")])


def by_rank(lines: list[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: int(line["rank"]))


def places(lines: list[Line]) -> list[tuple[int, ...]]:
    """Return (rank, world size, local rank, local world size, node, nodes) of each rank."""
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    return [tuple(line[name] for name in names) for line in lines if "total" in line]
