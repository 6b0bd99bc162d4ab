"""Pieces of code in the documentation that need more around them, run on two ranks."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn
from torch.nn import functional as F

import ddpkit
from ddpkit import ddp, get_device, is_rank0, sharded_loader
from ddpkit.testing import assert_replicas_equal, run_ranks
from tests.documents import WRITTEN, Block, find_blocks, read_page

BLOCKS = [
    block
    for page in WRITTEN
    for block in find_blocks(read_page(page), page)
    if block.verb == "ranks"
]
Names = dict[str, Any]


def samples(count: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), number % 3) for number in range(count)]


def training() -> Names:
    """What a training has: a model, an optimizer, and loaders."""
    torch.manual_seed(0)
    trainset, testset = samples(28), samples(7)
    model: Any = ddp(nn.Linear(4, 3))
    train = sharded_loader(trainset, batch_size=2)
    x, y = train.peek()
    return {
        **{name: getattr(ddpkit, name) for name in ddpkit.__all__},
        "torch": torch,
        "F": F,
        "cross_entropy": F.cross_entropy,
        "loss_of": F.cross_entropy,
        "device": get_device(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": train,
        "testset": testset,
        "test": sharded_loader(testset, batch_size=2, uneven="exact"),
        "x": x,
        "y": y,
        "download": lambda name: f"/data/{name}",
        "load_or_build": len,
    }


def checkpoints() -> Names:
    """The same, with two epochs to train; the place to save is the folder of the test."""
    given = training()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        given["optimizer"].zero_grad()
        F.cross_entropy(given["model"](x), y).backward()
        given["optimizer"].step()

    state = {name: given[name] for name in ("model", "optimizer", "train")}
    return {**given, "train_step": train_step, "epochs": 2, "state": state}


class Net(nn.Sequential):
    """Large enough to be worth splitting."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def split() -> Names:
    """A model, and devices to split it over: twice the CPU, in the place of accelerators."""

    def split_model_across_devices(model: nn.Module, devices_per_rank: int) -> nn.Module:
        return ddpkit.split_model_across_devices(model, ["cpu"] * devices_per_rank)

    inputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    names = {"split_model_across_devices": split_model_across_devices, "Net": Net}
    return {**training(), **names, "inputs": inputs, "labels": labels}


CONTEXTS: dict[str, Callable[[], Names]] = {
    each.__name__: each for each in (training, checkpoints, split)
}


def run(block: Block) -> None:
    names = CONTEXTS[block.argument]()
    code = block.text
    if "return" in code:
        code = f"def of_the_page():\n{textwrap.indent(code, '    ')}\nof_the_page()\n"
    exec(compile(code, block.place, "exec"), names)
    assert_replicas_equal(names["model"], gradients=True)


def test_pieces_run_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run_all() -> list[str]:
        done = []
        for number, block in enumerate(BLOCKS):
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            os.chdir(folder)
            try:
                run(block)
            except Exception as error:
                raise AssertionError(f"{block.place}: {error!r}") from error
            done.append(block.place)
        return done

    assert run_ranks(run_all) == [[block.place for block in BLOCKS]] * 2
    # What was saved is there, so the pieces have not merely been defined.
    assert {path.name for path in tmp_path.glob("*/**/*.pt")} == {"epoch-1.pt", "epoch-2.pt"}


def test_every_context_is_used() -> None:
    assert {block.argument for block in BLOCKS} == CONTEXTS.keys()


def test_a_piece_that_fails_on_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "if is_rank0():\n    raise KeyError('wrong')\n"
    broken = Block("page.md", 7, "python", code, "ranks", "training")
    monkeypatch.setitem(
        CONTEXTS, "training", lambda: {"is_rank0": is_rank0, "model": nn.Linear(1, 1)}
    )
    with pytest.raises(KeyError, match="wrong") as caught:
        run_ranks(lambda: run(broken))
    assert "page.md:7" in str(caught.value.__cause__)
