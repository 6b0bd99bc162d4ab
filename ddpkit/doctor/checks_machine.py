"""What may be wrong with cores, threads, limits and folders. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.doctor.facts import Cores, Facts, Space
from ddpkit.doctor.finding import Finding, note, problem
from ddpkit.threads import VARIABLE as THREADS_VARIABLE
from ddpkit.threads import cores_by_launcher, threads_per_rank

__all__ = ["CHECKS", "count_ranks", "threads_of_rank"]

NPROC_VARIABLE = "DDPKIT_NPROC_PER_NODE"  # that of `entry`, which cannot do without torch
FEWEST_DESCRIPTORS = 1024
LEAST_SHARED_MEMORY = 512 * 2**20
LEAST_TEMPORARY = 64 * 2**20
LEAST_LOCKED = 64 * 2**20
_WITHOUT_BINDING = ("none", "ddpkit", "torchrun", "environment")


def count_ranks(facts: Facts) -> int:
    """Say how many ranks there will be on this machine, if nothing else is asked for.

    Args:
        facts: What is known.

    Example:
        >>> count_ranks(Facts(variables={"DDPKIT_NPROC_PER_NODE": "4"}))
        4
    """
    topology = facts.launcher.topology if facts.launcher else None
    if topology is not None and topology.source != "none":
        return topology.local_world_size
    setting = facts.variables.get(NPROC_VARIABLE, "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return max(1, facts.accelerators.count if facts.accelerators else 1)


def threads_of_rank(facts: Facts) -> int | None:
    """Say how many CPU threads each rank will use; None where the cores are not known.

    Args:
        facts: What is known.
    """
    if facts.cores is None:
        return None
    setting = facts.variables.get(THREADS_VARIABLE)
    topology = facts.launcher.topology if facts.launcher else None
    if setting == "1" and topology is not None and topology.source == "torchrun":
        setting = None  # torchrun's own default, which ddpkit replaces
    own = cores_by_launcher(facts.variables, topology.source) if topology is not None else None
    return threads_per_rank(facts.cores.usable, count_ranks(facts), setting, own)


def _ranks_that_share(facts: Facts) -> int:
    """Count the ranks that use the cores of this process, as far as is certain."""
    topology = facts.launcher.topology if facts.launcher else None
    launched = topology is not None and topology.source not in _WITHOUT_BINDING
    if launched and facts.cores is not None and facts.cores.affinity < facts.cores.machine:
        return 1  # srun and mpirun may have bound each rank to cores of its own
    return count_ranks(facts)


def _check_nproc(facts: Facts) -> Iterator[Finding]:
    setting = facts.variables.get(NPROC_VARIABLE)
    if setting is not None and (not setting.isdigit() or int(setting) < 1):
        yield problem(
            "nproc-invalid",
            f"{NPROC_VARIABLE}={setting!r} must be a whole number of at least 1.",
            f"Set it to the number of ranks, or unset {NPROC_VARIABLE}.",
            setting=setting,
        )


def _check_ranks(facts: Facts) -> Iterator[Finding]:
    cores, ranks = facts.cores, _ranks_that_share(facts)
    if cores is not None and ranks > cores.usable:
        yield problem(
            "too-few-cores",
            f"There will be {ranks} ranks on this machine, but they may use {cores.usable} of its "
            f"{cores.machine} cores ({_describe_limit(cores)}).",
            "Start fewer ranks, or ask for more cores: srun --cpus-per-task, mpirun --bind-to "
            "none, docker --cpus, taskset.",
            ranks=ranks,
            cores=cores.usable,
        )


def _describe_limit(cores: Cores) -> str:
    if cores.quota is not None and cores.quota < cores.affinity:
        return f"the control group has a quota of {cores.quota:g} cores"
    if cores.affinity < cores.machine:
        return f"it is bound to {cores.affinity}"
    return "there are no more"


def _check_threads(facts: Facts) -> Iterator[Finding]:
    threads, cores, ranks = threads_of_rank(facts), facts.cores, _ranks_that_share(facts)
    setting = facts.variables.get(THREADS_VARIABLE)
    if threads is None or cores is None or setting is None:
        return
    if threads * ranks > cores.usable and threads > 1:
        yield problem(
            "too-many-threads",
            f"{THREADS_VARIABLE}={setting!r} lets {ranks} rank{'s' if ranks > 1 else ''} use "
            f"{threads * ranks} threads on {cores.usable} cores: they wait for each other in every "
            "operation, which is several times slower.",
            f"unset {THREADS_VARIABLE}; ddpkit divides the cores among the ranks. Programs that "
            f"it does not start need {THREADS_VARIABLE}={max(1, cores.usable // ranks)}.",
            threads=threads * ranks,
            cores=cores.usable,
        )
    elif threads * ranks * 2 <= cores.usable:
        yield note(
            "few-threads",
            f"{THREADS_VARIABLE}={setting!r} leaves {cores.usable - threads * ranks} of "
            f"{cores.usable} cores without work, where a model is computed on the CPU.",
            f"unset {THREADS_VARIABLE}, if it was not set on purpose.",
            threads=threads * ranks,
            cores=cores.usable,
        )


def _check_quota(facts: Facts) -> Iterator[Finding]:
    cores = facts.cores
    if cores is None or cores.quota is None or THREADS_VARIABLE in facts.variables:
        return
    quota = max(1, int(cores.quota))
    if quota < cores.affinity:
        yield note(
            "quota",
            f"A control group gives this process the time of {cores.quota:g} cores. ddpkit counts "
            f"with that, but torch alone starts {cores.affinity} threads.",
            f"Set {THREADS_VARIABLE}={quota} for programs that ddpkit does not start.",
            quota=cores.quota,
            affinity=cores.affinity,
        )


def _check_descriptors(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits is None or limits.descriptors is None or limits.descriptors >= FEWEST_DESCRIPTORS:
        return
    most = limits.most_descriptors
    raised = 65_536 if most is None else min(most, 65_536)
    remedy = f"ulimit -n {raised}"
    if raised < FEWEST_DESCRIPTORS:
        remedy = (
            f"The hard limit is {most}, too: have it raised in /etc/security/limits.conf, by "
            "LimitNOFILE= of the service, or by docker run --ulimit nofile=65536."
        )
    yield problem(
        "too-few-descriptors",
        f"A process may have {limits.descriptors} files and sockets open. Ranks and the workers of "
        'their loaders need more and fail with "too many open files".',
        remedy,
        soft=limits.descriptors,
        hard=most,
    )


def _check_locked_memory(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits is None or not limits.infiniband or limits.locked_memory is None:
        return
    if limits.locked_memory < LEAST_LOCKED:
        yield problem(
            "too-little-locked-memory",
            f"There is InfiniBand ({', '.join(limits.infiniband)}), but only "
            f"{limits.locked_memory // 1024} KiB of memory may be locked, so that NCCL cannot use "
            "it.",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or PropagateResourceLimits of "
            "SLURM.",
            locked_memory=limits.locked_memory,
        )


def _check_shared_memory(facts: Facts) -> Iterator[Finding]:
    space = facts.shared_memory
    if space is None:
        return
    docker = "docker run --shm-size=8g (or --ipc=host)"
    if space.error is not None:
        yield problem(
            "shared-memory-unusable",
            f"{space.path} cannot be written: {space.error}. The workers of loaders hand batches "
            "over in it.",
            f"Mount a tmpfs there: {docker}, or an emptyDir with medium: Memory.",
            **_evidence(space),
        )
    elif space.free is not None and space.free < LEAST_SHARED_MEMORY:
        yield problem(
            "shared-memory-small",
            f"{space.path} has {_mib(space.free)} free of {_mib(space.total)}. The workers of "
            "loaders hand batches over in it, and die with a bus error where it is full.",
            f"Make it larger: {docker}, or mount -o remount,size=8g {space.path}; or remove what "
            "earlier programs have left there.",
            **_evidence(space),
        )


def _check_temporary(facts: Facts) -> Iterator[Finding]:
    space = facts.temporary
    if space is None:
        return
    remedy = "Set TMPDIR to a folder on a local disk that can be written, with some room in it."
    if space.error is not None:
        yield problem(
            "temporary-folder-unusable",
            f"The folder for temporary files, {space.path}, cannot be written: {space.error}",
            remedy,
            **_evidence(space),
        )
    elif space.free is not None and space.free < LEAST_TEMPORARY:
        yield problem(
            "temporary-folder-full",
            f"The folder for temporary files, {space.path}, has {_mib(space.free)} free of "
            f"{_mib(space.total)}.",
            remedy,
            **_evidence(space),
        )


def _evidence(space: Space) -> dict[str, str | int | None]:
    return {"path": space.path, "total": space.total, "free": space.free, "error": space.error}


def _mib(size: int | None) -> str:
    return "an unknown size" if size is None else f"{size / 2**20:.0f} MiB"


CHECKS = (
    _check_nproc,
    _check_ranks,
    _check_threads,
    _check_quota,
    _check_descriptors,
    _check_locked_memory,
    _check_shared_memory,
    _check_temporary,
)
"""The checks of this file, in the order in which they are shown."""
