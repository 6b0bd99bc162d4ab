"""README and the guide, done as a reader does them: files written, changed and run, in order."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documents import PLAYED, WRITTEN, Block, apply_patch, find_blocks, read_page, shows
from tests.launcher.started import ROOT, clean_environment

pytestmark = pytest.mark.launcher

BOUND = 120.0  # seconds for one command, on a busy machine
WARM = str(Path(__file__).with_name("warm_python.py"))


class Printed(NamedTuple):
    """How a command ended."""

    status: int
    text: str


Run = Callable[[str, Path], Printed]


def environment(folder: Path) -> dict[str, str]:
    """Variables of a reader's shell; torchrun takes a free port, in place of its usual one."""
    port = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    ours = {"OMP_NUM_THREADS": "1", "PATH": path, "TMPDIR": str(temporary)}
    others = {name: value for name, value in clean_environment().items() if "PYTEST" not in name}
    return {**others, **port, **ours}


def run_in_shell(line: str, folder: Path) -> Printed:
    """Run a command as it stands."""
    process = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND,
        check=False,
    )
    return Printed(process.returncode, process.stdout)


@contextlib.contextmanager
def warm_python() -> Iterator[Run]:
    """Run `python ...` without waiting for imports of torch each time, and the rest in a shell."""
    with subprocess.Popen(
        [sys.executable, WARM],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def run(line: str, folder: Path) -> Printed:
            variables, arguments = split_command(line)
            if arguments[0] != "python":
                return run_in_shell(line, folder)
            return ask(process, arguments[1:], folder, {**environment(folder), **variables})

        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it, where a program hangs
                os.killpg(process.pid, signal.SIGKILL)


def ask(
    process: subprocess.Popen[str], argv: list[str], folder: Path, variables: Mapping[str, str]
) -> Printed:
    """Have the warm python run a program."""
    assert process.stdin is not None
    assert process.stdout is not None
    output = folder.parent / "output"
    request = {"argv": argv, "folder": str(folder), "output": str(output), "environment": variables}
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], BOUND)
    assert ready, f"{argv} has not ended, and has printed:\n{output.read_text()}"
    return Printed(int(process.stdout.readline()), output.read_text())


def split_command(line: str) -> tuple[dict[str, str], list[str]]:
    """Take a line of a shell apart: variables in front of it, and the words of the command."""
    words = shlex.split(line, comments=True)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


class Reader:
    """Somebody who does what a page says."""

    def __init__(self, run: Run, folder: Path, *, patient: bool) -> None:
        self._run = run
        self._folder = folder
        self._patient = patient
        self._printed: str | None = None

    def do(self, block: Block) -> None:
        file = self._folder / block.argument
        if block.verb == "file":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.verb == "patch":
            file.write_text(apply_patch(file.read_text(), block.text))
        elif block.verb == "same":
            assert block.text == file.read_text()
        elif block.verb == "run":
            self._type(block)
        elif block.verb == "prints" and self._printed is not None:
            mixed = block.argument == "mixed"
            assert shows(block.text, self._printed, mixed=mixed), f"it printed:\n{self._printed}"

    def _type(self, block: Block) -> None:
        words = block.argument.split()
        if "slow" in words and not self._patient:
            self._printed = None
            return
        for line in block.text.splitlines():
            if line.startswith("torchrun") and not self._patient:
                continue  # it starts interpreters, which import torch
            printed = self._run(line, self._folder)
            assert (printed.status != 0) == ("fails" in words), f"{line}:\n{printed.text}"
            self._printed = printed.text


def play(page: str, run: Run, folder: Path, *, patient: bool) -> None:
    folder.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")  # as in a clone
    reader = Reader(run, folder, patient=patient)
    for block in find_blocks(read_page(page), page):
        try:
            reader.do(block)
        except AssertionError as error:
            raise AssertionError(f"{block.place}: {error}") from error


PLAYABLE = [page for page in WRITTEN if any(b.verb in PLAYED for b in find_blocks(read_page(page)))]


@pytest.mark.timeout(300)
def test_pages_do_what_they_show(tmp_path: Path) -> None:
    with warm_python() as run:
        for number, page in enumerate(PLAYABLE):
            play(page, run, tmp_path / str(number) / "work", patient=False)


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PLAYABLE)
def test_pages_do_what_they_show_in_a_shell(page: str, tmp_path: Path) -> None:
    play(page, run_in_shell, tmp_path / "work", patient=True)
