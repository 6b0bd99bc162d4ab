"""Where the ranks are: their Python stacks, asked for by a signal.

A handler in Python runs only when the main thread is back in the interpreter, which a blocked
collective never is. faulthandler's is written in C and answers from anywhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.launch.process import RankProcess
from ddpkit.launch.report import LIBRARIES, Stack

# Not one of the signals that people use: SIGUSR1 stays the user's.
REQUEST: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
_QUIET = 0.03
_BOUND = 1.0

_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*(?:\n|\Z))*)", re.MULTILINE
)
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_LAUNCH = str(Path(__file__).parent) + os.sep
_WORKER = str(Path(__file__).with_name("worker.py"))
_CONTROL = str(Path(__file__).parents[1] / "control.py")
_PLUMBING = frozenset(
    {"wrapper", "inner", "decorate_context", "_fn", "__call__", "_call_impl", "_wrapped_call_impl"}
)


@dataclass(frozen=True)
class _Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


def answer_requests(descriptor: int) -> None:
    """Write the stacks of this process to a descriptor whenever the signal arrives."""
    if REQUEST is not None:
        os.set_blocking(descriptor, False)  # nobody may be reading
        faulthandler.register(REQUEST, file=descriptor, all_threads=True)


def collect(ranks: Sequence[RankProcess]) -> dict[int, Stack]:
    """Ask ranks where they are.

    Args:
        ranks: Those that have not ended.

    Returns:
        A stack for each rank, within about a second; one that is stopped cannot answer.
    """
    texts: dict[int, bytes] = {}
    for rank in ranks:
        os.set_blocking(rank.stacks.fileno(), False)
        _read(rank)  # what somebody else asked for earlier
        if REQUEST is not None and rank.checked_in:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, REQUEST)
                texts[rank.rank] = b""
    _await_answers([rank for rank in ranks if rank.rank in texts], texts)
    return {
        rank.rank: summarize(texts.get(rank.rank, b"").decode(errors="replace"), rank.main_thread)
        or Stack(f"no answer ({_state(rank.pid)})" if rank.checked_in else "before the function")
        for rank in ranks
    }


def _await_answers(ranks: Iterable[RankProcess], texts: dict[int, bytes]) -> None:
    deadline = time.monotonic() + _BOUND
    quiet_since = time.monotonic()
    waiting = list(ranks)
    while waiting and time.monotonic() < deadline:
        for rank in waiting:
            data = _read(rank)
            texts[rank.rank] += data
            if data:
                quiet_since = time.monotonic()
        if all(texts[rank.rank] for rank in waiting) and (time.monotonic() - quiet_since > _QUIET):
            return
        time.sleep(0.002)


def _read(rank: RankProcess) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(rank.stacks.fileno(), 1 << 16):
            data += chunk
    return data


def _state(pid: int) -> str:
    """What the kernel says that a process does, such as `T (stopped)`."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^State:\s*(.+)$", status, re.MULTILINE)
        return f"state {match[1]}" if match else "state unknown"
    return "it has ended"


def summarize(dump: str, main_thread: int) -> Stack | None:
    """Make a stack of what faulthandler wrote.

    Args:
        dump: Its text; frames stand in the order of faulthandler, the most recent call first.
        main_thread: Identifier of the main thread.

    Returns:
        The stack, None where the main thread is not among the text.
    """
    threads = {int(ident, 16): _frames(block) for ident, block in _THREAD.findall(dump)}
    main = threads.pop(main_thread, None)
    if main is None:
        return None
    blocks = ["main thread (most recent call first):", *map(str, main)]
    for frames in threads.values():
        if frames and not any(frame.file in (_WORKER, _CONTROL) for frame in frames):
            blocks += ["another thread:", *map(str, frames)]
    return Stack(_describe_place(main), "\n".join(blocks))


def _frames(block: str) -> list[_Frame]:
    """Frames of a thread, without what stands below the user's function."""
    frames: list[_Frame] = []
    for match in _FRAME.finditer(block):
        if match[1] == _WORKER and frames:
            break
        frames.append(_Frame(*match.groups()))
    while len(frames) > 1 and frames[-1].file.startswith(_LAUNCH):
        frames.pop()
    return frames


def _describe_place(frames: Sequence[_Frame]) -> str:
    """Name the innermost line of the user's code, and what it has called of a library."""
    if not frames:
        return "before the function"
    for index, frame in enumerate(frames):
        if not frame.file.startswith(LIBRARIES):
            called = [inner.function for inner in frames[:index]]
            name = next(
                (name for name in reversed(called) if name not in _PLUMBING), frame.function
            )
            return f"{name} at {Path(frame.file).name}:{frame.line}"
    return f"{frames[0].function} at {Path(frames[0].file).name}:{frames[0].line}"
