"""Ranks whose launcher tells no port, and which nobody watches: how they meet, and how they end."""

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import barrier, broadcast_value, get_rank, group, process_group, rendezvous, search
from ddpkit.errors import ConfigError, GroupError, PeerError, WorkerError
from ddpkit.network import Network
from ddpkit.testing import run_ranks
from ddpkit.topology import Topology, read_topology
from tests.forking import needs_fork
from tests.multiproc.hand_set import WITHOUT_A_PORT, with_variables_of

LONG = 120.0  # a time-out that nothing here may wait for
PATIENCE = 30.0


def start(
    function: Callable[[], Any],
    world_size: int = 2,
    *,
    launcher: str = "slurm",
    launches: int = 1,
    **options: Any,
) -> list[Any]:
    rank = with_variables_of(launcher, function, launches=launches)
    return run_ranks(rank, world_size, init_group=False, **options)


def add_up(number: int) -> int:
    value = torch.tensor([number])
    dist.all_reduce(value)
    return int(value)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Let every launch look at the same few ports, which are free."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        free = tuple(listener.getsockname()[1] for listener in held)
    monkeypatch.setattr(search, "candidate_ports", lambda job, uid: free)
    return free


# --------------------------------------------------------------------------------------- meeting


@pytest.mark.parametrize("launcher", WITHOUT_A_PORT)
def test_ranks_meet_without_a_port(launcher: str) -> None:
    def function() -> list[Any]:
        seen: list[Any] = []
        for _ in range(2):  # the second time at the store that is there
            with process_group(timeout=20, device="cpu") as world:
                seen += [world.source, world.rank, world.world_size, add_up(world.rank)]
        return seen

    expected = [[launcher, rank, 3, 3] * 2 for rank in range(3)]
    assert start(function, 3, launcher=launcher) == expected


def test_a_program_that_holds_a_port_is_passed_over(ports: tuple[int, ...]) -> None:
    def function() -> int:
        with process_group(timeout=LONG, device="cpu") as world:
            return add_up(world.rank)

    with socket.create_server(("127.0.0.1", ports[0])):
        started = time.monotonic()
        assert start(function) == [1, 1]
    assert time.monotonic() - started < PATIENCE


@pytest.mark.usefixtures("ports")
def test_two_launches_at_the_same_ports_do_not_meet() -> None:
    def function() -> int:
        step = int(os.environ["SLURM_STEP_ID"])
        with process_group(timeout=LONG, device="cpu") as world:
            total = add_up(100 * step + world.rank)
            barrier()
            time.sleep(0.3)  # both are there at the same time
        return total

    started = time.monotonic()
    assert start(function, 4, launches=2) == [1, 1, 201, 201]
    assert time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_be_late(late: int) -> None:
    def function() -> int:
        if int(os.environ["SLURM_PROCID"]) == late:
            time.sleep(1.0)
        with process_group(timeout=LONG, device="cpu") as world:
            return add_up(world.rank)

    assert start(function) == [1, 1]


def test_a_port_of_the_users_own_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def function() -> tuple[int | None, int]:
        os.environ["MASTER_PORT"] = str(port)
        with process_group(timeout=20, device="cpu") as world:
            return world.master_port, add_up(world.rank)

    assert start(function) == [(port, 1)] * 2


# ----------------------------------------------------------------------------------- missing ranks


@needs_fork
def test_a_missing_rank_is_named_within_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_AFTER", 0.2)

    def function() -> tuple[str, float]:
        if os.environ["SLURM_PROCID"] == "2":
            time.sleep(2.5)  # a rank that has ended is another story
            return "", 0.0
        lines = tmp_path / f"log-{os.environ['SLURM_PROCID']}"
        logging.getLogger("ddpkit").addHandler(logging.FileHandler(lines))
        started = time.monotonic()
        with pytest.raises(GroupError) as caught:
            process_group(timeout=1.0, device="cpu").__enter__()
        return str(caught.value), time.monotonic() - started

    results = start(function, 3)
    for rank, (text, seconds) in enumerate(results[:2]):
        assert f"[rank {rank}/3] rank 2 did not join within 1 s at 127.0.0.1:" in text
        assert "read from: slurm" in text
        assert seconds < 10
        waiting = f"[rank {rank}/3] waiting for rank 2 of 3 at 127.0.0.1:"
        assert waiting in (tmp_path / f"log-{rank}").read_text()


