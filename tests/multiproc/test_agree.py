import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import (
    agree,
    all_ranks,
    any_rank,
    barrier,
    broadcast_value,
    get_rank,
    on_rank0,
    process_group,
    rank0_first,
)
from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, GroupError, PeerError, WorkerError
from ddpkit.group import get_channel
from ddpkit.testing import run_ranks

HERE = Path(__file__).name


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what a call raises; ranks can return them and go on."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", ""


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


# ------------------------------------------------------------------------------------- on_rank0


def test_every_rank_gets_rank_0s_value() -> None:
    def function() -> list[Any]:
        return [on_rank0(lambda: f"made by {get_rank()}"), on_rank0(divmod, 7, 2), on_rank0(int)]

    expected = ["made by 0", (3, 1), 0]
    assert run_ranks(function, 3) == [expected] * 3


def test_only_rank_0_runs_it() -> None:
    def function() -> int:
        runs: list[int] = []
        on_rank0(runs.append, 1)
        return len(runs)

    assert run_ranks(function) == [1, 0]


def test_rank_0_gets_the_object_itself_and_the_others_a_copy() -> None:
    def function() -> tuple[bool, float]:
        made = torch.ones(3)
        got = on_rank0(lambda: made)
        return got is made, float(got.sum())

    assert run_ranks(function) == [(True, 3.0), (False, 3.0)]


def test_every_rank_gets_rank_0s_exception() -> None:
    class DataError(Exception):
        def __init__(self, path: str, line: int) -> None:
            super().__init__(f"{path}:{line}")
            self.path, self.line = path, line

    def read() -> None:
        raise DataError("train.csv", 7)

    def function() -> tuple[Any, ...]:
        try:
            on_rank0(read)
        except DataError as error:
            cause = error.__cause__
            named = isinstance(cause, PeerError) and cause.rank == 0 and "in read" in str(cause)
            return error.path, error.line, named, on_rank0(lambda: "goes on")
        raise AssertionError("nothing was raised")

    assert run_ranks(function) == [
        ("train.csv", 7, False, "goes on"),
        ("train.csv", 7, True, "goes on"),
    ]


def test_an_exception_that_cannot_be_sent_is_a_peer_error_elsewhere() -> None:
    def fail() -> None:
        error = OSError("busy")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def function() -> tuple[str, str]:
        return outcome(lambda: on_rank0(fail))

    first, second = run_ranks(function)
    assert first == ("OSError", "busy")
    assert second[0] == "PeerError"
    assert "failed on rank 0: OSError: busy" in second[1]


def test_a_large_value_arrives() -> None:
    def function() -> tuple[int, float]:
        value = on_rank0(lambda: torch.arange(3_000_000, dtype=torch.float64))  # 24 MB
        return len(value), float(value[-1])

    assert run_ranks(function) == [(3_000_000, 2_999_999.0)] * 2


def test_a_value_that_cannot_be_sent_is_an_error_on_every_rank_with_a_hint() -> None:
    def function() -> tuple[tuple[str, str], str]:
        return outcome(lambda: on_rank0(threading.Lock)), on_rank0(lambda: "goes on")

    for (kind, text), later in run_ranks(function):
        assert kind == "ConfigError"
        assert "on_rank0 got a _thread.lock" in text
        assert "if is_rank0():" in text
        assert later == "goes on"


@pytest.mark.drill
def test_work_on_rank_0_may_outlast_the_time_limit_of_collectives() -> None:
    def function() -> float:
        started = time.monotonic()
        on_rank0(time.sleep, 2.5)
        return time.monotonic() - started

    assert min(run_ranks(function, timeout=1.0)) > 2.4


def test_a_call_within_the_work_of_rank_0_fails_at_once() -> None:
    def function() -> tuple[str, str]:
        return outcome(lambda: on_rank0(lambda: barrier()))

    for kind, text in run_ranks(function):
        assert kind == "GroupError"
        assert "barrier (test_agree.py:" in text
        assert "was called within on_rank0 (test_agree.py:" in text


def test_a_failed_nested_call_does_not_spoil_later_ones() -> None:
    def function() -> int:
        with pytest.raises(GroupError):
            on_rank0(lambda: broadcast_value(1))
        return broadcast_value(get_rank() + 5)

    assert run_ranks(function) == [5, 5]


# ---------------------------------------------------------------------------------- rank0_first


