"""What an MPI launcher tells its ranks: Open MPI, MPICH and what else uses Hydra, Intel MPI, PMIx.

Everything here is pure. No launcher of these tells where rank 0 is, or the number of a node; a rank
knows how many ranks there are on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpkit.errors import ConfigError
from ddpkit.variables import LAUNCHER_SWITCH, first_set, incomplete, integer, shown

__all__ = ["MpiRank", "how_to_pass", "read_rank", "without_locals"]


@dataclass(frozen=True)
class _Launcher:
    """The names of the variables of one launcher."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    launches: tuple[str, ...] = ()
    """Those that name the launch, the best one first."""
    command: str = ""
    """Its command, if it has one."""
    option: str = "{}={}"
    """How the command line sets a variable for all ranks."""


_OPEN_MPI = _Launcher(
    source="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    # Not OMPI_COMM_WORLD_NODE_RANK: that counts the ranks of other launches on this node, too.
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    launches=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    command="mpirun",
    option="-x {}={}",
)
_MPICH = _Launcher(
    source="mpich",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    command="mpiexec",
    option="-genv {} {}",
)
_INTEL_MPI = _Launcher(
    source="intelmpi",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    launches=("I_MPI_HYDRA_UUID",),
    command="mpirun",
    option="-genv {} {}",
)
# PMIx itself tells a rank and a name; the rest has to be set by hand.
_PMIX = _Launcher(
    source="pmix",
    rank="PMIX_RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    launches=("PMIX_NAMESPACE",),
)
_LAUNCHERS = {launcher.source: launcher for launcher in (_OPEN_MPI, _MPICH, _INTEL_MPI, _PMIX)}
_INTEL_PREFIX, _SET_BY_LOGIN = "I_MPI_", "I_MPI_ROOT"
_NAMESPACE = "PMIX_NAMESPACE"
_SET_BY_HYDRA = ("PMI_FD", "PMI_PORT", "I_MPI_HYDRA_UUID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_REMEDY = (
    "Leave what the launcher sets as it is, or set "
    f"{LAUNCHER_SWITCH}=none to run every process alone."
)


@dataclass(frozen=True)
class MpiRank:
    """The place of this process in an MPI launch of several ranks."""

    source: str
    """Which launcher: `openmpi`, `mpich`, `intelmpi` or `pmix`."""
    rank: int
    """Global rank."""
    world_size: int
    """Number of ranks in all."""
    local_rank: int | None
    """Rank among those of this node, None where nothing tells it."""
    local_world_size: int | None
    """Number of ranks on this node, None where nothing tells it."""
    launch: str | None
    """What the launch is called; it differs between two that run at the same time."""
    started_by_mpirun: bool
    """False where a resource manager speaks the protocol of MPI, as `srun --mpi=pmi2` does."""
    variables: tuple[str, ...]
    """Names of what was read."""


def read_rank(environ: Mapping[str, str]) -> MpiRank | None:
    """Decode the variables of an MPI launcher.

    Args:
        environ: Environment variables.

    Returns:
        The rank; None where no launcher is seen, and in a world of one. A size without a rank is
        a leftover, and what PMIx or PMI say incompletely in a SLURM step is about the step.

    Raises:
        ConfigError: There is a rank but no size, they contradict each other or what another
            launcher says, or are no numbers.

    Example:
        >>> rank = read_rank({"PMI_RANK": "1", "PMI_SIZE": "2"})
        >>> (rank.source, rank.rank, rank.world_size)
        ('mpich', 1, 2)
    """
    found = [
        rank
        for launcher in (_OPEN_MPI, _intel_or_mpich(environ))
        if (rank := _read(environ, launcher)) is not None
    ]
    if len(found) == 2:
        _check_same(environ, *found)
    # Open MPI and SLURM set PMIX_RANK, too, and say more.
    if first_set(environ, _OPEN_MPI.rank, _MPICH.rank, *_STEP) is None:
        return _read(environ, _PMIX)
    return found[0] if found else None


def _intel_or_mpich(environ: Mapping[str, str]) -> _Launcher:
    # A login profile sets I_MPI_ROOT for every program.
    names = (name for name in environ if name.startswith(_INTEL_PREFIX) and name != _SET_BY_LOGIN)
    return _MPICH if next(names, None) is None else _INTEL_MPI