@needs_fork
def test_a_rank_that_finds_no_store_says_what_it_has_looked_for(ports: tuple[int, ...]) -> None:
    def function() -> str:
        if os.environ["SLURM_PROCID"] == "0":
            return ""
        with pytest.raises(GroupError) as caught:
            process_group(timeout=0.5, device="cpu").__enter__()
        return str(caught.value)

    with socket.create_server(("127.0.0.1", ports[0])):
        text = start(function)[1]
    assert text.startswith("[rank 1/2] Rank 0 of slurm ")
    assert "serves no store on 127.0.0.1 after " in text
    assert f"port {ports[0]}: accepts connections and stays silent" in text
    assert f"ports {ports[1]}, {ports[2]}: nobody listens" in text


@needs_fork
def test_a_rank_0_without_a_port_says_so(ports: tuple[int, ...]) -> None:
    def function() -> str:
        if os.environ["SLURM_PROCID"] == "1":
            return ""
        with pytest.raises(GroupError) as caught:
            process_group(timeout=20, device="cpu").__enter__()
        return str(caught.value)

    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        text = start(function)[0]
    assert text.startswith("[rank 0/2] The store of slurm ")
    assert f"other processes hold all of its ports {', '.join(map(str, ports))}" in text


def test_an_interface_that_does_not_exist_is_refused_on_all_ranks() -> None:
    def function() -> str:
        os.environ["GLOO_SOCKET_IFNAME"] = "^lo,docker"
        # One rank may hear it from the other before it has looked itself.
        with pytest.raises((ConfigError, PeerError)) as caught:
            process_group(timeout=20, device="cpu").__enter__()
        return str(caught.value)

    for text in start(function):
        assert "GLOO_SOCKET_IFNAME='^lo,docker' was given" in text


def test_no_host_name_has_to_be_right_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")

    def function() -> int:
        with process_group(timeout=20, device="cpu") as world:
            return add_up(world.rank) + broadcast_value(world.rank)

    assert start(function) == [1, 1]


