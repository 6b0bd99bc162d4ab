"""Who am I: rank, world size and rendezvous address, read from environment variables.

Everything here is pure: `read_topology` takes the variables and the process id and returns a value,
so that every launcher can be tested with a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpkit.errors import ConfigError

LAUNCHER_SWITCH = "DDPKIT_LAUNCHER"
"""`none` switches the detection of launchers off."""
RANK_MARK = "DDPKIT_RANK_PID"
"""Process id of the rank that ddpkit started; a helper that inherits it has another one."""

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_RENDEZVOUS, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", None),
)
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "::1"})


@dataclass(frozen=True)
class Topology:
    """The place of this process among the ranks that a launcher started."""

    rank: int = 0
    """Global rank, 0 to world_size - 1."""
    world_size: int = 1
    """Number of ranks in all."""
    local_rank: int = 0
    """Rank among those of this node."""
    local_world_size: int = 1
    """Number of ranks on this node."""
    node_rank: int = 0
    """Which node this is, counted from 0."""
    num_nodes: int = 1
    """Number of nodes."""
    master_addr: str | None = None
    """Host of the rendezvous store, None where nothing started this process."""
    master_port: int | None = None
    """Port of the rendezvous store, None where nothing started this process."""
    source: str = "none"
    """What was read: `ddpkit`, `torchrun`, `environment` or `none`."""


def read_topology(environ: Mapping[str, str], pid: int) -> Topology:
    """Decode the variables of whichever launcher started this process.

    The order is: ddpkit's own mark, torchrun, hand-set variables, then a SLURM step or MPI, which
    are recognised but not supported yet.

    Args:
        environ: Environment variables, usually `os.environ`.
        pid: Process id that the mark of a started rank must match, usually `os.getpid()`.

    Returns:
        The topology; `source` is `none` when nothing started this process.

    Raises:
        ConfigError: The variables are partial, contradict each other, or come from a launcher that
            is not supported yet.

    Example:
        >>> read_topology({}, pid=1).source
        'none'
    """
    if RANK_MARK in environ:
        return _read_marked(environ, pid)
    if environ.get(LAUNCHER_SWITCH, "").lower() == "none":
        return Topology()
    if "TORCHELASTIC_RUN_ID" in environ:
        return _read_complete(environ, _TORCHRUN, "torchrun")
    if all(name in environ for name in _RENDEZVOUS):
        return _read_hand_set(environ)
    _refuse_slurm(environ)
    _refuse_mpi(environ)
    _refuse_partial(environ)
    return Topology()


def _read_marked(environ: Mapping[str, str], pid: int) -> Topology:
    # A data worker or a subprocess of a rank inherits the variables, but it is not that rank.
    if environ[RANK_MARK] != str(pid):
        return Topology()
    return _read_complete(environ, _TORCHRUN, "ddpkit")


def _read_complete(environ: Mapping[str, str], names: Sequence[str], source: str) -> Topology:
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(_describe_partial(environ, names, missing, source))
    world_size = _integer(environ, "WORLD_SIZE")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    return _validated(
        Topology(
            rank=_integer(environ, "RANK"),
            world_size=world_size,
            local_rank=_integer(environ, "LOCAL_RANK"),
            local_world_size=local_world_size,
            node_rank=_integer(environ, "GROUP_RANK"),
            num_nodes=_num_nodes(environ, world_size, local_world_size),
            master_addr=environ["MASTER_ADDR"],
            master_port=_integer(environ, "MASTER_PORT"),
            source=source,
        )
    )


def _read_hand_set(environ: Mapping[str, str]) -> Topology:
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_rank, local_world_size = _hand_set_locals(environ, rank, world_size)
    nodes = _num_nodes(environ, world_size, local_world_size)
    node_rank = rank // max(local_world_size, 1)
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in environ:
            node_rank = _integer(environ, name)
            break
    return _validated(
        Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=nodes,
            master_addr=environ["MASTER_ADDR"],
            master_port=_integer(environ, "MASTER_PORT"),
            source="environment",
        )
    )


def _hand_set_locals(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    """Local rank and local world size where the variables for them are optional."""
    if is_loopback(environ["MASTER_ADDR"]):
        defaults = (rank, world_size)
    elif "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" not in environ:
        raise ConfigError(
            f"LOCAL_RANK={environ['LOCAL_RANK']!r} is set but LOCAL_WORLD_SIZE is not, and "
            f"MASTER_ADDR={environ['MASTER_ADDR']!r} does not tell whether there are several "
            "nodes. Set LOCAL_WORLD_SIZE to the number of ranks on this node."
        )
    else:
        # One process per node is what schedulers mean that set no local variables.
        defaults = (0, 1)
    return (
        _integer(environ, "LOCAL_RANK", defaults[0]),
        _integer(environ, "LOCAL_WORLD_SIZE", defaults[1]),
    )


def _num_nodes(environ: Mapping[str, str], world_size: int, local_world_size: int) -> int:
    if "GROUP_WORLD_SIZE" in environ:
        return _integer(environ, "GROUP_WORLD_SIZE")
    return -(-world_size // max(local_world_size, 1))


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} was given, but it must be a whole number.") from None


def _validated(topology: Topology) -> Topology:
    for name, value, size_name, size in (
        ("RANK", topology.rank, "WORLD_SIZE", topology.world_size),
        ("LOCAL_RANK", topology.local_rank, "LOCAL_WORLD_SIZE", topology.local_world_size),
        ("GROUP_RANK", topology.node_rank, "the number of nodes", topology.num_nodes),
    ):
        if not 0 <= value < size:
            raise ConfigError(
                f"{name}={value} contradicts {size_name}={size} (read from {topology.source}): "
                f"{name} must be at least 0 and less than {size_name}."
            )
    if topology.local_world_size > topology.world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={topology.local_world_size} contradicts "
            f"WORLD_SIZE={topology.world_size} (read from {topology.source}): a node cannot hold "
            "more ranks than there are. Where WORLD_SIZE counts nodes, multiply it."
        )
    return topology


def _describe_partial(
    environ: Mapping[str, str], names: Sequence[str], missing: Sequence[str], source: str
) -> str:
    present = ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
    return (
        f"The variables of {source} are incomplete: set are {present or 'none'}; missing are "
        f"{', '.join(missing)}. Set all of them, or none, or {LAUNCHER_SWITCH}=none to ignore them."
    )


def _refuse_slurm(environ: Mapping[str, str]) -> None:
    # An allocation alone (an interactive shell, a batch script) has no step, or a step of one task.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if tasks != "1":
        raise ConfigError(
            f"This process is task {environ['SLURM_PROCID']} of {tasks} of a SLURM step, which "
            "ddpkit does not decode yet. Start one torchrun per node with srun, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set "
            f"{LAUNCHER_SWITCH}=none to run every task alone."
        )


def _refuse_mpi(environ: Mapping[str, str]) -> None:
    for rank_name, size_name in _MPI_VARIABLES:
        if rank_name not in environ:
            continue
        if size_name is None and "SLURM_STEP_ID" in environ:
            return  # a step of one task, which PMIx describes; mpirun in it would tell its size
        if size_name is not None and environ.get(size_name) == "1":
            return  # Open MPI sets PMIX_RANK, too, which tells no size
        raise ConfigError(
            f"{rank_name}={environ[rank_name]!r} says that MPI started this process, which ddpkit "
            "does not decode yet. Use torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set {LAUNCHER_SWITCH}=none to run "
            "every process alone."
        )


def _refuse_partial(environ: Mapping[str, str]) -> None:
    # MASTER_ADDR and MASTER_PORT alone are common in login profiles and start nothing.
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        names = (*_RENDEZVOUS, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in _RENDEZVOUS if name not in environ]
        raise ConfigError(_describe_partial(environ, names, missing, "a hand-made launch"))


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's loopback."""
    return host in _LOOPBACK_NAMES or host.startswith("127.")
