"""What step.py trains: two small models, their data, and one loop for all who are measured.

A contestant differs in how it opens a group, wraps model and optimizer, and calls backward; nothing
else is its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

RANKS = 2
BATCHES = 4
"""Made before anything is measured, and used in turn."""

Batch = tuple[torch.Tensor, torch.Tensor]


# --------------------------------------------------------------------------------------- the models


def make_cnn() -> nn.Module:
    """Make a CNN with batch norm, for images of 32 x 32."""
    return nn.Sequential(
        *_convolution(3, 16),
        *_convolution(16, 32, stride=2),
        *_convolution(32, 32),
        *_convolution(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


class Transformer(nn.Module):
    """Two layers that predict the next of a sequence of tokens."""

    def __init__(self, tokens: int = 512, width: int = 128, length: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        logits: torch.Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits.transpose(1, 2)


def make_tiny() -> nn.Module:
    """Make a model whose step is so short that costs of microseconds can be seen in it."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def make_images() -> Batch:
    """Draw images and their classes."""
    return torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def make_sequences() -> Batch:
    """Draw tokens and the tokens that follow them."""
    tokens = torch.randint(512, (8, 33))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_points() -> Batch:
    """Draw points and their classes."""
    return torch.randn(8, 16), torch.randint(4, (8,))


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the usual optimizer of a CNN."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the usual optimizer of a transformer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained with."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    """In one timed block."""


WORKLOADS = {
    "cnn": Workload(make_cnn, make_images, make_sgd, steps=8),
    "transformer": Workload(Transformer, make_sequences, make_adamw, steps=8),
    "tiny": Workload(make_tiny, make_points, make_sgd, steps=60),
}
MEASURED = ("cnn", "transformer")
"""What contestants train; the tiny model is for costs within a step alone."""


# ----------------------------------------------------------------------------------------- the loop


class Library(NamedTuple):
    """What a contestant does in its own way, in a group that is open."""

    wrap: Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward


@dataclass(frozen=True)
class Training:
    """A wrapped model that is ready to be trained."""

    model: Any
    optimizer: Any
    batches: list[Batch]
    backward: Callable[[torch.Tensor], object]

    def train(self, steps: int) -> None:
        """Train so many steps."""
        for inputs, expected in itertools.islice(itertools.cycle(self.batches), steps):
            loss = F.cross_entropy(self.model(inputs), expected)
            self.optimizer.zero_grad()
            self.backward(loss)
            self.optimizer.step()


def prepare(name: str, library: Library, rank: int) -> Training:
    """Make a model, alike on all ranks, and this rank's data."""
    stay_on_own_core(rank)
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.make_model()
    wrapped, optimizer = library.wrap(model, workload.make_optimizer(model))
    torch.manual_seed(rank)
    return Training(
        wrapped, optimizer, [workload.make_batch() for _ in range(BATCHES)], library.backward
    )


def seconds_per_step(train: Callable[[int], object], steps: int) -> float:
    """Time a block of steps; one before it, which is not counted, lets the ranks begin together."""
    train(1)
    began = time.perf_counter()
    train(steps)
    return (time.perf_counter() - began) / steps


def stay_on_own_core(rank: int) -> None:
    """Keep a rank that computes with one thread on a core of its own.

    Else the system moves ranks about, in one block of steps and not in another, which makes the
    same program up to a third faster or slower.
    """
    cores = sorted(os.sched_getaffinity(0))
    if torch.get_num_threads() == 1 and len(cores) >= RANKS:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cores[rank]})
