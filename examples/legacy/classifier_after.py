"""Image classification on all GPUs: a small CNN on scikit-learn's handwritten digits.

--epochs 12 --resume runs/checkpoint.pt goes on with an earlier training.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    rank0_save,
    reduce_sum,
    seed_everything,
    sharded_loader,
)
from ddpkit import rank0_print as print

parser = argparse.ArgumentParser(description="Digits classification")
parser.add_argument("--epochs", default=6, type=int, help="number of total epochs to run")
parser.add_argument("-b", "--batch-size", default=64, type=int, help="batch size over all GPUs")
parser.add_argument("--lr", default=0.05, type=float, help="initial learning rate")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("-j", "--workers", default=0, type=int, help="data loading workers")
parser.add_argument("-p", "--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", help="path to the latest checkpoint")
parser.add_argument("--save-dir", default=Path("runs"), type=Path)
parser.add_argument("--seed", default=0, type=int)

use_cuda = torch.cuda.is_available()
best_acc = 0.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(Dataset[Batch]):
    def __init__(self, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(0).permutation(len(labels))
        ids = order[:1536] if train else order[1536:]
        self.images = torch.Tensor(images[ids]).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[ids])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = self.fc(torch.flatten(x, 1))
        return x


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self) -> None:
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def reduce(self) -> None:
        self.sum, self.count = reduce_sum((self.sum, self.count))
        self.avg = self.sum / self.count


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    correct = (output.argmax(1) == target).sum().item()
    return 100 * correct / target.size(0)


def train(
    train_loader: DataLoader[Batch],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
) -> None:
    batch_time, losses, top1 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        if use_cuda:
            images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)

        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(train_loader)}]\tTime {batch_time.avg:.3f}\t"
                f"Loss {losses.val:.4f} ({losses.avg:.4f})\tAcc {top1.val:.2f} ({top1.avg:.2f})"
            )

    losses.reduce()
    top1.reduce()
    print(f" * Train loss {losses.avg:.4f}\tAcc {top1.avg:.2f}")


def validate(val_loader: DataLoader[Batch], model: nn.Module, criterion: nn.Module) -> float:
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            if use_cuda:
                images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))

    losses.reduce()
    top1.reduce()
    print(f" * Val loss {losses.avg:.4f}\tAcc {top1.avg:.2f}")
    return top1.avg


@distributed
def main() -> None:
    global best_acc
    seed_everything(args.seed)

    train_set, val_set = Digits(train=True), Digits(train=False)
    train_loader = sharded_loader(
        train_set,
        global_batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
        num_workers=args.workers,
        pin_memory=use_cuda,
    )
    val_loader = sharded_loader(
        val_set,
        batch_size=256,
        uneven="exact",
        num_workers=args.workers,
        pin_memory=use_cuda,
    )

    model = ddp(Net())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    start_epoch = 0
    if args.resume:
        into = {"state_dict": model, "optimizer": optimizer, "scheduler": scheduler}
        checkpoint = barrier_load(args.resume, into=into)
        start_epoch = checkpoint["epoch"]
        train_loader.set_epoch(start_epoch)
        best_acc = checkpoint["best_acc"]
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")

    for epoch in range(start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, epoch)
        acc = validate(val_loader, model, criterion)
        scheduler.step()

        is_best = acc > best_acc
        best_acc = max(acc, best_acc)
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc": best_acc,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        rank0_save(state, args.save_dir / "checkpoint.pt")
        if is_best:
            rank0_save(state, args.save_dir / "model_best.pt")

    print(f"Best accuracy: {best_acc:.2f}")


if __name__ == "__main__":
    args = parser.parse_args()
    main()
