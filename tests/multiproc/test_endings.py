"""More ways for a rank to end, and what the caller gets for each."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddpkit import barrier, get_rank
from ddpkit.agree import exchange
from ddpkit.errors import WorkerError
from ddpkit.testing import run_ranks
from tests.multiproc.test_failures import await_end, cause_of, collide, is_running, meet

REPOSITORY = Path(__file__).parents[2]


class ShapeError(ValueError):
    def __init__(self, name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
        super().__init__(f"{name} is {found} and not {wanted}")
        self.name = name
        self.wanted = wanted
        self.found = found


def raise_shape_error() -> None:
    raise ShapeError("weight", (2, 3), (3, 2))


@pytest.fixture(autouse=True)
def _promptly() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 30  # what is waited for here takes 60 s or 600 s


# -------------------------------------------------------------------------------- exceptions


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups yet")
def test_an_exception_group_arrives_with_its_members() -> None:
    group: Any = vars(builtins)["ExceptionGroup"]

    def fail() -> None:
        try:
            raise_shape_error()
        except ShapeError as error:
            raise group("two shards", [KeyError("a"), group("inner", [error])]) from None

    with pytest.raises(group, match="two shards") as caught:
        run_ranks(collide(1, fail))
    first, inner = caught.value.exceptions
    assert (type(first), first.args) == (KeyError, ("a",))
    assert (type(inner), inner.message) == (group, "inner")
    (shape,) = inner.exceptions
    assert (type(shape), shape.wanted, shape.found) == (ShapeError, (2, 3), (3, 2))
    assert "weight is (3, 2) and not (2, 3)" in cause_of(caught.value).traceback


def test_a_chain_of_causes_hangs_below_link_by_link() -> None:
    def open_shard() -> None:
        raise FileNotFoundError(2, "No such file", "shard-7")

    def read() -> None:
        try:
            open_shard()
        except OSError as error:
            raise KeyError("shard-7") from error

    def fail() -> None:
        try:
            read()
        except KeyError as error:
            raise ValueError("no data") from error

    with pytest.raises(ValueError, match="no data") as caught:
        run_ranks(collide(1, fail))
    second = cause_of(caught.value).__cause__
    assert isinstance(second, KeyError)
    third = second.__cause__
    assert isinstance(third, FileNotFoundError)
    assert (third.errno, third.filename, third.__cause__) == (2, "shard-7", None)
    places = [f"in {function.__name__}" for function in (open_shard, read, fail)]
    assert [place in cause_of(caught.value).traceback for place in places] == [True] * 3


def test_an_exception_whose_cause_cannot_be_sent_arrives_all_the_same() -> None:
    def fail() -> None:
        refused = ConnectionError("refused")
        refused.lock = threading.Lock()  # type: ignore[attr-defined]
        try:
            raise refused
        except ConnectionError as error:
            raise ShapeError("weight", (2, 3), (3, 2)) from error

    with pytest.raises(ShapeError) as caught:
        run_ranks(collide(1, fail))
    assert (caught.value.name, caught.value.wanted) == ("weight", (2, 3))
    assert "ConnectionError: refused" in cause_of(caught.value).traceback


def test_a_message_of_5_mb_arrives_whole() -> None:
    text = "0123456789" * 500_000

    def fail() -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="0123456789") as caught:
        run_ranks(collide(1, fail))
    assert caught.value.args == (text,)


def close_descriptors() -> None:
    os.close(1)
    os.close(2)


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


@pytest.mark.parametrize("close", [close_descriptors, close_streams])
def test_a_rank_that_has_closed_its_output_can_still_fail(close: Callable[[], None]) -> None:
    def fail() -> None:
        close()
        raise_shape_error()

    with pytest.raises(ShapeError) as caught:
        run_ranks(collide(1, fail))
    assert "in raise_shape_error" in cause_of(caught.value).traceback


# --------------------------------------------------------------------------------- memory


def limit_memory(headroom: int) -> None:
    """Let this process have so many more bytes of address space and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def allocate_at_once() -> None:
    bytearray(1 << 32)


def allocate_a_tensor() -> None:
    torch.empty(1 << 32, dtype=torch.uint8)


def allocate_piece_by_piece() -> None:
    pieces = []
    size = 1 << 20
    while True:
        try:
            pieces.append(bytearray(size))
        except MemoryError:
            if size < 1 << 8:
                raise
            size //= 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
