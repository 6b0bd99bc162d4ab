"""Ranks that were told no port: where rank 0 serves their store, and how the others find it.

SLURM and MPI say which launch a process belongs to, but not where its ranks meet. So a few ports
follow from the launch: rank 0 serves on the first free one and writes the name of the launch into
its store, and the others look for that name. Any other program, or the store of another launch, may
hold some of the ports.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from ddpkit import store as stores
from ddpkit.errors import GroupError
from ddpkit.topology import Topology

_NAME_KEY = "ddpkit/launch"  # of the store itself, not of one of the worlds that it serves
_CANDIDATES = 8
# Below the ports that the kernel gives to connections, above those that services are known by.
_FIRST_PORT, _PORTS = 15_000, 15_000
_LEFT_OUT = frozenset({29_400, 29_500})  # torchrun's and torch's own
_NOTICE_AFTER = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
# What holds a port and is no store of this kind costs this many seconds, and then has a rest that
# is longer; but a store may be slow, so it is given more each time.
_ANSWER_BOUND, _LONGEST_ANSWER_BOUND = 1.0, 8.0
_RESTS = 4.0
_LEAST_BOUND = 0.1
# As the kernel names processes: by 15 characters.
_LAUNCHERS = (
    *("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun", "slurmstepd"),
    *("orted", "orterun", "prted", "prterun"),
)

_logger = logging.getLogger(__name__)


def candidate_ports(job: str, uid: int) -> tuple[int, ...]:
    """Choose the ports where the ranks of a launch look for each other.

    Args:
        job: Name of the launch, the same on all its ranks.
        uid: User id, so that launches of two users do not begin with the same port.

    Returns:
        Ports in the order in which they are tried, the same on every machine.

    Example:
        >>> candidate_ports("slurm 12.0", 1000) == candidate_ports("slurm 12.0", 1000)
        True
    """
    ports: list[int] = []
    number = 0
    while len(ports) < _CANDIDATES:
        text = f"{uid} {number} {job}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        port = _FIRST_PORT + int.from_bytes(digest, "big") % _PORTS
        if port not in ports and port not in _LEFT_OUT:
            ports.append(port)
        number += 1
    return tuple(ports)


def choose_launcher(ancestors: Sequence[tuple[str, str]]) -> str:
    """Choose the process that has started all ranks of a machine.

    Args:
        ancestors: Parent of this process, its parent, and so on: what identifies each, and the name
            of its program.

    Returns:
        What identifies the nearest known launcher, for a wrapper may stand before each rank. The
        parent, where there is none.

    Example:
        >>> choose_launcher([("12", "sh"), ("11", "hydra_pmi_proxy"), ("10", "mpiexec.hydra")])
        '11'
    """
    known = [identity for identity, name in ancestors if name.startswith(_LAUNCHERS)]
    return known[0] if known else ancestors[0][0]


def describe_found(found: Mapping[int, str]) -> str:
    """Say what was found at which ports, those with the same finding together.

    Example:
        >>> describe_found({7: "nobody listens", 8: "is silent", 9: "nobody listens"})
        'ports 7, 9: nobody listens; port 8: is silent'
    """
    ports: dict[str, list[int]] = {}
    for port, what in found.items():
        ports.setdefault(what, []).append(port)
    return "; ".join(f"{_name_ports(those)}: {what}" for what, those in ports.items())


def _name_ports(ports: Sequence[int]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"


def _launcher_here() -> str:
    """Name a launch by the process that made it, where its launcher has no name for it.

    That is enough on one machine, and on several nothing would tell where rank 0 is, either.
    """
    parent = os.getppid()
    return choose_launcher(list(_lineage(parent)) or [(str(parent), "")])


def _lineage(pid: int) -> Iterator[tuple[str, str]]:
    """Find a process and those above it, where the system tells them: identities and names."""
    while pid > 0:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        yield f"process {pid} since {fields[19]}", name
        pid = int(fields[1])


@dataclass
class _Candidate:
    """One of the ports, and what the last look at it has found."""

    port: int
    what: str = ""
    bound: float = _ANSWER_BOUND
    due: float = 0.0

    def look(self, host: str, name: str, deadline: float) -> TCPStore | None:
        """Look for the store of a launch, unless another program was found here just now."""
        now = time.monotonic()
        if now < self.due:
            return None
        bound = max(_LEAST_BOUND, min(self.bound, deadline - now))
        found = stores.look_for(host, self.port, _NAME_KEY, name, bound)
        self.what = found.what
        if found.strange:
            self.due = time.monotonic() + bound * _RESTS
            self.bound = min(2 * self.bound, _LONGEST_ANSWER_BOUND)
        return found.store


@dataclass(frozen=True)
class Search:
    """The store of a launch, wherever it is.

    Args:
        who: The rank that searches, for messages.
        name: Name of the launch, as its store has it.
        host: Host of rank 0.
        ports: Where the store may be.
    """

    who: str
    name: str
    host: str
    ports: tuple[int, ...]

    @classmethod
    def for_place(cls, place: Topology) -> Search:
        """Make the search of a rank; all ranks of its launch make the same one."""
        job, uid = place.job or f"{place.source} {_launcher_here()}", os.getuid()
        # On one machine no host name has to be right, and nobody outside has to reach the store.
        host = place.master_addr if place.num_nodes > 1 else None
        return cls(
            who=f"[rank {place.rank}/{place.world_size}]",
            name=f"{job} of user {uid}",
            host=host or stores.LOOPBACK,
            ports=candidate_ports(job, uid),
        )

    def serve(self, servers: MutableMapping[tuple[str, int], TCPStore], timeout: float) -> int:
        """Serve the store on the first port that is free, with the name of the launch in it.

        Args:
            servers: The stores that this process serves, by address; a new one is added to it.
            timeout: Bound in seconds of the store's own waits.

        Returns:
            The port.

        Raises:
            GroupError: Other processes hold all the ports.
        """
        for port in self.ports:
            if self._is_named(servers.get((self.host, port))):
                return port  # it was opened for an earlier world of this launch
        for port in self.ports:
            with contextlib.suppress(GroupError, PermissionError):
                stores.serve_kept(servers, self.host, port, timeout).set(_NAME_KEY, self.name)
                return port
        raise GroupError(
            f"{self.who} The store of {self.name} cannot be served, because other processes hold "
            f"all of its {_name_ports(self.ports)}. Set MASTER_PORT to a free port for all ranks."
        )

    def _is_named(self, store: TCPStore | None) -> bool:
        if store is None or not store.check([_NAME_KEY]):
            return False
        return store.get(_NAME_KEY) == self.name.encode()

    def find(self, timeout: float) -> tuple[int, TCPStore]:
        """Look at one port after the other, round after round, until the store is there.

        Args:
            timeout: Seconds for all of it, and for the waits of the client that is returned.

        Returns:
            Port of the store, and a client of it.

        Raises:
            GroupError: It was not there within the time.
        """
        started = time.monotonic()
        candidates = [_Candidate(port) for port in self.ports]
        pause, told = _FIRST_PAUSE, False
        while True:
            for candidate in candidates:
                store = candidate.look(self.host, self.name, started + timeout)
                if store is not None:
                    store.set_timeout(timedelta(seconds=timeout))
                    return candidate.port, store
            waited = time.monotonic() - started
            if waited > timeout:
                raise GroupError(self._failure(candidates, waited))
            if waited > _NOTICE_AFTER and not told:
                told = True
                _logger.warning(
                    "%s waiting for rank 0 of %s to serve its store on %s (%s)",
                    *(self.who, self.name, self.host, _describe(candidates)),
                )
            time.sleep(min(pause, timeout - waited))
            pause = min(1.2 * pause, _LONGEST_PAUSE)

    def _failure(self, candidates: Sequence[_Candidate], waited: float) -> str:
        return (
            f"{self.who} Rank 0 of {self.name} serves no store on {self.host} after {waited:.0f} s "
            f"({_describe(candidates)}). Check that rank 0 has started on that host, and what it "
            "says; or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, "
            "for all ranks."
        )


def _describe(candidates: Sequence[_Candidate]) -> str:
    return describe_found({candidate.port: candidate.what for candidate in candidates})
