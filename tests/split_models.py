"""Models that tests split over devices: each with something that makes a split hard."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class ToyModel(nn.Module):
    """The model of the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


class TiedTransformer(nn.Module):
    """Embedding and head are one parameter, and positions belong to the model itself."""

    def __init__(self, layers: int = 6, width: int = 16, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Skips go around blocks, and are concatenated and added in the model's own code."""

    def __init__(self, channels: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.downs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.merges = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in widths[:-1])
        self.last = nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.first(x)]
        for down in self.downs:
            skips.append(down(skips[-1]))
        y = skips.pop()
        for up, merge in zip(reversed(self.ups), reversed(self.merges), strict=True):
            y = F.relu(merge(torch.cat([up(y), skips.pop()], dim=1)))
        return x + self.last(y)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=5)  # type: ignore[no-any-return]


def vision_transformer() -> nn.Module:
    """A ViT of torchvision, with what ViT-B/16 has, but small."""
    from torchvision.models import VisionTransformer

    made: Any = VisionTransformer(32, 16, 4, 2, 16, 32, dropout=0.1, num_classes=3)
    nn.init.normal_(made.heads.head.weight)  # which begins as zeros, with no gradient below it
    return made  # type: ignore[no-any-return]


def vit_b_16() -> nn.Module:
    from torchvision.models import vit_b_16

    made: Any = vit_b_16(image_size=32, num_classes=3)
    nn.init.normal_(made.heads.head.weight)
    return made  # type: ignore[no-any-return]


def numbers(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "tutorial": (ToyModel, numbers(4, 10)),
    "resnet18": (resnet, numbers(4, 3, 32, 32)),
    "vit": (vision_transformer, numbers(4, 3, 32, 32)),
    "tied": (TiedTransformer, lambda: torch.randint(0, 11, (4, 6))),
    "unet": (UNet, numbers(4, 3, 16, 16)),
}