@pytest.mark.parametrize(
    ("allocate", "kind"),
    [
        (allocate_at_once, MemoryError),
        (allocate_a_tensor, RuntimeError),
        (allocate_piece_by_piece, MemoryError),
    ],
)
def test_a_rank_without_memory_says_so(allocate: Callable[[], None], kind: type[Exception]) -> None:
    def fail() -> None:
        limit_memory(64 << 20)
        allocate()

    with pytest.raises(kind) as caught:
        run_ranks(collide(1, fail))
    assert cause_of(caught.value).rank == 1
    assert f"in {allocate.__name__}" in cause_of(caught.value).traceback


# --------------------------------------------------------------------------------- signals


def struck(number: signal.Signals) -> Callable[[], None]:
    """Make a function in which rank 0 sends rank 1 a signal, and then waits for it."""

    def function() -> None:
        if get_rank() == 1:
            faulthandler.disable()  # pytest has switched it on
        target = exchange(os.getpid(), name="pids")[1]
        if get_rank() == 0:
            os.kill(target, number)
            meet()
        for _ in range(600):
            time.sleep(0.1)  # Python misses a signal that comes just before the system call

    return function


@pytest.mark.parametrize("name", ["SIGTERM", "SIGABRT", "SIGUSR1"])
def test_a_signal_from_outside_is_named(name: str) -> None:
    with pytest.raises(WorkerError, match=f"killed by {name}") as caught:
        run_ranks(struck(signal.Signals[name]))
    error = caught.value
    assert (error.rank, error.signal_name, error.exit_code) == (1, name, None)


def test_the_cause_is_the_rank_that_died_also_where_an_asynchronous_collective_is_waited_for() -> (
    None
):
    def function() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        work.wait()
        os._exit(7)

    with pytest.raises(WorkerError, match="exit code 7") as caught:
        run_ranks(function)
    assert caught.value.rank == 1


def test_a_break_that_one_rank_alone_takes_is_explained() -> None:
    def function() -> None:
        for step in range(6):
            if step == 3 and get_rank() == 1:
                break
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError) as caught:
        run_ranks(function)
    last = str(cause_of(caught.value)).splitlines()[-1]
    assert "rank 1 had returned" in last
    assert "at test_endings.py:" in last
    assert "Look for a break" in last


def test_an_interrupt_from_outside_is_the_keyboard_interrupt_of_its_rank() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        run_ranks(struck(signal.SIGINT))
    cause = cause_of(caught.value)
    assert cause.rank == 1
    assert "in function" in cause.traceback


def test_a_silent_exit_with_0_is_a_failure_although_the_others_wait_in_a_barrier() -> None:
    def function() -> None:
        barrier()
        if get_rank() == 1:
            os._exit(0)
        barrier()

    with pytest.raises(WorkerError, match="exit code 0 without returning") as caught:
        run_ranks(function)
    assert (caught.value.rank, caught.value.exit_code) == (1, 0)


# ---------------------------------------------------------------------------------- output

SIZE = 20_000_000

# Rank 0 floods standard output and rank 1 standard error, in lines as prints are.
FLOOD = """
import json, pathlib, sys
from ddpkit import barrier, get_rank
from ddpkit.testing import run_ranks

LINE = "x" * 99 + "\\n"

def flood(fails):
    stream = (sys.stdout, sys.stderr)[get_rank()]
    for _ in range(SIZE // 100_000):
        stream.write(LINE * 1000)
    stream.flush()
    barrier()
    if fails and get_rank() == 1:
        raise KeyError("after the flood")
    barrier()
    return get_rank()

try:
    outcome = run_ranks(flood, args=[sys.argv[2] == "fails"])
except KeyError as error:
    outcome = [*error.args, error.__cause__.rank]
pathlib.Path(sys.argv[1]).write_text(json.dumps(outcome))
""".replace("SIZE", str(SIZE))


@pytest.mark.drill
@pytest.mark.parametrize(
    ("ending", "outcome"), [("returns", "[0, 1]"), ("fails", '["after the flood", 1]')]
)
def test_a_flood_of_output_holds_nothing_up_and_is_whole(
    ending: str, outcome: str, tmp_path: Path
) -> None:
    result = tmp_path / "result"
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", FLOOD, str(result), ending],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=55,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert result.read_text() == outcome
    assert (finished.stdout.count(b"x"), finished.stderr.count(b"x")) == (SIZE // 100 * 99,) * 2


# ---------------------------------------------------------------------------- data workers


class Numbers(Dataset[int]):
    """Numbers, and one that kills the worker that loads it."""

    def __init__(self, deadly: int = -1) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def start_workers(folder: Path, deadly: int = -1) -> Iterator[Any]:
    """Start two workers of this rank, note their process ids, and leave them at work."""
    loader = DataLoader(Numbers(deadly), batch_size=2, num_workers=2, persistent_workers=True)
    batches: Any = iter(loader)
    next(batches)
    pids = [str(worker.pid) for worker in batches._workers]
    (folder / str(get_rank())).write_text(" ".join(pids))
    return iter(batches)


def workers(folder: Path) -> list[int]:
    return [int(pid) for rank in range(2) for pid in (folder / str(rank)).read_text().split()]


def do_nothing() -> None:
    pass


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_at_once() -> None:
    os._exit(3)


kept: list[object] = []


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (do_nothing, None),
        (raise_shape_error, ShapeError),
        (kill_this_process, WorkerError),
        (leave_at_once, WorkerError),
    ],
)
def test_the_data_workers_of_ranks_are_gone(
    end: Callable[[], None], error: type[Exception] | None, tmp_path: Path
) -> None:
    def function() -> None:
        kept.append(start_workers(tmp_path))  # so that nothing ends them in order
        barrier()
        end()

    with pytest.raises(error) if error else contextlib.nullcontext():
        run_ranks(function)
    assert len(workers(tmp_path)) == 4
    # At once: some notice by themselves after 5 s that their rank has gone, and that is no merit.
    assert not any(map(is_running, workers(tmp_path)))


