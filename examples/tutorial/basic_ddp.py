"""One training step of a toy model on several ranks: by hand, and then with ddpkit.

Under python, both ways start their ranks; under torchrun, both join those that are there.
"""

import argparse
import os
import socket
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import ddp, distributed, get_device, get_rank, rank0_print, reduce_mean

Outcome: TypeAlias = tuple[float, dict[str, torch.Tensor]]


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return output


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and labels, others on each rank and the same at each call."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)


# ------------------------------------------------------------------------------------------ by hand


def setup(rank: int, world_size: int) -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    return device


def cleanup() -> None:
    dist.destroy_process_group()


def by_hand(rank: int, world_size: int) -> Outcome:
    device = setup(rank, world_size)
    torch.manual_seed(0)
    model = ToyModel().to(device)
    ddp_model = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    inputs, labels = make_batch(rank)

    optimizer.zero_grad()
    outputs = ddp_model(inputs.to(device))
    loss = loss_fn(outputs, labels.to(device))
    loss.backward()
    optimizer.step()

    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= world_size
    parameters = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    cleanup()
    return mean.item(), parameters


def start_by_hand(nproc_per_node: int) -> Outcome:
    if "RANK" in os.environ:  # set by torchrun, with the address and the port
        return by_hand(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.pt"
        mp.spawn(be_spawned, args=(nproc_per_node, free_port(), file), nprocs=nproc_per_node)
        outcome: Outcome = torch.load(file)
    return outcome


def be_spawned(rank: int, world_size: int, port: int, file: Path) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    outcome = by_hand(rank, world_size)
    if rank == 0:
        torch.save(outcome, file)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])  # somebody else may take it before rank 0 does


# -------------------------------------------------------------------------------------- with ddpkit


@distributed
def with_ddpkit() -> Outcome:
    torch.manual_seed(0)
    model = ddp(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = make_batch(get_rank())

    optimizer.zero_grad()
    outputs = model(inputs.to(get_device()))
    loss = loss_fn(outputs, labels.to(get_device()))
    loss.backward()
    optimizer.step()

    parameters = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return reduce_mean(loss.item()), parameters


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="ranks to start, unless a launcher has started them; default: %(default)s",
    )
    args = parser.parse_args()
    loss_by_hand, parameters_by_hand = start_by_hand(args.nproc_per_node)
    loss, parameters = with_ddpkit.with_options(nproc_per_node=args.nproc_per_node)()
    rank0_print(f"by hand: loss {loss_by_hand:.4f}")
    rank0_print(f"with ddpkit: loss {loss:.4f}")
    if not are_equal(parameters, parameters_by_hand):
        raise SystemExit("the two ways ended with different parameters")
    rank0_print("both ways ended with the same parameters")
