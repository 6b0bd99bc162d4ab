import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from ddpkit import search
from ddpkit import store as stores
from ddpkit.errors import GroupError
from ddpkit.search import Search, candidate_ports, choose_launcher, describe_found
from ddpkit.topology import Topology

Servers = dict[tuple[str, int], TCPStore]

SECOND_OF_TWO = Topology(1, 2, 1, 2, master_addr="127.0.0.1", source="slurm", job="slurm 12.0")


# ------------------------------------------------------------------------------ pure decisions


@pytest.mark.parametrize("job", ["slurm 12.0", "openmpi 3781230593.1", ""])
@pytest.mark.parametrize("uid", [0, 1000, 2**32 - 2])
def test_the_candidates_are_distinct_and_no_ports_of_others(job: str, uid: int) -> None:
    ports = candidate_ports(job, uid)
    assert len(set(ports)) == len(ports) == 8
    assert 15_000 <= min(ports) <= max(ports) < 30_000  # Linux gives connections 32768 and above
    assert not {29_400, 29_500} & set(ports)


def test_the_candidates_are_the_same_on_every_machine() -> None:
    assert candidate_ports("slurm 12.0", 1000)[:3] == (17136, 23474, 26520)


def test_other_launches_and_other_users_begin_at_other_ports() -> None:
    firsts = [candidate_ports(f"slurm {job}.0", uid)[0] for job in range(50) for uid in range(4)]
    assert len(set(firsts)) > 190  # of 200, out of 15000 ports


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({7: "nobody listens"}, "port 7: nobody listens"),
        ({7: "x", 8: "y", 9: "x"}, "ports 7, 9: x; port 8: y"),
    ],
)
def test_what_was_found_in_one_line(found: dict[int, str], text: str) -> None:
    assert describe_found(found) == text


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["hydra_pmi_proxy", "mpiexec.hydra", "bash"], 0),
        (["sh", "python", "hydra_pmi_proxy", "mpiexec.hydra"], 2),
        (["mpiexec", "bash", "mpirun"], 0),
        (["slurmstepd", "slurmd"], 0),
        (["bash", "sshd"], 0),  # not a launcher that is known: the parent
    ],
)
def test_the_launcher_among_the_ancestors(names: Sequence[str], chosen: int) -> None:
    ancestors = [(f"process {number}", name) for number, name in enumerate(names)]
    assert choose_launcher(ancestors) == f"process {chosen}"


def test_all_ranks_of_a_launch_make_the_same_search() -> None:
    first = Search.for_place(replace(SECOND_OF_TWO, rank=0, local_rank=0))
    second = Search.for_place(SECOND_OF_TWO)
    assert (first.name, first.host, first.ports) == (second.name, second.host, second.ports)
    assert second.who == "[rank 1/2]"
    assert second.name == f"slurm 12.0 of user {os.getuid()}"


def test_a_launch_without_a_name_is_named_by_the_process_that_made_it() -> None:
    name = Search.for_place(replace(SECOND_OF_TWO, source="mpich", job=None)).name
    assert name.startswith("mpich process ")
    assert " since " in name


@pytest.mark.parametrize(
    ("num_nodes", "master", "host"),
    [
        (1, "127.0.0.1", "127.0.0.1"),
        (1, "node7", "127.0.0.1"),  # its name may be known to nobody
        (2, "node7", "node7"),
        (2, "fd00::7", "fd00::7"),
    ],
)
def test_where_the_store_is_looked_for(num_nodes: int, master: str, host: str) -> None:
    place = replace(SECOND_OF_TWO, num_nodes=num_nodes, master_addr=master)
    assert Search.for_place(place).host == host


# --------------------------------------------------------------------------------------- effects


@pytest.fixture
def ports() -> tuple[int, ...]:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return tuple(listener.getsockname()[1] for listener in free)


