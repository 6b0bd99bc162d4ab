"""Ranks that nobody watches: one is gone, and another is stuck in a call without an end."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpkit import barrier, control, group, process_group, watch
from ddpkit.errors import PeerError, WorkerError
from ddpkit.launch.output import write_to_descriptors
from ddpkit.testing import run_ranks
from tests.forking import needs_fork
from tests.multiproc.hand_set import with_hand_set_variables


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    monkeypatch.setattr(watch, "_GRACE", 0.5)


def block_in_c(seconds: int) -> None:
    """Block the main thread outside of Python, as a collective does that waits for a dead rank."""
    ctypes.CDLL(None).sleep(seconds)


def start(
    survive: Callable[[], None],
    die: Callable[[], Any],
    folder: Path,
    error: type[Exception] = WorkerError,
    dying: int = 1,
) -> None:
    """Run two ranks with hand-set variables: one ends, the other has to see that by itself."""

    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent must not help
        errors = os.open(folder / f"stderr-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        write_to_descriptors()
        with process_group():
            barrier()
            die() if os.environ["RANK"] == str(dying) else survive()

    started = time.monotonic()
    with pytest.raises(error, match=r"exit code 7|the cause"):
        run_ranks(with_hand_set_variables(rank), init_group=False, shutdown_grace=30)
    assert time.monotonic() - started < 20  # it has ended long before it would be killed


def test_a_rank_that_is_stuck_when_a_peer_has_gone_is_ended_with_its_stack(tmp_path: Path) -> None:
    start(lambda: block_in_c(600), lambda: os._exit(7), tmp_path)
    text = (tmp_path / "stderr-0").read_text()
    assert "[rank 0/2] Rank 1 (process " in text
    assert "has ended without a word" in text
    assert "is stuck in this call" in text
    assert "in block_in_c" in text


def test_a_rank_that_is_stuck_when_a_peer_has_failed_and_ended_is_told_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("the cause")

    start(lambda: block_in_c(600), fail, tmp_path, KeyError)
    text = (tmp_path / "stderr-0").read_text()
    assert "Rank 1 on" in text
    assert "KeyError: 'the cause'" in text
    assert "in block_in_c" in text


@needs_fork
def test_a_peer_that_dies_while_the_group_is_opened_ends_the_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_group = dist.init_process_group

    def die_or_open(*args: Any, **options: Any) -> None:
        if os.environ["RANK"] == "1":
            while not (tmp_path / "opening").exists():  # earlier, the rendezvous would notice it
                time.sleep(0.01)
            os._exit(7)
        (tmp_path / "opening").touch()
        open_group(*args, **options)

    monkeypatch.setattr(dist, "init_process_group", die_or_open)
    start(lambda: None, lambda: None, tmp_path)
    text = (tmp_path / "stderr-0").read_text()
    assert "[rank 0/2] Rank 1 (process " in text
    assert "in die_or_open" in text


def test_a_rank_that_runs_python_is_left_alone_and_meets_the_error_itself(tmp_path: Path) -> None:
    def survive() -> None:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)
        try:
            barrier()
        except PeerError as error:
            (tmp_path / "met").write_text(str(error))

    start(survive, lambda: os._exit(7), tmp_path)
    assert "Rank 1" in (tmp_path / "met").read_text()
    assert (tmp_path / "stderr-0").read_text() == ""


def test_a_rank_that_is_stuck_for_a_while_beside_healthy_ones_goes_on(tmp_path: Path) -> None:
    def survive() -> None:
        block_in_c(1)
        barrier()
        (tmp_path / "went on").touch()

    def live_on() -> None:
        barrier()
        os._exit(7)

    start(survive, live_on, tmp_path)
    assert (tmp_path / "went on").exists()


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_in_a_long_call_goes_on_when_a_peer_has_left_by_an_exception_that_it_caught(
    leaving: int, tmp_path: Path
) -> None:
    went_on = tmp_path / "went on"

    def rank() -> None:
        with contextlib.suppress(KeyError), process_group(timeout=20):
            barrier()
            if os.environ["RANK"] == str(leaving):
                raise KeyError("batch")
            block_in_c(2)
        if os.environ["RANK"] != str(leaving):
            went_on.touch()
        while not went_on.exists():
            time.sleep(0.01)

    run_ranks(with_hand_set_variables(rank), init_group=False)
    assert went_on.exists()


def test_a_rank_in_a_long_call_goes_on_when_a_peer_has_exited_with_0(tmp_path: Path) -> None:
    def survive() -> None:
        block_in_c(2)
        (tmp_path / "went on").touch()
        os._exit(7)

    start(survive, lambda: sys.exit(0), tmp_path, dying=1)
    assert (tmp_path / "went on").exists()


@needs_fork
def test_a_rank_on_another_machine_is_told_by_one_that_failed_when_its_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "this_machine", lambda: f"machine {os.environ.get('RANK')}")
    errors = tmp_path / "stderr-0"

    def rank() -> None:
        os.dup2(os.open(tmp_path / f"stderr-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
        with contextlib.suppress(KeyError), process_group(timeout=20):
            barrier()
            if os.environ["RANK"] == "1":
                raise KeyError("the cause")
            block_in_c(600)
        time.sleep(1.5)
        assert errors.read_text() == ""  # so far it might go on
        group._tell_that_it_ends()  # called when the interpreter ends, which that of a rank skips
        while "in block_in_c" not in errors.read_text():
            time.sleep(0.01)
        time.sleep(60)  # until the parent has seen the other one's end

    with pytest.raises(WorkerError, match=r"rank 0/2\] ended with exit code 1 "):
        run_ranks(with_hand_set_variables(rank), init_group=False, time_limit=30)
    assert "KeyError: 'the cause'" in errors.read_text()


# ------------------------------------------------------------------- rank 0, which serves the store


def test_a_rank_that_is_stuck_when_rank_0_has_gone_is_ended_too(tmp_path: Path) -> None:
    def survive() -> None:
        (tmp_path / "blocked").touch()
        block_in_c(600)

    def die() -> None:
        while not (tmp_path / "blocked").exists():
            time.sleep(0.01)
        os._exit(7)

    start(survive, die, tmp_path, dying=0)
    text = (tmp_path / "stderr-1").read_text()
    assert "[rank 1/2] Rank 0 (process " in text
    assert "has ended, and with it the store that the ranks talk through" in text
    assert "in block_in_c" in text


@needs_fork
def test_a_rank_that_is_stuck_when_rank_0_has_failed_is_told_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("the cause")

    start(lambda: block_in_c(600), fail, tmp_path, KeyError, dying=0)
    text = (tmp_path / "stderr-1").read_text()
    assert "Rank 0 " in text
    assert "KeyError: 'the cause'" in text
    assert "in block_in_c" in text


@pytest.mark.drill
def test_a_rank_in_a_long_call_goes_on_when_rank_0_has_left_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control.Channel, "await_departures", lambda *_, **__: time.sleep(0.5))

    def survive() -> None:
        block_in_c(4)
        (tmp_path / "went on").touch()
        os._exit(7)

    start(survive, lambda: None, tmp_path, dying=0)
    assert (tmp_path / "went on").exists()
