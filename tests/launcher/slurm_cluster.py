"""A SLURM cluster of two nodes for tests with the real srun: all of it on this machine.

It has a network of its own, a namespace of the kernel's, in which the nodes have names and
addresses as in a cluster, although one machine is behind both. Its files are in one folder, also
the key and the socket of its own munge daemon. So it needs no service of the system, changes
nothing outside, and several can run at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launcher.started import clean_environment

NODES = ("n1", "n2")
COMMANDS = (
    *("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo", "munged", "mungekey"),
    *("ip", "unshare", "nsenter", "setpriv"),
)

_START_BOUND = 30.0
_END_BOUND = 10.0

_HOSTS = """
127.0.0.1 localhost
10.78.0.1 n1
10.78.0.2 n2
10.78.0.3 login
"""

# The addresses are on a cable of which both ends are here; what is sent to them stays inside.
_NETWORK = """
set -e
hostname login
mount --bind "$0" /etc/hosts
ip link set lo up
ip link add cluster type veth peer name unused
ip link set cluster up
ip link set unused up
for number in 1 2 3; do ip address add "10.78.0.$number/24" dev cluster; done
echo ready
exec sleep infinity
"""

_NODE = 'hostname "$0"; exec slurmd -D -N "$0"'

# There is no accounting and no cgroup, which need services of the system. That the end of a task
# does not end the others is SLURM's default.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=15
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 Port=17001 CPUs=4
NodeName=n2 Port=17002 CPUs=4
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str | None:
    """Say why there can be no cluster here, if so."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (make launchers)"
    if os.geteuid() != 0:
        return "a SLURM cluster of one's own needs root"
    trial = ["unshare", "--net", "--mount", "--uts", "true"]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        return "namespaces cannot be made here"
    return None


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    variables: Mapping[str, str]
    """Environment variables for its commands."""
    network: int
    """Process id of what holds its namespaces."""
    daemons: frozenset[int]
    """Process ids of its daemons, which stay until the end."""

    def command(self, folder: Path, *command: str) -> tuple[str, ...]:
        """Return what starts a command on the login node, in a folder."""
        return (*_entering(self.network), "env", f"--chdir={folder}", *command)

    def processes(self) -> list[psutil.Process]:
        """List what runs in the cluster: the ranks, and the daemon that SLURM gives each step."""
        return [one for one in _processes_of(self.variables) if one.pid not in self.daemons]


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster for a block, and end all of its processes behind it."""
    variables = {**clean_environment(), "SLURM_CONF": str(folder / "slurm.conf")}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder))
    (folder / "hosts").write_text(_HOSTS)
    (folder / "state").mkdir()
    with contextlib.ExitStack() as stack:

        def start(name: str, *command: str) -> int:
            return stack.enter_context(_daemon(folder / f"{name}.out", variables, *command))

        try:
            cluster = _start_daemons(folder, variables, start)
        except (OSError, TimeoutError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"the cluster did not start: {error}\n{_tails(folder)}") from error
        stack.callback(_end_steps, cluster)
        yield cluster


def _start_daemons(
    folder: Path, variables: Mapping[str, str], start: Callable[..., int]
) -> Cluster:
    network = start("network", *_namespaces(), "sh", "-c", _NETWORK, str(folder / "hosts"))
    _wait_until(lambda: "ready" in (folder / "network.out").read_text(), "the network is made")
    pids = [network, _start_munge(folder, start)]
    pids.append(start("slurmctld", *_entering(network), "slurmctld", "-D"))
    own_name = ("unshare", "--uts", "sh", "-c", _NODE)
    pids += [start(f"slurmd-{node}", *_entering(network), *own_name, node) for node in NODES]
    cluster = Cluster(variables, network, frozenset(pids))
    _wait_until(lambda: _count_idle_nodes(cluster, folder) == len(NODES), "both nodes are idle")
    return cluster


def _namespaces() -> tuple[str, ...]:
    return ("unshare", "--net", "--mount", "--uts")


def _entering(network: int) -> tuple[str, ...]:
    return ("nsenter", f"--target={network}", "--net", "--mount", "--uts")


def _start_munge(folder: Path, start: Callable[..., int]) -> int:
    key, ready = folder / "munge.key", folder / "munge.socket"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    # It would rather not run as root, nor in a folder that only root can enter: hence the force.
    pid = start("munged", "munged", "--foreground", "--force", f"--socket={ready}", *files)
    _wait_until(ready.exists, "munged listens")
    return pid


@contextlib.contextmanager
def _daemon(log: Path, variables: Mapping[str, str], *command: str) -> Iterator[int]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ("setpriv", "--pdeathsig=KILL", *command),  # none outlives a killed test
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for pytest, which ends them in order
        ) as process,
    ):
        try:
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(_END_BOUND)
            except subprocess.TimeoutExpired:
                process.kill()


def _count_idle_nodes(cluster: Cluster, folder: Path) -> int:
    command = cluster.command(folder, "sinfo", "--noheader", "--Node", "--format=%T")
    shown = subprocess.run(
        command, env=cluster.variables, capture_output=True, text=True, check=False
    )
    return shown.stdout.split().count("idle")


def _wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_BOUND
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_START_BOUND:.0f} s until {what}")
        time.sleep(0.05)


def _tails(folder: Path) -> str:
    logs = [*sorted(folder.glob("*.log")), *sorted(folder.glob("*.out"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def _processes_of(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Find the processes that have the variable of this cluster alone, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == variables["SLURM_CONF"]:
                found.append(process)
    return found


def _end_steps(cluster: Cluster) -> None:
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
