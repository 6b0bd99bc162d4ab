"""The digits example as a person runs it: under python and torchrun, killed and resumed."""

import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(240)]  # two trainings, on a busy machine

REPOSITORY = Path(__file__).parents[2]
DIGITS = str(REPOSITORY / "examples" / "digits.py")
SINGLE_DEVICE = str(REPOSITORY / "examples" / "single_device.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

LAST_LINE = re.compile(r"test accuracy: (\d+\.\d) %")
EPOCH_LINE = re.compile(r"epoch (\d+): loss \d+\.\d{3}, [\d,]+ samples/s")


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a folder, where it also leaves its checkpoint; it must succeed."""
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def epochs_in(output: str) -> list[int]:
    return [int(number) for number in EPOCH_LINE.findall(output)]


def accuracy_in(output: str) -> float:
    """Return the accuracy of the last line, which must be the only one of its kind."""
    assert len(LAST_LINE.findall(output)) == 1
    last = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert last is not None
    return float(last[1])


def messages_in(stderr: str) -> str:
    """Return what is on stderr beside progress bars and torchrun's note on its thread number."""
    expected = ("epoch ", "*****", "Setting OMP_NUM_THREADS environment variable for each process")
    lines = [line.strip() for line in re.split(r"[\r\n]", stderr)]
    return "\n".join(line for line in lines if line and not line.startswith(expected))


def check_one_epoch(result: "subprocess.CompletedProcess[str]") -> None:
    assert messages_in(result.stderr) == ""
    assert epochs_in(result.stdout) == [1]
    # One epoch teaches something: guessing would be right 10 times in 100.
    assert accuracy_in(result.stdout) > 30


class OneEpoch(NamedTuple):
    """What one epoch under python printed, and the parameters that it left."""

    printed: "subprocess.CompletedProcess[str]"
    parameters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], OneEpoch]:
    """Train one epoch with so many ranks, once for all tests of this file."""

    @functools.cache
    def train(ranks: int) -> OneEpoch:
        folder = tmp_path_factory.mktemp("one_epoch")
        printed = run(folder, DIGITS, "--epochs", "1", "--nproc-per-node", str(ranks))
        return OneEpoch(printed, load_parameters(folder / "digits.pt"))

    return train


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_python(ranks: int, one_epoch: Callable[[int], OneEpoch]) -> None:
    check_one_epoch(one_epoch(ranks).printed)


@pytest.mark.drill
def test_two_ranks_learn_what_one_learns(one_epoch: Callable[[int], OneEpoch]) -> None:
    one, two = one_epoch(1).parameters, one_epoch(2).parameters
    for name, parameter in one.items():
        torch.testing.assert_close(two[name], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", ["2", "3"])
def test_torchrun(ranks: str, tmp_path: Path) -> None:
    check_one_epoch(run(tmp_path, *TORCHRUN, ranks, DIGITS, "--epochs", "1"))


@pytest.mark.drill
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_start_method(start_method: str, tmp_path: Path) -> None:
    check_one_epoch(run(tmp_path, DIGITS, "--epochs", "1", "--start-method", start_method))


@pytest.mark.drill
def test_the_default_run_learns_to_read_digits(tmp_path: Path) -> None:
    result = run(tmp_path, DIGITS)
    assert messages_in(result.stderr) == ""
    assert accuracy_in(result.stdout) >= 97


@pytest.mark.drill
def test_the_ordinary_script_learns_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself it uses every core, and its threads wait for each other on a busy machine.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert accuracy_in(run(tmp_path, SINGLE_DEVICE).stdout) >= 97


# ----------------------------------------------------------------------------- killed and resumed


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters after four epochs in one go."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert epochs_in(run(folder, DIGITS, "--epochs", "4").stdout) == [1, 2, 3, 4]
    return load_parameters(folder / "digits.pt")


def load_parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = torch.load(checkpoint)["model"]
    assert not any(name.startswith("module.") for name in parameters)
    return parameters


def check_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.drill
def test_resumed_after_an_end(unbroken: dict[str, torch.Tensor], tmp_path: Path) -> None:
    run(tmp_path, DIGITS, "--epochs", "2")
    resumed = run(tmp_path, DIGITS, "--epochs", "4", "--resume")
    assert epochs_in(resumed.stdout) == [3, 4]
    check_same_bits(load_parameters(tmp_path / "digits.pt"), unbroken)


@pytest.mark.drill
def test_resumed_after_a_kill(unbroken: dict[str, torch.Tensor], tmp_path: Path) -> None:
    kill_after_epoch(2, tmp_path)
    resumed = run(tmp_path, DIGITS, "--epochs", "4", "--resume")
    # The line of epoch 2 comes just before its checkpoint, so the last whole one may be older.
    assert epochs_in(resumed.stdout) in ([3, 4], [2, 3, 4])
    check_same_bits(load_parameters(tmp_path / "digits.pt"), unbroken)


def kill_after_epoch(epoch: int, folder: Path) -> None:
    """Start four epochs and kill the script and its ranks at once after one of them."""
    command = [sys.executable, DIGITS, "--epochs", "4"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with psutil.Popen(command, cwd=folder, stdout=pipe, stderr=nothing, text=True) as process:
        # Ranks hold the pipe too, so the loop ends only when the last of them has gone.
        for line in process.stdout:
            if line.startswith(f"epoch {epoch}:"):
                kill_with_descendants(process)
    assert process.returncode == -signal.SIGKILL


def kill_with_descendants(process: psutil.Popen) -> None:
    process.suspend()  # it must not notice that its ranks die, and end in its own way
    for descendant in process.children(recursive=True):
        descendant.kill()
    process.kill()
