"""Train a small CNN on scikit-learn's handwritten digits: on every device, with ddpkit.

SIGTERM or SIGUSR1 makes it save and end with status 75; --resume goes on from there.
"""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from tqdm import tqdm

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    get_device,
    is_rank0,
    rank0_print,
    rank0_save,
    reduce_sum,
    sharded_loader,
    stop_requested,
)

STOPPED = 75  # sysexits.h's EX_TEMPFAIL: not done, try again later, with --resume


def load_data() -> list[Subset[tuple[torch.Tensor, ...]]]:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.tensor(labels))
    return random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def count_correct(
    model: nn.Module, test: DataLoader[tuple[torch.Tensor, ...]], device: torch.device
) -> tuple[int, int]:
    correct = total = 0
    for images, labels in test:
        predictions = model(images.to(device)).argmax(dim=1)
        correct += int((predictions == labels.to(device)).sum())
        total += len(labels)
    return correct, total


@distributed
def main(epochs: int, resume: bool, checkpoint: str) -> float | None:
    torch.manual_seed(0)
    device = get_device()
    trainset, testset = load_data()
    train = sharded_loader(trainset, global_batch_size=48, shuffle=True)
    test = sharded_loader(testset, batch_size=256, uneven="exact")
    model = ddp(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8 ** (1 / len(train)))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
    if resume:
        barrier_load(checkpoint, into=state)
    for epoch in range(train.epoch, epochs):
        start = time.perf_counter()
        bar = tqdm(train, desc=f"epoch {epoch + 1}", leave=False, disable=not is_rank0())
        for images, labels in bar:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if stop_requested():
                rank0_save(state, checkpoint)
                return None
        speed = 48 * bar.n / (time.perf_counter() - start)
        rank0_print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {speed:,.0f} samples/s")
        rank0_save(state, checkpoint)
    correct, total = reduce_sum(count_correct(model, test, device))
    return correct / total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--checkpoint", default="digits.pt", help="default: %(default)s")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="ranks to start, unless a launcher has started them; default: %(default)s",
    )
    parser.add_argument(
        "--start-method", default="auto", choices=["auto", "fork", "forkserver", "spawn"]
    )
    args = parser.parse_args()
    run = main.with_options(nproc_per_node=args.nproc_per_node, start_method=args.start_method)
    accuracy = run(args.epochs, args.resume, args.checkpoint)
    if accuracy is None:
        rank0_print(f"asked to stop; --resume goes on from {args.checkpoint}")
        sys.exit(STOPPED)
    rank0_print(f"test accuracy: {100 * accuracy:.1f} %")
