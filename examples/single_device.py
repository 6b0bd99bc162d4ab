"""Train a small CNN on scikit-learn's handwritten digits: an ordinary script for one device."""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from tqdm import tqdm


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


def main(epochs: int, resume: bool, checkpoint: str) -> float:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainset, testset = load_data()
    train = DataLoader(trainset, batch_size=48, shuffle=True)
    test = DataLoader(testset, batch_size=256)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8 ** (1 / len(train)))
    first_epoch = 0
    if resume:
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first_epoch = saved["epoch"]
    for epoch in range(first_epoch, epochs):
        start = time.perf_counter()
        bar = tqdm(train, desc=f"epoch {epoch + 1}", leave=False)
        for images, labels in bar:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        speed = 48 * bar.n / (time.perf_counter() - start)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {speed:,.0f} samples/s")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch + 1,
            },
            checkpoint,
        )
    correct, total = count_correct(model, test, device)
    return correct / total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--checkpoint", default="digits.pt", help="default: %(default)s")
    args = parser.parse_args()
    accuracy = main(args.epochs, args.resume, args.checkpoint)
    print(f"test accuracy: {100 * accuracy:.1f} %")
