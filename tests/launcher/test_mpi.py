"""Real mpiexec of Open MPI and of MPICH (Hydra). No rank calls MPI; they only start the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.launcher.started import RANK, Ended, places, run_ranks_of, started
from tests.launcher.test_examples import DIGITS, TORCHRUN, check_same_bits, load_parameters
from tests.launcher.test_examples import run as run_here

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(240)]  # a busy machine

SOON = 20.0  # seconds: far below every time-out, and enough for a busy machine
MPIEXEC = {
    "openmpi": ("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"),
    "mpich": ("mpiexec.mpich", "-n"),
}


@pytest.fixture(params=MPIEXEC)
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(MPIEXEC[name][0]) is None:
        pytest.skip(f"not installed: {MPIEXEC[name][0]} (make launchers)")
    return name


def check_ranks(ended: Ended, source: str, size: int, total: int) -> None:
    assert ended.status == 0, ended.stderr
    assert places(ended.lines) == [(rank, size, rank, size, 0, 1) for rank in range(size)]
    assert {line["source"] for line in ended.lines} == {source}
    assert {line["total"] for line in ended.lines} == {total}
    assert ended.stderr.count(f"read from {source}:") == size, ended.stderr


@pytest.mark.drill
def test_two_jobs_at_once_do_not_meet(source: str, tmp_path: Path) -> None:
    with (
        started(tmp_path, *MPIEXEC[source], "2", *RANK, "sum", "1") as one,
        started(tmp_path, *MPIEXEC[source], "3", *RANK, "sum", "100") as other,
    ):
        check_ranks(one.end(), source, 2, total=2)
        check_ranks(other.end(), source, 3, total=300)


@pytest.mark.drill
def test_a_single_process_starts_its_own_ranks(source: str, tmp_path: Path) -> None:
    ended = run_ranks_of(tmp_path, *MPIEXEC[source], "1", *RANK, "sum", "5")
    assert ended.status == 0, ended.stderr
    assert [(line["source"], line["total"]) for line in ended.lines] == [("ddpkit", 10)] * 2


def test_a_rank_that_raises_ends_all(source: str, tmp_path: Path) -> None:
    with started(tmp_path, *MPIEXEC[source], "2", *RANK, "fail", "1") as job:
        assert places(job.await_lines(2)) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
        ended = job.end()
    assert ended.status == 1
    assert ended.seconds < SOON
    assert "KeyError: 'the cause'" in ended.stderr


@pytest.mark.drill
def test_the_end_of_rank_0_ends_all(source: str, tmp_path: Path) -> None:
    with started(tmp_path, *MPIEXEC[source], "2", *RANK, "wait0", "1") as job:
        ranks = job.await_lines(2)
        os.kill(ranks[0]["pid"], signal.SIGKILL)
        ended = job.end()
    assert ended.status != 0
    assert ended.seconds < SOON
    await_end(ranks[1]["pid"])


def await_end(pid: int) -> None:
    """Wait for the end of a process whose parent is another one; mpiexec may end before it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(SOON)


@pytest.mark.drill
def test_ranks_that_are_asked_stop_at_the_same_step(source: str, tmp_path: Path) -> None:
    with started(tmp_path, *MPIEXEC[source], "2", *RANK, "stop", "1") as job:
        pids = [line["pid"] for line in job.await_lines(4) if "pid" in line]
        os.kill(pids[1], signal.SIGUSR1)
        ended = job.end()
    assert ended.status == 0, ended.stderr
    stops = [line["stopped"] for line in ended.lines if "stopped" in line]
    assert len(stops) == 2, ended.stderr
    assert stops[0] == stops[1]


@pytest.fixture(scope="module")
def under_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, torch.Tensor]]:
    """Return the parameters of one epoch with the two ranks that the script starts itself."""

    @functools.cache
    def train() -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("python")
        run_here(folder, DIGITS, "--epochs", "1")
        return load_parameters(folder / "digits.pt")

    return train


@pytest.mark.drill
def test_digits_reaches_the_same_parameters(
    source: str, tmp_path: Path, under_python: Callable[[], dict[str, torch.Tensor]]
) -> None:
    command = (sys.executable, DIGITS, "--epochs", "1")
    ended = run_ranks_of(tmp_path, *MPIEXEC[source], "2", *command)
    assert ended.status == 0, ended.stderr
    check_same_bits(load_parameters(tmp_path / "digits.pt"), under_python())


@pytest.mark.drill
def test_digits_reaches_them_under_torchrun(
    tmp_path: Path, under_python: Callable[[], dict[str, torch.Tensor]]
) -> None:
    run_here(tmp_path, *TORCHRUN, "2", DIGITS, "--epochs", "1")
    check_same_bits(load_parameters(tmp_path / "digits.pt"), under_python())
