"""What may be wrong with environment variables: those of launchers, and of torch. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddpkit.doctor.facts import Facts
from ddpkit.doctor.finding import Finding, note, problem
from ddpkit.topology import Topology
from ddpkit.variables import LAUNCHER_SWITCH

__all__ = ["CHECKS", "how_to_unset"]

# What runs above a task of a scheduler or a rank of MPI: names of programs, up to a dot.
_STARTERS = frozenset(
    {
        *("slurmstepd", "flux-shell", "palsd", "jsmd"),
        *("mpirun", "mpiexec", "orterun", "orted", "prterun", "prte", "prted"),
        *("hydra_pmi_proxy", "hydra_bstrap_proxy", "pmi_proxy"),
    }
)
_OF_SCHEDULERS = ("slurm", "openmpi", "mpich", "intelmpi", "pmix")
_FAMILIES = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "I_MPI_", "TORCHELASTIC_", "PET_")
_ONES = re.compile(r"(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_\w+")
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")
_WITHOUT_EFFECT = ("", "0", "false", "off")


def how_to_unset(variables: Mapping[str, str]) -> str:
    """Write the command of a shell (bash) that unsets what launchers have left.

    Args:
        variables: Those that are set.

    Example:
        >>> how_to_unset({"RANK": "0", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"})
        'unset RANK ${!SLURM_@}'
    """
    ones = [name for name in variables if _ONES.fullmatch(name)]
    families = [each for each in _FAMILIES if any(name.startswith(each) for name in variables)]
    return " ".join(["unset", *ones, *(f"${{!{family}@}}" for family in families)])


def _topology(facts: Facts) -> Topology | None:
    return facts.launcher.topology if facts.launcher else None


def _check_readable(facts: Facts) -> Iterator[Finding]:
    if facts.launcher is not None and facts.launcher.topology is None:
        yield problem(
            "launcher-variables",
            facts.launcher.reading,
            f"If they are left over of an earlier launch: {how_to_unset(facts.variables)}",
            variables=_of_launchers(facts.variables),
        )


def _of_launchers(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if _ONES.fullmatch(name) or name.startswith(_FAMILIES)
    }


def _check_stale(facts: Facts) -> Iterator[Finding]:
    """Look for variables of a launcher that is not there any more."""
    topology, launcher = _topology(facts), facts.launcher
    if topology is None or launcher is None:
        return
    why = None
    if topology.source == "torchrun":
        why = _why_torchrun_has_gone(facts)
    elif topology.source in _OF_SCHEDULERS and launcher.ancestors:
        words = " ".join(launcher.ancestors).split()
        above = {word.partition(".")[0] for word in words}  # it may be mpiexec.hydra
        if not above & _STARTERS:
            why = "no process above this one is of a scheduler or of MPI"
    if why is not None:
        yield problem(
            "launcher-stale",
            f"The variables of {topology.source} say that this is rank {topology.rank} of "
            f"{topology.world_size}, but {why}. They seem to be left over of an earlier launch; a "
            "program that believes them waits for ranks that do not exist.",
            f"{how_to_unset(facts.variables)}, or export {LAUNCHER_SWITCH}=none",
            variables=_of_launchers(facts.variables),
            ancestors=list(launcher.ancestors),
        )


def _why_torchrun_has_gone(facts: Facts) -> str | None:
    """Its agent serves the store, as it says; then nobody else could listen on that port."""
    master = facts.master
    if facts.variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or master is None:
        return None
    if master.is_here and master.port is not None and master.port_error is None:
        return f"its agent does not listen on {master.lookup.asked} port {master.port}"
    return None


def _check_interactive(facts: Facts) -> Iterator[Finding]:
    topology, launcher = _topology(facts), facts.launcher
    if topology is None or launcher is None or not launcher.interactive:
        return
    if topology.source in _OF_SCHEDULERS:
        yield note(
            "interactive-rank",
            f"This shell belongs to rank {topology.rank} of {topology.world_size} "
            f"({topology.source}). A program that is started in it takes itself for that rank and "
            "waits for the others.",
            f"export {LAUNCHER_SWITCH}=none to start programs of their own here.",
            rank=topology.rank,
            world_size=topology.world_size,
        )


def _check_hand_set(facts: Facts) -> Iterator[Finding]:
    topology = _topology(facts)
    if topology is not None and topology.source == "environment":
        yield note(
            "variables-set-by-hand",
            f"Every program started here takes itself for rank {topology.rank} of "
            f"{topology.world_size}, and waits for the others at {topology.master_addr} port "
            f"{topology.master_port}.",
            f"If that is not meant: {how_to_unset(facts.variables)}",
            variables=_of_launchers(facts.variables),
        )


def _check_job_alone(facts: Facts) -> Iterator[Finding]:
    topology = _topology(facts)
    tasks = facts.variables.get("SLURM_NTASKS", "")
    if topology is None or topology.source != "none" or not tasks.isdecimal() or int(tasks) < 2:
        return
    if facts.variables.get(LAUNCHER_SWITCH, "").lower() == "none":
        return
    yield note(
        "slurm-job-alone",
        f"This shell is in a SLURM job of {tasks} tasks, but in no step of it: a program started "
        "here runs on this machine alone, and starts ranks itself.",
        "Start it with srun to use the tasks of the job.",
        job=facts.variables.get("SLURM_JOB_ID"),
        tasks=int(tasks),
    )


def _check_switch(facts: Facts) -> Iterator[Finding]:
    setting = facts.variables.get(LAUNCHER_SWITCH)
    if setting is None:
        return
    if setting.lower() != "none":
        yield problem(
            "launcher-switch-unknown",
            f"{LAUNCHER_SWITCH}={setting!r} has no meaning; only none has.",
            f"unset {LAUNCHER_SWITCH}, or set it to none to run every process alone.",
            setting=setting,
        )
    elif _of_launchers(facts.variables):
        yield note(
            "launcher-switched-off",
            f"{LAUNCHER_SWITCH}=none: what launchers have set is ignored, and every process runs "
            "alone.",
            f"unset {LAUNCHER_SWITCH}, if there is a launcher.",
            variables=_of_launchers(facts.variables),
        )


def _check_debug(facts: Facts) -> Iterator[Finding]:
    setting = facts.variables.get(_DEBUG)
    if setting is None:
        return
    if setting.upper() not in _DEBUG_LEVELS:
        yield problem(
            "debug-level-unknown",
            f"{_DEBUG}={setting!r} is no level of torch's, which refuses to open a group.",
            f"unset {_DEBUG}, or set it to one of {', '.join(_DEBUG_LEVELS)}.",
            setting=setting,
        )
    elif setting.upper() == "DETAIL":
        yield problem(
            "debug-level-detail",
            f"With {_DEBUG}=DETAIL torch 2.14's DistributedDataParallel crashes on gloo (ddp() "
            "gets around that), and every collective is checked by more messages.",
            f"export {_DEBUG}=INFO, which names unused parameters, too.",
            setting=setting,
        )


def _check_slowing(facts: Facts) -> Iterator[Finding]:
    for name, what in (
        ("CUDA_LAUNCH_BLOCKING", "the CPU waits for each operation of a device"),
        ("NCCL_P2P_DISABLE", "devices of one machine exchange data by way of its memory"),
        ("NCCL_IB_DISABLE", "InfiniBand is not used"),
        ("NCCL_SHM_DISABLE", "processes of one machine do not use shared memory"),
    ):
        setting = facts.variables.get(name)
        if setting is not None and setting.lower() not in _WITHOUT_EFFECT:
            yield note(
                "slowing-variable",
                f"With {name}={setting!r} {what}, which is slower.",
                f"unset {name} when you have found what it was set for.",
                name=name,
                setting=setting,
            )


def _check_driver_probe(facts: Facts) -> Iterator[Finding]:
    setting = facts.variables.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    if setting not in (None, "1") and facts.torch is not None and facts.torch.cuda is not None:
        yield note(
            "driver-opened-early",
            f"With PYTORCH_NVML_BASED_CUDA_CHECK={setting!r} asking whether there are devices "
            "opens the CUDA driver, and a process that has done so cannot be forked.",
            "Unset it; ddpkit sets it to 1.",
            setting=setting,
        )


def _check_secret(facts: Facts) -> Iterator[Finding]:
    topology = _topology(facts)
    if topology is not None and topology.num_nodes > 1 and "DDPKIT_SECRET" not in facts.variables:
        yield note(
            "no-secret",
            f"There are {topology.num_nodes} machines and DDPKIT_SECRET is not set, so that "
            "whoever reaches the port of rank 0 can send messages to the ranks.",
            "In a network that others use, set it to the same long random text for all ranks.",
            nodes=topology.num_nodes,
        )


CHECKS = (
    _check_readable,
    _check_stale,
    _check_interactive,
    _check_hand_set,
    _check_job_alone,
    _check_switch,
    _check_secret,
    _check_debug,
    _check_slowing,
    _check_driver_probe,
)
"""The checks of this file, in the order in which they are shown."""
