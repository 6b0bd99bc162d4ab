import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpkit.errors import ConfigError
from ddpkit.topology import Topology, describe, is_loopback, read_topology
from tests.unit.launchers import (
    INTEL_MPI,
    JOB,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    PMIX,
    PMIX_BY_HAND,
    STEP,
    without,
)

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
# A step whose tasks are on one node, and launches of MPI on one node.
ONE_NODE_STEP = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "n07",
}
ONE_TASK_STEP = {
    **ONE_NODE_STEP,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# What the daemons of mpirun are, on the nodes of a job other than its own.
DAEMONS_STEP = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
BATCH_SCRIPT = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OPEN_MPI = {**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
HYDRA = {**MPICH, "MPI_LOCALRANKID": "5", "MPI_LOCALNRANKS": "8"}
ALONE_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


def read(environ: dict[str, str]) -> Topology:
    return read_topology(environ, PID)


# ------------------------------------------------------------------------------- nothing there


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},  # common in login profiles
        {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"},
        JOB,
        BATCH_SCRIPT,
        ONE_TASK_STEP,  # an interactive shell
        {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"},
        {**ONE_TASK_STEP, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {**ONE_TASK_STEP, "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.12.0"},
        ALONE_MPI,
        {**ALONE_MPI, "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMI_SIZE": "4"},
        {"DDPKIT_LAUNCHER": "none"},
        {"DDPKIT_LAUNCHER": "None", **TORCHRUN},
        {"DDPKIT_LAUNCHER": "none", **RENDEZVOUS},
        {"DDPKIT_LAUNCHER": "none", "RANK": "0"},
        {"DDPKIT_LAUNCHER": "none", **STEP, "SLURM_STEP_NUM_TASKS": "two"},
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
    inherited = {**DDPKIT, "DDPKIT_RANK_PID": "1", "OMPI_COMM_WORLD_RANK": "0", **STEP}
    assert read(inherited) == Topology()


@pytest.mark.parametrize("other", [TWO_NODES, STEP, OPEN_MPI, {"DDPKIT_LAUNCHER": "none"}])
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
    # torchrun --virtual-local-rank: LOCAL_RANK is 0 on every rank, each of which sees one device.
    place = read({**TWO_NODES, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"})
    assert (place.rank, place.local_rank, place.local_world_size, place.node_rank) == (5, 0, 4, 1)


@pytest.mark.parametrize("other", [STEP, ONE_TASK_STEP, BATCH_SCRIPT, OPEN_MPI, HYDRA, PMIX])
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


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "ip6-localhost", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "127.0.0.1"),
        *("127.0.1.1", "127.1"),
    ],
)
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)
    assert read({**RENDEZVOUS, "MASTER_ADDR": host}).num_nodes == 1


@pytest.mark.parametrize(
    "host",
    [
        *("node0", "10.0.0.1", "128.0.0.1", "fe80::1", "fe80::1%lo", "::ffff:10.0.0.1", "::1::"),
        *("localhost.example", "127.example", "127.0.0.1.example", ""),
    ],
)
def test_names_that_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_hand_set_with_a_remote_address_is_one_rank_per_node() -> None:
    # Which ranks share a node is not said, though.
    expected = Topology(1, 2, 0, 1, 1, 2, "node0", 29500, "environment", nodes_are_known=False)
    assert read({**RENDEZVOUS, "MASTER_ADDR": "node0"}) == expected


def test_hand_set_with_local_variables() -> None:
    environ = {
        **RENDEZVOUS,
        "RANK": "6",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
    }
    expected = Topology(6, 8, 2, 4, 1, 2, "node0", 29500, "environment", nodes_are_known=False)
    assert read(environ) == expected


def test_hand_set_names_the_node_where_it_can() -> None:
    environ = {**RENDEZVOUS, "MASTER_ADDR": "node0", "RANK": "0", "NODE_RANK": "1"}
    assert (read(environ).node_rank, read(environ).nodes_are_known) == (1, True)
    assert read({**environ, "GROUP_RANK": "0"}).node_rank == 0


def test_hand_set_local_rank_alone_does_not_tell_the_nodes_apart() -> None:
    environ = {**RENDEZVOUS, "MASTER_ADDR": "node0", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not"):
        read(environ)


def test_hand_set_local_rank_alone_is_enough_on_the_loopback() -> None:
    assert read({**RENDEZVOUS, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("2001:db8::7", "2001:db8::7"),
        (" node0 ", "node0"),
    ],
)
@pytest.mark.parametrize(
    "environ", [RENDEZVOUS, DDPKIT, TORCHRUN, ONE_NODE_STEP], ids=["h", "d", "t", "s"]
)
def test_addresses(environ: dict[str, str], given: str, host: str) -> None:
    assert read({**environ, "MASTER_ADDR": given}).master_addr == host


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        "node0:29500",
        "[::1]:29500",
        "::1::",
        "[node0",
        "tcp://node0",
        "a b",
        "n[1-2]",
        "a,b",
    ],
)
@pytest.mark.parametrize(
    "environ", [RENDEZVOUS, TORCHRUN, STEP, OPEN_MPI], ids=["h", "t", "s", "o"]
)
def test_what_is_no_host(environ: dict[str, str], given: str) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=.* was given.*one host name.*_PORT"):
        read({**environ, "MASTER_ADDR": given})


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
@pytest.mark.parametrize(
    "environ", [RENDEZVOUS, TORCHRUN, STEP, OPEN_MPI], ids=["h", "t", "s", "o"]
)
def test_what_is_no_port(environ: dict[str, str], port: str) -> None:
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} was given.*1 to 65535"):
        read({**environ, "MASTER_PORT": port})


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


