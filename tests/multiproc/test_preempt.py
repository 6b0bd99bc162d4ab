"""All ranks stop at the same step, whoever has got the signal, and nothing else looks like it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    get_rank,
    preempt,
    process_group,
    rank0_save,
    sharded_loader,
    stop_requested,
)
from ddpkit.errors import GroupError, WorkerError, WorkerTimeoutError
from ddpkit.launch import supervisor
from ddpkit.testing import run_ranks
from tests.multiproc.hand_set import with_hand_set_variables
from tests.multiproc.test_every_wait_ends import patient_rendezvous
from tests.multiproc.test_signals import Program, await_end, is_running, names_in, note

BOTH = (signal.SIGTERM, signal.SIGUSR1)
each_signal = pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.drill)]
)
PATIENCE = 30.0  # a test that takes this long has failed
NEVER = 10**9
LENGTH = 32
SHORT = 1.0

Start = Callable[[Callable[[], Any]], Program]


@pytest.fixture(name="start")
def programs_that_end(tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def start_program(main: Callable[[], Any]) -> Program:
        programs.append(Program(tmp_path, main))
        return programs[-1]

    yield start_program
    for program in programs:
        program.end()


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def signalled(
    rank: int, *, at: int, number: signal.Signals = signal.SIGTERM
) -> Callable[[int], None]:
    """Have one rank signalled in one step."""

    def before_step(step: int) -> None:
        if (get_rank(), step) == (rank, at):
            send(number)

    return before_step


def count_until_stopped(before_step: Callable[[int], object], *, every: int = 1) -> int | None:
    """Step together, and return the step of the first true answer."""
    for step in range(200):
        before_step(step)
        if stop_requested(every=every):
            assert stop_requested(every=every)  # it stays true
            return step
    return None


# ------------------------------------------------------------------------------ a signal to a rank


@each_signal
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_call(number: signal.Signals, rank: int) -> None:
    def function() -> int | None:
        return count_until_stopped(signalled(rank, at=3, number=number))

    assert run_ranks(function, 3) == [3, 3, 3]


def test_a_signal_while_the_first_call_waits_for_another_rank_counts(tmp_path: Path) -> None:
    def signal_this_rank() -> None:
        while preempt._state.handlers is None:
            time.sleep(0.01)
        time.sleep(0.05)
        send(signal.SIGTERM)
        (tmp_path / "sent").touch()

    def function() -> int | None:
        if get_rank() == 0:
            threading.Thread(target=signal_this_rank).start()
        else:
            wait_for(tmp_path / "sent")
        return count_until_stopped(lambda step: None)

    first, second = run_ranks(function)
    assert first == second
    assert first in (0, 1)  # what a rank brings to its first call is settled as it begins


@pytest.mark.drill
def test_a_signal_at_any_moment_gives_all_ranks_the_same_answers() -> None:
    """Also while the ranks ask each other: both are hit, at moments of their own."""

    def function(delays: tuple[float, float]) -> int:
        stop_requested()
        number = BOTH[get_rank()]
        timer = threading.Timer(delays[get_rank()], lambda: send(number))
        timer.start()
        steps = 0
        while not stop_requested():
            steps += 1
        timer.join()
        return steps

    for trial in range(40):
        first, second = run_ranks(function, args=[(trial * 0.0007, (40 - trial) * 0.0009)])
        assert first == second


def test_every_asks_on_each_nth_call_only() -> None:
    asked: list[int] = []

    def function() -> tuple[int | None, list[int]]:
        all_reduce = dist.all_reduce

        def counted(*args: Any, **options: Any) -> Any:
            asked.append(1)
            return all_reduce(*args, **options)

        dist.all_reduce = counted
        step = count_until_stopped(signalled(1, at=4), every=3)
        return step, asked

    assert run_ranks(function) == [(6, [1, 1])] * 2


def test_every_may_change_if_it_changes_on_all_ranks() -> None:
    def function() -> list[bool]:
        first = [stop_requested(every=5) for _ in range(7)]
        if get_rank() == 1:
            send(signal.SIGTERM)
        return [*first, stop_requested(every=2), stop_requested(every=3)]

    assert run_ranks(function) == [[False] * 7 + [True, True]] * 2


def test_different_values_of_every_raise_on_all_ranks() -> None:
    def function() -> str:
        try:
            stop_requested(every=get_rank() + 1)
        except GroupError as error:
            return str(error)
        return "nothing"

    texts = run_ranks(function)
    assert texts[0] == texts[1]
    assert "every=1 on rank 0 and every=2 on rank 1" in texts[0]


def test_a_value_of_every_that_changes_on_one_rank_ends_in_an_error() -> None:
    def function() -> None:
        with patient_rendezvous(), process_group(timeout=SHORT, device="cpu"):
            stop_requested()
            stop_requested(every=1 + get_rank())

    with pytest.raises((GroupError, RuntimeError), match=r"stop_requested|[Tt]im(ed )?out|closed"):
        run_ranks(function, init_group=False)


def test_a_handler_of_the_function_is_called_and_an_ignored_signal_stays_ignored() -> None:
    def function() -> tuple[int | None, list[int]]:
        called: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        def before(step: int) -> None:
            if get_rank() == 1 and step in (2, 5):
                send(signal.SIGUSR1 if step == 2 else signal.SIGTERM)

        return count_until_stopped(before), called

    assert run_ranks(function) == [(5, []), (5, [signal.SIGTERM])]


@pytest.mark.filterwarnings("ignore:stop_requested:RuntimeWarning")
def test_a_rank_that_asks_in_another_thread_stops_with_the_others() -> None:
    def function() -> int | None:
        answers: list[int | None] = []

        def ask() -> None:
            answers.append(count_until_stopped(signalled(1, at=3)))

        if get_rank() == 1:
            ask()
        else:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return answers[0]

    assert run_ranks(function) == [3, 3]


def test_a_later_group_begins_anew_and_handlers_are_put_back() -> None:
    def function() -> list[Any]:
        seen: list[Any] = []
        for _ in range(2):
            with process_group(device="cpu"):
                seen.append(count_until_stopped(signalled(0, at=2)))
            seen.append(signal.getsignal(signal.SIGTERM))
        return seen

    assert run_ranks(function, init_group=False) == [[2, signal.SIG_DFL] * 2] * 2


def test_a_group_that_the_function_has_opened_itself() -> None:
    def function() -> int | None:
        dist.init_process_group("gloo")
        try:
            return count_until_stopped(signalled(0, at=2))
        finally:
            dist.destroy_process_group()

    assert run_ranks(function, init_group=False) == [2, 2]


# --------------------------------------------------------------------------- peers that do not come


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_missing_peer_ends_the_call_within_the_time_out(
    calls_before: int, tmp_path: Path
) -> None:
    def function() -> str:
        with patient_rendezvous(), process_group(timeout=SHORT, device="cpu"):
            for _ in range(calls_before):
                stop_requested()
            if get_rank() == 1:
                wait_for(tmp_path / "seen")
                return ""
            try:
                stop_requested()
            except RuntimeError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                (tmp_path / "seen").touch()
        return "nothing was raised"

    expected = "rank 1 did not reach stop_requested" if calls_before == 0 else "Timed out"
    assert expected in run_ranks(function, init_group=False)[0]


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_dead_peer_ends_the_call(calls_before: int) -> None:
    def function() -> None:
        for _ in range(calls_before):
            stop_requested()
        if get_rank() == 1:
            send(signal.SIGKILL)
        stop_requested()

    started = time.monotonic()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_ranks(function, timeout=600, shutdown_grace=600)
    assert time.monotonic() - started < PATIENCE


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


# ----------------------------------------------- ranks that are stopped are not asked to stop


def watch_for_requests(folder: Path) -> None:
    """Use it once, then look for ever whether anything has looked like a request."""
    stop_requested()
    note(f"rank-{get_rank()}", os.getpid(), folder=folder)
    while True:
        if preempt._has_come():
            note(f"request-{get_rank()}", folder=folder)
        time.sleep(0.001)


def check_no_request(folder: Path) -> None:
    assert [name for name in names_in(folder) if name.startswith("request")] == []


def test_survivors_of_a_failure_end_at_once_and_see_no_request(tmp_path: Path) -> None:
    def function() -> None:
        if get_rank() == 0:
            watch_for_requests(tmp_path)
        stop_requested()
        wait_for(tmp_path / "rank-0")
        raise KeyError("x")

    started = time.monotonic()
    with pytest.raises(KeyError):
        run_ranks(function, shutdown_grace=600)
    assert time.monotonic() - started < PATIENCE
    check_no_request(tmp_path)


@pytest.mark.drill
def test_a_time_limit_is_no_request(tmp_path: Path) -> None:
    with pytest.raises(WorkerTimeoutError):
        run_ranks(lambda: watch_for_requests(tmp_path), shutdown_grace=600, time_limit=2.0)
    check_no_request(tmp_path)
    assert {"rank-0", "rank-1"} <= names_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_to_the_program_are_no_request(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    program = start(lambda: run_ranks(lambda: watch_for_requests(tmp_path), shutdown_grace=600))
    ranks = program.ranks()
    program.send(number)
    assert program.wait() == (130 if number == signal.SIGINT else -number)
    assert not any(map(is_running, ranks))
    check_no_request(tmp_path)


# -------------------------------------------------------------------------- a signal to the program


def stop_together(folder: Path, *, slowly: float = 0.0, last: float = 0.0) -> int | None:
    """Step until asked to stop; say so, and in which step."""
    for step in range(100_000):
        if stop_requested():
            time.sleep(slowly)
            note(f"stopped-{get_rank()}", step, folder=folder)
            return step
        note(f"rank-{get_rank()}", os.getpid(), folder=folder)
        if last and step == 1:
            time.sleep(last)
            return None
        time.sleep(0.002)
    return None


def stopped_steps(program: Program) -> list[str]:
    return program.await_notes("stopped-0", "stopped-1")


@each_signal
def test_a_signal_to_the_program_is_passed_on_and_the_value_returned(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    def main() -> None:
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        first, second = run_ranks(lambda: stop_together(tmp_path), shutdown_grace=60)
        assert first == second is not None
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before

    program = start(main)
    program.ranks()
    program.send(number)
    assert program.wait() == 0
    assert len(set(stopped_steps(program))) == 1
    program.await_notes("returned")


def test_a_status_of_the_functions_own(start: Start, tmp_path: Path) -> None:
    def function() -> None:
        stop_together(tmp_path)
        sys.exit(75)

    program = start(lambda: run_ranks(function, shutdown_grace=60))
    program.ranks()
    program.send(signal.SIGTERM)
    assert program.wait() == 75


@each_signal
def test_a_signal_before_the_first_call_does_what_it_always_does(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    def function() -> None:
        note(f"rank-{get_rank()}", os.getpid(), folder=tmp_path)
        time.sleep(600)

    program = start(lambda: run_ranks(function))
    program.ranks()
    program.send(number)
    assert program.wait() == -number


@each_signal
def test_a_second_signal_ends_the_grace(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    program = start(lambda: run_ranks(lambda: watch_for_requests(tmp_path), shutdown_grace=600))
    ranks = program.ranks()
    program.send(number)
    program.await_notes("request-0", "request-1")
    assert all(map(is_running, ranks))
    program.send(number)
    assert program.wait() == -number
    assert not any(map(is_running, ranks))


@each_signal
def test_ranks_that_do_not_end_in_time_are_stopped(
    start: Start, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_REQUEST_BOUND", 0.3)
    program = start(lambda: run_ranks(lambda: watch_for_requests(tmp_path), shutdown_grace=600))
    ranks = program.ranks()
    program.send(number)
    assert program.wait() == -number
    assert not any(map(is_running, ranks))
    program.await_notes("request-0", "request-1")


def test_ranks_may_take_longer_than_the_grace_of_other_endings(
    start: Start, tmp_path: Path
) -> None:
    program = start(
        lambda: run_ranks(lambda: stop_together(tmp_path, slowly=0.5), shutdown_grace=0.0)
    )
    program.ranks()
    program.send(signal.SIGTERM)
    assert program.wait() == 0
    stopped_steps(program)


def test_a_signal_that_nobody_follows_any_more_is_not_lost(start: Start, tmp_path: Path) -> None:
    program = start(lambda: run_ranks(lambda: stop_together(tmp_path, last=0.5)))
    program.ranks()
    time.sleep(0.1)
    program.send(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
    assert "stopped-0" not in names_in(tmp_path)


@each_signal
def test_a_handler_of_the_programs_own_runs_when_the_ranks_have_stopped(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    def main() -> None:
        def own(*args: object) -> None:
            assert os.getpid() == program_pid  # a fork has not inherited it
            note("own", sorted(names_in(tmp_path) & {"stopped-0", "stopped-1"}), folder=tmp_path)

        program_pid = os.getpid()
        signal.signal(number, own)
        assert None not in run_ranks(lambda: stop_together(tmp_path), shutdown_grace=60)
        assert signal.getsignal(number) is own

    program = start(main)
    program.ranks()
    program.send(number)
    assert program.wait() == 0
    assert program.await_notes("own") == ["['stopped-0', 'stopped-1']"]


@each_signal
def test_what_the_program_ignores_is_no_request(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    def main() -> None:
        signal.signal(number, signal.SIG_IGN)
        run_ranks(lambda: watch_for_requests(tmp_path))

    program = start(main)
    ranks = program.ranks()
    program.send(number)
    time.sleep(0.2)
    assert all(map(is_running, [program.pid, *ranks]))
    check_no_request(tmp_path)
    program.send(signal.SIGKILL)
    program.wait()
    await_end(*ranks)


def test_a_failure_while_the_ranks_stop_is_raised(start: Start, tmp_path: Path) -> None:
    def function() -> None:
        stop_together(tmp_path)
        raise OSError("disk full")

    program = start(lambda: run_ranks(function, shutdown_grace=60))
    program.ranks()
    program.send(signal.SIGTERM)
    assert program.wait() == 1
    assert program.await_notes("raised") == ["OSError disk full"]


# ----------------------------------------------------------------------------------- data workers


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a line says of some points."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= LENGTH:
            raise IndexError
        point = torch.tensor([index / LENGTH])
        return point, 3 * point + 1


def train(
    folder: Path,
    *,
    stop_at: int | None = None,
    whom: Callable[[], object] = lambda: None,
    workers: int = 0,
    epochs: int = 3,
) -> tuple[int, list[float]]:
    """Train, save where it is asked to stop, and go on from there."""
    torch.manual_seed(0)
    loader = sharded_loader(Points(), batch_size=2, shuffle=True, num_workers=workers)
    model = ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if (folder / "last.pt").exists():
        barrier_load(folder / "last.pt", into=state)
    steps = 0
    while loader.epoch < epochs:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == stop_at:
                whom()
            if stop_requested():
                note(f"save-{get_rank()}-{os.getpid()}", folder=folder)
                rank0_save(state, folder / "last.pt")
                return steps, []
    return steps, [value for parameter in model.parameters() for value in parameter.tolist()]


@pytest.mark.parametrize(
    "stop_at", [8, *(pytest.param(step, marks=pytest.mark.drill) for step in (3, 13))]
)
def test_the_resumed_run_is_the_unbroken_one(tmp_path: Path, stop_at: int) -> None:
    """In the middle of an epoch, and at its last step."""

    def whom() -> None:
        if get_rank() == 1:
            send(signal.SIGUSR1)

    (tmp_path / "unbroken").mkdir()
    (tmp_path / "broken").mkdir()
    unbroken = run_ranks(train, args=[tmp_path / "unbroken"])
    stopped = run_ranks(
        train, args=[tmp_path / "broken"], kwargs={"stop_at": stop_at, "whom": whom}
    )
    assert stopped == [(stop_at, [])] * 2
    resumed = run_ranks(train, args=[tmp_path / "broken"])
    total = 3 * LENGTH // 4
    assert resumed == [(total - stop_at, parameters) for _, parameters in unbroken]


@each_signal
@pytest.mark.parametrize("both", [False, True], ids=["one rank's group", "both groups"])
def test_a_signal_to_the_process_group_of_ranks_with_data_workers(
    tmp_path: Path, number: signal.Signals, both: bool
) -> None:
    def whom() -> None:
        if both or get_rank() == 1:
            os.killpg(os.getpgid(0), number)
            # The workers end, and DataLoader would raise for it in this very step.
            time.sleep(0.3)

    options = {"stop_at": 3, "whom": whom, "workers": 2}
    assert run_ranks(train, args=[tmp_path], kwargs=options) == [(3, [])] * 2
    saves = sorted(name.split("-")[1] for name in names_in(tmp_path) if name.startswith("save"))
    assert saves == ["0", "1"]  # no worker has come there
    assert (tmp_path / "last.pt").exists()


@each_signal
@pytest.mark.parametrize("persistent", [False, True])
def test_a_step_that_waits_for_a_batch_gets_it_from_signalled_workers(
    tmp_path: Path, number: signal.Signals, persistent: bool
) -> None:
    """The signal to all processes comes from the worker that is loading the batch."""

    class Signalling(Points):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if index == 6:
                os.killpg(os.getpgid(0), number)
                time.sleep(0.3)
            return super().__getitem__(index)

    def function() -> tuple[int, list[int]]:
        loader = sharded_loader(
            Signalling(),
            batch_size=1,
            num_workers=1,
            prefetch_factor=1,
            persistent_workers=persistent,
            multiprocessing_context="fork",
        )
        seen = []
        for x, _ in loader:
            seen.append(round(float(x) * LENGTH))
            if stop_requested():
                break
        del loader  # its workers end without being waited for
        return len(seen), seen

    for steps, seen in run_ranks(function):
        assert steps in (3, 4)  # the rank may be told while the step before is still going on
        assert len(seen) == steps


@each_signal
def test_a_data_worker_that_is_signalled_alone_ends_as_ever(number: signal.Signals) -> None:
    def function(asks: bool) -> tuple[int, bool]:
        batches: Any = iter(DataLoader(Points(), num_workers=2))
        next(batches)
        if asks:
            stop_requested()
        worker, raised = batches._workers[0], False
        try:
            os.kill(worker.pid, number)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.05)
        except RuntimeError:  # from DataLoader, which watches its workers
            raised = True
        worker.join(PATIENCE)
        return worker.exitcode, raised

    assert run_ranks(function, args=[True]) == run_ranks(function, args=[False])


def test_a_data_worker_that_asks_is_told_that_it_is_none(tmp_path: Path) -> None:
    class Asking(Points):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            stop_requested()
            return super().__getitem__(index)

    def function() -> None:
        for _ in DataLoader(Asking(), num_workers=1):
            pass

    with pytest.raises(GroupError, match=r"helper process of rank . \(a data worker\?\)"):
        run_ranks(function)


# ------------------------------------------------------------------------------- as a launcher does


def test_under_hand_set_variables() -> None:
    """Ranks that nobody watches: the function of `@distributed` runs in their own process."""

    def by_hand() -> list[Any]:
        stepping = distributed(
            lambda: count_until_stopped(signalled(1, at=2)),
            device="cpu",
        )
        step = stepping()
        return [step, signal.getsignal(signal.SIGTERM)]

    function = with_hand_set_variables(by_hand)
    assert run_ranks(function, init_group=False) == [[2, signal.SIG_DFL]] * 2
