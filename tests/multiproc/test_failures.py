import faulthandler
import os
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

from ddpkit import barrier, distributed, get_rank
from ddpkit.control import _process_start
from ddpkit.errors import WorkerError
from ddpkit.testing import run_ranks
from tests.forking import needs_fork
from tests.multiproc.sleeping import sleep_long

REPOSITORY = Path(__file__).parents[2]


class DiskError(OSError):
    def __init__(self, path: str, *, free: int) -> None:
        super().__init__(f"{path}: {free} bytes are free")
        self.path = path
        self.free = free


def meet() -> None:
    """Wait in a collective until every rank has come, which is never the case here."""
    dist.all_reduce(torch.ones(1))


def collide(failing: int, fail: Callable[[], Any]) -> Callable[[], None]:
    def function() -> None:
        meet()
        if get_rank() == failing:
            fail()
        else:
            meet()

    return function


def fail_to_find() -> None:
    raise KeyError("x")


def cause_of(error: BaseException) -> WorkerError:
    assert isinstance(error.__cause__, WorkerError)
    return error.__cause__


@pytest.fixture(autouse=True)
def _promptly() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 20


# -------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("method", ["auto", pytest.param("forkserver", marks=pytest.mark.drill)])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_caller_gets_the_exception_of_the_rank_that_failed(failing: int, method: str) -> None:
    with pytest.raises(KeyError) as caught:
        run_ranks(collide(failing, fail_to_find), start_method=method)
    assert caught.value.args == ("x",)
    cause = cause_of(caught.value)
    assert cause.rank == failing
    assert "in fail_to_find" in cause.traceback
    assert "in fail_to_find" in str(cause)
    text = str(cause).splitlines()
    assert text[0].startswith(f"[rank {failing}/2] failed on ")
    assert text[-1] == f"[rank {failing}/2] KeyError: 'x'"


def test_the_peer_in_the_collective_is_not_blamed() -> None:
    def function() -> None:
        meet()
        if get_rank() == 2:
            time.sleep(0.1)
            fail_to_find()
        meet()

    with pytest.raises(KeyError) as caught:
        run_ranks(function, 3)
    first, *others = cause_of(caught.value).failures
    assert (first.rank, first.kind) == (2, "exception")
    assert {other.rank for other in others} == {0, 1}
    assert {other.kind for other in others} <= {"transport", "peer", "stopped"}


def test_the_peer_in_an_agreement_is_not_blamed() -> None:
    def function() -> None:
        if get_rank() == 1:
            fail_to_find()
        barrier()

    with pytest.raises(KeyError) as caught:
        run_ranks(function)
    assert cause_of(caught.value).rank == 1


def test_the_first_of_several_exceptions_is_the_root_cause() -> None:
    def function() -> None:
        barrier()
        time.sleep(0.0 if get_rank() == 1 else 0.2)
        raise KeyError(get_rank())

    with pytest.raises(KeyError) as caught:
        run_ranks(function)
    assert caught.value.args == (1,)


def test_attributes_of_an_exception_arrive_whatever_its_constructor_wants() -> None:
    def fail() -> None:
        raise DiskError("/data", free=7)

    with pytest.raises(DiskError) as caught:
        run_ranks(collide(1, fail))
    assert (caught.value.path, caught.value.free) == ("/data", 7)
    assert str(caught.value) == "/data: 7 bytes are free"


@needs_fork
def test_an_exception_class_of_the_caller_can_be_caught() -> None:
    class LocalError(Exception):
        pass

    def fail() -> None:
        raise LocalError("x")

    with pytest.raises(LocalError):
        run_ranks(collide(1, fail), start_method="fork")


def test_an_exception_that_cannot_be_sent_arrives_as_text() -> None:
    def fail() -> None:
        error = ValueError("no way")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(WorkerError, match="ValueError: no way") as caught:
        run_ranks(collide(1, fail))
    assert caught.value.rank == 1
    assert "in fail" in caught.value.traceback


