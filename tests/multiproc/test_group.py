import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import (
    barrier,
    distributed,
    get_device,
    get_local_rank,
    get_rank,
    get_world_size,
    on_rank0,
    process_group,
)
from ddpkit.agree import broadcast_value
from ddpkit.errors import GroupError, PeerError
from ddpkit.testing import run_ranks
from tests.forking import needs_fork
from tests.multiproc.hand_set import with_hand_set_variables

LAUNCHERS = ["ddpkit", "environment"]
each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


def start(
    function: Callable[[], Any], world_size: int = 2, *, launcher: str = "ddpkit", **options: Any
) -> list[Any]:
    """Start ranks that open their group themselves, as ddpkit's or with hand-set variables."""
    rank = with_hand_set_variables(function) if launcher == "environment" else function
    return run_ranks(rank, world_size, init_group=False, **options)


def add_up() -> int:
    """Sum the ranks by a collective."""
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


# --------------------------------------------------------------------------------- in and out


@each_launcher
def test_the_world_as_each_rank_sees_it(launcher: str) -> None:
    def function() -> Any:
        with process_group(timeout=20, device="cpu") as world:
            named = get_rank(), get_world_size(), get_local_rank(), str(get_device())
            seen = asdict(world)
            del seen["master_port"], seen["variables"]
            return named, seen, add_up()

    for rank, (named, world, total) in enumerate(start(function, 3, launcher=launcher)):
        assert named == (rank, 3, rank, "cpu")
        assert world == {
            "rank": rank,
            "world_size": 3,
            "local_rank": rank,
            "local_world_size": 3,
            "node_rank": 0,
            "num_nodes": 1,
            "master_addr": "127.0.0.1",
            "source": launcher,
            "job": None,
            "nodes_are_known": True,
            "device": torch.device("cpu"),
            "backend": "gloo",
        }
        assert total == 3


@each_launcher
@pytest.mark.parametrize("late", [0, 1])
def test_it_can_be_entered_again_and_again(launcher: str, late: int) -> None:
    def function() -> list[int]:
        totals = []
        for _ in range(5):
            if int(os.environ["RANK"]) == late:
                time.sleep(0.05)
            with process_group(timeout=20, device="cpu"):
                totals.append(add_up() + broadcast_value(get_rank()))
        return totals

    assert start(function, launcher=launcher) == [[1] * 5] * 2


def test_an_inner_block_joins_and_leaves_the_group_open() -> None:
    def function() -> tuple[int, int]:
        with process_group(timeout=20, device="cpu") as outer:
            with process_group() as inner:
                assert inner == outer
                first = add_up()
            return first, add_up() + on_rank0(lambda: 5)

    assert start(function) == [(1, 6), (1, 6)]


@each_launcher
def test_rank_0_keeps_its_store_until_the_others_have_left(launcher: str) -> None:
    def function() -> int:
        with process_group(timeout=20, device="cpu"):
            if get_rank() == 0:
                return 1
            time.sleep(0.5)
        return 2

    assert start(function, launcher=launcher) == [1, 2]


@pytest.mark.drill
def test_rank_0_keeps_its_store_as_long_as_the_time_limit() -> None:
    def function() -> float:
        started = time.monotonic()
        with process_group(timeout=300, device="cpu"):
            barrier()
            time.sleep(35 * get_rank())
        return time.monotonic() - started

    assert min(start(function, launcher="environment")) >= 35


def test_rank_0_keeps_its_store_no_longer_than_the_time_limit() -> None:
    def function() -> float:
        started = time.monotonic()
        with contextlib.suppress(GroupError), process_group(timeout=2, device="cpu"):
            barrier()
            time.sleep(5 * get_rank())
        return time.monotonic() - started

    assert 2 <= start(function, launcher="environment")[0] < 5


def test_the_time_limit_holds_for_collectives() -> None:
    def function() -> float:
        started = time.monotonic()
        with process_group(timeout=0.5, device="cpu"):
            if get_rank() == 1:
                time.sleep(2.0)
                return 0.0
            with pytest.raises(RuntimeError, match=r"[Tt]im"):
                add_up()
            return time.monotonic() - started

    assert 0.4 < start(function)[0] < 2.0


# ---------------------------------------------------------------------------- a missing rank


@each_launcher
def test_a_missing_rank_is_named_within_the_time(launcher: str) -> None:
    def function() -> tuple[str, float]:
        started = time.monotonic()
        if os.environ["RANK"] == "2":
            time.sleep(1.5)  # a rank that has ended is another story
            return "", 0.0
        with pytest.raises(GroupError) as caught:
            process_group(timeout=0.5, device="cpu").__enter__()
        return str(caught.value), time.monotonic() - started

    results = start(function, 3, launcher=launcher)
    for rank, (text, seconds) in enumerate(results[:2]):
        assert f"[rank {rank}/3] rank 2 did not join within" in text
        assert f"WORLD_SIZE=3 was read from: {launcher}" in text
        assert seconds < 10


