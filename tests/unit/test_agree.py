import os
import threading
from typing import Any

import pytest

from ddpkit import agree, barrier, on_rank0
from ddpkit.agree import _Call, _check_same, broadcast_value, exchange
from ddpkit.errors import ConfigError, GroupError

# What needs several ranks is in tests/multiproc/test_agree.py.


def test_a_plain_process_needs_nobody() -> None:
    assert on_rank0(max, [3, 1, 2]) == 3
    assert on_rank0(int, "4", base=8) == 4
    assert broadcast_value("run-7") == "run-7"
    assert exchange("x", name="gather") == ["x"]
    barrier()
    barrier(timeout=1)


def test_in_a_plain_process_the_value_is_the_object_itself() -> None:
    lock = threading.Lock()  # which could not be sent
    assert on_rank0(lambda: lock) is lock
    assert broadcast_value(lock) is lock


def test_in_a_plain_process_the_exception_is_the_object_itself() -> None:
    error = KeyError("x")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        on_rank0(fail)
    assert caught.value is error
    assert error.__cause__ is None


def test_calls_may_be_nested_in_a_plain_process() -> None:
    assert on_rank0(lambda: on_rank0(lambda: 1) + 1) == 2


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_wrong_time_limit(timeout: float) -> None:
    with pytest.raises(ConfigError, match=f"timeout={timeout} was given"):
        barrier(timeout=timeout)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (barrier, "barrier"),
        (lambda: on_rank0(int), "on_rank0"),
        (lambda: broadcast_value(1), "broadcast_value"),
        (lambda: exchange(1, name="gather"), "gather"),
    ],
)
def test_without_a_group_a_rank_is_told_what_to_do(call: Any, name: str) -> None:
    with pytest.raises(GroupError, match=rf"^{name}\(\) was called on rank 1 of 2"):
        call()


def test_the_place_is_that_of_the_caller_outside_of_ddpkit() -> None:
    line = test_the_place_is_that_of_the_caller_outside_of_ddpkit.__code__.co_firstlineno
    assert agree._calling_place() == f"test_agree.py:{line + 2}"


def test_a_folder_whose_name_begins_like_ddpkit_is_outside_of_it() -> None:
    beside = f"{agree._PACKAGE.rstrip(os.sep)}-experiments{os.sep}train.py"
    names: dict[str, Any] = {"where": agree._calling_place}
    exec(compile("\n\nplace = where()", beside, "exec"), names)
    assert names["place"] == "train.py:3"


class Rank0OfTwo:
    rank = 0
    world_size = 2


def test_calls_of_one_name_agree_wherever_they_stand() -> None:
    channel: Any = Rank0OfTwo()
    _check_same(_Call(1, "barrier", "a.py:1"), _Call(1, "barrier", "b.py:2"), 1, channel)


def test_calls_of_different_names_are_both_named() -> None:
    channel: Any = Rank0OfTwo()
    here, there = _Call(1, "rank0_save", "train.py:41"), _Call(1, "barrier", "train.py:57")
    text = r"rank 0 is in rank0_save \(train\.py:41\), rank 1 in barrier \(train\.py:57\)"
    with pytest.raises(GroupError, match=text):
        _check_same(here, there, 1, channel)
