import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import group
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import (
    World,
    choose_backend,
    choose_device,
    get_device,
    get_local_rank,
    get_rank,
    get_world_size,
    is_rank0,
    process_group,
    require_group,
    to_seconds,
)
from ddpkit.topology import Topology

ALONE = Topology()
SECOND_OF_FOUR = Topology(1, 4, 1, 4, source="ddpkit")
BOUND_BY_SCHEDULER = Topology(1, 4, 1, 4, source="torchrun")
SECOND_NODE = Topology(5, 8, 1, 4, 1, 2, source="torchrun")


# -------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("requested", "accelerator", "count", "topology", "expected"),
    [
        (None, None, 0, ALONE, "cpu"),
        (None, None, 0, SECOND_OF_FOUR, "cpu"),
        (None, "cuda", 4, ALONE, "cuda:0"),
        (None, "cuda", 1, ALONE, "cuda:0"),
        (None, "cuda", 4, SECOND_OF_FOUR, "cuda:1"),
        (None, "cuda", 4, SECOND_NODE, "cuda:1"),
        (None, "xpu", 2, SECOND_OF_FOUR, "xpu:1"),
        (None, "cuda", 1, BOUND_BY_SCHEDULER, "cuda:0"),  # one visible device for each rank
        (None, "cuda", 8, replace(SECOND_NODE, local_rank=0), "cuda:0"),  # --virtual-local-rank
        ("cpu", None, 0, SECOND_OF_FOUR, "cpu"),
        ("cpu", "cuda", 1, SECOND_OF_FOUR, "cpu"),
        ("meta", None, 0, ALONE, "meta"),
        ("cuda", "cuda", 4, SECOND_OF_FOUR, "cuda:1"),
        ("cuda", "cuda", 4, ALONE, "cuda:0"),
        ("cuda:3", "cuda", 4, SECOND_OF_FOUR, "cuda:3"),
        (torch.device("cuda", 2), "cuda", 4, ALONE, "cuda:2"),
    ],
)
def test_choice_of_device(
    requested: str | torch.device | None,
    accelerator: str | None,
    count: int,
    topology: Topology,
    expected: str,
) -> None:
    assert choose_device(requested, accelerator, count, topology) == torch.device(expected)


@pytest.mark.parametrize("topology", [SECOND_OF_FOUR, replace(SECOND_NODE, local_rank=3)])
@pytest.mark.parametrize("requested", [None, "cuda"])
def test_more_ranks_than_devices(requested: str | None, topology: Topology) -> None:
    devices = topology.local_rank  # one too few
    with pytest.raises(ConfigError, match=rf"{topology.local_rank} of 4 has no cuda.*{devices}"):
        choose_device(requested, "cuda", devices, topology)


@pytest.mark.parametrize(
    ("requested", "accelerator", "count", "seen"),
    [
        ("cuda", None, 0, "only the CPU"),
        ("cuda:0", None, 0, "only the CPU"),
        ("cuda:4", "cuda", 4, "4 x cuda"),
        ("xpu", "cuda", 4, "4 x cuda"),
    ],
)
def test_a_device_that_does_not_exist(
    requested: str, accelerator: str | None, count: int, seen: str
) -> None:
    with pytest.raises(ConfigError, match=f"device='{requested}' was given.* sees {seen}"):
        choose_device(requested, accelerator, count, ALONE)


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda:1", "cpu:gloo,cuda:nccl"),
        (None, "xpu:0", "cpu:gloo,xpu:xccl"),
        ("mpi", "cpu", "mpi"),
        ("nccl", "cuda:0", "nccl"),
    ],
)
def test_choice_of_backend(requested: str | None, device: str, expected: str) -> None:
    assert choose_backend(requested, torch.device(device)) == expected


# -------------------------------------------------------------------------------- small helpers


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (3, 3), (0.5, 0.5), (timedelta(minutes=2), 120.0)]
)
def test_seconds(timeout: float | timedelta | None, seconds: float | None) -> None:
    assert to_seconds(timeout) == seconds


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), timedelta(0)])
def test_a_time_that_is_not_positive(timeout: float | timedelta) -> None:
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        to_seconds(timeout)


# --------------------------------------------------------------------------- without any group


def test_a_plain_process_is_rank_0_of_1() -> None:
    assert (get_rank(), get_world_size(), get_local_rank(), is_rank0()) == (0, 1, 0, True)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.usefixtures("second_of_two")
def test_under_a_launcher_the_variables_count_before_a_group_is_open() -> None:
    assert (get_rank(), get_world_size(), get_local_rank(), is_rank0()) == (1, 2, 1, False)


def test_device_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "accelerator_type", lambda: None)
    assert get_device() == torch.device("cpu")


def test_a_world_of_one_needs_no_group() -> None:
    assert not require_group("barrier")


@pytest.mark.usefixtures("second_of_two")
def test_several_ranks_without_a_group_are_told_what_to_do() -> None:
    with pytest.raises(GroupError, match=r"barrier\(\) .* rank 1 of 2 .*`with process_group\(\):`"):
        require_group("barrier")


# ---------------------------------------------------------------------------- a world of one


