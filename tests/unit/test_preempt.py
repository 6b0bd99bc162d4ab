"""Stopping together in a world of one, and what becomes of the handlers."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpkit import distributed, pending, preempt, process_group, stop_requested
from ddpkit.errors import ConfigError
from tests.forking import prepare_fork

BOTH = (signal.SIGTERM, signal.SIGUSR1)
each_signal = pytest.mark.parametrize("number", BOTH)


@pytest.fixture
def handler() -> Iterator[Callable[[signal.Signals, Any], None]]:
    """Set handlers as the user's own, for as long as a test lasts."""
    before = {number: signal.getsignal(number) for number in BOTH}
    yield signal.signal  # type: ignore[misc]
    for number, value in before.items():
        signal.signal(number, value)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# ---------------------------------------------------------------------------------- world of one


@each_signal
def test_a_signal_makes_it_true_and_it_stays_true(number: signal.Signals) -> None:
    with process_group():
        assert not stop_requested()
        send(number)
        assert stop_requested()
        assert stop_requested()


def test_a_new_group_begins_anew() -> None:
    for _ in range(2):
        with process_group():
            assert not stop_requested()
            send(signal.SIGTERM)
            assert stop_requested()


@pytest.mark.parametrize("init_group", [True, False])
def test_a_function_of_one_rank_stops_and_returns(init_group: bool) -> None:
    @distributed(nproc_per_node=1, device="cpu", init_group=init_group)
    def train() -> int:
        for step in range(10):
            if step == 3:
                send(signal.SIGTERM)
            if stop_requested():
                return step
        return -1

    before = [signal.getsignal(number) for number in BOTH]
    assert train() == 3
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2", None])
def test_every_must_be_a_whole_number_of_at_least_1(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"every=.* was given .* at least 1"):
        stop_requested(every=every)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --------------------------------------------------------------------------------- the handlers


def test_nothing_is_set_before_the_first_call_and_all_is_put_back() -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with process_group():
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        stop_requested()
        assert all(callable(signal.getsignal(number)) for number in BOTH)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_they_are_put_back_after_an_error() -> None:
    def fail() -> None:
        with process_group():
            stop_requested()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_inner_group_leaves_those_of_the_outer_function() -> None:
    with pending.undone_at_end():
        stop_requested()
        with process_group():
            send(signal.SIGTERM)
        assert stop_requested()


@each_signal
def test_a_handler_of_the_users_own_is_called_as_well(
    number: signal.Signals, handler: Callable[..., None]
) -> None:
    calls: list[int] = []

    def own(number: int, frame: object) -> None:
        calls.append(number)

    handler(number, own)
    with process_group():
        stop_requested()
        send(number)
        assert stop_requested()
        assert calls == [number]
    assert signal.getsignal(number) is own
    assert calls == [number]


def test_a_handler_of_the_users_own_that_raises_is_heard(handler: Callable[..., None]) -> None:
    def own(number: int, frame: object) -> None:
        raise TimeoutError

    handler(signal.SIGTERM, own)
    with process_group():
        stop_requested()
        with pytest.raises(TimeoutError):
            send(signal.SIGTERM)
        assert stop_requested()


@each_signal
def test_an_ignored_signal_stays_ignored(
    number: signal.Signals, handler: Callable[..., None]
) -> None:
    handler(number, signal.SIG_IGN)
    with process_group():
        stop_requested()
        send(number)
        assert not stop_requested()
        assert signal.getsignal(number) is signal.SIG_IGN


def test_a_handler_that_was_set_later_stays(handler: Callable[..., None]) -> None:
    def own(number: int, frame: object) -> None: ...

    with process_group():
        stop_requested()
        handler(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


def test_off_the_main_thread_it_says_that_signals_are_not_seen() -> None:
    answers: list[object] = []

    def call() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answers.extend([stop_requested(), stop_requested()])
        answers.extend(str(warning.message) for warning in caught)

    before, preempt._state.warned = preempt._state.warned, False
    try:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    finally:
        preempt._state.warned = before
    assert answers[:2] == [False, False]
    assert len(answers) == 3
    assert "in the main thread only, so SIGTERM and SIGUSR1 to this process keep" in str(answers[2])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_sees_what_the_main_thread_has_set_up() -> None:
    answers: list[bool] = []
    with process_group():
        stop_requested()
        send(signal.SIGTERM)
        thread = threading.Thread(target=lambda: answers.append(stop_requested()))
        thread.start()
        thread.join()
        assert stop_requested()
    assert answers == [True]


# -------------------------------------------------------------------------------- other processes


def end_of_child(function: Callable[[], None]) -> int:
    """Run a function in a fork and return how it ended: a negative code is a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def can_fork() -> None:
    prepare_fork()


@each_signal
def test_a_child_does_not_have_the_handlers(can_fork: None, number: signal.Signals) -> None:
    def child() -> None:
        send(number)
        time.sleep(10)

    with pending.undone_at_end():
        stop_requested()
        assert end_of_child(child) == -number
        assert not stop_requested()


def test_a_child_has_the_handler_of_the_users_own(
    can_fork: None, handler: Callable[..., None]
) -> None:
    def child() -> None:
        send(signal.SIGTERM)

    handler(signal.SIGTERM, lambda *args: os._exit(7))
    with pending.undone_at_end():
        stop_requested()
        assert end_of_child(child) == 7


def test_the_handler_itself_knows_whose_it_is(can_fork: None) -> None:
    """In the moment before Python's hooks for forks run."""
    with pending.undone_at_end():
        stop_requested()
        handlers = preempt._state.handlers
        assert handlers is not None

        def child() -> None:
            handlers._pid = os.getppid()
            signal.signal(signal.SIGTERM, handlers._note)
            send(signal.SIGTERM)
            time.sleep(10)

        assert end_of_child(child) == -signal.SIGTERM


PLAIN_SCRIPT = """
import os, signal
from ddpkit import process_group, stop_requested

with process_group():
    {first_call}
    os.kill(os.getpid(), signal.SIGTERM)
    {last_call}
print("at the end")
"""


@pytest.mark.parametrize(
    ("first_call", "last_call", "status", "printed"),
    [
        ("pass", "stop_requested()", -signal.SIGTERM, ""),
        ("stop_requested()", "assert stop_requested()", 0, "at the end\n"),
        ("stop_requested()", "print('last', flush=True)", -signal.SIGTERM, "last\n"),
    ],
    ids=["before the first call", "followed", "after the last call"],
)
@pytest.mark.drill
def test_a_signal_does_what_it_does_unless_it_is_followed(
    first_call: str, last_call: str, status: int, printed: str
) -> None:
    script = PLAIN_SCRIPT.format(first_call=first_call, last_call=last_call)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (status, printed)