def test_an_exceptions_own_cause_hangs_below() -> None:
    def fail() -> None:
        try:
            fail_to_find()
        except KeyError as error:
            raise ValueError("no data") from error

    with pytest.raises(ValueError, match="no data") as caught:
        run_ranks(collide(1, fail))
    assert isinstance(cause_of(caught.value).__cause__, KeyError)


def test_an_exception_before_the_group_is_used() -> None:
    with pytest.raises(KeyError):
        run_ranks(fail_to_find, init_group=False)


def test_a_keyboard_interrupt_of_a_rank_is_a_failure() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_ranks(collide(1, fail))
    assert cause_of(caught.value).rank == 1


# ---------------------------------------------------------------------------------- endings


def test_an_exit_of_one_rank_is_a_failure_with_its_code() -> None:
    with pytest.raises(WorkerError, match="SystemExit: 3") as caught:
        run_ranks(collide(1, lambda: sys.exit(3)))
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)


def test_an_exit_with_success_of_one_rank_is_a_failure_too() -> None:
    with pytest.raises(WorkerError) as caught:
        run_ranks(collide(0, sys.exit))
    assert (caught.value.rank, caught.value.exit_code) == (0, 0)


@pytest.mark.parametrize("code", [0, 3, "no data"])
def test_an_exit_of_every_rank_is_an_exit_of_the_caller(code: Any) -> None:
    def function() -> None:
        meet()
        sys.exit(code)

    with pytest.raises(SystemExit) as caught:
        run_ranks(function)
    assert caught.value.code == code


def test_exits_with_different_codes_are_a_failure() -> None:
    with pytest.raises(WorkerError):
        run_ranks(lambda: sys.exit(3 + get_rank()))


def test_a_rank_that_ends_without_a_word_is_a_failure_with_its_code() -> None:
    with pytest.raises(WorkerError, match="exit code 7") as caught:
        run_ranks(collide(1, lambda: os._exit(7)))
    error = caught.value
    assert (error.rank, error.exit_code, error.signal_name) == (1, 7, None)


def test_a_rank_that_ends_with_0_and_without_its_result_is_a_failure() -> None:
    with pytest.raises(WorkerError, match="exit code 0 without returning"):
        run_ranks(lambda: os._exit(0))


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_a_killed_rank_is_a_failure_with_its_signal(method: str) -> None:
    fail = collide(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerError, match="out-of-memory killer") as caught:
        run_ranks(fail, start_method=method)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")


def test_a_crashed_rank_is_a_failure_with_its_signal() -> None:
    def crash() -> None:
        faulthandler.disable()  # pytest has switched it on
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(WorkerError) as caught:
        run_ranks(collide(1, crash))
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGSEGV")


def test_a_result_that_cannot_be_sent_is_an_error_that_names_its_type() -> None:
    with pytest.raises(
        TypeError, match=r"returned a _thread\.lock, which cannot be sent"
    ) as caught:
        run_ranks(lambda: threading.Lock() if get_rank() == 1 else None)
    assert cause_of(caught.value).rank == 1


def test_a_result_that_cannot_be_rebuilt_is_an_error_that_names_its_rank() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return _refuse, ()

    with pytest.raises(WorkerError, match=r"result of rank 1 arrived but .*not here"):
        run_ranks(lambda: Odd() if get_rank() == 1 else None)


def _refuse() -> None:
    raise RuntimeError("not here")


def test_an_early_return_of_one_rank_is_named_in_the_others_failure() -> None:
    def function() -> None:
        if get_rank() == 1:
            meet()

    with pytest.raises(RuntimeError) as caught:
        run_ranks(function)
    assert cause_of(caught.value).rank == 1


# ------------------------------------------------------------------------------ what stays behind


