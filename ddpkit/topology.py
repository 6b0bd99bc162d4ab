"""Who am I: rank, world size and rendezvous address, read from environment variables.

Everything here is pure: `read_topology` takes the variables and the process id and returns a value,
so that every launcher can be tested with a dictionary.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ddpkit.errors import ConfigError
from ddpkit.mpi import MpiRank, how_to_pass, read_rank, without_locals
from ddpkit.slurm import SlurmStep, read_step
from ddpkit.variables import LAUNCHER_SWITCH, first_set, integer, require, shown

RANK_MARK = "DDPKIT_RANK_PID"
"""Process id of the rank that ddpkit started; a helper that inherits it has another one."""

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCALS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN = (*_RENDEZVOUS, *_LOCALS, "GROUP_RANK")
_NUMBERS_OF_NODES = ("GROUP_RANK", "NODE_RANK")
_PER_POD = "PET_NPROC_PER_NODE"
_LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
_NO_HOST = re.compile(r"[\s/,\[\]]")  # `n[1-2]` is a list of nodes
_LOOPBACK_IPV4 = re.compile(r"127(\.\d{1,3}){1,3}", re.ASCII)  # 127.1 is a way to write it, too


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
    """Which node this is, counted from 0. See `nodes_are_known`."""
    num_nodes: int = 1
    """Number of nodes. See `nodes_are_known`."""
    master_addr: str | None = None
    """Host where rank 0 is, None where nothing started this process."""
    master_port: int | None = None
    """Port of the rendezvous store, None where nothing started this process and where the launcher
    tells no port. `job` says then what the ranks have in common."""
    source: str = "none"
    """What was read: `ddpkit`, `torchrun`, `environment`, `slurm`, `openmpi`, `mpich`, `intelmpi`,
    `pmix` or `none`."""
    job: str | None = None
    """Name of the launch, where the launcher has one: the same on all its ranks, and different
    between launches that run at the same time. Such as `slurm 12.0`."""
    nodes_are_known: bool = True
    """False where nothing tells which ranks share a node. Then `node_rank` and `num_nodes` are an
    estimate, as if all nodes had as many ranks as this one and the ranks filled one after another;
    that there are several is certain. Ask the machine for its name to tell the nodes apart."""
    variables: tuple[str, ...] = field(default=(), compare=False)
    """Names of the variables that were read."""


def describe(topology: Topology) -> str:
    """Say in one line what was decoded, and from which variables.

    Args:
        topology: What `read_topology` returned.

    Example:
        >>> variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
        >>> print(describe(read_topology({**variables, "MPI_LOCALNRANKS": "2"}, pid=1)))
        rank 1 of 2, local rank 1 of 2, node 0 of 1, rank 0 at 127.0.0.1 (read from mpich: ...)
    """
    estimated = "" if topology.nodes_are_known else " (estimated)"
    host = "" if topology.master_addr is None else f", rank 0 at {topology.master_addr}"
    port = "" if topology.master_port is None else f" port {topology.master_port}"
    job = "" if topology.job is None else f", launch {topology.job}"
    names = ", ".join(topology.variables) or "no variables"
    return (
        f"rank {topology.rank} of {topology.world_size}, local rank {topology.local_rank} of "
        f"{topology.local_world_size}, node {topology.node_rank} of {topology.num_nodes}"
        f"{estimated}{host}{port}{job} (read from {topology.source}: {names})"
    )


def read_topology(environ: Mapping[str, str], pid: int) -> Topology:
    """Decode the variables of whichever launcher started this process.

    The order is: ddpkit's own mark, torchrun, a complete hand-set `RANK`, `WORLD_SIZE`,
    `MASTER_ADDR` and `MASTER_PORT`, a SLURM step of several tasks, Open MPI, MPICH and others that
    use Hydra, Intel MPI, PMIx. A job of SLURM alone is no launch. `MASTER_ADDR` and `MASTER_PORT`
    are taken where the user has set them, whatever the launcher; `DDPKIT_LAUNCHER=none` switches
    the detection off. Variables set by hand that fit to a step or to MPI are completed by it.

    Args:
        environ: Environment variables, usually `os.environ`.
        pid: Process id that the mark of a started rank must match, usually `os.getpid()`.

    Returns:
        The topology; `source` is `none` when nothing started this process.

    Raises:
        ConfigError: The variables are partial, or contradict each other.

    Example:
        >>> read_topology({}, pid=1).source
        'none'
    """
    if RANK_MARK in environ:
        return _read_marked(environ, pid)
    if environ.get(LAUNCHER_SWITCH, "").lower() == "none":
        return Topology()
    if "TORCHELASTIC_RUN_ID" in environ:
        return _read_complete(environ, "torchrun")
    if _is_complete(environ):
        return _read_hand_set(environ)
    launched = _read_launched(environ)
    if launched is not None:
        return _with_hand_set(environ, launched)
    _refuse_partial(environ)
    return Topology()


def _read_marked(environ: Mapping[str, str], pid: int) -> Topology:
    # A data worker or a subprocess of a rank inherits the variables, but it is not that rank.
    if environ[RANK_MARK] != str(pid):
        return Topology()
    return _read_complete(environ, "ddpkit")


def _read_complete(environ: Mapping[str, str], source: str) -> Topology:
    require(environ, _TORCHRUN, source)
    world_size = integer(environ, "WORLD_SIZE")
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE")
    return _validated(
        Topology(
            rank=integer(environ, "RANK"),
            world_size=world_size,
            local_rank=integer(environ, "LOCAL_RANK"),
            local_world_size=local_world_size,
            node_rank=integer(environ, "GROUP_RANK"),
            num_nodes=_num_nodes(environ, world_size, local_world_size),
            master_addr=_master_addr(environ),
            master_port=_master_port(environ),
            source=source,
            variables=_TORCHRUN,
        )
    )


def _num_nodes(environ: Mapping[str, str], world_size: int, local_world_size: int) -> int:
    if "GROUP_WORLD_SIZE" in environ:
        return integer(environ, "GROUP_WORLD_SIZE")
    return -(-world_size // max(local_world_size, 1))


# ------------------------------------------------------------------------- variables set by hand


def _is_complete(environ: Mapping[str, str]) -> bool:
    return all(name in environ for name in _RENDEZVOUS)


def _read_hand_set(environ: Mapping[str, str]) -> Topology:
    launched = _launched_or_none(environ)
    if launched is not None and not _starts_ranks_itself(environ, launched):
        completed = _with_hand_set(environ, launched)
        names = tuple(dict.fromkeys((*_RENDEZVOUS, *completed.variables)))
        return replace(completed, source="environment", job=None, variables=names)
    _refuse_pods(environ)
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    local_rank, local_world_size = _hand_set_locals(environ, rank, world_size)
    nodes = _num_nodes(environ, world_size, local_world_size)
    node_name = first_set(environ, *_NUMBERS_OF_NODES)
    node_rank = rank // max(local_world_size, 1)
    names = (*_RENDEZVOUS, *_LOCALS, node_name or "GROUP_RANK")
    return _validated(
        Topology(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank if node_name is None else integer(environ, node_name),
            num_nodes=nodes,
            master_addr=_master_addr(environ),
            master_port=_master_port(environ),
            source="environment",
            nodes_are_known=nodes == 1 or node_name is not None,
            variables=tuple(name for name in names if name in environ),
        )
    )


def _hand_set_locals(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    """Local rank and local world size where the variables for them are optional."""
    master_addr = _master_addr(environ)
    if is_loopback(master_addr):
        defaults = (rank, world_size)
    elif "LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" not in environ:
        raise ConfigError(
            f"LOCAL_RANK={environ['LOCAL_RANK']!r} is set but LOCAL_WORLD_SIZE is not, and "
            f"MASTER_ADDR={master_addr!r} does not tell whether there are several nodes. Set "
            "LOCAL_WORLD_SIZE to the number of ranks on this node."
        )
    else:
        # One process per node is what schedulers mean that set no local variables.
        defaults = (0, 1)
    return (
        integer(environ, "LOCAL_RANK", defaults[0]),
        integer(environ, "LOCAL_WORLD_SIZE", defaults[1]),
    )


def _refuse_pods(environ: Mapping[str, str]) -> None:
    """Refuse numbers of pods (or nodes) where each is to hold several ranks."""
    if "LOCAL_RANK" in environ:
        return
    name = "LOCAL_WORLD_SIZE"
    each = 1 if is_loopback(_master_addr(environ)) else integer(environ, name, 1)
    # It may be a word such as `auto`, too, which says nothing about how many processes there are.
    if each == 1 and name not in environ and environ.get(_PER_POD, "").isdecimal():
        name = _PER_POD
        each = integer(environ, name)
    if each <= 1:
        return
    rank, size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    raise ConfigError(
        f"{shown(environ, ('RANK', 'WORLD_SIZE', name))} can be read in two ways. If WORLD_SIZE "
        f"counts ranks, this is rank {rank} of {size}, {each} of them are on this node, and "
        f"LOCAL_RANK is missing. If it counts nodes, this is node {rank} of {size}, and there are "
        f"{size * each} ranks. Set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or let torchrun "
        f"start the ranks of this node: torchrun --nnodes {size} --node-rank {rank} "
        f"--nproc-per-node {each} --master-addr {_master_addr(environ)} --master-port "
        f"{environ['MASTER_PORT']} ..."
    )


def _refuse_partial(environ: Mapping[str, str]) -> None:
    # MASTER_ADDR and MASTER_PORT alone are common in login profiles and start nothing.
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        require(environ, _RENDEZVOUS, "a hand-made launch", also_shown=_LOCALS)


# ---------------------------------------------------------------------------------- SLURM and MPI


def _launched_or_none(environ: Mapping[str, str]) -> Topology | None:
    """Read what a launcher said around a complete set of variables, if that can be read at all."""
    try:
        return _read_launched(environ)
    except ConfigError:
        return None  # the complete set says everything that is needed


def _read_launched(environ: Mapping[str, str]) -> Topology | None:
    """Read what srun or an MPI launcher said."""
    step, rank = read_step(environ), read_rank(environ)
    if step is None:
        return _of_mpi(environ, rank) if rank is not None else None
    if rank is None:
        return _of_step(environ, step)
    if rank.started_by_mpirun and set(step.tasks_per_node) == {1}:
        # mpirun starts a daemon on each node with srun: the step is that of its daemons.
        return _of_mpi(environ, rank)
    _check_same(environ, step, rank)
    return _of_step(environ, step)


def _check_same(environ: Mapping[str, str], step: SlurmStep, rank: MpiRank) -> None:
    places = [
        (one.rank, one.world_size, one.local_rank, one.local_world_size) for one in (step, rank)
    ]
    known = 2 if rank.local_rank is None else 4
    if places[0][:known] != places[1][:known]:
        raise ConfigError(
            f"SLURM and {rank.source} contradict each other: by {shown(environ, step.variables)} "
            f"this is task {step.rank} of {step.world_size}, {step.local_rank} of "
            f"{step.local_world_size} on its node; by {shown(environ, rank.variables)} it is rank "
            f"{rank.rank} of {rank.world_size}. Use srun or mpirun, not one within the other; "
            f"unset what is left over of the other one; or set {LAUNCHER_SWITCH}=none to run every "
            "process alone."
        )


def _of_step(environ: Mapping[str, str], step: SlurmStep) -> Topology:
    num_nodes = len(step.tasks_per_node)
    # Task 0 is on the first node of the list, however the tasks are distributed. The host that
    # srun runs on (SLURM_LAUNCH_NODE_IPADDR, SLURM_SRUN_COMM_HOST) may be another one.
    host = _LOOPBACK if num_nodes == 1 else next(iter(step.nodes), None)
    if host is None and "MASTER_ADDR" not in environ:
        raise ConfigError(
            f"This SLURM step has {num_nodes} nodes ({shown(environ, step.variables)}), but "
            "nothing names them. Set MASTER_ADDR to the host of task 0."
        )
    return Topology(
        rank=step.rank,
        world_size=step.world_size,
        local_rank=step.local_rank,
        local_world_size=step.local_world_size,
        node_rank=step.node,
        num_nodes=num_nodes,
        master_addr=_master_addr(environ, host),
        master_port=_port_of_user(environ),
        source="slurm",
        job=f"slurm {step.name}",
        # Two parts of a heterogeneous step may share a node, which each of them counts.
        nodes_are_known=len(set(step.nodes)) == len(step.nodes),
        variables=_with_master(environ, step.variables),
    )


def _of_mpi(environ: Mapping[str, str], rank: MpiRank) -> Topology:
    local_rank, local_world_size = _place_on_node(environ, rank)
    several = local_world_size < rank.world_size
    if several:
        _require_meeting_point(environ, rank, local_world_size)
    num_nodes = -(-rank.world_size // max(local_world_size, 1))
    return Topology(
        rank=rank.rank,
        world_size=rank.world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=min(rank.rank // max(local_world_size, 1), num_nodes - 1),
        num_nodes=num_nodes,
        master_addr=_master_addr(environ, None if several else _LOOPBACK),
        master_port=_port_of_user(environ),
        source=rank.source,
        job=None if rank.launch is None else f"{rank.source} {rank.launch}",
        nodes_are_known=not several,
        variables=_with_master(environ, rank.variables),
    )


def _place_on_node(environ: Mapping[str, str], rank: MpiRank) -> tuple[int, int]:
    """Local rank and local world size: the launcher's, or else those that were set by hand."""
    if rank.local_rank is not None and rank.local_world_size is not None:
        return rank.local_rank, rank.local_world_size
    if all(name in environ for name in _LOCALS):
        return integer(environ, "LOCAL_RANK"), integer(environ, "LOCAL_WORLD_SIZE")
    if _is_complete(environ):
        return _hand_set_locals(environ, rank.rank, rank.world_size)
    raise without_locals(environ, rank)