def on_nodes(function: Callable[[], Any], nodes: list[int], **options: Any) -> list[Any]:
    """Run ranks whose variables say that they are on these nodes, one entry for each rank."""

    def rank() -> Any:
        own = int(os.environ["RANK"])
        os.environ["GROUP_RANK"] = str(nodes[own])
        os.environ["GROUP_WORLD_SIZE"] = str(max(nodes) + 1)
        os.environ["LOCAL_RANK"] = str(nodes[:own].count(nodes[own]))
        os.environ["LOCAL_WORLD_SIZE"] = str(nodes.count(nodes[own]))
        with process_group(timeout=20, device="cpu"):
            return function()

    return run_ranks(rank, len(nodes), init_group=False, **options)


def wait_for(file: Path) -> bool:
    deadline = time.monotonic() + 20.0
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return file.exists()


def test_rank_0_goes_through_the_block_before_the_others_and_they_all_at_once(
    tmp_path: Path,
) -> None:
    def function() -> tuple[bool, bool]:
        done = tmp_path / "done"
        with rank0_first():
            found = done.exists()
            if get_rank() == 0:
                time.sleep(0.2)
                done.touch()
                return found, True
            (tmp_path / f"rank{get_rank()}").touch()
            return found, wait_for(tmp_path / f"rank{3 - get_rank()}")

    assert run_ranks(function, 3) == [(False, True), (True, True), (True, True)]


def test_an_exception_in_rank_0s_block_is_raised_on_every_rank_in_place_of_the_block() -> None:
    def function() -> tuple[str, str, bool, list[int], str]:
        ran = []
        cause: BaseException | None = None
        try:
            with rank0_first():
                ran.append(get_rank())
                raise OSError(28, "disk full")
        except OSError as error:
            kind, text, cause = type(error).__name__, str(error), error.__cause__
        return kind, text, isinstance(cause, PeerError), ran, on_rank0(lambda: "goes on")

    expected = "OSError", "[Errno 28] disk full"
    first, second, third = run_ranks(function, 3)
    assert first == (*expected, False, [0], "goes on")
    assert second == third == (*expected, True, [], "goes on")


def test_an_exception_in_another_ranks_block_is_that_ranks_own() -> None:
    def block() -> None:
        with rank0_first():
            if get_rank() == 1:
                raise KeyError("x")

    def function() -> tuple[tuple[str, str], int]:
        return outcome(block), broadcast_value(3)

    assert run_ranks(function) == [(("", ""), 3), (("KeyError", "'x'"), 3)]


def test_the_block_of_rank_0_may_outlast_the_time_limit_of_the_group() -> None:
    def function() -> float:
        get_channel().bound = 0.3
        barrier(timeout=20)
        started = time.monotonic()
        with rank0_first():
            if get_rank() == 0:
                time.sleep(0.8)
        return time.monotonic() - started

    assert min(run_ranks(function)) > 0.7


@pytest.mark.parametrize("per_node", [False, True])
def test_a_call_within_the_block_of_rank_0_fails_at_once(per_node: bool) -> None:
    def block() -> None:
        with rank0_first(per_node=per_node):
            barrier()

    for kind, text in run_ranks(lambda: outcome(block)):
        assert kind == "GroupError"
        assert f"barrier ({HERE}:" in text
        assert f"was called within rank0_first{'(per_node=True)' * per_node} ({HERE}:" in text


