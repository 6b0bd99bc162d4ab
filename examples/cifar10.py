"""Train a small CNN on CIFAR-10: on every device, with ddpkit."""

import argparse
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import CIFAR10, FakeData
from tqdm import tqdm

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    get_device,
    is_rank0,
    rank0_first,
    rank0_print,
    rank0_save,
    reduce_mean,
    reduce_sum,
    sharded_loader,
)

NORMALISED = [
    transforms.ToTensor(),
    # Mean and standard deviation of red, green and blue over the training images.
    transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
]
FOR_TESTING = transforms.Compose(NORMALISED)
FOR_TRAINING = transforms.Compose(
    [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *NORMALISED]
)


def load_data(args: argparse.Namespace) -> tuple[Subset[Any], Subset[Any]]:
    if args.fake:
        shape = (3, 32, 32)
        train = FakeData(50_000, shape, transform=FOR_TRAINING)
        test = FakeData(10_000, shape, transform=FOR_TESTING, random_offset=50_000)
    else:
        with rank0_first():  # it downloads while the others wait, and they find the files then
            train = read_cifar10(args, train=True, transform=FOR_TRAINING)
            test = read_cifar10(args, train=False, transform=FOR_TESTING)
    return keep_first(args.limit, train), keep_first(args.limit, test)


def read_cifar10(args: argparse.Namespace, **options: Any) -> CIFAR10:
    try:
        return CIFAR10(args.data, download=args.download, **options)
    except RuntimeError as error:
        if args.download:
            raise
        # The exit of all ranks alike is the exit of the program, without tracebacks.
        raise SystemExit(
            f"CIFAR-10 is missing in the folder {args.data!r}, or damaged there. Add --download to "
            "get it (170 MB), or --fake to train on made-up images."
        ) from error


def keep_first(number: int | None, dataset: Any) -> Subset[Any]:
    return Subset(dataset, range(len(dataset))[:number])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train_epoch(
    model: nn.Module, batches: Iterable[Any], optimizer: torch.optim.Optimizer
) -> float:
    """Train on this rank's batches and return their mean loss."""
    losses = []
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def count_correct(model: nn.Module, test: DataLoader[Any]) -> tuple[int, int]:
    correct = total = 0
    for images, labels in test:
        correct += int((model(images).argmax(dim=1) == labels).sum())
        total += len(labels)
    return correct, total


@distributed
def main(args: argparse.Namespace) -> tuple[int, int]:
    torch.manual_seed(0)  # for the model; the loader sees to crops that differ by rank and epoch
    trainset, testset = load_data(args)
    options: dict[str, Any] = {"num_workers": args.workers, "device": get_device()}
    train = sharded_loader(trainset, global_batch_size=args.batch_size, shuffle=True, **options)
    test = sharded_loader(testset, batch_size=256, uneven="exact", **options)
    model = ddp(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
    if args.resume:
        barrier_load(args.checkpoint, into=state)
    for epoch in range(train.epoch, args.epochs):
        start = time.perf_counter()
        bar = tqdm(train, desc=f"epoch {epoch + 1}", leave=False, disable=not is_rank0())
        loss = reduce_mean(train_epoch(model, bar, optimizer))
        schedule.step()
        speed = len(trainset) / (time.perf_counter() - start)
        rank0_print(f"epoch {epoch + 1}: loss {loss:.3f}, {speed:,.0f} samples/s")
        rank0_save(state, args.checkpoint)
    return reduce_sum(count_correct(model, test))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", default="data", help="folder of the data set")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--download", action="store_true", help="get what the folder lacks")
    source.add_argument("--fake", action="store_true", help="made-up images: needs no data set")
    parser.add_argument("--limit", type=int, help="use only so many images of each set")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--workers", type=int, default=2, help="loader processes of each rank")
    parser.add_argument("--checkpoint", default="cifar10.pt")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="ranks to start, unless a launcher has started them",
    )
    args = parser.parse_args()
    correct, total = main.with_options(nproc_per_node=args.nproc_per_node)(args)
    rank0_print(f"test accuracy: {100 * correct / total:.1f} % of {total:,} images")
