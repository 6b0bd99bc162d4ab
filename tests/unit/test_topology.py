import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpkit.errors import ConfigError
from ddpkit.topology import Topology, is_loopback, read_topology

PID = 4711

RENDEZVOUS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
DDPKIT = {**RENDEZVOUS, **LOCAL, "DDPKIT_RANK_PID": str(PID)}
TORCHRUN = {**RENDEZVOUS, **LOCAL, "TORCHELASTIC_RUN_ID": "none"}
TWO_NODES = {
    **TORCHRUN,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
}
SLURM_ALLOCATION = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SLURM_STEP = {
    **SLURM_ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "3",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4"}


def read(environ: dict[str, str]) -> Topology:
    return read_topology(environ, PID)


# ------------------------------------------------------------------------------- nothing there


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},  # common in login profiles
        {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"},
        SLURM_ALLOCATION,
        {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
        {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", **HYDRA, "PMI_SIZE": "1"},
        {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"DDPKIT_LAUNCHER": "none"},
        {"DDPKIT_LAUNCHER": "None", **TORCHRUN},
        {"DDPKIT_LAUNCHER": "none", **RENDEZVOUS},
        {"DDPKIT_LAUNCHER": "none", "RANK": "0"},
        {"DDPKIT_LAUNCHER": "none", **SLURM_STEP},
        {"DDPKIT_LAUNCHER": "none", **OPEN_MPI},
    ],
    ids=lambda environ: ",".join(environ) or "nothing",
)
def test_no_launch(environ: dict[str, str]) -> None:
    assert read(environ) == Topology()
    assert read(environ).source == "none"


# -------------------------------------------------------------------------- ddpkit's own mark


def test_the_mark_of_this_process() -> None:
    assert read(DDPKIT) == Topology(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "ddpkit")


def test_a_helper_that_inherits_the_mark_is_not_the_rank() -> None:
    assert read({**DDPKIT, "DDPKIT_RANK_PID": str(PID + 1)}) == Topology()


def test_a_helper_of_a_rank_does_not_count_as_hand_set_either() -> None:
    inherited = {**DDPKIT, "DDPKIT_RANK_PID": "1", "OMPI_COMM_WORLD_RANK": "0", **SLURM_STEP}
    assert read(inherited) == Topology()


@pytest.mark.parametrize("other", [TWO_NODES, SLURM_STEP, OPEN_MPI, {"DDPKIT_LAUNCHER": "none"}])
def test_the_mark_precedes_everything(other: dict[str, str]) -> None:
    assert read({**other, **DDPKIT}).source == "ddpkit"


# ------------------------------------------------------------------------------------ torchrun


def test_torchrun_on_one_node() -> None:
    assert read(TORCHRUN) == Topology(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "torchrun")


def test_torchrun_on_two_nodes() -> None:
    assert read(TWO_NODES) == Topology(5, 8, 1, 4, 1, 2, "node0", 29500, "torchrun")


def test_torchrun_with_different_numbers_of_ranks_per_node() -> None:
    uneven = {**TWO_NODES, "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3"}
    assert read(uneven).num_nodes == 3


def test_torchrun_without_the_number_of_nodes() -> None:
    environ = {name: value for name, value in TWO_NODES.items() if name != "GROUP_WORLD_SIZE"}
    assert read(environ).num_nodes == 2


def test_virtual_local_rank() -> None:
    # torchrun --virtual-local-rank: LOCAL_RANK is 0 on every rank.
    assert read({**TWO_NODES, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize("other", [SLURM_STEP, OPEN_MPI, HYDRA])
def test_torchrun_started_by_a_scheduler(other: dict[str, str]) -> None:
    assert read({**other, **TORCHRUN}).source == "torchrun"


@pytest.mark.parametrize("missing", [*RENDEZVOUS, *LOCAL])
def test_a_partial_set_of_torchrun_lists_what_is_set_and_what_is_missing(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"torchrun are.*missing are {missing}\.") as caught:
        read(environ)
    for name in {*RENDEZVOUS, *LOCAL} - {missing}:
        assert f"{name}={environ[name]!r}" in str(caught.value)


# ------------------------------------------------------------------------------------ hand-set


def test_hand_set_on_the_loopback_is_one_node() -> None:
    assert read(RENDEZVOUS) == Topology(1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "environment")


@pytest.mark.parametrize("host", ["localhost", "ip6-localhost", "::1", "127.0.0.1", "127.0.1.1"])
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)
    assert read({**RENDEZVOUS, "MASTER_ADDR": host}).num_nodes == 1


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "128.0.0.1", "fe80::1", "localhost.example"])
def test_names_that_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_hand_set_with_a_remote_address_is_one_rank_per_node() -> None:
    environ = {**RENDEZVOUS, "MASTER_ADDR": "node0"}
    assert read(environ) == Topology(1, 2, 0, 1, 1, 2, "node0", 29500, "environment")


