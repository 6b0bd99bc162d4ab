"""The recipes of the guide, run as they stand there on two ranks."""

import contextlib
import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import profile

from ddpkit import ddp, get_device, get_rank, get_world_size, is_rank0, reduce_mean
from ddpkit.testing import assert_replicas_equal, run_ranks

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
RECIPES = re.findall(
    r"```python\n(.*?)```", GUIDE.split("\n## Recipes")[1].split("\n## ")[0], re.DOTALL
)
IMPORTED: dict[str, Any] = {
    value.__name__: value
    for value in (
        *(torch, contextlib, profile, is_rank0, get_device, reduce_mean),
        *(AveragedModel, get_ema_multi_avg_fn),
    )
}


def recipe(word: str) -> str:
    (code,) = (code for code in RECIPES if word in code)
    return textwrap.dedent(code)


class Writer:
    """Stands for tensorboard's, which may not be installed; it cannot be sent either."""

    made = 0

    def __init__(self, folder: str) -> None:
        Writer.made += 1
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))

    def __reduce__(self) -> Any:
        raise TypeError("a writer cannot be sent")


def build(steps: int = 4) -> dict[str, Any]:
    """Make what the recipes take for given: a model, and this rank's half of each batch."""
    torch.manual_seed(3)
    model: Any = ddp(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = 8 // get_world_size()
    own = slice(get_rank() * share, (get_rank() + 1) * share)
    wholes = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(steps)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {
        "model": model,
        "optimizer": optimizer,
        "train_step": train_step,
        "SummaryWriter": Writer,
        "loss_of": nn.functional.mse_loss,
        "batches": [(x[own], y[own]) for x, y in wholes],
        **IMPORTED,
    }


def run(word: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    names = given or build()
    exec(recipe(word), names)
    assert_replicas_equal(names["model"])
    return names


def test_every_recipe_has_a_test() -> None:
    assert len(RECIPES) == 4


def test_a_writer_on_rank_0_gets_the_loss_of_all() -> None:
    def use() -> list[tuple[str, float, int]] | None:
        writer = run("SummaryWriter")["writer"]
        assert Writer.made == is_rank0()
        return writer.points if writer is not None else None

    alone = run_ranks(use, 1)[0]
    assert alone is not None
    Writer.made = 0
    first, second = run_ranks(use)
    assert second is None
    assert first is not None
    assert [(tag, step) for tag, _, step in first] == [("loss", step) for step in range(4)]
    losses = [value for _, value, _ in first]
    assert losses == pytest.approx([value for _, value, _ in alone], rel=1e-5)


def test_the_profiler_runs_on_one_rank_while_both_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def use() -> bool:
        return run("profile()")["profiler"] is not None

    assert run_ranks(use) == [True, False]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)


def test_averaged_weights_are_the_same_on_all_ranks_and_those_of_one_process() -> None:
    def use() -> dict[str, torch.Tensor]:
        average = run("AveragedModel(")["average"]
        assert_replicas_equal(average)
        state: dict[str, torch.Tensor] = average.module.state_dict()
        return state

    (alone,) = run_ranks(use, 1)
    first, second = run_ranks(use)
    assert list(first) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value, atol=1e-6, rtol=1e-5)
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(overflowing: int) -> None:
    def use() -> tuple[float, list[bool]]:
        given = build()
        if get_rank() == overflowing:
            x, y = given["batches"][1]
            given["batches"][1] = x * math.inf, y
        steps: list[bool] = []
        before = [given["model"].get_parameter("module.0.weight").detach().clone()]

        def watched() -> Any:
            for batch in given["batches"]:
                yield batch
                weight = given["model"].get_parameter("module.0.weight").detach().clone()
                steps.append(not torch.equal(weight, before[-1]))
                before.append(weight)

        scaler = run("GradScaler", {**given, "batches": watched()})["scaler"]
        assert_replicas_equal([given["model"], given["optimizer"], scaler])
        return scaler.get_scale(), steps

    first, second = run_ranks(use)
    assert first == second == (512.0, [True, False, True, True])
