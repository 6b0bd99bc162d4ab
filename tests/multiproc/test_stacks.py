"""Where ranks were: at a time limit, a time-out or a hang, also within a blocked collective."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import barrier, distributed, get_rank
from ddpkit.errors import GroupError, WorkerError, WorkerTimeoutError
from ddpkit.launch import worker
from ddpkit.testing import run_ranks
from tests.forking import FORK, needs_fork
from tests.multiproc.hand_set import with_hand_set_variables


def meet() -> None:
    dist.all_reduce(torch.ones(1))


def load_data() -> None:
    time.sleep(600)


def work(wait: Callable[[], Any] = meet) -> None:
    """Rank 0 waits for rank 1, which is busy elsewhere."""
    meet()
    if get_rank() == 0:
        wait()
    load_data()


def cause_of(error: BaseException) -> WorkerError:
    assert isinstance(error.__cause__, WorkerError)
    return error.__cause__


@pytest.mark.parametrize("method", [FORK, pytest.param("forkserver", marks=pytest.mark.drill)])
def test_a_time_limit_ends_the_launch_and_says_where_each_rank_was(method: str) -> None:
    run_ranks(get_rank, start_method=method)  # a forkserver takes seconds to begin
    with pytest.raises(WorkerTimeoutError) as caught:
        run_ranks(work, start_method=method, time_limit=1.5, shutdown_grace=0.5)
    error = caught.value
    headline = str(error).splitlines()[0]
    assert headline.startswith("work() did not end within its time_limit of 1.5 s: rank 0: all_re")
    assert "; rank 1: load_data at test_stacks.py:" in headline
    assert "in all_reduce" in error.stacks[0]
    assert "in load_data" in error.stacks[1]
    assert [(each.rank, each.kind) for each in error.failures] == [(0, "stopped"), (1, "stopped")]


def test_a_launch_within_its_time_limit_returns() -> None:
    assert run_ranks(get_rank, time_limit=60.0) == [0, 1]


def test_a_rank_that_has_returned_is_not_among_the_stacks() -> None:
    def function() -> None:
        if get_rank() == 1:
            load_data()

    with pytest.raises(WorkerTimeoutError) as caught:
        run_ranks(function, time_limit=1.0, init_group=False)
    assert list(caught.value.stacks) == [1]


@needs_fork
def test_a_time_limit_that_passes_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_prove_usable", lambda spec: time.sleep(60))
    with pytest.raises(WorkerTimeoutError, match="rank 1: before the function"):
        run_ranks(get_rank, time_limit=0.3)


def test_a_time_out_of_a_collective_shows_where_the_missing_rank_is() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(work, timeout=1.0)
    cause = cause_of(caught.value)
    assert (cause.rank, cause.failures[0].kind) == (0, "transport")
    missing = cause.failures[1]
    assert (missing.rank, missing.kind) == (1, "stopped")
    assert missing.summary.startswith("load_data at test_stacks.py:")
    assert f"  rank 1 was here: {missing.summary}" in str(cause).splitlines()


def test_a_barrier_that_ends_shows_where_the_missing_rank_is() -> None:
    with pytest.raises(GroupError) as caught:
        run_ranks(lambda: work(lambda: barrier(timeout=0.5)))
    assert "rank 1 was here: load_data at test_stacks.py:" in str(cause_of(caught.value))


@pytest.mark.drill
def test_a_stopped_rank_cannot_answer_and_that_is_said() -> None:
    def function() -> None:
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    with pytest.raises(WorkerTimeoutError, match=r"rank 1: no answer \(state T") as caught:
        run_ranks(function, time_limit=1.0, init_group=False)
    assert "in function" in caught.value.stacks[0]


def test_the_signal_for_stacks_leaves_a_rank_at_work() -> None:
    def function() -> int:
        for _ in range(200):  # more than a pipe holds, with nobody reading
            os.kill(os.getpid(), signal.SIGRTMIN + 7)
        meet()
        return get_rank()

    assert run_ranks(function) == [0, 1]


def test_an_ordinary_failure_says_who_was_stopped() -> None:
    def function() -> None:
        if get_rank() == 1:
            raise KeyError("x")
        time.sleep(600)

    with pytest.raises(KeyError) as caught:
        run_ranks(function, 3, init_group=False)
    cause = cause_of(caught.value)
    assert [(each.rank, each.kind) for each in cause.failures[1:]] == [
        (0, "stopped"),
        (2, "stopped"),
    ]
    assert "  ranks 0, 2: stopped after rank 1 had failed" in str(cause).splitlines()


# ---------------------------------------------------------------------------- under a launcher


def test_a_rank_of_a_launcher_has_its_own_time_limit(tmp_path: Path) -> None:
    """Each rank joins as if a launcher had started it, and one is in a collective for ever."""
    limited = distributed(work, time_limit=1.0, shutdown_grace=20, device="cpu", timeout=60)

    def rank() -> str:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent waits until it has written
        try:
            limited()
        except WorkerTimeoutError as error:
            (tmp_path / f"interrupted-{os.environ['RANK']}").write_text(str(error))
            raise
        return "returned"

    with pytest.raises((WorkerTimeoutError, WorkerError, RuntimeError)):
        run_ranks(with_hand_set_variables(rank), init_group=False, shutdown_grace=30)
    # Rank 1, asleep in Python, is interrupted; rank 0 fails when rank 1 leaves.
    assert "load_data" in (tmp_path / "interrupted-1").read_text()
