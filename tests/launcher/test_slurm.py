"""Real srun, salloc and sbatch, on a cluster of two virtual nodes that the tests start."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.slurm_cluster import Cluster, reason_to_skip, running_cluster
from tests.launcher.started import (
    RANK,
    Ended,
    Line,
    Started,
    places,
    read_lines,
    run_ranks_of,
    started,
)
from tests.launcher.test_examples import DIGITS, check_same_bits, load_parameters
from tests.launcher.test_examples import run as run_here

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(240)]  # a busy machine

SOON = 20.0  # seconds: far below every time-out, and enough for a busy machine
ONE_NODE = ("--nodes=1", "--ntasks=2")
TWO_NODES = ("--nodes=2", "--ntasks=3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_rank_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    deadline = time.monotonic() + SOON
    while cluster.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.processes() == []


def slurm(cluster: Cluster, folder: Path, *command: str) -> Ended:
    return run_ranks_of(folder, *cluster.command(folder, *command), environment=cluster.variables)


def srun(
    cluster: Cluster, folder: Path, *options: str
) -> contextlib.AbstractContextManager[Started]:
    command = cluster.command(folder, "srun", *options)
    return started(folder, *command, environment=cluster.variables)


# ------------------------------------------------------------------------------- who is where

TWO_ON_ONE_NODE: list[tuple[int, ...]] = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
THREE_IN_TURNS: list[tuple[int, ...]] = [(0, 3, 0, 2, 0, 2), (1, 3, 0, 1, 1, 2), (2, 3, 1, 2, 0, 2)]


@pytest.mark.drill
def test_tasks_are_ranks_and_two_jobs_at_once_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    in_turns = (*TWO_NODES, "--distribution=cyclic")
    with (
        srun(cluster, tmp_path, *ONE_NODE, *RANK, "sum", "1") as one,
        srun(cluster, tmp_path, *in_turns, *RANK, "sum", "100") as other,
    ):
        check_tasks(one.end(), TWO_ON_ONE_NODE, total=2)
        check_tasks(other.end(), THREE_IN_TURNS, total=300)


def check_tasks(ended: Ended, expected: list[tuple[int, ...]], total: int) -> None:
    assert ended.status == 0, ended.stderr
    assert places(ended.lines) == expected
    assert {line["source"] for line in ended.lines} == {"slurm"}
    assert {line["total"] for line in ended.lines} == {total}
    assert ended.stderr.count("read from slurm:") == len(expected), ended.stderr


@pytest.mark.drill
def test_two_steps_of_a_job_are_two_worlds(cluster: Cluster, tmp_path: Path) -> None:
    step = f"srun --exact --nodes=1 --ntasks=2 {' '.join(RANK)} sum"
    script = f"{step} 1 > one & first=$!; {step} 100 > other && wait $first"
    job = ("salloc", "--nodes=1", "--ntasks=4", "bash", "-c", script)
    ended = slurm(cluster, tmp_path, *job)
    assert ended.status == 0, ended.stderr
    for name, total in (("one", 2), ("other", 200)):
        lines = read_lines((tmp_path / name).read_text())
        assert places(lines) == TWO_ON_ONE_NODE
        assert [line["total"] for line in lines] == [total, total]


# --------------------------------------------------------------------- no step of several tasks


@pytest.mark.drill
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("salloc", "--ntasks=4"), id="a shell of a job"),
        pytest.param(("srun", "--ntasks=1"), id="a step of one task"),
    ],
)
def test_a_program_alone_starts_its_own_ranks(
    cluster: Cluster, tmp_path: Path, command: tuple[str, ...]
) -> None:
    ended = slurm(cluster, tmp_path, *command, *RANK, "sum", "5")
    assert ended.status == 0, ended.stderr
    check_own_ranks(ended.lines)


def check_own_ranks(lines: list[Line]) -> None:
    assert places(lines) == TWO_ON_ONE_NODE
    assert {line["source"] for line in lines} == {"ddpkit"}
    assert {line["total"] for line in lines} == {10}


@pytest.mark.drill
def test_a_batch_script_starts_its_own_ranks(cluster: Cluster, tmp_path: Path) -> None:
    command = f"--wrap={' '.join(RANK)} sum 5"
    ended = slurm(
        cluster, tmp_path, "sbatch", "--wait", "--ntasks=4", "--output=out", "--error=err", command
    )
    assert ended.status == 0, ended.stderr + (tmp_path / "err").read_text()
    check_own_ranks(read_lines((tmp_path / "out").read_text()))


@pytest.mark.drill
def test_an_interactive_task_starts_its_own_ranks(cluster: Cluster, tmp_path: Path) -> None:
    command = ("srun", "--pty", "--ntasks=1", *RANK, "sum", "5")
    check_own_ranks(read_lines(run_on_terminal(cluster, tmp_path, *command)))


def run_on_terminal(cluster: Cluster, folder: Path, *command: str) -> str:
    ours, theirs = pty.openpty()
    command = cluster.command(folder, *command)
    with (
        subprocess.Popen(
            command, env=cluster.variables, stdin=theirs, stdout=theirs, stderr=theirs
        ) as process,
        os.fdopen(ours, "rb", buffering=0) as screen,
    ):
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # EIO: the last of them has closed the terminal
            while part := screen.read(4096):
                output += part
        assert process.wait(10) == 0, output
    return output.decode()


@pytest.mark.drill
def test_torchrun_in_a_step(cluster: Cluster, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = slurm(cluster, tmp_path, "srun", "--ntasks=1", *torchrun, RANK[1], "sum", "5")
    assert ended.status == 0, ended.stderr
    assert {line["source"] for line in ended.lines} == {"torchrun"}
    assert [line["total"] for line in ended.lines] == [10, 10]


# ----------------------------------------------------------------------------------- failures


def test_a_rank_that_raises_ends_all(cluster: Cluster, tmp_path: Path) -> None:
    with srun(cluster, tmp_path, *TWO_NODES, *RANK, "fail", "1") as job:
        ranks = job.await_lines(3)
        ended = job.end()
    # The only test of srun that is no drill, so it looks at what a step of two nodes is, too.
    assert places(ranks) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]
    assert [line["total"] for line in ranks] == [3, 3, 3]
    assert ended.status == 1
    assert ended.seconds < SOON
    for other in (0, 2):
        assert f"PeerError: [rank {other}/3] Rank 1 on n1 failed" in ended.stderr
    assert "\nKeyError: 'the cause'\n" in ended.stderr


@pytest.mark.drill
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_task_ends_all(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    with srun(cluster, tmp_path, *ONE_NODE, *RANK, f"wait{victim}", "1") as job:
        ranks = job.await_lines(2)
        os.kill(ranks[victim]["pid"], signal.SIGKILL)
        ended = job.end()
    assert ended.status == 128 + signal.SIGKILL
    assert ended.seconds < SOON
    assert f"Rank {victim} (process {ranks[victim]['pid']} on n" in ended.stderr


# ---------------------------------------------------------------------------- asked to stop


@pytest.mark.drill
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--signal=USR1"], id="signal"),
        pytest.param([], id="cancel"),  # SIGTERM, and SIGKILL for what is there after KillWait
    ],
)
def test_ranks_that_are_asked_stop_at_the_same_step(
    cluster: Cluster, tmp_path: Path, options: list[str]
) -> None:
    with srun(cluster, tmp_path, "--job-name=stops", *ONE_NODE, *RANK, "stop", "1") as job:
        job.await_lines(4)
        scancel = cluster.command(tmp_path, "scancel", "--name=stops", *options)
        subprocess.run(scancel, env=cluster.variables, check=True)
        ended = job.end()
    stops = [line["stopped"] for line in ended.lines if "stopped" in line]
    assert len(stops) == 2, ended.stderr
    assert stops[0] == stops[1]
    assert ended.seconds < SOON


# ----------------------------------------------------------------------------- the digits example


@pytest.mark.drill
def test_digits_reaches_the_same_parameters(cluster: Cluster, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run_here(here, DIGITS, "--epochs", "1")
    command = (sys.executable, DIGITS, "--epochs", "1")
    ended = slurm(cluster, there, "srun", *ONE_NODE, *command)
    assert ended.status == 0, ended.stderr
    check_same_bits(load_parameters(there / "digits.pt"), load_parameters(here / "digits.pt"))
