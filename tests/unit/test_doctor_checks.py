"""What the doctor concludes from what it knows: no process, no machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpkit.doctor.checks import find_problems
from ddpkit.doctor.checks_launcher import how_to_unset
from ddpkit.doctor.checks_machine import count_ranks, threads_of_rank
from ddpkit.doctor.checks_network import interfaces_of_nccl
from ddpkit.doctor.facts import (
    Accelerators,
    Cores,
    Device,
    Exercise,
    Facts,
    ForkVerdict,
    GlooView,
    Installation,
    Launcher,
    Limits,
    Lookup,
    Master,
    Names,
    NvidiaHost,
    Space,
    TorchBuild,
)
from ddpkit.doctor.finding import Finding
from ddpkit.doctor.surroundings import read_launcher
from ddpkit.topology import Topology
from tests.unit.launchers import JOB, MPICH, OPEN_MPI_5, STEP

GIB = 2**30
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HAND_SET = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {**OPEN_MPI_5, **MEETING}
LOOPBACK = Lookup("127.0.0.1", ("127.0.0.1",), 0.001)

INSTALLATION = Installation(
    python="3.11.7",
    executable="/env/bin/python",
    platform="Linux 6.1 x86_64",
    ddpkit="1.0",
    folder="/env/lib/ddpkit",
    recorded={"ddpkit": "1.0", "torch": "2.14.1"},
)
TORCH = TorchBuild("2.14.1+cu130", "/env/lib/torch", "13.0", None, "2.30", ("gloo",), 8, 2.0)

# A healthy machine without accelerators.
WELL = Facts(
    installation=INSTALLATION,
    torch=TORCH,
    accelerators=Accelerators(None, 0),
    nvidia=NvidiaHost(),
    cores=Cores(machine=8, affinity=8, quota=None, usable=8),
    limits=Limits(descriptors=65536, most_descriptors=65536, locked_memory=8 * 2**20),
    shared_memory=Space("/dev/shm", 24 * GIB, 23 * GIB),
    temporary=Space("/tmp", 100 * GIB, 50 * GIB),
    launcher=Launcher(Topology(), "none", ("bash bash", "systemd systemd")),
    names=Names(Lookup("box", ("10.0.0.2",), 0.002), Lookup("127.0.0.1", ("localhost",), 0.001)),
    interfaces=("lo", "eth0"),
    gloo=GlooView("10.0.0.2", {"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",)}),
    fork=ForkVerdict("fork"),
    exercise=Exercise("cpu", 2, 0.3, 0.0003, 1e9, 8 * 2**20),
)
GPU = replace(
    WELL, accelerators=Accelerators("cuda", 2), nvidia=NvidiaHost(("/dev/nvidia0", "/dev/nvidia1"))
)


def launched(variables: dict[str, str], *ancestors: str, interactive: bool = False) -> Launcher:
    read = read_launcher(variables, pid=1)
    return replace(read, ancestors=ancestors, interactive=interactive)


def with_variables(facts: Facts = WELL, /, **variables: str) -> Facts:
    return replace(facts, variables=variables)


def under(variables: dict[str, str], *ancestors: str, **changes: Any) -> Facts:
    return replace(WELL, variables=variables, launcher=launched(variables, *ancestors), **changes)


def ids(facts: Facts) -> list[str]:
    return [finding.id for finding in find_problems(facts)]


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in find_problems(facts) if finding.severity == "problem"]


def only(facts: Facts) -> Finding:
    (finding,) = find_problems(facts)
    return finding


def test_a_healthy_machine_has_no_findings() -> None:
    assert ids(WELL) == ids(GPU) == []


def test_nothing_known_is_nothing_found() -> None:
    assert ids(Facts()) == []


INJECTED: dict[str, tuple[Facts, str]] = {
    # 1. a wrong interface
    "interface of gloo": (
        with_variables(
            replace(WELL, gloo=GlooView(None, {}, refusal="no eth9")), GLOO_SOCKET_IFNAME="eth9"
        ),
        "interface-refused",
    ),
    "interface of nccl": (with_variables(NCCL_SOCKET_IFNAME="ib"), "nccl-interface-missing"),
    # 2. stale variables
    "rank alone": (under({"RANK": "0"}), "launcher-variables"),
    "step that is over": (under(STEP, "bash bash", "sshd sshd"), "launcher-stale"),
    "mpi that is over": (under(OPEN_MPI, "bash bash"), "launcher-stale"),
    "torchrun that is over": (
        under(TORCHRUN, "bash bash", master=Master(LOOPBACK, is_here=True, port=29500)),
        "launcher-stale",
    ),
    # 3. descriptors
    "descriptors": (
        replace(WELL, limits=Limits(256, 4096, None)),
        "too-few-descriptors",
    ),
    # 4. host names
    "host name": (
        replace(WELL, names=Names(Lookup("box", error="Name or service not known"), LOOPBACK)),
        "host-name-unresolved",
    ),
    "slow resolver": (
        replace(WELL, names=Names(Lookup("box", (), 5.0, "no answer", timed_out=True), LOOPBACK)),
        "resolver-slow",
    ),
    # 5. ports
    "busy port": (
        with_variables(
            replace(WELL, master=Master(LOOPBACK, True, 29500, "EADDRINUSE: in use")),
            MASTER_PORT="29500",
        ),
        "port-busy",
    ),
    "port of root": (
        replace(WELL, master=Master(LOOPBACK, True, 80, "EACCES: Permission denied")),
        "port-unusable",
    ),
    # 6. threads
    "threads": (with_variables(OMP_NUM_THREADS="64"), "too-many-threads"),
    "threads of many ranks": (
        with_variables(DDPKIT_NPROC_PER_NODE="4", OMP_NUM_THREADS="4"),
        "too-many-threads",
    ),
    # 7. metadata
    "metadata of ddpkit": (
        replace(WELL, installation=replace(INSTALLATION, recorded={"ddpkit": None, "torch": "2"})),
        "metadata-missing",
    ),
    "two installations": (
        replace(WELL, installation=replace(INSTALLATION, copies=("/src/ddpkit",))),
        "two-installations",
    ),
    "dependency": (
        replace(WELL, installation=replace(INSTALLATION, missing=("cloudpickle",))),
        "dependency-missing",
    ),
    # 8. shared memory
    "shared memory": (
        replace(WELL, shared_memory=Space("/dev/shm", 64 * 2**20, 64 * 2**20)),
        "shared-memory-small",
    ),
    "no shared memory": (
        replace(WELL, shared_memory=Space("/dev/shm", error="FileNotFoundError: ...")),
        "shared-memory-unusable",
    ),
    # 9. devices
    "device that is not there": (
        with_variables(CUDA_VISIBLE_DEVICES="0,7"),
        "devices-missing",
    ),
    "hidden devices": (
        with_variables(replace(GPU, accelerators=Accelerators(None, 0)), CUDA_VISIBLE_DEVICES=""),
        "devices-hidden",
    ),
    "driver": (replace(GPU, accelerators=Accelerators(None, 0)), "driver-unusable"),
    "torch for the CPU": (
        replace(
            GPU,
            accelerators=Accelerators(None, 0),
            torch=TorchBuild("2.14.1+cpu", "", None, None, None, (), 8, 2.0),
        ),
        "torch-without-cuda",
    ),
    "device that fails": (
        replace(GPU, devices=(Device("cuda:0", "X", 1, 1), Device("cuda:1", error="ECC"))),
        "device-broken",
    ),
    # 10. fewer cores than ranks
    "affinity": (
        with_variables(replace(WELL, cores=Cores(8, 2, None, 2)), DDPKIT_NPROC_PER_NODE="4"),
        "too-few-cores",
    ),
    # 11. the temporary folder
    "temporary folder": (
        replace(WELL, temporary=Space("/nonesuch", error="FileNotFoundError: ...")),
        "temporary-folder-unusable",
    ),
    "full temporary folder": (
        replace(WELL, temporary=Space("/tmp", GIB, 5000)),
        "temporary-folder-full",
    ),
    # 12. debug levels
    "detail": (with_variables(TORCH_DISTRIBUTED_DEBUG="detail"), "debug-level-detail"),
    "debug level": (with_variables(TORCH_DISTRIBUTED_DEBUG="VERBOSE"), "debug-level-unknown"),
    # 13. the host of rank 0
    "unknown host of rank 0": (
        replace(WELL, master=Master(Lookup("node0", error="not known"), None, 29500)),
        "master-unresolved",
    ),
    # 14. launchers that contradict each other
    "launchers": (under({**STEP, **MPICH, "PMI_RANK": "0"}), "launcher-variables"),
    "switch": (with_variables(DDPKIT_LAUNCHER="slurm"), "launcher-switch-unknown"),
    # others
    "number of ranks": (with_variables(DDPKIT_NPROC_PER_NODE="all"), "nproc-invalid"),
    "no torch": (
        replace(WELL, torch=None, failures={"torch": "ModuleNotFoundError: ..."}),
        "torch-unusable",
    ),
    "old torch": (
        replace(WELL, torch=replace(TORCH, version="2.5.1")),
        "torch-too-old",
    ),
    "ranks": (
        replace(WELL, exercise=None, failures={"exercise": "GroupError: ..."}),
        "ranks-failed",
    ),
    "locked memory": (
        replace(WELL, limits=Limits(65536, 65536, 65536, infiniband=("mlx5_0",))),
        "too-little-locked-memory",
    ),
    "a failed look": (replace(WELL, failures={"cores": "OSError: ..."}), "not-looked-at"),
}


@pytest.mark.parametrize(("facts", "expected"), INJECTED.values(), ids=INJECTED)
def test_each_problem_is_found_alone_and_has_a_remedy(facts: Facts, expected: str) -> None:
    (finding,) = problems(facts)
    assert finding.id == expected
    assert finding.message
    assert finding.remedy


@pytest.mark.parametrize(
    "facts",
    [
        under(STEP, "python python train.py", "slurmstepd slurmstepd: [12.0]"),
        under(OPEN_MPI, "mpirun mpirun -n 8"),
        under({**MPICH, **MEETING}, "hydra_pmi_proxy hydra_pmi_proxy"),
        under(STEP),  # nothing is known of the processes above
        under(TORCHRUN, master=Master(LOOPBACK, True, 29500, "EADDRINUSE: Address in use")),
        under({**HAND_SET, "RANK": "1"}, master=Master(LOOPBACK, True, 29500, "EADDRINUSE: ...")),
    ],
    ids=["step", "openmpi", "mpich", "no /proc", "torchrun", "rank 1 by hand"],
)
def test_a_launcher_that_is_there_is_no_problem(facts: Facts) -> None:
    assert problems(facts) == []


def test_rank_0_must_be_on_its_host() -> None:
    elsewhere = Master(Lookup("10.9.9.9", ("10.9.9.9",)), is_here=False, port=29500)
    variables = {**HAND_SET, "MASTER_ADDR": "10.9.9.9"}
    assert "master-elsewhere" in ids(under(variables, master=elsewhere))
    assert "master-elsewhere" not in ids(under({**variables, "RANK": "1"}, master=elsewhere))


def test_a_profile_that_names_a_distant_master_is_no_problem() -> None:
    elsewhere = Master(Lookup("10.9.9.9", ("10.9.9.9",)), is_here=False, port=29500)
    variables = {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500"}
    assert ids(under(variables, master=elsewhere)) == []


NOTES: dict[str, tuple[Facts, str]] = {
    "fork": (replace(WELL, fork=ForkVerdict("forkserver", "an accelerator was used")), "no-fork"),
    "slow ranks": (
        replace(WELL, exercise=Exercise("cpu", 2, 0.3, 0.01, 1e6, 8 * 2**20)),
        "ranks-slow",
    ),
    "one thread": (with_variables(OMP_NUM_THREADS="1"), "few-threads"),
    "quota": (replace(WELL, cores=Cores(8, 8, 2.0, 2)), "quota"),
    "by hand": (under(HAND_SET), "variables-set-by-hand"),
    "job alone": (under(JOB), "slurm-job-alone"),
    "switched off": (under({**STEP, "DDPKIT_LAUNCHER": "none"}), "launcher-switched-off"),
    "blocking": (with_variables(CUDA_LAUNCH_BLOCKING="1"), "slowing-variable"),
    "driver": (with_variables(PYTORCH_NVML_BASED_CUDA_CHECK="0"), "driver-opened-early"),
    "loopback": (
        replace(WELL, gloo=GlooView("127.0.1.1", {}, chosen="eth0")),
        "host-name-is-loopback",
    ),
    "memory": (replace(GPU, devices=(Device("cuda:0", "X", 80, 10),)), "device-memory-taken"),
    "other version": (
        replace(WELL, installation=replace(INSTALLATION, ddpkit="2.0")),
        "metadata-differs",
    ),
    "slow resolver": (
        replace(WELL, names=Names(Lookup("box", ("10.0.0.2",), 2.5), LOOPBACK)),
        "resolver-slow",
    ),
}


@pytest.mark.parametrize(("facts", "expected"), NOTES.values(), ids=NOTES)
def test_what_is_only_good_to_know_is_a_note(facts: Facts, expected: str) -> None:
    finding = only(facts)
    assert (finding.id, finding.severity) == (expected, "note")
    assert finding.remedy


def test_a_shell_of_a_step_is_noted() -> None:
    shell = launched(STEP, "slurmstepd slurmstepd", interactive=True)
    assert "interactive-rank" in ids(replace(WELL, variables=STEP, launcher=shell))
    batch = launched(STEP, "slurmstepd slurmstepd")
    assert "interactive-rank" not in ids(replace(WELL, variables=STEP, launcher=batch))


def test_several_machines_need_a_secret_and_no_loopback() -> None:
    variables = {**STEP, "GLOO_SOCKET_IFNAME": "lo"}
    assert ids(under(variables, "slurmstepd")) == ["interface-is-loopback", "no-secret"]
    assert ids(under({**STEP, "DDPKIT_SECRET": "x"}, "slurmstepd")) == []


def test_problems_come_before_notes_and_causes_before_consequences() -> None:
    facts = with_variables(
        replace(
            WELL,
            fork=ForkVerdict("forkserver", "a thread runs"),
            gloo=GlooView(None, {}, refusal="no eth9"),
            exercise=None,
            failures={"exercise": "ConfigError: no eth9"},
        ),
        GLOO_SOCKET_IFNAME="eth9",
    )
    assert ids(facts) == ["interface-refused", "ranks-failed", "no-fork"]


def test_contradictions_are_shown_with_both_readings() -> None:
    (finding,) = problems(under({**STEP, **MPICH, "PMI_RANK": "0"}))
    assert "task 5 of 7" in finding.message
    assert "rank 0 of 8" in finding.message
    assert "unset ${!SLURM_@}" in finding.remedy


def test_a_hard_limit_is_not_remedied_by_ulimit() -> None:
    assert only(replace(WELL, limits=Limits(64, 4096, None))).remedy == "ulimit -n 4096"
    assert "limits.conf" in only(replace(WELL, limits=Limits(64, 64, None))).remedy


def test_a_quota_answered_by_a_setting_is_no_finding() -> None:
    facts = replace(WELL, cores=Cores(8, 8, 2.0, 8), variables={"OMP_NUM_THREADS": "8"})
    assert ids(facts) == []


@pytest.mark.parametrize("setting", ["GPU-1234", "0", "1,0", "0,-1,1", "-1", "NoDevFiles"])
def test_devices_that_exist_may_be_named_in_any_way(setting: str) -> None:
    assert ids(with_variables(GPU, CUDA_VISIBLE_DEVICES=setting)) == []


def test_ranks_of_mpi_may_be_bound_each_to_its_own_cores() -> None:
    facts = under(OPEN_MPI, "mpirun mpirun.openmpi", cores=Cores(8, 1, None, 1))
    assert problems(facts) == []
    assert [each.id for each in problems(under(OPEN_MPI, cores=Cores(1, 1, None, 1)))] == [
        "too-few-cores"
    ]


def test_an_empty_setting_hides_nothing_where_there_is_nothing() -> None:
    assert ids(with_variables(CUDA_VISIBLE_DEVICES="")) == []


def test_many_ranks_without_a_setting_divide_the_cores() -> None:
    facts = with_variables(DDPKIT_NPROC_PER_NODE="4")
    assert (count_ranks(facts), threads_of_rank(facts), ids(facts)) == (4, 2, [])


def test_cores_that_srun_gave_each_task_are_not_divided() -> None:
    assert threads_of_rank(under({**STEP, "SLURM_CPUS_PER_TASK": "6"})) == 6
    assert threads_of_rank(under(STEP)) == 4


def test_the_one_thread_of_torchrun_is_not_the_users() -> None:
    variables = {**TORCHRUN, "OMP_NUM_THREADS": "1"}
    facts = under(variables, master=Master(LOOPBACK, True, 29500, "EADDRINUSE: ..."))
    assert (threads_of_rank(facts), ids(facts)) == (4, [])


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("eth", ["eth0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("eth0:4000", ["eth0"]),
        ("^lo", ["eth0", "ib0"]),
        ("^=lo,ib0", ["eth0"]),
        ("^lo,eth,ib", []),
    ],
)
def test_interfaces_of_nccl(setting: str, left: list[str]) -> None:
    assert interfaces_of_nccl(setting, ["lo", "eth0", "ib0"]) == left


def test_how_to_unset_names_families_once() -> None:
    assert how_to_unset({**JOB, "RANK": "0", "HOME": "/"}) == "unset RANK ${!SLURM_@}"
