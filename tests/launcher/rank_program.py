"""A rank for the tests of real launchers: it says where it is, and then does as it is told.

    rank_program.py TASK NUMBER

Every rank prints one line of JSON with its place and with the sum of all ranks' numbers.
"""

import json
import logging
import os
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

import ddpkit

PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "source")


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def describe(world: ddpkit.World, number: int) -> dict[str, object]:
    total = torch.tensor([number])
    dist.all_reduce(total)
    place = {name: value for name, value in asdict(world).items() if name in PLACE}
    return {**place, "total": int(total), "pid": os.getpid()}


def fail_on_rank_1() -> None:
    if ddpkit.get_rank() == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))


def wait_for_rank(absent: int) -> None:
    """Wait in a collective of torch's for a rank that does not come."""
    if ddpkit.get_rank() == absent:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def train_until_asked_to_stop() -> None:
    for step in range(10_000):
        if ddpkit.stop_requested():
            say(rank=ddpkit.get_rank(), stopped=step)
            return
        if step == 0:
            say(rank=ddpkit.get_rank(), listens=True)
        time.sleep(0.01)


@ddpkit.distributed(nproc_per_node=2, timeout=45)
def main(task: str, number: int) -> None:
    with ddpkit.process_group() as world:
        say(**describe(world, number))
    if task == "fail":
        fail_on_rank_1()
    elif task == "stop":
        train_until_asked_to_stop()
    elif task.startswith("wait"):
        wait_for_rank(int(task.removeprefix("wait")))


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    main(sys.argv[1], int(sys.argv[2]))