def test_a_data_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    def function() -> None:
        batches = start_workers(tmp_path, deadly=500 if get_rank() == 1 else -1)
        barrier()
        list(batches)
        meet()

    expected = r"DataLoader worker .*pid.* (killed by signal|exited)"
    with pytest.raises(RuntimeError, match=expected) as caught:
        run_ranks(function)
    assert cause_of(caught.value).rank == 1
    assert not any(map(is_running, workers(tmp_path)))


# ------------------------------------------------------------------------------- what lingers


def daemonise() -> int:
    """Start a helper with a session of its own, which holds all that this rank has open."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        helper = os.fork()
        if helper == 0:
            time.sleep(600)
        os.write(write_end, str(helper).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read_end, 20))


@pytest.mark.parametrize("fails", [False, True])
def test_a_helper_that_made_itself_independent_holds_nothing_up(
    fails: bool, tmp_path: Path
) -> None:
    def function() -> None:
        (tmp_path / str(get_rank())).write_text(str(daemonise()))
        barrier()
        if fails and get_rank() == 1:
            raise_shape_error()

    try:
        with pytest.raises(ShapeError) if fails else contextlib.nullcontext():
            run_ranks(function)
    finally:
        # It left the process group of its rank on purpose, as `nohup` and `setsid` do.
        for pid in workers(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await_end(workers(tmp_path))


def test_a_thread_that_goes_on_does_not_keep_the_launch_from_ending_and_is_named(
    tmp_path: Path,
) -> None:
    def function() -> int:
        threading.Thread(target=time.sleep, args=[600], name=f"upload-{get_rank()}").start()
        threading.Thread(target=time.sleep, args=[600], name="whatever", daemon=True).start()
        (tmp_path / str(get_rank())).write_text(str(os.getpid()))
        return get_rank()

    expected = r"after the shutdown_grace of 0.5 s .*\(rank 0: 'upload-0'; rank 1: 'upload-1'\)"
    with pytest.warns(RuntimeWarning, match=expected) as caught:
        assert run_ranks(function, shutdown_grace=0.5) == [0, 1]
    assert len(caught) == 1
    assert not any(map(is_running, workers(tmp_path)))


def test_a_thread_that_ends_within_the_grace_is_waited_for_without_a_word(tmp_path: Path) -> None:
    def upload(rank: int) -> None:
        time.sleep(0.3)
        (tmp_path / str(rank)).touch()

    def function() -> None:
        threading.Thread(target=upload, args=[get_rank()]).start()

    run_ranks(function, shutdown_grace=20)
    assert len(list(tmp_path.iterdir())) == 2


def sleep_long() -> None:
    time.sleep(600)


@pytest.mark.parametrize("at_exit", [raise_shape_error, sleep_long])
def test_what_a_rank_does_at_its_exit_costs_neither_its_value_nor_the_end(
    at_exit: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> int:
        atexit.register(at_exit)  # which the ranks of some versions of Python call
        return get_rank()

    assert run_ranks(function, shutdown_grace=0.5) == [0, 1]


def test_the_number_of_a_rank_that_has_gone_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled = []
    killpg = os.killpg

    def note_and_kill(group: int, number: int) -> None:
        if number != 0:
            signalled.append(group)
        killpg(group, number)

    def function() -> list[int]:
        pids: list[int] = exchange(os.getpid(), name="pids")
        if get_rank() == 0:
            await_end(pids[1:])
            time.sleep(0.3)  # in hours, another program may get that number
        return pids

    monkeypatch.setattr(os, "killpg", note_and_kill)
    _, second = run_ranks(function)[0]
    assert second not in signalled