def test_per_node_the_first_rank_of_each_node_goes_before_its_own_node(tmp_path: Path) -> None:
    def function() -> tuple[bool, bool]:
        mine, others = (tmp_path / f"node{node}" for node in (get_rank() // 2, 1 - get_rank() // 2))
        with rank0_first(per_node=True):
            found = mine.exists()
            time.sleep(0.1)
            # Rank 0 is the slow one, and the other node does not wait for it.
            did_not_wait = wait_for(others) if get_rank() == 0 else True
            mine.touch()
        return found, did_not_wait

    assert on_nodes(function, [0, 0, 1, 1]) == [(False, True), (True, True)] * 2


def test_per_node_nodes_may_be_of_any_size_and_their_ranks_in_any_order() -> None:
    def function() -> list[int]:
        order: list[int] = []
        for _ in range(3):
            with rank0_first(per_node=True):
                order.append(get_rank())
            order.append(broadcast_value(get_rank()))
        return order

    assert on_nodes(function, [0, 1, 0]) == [[rank, 0] * 3 for rank in range(3)]


def test_per_node_an_exception_reaches_the_ranks_of_that_node() -> None:
    def block() -> None:
        with rank0_first(per_node=True):
            if os.environ["GROUP_RANK"] == "1":
                raise OSError(f"disk of rank {get_rank()}")

    def function() -> tuple[tuple[str, str], int]:
        return outcome(block), broadcast_value(4)

    failed = ("OSError", "disk of rank 1"), 4
    assert on_nodes(function, [0, 1, 1]) == [(("", ""), 4), failed, failed]


@pytest.mark.parametrize("late", [0, 2])
def test_per_node_a_node_cannot_take_another_path_than_rank_0(late: int) -> None:
    def block() -> None:
        with rank0_first(per_node=True):
            pass

    def function() -> tuple[str, str]:
        if get_rank() == late:
            time.sleep(0.2)
        if get_rank() < 2:
            on_rank0(int)  # in which rank 0 waits for nobody, so that it may be further already
            return outcome(barrier)
        return outcome(block)

    results = on_nodes(function, [0, 0, 1, 1])
    assert {kind for kind, _ in results[:2]} == {"GroupError"}
    for kind, text in results[2:]:
        assert kind == "GroupError"
        assert f"rank 2 is in rank0_first(per_node=True) ({HERE}:" in text
        assert f"rank 0 in on_rank0 ({HERE}:" in text


@pytest.mark.parametrize(
    ("nodes", "of_others", "of_rank_2"),
    [
        ([0, 1, 1], "on_rank0", "rank0_first(per_node=True)"),
        ([0, 0, 1], "rank0_first(per_node=True)", "on_rank0"),
    ],
)
def test_per_node_no_rank_waits_for_the_answer_of_one_that_has_passed_by(
    nodes: list[int], of_others: str, of_rank_2: str
) -> None:
    def function() -> tuple[str, str]:
        if get_rank() == 2:
            time.sleep(0.3)
            return outcome(CALLS[of_rank_2])
        CALLS[of_others]()
        return outcome(barrier)

    kind, text = on_nodes(function, nodes)[2]
    assert kind == "GroupError"
    assert f"rank 2 is in {of_rank_2} ({HERE}:" in text
    assert f"is already in barrier ({HERE}:" in text


# ------------------------------------------------ broadcast_value, any_rank, all_ranks, exchange


def test_broadcast_value() -> None:
    assert run_ranks(lambda: broadcast_value({"rank": get_rank()}), 3) == [{"rank": 0}] * 3


@pytest.mark.parametrize(
    ("flags", "some", "every"),
    [
        ([False, False, False], False, False),
        ([False, False, True], True, False),
        ([True, False, False], True, False),
        ([True, True, True], True, True),
    ],
)
def test_any_rank_and_all_ranks(flags: list[bool], some: bool, every: bool) -> None:
    def function() -> tuple[bool, bool]:
        flag = flags[get_rank()]
        return any_rank(flag), all_ranks(torch.tensor([float(flag)]))

    assert run_ranks(function, 3) == [(some, every)] * 3


@pytest.mark.parametrize("call", [any_rank, all_ranks])
@pytest.mark.parametrize("wrong", [0, 1])
def test_what_has_no_truth_value_on_one_rank_is_an_error_on_every_rank(
    call: Callable[[object], bool], wrong: int
) -> None:
    def function() -> tuple[tuple[str, str], bool]:
        flag = torch.tensor([True, False]) if get_rank() == wrong else True
        return outcome(lambda: call(flag)), call(True)

    for (kind, text), later in run_ranks(function):
        assert kind == "ConfigError"
        assert f"{call.__name__} got a flag on rank {wrong} that is neither true nor false" in text
        assert later is True


def test_exchange_keeps_the_order_of_ranks() -> None:
    def function() -> list[list[int]]:
        return [exchange((get_rank() + shift) * 10, name="gather") for shift in range(3)]

    assert run_ranks(function, 3) == [[[0, 10, 20], [10, 20, 30], [20, 30, 40]]] * 3


def test_exchange_of_large_values() -> None:
    def function() -> list[int]:
        values = exchange(torch.full((2_000_000,), get_rank()), name="gather")  # 16 MB each
        return [int(value.sum()) for value in values]

    assert run_ranks(function) == [[0, 2_000_000]] * 2


def test_exchange_of_a_value_that_cannot_be_sent_names_it() -> None:
    with pytest.raises(ConfigError, match=r"gather got a _thread\.lock"):
        run_ranks(lambda: exchange(threading.Lock() if get_rank() == 1 else 1, name="gather"))


# --------------------------------------------------------------------------------------- barrier


def test_a_barrier_waits_for_the_last(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def function() -> bool:
        if get_rank() == 1:
            time.sleep(0.3)
            flag.touch()
        barrier()
        return flag.exists()

    assert run_ranks(function, 3) == [True, True, True]


def test_a_barrier_that_ends_names_the_missing_rank_and_its_last_place() -> None:
    def function() -> tuple[str, str]:
        barrier()
        if get_rank() != 1:
            return outcome(lambda: barrier(timeout=0.3))
        time.sleep(1.0)
        return outcome(lambda: barrier(timeout=0.3))

    results = run_ranks(function, 3)
    first = line_of(test_a_barrier_that_ends_names_the_missing_rank_and_its_last_place, 2)
    for kind, text in results:
        assert kind == "GroupError"
        assert f"rank 1 did not reach barrier ({HERE}:" in text
        assert "within 0.3 s" in text
        assert f"Last seen: rank 1: barrier ({first}), call 1." in text


def test_a_rank_that_never_made_a_call() -> None:
    def function() -> tuple[str, str]:
        if get_rank() == 0:
            return outcome(lambda: barrier(timeout=0.2))
        time.sleep(0.6)
        return "", ""

    assert "rank 1: no call of this family yet" in run_ranks(function)[0][1]


def test_a_rank_that_gave_up_waiting_for_rank_0_is_missed_when_rank_0_comes() -> None:
    def function() -> tuple[str, str]:
        if get_rank() == 0:
            time.sleep(0.8)
        return outcome(lambda: barrier(timeout=0.3))

    (kind, late), (other_kind, gave_up) = run_ranks(function)
    assert kind == other_kind == "GroupError"
    assert f"[rank 1/2] rank 0 did not reach barrier ({HERE}:" in gave_up
    assert "within 0.3 s. Last seen: rank 0: no call of this family yet." in gave_up
    assert f"[rank 0/2] rank 1 has waited in barrier ({HERE}:" in late
    assert "given up" in late


@pytest.mark.parametrize("name", ["barrier", "on_rank0"])
def test_without_a_time_limit_of_its_own_a_call_waits_as_long_as_the_group_says(name: str) -> None:
    def function() -> tuple[str, str]:
        assert get_channel().bound == 60.0  # what run_ranks opened the group with
        get_channel().bound = 0.3
        if get_rank() == 0:
            time.sleep(0.8)
            return "", ""
        return outcome(CALLS[name])

    kind, text = run_ranks(function, timeout=60.0)[1]
    assert kind == "GroupError"
    assert f"rank 0 did not reach {name} ({HERE}:" in text
    assert "within 0.3 s" in text
    assert "raise `timeout=` of process_group or @distributed" in text
    assert "Does the call stand inside `if is_rank0():`" in text


def test_a_barrier_may_wait_longer_than_the_group_says() -> None:
    def function() -> tuple[str, str]:
        get_channel().bound = 0.3
        if get_rank() == 1:
            time.sleep(0.8)
        return outcome(lambda: barrier(timeout=20))

    assert run_ranks(function) == [("", "")] * 2


@pytest.mark.drill
def test_while_rank_0_waits_for_others_those_who_are_here_wait_with_it() -> None:
    def function() -> tuple[str, str]:
        # Rank 0 comes late, and then waits for rank 2 with a bound of its own.
        time.sleep((0.5, 0.0, 1.8)[get_rank()])
        return outcome(lambda: barrier(timeout=0.9))

    for kind, text in run_ranks(function, 3)[:2]:
        assert kind == "GroupError"
        assert "[rank 0/3] rank 2 did not reach barrier" in text


def test_a_long_wait_says_once_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "_NOTICE_AFTER", 0.1)

    class Records(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.texts.append(record.getMessage())

    def function() -> list[str]:
        records = Records()
        logging.getLogger("ddpkit.agree").addHandler(records)
        if get_rank() == 1:
            time.sleep(0.6)
        barrier()
        return records.texts

    first, second = run_ranks(function, start_method="fork")
    assert len(first) == 1
    assert first[0].startswith(f"[rank 0/2] barrier ({HERE}:")
    assert "for rank 1. Does the call stand inside `if is_rank0():`" in first[0]
    assert second == []


# --------------------------------------------------------------------------- different paths


def enter_rank0_first(**options: bool) -> None:
    with rank0_first(**options):
        pass


CALLS: dict[str, Callable[[], object]] = {
    "barrier": barrier,
    "on_rank0": lambda: on_rank0(lambda: 1),
    "rank0_first": enter_rank0_first,
    "rank0_first(per_node=True)": lambda: enter_rank0_first(per_node=True),
    "broadcast_value": lambda: broadcast_value(2),
    "any_rank": lambda: any_rank(True),
    "all_ranks": lambda: all_ranks(True),
    "gather": lambda: exchange(3, name="gather"),
}


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1"),
    [
        ("barrier", "on_rank0"),
        ("barrier", "gather"),
        ("gather", "broadcast_value"),
        ("barrier", "rank0_first"),
        ("all_ranks", "rank0_first(per_node=True)"),
        ("any_rank", "all_ranks"),
        ("any_rank", "barrier"),
    ],
)
def test_mispaired_calls_fail_at_once_on_both_sides_and_name_both_places(
    of_rank_0: str, of_rank_1: str
) -> None:
    def function() -> tuple[str, str, float]:
        started = time.monotonic()
        kind, text = outcome(CALLS[of_rank_0] if get_rank() == 0 else CALLS[of_rank_1])
        return kind, text, time.monotonic() - started

    for kind, text, seconds in run_ranks(function):
        assert kind == "GroupError"
        assert f"{of_rank_0} ({HERE}:" in text
        assert f"{of_rank_1} ({HERE}:" in text
        assert "different paths" in text
        assert seconds < 10


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("of_rank_1", ["barrier", "gather", "broadcast_value", "rank0_first"])
def test_a_call_that_rank_0_has_gone_through_alone_is_no_answer_to_another(
    of_rank_1: str, late: int
) -> None:
    def function() -> tuple[str, str]:
        if get_rank() == late:
            time.sleep(0.2)
        if get_rank() == 0:
            on_rank0(lambda: "a value for on_rank0 alone")
            return "", ""
        return outcome(CALLS[of_rank_1])

    kind, text = run_ranks(function)[1]
    assert kind == "GroupError"
    assert f"rank 1 is in {of_rank_1} ({HERE}:" in text
    assert f"rank 0 in on_rank0 ({HERE}:" in text


def test_a_call_that_failed_on_rank_0_alone_is_no_answer_to_another() -> None:
    def fail() -> None:
        raise ValueError("of another call")

    def function() -> tuple[str, str]:
        if get_rank() == 1:
            return outcome(barrier)
        with contextlib.suppress(ValueError), rank0_first():
            fail()
        return "", ""

    kind, text = run_ranks(function)[1]
    assert kind == "GroupError"
    assert f"rank 1 is in barrier ({HERE}:" in text
    assert f"rank 0 in rank0_first ({HERE}:" in text


def test_a_call_of_one_rank_alone_ends_when_the_other_leaves() -> None:
    def function() -> None:
        if get_rank() == 1:
            barrier()

    with pytest.raises(GroupError, match="waits for rank 0, which has already left the group"):
        run_ranks(function)


# ---------------------------------------------------------------------------------- a dead rank


@pytest.mark.parametrize("name", CALLS)
def test_a_dead_rank_0_ends_the_wait(name: str) -> None:
    def function() -> None:
        if get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        CALLS[name]()

    started = time.monotonic()
    with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
        run_ranks(function)
    assert caught.value.rank == 0
    assert time.monotonic() - started < 15


# --------------------------------------------------------------------------------------- traces


def count_keys() -> int:
    store = get_channel()._raw
    barrier()
    return on_rank0(lambda: int(store.num_keys()))


def test_nothing_of_past_calls_stays_in_the_store() -> None:
    def function() -> tuple[int, int]:
        count_keys()
        before = count_keys()
        for number in range(8):
            barrier()
            on_rank0(int, number)
            broadcast_value(number)
            exchange(number, name="gather")
            any_rank(number)
            enter_rank0_first()
            enter_rank0_first(per_node=True)
            on_rank0(lambda: bytes(5 << 20))
            outcome(lambda: on_rank0(lambda: 1 / 0))
        return before, count_keys()

    for before, after in run_ranks(function, 3):
        # What its last reader has not taken yet may be there, and no more.
        assert after <= before + 2


def test_a_node_of_one_rank_leaves_nothing_in_the_store_either() -> None:
    def function() -> tuple[int, int]:
        count_keys()
        before = count_keys()
        for _ in range(8):
            enter_rank0_first(per_node=True)
        return before, count_keys()

    for before, after in on_nodes(function, [0, 1]):
        assert after <= before + 2


def test_agreement_uses_no_collective() -> None:
    def function() -> int:
        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a collective was called")

        for name in ("all_reduce", "broadcast", "barrier", "all_gather_object", "all_gather"):
            setattr(dist, name, refuse)
        barrier()
        return on_rank0(lambda: 5)

    assert run_ranks(function) == [5, 5]
