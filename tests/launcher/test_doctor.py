"""`python -m ddpkit doctor` as a person runs it, with problems that are really there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ddpkit
from ddpkit.doctor import torch_process
from ddpkit.doctor.surroundings import select_variables
from ddpkit.doctor.torch_process import TorchProcess
from tests.launcher import slurm_cluster
from tests.launcher.test_mpi import MPIEXEC
from tests.unit.launchers import MPICH, STEP

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]

SOURCES = Path(ddpkit.__file__).parent
# What the machine of a test may really have, such as a container with small limits.
OF_THE_MACHINE = {
    "too-few-descriptors",
    "shared-memory-small",
    "too-few-cores",
    "host-name-unresolved",
    "resolver-slow",
}
HAND_SET = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
LOCALS = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
TORCHRUN = {**HAND_SET, **LOCALS, "TORCHELASTIC_RUN_ID": "none"}


class Doctor(NamedTuple):
    """What the doctor has said."""

    status: int
    shown: dict[str, Any]

    @property
    def problems(self) -> set[str]:
        return {each["id"] for each in self.shown["findings"] if each["severity"] == "problem"}

    @property
    def notes(self) -> set[str]:
        return {each["id"] for each in self.shown["findings"] if each["severity"] == "note"}

    def message(self, name: str) -> str:
        return next(str(each["message"]) for each in self.shown["findings"] if each["id"] == name)


def clean(variables: Mapping[str, str]) -> dict[str, str]:
    ours = select_variables(os.environ)
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **variables}


def ask(
    folder: Path, *options: str, python: Sequence[str] = (sys.executable,), **variables: str
) -> Doctor:
    command = [*python, "-m", "ddpkit", "doctor", "--json", *options]
    result = subprocess.run(
        command,
        cwd=folder,
        env=clean(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == ""
    doctor = Doctor(result.returncode, json.loads(result.stdout))
    assert doctor.status == (1 if doctor.problems else 0)
    assert doctor.shown["ok"] is not bool(doctor.problems)
    assert all(each["message"] and each["remedy"] for each in doctor.shown["findings"])
    return doctor


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """Give the search path of a torch that cannot be imported, which takes no time."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    return str(folder)


@contextlib.contextmanager
def held_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield str(holder.getsockname()[1])


def free_port() -> str:
    with held_port() as port:
        return port


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    doctor = ask(tmp_path)
    facts = doctor.shown["facts"]
    assert doctor.problems <= OF_THE_MACHINE
    assert facts["failures"] == {}
    assert facts["torch"]["version"]
    assert facts["exercise"]["ranks"] == 2
    assert facts["exercise"]["bandwidth"] > 0
    assert list(tmp_path.iterdir()) == []


def test_ten_problems_at_once(tmp_path: Path) -> None:
    import torch

    copy = tmp_path / "copy"
    shutil.copytree(SOURCES, copy / "ddpkit")
    with held_port() as port:
        doctor = ask(
            tmp_path,
            python=("sh", "-c", f'ulimit -n 200; exec {sys.executable} "$@"', "sh"),
            GLOO_SOCKET_IFNAME="nonesuch0",
            NCCL_SOCKET_IFNAME="nonesuch",
            RANK="0",  # without what belongs to it
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            OMP_NUM_THREADS="64",
            TMPDIR="/nonesuch",
            TORCH_DISTRIBUTED_DEBUG="DETAIL",
            CUDA_VISIBLE_DEVICES="0,98,99",
            PYTHONPATH=str(copy),
        )
    expected = {
        "interface-refused",
        "nccl-interface-missing",
        "launcher-variables",
        "port-busy",
        "too-many-threads",
        "temporary-folder-unusable",
        "debug-level-detail",
        "two-installations",
        "too-few-descriptors",
        "ranks-failed",  # as gloo is told to use that interface
    }
    if torch.version.cuda is not None:
        expected.add("devices-missing")
    assert expected <= doctor.problems
    assert "nonesuch0" in doctor.message("ranks-failed")
    assert port in doctor.message("port-busy")


# -------------------------------------------------------- without torch, which is a problem itself


def test_without_torch_the_rest_is_looked_at(tmp_path: Path, broken: str) -> None:
    doctor = ask(tmp_path, PYTHONPATH=broken)
    facts = doctor.shown["facts"]
    assert doctor.problems - OF_THE_MACHINE == {"torch-unusable"}
    assert "libcudart.so.13: no such file" in doctor.message("torch-unusable")
    assert all(facts[name] for name in ("installation", "cores", "limits", "names", "interfaces"))


