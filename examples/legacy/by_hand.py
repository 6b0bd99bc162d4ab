"""Two spirals, told apart by an MLP that is trained with DDP by hand.

Run it with torchrun, on two ranks or more.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

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


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    train_set, test_set = Spirals(600, seed=1), Spirals(201, seed=2)
    sampler: DistributedSampler[int] = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_sampler: DistributedSampler[int] = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)

    device_ids = [local_rank] if device.type == "cuda" else None
    model = DDP(build_model().to(device), device_ids=device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    start_epoch = 0
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
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
        sums = torch.tensor([correct, count], device=device)
        dist.all_reduce(sums)
        correct, count = int(sums[0]), int(sums[1])
        if rank == 0:
            print(f"epoch {epoch + 1}: {correct} of {count} right")
            torch.save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1,
                },
                args.checkpoint,
            )
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    args = parser.parse_args()
    main()
