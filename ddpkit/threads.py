"""How many CPU threads each rank should use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OMP_NUM_THREADS"


def threads_per_rank(cores: int, local_world_size: int, user_setting: str | None) -> int:
    """Divide the cores of a machine among its ranks.

    Args:
        cores: Cores that this process may use.
        local_world_size: Ranks on this machine.
        user_setting: The user's `OMP_NUM_THREADS`, None where it was not set.

    Returns:
        The user's number where there is one, else cores // ranks, at least 1.

    Example:
        >>> threads_per_rank(8, 3, None)
        2
    """
    # OpenMP allows a list, one number for each level of nesting.
    first = (user_setting or "").split(",")[0].strip()
    if first.isdigit() and int(first) > 0:
        return int(first)
    return max(1, cores // local_world_size)


def usable_cores() -> int:
    """Count the cores that this process may use, with its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota_of(_read("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores or 1, quota or cores or 1))


def _quota_of(cpu_max: str) -> int | None:
    """Whole cores of a cgroup's `cpu.max`, None where it sets no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))


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