def is_running(pid: int) -> bool:
    return _process_start(pid) is not None


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def start_helper(folder: Path) -> None:
    """Start a helper of this rank that would run for a long time, and note its process id."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    helper = subprocess.Popen(command)
    (folder / str(get_rank())).write_text(str(helper.pid))
    helper.returncode = 0  # it is the launch that ends it, not this object


def helpers(folder: Path) -> list[int]:
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


def test_helpers_of_ranks_that_return_are_gone(tmp_path: Path) -> None:
    run_ranks(start_helper, args=[tmp_path])
    await_end(helpers(tmp_path))


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_helpers_of_ranks_that_fail_are_gone(tmp_path: Path, method: str) -> None:
    def function() -> None:
        start_helper(tmp_path)
        meet()
        if get_rank() == 1:
            fail_to_find()
        meet()

    with pytest.raises(KeyError):
        run_ranks(function, start_method=method)
    await_end(helpers(tmp_path))


def test_helpers_of_killed_ranks_are_gone(tmp_path: Path) -> None:
    def function() -> None:
        start_helper(tmp_path)
        meet()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="SIGKILL"):
        run_ranks(function)
    await_end(helpers(tmp_path))


@pytest.mark.parametrize("where", ["in Python", "in a collective"])
def test_a_rank_that_ignores_the_request_to_stop_is_killed(where: str, tmp_path: Path) -> None:
    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / str(get_rank())).write_text(str(os.getpid()))
        barrier()
        if get_rank() == 1:
            fail_to_find()
        while where == "in Python":
            time.sleep(0.01)
        meet()
        time.sleep(600)  # the collective itself may fail

    with pytest.raises(KeyError):
        run_ranks(function, shutdown_grace=0.3)
    assert not any(map(is_running, helpers(tmp_path)))


def test_a_rank_has_time_to_stop_in_order(tmp_path: Path) -> None:
    def stop(*args: object) -> None:
        (tmp_path / "stopped").touch()
        os._exit(0)

    def function() -> None:
        if get_rank() == 0:
            signal.signal(signal.SIGTERM, stop)
        barrier()
        if get_rank() == 1:
            fail_to_find()
        sleep_long()

    with pytest.raises(KeyError):
        run_ranks(function, shutdown_grace=10)
    assert (tmp_path / "stopped").exists()


def test_a_launch_after_a_failed_launch_works() -> None:
    for _ in range(2):
        with pytest.raises(KeyError):
            run_ranks(collide(1, fail_to_find))
        assert run_ranks(get_rank) == [0, 1]


def count_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_a_failed_launch_leaves_the_environment_and_the_descriptors_as_they_were() -> None:
    with pytest.raises(KeyError):
        run_ranks(collide(1, fail_to_find))
    environment, descriptors = dict(os.environ), count_descriptors()
    for _ in range(2):
        with pytest.raises(KeyError):
            run_ranks(collide(1, fail_to_find))
    assert dict(os.environ) == environment
    assert count_descriptors() == descriptors


@needs_fork
def test_an_interrupt_of_the_caller_ends_the_ranks(tmp_path: Path) -> None:
    def function() -> None:
        (tmp_path / str(get_rank())).write_text(str(os.getpid()))
        barrier()
        if get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        meet() if get_rank() == 0 else time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(function, shutdown_grace=0.5, start_method="fork")
    assert not any(map(is_running, helpers(tmp_path)))


# ------------------------------------------------------------------------------ a killed parent

KILLED_PARENT = """
import os, sys, time
import torch, torch.distributed as dist
from ddpkit import distributed, get_rank

@distributed(nproc_per_node=2, device="cpu", start_method=sys.argv[1])
def main():
    os.write(1, f"{os.getpid()}\\n".encode())
    if get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(600)

main()
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.drill)])
def test_ranks_of_a_killed_parent_are_gone_even_from_a_collective(method: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED_PARENT, method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(is_running, ranks))
        parent.kill()
        await_end(ranks)


# ---------------------------------------------------------------------------------- one rank


def test_one_rank_raises_in_the_caller_itself() -> None:
    with pytest.raises(KeyError) as caught:
        distributed(fail_to_find, nproc_per_node=1, device="cpu")()
    assert caught.value.__cause__ is None


def save_then_exit() -> None:
    if get_rank() == 0:
        time.sleep(1.5)  # longer than the others are given to show a cause
    sys.exit(3)


def test_ranks_that_exit_alike_need_not_do_so_at_once() -> None:
    with pytest.raises(SystemExit) as caught:
        run_ranks(save_then_exit, shutdown_grace=10.0, init_group=False)
    assert caught.value.code == 3