# -------------------------------------------------------------- pods where WORLD_SIZE counts nodes

POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"PET_NPROC_PER_NODE": "1"},
        {"PET_NPROC_PER_NODE": "auto"},  # says nothing of processes that nobody has started
        {"LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_one_process_in_each_pod(changed: dict[str, str]) -> None:
    place = read({**POD, **changed})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 0, 1)


@pytest.mark.parametrize("name", ["PET_NPROC_PER_NODE", "LOCAL_WORLD_SIZE"])
def test_pods_for_several_processes_are_refused_with_both_readings(name: str) -> None:
    message = (
        f"RANK='1', WORLD_SIZE='2', {name}='4' can be read.*rank 1 of 2, 4 of them.*node 1 of 2, "
        "and there are 8 ranks.*--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr job-mas"
    )
    with pytest.raises(ConfigError, match=message):
        read({**POD, name: "4"})


def test_pods_whose_size_is_that_of_a_node() -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE=4 contradicts WORLD_SIZE=2.*multipl"):
        read({**POD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"})


def test_ranks_that_a_pod_has_started_itself() -> None:
    started = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = read({**POD, **started, "PET_NPROC_PER_NODE": "4"})
    assert (place.rank, place.local_rank, place.num_nodes) == (5, 1, 2)


# --------------------------------------------------------------------------------------- SLURM


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            STEP, Topology(5, 7, 1, 2, 2, 4, "n07", None, "slurm", "slurm 12.0"), id="several nodes"
        ),
        pytest.param(
            {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            Topology(6, 7, 0, 1, 3, 4, "n07", None, "slurm", "slurm 12.0"),
            id="a node with one task",
        ),
        pytest.param(
            ONE_NODE_STEP,
            Topology(1, 4, 1, 4, 0, 1, "127.0.0.1", None, "slurm", "slurm 12.0"),
            id="one node of several of the job",
        ),
        pytest.param(
            {
                **STEP,
                "SLURM_DISTRIBUTION": "cyclic",
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "1",
            },
            Topology(1, 7, 0, 2, 1, 4, "n07", None, "slurm", "slurm 12.0"),
            id="cyclic",
        ),
        pytest.param(
            {**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"},
            Topology(5, 7, 1, 2, 2, 4, "10.0.0.7", 4000, "slurm", "slurm 12.0"),
            id="host and port of the user",
        ),
        pytest.param(
            {**STEP, "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "1"},
            Topology(5, 7, 1, 2, 2, 4, "n07", None, "slurm", "slurm 12.3+1"),
            id="another step of a restarted job",
        ),
        pytest.param(
            {**STEP, "SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": "n07,n08,n08,n09"},
            Topology(5, 7, 1, 2, 2, 4, "n07", None, "slurm", "slurm 12.0", nodes_are_known=False),
            id="parts of a heterogeneous step that share a node",
        ),
    ],
)
def test_slurm(environ: dict[str, str], expected: Topology) -> None:
    assert read(environ) == expected


def test_a_step_whose_nodes_are_not_named_needs_a_host() -> None:
    environ = {**without(STEP, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "n[1-99]"}
    with pytest.raises(ConfigError, match=r"has 4 nodes.*Set MASTER_ADDR to the host of task"):
        read(environ)
    assert read({**environ, "MASTER_ADDR": "n1"}).master_addr == "n1"


@pytest.mark.parametrize(
    "changed",
    [
        {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_JOBID": "12.0"},  # srun --mpi=pmi2
        {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.12.0"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.12.4294967290"},  # left over of a shell
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "7",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "slurm.pmix.12.0",
        },
        ALONE_MPI,
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMI_RANK": "0"},
    ],
    ids=lambda changed: ",".join(changed),
)
def test_srun_that_speaks_a_protocol_of_mpi(changed: dict[str, str]) -> None:
    assert read({**STEP, **changed}) == read(STEP)


@pytest.mark.parametrize("step", [JOB, BATCH_SCRIPT, ONE_TASK_STEP, DAEMONS_STEP])
@pytest.mark.parametrize(
    ("started", "source"),
    [
        (OPEN_MPI, "openmpi"),
        (HYDRA, "mpich"),
        ({**HYDRA, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.12.0"}, "mpich"),
    ],
    ids=["openmpi", "mpich", "mpich by srun --mpi=pmix"],
)
def test_mpirun_within_a_job_is_the_launch(
    step: dict[str, str], started: dict[str, str], source: str
) -> None:
    place = read({**step, **started})
    assert (place.source, place.rank, place.world_size) == (source, 5, 8)


def test_mpirun_within_a_job_with_the_same_numbers_is_read_alike_on_all_ranks() -> None:
    # Rank 1 is task 1 of the daemons by chance; the others are not.
    own = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    mpi = {**OPEN_MPI_4, **own, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n07"}
    for rank in range(4):
        assert read({**DAEMONS_STEP, **mpi, "OMPI_COMM_WORLD_RANK": str(rank)}).source == "openmpi"


@pytest.mark.parametrize(
    ("step", "other", "message"),
    [
        (STEP, OPEN_MPI, "task 5 of 7, 1 of 2 on its node; by .*OMPI_COMM_W.* it is rank 5 of 8"),
        (STEP, {"PMI_RANK": "0", "PMI_SIZE": "7"}, "task 5 of 7.*PMI_RANK='0'.* rank 0 of 7"),
        (DAEMONS_STEP, {"PMI_RANK": "0", "PMI_SIZE": "2"}, "task 1 of 4.* rank 0 of 2"),
        (
            STEP,
            {**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "7", "PMIX_NAMESPACE": "slurm.pmix.12.0"},
            "openmpi contradict each other.*1 of 2 on its node.*OMPI_COMM_WORLD_LOCAL_SIZE='4'",
        ),
    ],
)
def test_slurm_and_mpi_that_contradict_each_other(
    step: dict[str, str], other: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"SLURM and.*{message}.*LAUNCHER=none"):
        read({**step, **other})


# ----------------------------------------------------------------------------------------- MPI


@pytest.mark.parametrize(
    ("environ", "source", "job"),
    [
        (OPEN_MPI, "openmpi", "openmpi 2783903745"),
        (HYDRA, "mpich", None),
        ({**INTEL_MPI, **HYDRA}, "intelmpi", f"intelmpi {INTEL_MPI['I_MPI_HYDRA_UUID']}"),
        (
            {**PMIX_BY_HAND, "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"},
            "pmix",
            "pmix psrvr-17",
        ),
    ],
    ids=["openmpi", "mpich", "intelmpi", "pmix"],
)
def test_mpi_on_one_node(environ: dict[str, str], source: str, job: str | None) -> None:
    assert read(environ) == Topology(5, 8, 5, 8, 0, 1, "127.0.0.1", None, source, job)
    place = read({**environ, "MASTER_ADDR": "node0", "MASTER_PORT": "4000"})
    assert (place.master_addr, place.master_port) == ("node0", 4000)


@pytest.mark.parametrize(
    ("environ", "settings", "remedy"),
    [
        (OPEN_MPI_4, {"MASTER_ADDR": "node0"}, r"mpirun -x MASTER_ADDR=\$\(hostname\) \.\.\."),
        (INTEL_MPI, {"MASTER_ADDR": "node0"}, r"mpirun -genv MASTER_ADDR \$\(hostname\) "),
        (PMIX_BY_HAND, {"MASTER_ADDR": "node0"}, r"MASTER_ADDR=\$\(hostname\)"),
        (
            MPICH,
            {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"},
            r"mpiexec -genv MASTER_ADDR \$\(hostname\) -genv MASTER_PORT 29500 ",
        ),
    ],
    ids=["openmpi", "intelmpi", "pmix", "mpich"],
)
def test_mpi_on_several_nodes_does_not_tell_where_rank_0_is(
    environ: dict[str, str], settings: dict[str, str], remedy: str
) -> None:
    place = read({**environ, **settings})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.master_addr, place.num_nodes, place.nodes_are_known) == ("node0", 2, False)
    for missing in settings:
        with pytest.raises(ConfigError, match=f"4 of 8 ranks.*Set .*{missing} for all.*{remedy}"):
            read({**environ, **without(settings, missing)})


@given(st.integers(2, 50), st.integers(1, 50), st.integers(0, 49))
def test_the_estimate_of_the_node_is_within_bounds(size: int, local_size: int, rank: int) -> None:
    size, rank = max(size, local_size + 1), rank % size
    environ = {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": str(local_size),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "4000",
    }
    place = read(environ)
    assert 0 <= place.node_rank < place.num_nodes
    assert place.num_nodes > 1
    assert not place.nodes_are_known


def test_a_place_on_the_node_may_be_set_by_hand() -> None:
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
    message = (
        "mpich are incomplete: .*MPI_LOCALRANKID='1'; missing are LOCAL_RANK, LOCAL_WORLD_SIZE"
    )
    with pytest.raises(ConfigError, match=message):
        read(pmi)
    place = read({**pmi, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert place == Topology(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "mpich")
    with pytest.raises(ConfigError, match="LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"):
        read({**pmi, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"})


def test_pmix_alone_tells_no_size() -> None:
    with pytest.raises(ConfigError, match=r"PMIX_RANK='5' says.*WORLD_SIZE is not set.*Set it"):
        read(PMIX)
    with pytest.raises(ConfigError, match=r"pmix are incomplete: .*missing are LOCAL_RANK"):
        read(without(PMIX_BY_HAND, "LOCAL_RANK"))


# ------------------------------------------------------- hand-set variables within a launch

FITTING = {"RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "node0", "MASTER_PORT": "4000"}


def test_hand_set_variables_that_fit_to_a_step_are_completed_by_it() -> None:
    place = read({**STEP, **FITTING})
    assert place == Topology(5, 7, 1, 2, 2, 4, "node0", 4000, "environment")
    assert {"MASTER_ADDR", "RANK", "SLURM_LOCALID"} <= set(place.variables)
    assert read({**STEP, **FITTING, "LOCAL_RANK": "0"}).local_rank == 0


def test_hand_set_variables_that_fit_to_mpi_are_completed_by_it() -> None:
    place = read({**OPEN_MPI_4, **FITTING, "WORLD_SIZE": "8"})
    assert (place.source, place.rank, place.local_rank, place.local_world_size) == (
        *("environment", 5, 1),
        4,
    )


def test_a_part_of_the_variables_is_enough_within_a_step() -> None:
    assert read({**STEP, "RANK": "5", "WORLD_SIZE": "7"}) == read(STEP)
    assert read({**STEP, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize("master", [{}, {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"}])
@pytest.mark.parametrize(
    ("launcher", "hand_set", "message"),
    [
        # Exported once, so that every task would be rank 0.
        (STEP, {"RANK": "0", "WORLD_SIZE": "8"}, "slurm: RANK='0', WORLD_SIZE='8' .*rank 5 of 7"),
        (STEP, {"RANK": "0", "WORLD_SIZE": "7"}, "slurm: RANK='0'.*against rank 5 of 7"),
        (STEP, {"RANK": "5", "WORLD_SIZE": "4"}, "WORLD_SIZE='4' against rank 5 of 7"),
        (STEP, {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE='1' against.*SLURM_PROCID='5'"),
        (
            STEP,
            {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE='4' against rank 5 of 7, 2 of them on this node",
        ),
        (OPEN_MPI, {"RANK": "0", "WORLD_SIZE": "8"}, "openmpi: RANK='0'.*against rank 5 of 8"),
        (HYDRA, {"RANK": "5", "WORLD_SIZE": "2"}, "mpich: .*WORLD_SIZE='2' against rank 5 of 8"),
        (PMIX, {"RANK": "0", "WORLD_SIZE": "8"}, "pmix: RANK='0', .*PMIX_RANK='5'"),
    ],
)
def test_hand_set_variables_that_contradict_a_launcher(
    launcher: dict[str, str], hand_set: dict[str, str], message: str, master: dict[str, str]
) -> None:
    if launcher is PMIX and not master:
        hand_set = {**hand_set, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    with pytest.raises(
        ConfigError, match=f"by hand contradict those of .*{message}.*LAUNCHER=none"
    ):
        read({**launcher, **hand_set, **master})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize(
    "environ",
    [STEP, {**STEP, **FITTING}, OPEN_MPI_4, {**MPICH, "MASTER_PORT": "4000"}],
    ids=["step", "step and by hand", "openmpi", "mpich"],
)
def test_loopback_is_no_meeting_point_of_several_nodes(environ: dict[str, str], host: str) -> None:
    message = r"is every machine's own address, but .* has started . of . ranks on this node"
    with pytest.raises(ConfigError, match=message):
        read({**environ, "MASTER_ADDR": host})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "two"])
def test_wrong_numbers_set_by_hand_within_a_step(name: str, text: str) -> None:
    for environ in (STEP, {**STEP, **FITTING}):
        with pytest.raises(ConfigError, match=f"{name}={text!r} was given.*a whole number"):
            read({**environ, name: text})


def test_a_program_that_a_task_on_each_node_starts_ranks_with_is_the_launch() -> None:
    own = {"RANK": "6", "WORLD_SIZE": "16", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    place = read({**DAEMONS_STEP, **FITTING, **own})
    assert (place.rank, place.world_size, place.local_rank, place.num_nodes) == (6, 16, 2, 4)


@pytest.mark.parametrize("outer", [ONE_TASK_STEP, BATCH_SCRIPT, ALONE_MPI, {"PMI_SIZE": "4"}])
def test_hand_set_variables_within_what_is_no_launch(outer: dict[str, str]) -> None:
    assert read({**outer, **RENDEZVOUS}) == read(RENDEZVOUS)


def test_a_complete_set_does_not_depend_on_damaged_variables_of_a_launcher() -> None:
    assert read({**STEP, "SLURM_NODEID": "99", **RENDEZVOUS}) == read(RENDEZVOUS)


# --------------------------------------------------------------------------------- in one line


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            STEP,
            "rank 5 of 7, local rank 1 of 2, node 2 of 4, rank 0 at n07, launch slurm 12.0 (read "
            "from slurm: SLURM_JOB_ID, SLURM_STEP_ID, SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, "
            "SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST)",
        ),
        (
            RENDEZVOUS,
            "rank 1 of 2, local rank 1 of 2, node 0 of 1, rank 0 at 127.0.0.1 port 29500 (read "
            "from environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)",
        ),
        ({}, "rank 0 of 1, local rank 0 of 1, node 0 of 1 (read from none: no variables)"),
        (
            {**OPEN_MPI_5, "MASTER_ADDR": "node0"},
            "rank 5 of 8, local rank 1 of 4, node 1 of 2 (estimated), rank 0 at node0, launch "
            "openmpi prterun-node0-4711@1 (read from openmpi: OMPI_COMM_WORLD_RANK, "
            "OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, "
            "PMIX_NAMESPACE, MASTER_ADDR)",
        ),
    ],
    ids=["slurm", "environment", "none", "openmpi"],
)
def test_one_line_says_what_was_read(environ: dict[str, str], line: str) -> None:
    assert describe(read(environ)) == line


@pytest.mark.parametrize("environ", [DDPKIT, TWO_NODES, RENDEZVOUS, STEP, OPEN_MPI, HYDRA])
def test_only_variables_that_are_set_are_named(environ: dict[str, str]) -> None:
    assert set(read(environ).variables) <= environ.keys()


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
