"""What the ranks of the benchmarks run. A rank imports this, torch and its launcher, nothing else.

Every launcher runs the same functions. What differs is who opens the group and how a value comes
back: `perform` runs in a group that the launcher has opened and returns the value, the others add
what their launcher leaves to the user.

Run as a script it is a rank that torchrun has started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from task import (
    FAILED_FILE,
    FAILING_RANK,
    READY_FILE,
    REASON,
    RESULT_FILE,
    STEP,
    Task,
    TrainingError,
)

SLEEP = 600.0
# By then the other rank waits in the collective. Loaded machines take their time.
_HEAD_START = 0.3


# ---------------------------------------------------------------------------------- the workloads


def all_reduce(folder: Path) -> float:
    """Sum 1 + rank over the ranks."""
    del folder
    value = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def first_step(folder: Path) -> float:
    """Wrap a small model, and train it for one step; torch imports its compiler on the way."""
    del folder
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: torch.Tensor = model(torch.ones(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def diverge(folder: Path) -> float:
    """Raise on one rank while the other waits for it in a collective."""
    if _is_to_fail(folder):
        raise TrainingError(STEP, REASON)
    return all_reduce(folder)


def diverge_plainly(folder: Path) -> float:
    """The same with an exception that everybody can send."""
    if _is_to_fail(folder):
        raise ValueError(REASON)
    return all_reduce(folder)


def vanish(folder: Path) -> float:
    """Have one rank killed while the other waits for it in a collective."""
    if _is_to_fail(folder):
        os.kill(os.getpid(), signal.SIGKILL)
    return all_reduce(folder)


def stay(folder: Path) -> float:
    """Have rank 0 wait in a collective for rank 1, which sleeps."""
    all_reduce(folder)
    (folder / f"{READY_FILE}{dist.get_rank()}").touch()
    if dist.get_rank() == FAILING_RANK:
        time.sleep(SLEEP)
    return all_reduce(folder)


def _is_to_fail(folder: Path) -> bool:
    """Tell the rank that fails, when the other one waits; take down the time."""
    all_reduce(folder)
    if dist.get_rank() != FAILING_RANK:
        return False
    time.sleep(_HEAD_START)
    (folder / FAILED_FILE).write_text(repr(time.monotonic()))
    return True


WORKLOADS: dict[str, Callable[[Path], float]] = {
    function.__name__: function
    for function in (all_reduce, first_step, diverge, diverge_plainly, vanish, stay)
}


# ------------------------------------------------------------- what launchers are given to be run


def perform(task: Task) -> dict[str, float]:
    """Run a workload in the group that the launcher has opened."""
    value = WORKLOADS[task.workload](Path(task.folder))
    return {"value": value, "done_at": time.monotonic()}


def perform_in_group(task: Task) -> dict[str, float]:
    """Open the group that the environment describes, and run a workload in it."""
    dist.init_process_group("gloo")
    result = perform(task)
    dist.destroy_process_group()
    return result


def perform_in_group_and_write(task: Task) -> None:
    """The same under a launcher that brings nothing back."""
    rank = os.environ["RANK"]
    _write(task, rank, perform_in_group(task))


def perform_and_write(task: Task) -> None:
    """Run a workload in the launcher's group; the launcher brings nothing back."""
    result = perform(task)
    _write(task, str(dist.get_rank()), result)


def perform_after(first: Any, task: Task) -> dict[str, float]:
    """Run a workload for a launcher that passes an argument of its own, which is not needed."""
    del first
    return perform(task)


def perform_after_and_write(first: Any, task: Task) -> None:
    """The same under a launcher that brings nothing back."""
    del first
    perform_and_write(task)


def perform_as_rank(rank: int, task: Task, port: int) -> None:
    """Describe the group to torch, which the launcher has not done, and run a workload in it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(task.ranks))
    perform_in_group_and_write(task)


def _write(task: Task, rank: str, result: dict[str, float]) -> None:
    if rank == "0":
        (Path(task.folder) / RESULT_FILE).write_text(json.dumps(result))


if __name__ == "__main__":
    perform_in_group_and_write(Task(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