def _read(environ: Mapping[str, str], launcher: _Launcher) -> MpiRank | None:
    if launcher.rank not in environ:
        return None
    if launcher.size not in environ:
        if first_set(environ, *_STEP) is not None:
            return None
        raise _without_size(environ, launcher)
    rank, size = integer(environ, launcher.rank), integer(environ, launcher.size)
    _check_range(environ, launcher.rank, launcher.size)
    if size == 1:
        return None
    locals_ = (launcher.local_rank, launcher.local_size)
    placed = all(name in environ for name in locals_)
    if placed:
        _check_range(environ, *locals_)
        _check_local_size(environ, launcher.local_size, launcher.size)
    launch = next((name for name in launcher.launches if environ.get(name)), None)
    names = (launcher.rank, launcher.size, *(locals_ if placed else ()), launch)
    return MpiRank(
        source=launcher.source,
        rank=rank,
        world_size=size,
        local_rank=integer(environ, launcher.local_rank) if placed else None,
        local_world_size=integer(environ, launcher.local_size) if placed else None,
        launch=None if launch is None else environ[launch],
        started_by_mpirun=placed and _is_started_by_mpirun(environ, launcher),
        variables=tuple(name for name in names if name is not None),
    )


def _is_started_by_mpirun(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    if launcher is _OPEN_MPI:
        return not environ.get(_NAMESPACE, "").startswith("slurm.")
    # Hydra leaves a PMIX_NAMESPACE of SLURM, which has started its daemons, as it is.
    return first_set(environ, *_SET_BY_HYDRA) is not None


def _without_size(environ: Mapping[str, str], launcher: _Launcher) -> ConfigError:
    return ConfigError(
        f"{shown(environ, (launcher.rank,))} says that MPI or a PMIx launcher started this "
        f"process, but {launcher.size} is not set, so nothing tells of how many. Set it and "
        f"{launcher.local_rank} and {launcher.local_size} for each process, or start them with "
        f"mpirun, srun or torchrun, or set {LAUNCHER_SWITCH}=none to run every process alone."
    )


def without_locals(environ: Mapping[str, str], rank: MpiRank) -> ConfigError:
    """Return the error for a rank that does not know its place on its node.

    Args:
        environ: Environment variables.
        rank: What they told.

    Example:
        >>> variables = {"PMI_RANK": "1", "PMI_SIZE": "2"}
        >>> print(without_locals(variables, read_rank(variables)))
        The variables of mpich are incomplete: set are ...; missing are LOCAL_RANK, LOCAL_WORLD_...
    """
    launcher = _LAUNCHERS[rank.source]
    also = dict.fromkeys((*rank.variables, launcher.local_rank, launcher.local_size))
    names = (_PMIX.local_rank, _PMIX.local_size)
    return incomplete(environ, names, rank.source, also_shown=also)


def _check_range(environ: Mapping[str, str], name: str, size_name: str) -> None:
    value, size = integer(environ, name), integer(environ, size_name)
    if not 0 <= value < size:
        raise ConfigError(
            f"{name}={value} contradicts {size_name}={size}: {name} must be at least 0 and less "
            f"than {size_name}. {_REMEDY}"
        )


def _check_local_size(environ: Mapping[str, str], name: str, size_name: str) -> None:
    local_size, size = integer(environ, name), integer(environ, size_name)
    if local_size > size:
        raise ConfigError(
            f"{name}={local_size} contradicts {size_name}={size}: a node cannot hold more ranks "
            f"than there are. {_REMEDY}"
        )


def _check_same(environ: Mapping[str, str], one: MpiRank, other: MpiRank) -> None:
    if (one.rank, one.world_size) != (other.rank, other.world_size):
        raise ConfigError(
            f"Two MPI launchers contradict each other: by {shown(environ, one.variables[:2])} "
            f"this is rank {one.rank} of {one.world_size}, by "
            f"{shown(environ, other.variables[:2])} rank {other.rank} of {other.world_size}. "
            "Unset the variables of the one that did not start this process, or set "
            f"{LAUNCHER_SWITCH}=none to run every process alone."
        )


def how_to_pass(source: str, settings: Mapping[str, str]) -> str:
    """Show how the command line of a launcher sets variables for all ranks.

    Args:
        source: Which launcher.
        settings: The variables.

    Example:
        >>> how_to_pass("openmpi", {"MASTER_PORT": "29500"})
        'mpirun -x MASTER_PORT=29500 ...'
    """
    launcher = _LAUNCHERS[source]
    options = [launcher.option.format(name, value) for name, value in settings.items()]
    return " ".join([launcher.command, *options, "..."] if launcher.command else options)
