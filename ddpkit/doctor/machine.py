"""Reading a machine: its cores, limits, folders, interfaces and devices. Without torch."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cgroup import quota_of_groups
from ddpkit.doctor.facts import Cores, Limits, NvidiaHost, Space
from ddpkit.threads import usable_cores

_SHARED_MEMORY = Path("/dev/shm")  # where POSIX shared memory lies on Linux
_INFINIBAND = Path("/sys/class/infiniband")
_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


def read_cores() -> Cores:
    """Count the cores of the machine, and those that this process may use."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, affinity, quota_of_groups(), usable_cores())


def read_limits() -> Limits:
    """Read the limits of this process."""
    descriptors, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(
        descriptors=_or_unlimited(descriptors),
        most_descriptors=_or_unlimited(most),
        locked_memory=_or_unlimited(locked),
        infiniband=_names_in(_INFINIBAND, "*"),
    )


def _or_unlimited(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def read_shared_memory() -> Space | None:
    """Measure the shared memory; None on a system that has no folder for it."""
    return read_space(_SHARED_MEMORY) if sys.platform == "linux" else None


def read_temporary() -> Space:
    """Measure the folder for temporary files, and try it: the one that is set, if one is."""
    return read_space(Path(os.environ.get("TMPDIR") or tempfile.gettempdir()))


def read_space(folder: Path) -> Space:
    """Measure a folder, and write a small file there.

    Args:
        folder: Which one.
    """
    total = free = None
    try:
        total, _, free = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return Space(str(folder), total, free, f"{type(error).__name__}: {error}")
    return Space(str(folder), total, free)


def read_interfaces() -> tuple[str, ...]:
    """List the network interfaces."""
    return tuple(name for _, name in socket.if_nameindex())


def read_nvidia() -> NvidiaHost:
    """Look for NVIDIA devices without their libraries."""
    nodes = _names_in(Path("/dev"), "nvidia[0-9]*")
    try:
        driver = _NVIDIA_VERSION.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        driver = None
    return NvidiaHost(tuple(f"/dev/{name}" for name in nodes), driver)


def _names_in(folder: Path, pattern: str) -> Sequence[str]:
    return tuple(sorted(path.name for path in folder.glob(pattern)))
