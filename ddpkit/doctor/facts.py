"""What the doctor knows of a machine: plain values, so that its checks are pure functions of them.

A section is None where it was not looked at or could not be; `Facts.failures` says why then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpkit.topology import Topology


@dataclass(frozen=True)
class Installation:
    """What is installed, and where."""

    python: str
    """Version of Python."""
    executable: str
    """The interpreter."""
    platform: str
    """System, its release and the processor."""
    ddpkit: str
    """Version of the ddpkit that runs."""
    folder: str
    """Where that lies."""
    recorded: Mapping[str, str | None]
    """Version by the package metadata, for ddpkit and torch; None where there is none."""
    copies: Sequence[str] = ()
    """Other folders of a ddpkit on the search path."""
    missing: Sequence[str] = ()
    """What ddpkit needs and cannot be found."""


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is imported, and what it was built with."""

    version: str
    """Version of torch."""
    folder: str
    """Where it lies."""
    cuda: str | None
    """Version of CUDA that it was built for, None for a build without."""
    hip: str | None
    """Version of ROCm that it was built for, None for a build without."""
    nccl: str | None
    """Version of NCCL in it, None where there is none."""
    backends: Sequence[str]
    """Backends of torch.distributed that it has, such as gloo."""
    threads: int
    """CPU threads that a program uses which sets nothing."""
    seconds: float
    """How long the import took."""


@dataclass(frozen=True)
class Accelerators:
    """What torch sees of accelerators, before any is used."""

    kind: str | None
    """Type of device, None where there is none."""
    count: int
    """How many of them."""


@dataclass(frozen=True)
class Device:
    """One accelerator after a first use."""

    name: str
    """Such as `cuda:0`."""
    model: str = ""
    """What its maker calls it."""
    total: int | None = None
    """Bytes of memory, None where that is not told."""
    free: int | None = None
    """Bytes of memory that nobody uses."""
    error: str | None = None
    """What went wrong in a small computation on it."""


@dataclass(frozen=True)
class NvidiaHost:
    """What the system says of NVIDIA devices, whether or not torch can use them."""

    nodes: Sequence[str] = ()
    """Device files, one for each."""
    driver: str | None = None
    """What the driver says of its version."""


@dataclass(frozen=True)
class Cores:
    """The cores of a machine, and what limits their use."""

    machine: int
    """Cores of the machine."""
    affinity: int
    """Cores that this process may run on."""
    quota: float | None
    """Cores' worth of time that the control groups allow, None for no limit."""
    usable: int
    """What ddpkit counts with."""


@dataclass(frozen=True)
class Limits:
    """Limits of this process; None stands for no limit."""

    descriptors: int | None
    """Files and sockets that a process may have open, the soft limit."""
    most_descriptors: int | None
    """How far that may be raised, the hard limit."""
    locked_memory: int | None
    """Bytes of memory that may be kept from being swapped out."""
    infiniband: Sequence[str] = ()
    """InfiniBand devices, which need locked memory."""


@dataclass(frozen=True)
class Space:
    """A folder, and the room in it."""

    path: str
    """Where it is."""
    total: int | None = None
    """Bytes of its file system, None where that could not be found out."""
    free: int | None = None
    """Bytes that are free there."""
    error: str | None = None
    """Why a file cannot be written there, None where one can."""


@dataclass(frozen=True)
class Launcher:
    """What the environment says of the launcher of this process."""

    topology: Topology | None
    """How ddpkit reads it, None where that is refused."""
    reading: str
    """The same in words, or why it is refused."""
    ancestors: Sequence[str] = ()
    """Names of the processes above this one, the nearest first; empty where not known."""
    interactive: bool = False
    """Whether a person types what this process reads."""


@dataclass(frozen=True)
class Lookup:
    """A question to the resolver of names, and its answer."""

    asked: str
    """Name or address."""
    answers: Sequence[str] = ()
    """What it stands for."""
    seconds: float = 0.0
    """How long it took."""
    error: str | None = None
    """What the resolver said in place of an answer."""
    timed_out: bool = False
    """Whether it gave no answer in time."""


@dataclass(frozen=True)
class Names:
    """How names are resolved on this machine."""

    host: Lookup
    """The host's own name."""
    loopback: Lookup
    """The name of 127.0.0.1, which torch's store asks for."""


@dataclass(frozen=True)
class Master:
    """The host of rank 0 and the port there, as the environment names them."""

    lookup: Lookup
    """The host."""
    is_here: bool | None
    """Whether an address of it is one of this machine; None where it has no address."""
    port: int | None
    """The port, None where none is named."""
    port_error: str | None = None
    """Why nobody can listen on the port here; None where one can, or it was not tried."""


@dataclass(frozen=True)
class ForkVerdict:
    """Whether ranks are started by fork."""

    method: str
    """Start method that `auto` chooses in a program that has only imported torch."""
    reason: str | None = None
    """Why it is not fork."""


@dataclass(frozen=True)
class Exercise:
    """What two ranks have done together."""

    device: str
    """Type of device."""
    ranks: int
    """How many."""
    seconds: float
    """From the call to its return: start, rendezvous, messages, end."""
    latency: float
    """Seconds of an all-reduce of one number."""
    bandwidth: float
    """Bytes of a large tensor in a second of its all-reduce."""
    tensor_bytes: int
    """Size of the large tensor."""


@dataclass(frozen=True)
class GlooView:
    """Which interface gloo uses, and what others are told."""

    advertised: str | None
    """Address that the host name stands for, which gloo tells the other ranks."""
    addresses: Mapping[str, Sequence[str]]
    """Addresses of each interface."""
    chosen: str | None = None
    """Interface that ddpkit names to gloo for several machines, None where gloo's is right."""
    refusal: str | None = None
    """Why the setting, or the network, is refused."""


@dataclass(frozen=True)
class Facts:
    """Everything that was found out."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that matter, without secrets."""
    installation: Installation | None = None
    torch: TorchBuild | None = None
    accelerators: Accelerators | None = None
    nvidia: NvidiaHost | None = None
    devices: Sequence[Device] | None = None
    cores: Cores | None = None
    limits: Limits | None = None
    shared_memory: Space | None = None
    temporary: Space | None = None
    launcher: Launcher | None = None
    names: Names | None = None
    master: Master | None = None
    interfaces: Sequence[str] | None = None
    gloo: GlooView | None = None
    fork: ForkVerdict | None = None
    exercise: Exercise | None = None
    accelerator_exercise: Exercise | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    """Section -> why it could not be looked at."""