def test_hand_set_with_local_variables() -> None:
    environ = {
        **RENDEZVOUS,
        "RANK": "6",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert read(environ) == Topology(6, 8, 2, 4, 1, 2, "node0", 29500, "environment")


def test_hand_set_names_the_node_where_it_can() -> None:
    environ = {**RENDEZVOUS, "MASTER_ADDR": "node0", "RANK": "0", "NODE_RANK": "1"}
    assert read(environ).node_rank == 1
    assert read({**environ, "GROUP_RANK": "0"}).node_rank == 0


def test_hand_set_local_rank_alone_does_not_tell_the_nodes_apart() -> None:
    environ = {**RENDEZVOUS, "MASTER_ADDR": "node0", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not"):
        read(environ)


def test_hand_set_local_rank_alone_is_enough_on_the_loopback() -> None:
    assert read({**RENDEZVOUS, "LOCAL_RANK": "0"}).local_rank == 0


def test_hand_set_precedes_a_slurm_step_and_mpi() -> None:
    assert read({**SLURM_STEP, **OPEN_MPI, **RENDEZVOUS}).source == "environment"


@pytest.mark.parametrize("missing", RENDEZVOUS)
def test_a_partial_hand_made_set_lists_what_is_set_and_what_is_missing(missing: str) -> None:
    environ = {name: value for name, value in RENDEZVOUS.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"missing are {missing}\.") as caught:
        read(environ)
    for name in environ:
        assert f"{name}={environ[name]!r}" in str(caught.value)


def test_a_local_rank_alone_is_a_partial_set() -> None:
    with pytest.raises(ConfigError, match="set are LOCAL_RANK='0'; missing are RANK, WORLD_SIZE"):
        read({"LOCAL_RANK": "0"})


# ---------------------------------------------------------------------------- wrong numbers


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["", "two", "1.0", "0x1"])
@pytest.mark.parametrize("environ", [DDPKIT, TORCHRUN, RENDEZVOUS], ids=["d", "t", "hand"])
def test_what_is_not_a_whole_number_is_named(environ: dict[str, str], name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={text!r} was given.*a whole number"):
        read({**environ, name: text})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, r"RANK=2 contradicts WORLD_SIZE=2 \(read from torchrun\)"),
        ({"RANK": "-1"}, "RANK=-1 contradicts WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 contradicts WORLD_SIZE=0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=1 contradicts LOCAL_WORLD_SIZE=0"),
        ({"GROUP_RANK": "1"}, "GROUP_RANK=1 contradicts the number of nodes=1"),
        # WORLD_SIZE counts nodes in the contract of some launchers.
        ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=2 contradicts WORLD_SIZE=1.*multiply"),
    ],
)
def test_contradictions(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**TORCHRUN, **changed})


# ------------------------------------------------------- launchers that are not supported yet


def test_a_slurm_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task 3 of 8 of a SLURM step.*DDPKIT_LAUNCHER=none"):
        read(SLURM_STEP)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (HYDRA, "PMI_RANK"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK"),
    ],
)
def test_mpi_is_refused(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='0' says that MPI started.*_LAUNCHER=none"):
        read(environ)


def test_mpi_inside_an_allocation_is_refused() -> None:
    with pytest.raises(ConfigError, match="MPI started this process"):
        read({**SLURM_ALLOCATION, **OPEN_MPI})


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA])
def test_mpirun_in_an_interactive_slurm_shell_is_refused(environ: dict[str, str]) -> None:
    shell = {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    with pytest.raises(ConfigError, match="MPI started this process"):
        read({**shell, **environ})


# ----------------------------------------------------------------------------------- large worlds


@given(nodes=st.integers(1, 100), per_node=st.integers(1, 100), place=st.integers(0, 9_999))
def test_every_rank_of_a_regular_world_finds_its_place(
    nodes: int, per_node: int, place: int
) -> None:
    world_size = nodes * per_node
    rank = place % world_size
    common = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    by_hand = read(common)
    by_torchrun = read({**common, "GROUP_RANK": str(rank // per_node), "TORCHELASTIC_RUN_ID": "x"})
    for topology in (by_hand, by_torchrun):
        assert (topology.rank, topology.world_size) == (rank, world_size)
        assert topology.node_rank * per_node + topology.local_rank == rank
        assert (topology.local_world_size, topology.num_nodes) == (per_node, nodes)


@given(world_size=st.integers(1, 10_000), beyond=st.integers(0, 10))
def test_no_rank_beyond_the_world(world_size: int, beyond: int) -> None:
    environ = {**RENDEZVOUS, "RANK": str(world_size + beyond), "WORLD_SIZE": str(world_size)}
    with pytest.raises(ConfigError, match=f"contradicts WORLD_SIZE={world_size}"):
        read(environ)


def test_a_topology_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Topology().rank = 1  # type: ignore[misc]
