import os
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddpkit import agree, all_ranks, any_rank, barrier, broadcast_value, on_rank0, rank0_first
from ddpkit.agree import _Call, _Meeting, exchange
from ddpkit.errors import ConfigError, GroupError

# What needs several ranks is in tests/multiproc/test_agree.py.


def test_a_plain_process_needs_nobody() -> None:
    assert on_rank0(max, [3, 1, 2]) == 3
    assert on_rank0(int, "4", base=8) == 4
    assert broadcast_value("run-7") == "run-7"
    assert exchange("x", name="gather") == ["x"]
    barrier()
    barrier(timeout=1)


@pytest.mark.parametrize("per_node", [False, True])
def test_in_a_plain_process_the_block_of_rank0_first_simply_runs(per_node: bool) -> None:
    ran = []
    with rank0_first(per_node=per_node):
        ran.append(1)
    with pytest.raises(KeyError, match="x"), rank0_first(per_node=per_node):
        raise KeyError("x")
    assert ran == [1]


def test_rank0_first_may_decorate_a_function() -> None:
    @rank0_first()
    def load() -> int:
        return 3

    assert (load(), load()) == (3, 3)


@pytest.mark.parametrize("call", [any_rank, all_ranks])
@pytest.mark.parametrize(
    ("flag", "truth"), [(True, True), (0, False), ([], False), (torch.tensor([2]), True)]
)
def test_in_a_plain_process_a_flag_is_its_own_answer(call: Any, flag: object, truth: bool) -> None:
    assert call(flag) is truth


@pytest.mark.parametrize("call", [any_rank, all_ranks])
def test_what_has_no_truth_value_is_no_flag(call: Any) -> None:
    text = rf"{call.__name__} got a flag on rank 0 .* torch\.Tensor \(Boolean value of Tensor"
    with pytest.raises(ConfigError, match=text):
        call(torch.tensor([True, False]))


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
        (lambda: any_rank(True), "any_rank"),
        (lambda: all_ranks(True), "all_ranks"),
        (lambda: rank0_first().__enter__(), "rank0_first"),
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


def test_the_place_of_a_with_block_is_that_of_the_user_and_not_in_contextlib() -> None:
    source = "@contextmanager\ndef block():\n    yield where()"
    names: dict[str, Any] = {"where": agree._calling_place, "contextmanager": contextmanager}
    exec(compile(source, f"{agree._PACKAGE}somewhere.py", "exec"), names)
    function = test_the_place_of_a_with_block_is_that_of_the_user_and_not_in_contextlib
    with names["block"]() as place:
        assert place == f"test_agree.py:{function.__code__.co_firstlineno + 5}"


def meeting_of_rank_0(name: str, place: str) -> _Meeting:
    class Rank0OfTwo:
        rank = 0
        world_size = 2

    meeting = _Meeting.__new__(_Meeting)  # announces nothing
    meeting._channel = Rank0OfTwo()  # type: ignore[assignment]
    meeting._call = _Call(1, name, place)
    return meeting


def test_calls_of_one_name_agree_wherever_they_stand() -> None:
    meeting_of_rank_0("barrier", "a.py:1")._check_same(_Call(1, "barrier", "b.py:2"), 1)


def test_calls_of_different_names_are_both_named() -> None:
    meeting = meeting_of_rank_0("rank0_save", "train.py:41")
    text = r"rank 0 is in rank0_save \(train\.py:41\), rank 1 in barrier \(train\.py:57\)"
    with pytest.raises(GroupError, match=text):
        meeting._check_same(_Call(1, "barrier", "train.py:57"), 1)


def test_a_rank_that_has_gone_further_is_not_here() -> None:
    text = (
        r"rank 0 is in barrier \(a\.py:1\), call 1, .* 1 is already in gather \(b\.py:2\), call 2"
    )
    with pytest.raises(GroupError, match=text):
        meeting_of_rank_0("barrier", "a.py:1")._check_still_there(_Call(2, "gather", "b.py:2"), 1)
