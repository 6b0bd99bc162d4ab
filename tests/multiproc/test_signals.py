"""What signals do to a program that has ranks running, in every phase of a launch.

The program is a fork of the test process, which costs a tenth of what a new interpreter does.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import barrier, get_rank
from ddpkit.control import _process_start
from ddpkit.errors import WorkerError
from ddpkit.launch import worker
from ddpkit.launch.output import RankLogs
from ddpkit.testing import run_ranks
from tests.forking import prepare_fork
from tests.multiproc.sleeping import sleep_long

BOUND = 20.0


class Program:
    """A program in a process group of its own, as a shell starts one."""

    def __init__(self, folder: Path, main: Callable[[], Any]) -> None:
        self.folder = folder
        prepare_fork()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._run(main)
        self.exit_code: int | None = None

    def _run(self, main: Callable[[], Any]) -> None:
        """Run in the child; a signal that is not handled ends it, as it does a script."""
        os.setpgid(0, 0)
        try:
            note("program", os.getpid(), folder=self.folder)
            main()
            note("returned", folder=self.folder)
            os._exit(0)
        except KeyboardInterrupt:
            note("interrupted", folder=self.folder)
            os._exit(130)
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)
        except BaseException as error:  # noqa: BLE001
            note("raised", f"{type(error).__name__} {error}", folder=self.folder)
            os._exit(1)

    def await_notes(self, *names: str) -> list[str]:
        deadline = time.monotonic() + BOUND
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} not among {names_in(self.folder)}"
            time.sleep(0.005)
        return [(self.folder / name).read_text() for name in names]

    def ranks(self) -> list[int]:
        return list(map(int, self.await_notes("rank-0", "rank-1")))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for its end; a negative code is the signal that ended it."""
        deadline = time.monotonic() + BOUND
        while self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the program has not ended"
            time.sleep(0.005)
        return self.exit_code

    def end(self) -> None:
        if self.exit_code is None:
            self.send(signal.SIGKILL)
            self.wait()


def note(name: str, text: object = "", *, folder: Path) -> None:
    """Write a file at once and whole."""
    draft = folder / f".{name}-{os.getpid()}"
    draft.write_text(str(text))
    draft.rename(folder / name)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start_program(main: Callable[[], Any]) -> Program:
        programs.append(Program(tmp_path, main))
        return programs[-1]

    yield start_program
    for program in programs:
        program.end()


Start = Callable[[Callable[[], Any]], Program]


def is_running(pid: int) -> bool:
    return _process_start(pid) is not None


def await_end(*pids: int) -> None:
    deadline = time.monotonic() + BOUND
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.005)


def collide(folder: Path) -> Callable[[], None]:
    """Rank 0 waits in a collective for rank 1, which is asleep."""

    def function() -> None:
        barrier()
        note(f"rank-{get_rank()}", os.getpid(), folder=folder)
        if get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        time.sleep(600)

    return function


def stubborn(folder: Path) -> Callable[[], None]:
    """Ranks that do not end when they are asked to."""

    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"rank-{get_rank()}", os.getpid(), folder=folder)
        time.sleep(600)

    return function


# ------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("whom", ["the program alone", "the foreground group"])
def test_ctrl_c_ends_the_ranks_and_is_raised_once(start: Start, tmp_path: Path, whom: str) -> None:
    program = start(lambda: run_ranks(collide(tmp_path)))
    ranks = program.ranks()
    if whom == "the program alone":
        program.send(signal.SIGINT)
    else:
        os.killpg(program.pid, signal.SIGINT)
    assert program.wait() == 130
    assert not any(map(is_running, ranks))  # already gone when the exception is there
    program.await_notes("interrupted")


def test_ctrl_c_leaves_ranks_their_grace(start: Start, tmp_path: Path) -> None:
    def function() -> None:
        def stop(*args: object) -> None:
            time.sleep(0.3)
            note(f"saved-{get_rank()}", folder=tmp_path)
            os._exit(0)

        signal.signal(signal.SIGTERM, stop)
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        sleep_long()

    program = start(lambda: run_ranks(function, shutdown_grace=60, init_group=False))
    program.ranks()
    program.send(signal.SIGINT)
    assert program.wait() == 130
    assert {"saved-0", "saved-1"} <= names_in(tmp_path)


def test_ctrl_c_pressed_twice_ends_the_grace(start: Start, tmp_path: Path) -> None:
    program = start(lambda: run_ranks(stubborn(tmp_path), shutdown_grace=600, init_group=False))
    ranks = program.ranks()
    program.send(signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_running, ranks))
    program.send(signal.SIGINT)
    assert program.wait() == 130
    assert not any(map(is_running, ranks))


