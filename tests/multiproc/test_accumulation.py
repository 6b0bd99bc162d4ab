"""Accumulation on two ranks: when gradients are averaged, and what happens where ranks differ."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpkit.accumulation import accumulate, loss_weight, sync_gradients
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_rank, is_rank0
from ddpkit.loader import sharded_loader
from ddpkit.testing import assert_replicas_equal, run_ranks
from ddpkit.wrap import ddp, unwrap


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def counted(model: Any) -> list[int]:
    """Return a list that grows with each bucket that is averaged."""
    calls: list[int] = []

    def hook(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(model.process_group, hook)
    return calls


def batches(length: int) -> list[torch.Tensor]:
    return list(torch.randn(length, 3, 4, generator=torch.Generator().manual_seed(get_rank())))


def error_of(function: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize(
    ("length", "every", "expected"), [(7, 3, 3), (6, 3, 2), (2, 5, 1), (3, 1, 3), (0, 3, 0)]
)
def test_each_window_is_averaged_once(
    length: int, every: int, expected: int, as_iterator: bool
) -> None:
    def train() -> tuple[int, int, bool]:
        model: Any = ddp(net())
        calls = counted(model)
        steps = 0
        given = iter(batches(length)) if as_iterator else batches(length)
        for x, micro in accumulate(model, given, every=every):
            with micro:
                (model(x).square().mean() * micro.weight).backward()
            if micro.is_last:
                steps += 1
                assert_replicas_equal(model, gradients=True)
                model.zero_grad()
        return len(calls), steps, model.require_backward_grad_sync

    assert run_ranks(train, 2) == [(expected, expected, True)] * 2


@pytest.mark.parametrize(
    "kind", ["nested", "several", pytest.param("compiled", marks=pytest.mark.drill)]
)
def test_models_with_wrapped_parts_are_averaged_once_in_a_window(kind: str) -> None:
    def train() -> list[int]:
        parts = [ddp(net()), ddp(nn.Linear(2, 2))]
        calls = [counted(part) for part in parts]
        model: Any = nn.Sequential(*parts)
        if kind == "compiled":
            model = torch.compile(model, backend="eager")
        given = parts if kind == "several" else model
        for x, micro in accumulate(given, batches(4), every=2):
            with micro:
                model(x).sum().backward()
        return [len(made) for made in calls]

    assert run_ranks(train, 2) == [[2, 2]] * 2


def test_the_primitive_averages_what_was_added_before() -> None:
    def train() -> list[torch.Tensor]:
        model: Any = ddp(net())
        calls = counted(model)
        for number, x in enumerate(batches(3)):
            with sync_gradients(model, when=number == 2):
                model(x).sum().backward()
        assert len(calls) == 1
        with sync_gradients(model, when=False), sync_gradients(model, when=True):
            model(batches(1)[0]).sum().backward()
        assert len(calls) == 1
        with pytest.raises(ZeroDivisionError), sync_gradients(model, when=False):
            raise ZeroDivisionError
        assert model.require_backward_grad_sync
        return [model.weight.grad]

    (one,), (other,) = run_ranks(train, 2)
    assert not torch.equal(one, other)


def test_a_static_graph_is_learned_in_a_step_that_averages() -> None:
    def train() -> tuple[str, list[int]]:
        model: Any = ddp(net(), static_graph=True)
        calls = counted(model)
        x = torch.ones(2, 4)

        def window() -> None:
            for _, micro in accumulate(model, [x] * 2, every=2):
                with micro:
                    model(x).sum().backward()

        text = error_of(window, ConfigError)
        model(x).sum().backward()
        window()
        return text, calls

    for text, calls in run_ranks(train, 2):
        assert "the first forward is inside of accumulate()" in text
        assert len(calls) == 2


def test_a_backward_that_is_not_to_be_averaged_may_go_around_forward() -> None:
    def train() -> bool:
        model: Any = ddp(nn.Sequential(net()))
        with sync_gradients(model, when=False):
            model[0](batches(1)[0]).sum().backward()
        return unwrap(model)[0].weight.grad is not None

    assert run_ranks(train, 2) == [True, True]


def test_a_scaler_skips_the_same_steps_on_all_ranks() -> None:
    def train() -> tuple[float, list[float]]:
        model = ddp(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, (x, micro) in enumerate(accumulate(model, batches(5), every=2)):
            with micro:
                loss = model(x).square().mean() * micro.weight
                if number == 0 and get_rank() == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            if micro.is_last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert_replicas_equal(model)
        return scaler.get_scale(), model.bias.tolist()

    one, other = run_ranks(train, 2)
    assert one == other
    assert one[0] == 2.0  # halved once, for the first window


# ------------------------------------------------------------------------------- where ranks differ


@pytest.mark.parametrize(
    ("different", "told"),
    [
        (lambda model, one: accumulate(model, [1, 2], every=2 if one else 3), "every is 2 on"),
        (
            lambda model, one: accumulate(model, [1, 2] if one else [1], every=2),
            "number of batches is 2 on rank 0, but 1 on rank 1",
        ),
        (
            lambda model, one: accumulate(model, [1], every=2, count=None if one else float),
            "count is None is True on rank 0, but False on rank 1",
        ),
    ],
)
def test_ranks_with_other_windows_are_told_before_they_hang(
    different: Callable[[Any, bool], Iterator[Any]], told: str
) -> None:
    def train() -> str:
        model = ddp(net())
        return error_of(lambda: next(different(model, is_rank0())), GroupError)

    for text in run_ranks(train, 2, timeout=20):
        assert told in text


def test_blocks_of_unequal_length_are_told() -> None:
    def train() -> str:
        loader = sharded_loader(list(range(5)), batch_size=2, uneven="exact")
        return error_of(lambda: next(accumulate(ddp(net()), loader, every=2)), GroupError)

    for text in run_ranks(train, 2, timeout=20):
        assert "number of batches is 2 on rank 0, but 1 on rank 1" in text


def test_a_rank_that_has_ended_is_told_where_batches_are_counted() -> None:
    def train() -> str:
        model = ddp(net())

        def use() -> None:
            given = iter(batches(2 if is_rank0() else 1))
            for x, micro in accumulate(model, given, every=1, count=len):
                with micro:
                    (model(x).sum() * micro.weight).backward()

        return error_of(use, GroupError)

    for text in run_ranks(train, 2, timeout=20):
        assert "1 of 2 ranks have no more batches" in text


def test_a_model_that_nobody_averages_is_refused() -> None:
    def train() -> list[str]:
        model = ddp(net())
        frozen = ddp(net().requires_grad_(False))
        assert len(list(accumulate(frozen, [1, 2], every=2))) == 2
        with sync_gradients(frozen, when=False):
            frozen(batches(1)[0])
        return [
            error_of(lambda: accumulate(unwrap(model), [1], every=1), ConfigError),
            error_of(lambda: sync_gradients(unwrap(model)).__enter__(), ConfigError),
        ]

    for texts in run_ranks(train, 2):
        assert all("Pass what ddp() returned, and not unwrap(model)" in text for text in texts)


def test_batches_that_are_not_entered_are_told_once() -> None:
    def train() -> int:
        model = ddp(net())
        told = pytest.warns(UserWarning, match="none was entered")
        with told if is_rank0() else contextlib.nullcontext():
            for x, _ in accumulate(model, batches(4), every=2):
                model(x).sum().backward()
        assert_replicas_equal(model, gradients=True)
        return 1

    run_ranks(train, 2)


def test_weights_are_the_same_on_all_ranks() -> None:
    def weigh() -> list[float]:
        return [loss_weight(5 if is_rank0() else 0), loss_weight(0), loss_weight(0.5)]

    assert run_ranks(weigh, 2) == [[2 / 5, 0.0, 2.0]] * 2