def test_sources_without_an_installation(tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "src" / "ddpkit")
    # -S: nothing of what is installed is found.
    doctor = ask(tmp_path, python=(sys.executable, "-S"), PYTHONPATH=str(tmp_path / "src"))
    expected = {"metadata-missing", "dependency-missing", "torch-unusable"}
    assert doctor.problems - OF_THE_MACHINE == expected


def test_an_import_that_takes_too_long(tmp_path: Path) -> None:
    begin = time.monotonic()
    doctor = ask(tmp_path, "--timeout", "0.05")
    assert time.monotonic() - begin < 30
    assert doctor.problems - OF_THE_MACHINE == {"torch-unusable"}
    assert "did not finish within 0.05 s" in doctor.message("torch-unusable")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (STEP, "launcher-stale"),
        ({**STEP, **MPICH, "PMI_RANK": "0"}, "launcher-variables"),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "launcher-stale"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "launcher-variables"),
        ({**HAND_SET, "MASTER_ADDR": "192.0.2.77"}, "master-elsewhere"),
        ({**HAND_SET, "MASTER_ADDR": "nobody.invalid."}, "master-unresolved"),
        ({"DDPKIT_NPROC_PER_NODE": "5000"}, "too-few-cores"),
        ({"DDPKIT_NPROC_PER_NODE": "5000", "OMP_NUM_THREADS": "2"}, "too-many-threads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variables(variables: dict[str, str], expected: str, tmp_path: Path, broken: str) -> None:
    doctor = ask(tmp_path, PYTHONPATH=broken, MASTER_PORT=free_port(), **variables)
    if expected == "master-unresolved":  # where there is no network, the resolver may not know
        assert doctor.problems & {"master-unresolved", "resolver-slow"}
    else:
        assert expected in doctor.problems


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="it binds to a core")
def test_fewer_cores_than_ranks(tmp_path: Path, broken: str) -> None:
    bind = f"import os, sys; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    bind += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    python = (sys.executable, "-c", bind)
    doctor = ask(tmp_path, python=python, PYTHONPATH=broken, DDPKIT_NPROC_PER_NODE="2")
    assert "too-few-cores" in doctor.problems
    assert doctor.shown["facts"]["cores"]["affinity"] == 1


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-mun", "sh", "-c", "mount -t tmpfs none /dev/shm && hostname trial"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="it needs namespaces of its own")
def test_a_machine_with_a_small_shared_memory_and_an_unknown_name(
    tmp_path: Path, broken: str
) -> None:
    setting = "mount -t tmpfs -o size=64m none /dev/shm; hostname nobody-knows-me; "
    shell = ("unshare", "-mun", "sh", "-c", f'{setting} exec {sys.executable} "$@"', "sh")
    doctor = ask(tmp_path, python=shell, PYTHONPATH=broken)
    assert {"shared-memory-small", "host-name-unresolved"} <= doctor.problems
    assert "'nobody-knows-me'" in doctor.message("host-name-unresolved")


# ------------------------------------------------------------------------------- with real torch


@pytest.mark.drill
def test_what_ddpkit_does_is_shown_on_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddpkit", "doctor", "--json"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean({"DDPKIT_LOG": "info"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "opened a group: rank 0 of 2" in result.stderr
    assert json.loads(result.stdout)["version"] == 1


@pytest.mark.drill
def test_a_thread_that_forbids_a_fork(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    doctor = ask(tmp_path, PYTHONPATH=str(tmp_path))
    assert "no-fork" in doctor.notes
    assert doctor.problems <= OF_THE_MACHINE
    assert "1 more Python threads are running" in doctor.message("no-fork")


@pytest.mark.drill
def test_ranks_that_cannot_be_started_in_time(tmp_path: Path) -> None:
    # Each rank's first import of what it runs takes longer than doctor waits.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(600))\n"
    )
    begin = time.monotonic()
    doctor = ask(tmp_path, "--timeout", "20", PYTHONPATH=str(tmp_path))
    assert time.monotonic() - begin < 60
    assert doctor.problems - OF_THE_MACHINE == {"ranks-failed"}


# --------------------------------------------------------------------------- under real launchers

LOOK = """
import os, subprocess, sys
command = [sys.executable, "-m", "ddpkit", "doctor", "--json", "--no-smoke"]
variables = {**os.environ, "PYTHONPATH": sys.argv[1]}
with open(f"out-{os.getpid()}", "w") as out:
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, env=variables, check=False)
"""


