"""What the launchers of MPI say, and what they leave out."""

import pytest

from ddpkit.errors import ConfigError
from ddpkit.mpi import MpiRank, how_to_pass, read_rank
from tests.unit.launchers import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    PMIX,
    PMIX_BY_HAND,
    without,
)


@pytest.mark.parametrize(
    ("environ", "source", "launch"),
    [
        pytest.param(OPEN_MPI_4, "openmpi", "2783903745", id="Open MPI 4"),
        pytest.param(OPEN_MPI_5, "openmpi", "prterun-node0-4711@1", id="Open MPI 5"),
        pytest.param(MPICH, "mpich", None, id="MPICH"),
        pytest.param(
            {**MPICH, "I_MPI_ROOT": "/opt/intel/mpi"}, "mpich", None, id="MPICH, Intel's profile"
        ),
        pytest.param(INTEL_MPI, "intelmpi", INTEL_MPI["I_MPI_HYDRA_UUID"], id="Intel MPI"),
        pytest.param(PMIX_BY_HAND, "pmix", "psrvr-17", id="PMIx, the rest by hand"),
    ],
)
def test_launchers(environ: dict[str, str], source: str, launch: str | None) -> None:
    rank = read_rank(environ)
    assert rank is not None
    assert (rank.source, rank.launch) == (source, launch)
    assert rank.started_by_mpirun == (source != "pmix")
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (5, 8, 1, 4)
    assert set(rank.variables) <= environ.keys()
    assert [environ[name] for name in rank.variables[:4]] == ["5", "8", "1", "4"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "8"},  # a leftover
        {"OMPI_COMM_WORLD_SIZE": "8", "MPI_LOCALNRANKS": "4"},
        {"PMIX_NAMESPACE": "psrvr-17"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"PMIX_RANK": "0", "WORLD_SIZE": "1"},
        {**PMIX, "SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {**PMIX, "SLURM_STEPID": "0"},
        {"PMI_RANK": "0", "SLURM_STEP_ID": "0"},
    ],
    ids=lambda environ: ",".join(environ) or "nothing",
)
def test_no_launch(environ: dict[str, str]) -> None:
    assert read_rank(environ) is None


def by_a_resource_manager(environ: dict[str, str]) -> MpiRank:
    rank = read_rank(environ)
    assert rank is not None
    assert not rank.started_by_mpirun
    return rank


def test_protocols_of_mpi_that_srun_speaks() -> None:
    pmi2 = by_a_resource_manager({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "12.0"})
    assert (pmi2.rank, pmi2.world_size) == (5, 8)
    assert (pmi2.local_rank, pmi2.local_world_size) == (None, None)
    pmix = by_a_resource_manager({**OPEN_MPI_5, "PMIX_NAMESPACE": "slurm.pmix.12.0"})
    assert (pmix.local_rank, pmix.local_world_size) == (1, 4)
    mpich = by_a_resource_manager(without(MPICH, "PMI_FD"))  # what PMIx sets for MPICH
    assert (mpich.local_rank, mpich.local_world_size) == (1, 4)


def test_hydra_within_a_step_of_slurm() -> None:
    rank = read_rank({**MPICH, "PMIX_NAMESPACE": "slurm.pmix.12.0", "PMIX_RANK": "0"})
    assert rank is not None
    assert (rank.source, rank.rank, rank.started_by_mpirun) == ("mpich", 5, True)


def test_a_launch_of_one_leaves_another_one_alone() -> None:
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    rank = read_rank({**alone, **MPICH})
    assert rank is not None
    assert rank.source == "mpich"


def test_an_empty_name_is_none() -> None:
    rank = read_rank({**OPEN_MPI_4, "PMIX_NAMESPACE": ""})
    assert rank is not None
    assert rank.launch == "2783903745"


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE"),
        (MPICH, "PMI_SIZE"),
        (PMIX_BY_HAND, "WORLD_SIZE"),
    ],
)
def test_a_rank_without_a_size_is_refused(environ: dict[str, str], missing: str) -> None:
    message = rf"RANK='5' says that MPI or a PMIx.*{missing} is not set.*Set it and.*LAUNCHER=none"
    with pytest.raises(ConfigError, match=message):
        read_rank(without(environ, missing))


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (
            OPEN_MPI_4,
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
            "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (MPICH, "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
        (PMIX_BY_HAND, "PMIX_RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    ],
    ids=["openmpi", "mpich", "pmix"],
)
def test_wrong_numbers(environ: dict[str, str], names: str) -> None:
    rank, size, local_rank, local_size = names.split()
    for name in (rank, size, local_rank, local_size):
        for text in ("", "two", "1.0"):
            with pytest.raises(ConfigError, match=f"{name}={text!r} was given.*a whole number"):
                read_rank({**environ, name: text})
    for changed, message in (
        ({rank: "8"}, f"{rank}=8 contradicts {size}=8"),
        ({rank: "-1"}, f"{rank}=-1 contradicts {size}=8"),
        ({rank: "0", size: "0"}, f"{rank}=0 contradicts {size}=0"),
        ({rank: "1", size: "1"}, f"{rank}=1 contradicts {size}=1"),
        ({local_rank: "4"}, f"{local_rank}=4 contradicts {local_size}=4"),
        ({local_rank: "-1"}, f"{local_rank}=-1 contradicts {local_size}=4"),
        ({local_size: "9"}, f"{local_size}=9 contradicts {size}=8: a node cannot hold"),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*LAUNCHER=none"):
            read_rank({**environ, **changed})


def test_two_launchers_that_contradict_each_other() -> None:
    assert read_rank({**OPEN_MPI_4, **MPICH}) == read_rank(OPEN_MPI_4)
    message = "'5', OMPI_COMM_WORLD_SIZE='8' this is rank 5 of 8, by PMI_RANK='0'.* rank 0 of 8"
    with pytest.raises(ConfigError, match=message):
        read_rank({**OPEN_MPI_4, **MPICH, "PMI_RANK": "0"})


def test_how_to_pass_variables() -> None:
    settings = {"MASTER_ADDR": "$(hostname)", "MASTER_PORT": "29500"}
    assert how_to_pass("openmpi", settings) == (
        "mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ..."
    )
    assert how_to_pass("mpich", settings) == (
        "mpiexec -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 ..."
    )
    assert how_to_pass("pmix", settings) == "MASTER_ADDR=$(hostname) MASTER_PORT=29500"