@each_launcher
def test_a_rank_whose_time_was_up_earlier_is_not_the_one_that_is_missing(launcher: str) -> None:
    def function() -> str:
        if os.environ["RANK"] == "2":
            time.sleep(2.5)  # a rank that has ended is another story
            return ""
        bound = 0.3 if os.environ["RANK"] == "1" else 1.5
        with pytest.raises(GroupError) as caught:
            process_group(timeout=bound, device="cpu").__enter__()
        return str(caught.value)  # and the process of rank 1 ends here, long before the others

    text = start(function, 3, launcher=launcher)[0]
    assert "[rank 0/3] rank 2 did not join within" in text
    assert "(rank 1 gave up before)" in text


def test_a_missing_server_is_named_within_the_time() -> None:
    def function() -> str:
        if os.environ["RANK"] == "0":
            return ""
        with pytest.raises(GroupError) as caught:
            process_group(timeout=0.3, device="cpu").__enter__()
        return str(caught.value)

    assert "No store answers at 127.0.0.1:" in start(function, launcher="environment")[1]


def test_a_rank_that_gave_up_is_missing_for_those_who_come_later_and_can_try_again() -> None:
    def function() -> tuple[str, int]:
        time.sleep(0 if get_rank() else 1.0)
        with pytest.raises(GroupError) as caught:
            process_group(timeout=0.3, device="cpu").__enter__()
        time.sleep(2.0 if get_rank() else 0)
        with process_group(timeout=20, device="cpu"):
            return str(caught.value), add_up()

    for rank, (text, total) in enumerate(start(function)):
        assert f"rank {1 - rank} did not join" in text
        assert total == 1


@each_launcher
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_try_again_and_again_meet_although_one_comes_late(
    launcher: str, late: int
) -> None:
    def function() -> int:
        time.sleep(2.5 if get_rank() == late else 0)
        for _ in range(15):
            with contextlib.suppress(GroupError, PeerError), process_group(timeout=1, device="cpu"):
                return add_up()
        raise AssertionError("they have not met")

    assert start(function, launcher=launcher) == [1, 1]


def test_different_secrets_are_refused() -> None:
    def function() -> str:
        os.environ["DDPKIT_SECRET"] = f"secret of rank {os.environ['RANK']}"
        with pytest.raises(GroupError) as caught:
            process_group(timeout=5, device="cpu").__enter__()
        return str(caught.value)

    texts = start(function, launcher="environment")
    assert any("is not signed by a rank of this launch" in text for text in texts)


def test_the_same_secret_is_accepted() -> None:
    def function() -> int:
        os.environ["DDPKIT_SECRET"] = "shared"
        with process_group(timeout=20, device="cpu"):
            return broadcast_value(get_rank() + 4)

    assert start(function, launcher="environment") == [4, 4]


# ------------------------------------------------------------------- an exception in the block


@each_launcher
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_reaches_the_peer_and_entering_again_works(
    launcher: str, failing: int
) -> None:
    def load_data() -> None:
        raise KeyError("x")

    def block() -> None:
        with process_group(timeout=20, device="cpu"):
            add_up()
            if get_rank() == failing:
                load_data()
            barrier()

    def function() -> tuple[str, str, int, int]:
        try:
            block()
        except KeyError as error:
            found = "KeyError", str(error), failing
        except PeerError as error:
            found = "PeerError", error.traceback, error.rank
        assert not dist.is_initialized()
        with process_group(timeout=20, device="cpu"):
            return *found, add_up()

    results = start(function, launcher=launcher)
    assert results[failing] == ("KeyError", "'x'", failing, 1)
    kind, text, rank, total = results[1 - failing]
    assert (kind, rank, total) == ("PeerError", failing, 1)
    assert "in load_data" in text
    assert "KeyError: 'x'" in text


def test_an_exception_leaves_the_block_while_the_peer_is_in_a_collective() -> None:
    def function() -> tuple[str, float]:
        started = time.monotonic()
        kind = "nothing"
        try:
            with process_group(timeout=20, device="cpu"):
                add_up()
                if get_rank() == 1:
                    time.sleep(0.2)
                    raise KeyError("x")
                add_up()
        except (KeyError, RuntimeError) as error:
            kind = type(error).__name__
        return kind, time.monotonic() - started

    (first, first_time), (second, second_time) = start(function)
    assert (first, second) == ("RuntimeError", "KeyError")
    assert max(first_time, second_time) < 10