# --------------------------------------------------------------------------- several virtual nodes


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Start ranks that take this machine for two nodes, with networks of their own or with one."""

    def start_there(function: Callable[[], Any], *, apart: bool) -> list[Any]:

        def place(environ: Mapping[str, str], pid: int) -> Topology:
            if "SLURM_PROCID" not in environ:
                return read_topology(environ, pid)
            rank = int(environ["SLURM_PROCID"])
            job = f"slurm {environ['SLURM_JOB_ID']}"
            return Topology(rank, 2, 0, 1, rank, 2, "localhost", None, "slurm", job)

        monkeypatch.setattr(group, "read_topology", place)
        if apart:
            monkeypatch.setattr(rendezvous, "this_network", lambda: os.environ["SLURM_PROCID"])
        return start(function)

    return start_there


def test_virtual_nodes_of_one_machine_use_loopback(two_nodes: Callable[..., list[Any]]) -> None:
    def function() -> tuple[str, int]:
        with process_group(timeout=20, device="cpu") as world:
            return os.environ["GLOO_SOCKET_IFNAME"], add_up(world.rank)

    assert two_nodes(function, apart=False) == [("lo", 1)] * 2


def network_of(host: str, route: str | None, interfaces: Mapping[str, Sequence[str]]) -> Network:
    return Network(host, "127.0.1.1", route, route, interfaces)


def test_the_interface_that_leads_to_rank_0_is_used_and_the_variable_restored(
    two_nodes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0's host does not know its own address; with two interfaces it needs to be told.
    interfaces = {"lo": ["127.0.0.1", "10.0.0.1"], "eth1": ["10.0.1.1"]}

    def look(master: str) -> Network:
        route = "127.0.0.1" if os.environ["SLURM_PROCID"] == "0" else "10.0.0.1"
        return network_of("node", route, interfaces)

    monkeypatch.setattr(rendezvous, "look_at_network", look)

    def function() -> tuple[str, int, bool]:
        with process_group(timeout=20, device="cpu") as world:
            seen = os.environ["GLOO_SOCKET_IFNAME"], add_up(world.rank)
        return *seen, "GLOO_SOCKET_IFNAME" in os.environ

    assert two_nodes(function, apart=True) == [("lo", 1, False)] * 2


@needs_fork
def test_where_one_rank_cannot_tell_its_interface_all_ranks_raise(
    two_nodes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(master: str) -> Network:
        if os.environ["SLURM_PROCID"] == "0":
            return Network("node1", "10.0.0.1", "10.0.0.1", "10.0.0.1", {})
        return network_of("node2", "10.0.0.9", {"lo": ["127.0.0.1"], "eth1": ["10.0.0.2"]})

    monkeypatch.setattr(rendezvous, "look_at_network", look)

    def function() -> str:
        with pytest.raises((ConfigError, PeerError)) as caught:
            process_group(timeout=LONG, device="cpu").__enter__()
        return f"{caught.typename} {caught.value}"

    started = time.monotonic()
    first, second = two_nodes(function, apart=True)
    assert time.monotonic() - started < PATIENCE
    assert second.startswith("ConfigError ")
    assert "eth1 (10.0.0.2)" in second
    assert first.startswith("PeerError ")
    assert "eth1 (10.0.0.2)" in first


# -------------------------------------------------------------------------------------- sudden ends


def let_die(
    tmp_path: Path,
    dying: int,
    number: int,
    survive: Callable[[], object],
    launcher: str = "slurm",
) -> str:
    """Kill a rank in an open group, and return what the other one has logged and raised.

    The parent does not help: there is none that watches under these launchers.
    """

    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with process_group(timeout=LONG, device="cpu") as world:
            log = logging.FileHandler(tmp_path / f"log-{world.rank}")
            logging.getLogger("ddpkit").addHandler(log)
            add_up(1)
            if world.rank == dying:
                time.sleep(0.3)  # the other one is in its call
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            survive()

    def rank() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  # whatever it is, the test wants to see it
            (tmp_path / "raised").write_text(f"{type(error).__name__}: {error}")

    started = time.monotonic()
    with pytest.raises(WorkerError, match=signal.Signals(number).name):
        start(rank, launcher=launcher, shutdown_grace=PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    return (tmp_path / f"log-{1 - dying}").read_text() + (tmp_path / "raised").read_text()


@pytest.mark.parametrize("launcher", WITHOUT_A_PORT)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_in_a_collective_ends_the_others_with_the_cause(
    dying: int, launcher: str, tmp_path: Path
) -> None:
    seen = let_die(tmp_path, dying, signal.SIGKILL, lambda: add_up(1), launcher)
    assert f"[rank {1 - dying}/2]" in seen
    assert f"Rank {dying} (process " in seen
    assert "has ended" in seen
    assert "RuntimeError: " in seen  # what torch has raised


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_stopped_by_the_scheduler_ends_the_others(
    dying: int, tmp_path: Path
) -> None:
    seen = let_die(tmp_path, dying, signal.SIGTERM, lambda: add_up(1))
    assert f"Rank {dying} (process " in seen


@pytest.mark.parametrize(
    ("dying", "told"), [(0, "GroupError: .* store .*has gone"), (1, "PeerError: .*Rank 1")]
)
def test_a_rank_that_dies_ends_an_agreement(dying: int, told: str, tmp_path: Path) -> None:
    seen = let_die(tmp_path, dying, signal.SIGKILL, barrier)
    assert re.search(told, seen)


def test_a_rank_that_dies_when_it_had_joined_ends_the_rendezvous(tmp_path: Path) -> None:
    def die_here(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank = os.environ["SLURM_PROCID"]
        if rank == "1":
            rendezvous.await_members = die_here
        while rank == "2" and not (tmp_path / "seen").exists():
            time.sleep(0.01)  # so that rank 0 waits
        if rank == "2":
            return
        try:
            process_group(timeout=LONG, device="cpu").__enter__()
        except PeerError as error:
            (tmp_path / "seen").write_text(str(error))

    with pytest.raises(WorkerError, match="SIGKILL"):
        start(function, 3, shutdown_grace=PATIENCE)
    assert "Rank 1 (process " in (tmp_path / "seen").read_text()


def test_after_a_sudden_end_of_rank_0_the_group_is_closed(tmp_path: Path) -> None:
    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with process_group(timeout=LONG, device="cpu"):
                add_up(1)
                if get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                add_up(1)
        except RuntimeError:
            (tmp_path / "seen").write_text(f"open: {dist.is_initialized()}")

    with pytest.raises(WorkerError, match="SIGKILL"):
        start(function, shutdown_grace=PATIENCE)
    assert (tmp_path / "seen").read_text() == "open: False"
