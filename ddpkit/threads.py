"""How many CPU threads each rank should use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ddpkit.cgroup import quota_of_groups

VARIABLE = "OMP_NUM_THREADS"


def threads_per_rank(
    cores: int, local_world_size: int, user_setting: str | None, own_cores: int | None = None
) -> int:
    """Divide the cores of a machine among its ranks.

    Args:
        cores: Cores that this process may use.
        local_world_size: Ranks on this machine.
        user_setting: The user's `OMP_NUM_THREADS`, None where it was not set.
        own_cores: How many cores the launcher gave each rank for itself, None where it did not say.

    Returns:
        The user's number where there is one, else the rank's own cores, as far as this process may
        use them, else cores // ranks; at least 1.

    Example:
        >>> threads_per_rank(8, 3, None)
        2
    """
    # OpenMP allows a list, one number for each level of nesting.
    first = (user_setting or "").split(",")[0].strip()
    if first.isdigit() and int(first) > 0:
        return int(first)
    return min(cores, own_cores) if own_cores else max(1, cores // local_world_size)


def cores_by_launcher(environ: Mapping[str, str], source: str) -> int | None:
    """Read how many cores the launcher gave each rank for itself; None where it does not say.

    These ranks must not divide them once more. mpirun binds ranks, too, but does not say by how
    many they are shared.

    Args:
        environ: Environment variables.
        source: What started the ranks, as `Topology` names it.

    Example:
        >>> cores_by_launcher({"SLURM_CPUS_PER_TASK": "4"}, "slurm")
        4
    """
    setting = environ.get("SLURM_CPUS_PER_TASK", "") if source == "slurm" else ""
    return int(setting) if setting.isdigit() and int(setting) > 0 else None


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and its control groups' quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = quota_of_groups()
    return max(1, cores or 1 if quota is None else min(cores or 1, int(quota)))


def setting_of_user(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """Return the `OMP_NUM_THREADS` that the user set, not the 1 that torchrun sets by itself.

    torchrun writes its default into the environment of its ranks only: what it was started with
    itself still stands in /proc.
    """
    setting = environ.get(VARIABLE)
    if setting != "1" or "TORCHELASTIC_RUN_ID" not in environ:
        return setting
    started_with = _read(f"/proc/{parent_pid}/environ")
    if not started_with:
        return setting
    names = {entry.partition("=")[0] for entry in started_with.split("\0")}
    return setting if VARIABLE in names else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