def test_a_rank_that_has_left_in_order_is_the_cause_of_a_lost_connection() -> None:
    def function() -> str:
        try:
            with process_group(timeout=20, device="cpu"):
                for step in range(4):
                    if step == 2 and get_rank() == 1:
                        break
                    add_up()
        except RuntimeError as error:
            return str(error.__cause__)
        return "no error"

    lost, left = start(function, launcher="environment")
    assert left == "no error"
    assert lost.startswith("[rank 0/2] rank 1 had left the group in order")
    assert "Look for a break" in lost


# --------------------------------------------------------------------- a group of the user's own


def test_agreement_works_in_a_group_that_the_user_has_opened() -> None:
    def function() -> tuple[int, int, bool, int]:
        dist.init_process_group("gloo")
        value = broadcast_value(get_rank() + 7)
        barrier(timeout=20)
        with process_group() as world:
            size = world.world_size
        still_open = dist.is_initialized()
        total = add_up()
        dist.destroy_process_group()
        return value, size, still_open, total

    assert start(function) == [(7, 2, True, 1)] * 2


def test_a_legacy_function_that_names_no_backend_gives_its_values_under_a_launcher() -> None:
    def function() -> tuple[list[int], str]:
        hook = sys.excepthook

        @distributed(init_group=False)
        def legacy() -> int:
            dist.init_process_group()
            return dist.get_rank()

        values = legacy.run_all()
        with process_group("gloo", device="cpu") as world:
            backend = world.backend
        dist.destroy_process_group()
        sys.excepthook = hook
        return values, backend

    for values, backend in start(function, launcher="environment"):
        assert values == [0, 1]
        assert "cpu:gloo" in backend


def test_a_second_group_of_the_users_own_has_a_channel_of_its_own() -> None:
    def function() -> list[int]:
        values = []
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False)
        for start_value in (1, 2):
            # Keys of its own for each: over the same keys, torch reads the addresses of the group
            # before (a second plain init_process_group fails one time in five, with torch alone).
            keys = dist.PrefixStore(str(start_value), store)
            dist.init_process_group("gloo", store=keys, rank=get_rank(), world_size=2)
            values.append(broadcast_value(start_value + get_rank()))
            dist.destroy_process_group()
        return values

    assert start(function) == [[1, 2], [1, 2]]


def test_a_legacy_group_by_file_works_too(tmp_path: Any) -> None:
    file = tmp_path / "rendezvous"

    def function() -> int:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
        value: int = broadcast_value(rank + 7)
        dist.destroy_process_group()
        return value

    assert start(function) == [7, 7]


def test_a_rank_that_leaves_at_once_waits_for_one_that_is_still_opening() -> None:
    def function() -> float:
        opened = time.monotonic()
        connect = dist.init_process_group

        def connect_late(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.5)
            connect(*args, **kwargs)
            time.sleep(0.5)

        with pytest.MonkeyPatch.context() as patch:
            if get_rank() == 1:
                patch.setattr(dist, "init_process_group", connect_late)
            with process_group():
                pass
        return time.monotonic() - opened

    assert min(run_ranks(function, init_group=False)) >= 1.0


def test_the_rank_that_serves_the_store_stays_until_the_others_know_why_it_goes() -> None:
    def function() -> str:
        try:
            with process_group():
                if get_rank() == 0:
                    raise ValueError("the cause")
                time.sleep(0.5)  # rank 0 would be gone by now
                barrier()
        except (ValueError, PeerError) as error:
            return f"{type(error).__name__} {error}"
        return "nothing was raised"

    told = start(function, launcher="environment")
    assert told[0] == "ValueError the cause"
    assert told[1].startswith("PeerError")
    assert "the cause" in told[1]


# ---------------------------------------------------------------------- blocks that are never left

UNFINISHED = """
import contextlib, os, sys
from ddpkit import process_group

def losses():
    with process_group(device="cpu", timeout=20):
        yield from range(10)

def enter():
    if sys.argv[1] == "stack":
        kept = contextlib.ExitStack()
        kept.enter_context(process_group(device="cpu"))
    else:
        kept = losses()
        next(kept)
    return kept

kept = enter()
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if sys.argv[1] == "error":
    raise KeyError("the cause")
"""


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("stack", 0),
        ("generator", 0),
        pytest.param("fork", 0, marks=needs_fork),  # torch 2.6 hangs in it without ddpkit, too
        ("error", 1),
    ],
)
def test_a_program_ends_that_has_not_left_its_block(kind: str, status: int) -> None:
    command = [sys.executable, "-W", "error", "-c", UNFINISHED, kind]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert finished.returncode == status, finished.stderr
    assert ("the cause" in finished.stderr) if status else (finished.stderr == "")