def test_a_world_of_one() -> None:
    with process_group(device="cpu") as world:
        assert world == World(device=torch.device("cpu"), backend="gloo")
        assert (get_rank(), get_world_size(), get_local_rank(), get_device()) == (
            (0, 1, 0, torch.device("cpu"))
        )
    assert not dist.is_initialized()


def test_real_collectives_work_in_a_world_of_one() -> None:
    with process_group(device="cpu"):
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.barrier()
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, "x")
    assert torch.equal(value, torch.ones(2))
    assert gathered == ["x"]


def test_it_is_a_decorator_too() -> None:
    @process_group(device="cpu")
    def function(x: int) -> tuple[int, bool]:
        return x + 1, dist.is_initialized()

    assert function(1) == (2, True)
    assert function(2) == (3, True)
    assert not dist.is_initialized()


def test_it_can_be_opened_again_and_again() -> None:
    for _ in range(5):
        with process_group(device="cpu"):
            dist.barrier()


def test_environment_and_hook_are_as_before() -> None:
    environment, hook = dict(os.environ), sys.excepthook
    with process_group(device="cpu"):
        pass
    assert dict(os.environ) == environment
    assert sys.excepthook is hook


def test_an_interface_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group(device="cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_global_random_state_is_as_before() -> None:
    before = torch.get_rng_state()
    with process_group(device="cpu"):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_an_exception_leaves_the_block_and_the_group_is_closed() -> None:
    error = KeyError("x")
    hook = sys.excepthook
    with pytest.raises(KeyError) as caught, process_group(device="cpu"):
        raise error
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_block_that_destroys_the_group_itself() -> None:
    with process_group(device="cpu"):
        dist.destroy_process_group()
    with process_group(device="cpu"):
        dist.barrier()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "glooo"}, "backend='glooo' was given"),
        ({"device": "bogus"}, "device='bogus' was given"),
        ({"timeout": float("inf")}, "timeout=inf was given"),
    ],
)
def test_wrong_options_open_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        process_group(**options).__enter__()
    assert not dist.is_initialized()


def test_a_wrong_time_limit_opens_nothing() -> None:
    with pytest.raises(ConfigError), process_group(timeout=0):
        pass
    assert not dist.is_initialized()


def test_a_group_that_cannot_be_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match="no such backend"), process_group(device="cpu"):
        pass
    assert dict(os.environ) == environment
    assert group._state.opened is None


def test_a_world_of_one_by_hand_set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
    ):
        monkeypatch.setenv(name, value)
    for _ in range(2):  # the second time over the store that is kept
        with process_group(device="cpu", timeout=20) as world:
            assert (world.source, world.world_size) == ("environment", 1)
            dist.barrier()
    del group._state.servers["127.0.0.1", port]


# -------------------------------------------------------------------------- joining an open group


@pytest.fixture
def open_group() -> Iterator[World]:
    with process_group(device="cpu") as world:
        yield world


def test_joining_gives_the_same_world_and_leaves_the_group_open(open_group: World) -> None:
    for backend in (None, "gloo"):
        with process_group(backend, device="cpu") as inner:
            assert inner == open_group
        assert dist.is_initialized()


def test_an_exception_in_a_joined_block_leaves_the_group_open(open_group: World) -> None:
    with pytest.raises(KeyError), process_group():
        raise KeyError("x")
    assert dist.is_initialized()
    dist.barrier()


@pytest.mark.usefixtures("open_group")
def test_another_backend_contradicts() -> None:
    with pytest.raises(GroupError, match=r"backend='nccl' was given, but .* already open"):
        process_group("nccl").__enter__()


@pytest.mark.usefixtures("open_group")
def test_another_device_contradicts() -> None:
    with pytest.raises(GroupError, match=r"device='cuda' was given, but the open .* uses cpu"):
        process_group(device="cuda").__enter__()


@pytest.fixture
def users_group() -> Iterator[None]:
    store = dist.HashStore()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.usefixtures("users_group")
def test_a_group_of_the_users_own_is_joined_and_stays_open() -> None:
    with process_group(device="cpu") as world:
        assert (world.source, world.world_size, world.device) == ("none", 1, torch.device("cpu"))
        assert "gloo" in world.backend
    assert dist.is_initialized()


@pytest.mark.usefixtures("users_group")
def test_another_backend_contradicts_a_group_of_the_users_own() -> None:
    with pytest.raises(GroupError, match="already open"):
        process_group("mpi").__enter__()


@pytest.mark.parametrize(
    ("requested", "actual", "same"),
    [
        ("gloo", "cpu:gloo", True),  # of init_process_group() without a name, on the CPU
        ("gloo", "cpu:gloo,cuda:gloo", True),
        ("gloo", "cpu:gloo,cuda:nccl", True),
        ("nccl", "cpu:gloo,cuda:nccl", True),
        ("cpu:gloo", "cpu:gloo,cuda:nccl", True),
        ("cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl", True),
        ("gloo", "cuda:nccl", False),
        ("nccl", "cpu:gloo", False),
        ("cuda:gloo", "cpu:gloo,cuda:nccl", False),
    ],
)
def test_what_counts_as_the_backend_that_is_open(requested: str, actual: str, same: bool) -> None:
    assert group._same_backend(requested, actual) is same
