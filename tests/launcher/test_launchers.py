"""The same file under torchrun and with hand-set variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
import ddpkit

@ddpkit.distributed(nproc_per_node=4)
def main():
    total = torch.ones(1)
    dist.all_reduce(total)
    ddpkit.barrier()
    if "fail" in sys.argv and ddpkit.get_rank() == 1:
        raise KeyError("the cause")
    if "fail" in sys.argv:
        dist.all_reduce(total)
    return [ddpkit.get_rank(), int(total), torch.get_num_threads()]

value = main.run_all() if "all" in sys.argv else main()
line = json.dumps({"value": value, "rank0 after": ddpkit.is_rank0(), "rank": ddpkit.get_rank(),
                   "open": dist.is_initialized(), "threads": torch.get_num_threads()})
sys.stdout.write(line + "\\n")
"""


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**clean, "PYTHONPATH": str(ROOT), **variables}


def run_torchrun(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--log-dir", str(tmp_path / "logs"), str(script), *arguments),
        ],
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def test_every_rank_of_torchrun_gets_its_own_value(tmp_path: Path) -> None:
    finished = run_torchrun(tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = sorted((json.loads(line) for line in finished.stdout.splitlines()), key=rank_of)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [line["value"] for line in lines] == [[0, 2, share], [1, 2, share]]
    assert [line["rank0 after"] for line in lines] == [True, False]
    assert not any(line["open"] for line in lines)


@pytest.mark.drill
def test_run_all_under_torchrun_gives_every_rank_all_values(tmp_path: Path) -> None:
    finished = run_torchrun(tmp_path, "all")
    assert finished.returncode == 0, finished.stderr
    for line in finished.stdout.splitlines():
        assert [value[:2] for value in json.loads(line)["value"]] == [[0, 2], [1, 2]]


def test_torchrun_is_told_the_cause(tmp_path: Path) -> None:
    finished = run_torchrun(tmp_path, "fail")
    assert finished.returncode != 0
    summary = finished.stderr[finished.stderr.index("Root Cause") :]
    assert "rank      : 1" in summary
    assert "KeyError: 'the cause'" in summary


def rank_of(line: dict[str, int]) -> int:
    return line["rank"]


LEGACY = """
import sys
import torch.distributed as dist
import ddpkit

dist.init_process_group("gloo")
value = ddpkit.on_rank0(lambda: "y" * 30_000_000)
dist.destroy_process_group()
sys.stdout.write(str(len(value)))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_by_hand(
    tmp_path: Path, rank: int, port: int, world_size: int, program: str = PROGRAM
) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(program)
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_hand_set_variables(tmp_path: Path) -> None:
    port = free_port()
    processes = [start_by_hand(tmp_path, rank, port, 2) for rank in range(2)]
    outputs = [process.communicate(timeout=55) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    values = [json.loads(output)["value"][:2] for output, _ in outputs]
    assert values == [[0, 2], [1, 2]]


@pytest.mark.drill  # one run in four went wrong before
@pytest.mark.timeout(240)
def test_a_legacy_script_may_end_right_after_its_last_call(tmp_path: Path) -> None:
    for _ in range(6):
        port = free_port()
        processes = [start_by_hand(tmp_path, rank, port, 2, LEGACY) for rank in range(2)]
        outputs = [process.communicate(timeout=55) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert [output for output, _ in outputs] == ["30000000"] * 2


def test_a_part_of_a_slurm_step_is_refused_rather_than_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    variables = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    finished = subprocess.run(
        [sys.executable, str(script)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert finished.returncode != 0
    assert "ConfigError: The variables of a SLURM step are incomplete: set are" in finished.stderr