def search_for(name: str, ports: tuple[int, ...]) -> Search:
    return Search("[rank 1/2]", name, "127.0.0.1", ports)


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """Hold a port as a program does that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        yield listener


@contextmanager
def answering(port: int, answer: bytes) -> Iterator[None]:
    """Hold a port as a program does that gives everybody the same answer."""

    def answer_all() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(100)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=answer_all)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_store_is_at_the_first_port_that_is_free(ports: tuple[int, ...]) -> None:
    servers: Servers = {}
    with listening(ports[0]):
        search_for("mine", ports).serve(servers, 10)
        assert list(servers) == [("127.0.0.1", ports[1])]
        port, client = search_for("mine", ports).find(20)
    assert port == ports[1]
    client.set("key", "value")
    assert servers["127.0.0.1", port].get("key") == b"value"


def test_a_second_world_of_the_launch_uses_the_same_store(ports: tuple[int, ...]) -> None:
    servers: Servers = {}
    with listening(ports[0]):
        search_for("mine", ports).serve(servers, 10)
    search_for("mine", ports).serve(servers, 10)  # although the first port is free now
    assert list(servers) == [("127.0.0.1", ports[1])]


def test_two_launches_with_the_same_ports_do_not_meet(ports: tuple[int, ...]) -> None:
    mine: Servers = {}
    yours: Servers = {}
    search_for("mine", ports).serve(mine, 10)
    search_for("yours", ports).serve(yours, 10)
    assert search_for("mine", ports).find(20)[0] == ports[0]
    assert search_for("yours", ports).find(20)[0] == ports[1]


def test_a_store_without_a_name_is_passed_over(ports: tuple[int, ...]) -> None:
    other = stores.serve(stores.listen(port=ports[0]), 10)
    before = other.num_keys()
    servers: Servers = {}
    search_for("mine", ports).serve(servers, 10)
    assert search_for("mine", ports).find(20)[0] == ports[1]
    assert other.num_keys() == before  # nothing was written to it


def test_a_silent_program_costs_a_moment_and_leaves_nothing(ports: tuple[int, ...]) -> None:
    servers: Servers = {}
    before = {thread.ident for thread in threading.enumerate()}
    with listening(ports[0]):
        search_for("mine", ports).serve(servers, 10)
        started = time.monotonic()
        port, _ = search_for("mine", ports).find(60)
        assert time.monotonic() - started < 10
        assert port == ports[1]
        await_end_of_threads(before)  # while the program is still there


def await_end_of_threads(before: set[int | None]) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if {thread.ident for thread in threading.enumerate()} <= before:
            return
        time.sleep(0.02)
    pytest.fail(f"these threads are left: {threading.enumerate()}")


def test_a_program_with_another_protocol_is_passed_over(ports: tuple[int, ...]) -> None:
    servers: Servers = {}
    with answering(ports[0], b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\n"):
        search_for("mine", ports).serve(servers, 10)
        started = time.monotonic()
        assert search_for("mine", ports).find(60)[0] == ports[1]
        assert time.monotonic() - started < 10


def test_a_server_that_comes_later_is_found(ports: tuple[int, ...]) -> None:
    servers: Servers = {}
    timer = threading.Timer(0.5, search_for("mine", ports).serve, [servers, 10])
    timer.start()
    assert search_for("mine", ports).find(20)[0] == ports[0]
    timer.join()


def test_the_error_says_where_was_looked_and_what_was_there(ports: tuple[int, ...]) -> None:
    yours: Servers = {}
    search_for("yours", ports[:1]).serve(yours, 10)
    started = time.monotonic()
    with listening(ports[1]), pytest.raises(GroupError) as caught:
        search_for("mine", ports).find(0.5)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert text.startswith("[rank 1/2] Rank 0 of mine serves no store on 127.0.0.1 after ")
    assert f"port {ports[0]}: the store of yours" in text
    assert f"port {ports[1]}: accepts connections and stays silent" in text
    assert f"port {ports[2]}: nobody listens" in text
    assert "MASTER_PORT" in text


def test_a_host_that_does_not_exist_is_an_error_within_the_time() -> None:
    nowhere = Search("[rank 1/2]", "mine", "no.such.host.invalid", (15_001,))
    with pytest.raises(GroupError, match=r"no\.such\.host\.invalid after .*cannot be reached"):
        nowhere.find(0.3)


def test_all_ports_are_taken(ports: tuple[int, ...]) -> None:
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(listening(port))
        with pytest.raises(GroupError, match=rf"{ports[0]}, {ports[1]}, {ports[2]}.*MASTER_PORT"):
            search_for("mine", ports).serve({}, 10)


def test_a_long_wait_says_once_what_it_looks_for(
    ports: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(search, "_NOTICE_AFTER", 0.1)
    with pytest.raises(GroupError):
        search_for("mine", ports).find(0.6)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("[rank 1/2] waiting for rank 0 of mine to serve its store on 127.0.0.1")
    assert "nobody listens" in line
