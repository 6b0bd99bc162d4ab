"""The digits example is asked to stop, under python and torchrun, and goes on where it was."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.launcher.test_examples import (
    DIGITS,
    EPOCH_LINE,
    TORCHRUN,
    check_same_bits,
    epochs_in,
    load_parameters,
    run,
)

pytestmark = [pytest.mark.launcher, pytest.mark.drill, pytest.mark.timeout(240)]

EPOCHS = "4"
STOPPED = 75


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, torch.Tensor]]:
    """Return the parameters of four epochs in one go, which all ways of starting share."""

    @functools.cache
    def train() -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("unbroken")
        run(folder, DIGITS, "--epochs", EPOCHS)
        return load_parameters(folder / "digits.pt")

    return train


def ranks_of(program: psutil.Popen) -> list[psutil.Process]:
    """Return the processes that train, whether the program or a forkserver has started them."""
    everyone = program.children(recursive=True)
    return [one for one in everyone if one.num_threads() > 3 and not one.children()]


def stop_in_second_epoch(
    folder: Path, *arguments: str, stop: Callable[[psutil.Popen], object]
) -> tuple[int, str]:
    """Start four epochs, ask to stop in the second, and return the status and the output."""
    command = [sys.executable, *arguments, "--epochs", EPOCHS]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    output = []
    with psutil.Popen(command, cwd=folder, stdout=pipe, stderr=both, text=True) as program:
        for line in program.stdout:
            output.append(line)
            if EPOCH_LINE.search(line):
                stop(program)
                break
        output += program.stdout
    return program.returncode, "".join(output)


def check_resumed(folder: Path, *arguments: str, unbroken: dict[str, torch.Tensor]) -> None:
    resumed = run(folder, *arguments, "--epochs", EPOCHS, "--resume")
    assert epochs_in(resumed.stdout)[-1] == int(EPOCHS)
    check_same_bits(load_parameters(folder / "digits.pt"), unbroken)


def check_stopped(folder: Path, output: str) -> None:
    assert "asked to stop; --resume goes on from digits.pt" in output
    assert epochs_in(output)[-1] < int(EPOCHS)
    place = torch.load(folder / "digits.pt")["train"]
    assert place["epoch"] < int(EPOCHS)
    assert [path.name for path in folder.iterdir()] == ["digits.pt"]


@pytest.mark.parametrize("whom", ["the program", "one rank", "the group of one rank"])
def test_python(unbroken: Callable[[], dict[str, torch.Tensor]], tmp_path: Path, whom: str) -> None:
    def stop(program: psutil.Popen) -> None:
        if whom == "the program":
            program.terminate()
        elif whom == "one rank":
            ranks_of(program)[-1].send_signal(signal.SIGUSR1)
        else:
            os.killpg(ranks_of(program)[0].pid, signal.SIGTERM)

    status, output = stop_in_second_epoch(tmp_path, DIGITS, stop=stop)
    assert status == STOPPED, output
    check_stopped(tmp_path, output)
    check_resumed(tmp_path, DIGITS, unbroken=unbroken())


def test_torchrun_is_ended(unbroken: Callable[[], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """It passes SIGTERM on to its ranks, and gives them 30 seconds."""
    arguments = [*TORCHRUN, "2", DIGITS]
    status, output = stop_in_second_epoch(
        tmp_path, *arguments, stop=lambda program: program.terminate()
    )
    assert status == 1, output
    check_stopped(tmp_path, output)
    check_resumed(tmp_path, *arguments, unbroken=unbroken())


def test_one_rank_of_torchrun_is_signalled(
    unbroken: Callable[[], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    arguments = [*TORCHRUN, "2", DIGITS]
    status, output = stop_in_second_epoch(
        tmp_path,
        *arguments,
        stop=lambda program: ranks_of(program)[-1].send_signal(signal.SIGUSR1),
    )
    assert status == 1, output  # torchrun's own, for every rank that ends with another than 0
    check_stopped(tmp_path, output)
    check_resumed(tmp_path, *arguments, unbroken=unbroken())