def _require_meeting_point(
    environ: Mapping[str, str], rank: MpiRank, local_world_size: int
) -> None:
    """Refuse a launch on several nodes whose ranks have no place where they could meet."""
    settings = {"MASTER_ADDR": "$(hostname)"}
    if rank.launch is None:
        settings["MASTER_PORT"] = "29500"
    missing = [name for name in settings if name not in environ]
    if missing:
        raise ConfigError(
            f"{local_world_size} of {rank.world_size} ranks are on this node "
            f"({shown(environ, rank.variables)}), but {rank.source} does not tell the other nodes "
            f"where rank 0 is. Set {' and '.join(missing)} for all ranks; where rank 0 is on the "
            f"host of this command: {how_to_pass(rank.source, settings)}"
        )


def _with_master(environ: Mapping[str, str], variables: tuple[str, ...]) -> tuple[str, ...]:
    return (*variables, *(name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ))


def _with_hand_set(environ: Mapping[str, str], launched: Topology) -> Topology:
    """Add what was set by hand to what a launcher says; they have to agree."""
    for name, value in (
        ("RANK", launched.rank),
        ("WORLD_SIZE", launched.world_size),
        ("LOCAL_WORLD_SIZE", launched.local_world_size),
    ):
        if integer(environ, name, value) != value:
            raise _disagreement(environ, launched)
    if launched.num_nodes > 1 and is_loopback(launched.master_addr or ""):
        raise ConfigError(
            f"{shown(environ, ('MASTER_ADDR',))} is every machine's own address, but "
            f"{launched.source} has started {launched.local_world_size} of {launched.world_size} "
            f"ranks on this node ({shown(environ, launched.variables)}). Set MASTER_ADDR to the "
            "host of rank 0; with srun it may be left out."
        )
    # It may be 0 on every rank, where each of them sees one device only.
    return _validated(
        replace(launched, local_rank=integer(environ, "LOCAL_RANK", launched.local_rank))
    )