def test_ctrl_c_while_ranks_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(spec: Any) -> None:
        note(f"rank-{spec.rank}", os.getpid(), folder=tmp_path)
        time.sleep(600)

    monkeypatch.setattr(worker, "_prove_usable", hang)
    program = start(lambda: run_ranks(get_rank))
    ranks = program.ranks()
    program.send(signal.SIGINT)
    assert program.wait() == 130
    assert not any(map(is_running, ranks))


def test_ctrl_c_while_ranks_are_stopped_after_a_failure(start: Start, tmp_path: Path) -> None:
    def function() -> None:
        if get_rank() == 0:
            stubborn(tmp_path)()
        while not (tmp_path / "rank-0").exists():
            time.sleep(0.005)
        note("rank-1", os.getpid(), folder=tmp_path)
        raise KeyError("x")

    program = start(lambda: run_ranks(function, shutdown_grace=600, init_group=False))
    ranks = program.ranks()
    await_end(ranks[1])
    # The first one may come before the launch has noticed the failure; then it is the second.
    press_until_it_ends(program)
    assert program.wait() == 130
    assert not is_running(ranks[0])


def press_until_it_ends(program: Program) -> None:
    deadline = time.monotonic() + BOUND
    while is_running(program.pid) and time.monotonic() < deadline:
        program.send(signal.SIGINT)
        time.sleep(0.5)


def test_a_handler_of_the_users_own_for_ctrl_c_decides_itself(start: Start, tmp_path: Path) -> None:
    def main() -> None:
        signal.signal(signal.SIGINT, lambda *args: note("asked", folder=tmp_path))
        run_ranks(until_asked)

    def until_asked() -> None:
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)

    program = start(main)
    program.ranks()
    program.send(signal.SIGINT)
    assert program.wait() == 0


def test_an_ignored_ctrl_c_stays_ignored_and_the_ranks_still_go_with_the_program(
    start: Start, tmp_path: Path
) -> None:
    def main() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the `&` of a script does
        run_ranks(collide(tmp_path))

    program = start(main)
    ranks = program.ranks()
    program.send(signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_running, [program.pid, *ranks]))
    program.send(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
    await_end(*ranks)


# ----------------------------------------------------------------------- SIGTERM, SIGHUP, SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_ranks_go_first_and_then_the_program(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    def function() -> None:
        def stop(*args: object) -> None:
            note(f"parent-of-{get_rank()}", is_running(os.getppid()), folder=tmp_path)
            os._exit(0)

        signal.signal(signal.SIGTERM, stop)
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        sleep_long()

    program = start(lambda: run_ranks(function, init_group=False))
    ranks = program.ranks()
    program.send(number)
    assert program.wait() == -number
    assert not any(map(is_running, ranks))
    assert program.await_notes("parent-of-0", "parent-of-1") == ["True", "True"]


def test_a_handler_for_sigterm_runs_after_the_ranks_have_gone(start: Start, tmp_path: Path) -> None:
    def main() -> None:
        def stop(*args: object) -> None:
            pids = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
            note("left", [pid for pid in pids if is_running(pid)], folder=tmp_path)
            sys.exit(3)

        signal.signal(signal.SIGTERM, stop)
        run_ranks(collide(tmp_path))

    program = start(main)
    program.ranks()
    program.send(signal.SIGTERM)
    assert program.wait() == 3
    assert program.await_notes("left") == ["[]"]


def test_a_handler_for_sigterm_that_returns_leaves_an_error(start: Start, tmp_path: Path) -> None:
    def main() -> None:
        signal.signal(signal.SIGTERM, lambda *args: note("asked", folder=tmp_path))
        try:
            run_ranks(collide(tmp_path))
        except WorkerError as error:
            note("signal", error.signal_name, folder=tmp_path)
            raise

    program = start(main)
    program.ranks()
    program.send(signal.SIGTERM)
    assert program.wait() == 1
    assert program.await_notes("asked", "signal") == ["", "SIGTERM"]
    assert "this program got SIGTERM while its ranks ran" in program.await_notes("raised")[0]


def test_a_hang_up_under_nohup_changes_nothing(start: Start, tmp_path: Path) -> None:
    def main() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run_ranks(until_told)

    def until_told() -> None:
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        while not (tmp_path / "go-on").exists():
            time.sleep(0.01)
        barrier()

    program = start(main)
    ranks = program.ranks()
    for pid in (program.pid, *ranks):  # a terminal's end reaches all of them
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.2)
    note("go-on", folder=tmp_path)
    assert program.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1, signal.SIGQUIT])
