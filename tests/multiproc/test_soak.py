"""Many launches in one program: nothing that it holds may grow with their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

LAUNCHES = 300
MEASURED_EVERY = 100

# Between launch 100 and launch 300, in kB. 280 to 510 were seen: opening and closing a group of one
# rank costs torch itself 1.5 for ever, and the rest levels off in longer runs. If each launch left
# 8, it would be 1600 more; if each left the result of one rank, 6400 more.
MAY_GROW_BY = 1500

# A program of its own, whose memory and descriptors nothing else touches.
PROGRAM = """
import gc, json, os, sys, tempfile, threading, time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from ddpkit.testing import run_ranks


def load():
    batches = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1)
    assert sum(batch.sum().item() for (batch,) in batches) == 28


# Made once: what is made anew leaves holes in the heap, in steps that hide what a launch leaves.
matrix = torch.ones(400, 400)
product = torch.empty(400, 400)


def work_between(number):
    assert torch.mm(matrix, matrix, out=product).sum().item() == 400**3
    if number % 10 == 0:
        load()


def train(number):
    total = torch.ones(1)
    dist.all_reduce(total)
    if number % 20 == 0:
        load()
    return os.getpid(), int(total), torch.full((4000,), number)


def fail(number):
    dist.barrier()
    if dist.get_rank() == number % 2:
        raise KeyError(number)
    dist.barrier()


def launch(number):
    size = number % 3 + 1
    if number % 25 == 0:
        try:
            run_ranks(fail, max(2, size), args=[number])
        except KeyError as error:
            assert error.args == (number,)
            return set()
        raise AssertionError(f"launch {number} did not fail")
    values = run_ranks(train, size, args=[number])
    assert [total for _, total, _ in values] == [size] * size
    assert all((result == number).all() for _, _, result in values)
    return {pid for pid, _, _ in values}


def has_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def measure():
    gc.collect()  # an exception and its frames are a cycle
    tasks = Path("/proc/self/task").iterdir()
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "native threads": Counter(task.joinpath("comm").read_text().strip() for task in tasks),
        "Python threads": [thread.name for thread in threading.enumerate()],
        "children": has_children(),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
        "kB": int(status.split("VmRSS:")[1].split()[0]),
    }


def shared_memory(pids):
    # Other programs use this folder too; torch puts the process id into its names.
    names = (name.split("_") for name in os.listdir("/dev/shm"))
    return {"_".join(name) for name in names if name[0] == "torch" and int(name[1]) in pids}


launches, every = map(int, sys.argv[1:])
pids, measured = {os.getpid()}, []
for number in range(1, launches + 1):
    work_between(number)
    pids |= launch(number)
    if number % every == 0:
        measured.append(measure())
# Ids are used again, so what goes by itself within 5 s was another program's.
shared = shared_memory(pids)
deadline = time.monotonic() + 5
while shared and time.monotonic() < deadline:
    time.sleep(0.1)
    shared &= shared_memory(pids)
json.dump({"measured": measured, "shared memory": [*shared], "ranks": len(pids) - 1}, sys.stdout)
"""


def run_soak(temporary: Path) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(LAUNCHES), str(MEASURED_EVERY)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=225,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


@pytest.mark.drill
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_grows_with_the_number_of_launches(tmp_path: Path) -> None:
    found = run_soak(tmp_path)
    measured = found["measured"]
    for figures in measured:
        print(figures)  # noqa: T201  # shown where the test fails, and with -s
    memory = [figures.pop("kB") for figures in measured]
    assert len(measured) == LAUNCHES // MEASURED_EVERY
    assert all(figures == measured[0] for figures in measured)
    assert measured[0]["children"] is False
    assert measured[0]["temporary files"] == []
    assert found["shared memory"] == []
    assert memory[-1] - memory[0] < MAY_GROW_BY
    assert found["ranks"] > LAUNCHES  # they were processes indeed
