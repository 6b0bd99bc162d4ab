import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpkit import distributed, get_rank
from ddpkit.errors import ConfigError, WorkerError
from ddpkit.testing import run_ranks
from tests.forking import FORK

METHODS = pytest.mark.parametrize("method", [FORK, "forkserver"])


def speak() -> int:
    print(f"printed by {get_rank()}")  # noqa: T201
    print(f"trouble of {get_rank()}", file=sys.stderr)  # noqa: T201
    subprocess.run(["echo", f"subprocess of {get_rank()}"], check=True)
    os.write(1, f"descriptor of {get_rank()}\n".encode())
    return get_rank()


def lines_of(rank: int) -> list[str]:
    return [
        f"{what} {rank}" for what in ("printed by", "trouble of", "subprocess of", "descriptor of")
    ]


def read_log(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank-{rank}.log").read_text().splitlines()


@METHODS
def test_each_rank_writes_its_own_file_and_rank_0_the_terminal_too(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "new"
    assert run_ranks(speak, start_method=method, log_dir=folder) == [0, 1]
    for rank in range(2):
        header, *lines = read_log(folder, rank)
        assert header.endswith(f"rank {rank} of 2, speak()")
        assert sorted(lines) == sorted(lines_of(rank))
    captured = capfd.readouterr()
    shown = captured.out + captured.err
    assert all(line in shown for line in lines_of(0))
    assert not any(line in shown for line in lines_of(1))
    assert "trouble of 0" in captured.err


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_later_launch_appends(world_size: int, tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(speak, world_size, log_dir=tmp_path)
    for rank in range(world_size):
        lines = read_log(tmp_path, rank)
        assert len([line for line in lines if line.startswith("---")]) == 2
        assert all(lines.count(line) == 2 for line in lines_of(rank))


def test_one_rank_in_the_calling_process_is_logged_and_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    assert run_ranks(speak, 1, log_dir=str(tmp_path)) == [0]
    assert (sys.stdout, sys.stderr) == streams
    assert sorted(read_log(tmp_path, 0)[1:]) == sorted(lines_of(0))
    print("after")  # noqa: T201
    captured = capfd.readouterr()
    assert all(line in captured.out + captured.err for line in lines_of(0))
    assert captured.out.endswith("after\n")
    assert "after" not in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_last_words_of_a_rank_that_dies_are_in_its_file(failing: int, tmp_path: Path) -> None:
    def function() -> None:
        if get_rank() == failing:
            os.write(2, b"last words\n")
            os.abort()

    with pytest.raises(WorkerError, match="SIGABRT"):
        run_ranks(function, log_dir=tmp_path)
    assert "last words" in read_log(tmp_path, failing)


def test_a_flood_of_output_arrives_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def flood() -> None:
        for _ in range(4000):
            os.write(1, b"x" * 999 + b"\n")

    run_ranks(flood, log_dir=tmp_path)
    for rank in range(2):
        assert len(read_log(tmp_path, rank)) == 4001
    assert len(capfd.readouterr().out.splitlines()) == 4000


def test_a_folder_that_cannot_be_written_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpkit.launch.supervisor.Supervisor._start_process", lambda *args: 1 / 0)
    (tmp_path / "file").touch()
    for world_size in (1, 2):
        with pytest.raises(ConfigError, match=r"log_dir=.*file/logs' .*cannot be written"):
            run_ranks(speak, world_size, log_dir=tmp_path / "file" / "logs")


@pytest.mark.drill
def test_the_log_goes_on_when_the_terminal_has_gone(tmp_path: Path) -> None:
    script = (
        "from ddpkit import distributed\n"
        "@distributed(nproc_per_node=2, device='cpu', log_dir='logs')\n"
        "def main():\n"
        "    import time\n"
        "    for number in range(20):\n"
        "        print('line', number)\n"
        "        time.sleep(0.02)\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program: Any = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == b"line 0\n"
    program.stdout.close()
    assert program.wait(60) == 0
    assert read_log(tmp_path / "logs", 0)[1:] == [f"line {number}" for number in range(20)]


def test_a_decorated_function_keeps_its_log_dir(tmp_path: Path) -> None:
    logged = distributed(speak, nproc_per_node=2, device="cpu", log_dir=tmp_path)
    logged.with_options(timeout=30)()
    assert "printed by 1" in read_log(tmp_path, 1)
