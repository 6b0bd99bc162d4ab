"""Ranks of other launchers than ddpkit: no parent and no agent of theirs is known."""

import itertools
import os
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

from ddpkit.group import set_secret

T = TypeVar("T")

WITHOUT_A_PORT = ("slurm", "openmpi", "mpich")

_OF_DDPKIT = (
    *("DDPKIT_RANK_PID", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "GLOO_SOCKET_IFNAME"),
)
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_launches = itertools.count()


def with_hand_set_variables(function: Callable[[], T]) -> Callable[[], T]:
    """Make a function for `run_ranks` whose ranks have variables as set by hand.

    Rank 0 then serves the store itself, and its process is not known as a rank of ddpkit's.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def rank() -> T:
        set_secret(b"")
        for name in _OF_DDPKIT:
            del os.environ[name]
        os.environ["MASTER_PORT"] = str(port)
        return function()

    return rank


def with_variables_of(
    launcher: str, function: Callable[[], T], *, launches: int = 1
) -> Callable[[], T]:
    """Make a function for `run_ranks` whose ranks have the variables of one that tells no port.

    With several launches, the first ranks belong to the first one, and so on.
    """
    job = f"{os.getpid()}{next(_launches):04d}"  # other tests run at the same time

    def rank() -> T:
        size = int(os.environ["WORLD_SIZE"]) // launches
        launch, number = divmod(int(os.environ["RANK"]), size)
        set_secret(b"")
        for name in (*_OF_DDPKIT, *_OF_A_RANK):
            del os.environ[name]
        os.environ.update(_variables(launcher, number, size, job, launch))
        return function()

    return rank


def _variables(launcher: str, rank: int, size: int, job: str, launch: int) -> Mapping[str, str]:
    if launcher == "slurm":
        return {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": str(launch),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_TASKS_PER_NODE": str(size),
            "SLURM_STEP_NODELIST": "n1",
        }
    if launcher == "openmpi":
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
            "OMPI_MCA_ess_base_jobid": f"{job}{launch}",
        }
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }
