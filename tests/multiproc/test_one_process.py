"""Training on several ranks against one process that sees all of it, step by step."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn

from ddpkit.accumulation import accumulate, loss_weight
from ddpkit.group import get_rank, get_world_size
from ddpkit.testing import run_ranks
from ddpkit.wrap import ddp, unwrap

STEPS = 20
EVERY = 3  # of 20, so that the last window has two

Trace = list[dict[str, torch.Tensor]]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(dim=1)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Uses a layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 5)
        self.shared = nn.Linear(5, 5)
        self.leave = nn.Linear(5, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        return self.leave(x)  # type: ignore[no-any-return]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 11),
    )


MODELS = {"cnn": cnn, "transformer": Transformer, "shared": Shared}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def samples(name: str, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = {
        "cnn": lambda: torch.randn(size, 1, 6, 6, generator=generator).double(),
        "transformer": lambda: torch.randint(11, (size, 5), generator=generator),
        "shared": lambda: torch.randn(size, 6, generator=generator).double(),
    }[name]()
    return x, torch.randint(11, (size,), generator=generator)


def shares(step: int, world: int, *, unequal: bool) -> list[int]:
    """Return how many samples each rank has: one of them none now and then."""
    if not unequal:
        return [2] * world
    return [(step + 2 * rank) % 4 + (rank == 0) for rank in range(world)]


def share(
    name: str, step: int, rank: int, world: int, *, unequal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = shares(step, world, unequal=unequal)
    x, y = samples(name, step, sum(sizes))
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return x[part], y[part]


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return unwrap(model).named_parameters()


def step_and_note(model: nn.Module, optimizer: torch.optim.Optimizer, trace: Trace) -> None:
    trace.append({name: cast("Any", p.grad).clone() for name, p in named(model)})
    optimizer.step()
    optimizer.zero_grad()


def train_one_process(name: str, world: int, every: int, *, unequal: bool) -> Trace:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace: Trace = []
    for first in range(0, STEPS, every):
        steps = range(first, min(first + every, STEPS))
        parts = [samples(name, s, sum(shares(s, world, unequal=unequal))) for s in steps]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        nn.functional.cross_entropy(model(x), y).backward()
        step_and_note(model, optimizer, trace)
    trace.append({name: p.detach() for name, p in model.named_parameters()})
    return trace


def train_rank(name: str, every: int, unequal: bool) -> Trace:
    rank, world = get_rank(), get_world_size()
    model: Any = ddp(build(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace: Trace = []
    batches: Any = [share(name, step, rank, world, unequal=unequal) for step in range(STEPS)]

    reduction = "sum" if unequal else "mean"
    count = (lambda batch: len(batch[1])) if unequal else None
    if every == 1:
        for x, y in batches:
            weight = loss_weight(len(y)) if unequal else 1.0
            loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
            (loss * weight).backward()
            step_and_note(model, optimizer, trace)
    else:
        for (x, y), micro in accumulate(model, batches, every=every, count=count):
            with micro:
                loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
                (loss * micro.weight).backward()
            if micro.is_last:
                step_and_note(model, optimizer, trace)
    trace.append({name: p.detach() for name, p in named(model)})
    return trace


def cases() -> Iterator[Any]:
    for name in MODELS:
        for every in (1, EVERY):
            for unequal in (False, True):
                is_hardest = every == EVERY and unequal
                yield pytest.param(
                    *(name, every, unequal), marks=[] if is_hardest else pytest.mark.drill
                )


@pytest.mark.parametrize(("name", "every", "unequal"), list(cases()))
def test_gradients_and_parameters_are_those_of_one_process(
    name: str, every: int, unequal: bool
) -> None:
    world = 3 if name == "shared" else 2
    expected = train_one_process(name, world, every, unequal=unequal)
    assert len(expected) == -(-STEPS // every) + 1
    for trace in run_ranks(train_rank, world, args=(name, every, unequal)):
        for step, (given, wanted) in enumerate(zip(trace, expected, strict=True)):
            for at, value in wanted.items():
                torch.testing.assert_close(
                    given[at], value, rtol=1e-9, atol=1e-11, msg=f"{at} in step {step}"
                )


def test_the_samples_are_unequal_and_some_ranks_have_none() -> None:
    sizes = [shares(step, 2, unequal=True) for step in range(STEPS)]
    assert any(one != other for one, other in sizes)
    assert any(0 in pair for pair in sizes)
    assert all(sum(pair) for pair in sizes)