@pytest.mark.parametrize("ignoring", [False, True])
def test_the_ranks_of_a_program_that_is_gone_are_gone(
    start: Start, tmp_path: Path, number: signal.Signals, ignoring: bool
) -> None:
    def main() -> None:
        if ignoring:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        run_ranks(collide(tmp_path))

    program = start(main)
    ranks = program.ranks()
    program.send(number)
    assert program.wait() == -number
    await_end(*ranks)


def test_handlers_are_as_before_after_every_launch() -> None:
    before = [signal.getsignal(number) for number in range(1, 32)]
    run_ranks(get_rank)
    with pytest.raises(KeyError):
        run_ranks(fail)
    assert [signal.getsignal(number) for number in range(1, 32)] == before


def fail() -> None:
    raise KeyError("x")


def test_a_signal_at_the_very_end_of_a_launch_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    close, noted = RankLogs.close, []

    def close_and_signal(logs: RankLogs) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        close(logs)

    monkeypatch.setattr(RankLogs, "close", close_and_signal)
    before = signal.signal(signal.SIGTERM, lambda *args: noted.append("SIGTERM"))
    try:
        assert run_ranks(get_rank) == [0, 1]  # every rank has delivered
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == ["SIGTERM"]


def test_ranks_have_the_signals_of_a_new_process() -> None:
    def function() -> tuple[Any, ...]:
        handlers = signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return (*map(signal.getsignal, handlers), signal.getsignal(signal.SIGINT), mask)

    default = signal.SIG_DFL
    expected: tuple[Any, ...] = (default, default, default, signal.default_int_handler, set())
    assert run_ranks(function) == [expected] * 2


# ------------------------------------------------------------------------------ another thread

IN_A_THREAD = """
import os, sys, threading, time
import torch, torch.distributed as dist
from ddpkit import distributed, get_rank

@distributed(nproc_per_node=2, device="cpu")
def main():
    os.write(1, f"{os.getpid()}\\n".encode())
    if get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(600)

thread = threading.Thread(target=main, daemon=True)
thread.start()
thread.join()
"""


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_launch_in_another_thread_goes_with_the_program(number: signal.Signals) -> None:
    command = [sys.executable, "-W", "ignore", "-c", IN_A_THREAD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stdout is not None
        ranks = [int(program.stdout.readline()) for _ in range(2)]
        program.send_signal(number)
        assert program.wait(BOUND) == -number
        await_end(*ranks)


# ---------------------------------------------------------------------------------- Ctrl-Z, fg


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(state: str, *pids: int) -> None:
    deadline = time.monotonic() + BOUND
    while any((state_of(pid) == "T") != (state == "stopped") for pid in pids):
        assert time.monotonic() < deadline, f"not {state}: {[state_of(pid) for pid in pids]}"
        time.sleep(0.005)


def test_ctrl_z_stops_the_ranks_too_and_fg_lets_all_go_on(start: Start, tmp_path: Path) -> None:
    def function() -> None:
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        while not (tmp_path / "go-on").exists():
            time.sleep(0.01)
        barrier()  # nobody is taken for dead, and the store answers again

    program = start(lambda: run_ranks(function))
    ranks = program.ranks()
    for _ in range(2):
        program.send(signal.SIGTSTP)
        await_state("stopped", program.pid, *ranks)
        time.sleep(0.2)
        program.send(signal.SIGCONT)
        await_state("at work", program.pid, *ranks)
    note("go-on", folder=tmp_path)
    assert program.wait() == 0


def test_a_program_that_is_killed_while_it_is_stopped_leaves_no_rank(
    start: Start, tmp_path: Path
) -> None:
    program = start(lambda: run_ranks(collide(tmp_path)))
    ranks = program.ranks()
    program.send(signal.SIGTSTP)
    await_state("stopped", program.pid, *ranks)
    program.send(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    await_end(*ranks)


def test_a_launch_goes_on_while_its_program_is_stopped_alone(start: Start, tmp_path: Path) -> None:
    """A silent store makes ranks wait, not fail: SIGSTOP cannot be handled by anybody."""

    def function() -> None:
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        while not (tmp_path / "go-on").exists():
            time.sleep(0.01)
        barrier()
        dist.all_reduce(torch.ones(1))

    program = start(lambda: run_ranks(function))
    ranks = program.ranks()
    program.send(signal.SIGSTOP)
    note("go-on", folder=tmp_path)
    time.sleep(1.0)
    assert all(map(is_running, ranks))
    program.send(signal.SIGCONT)
    assert program.wait() == 0