def check_under(folder: Path, source: str, broken: str, *launcher: str, **variables: str) -> None:
    """Let two ranks of a launcher ask the doctor: nothing is wrong with being launched."""
    (folder / "look.py").write_text(LOOK)
    result = subprocess.run(
        [*launcher, str(folder / "look.py"), broken],
        cwd=folder,
        env=clean(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    looks = [json.loads(file.read_text()) for file in folder.glob("out-*")]
    assert len(looks) == 2
    for shown in looks:
        found = {each["id"] for each in shown["findings"]}
        assert found - OF_THE_MACHINE == {"torch-unusable"}, shown["findings"]
        assert shown["facts"]["launcher"]["topology"]["source"] == source
    assert {shown["facts"]["launcher"]["topology"]["rank"] for shown in looks} == {0, 1}


@pytest.mark.drill
@pytest.mark.parametrize(
    "options", [["--standalone"], ["--master-port"], ["--rdzv-backend=c10d", "--rdzv-endpoint"]]
)
def test_under_torchrun(options: list[str], tmp_path: Path, broken: str) -> None:
    values = {"--master-port": free_port(), "--rdzv-endpoint": f"127.0.0.1:{free_port()}"}
    options = [f"{each}={values[each]}" if each in values else each for each in options]
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2")
    check_under(tmp_path, "torchrun", broken, *torchrun)


@pytest.mark.drill
@pytest.mark.parametrize("source", MPIEXEC)
def test_under_mpi(source: str, tmp_path: Path, broken: str) -> None:
    if shutil.which(MPIEXEC[source][0]) is None:
        pytest.skip(f"not installed: {MPIEXEC[source][0]} (make launchers)")
    check_under(tmp_path, source, broken, *MPIEXEC[source], "2", sys.executable)


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_under_slurm(tmp_path: Path, broken: str) -> None:
    reason = slurm_cluster.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "cluster").mkdir()
    with slurm_cluster.running_cluster(tmp_path / "cluster") as cluster:
        srun = cluster.command(tmp_path, "srun", "--nodes=1", "--ntasks=2", sys.executable)
        check_under(tmp_path, "slurm", broken, *srun, **cluster.variables)


# -------------------------------------------- another program in place of the one that needs torch


def run_process(
    monkeypatch: pytest.MonkeyPatch, program: str, limit: float = 30.0
) -> tuple[dict[str, object], dict[str, str]]:
    """Let another program stand for the one that imports torch."""
    begin = "import os, sys, time; from multiprocessing.connection import Connection\n"
    begin += "sys.path[:] = sys.argv[3:]\nfrom ddpkit.doctor.facts import *\n"
    begin += "from ddpkit.doctor.torch_side import Failed, Started\n"
    begin += "pipe = Connection(int(sys.argv[1]), readable=False)\n"
    monkeypatch.setattr(torch_process, "_PROGRAM", begin + program)
    with TorchProcess(limit, 1.0) as process:
        return process.collect()


def test_what_was_found_before_a_crash_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
pipe.send(Started("accelerators")); pipe.send(Accelerators("cuda", 1))
pipe.send(Started("fork")); pipe.send(Failed("OSError: why"))
print("about to end", flush=True)
pipe.send(Started("devices")); os.kill(os.getpid(), 11)
"""
    found, failures = run_process(monkeypatch, program)
    assert found.keys() == {"accelerators"}
    assert failures == {
        "fork": "OSError: why",
        "devices": "its process ended by SIGSEGV\nIts last words:\nabout to end",
    }


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("os.kill(os.getpid(), 4)", "its process ended by SIGILL"),
        ("os._exit(3)", "its process ended with exit code 3"),
        ("sys.exit()", "its process ended with exit code 0"),
    ],
)
def test_an_import_that_ends_the_process(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_process(monkeypatch, program) == ({}, {"torch": why})


def test_an_import_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "if os.fork() == 0: time.sleep(600)\n"  # a helper that holds the output open
    program += "while True: time.sleep(0.05)"
    monkeypatch.setattr(torch_process, "_GRACE", 0.3)
    begin = time.monotonic()
    found, failures = run_process(monkeypatch, program, limit=1.0)
    assert time.monotonic() - begin < 20
    assert (found, failures) == (
        {},
        {"torch": "it did not finish within 1 s, and was stopped"},
    )
