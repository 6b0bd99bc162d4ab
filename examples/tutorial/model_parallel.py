"""A toy model on two devices in each rank, and DDP over it: by hand, and then with ddpkit.

Without enough GPUs both devices are the CPU, and the script says so.
"""

import argparse
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import (
    ddp,
    distributed,
    get_local_rank,
    get_rank,
    get_world_size,
    rank0_print,
    reduce_mean,
    split_model_across_devices,
)

Outcome: TypeAlias = tuple[float, dict[str, torch.Tensor]]
STEPS = 5


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and labels, others on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + get_rank())
    return torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)


# ------------------------------------------------------------------------------------------ by hand


class ToyMpModel(nn.Module):
    def __init__(self, dev0: torch.device, dev1: torch.device) -> None:
        super().__init__()
        self.dev0 = dev0
        self.dev1 = dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dev0)
        x = self.relu(self.net1(x))
        x = x.to(self.dev1)
        output: torch.Tensor = self.net2(x)
        return output


def by_hand(dev0: torch.device, dev1: torch.device) -> Outcome:
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyMpModel(dev0, dev1))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = make_batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels.to(dev1))
        loss.backward()
        optimizer.step()
    parameters = {name: tensor.cpu() for name, tensor in model.module.state_dict().items()}
    return reduce_mean(loss.item()), parameters


# -------------------------------------------------------------------------------------- with ddpkit


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return output


def with_ddpkit(devices: list[torch.device]) -> Outcome:
    torch.manual_seed(0)
    model = ddp(split_model_across_devices(ToyModel(), devices))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = make_batch(step)
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_fn(output, labels.to(output.device))
        loss.backward()
        optimizer.step()
    parameters = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return reduce_mean(loss.item()), parameters


# ------------------------------------------------------------------------------------ both together


def two_devices() -> list[torch.device]:
    """Take this rank's own two GPUs, or the CPU twice."""
    if torch.cuda.device_count() < 2 * get_world_size():  # all ranks are on this machine
        return [torch.device("cpu")] * 2
    first = 2 * get_local_rank()
    return [torch.device("cuda", first), torch.device("cuda", first + 1)]


@distributed
def main() -> None:
    devices = two_devices()
    if devices[0].type == "cpu":
        rank0_print("not enough GPUs for two in each rank: both devices are the CPU")
    loss_by_hand, parameters_by_hand = by_hand(*devices)
    loss, parameters = with_ddpkit(devices)
    rank0_print(f"by hand: loss {loss_by_hand:.4f}")
    rank0_print(f"with ddpkit: loss {loss:.4f}")
    if not are_equal(parameters, parameters_by_hand):
        raise SystemExit("the two ways ended with different parameters")
    rank0_print("both ways ended with the same parameters")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=max(torch.cuda.device_count() // 2, 1) if torch.cuda.is_available() else 2,
        help="ranks to start, unless a launcher has started them; default: %(default)s",
    )
    args = parser.parse_args()
    main.with_options(nproc_per_node=args.nproc_per_node)()