def _disagreement(environ: Mapping[str, str], launched: Topology) -> ConfigError:
    hand_set = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    read = [name for name in launched.variables if name not in (*_RENDEZVOUS, *_LOCALS)]
    return ConfigError(
        f"Variables set by hand contradict those of {launched.source}: "
        f"{shown(environ, hand_set)} against rank {launched.rank} of {launched.world_size}, "
        f"{launched.local_world_size} of them on this node ({shown(environ, read)}). Leave "
        "RANK, WORLD_SIZE and LOCAL_WORLD_SIZE unset, or set them in each process to its own "
        f"numbers; {LAUNCHER_SWITCH}=none runs every process alone."
    )


def _starts_ranks_itself(environ: Mapping[str, str], launched: Topology) -> bool:
    """Tell whether a launcher started one process on each node, and that the ranks there.

    Without LOCAL_RANK the same variables may have been given to all processes by mistake.
    """
    return (
        launched.local_world_size == 1
        and "LOCAL_RANK" in environ
        and integer(environ, "LOCAL_WORLD_SIZE", 1) > 1
        and integer(environ, "WORLD_SIZE") > launched.world_size
    )


# ------------------------------------------------------------------------------ hosts and checks


def _master_addr(environ: Mapping[str, str], default: str | None = None) -> str:
    """Read the host of rank 0: a name, an IPv4 address or an IPv6 address, in brackets or not."""
    given = environ.get("MASTER_ADDR", default)
    host = (given or "").strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or _NO_HOST.search(host) or (":" in host and not _is_ipv6(host)):
        raise ConfigError(
            f"MASTER_ADDR={given!r} was given, but it must be one host name or IP address. A port "
            "goes into MASTER_PORT."
        )
    return host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _master_port(environ: Mapping[str, str]) -> int:
    port = integer(environ, "MASTER_PORT")
    if not 1 <= port <= 65_535:
        raise ConfigError(f"MASTER_PORT={port} was given, but a port is a number from 1 to 65535.")
    return port


def _port_of_user(environ: Mapping[str, str]) -> int | None:
    return _master_port(environ) if "MASTER_PORT" in environ else None


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


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's loopback.

    Example:
        >>> is_loopback("::1"), is_loopback("fe80::1%eth0"), is_loopback("node0")
        (True, False, False)
    """
    if ":" in host:
        return _is_ipv6(host) and _is_loopback_ipv6(ipaddress.IPv6Address(host))
    return host in _LOOPBACK_NAMES or _LOOPBACK_IPV4.fullmatch(host) is not None


def _is_loopback_ipv6(address: ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped
    return address.is_loopback if mapped is None else mapped.is_loopback
