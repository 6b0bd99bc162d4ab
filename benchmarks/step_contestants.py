"""Ways to train on two CPU ranks: DDP by hand with three numbers of threads, the peers, and ddpkit.

This file also is the program that a contestant runs in, under python or torchrun:

    step_contestants.py NAME ADDRESS

Each of its ranks connects to the socket at the address, says who it is, and trains a block of steps
for each line that asks for one. In between it waits for the socket, which takes no time of a core.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import torch
import torch.distributed as dist
from contestants import free_port
from step_training import MEASURED, RANKS, WORKLOADS, Library, prepare, seconds_per_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# -------------------------------------------------------------------------------------- DDP by hand


def wrap_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Wrap as in torch's tutorials."""
    return DistributedDataParallel(model), optimizer


def run_under_torchrun(name: str, address: str) -> None:
    """Open the group that torchrun has described."""
    dist.init_process_group("gloo")
    serve(name, address, Library(wrap_by_hand))
    dist.destroy_process_group()


def run_with_spawn(name: str, address: str) -> None:
    """Use torch.multiprocessing.spawn."""
    import torch.multiprocessing as mp

    mp.spawn(run_spawned, args=(name, address, free_port()), nprocs=RANKS)


def run_spawned(rank: int, name: str, address: str, port: int) -> None:
    """Describe the group to torch by hand, and open it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    serve(name, address, Library(wrap_by_hand))
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------ ddpkit, peers


def run_ddpkit(name: str, address: str) -> None:
    """Use ddpkit with its default options."""
    from ddpkit import ddp, distributed

    run = distributed(serve, nproc_per_node=RANKS, device="cpu")
    run(name, address, Library(lambda model, optimizer: (ddp(model), optimizer)))


def run_accelerate(name: str, address: str) -> None:
    """Use accelerate with its default options."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    serve(name, address, Library(accelerator.prepare, accelerator.backward))
    accelerator.end_training()


def run_fabric(name: str, address: str) -> None:
    """Use Lightning Fabric with its DDP strategy."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    serve(name, address, Library(fabric.setup, fabric.backward))


def run_ignite(name: str, address: str) -> None:
    """Use what ignite has for a loop of one's own."""
    import ignite.distributed as idist

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return idist.auto_model(model), idist.auto_optim(optimizer)

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(lambda _: serve(name, address, Library(wrap)))


@dataclass(frozen=True)
class Way:
    """A contestant."""

    run: Callable[[str, str], None]
    launcher: str = "torchrun"
    """What starts the program: "torchrun", once for each rank, or "python"."""
    threads: str = "tuned"
    """"tuned": cores // ranks, whoever sees to it; "default": what the launcher makes of it."""
    module: str = "torch"
    """What it needs besides torch."""

    def missing(self) -> bool:
        """Tell whether it cannot be measured here."""
        return importlib.util.find_spec(self.module) is None


TUNED, SPAWNED = "by hand, tuned threads", "by hand, mp.spawn"
WAYS = {
    "ddpkit": Way(run_ddpkit, "python", "default", "ddpkit"),
    TUNED: Way(run_under_torchrun),
    "by hand, torchrun": Way(run_under_torchrun, threads="default"),
    SPAWNED: Way(run_with_spawn, "python", "default"),
    "accelerate": Way(run_accelerate, module="accelerate"),
    "fabric": Way(run_fabric, module="lightning_fabric"),
    "ignite": Way(run_ignite, module="ignite"),
}


# -------------------------------------------------------------------------------------- the program


def serve(name: str, address: str, library: Library) -> None:
    """Train on request, in a group that is open, until there are no more requests."""
    rank = dist.get_rank()
    trainings = {workload: prepare(workload, library, rank) for workload in MEASURED}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        _send(stream, {"name": name, "rank": rank, "threads": torch.get_num_threads()})
        for line in stream:
            workload = json.loads(line)
            seconds = seconds_per_step(trainings[workload].train, WORKLOADS[workload].steps)
            _send(stream, {"seconds": seconds})


def _send(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    WAYS[sys.argv[1]].run(*sys.argv[1:])
