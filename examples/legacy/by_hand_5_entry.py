"""Two spirals, told apart by an MLP that is trained with ddpkit.

Run it with python, or with torchrun.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    get_device,
    rank0_print,
    rank0_save,
    reduce_sum,
    sharded_loader,
)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=20, help="per GPU")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoint", type=Path, default=Path("spirals.pt"))
parser.add_argument("--resume", action="store_true")


class Spirals(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = [index % 2 for index in range(size)]
        angle = 2.5 * math.pi * torch.rand(size, generator=generator).sqrt()
        turn = angle + math.pi * torch.tensor(self.labels)
        spiral = torch.stack([turn.cos(), turn.sin()], dim=1) * angle[:, None] / 5
        self.points = spiral + 0.05 * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], self.labels[index]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


@distributed
def main() -> None:
    device = get_device()
    torch.manual_seed(args.seed)

    train_set, test_set = Spirals(600, seed=1), Spirals(201, seed=2)
    train_loader = sharded_loader(
        train_set, batch_size=args.batch_size, shuffle=True, seed=args.seed
    )
    test_loader = sharded_loader(test_set, batch_size=args.batch_size, uneven="exact")

    model = ddp(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    state = {"model": model, "optimizer": optimizer, "train": train_loader}
    if args.resume:
        barrier_load(args.checkpoint, into=state)

    for epoch in range(train_loader.epoch, args.epochs):
        model.train()
        for points, labels in train_loader:
            loss = F.cross_entropy(model(points.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        correct, count = 0, 0
        with torch.no_grad():
            for points, labels in test_loader:
                predictions = model(points.to(device)).argmax(dim=1)
                correct += int((predictions == labels.to(device)).sum())
                count += len(labels)
        correct, count = reduce_sum((correct, count))
        rank0_print(f"epoch {epoch + 1}: {correct} of {count} right")
        rank0_save(state, args.checkpoint)


if __name__ == "__main__":
    args = parser.parse_args()
    main()
