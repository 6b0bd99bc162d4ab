"""How much processor time the control groups of this process allow, in both versions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

__all__ = ["quota_of_groups"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def quota_of_groups(membership: Path = _MEMBERSHIP, mounted: Path = _MOUNTED) -> float | None:
    """Find the smallest quota that holds for this process.

    A group's quota holds for all groups below it, so those above this process's own count, too.

    Args:
        membership: File that names the groups of this process.
        mounted: Folder in which the groups are.

    Returns:
        Cores' worth of time, None where there is no limit.
    """
    quotas = list(_quotas(membership, mounted))
    return min(quotas) if quotas else None


def _quotas(membership: Path, mounted: Path) -> Iterator[float]:
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for base in (mounted, mounted / "unified"):
                yield from _at_each_level(base, path, _quota_of_second)
        elif "cpu" in controllers.split(","):
            for base in (mounted / controllers, mounted / "cpu"):
                yield from _at_each_level(base, path, _quota_of_first)


def _at_each_level(
    base: Path, path: str, quota_of: Callable[[Path], float | None]
) -> Iterator[float]:
    group = PurePosixPath(path.lstrip("/"))
    # In a container the path may be that of the host; then only the top exists here.
    for level in (group, *group.parents):
        quota = quota_of(base / level)
        if quota is not None:
            yield quota


def _quota_of_second(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    return _divided(quota, period)


def _quota_of_first(group: Path) -> float | None:
    quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return _divided(quota, period)


def _divided(quota: str, period: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # `max` and -1 stand for no limit
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
