import os
import signal
import threading
import time
from typing import Any

import pytest

from ddpkit import distributed
from ddpkit.errors import ConfigError, WorkerTimeoutError
from ddpkit.launch import deadline
from ddpkit.launch.deadline import time_limit


def loop_for_ever() -> None:
    while True:
        pass


def wait_for_ever() -> None:
    threading.Event().wait(600)


def in_a_thread(function: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    raise errors[0]


@pytest.mark.parametrize("work", [loop_for_ever, wait_for_ever, lambda: time.sleep(600)])
def test_a_block_that_takes_too_long_is_interrupted_wherever_it_is(work: Any) -> None:
    handler = signal.getsignal(signal.SIGRTMIN + 6)
    with (
        pytest.raises(WorkerTimeoutError, match=r"train\(\) .*time_limit of 0.1 s") as caught,
        time_limit(0.1, name="train", rank=3),
    ):
        work()
    assert caught.value.rank == 3
    assert "in test_a_block_that_takes_too_long" in caught.value.stacks[3]
    assert signal.getsignal(signal.SIGRTMIN + 6) is handler


def test_a_block_in_another_thread_is_interrupted_too() -> None:
    def run() -> None:
        with time_limit(0.1, name="train", rank=0):
            loop_for_ever()

    with pytest.raises(WorkerTimeoutError):
        in_a_thread(run)


def test_the_users_own_handlers_of_exceptions_do_not_stop_it() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(600)
            except Exception:  # noqa: BLE001
                continue

    with pytest.raises(WorkerTimeoutError), time_limit(0.1, name="train", rank=0):
        stubborn()


def test_a_block_that_ends_in_time_is_left_alone() -> None:
    with time_limit(600.0, name="train", rank=0):
        pass
    with pytest.raises(KeyError), time_limit(600.0, name="train", rank=0):
        raise KeyError("x")


def test_a_block_without_a_limit_costs_no_thread() -> None:
    with time_limit(None, name="train", rank=0):
        assert threading.active_count() == 1


def test_a_rank_that_does_not_come_back_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(deadline, "_interrupt", lambda thread: None)  # as in a blocked call
    with (
        pytest.raises(WorkerTimeoutError),
        time_limit(0.05, name="train", rank=0, end_after=0.05),
    ):
        assert ended.wait(20)


def test_one_rank_has_its_time_limit_in_the_calling_process() -> None:
    limited = distributed(wait_for_ever, nproc_per_node=1, device="cpu", time_limit=0.1)
    with pytest.raises(WorkerTimeoutError, match=r"wait_for_ever\(\) did not end") as caught:
        limited()
    first = caught.value.stacks[0].splitlines()[0]
    assert "test_deadline.py" in first  # ddpkit's own frames are left out


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"time_limit=.* more than 0 seconds"):
        distributed(wait_for_ever, time_limit=limit)
