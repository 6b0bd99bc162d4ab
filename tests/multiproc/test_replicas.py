"""Replicas that are equal and replicas that are not, on two ranks and three."""

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn

from ddpkit import replicas
from ddpkit.agree import barrier, exchange
from ddpkit.errors import ConfigError, GroupError, PeerError
from ddpkit.group import get_rank
from ddpkit.testing import assert_replicas_equal, run_ranks
from ddpkit.wrap import ddp
from tests.forking import needs_fork


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.register_buffer("cache", torch.zeros(2, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.hidden(x)))
        return out


def seeded(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def message_of(model: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_replicas_equal(model, **options)
    return str(caught.value)


def message_on_all(make: Callable[[int], Any], ranks: int = 2, **options: Any) -> str:
    """Return the message, which must be the same on all ranks and leave the group usable."""

    def compare() -> str:
        message = message_of(make(get_rank()), **options)
        assert_replicas_equal(seeded())
        return message

    first, *others = run_ranks(compare, ranks)
    assert all(other == first for other in others)
    return first


def test_equal_models_pass_wrapped_or_not() -> None:
    def use() -> None:
        assert_replicas_equal(seeded())
        model = ddp(seeded(get_rank()))
        assert_replicas_equal(model)
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(get_rank())
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        assert_replicas_equal(model, gradients=True)
        assert_replicas_equal(optimizer)
        assert_replicas_equal({"model": model, "optimizer": optimizer, "epoch": 3})
        assert_replicas_equal(torch.compile(model, backend="eager"))
        assert_replicas_equal(seeded().requires_grad_(False))
        assert_replicas_equal(nn.Identity())

    run_ranks(use)


def test_the_first_tensor_is_named_with_ranks_place_and_values() -> None:
    def changed(rank: int) -> Net:
        model = seeded()
        with torch.no_grad():
            model.hidden.weight.fill_(0.25)
            if rank > 0:
                model.hidden.weight[0, 1] = 0.5
                model.hidden.weight[2, 1] = 0.25 + rank
                model.out.bias.fill_(1.0)
        return model

    message = message_on_all(changed, ranks=3)
    assert "2 of 10 tensors or values differ" in message
    assert (
        "The first: hidden.weight (float32 (4, 3)) differs on ranks 1, 2 from rank 0's" in message
    )
    assert (
        "on rank 1 in 2 of 12 elements, most of all at [2, 1]: 0.25 on rank 0, 1.25 on" in message
    )
    assert "(a difference of 1)" in message


def test_ranks_are_named_that_differ_also_where_rank_1_does_not() -> None:
    def changed(rank: int) -> nn.Module:
        model = seeded()
        model.get_buffer("cache").add_(rank == 2)
        return model

    message = message_on_all(changed, ranks=3)
    assert "cache (float32 (2, 3)) differs on rank 2 from rank 0's; on rank 2 in 6 of 6" in message


def test_buffers_that_came_apart_are_found() -> None:
    def use() -> str:
        model = ddp(seeded(), forward_sync_buffers=False)
        torch.manual_seed(get_rank())
        model(torch.randn(4, 3)).sum().backward()
        return message_of(model)

    assert all("The first: norm.running_mean" in message for message in run_ranks(use))


def test_gradients_are_compared_on_request() -> None:
    def use() -> str:
        model = seeded()
        model.norm.eval()
        model(torch.full((4, 3), 1.0 + get_rank())).sum().backward()
        assert_replicas_equal(model)
        return message_of(model, gradients=True)

    assert "The first: hidden.weight.grad (float32 (4, 3)) differs on rank 1" in run_ranks(use)[0]


def test_a_gradient_that_only_one_rank_has_is_found() -> None:
    def with_gradient(rank: int) -> nn.Module:
        model = seeded()
        if rank == 1:
            model.hidden.bias.grad = torch.ones(4)
        return model

    message = message_on_all(with_gradient, gradients=True)
    assert "The first: hidden.bias.grad is None on rank 0; float32 (4,) on rank 1." in message


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ((nn.Linear(2, 3), nn.Linear(2, 4)), r"weight is float32 \(3, 2\) on rank 0; float32 \(4"),
        ((nn.Linear(2, 3), nn.Linear(2, 3).double()), r"float32 \(3, 2\) on rank 0; float64 \(3"),
        ((nn.Linear(2, 3, bias=False), nn.Linear(2, 3)), r"bias is missing on rank 0; float32"),
        ((nn.Linear(2, 3), nn.Identity()), r"2 of 2 .* weight is float32 \(3, 2\) on rank 0; miss"),
    ],
    ids=["shape", "type", "missing on rank 0", "missing on rank 1"],
)
def test_other_models_are_told_by_names_shapes_and_types(
    models: tuple[Any, Any], text: str
) -> None:
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(1)
    assert re.search(text, message_on_all(lambda rank: models[rank]))


def test_three_kinds_on_three_ranks() -> None:
    message = message_on_all(lambda rank: {"a": [torch.ones(1), torch.ones(2), 1][rank]}, ranks=3)
    assert "a is float32 (1,) on rank 0; float32 (2,) on rank 1; 1 on rank 2." in message


def test_optimizers_are_told_by_their_state_and_settings() -> None:
    def adam(rank: int, lr: float = 0.1, value: float = 1.0) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([parameter], lr=lr)
        parameter.grad = torch.full((2,), 1.0 + rank * value)
        optimizer.step()
        return optimizer

    message = message_on_all(adam)
    assert "2 of " in message
    assert "The first: state[0].exp_avg (float32 (2,)) differs on rank 1" in message
    message = message_on_all(lambda rank: {"opt": adam(rank, lr=0.1 + rank, value=0.0)})
    assert "The first: opt.param_groups[0].lr is 0.1 on rank 0; 1.1 on rank 1." in message


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda rank: {"a.b": torch.tensor(rank), "a": {"b": torch.zeros(1)}},
            "a.b (int64",
        ),
        (lambda rank: {"a": {"b": torch.zeros(1)}, "a.b": rank}, "a.b #2 is 0 on rank 0; 1 on"),
        (lambda rank: {"kept": {5, 6 + rank}}, "kept[1] is 6 on rank 0; 7 on rank 1"),
        (lambda rank: {"loss": np.float32(rank)}, "loss is "),
    ],
    ids=["name of another", "name of an earlier one", "set", "numpy"],
)
def test_nothing_is_hidden_by_its_name_or_type(make: Callable[[int], Any], told: str) -> None:
    assert f"The first: {told}" in message_on_all(make)


def test_long_values_that_begin_alike_differ() -> None:
    message = message_on_all(lambda rank: {"name": "x" * 500 + str(rank)})
    assert "The first: name ('xxx" in message
    assert "...) differs on rank 1 from rank 0's." in message
    assert len(message) < 600


def test_bits_count_and_strides_do_not() -> None:
    def use() -> None:
        rank = get_rank()
        assert_replicas_equal({"a": torch.tensor([float("nan"), 1])})
        grid = torch.arange(6.0).view(2, 3)
        assert_replicas_equal({"a": grid.t().contiguous() if rank else grid.t()})
        images = torch.arange(48.0).view(1, 3, 4, 4)
        images = images.to(memory_format=torch.channels_last) if rank else images
        assert_replicas_equal({"a": images, "b": images[:, 1], "c": images[0, 0, 0, 0]})
        message = message_of({"zero": torch.tensor([1.0, -0.0 if rank else 0.0])})
        assert "at [1]: 0.0 on rank 0, -0.0 on rank 1 (a difference of 0)" in message
        message = message_of({"scalar": torch.tensor(float(rank))})
        assert "in 1 of 1 elements, most of all at []: 0.0 on rank 0, 1.0 on rank 1" in message

    run_ranks(use)


@pytest.mark.filterwarnings("ignore:.*experimental")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_every_type_and_layout() -> None:
    names = [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "bits8", "bits16"),
    ]
    dtypes = [getattr(torch, name) for name in names if hasattr(torch, name)]

    def use() -> None:
        rank = get_rank()
        for dtype in dtypes:
            tensor = torch.zeros(5 * dtype.itemsize, dtype=torch.uint8)
            assert_replicas_equal({"a": tensor.view(dtype), "none": tensor[:0].view(dtype)})
            tensor[3 * dtype.itemsize] = rank
            message = message_of({"a": tensor.view(dtype)})
            assert re.search(
                r"a \(\w+ \(5,\)\) .* in 1 of 5 elements, most of all at \[3\]", message
            )

        other = torch.eye(3) * (1 + rank)
        for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
            assert_replicas_equal({"a": make(torch.eye(3))})
            message = message_of({"a": make(other)})
            assert re.search(r"a \(float32 \(3, 3\) sparse_\w+\) differs|a is float32", message)
        assert_replicas_equal({"a": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)})
        scale = 0.1 * (1 + rank)
        quantized = torch.quantize_per_tensor(torch.eye(3), scale, 0, torch.qint8)
        assert "a (qint8 (3, 3)) differs" in message_of({"a": quantized})
        conjugate = torch.tensor([1 + 2j]).conj()
        assert_replicas_equal({"a": conjugate.resolve_conj() if rank else conjugate})

    run_ranks(use)


def test_large_tensors_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_BLOCK", 7)  # inherited by the forks

    def changed(rank: int) -> Any:
        tensor = torch.zeros(10, 3)
        if rank == 1:
            tensor[0, 1], tensor[6, 2], tensor[9, 1] = 1.0, 3.0, 2.0
        return {"a": tensor}

    message = message_on_all(changed)
    assert "on rank 1 in 3 of 30 elements, most of all at [6, 2]: 0.0 on rank 0, 3.0 on" in message


def test_tensors_without_data_on_one_rank_are_an_error_on_all() -> None:
    def use() -> str:
        with torch.device("meta" if get_rank() == 1 else "cpu"):
            model = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="have no data on rank 1: weight, bias") as caught:
            assert_replicas_equal(model)
        return str(caught.value)

    first, second = run_ranks(use)
    assert first == second


@needs_fork
def test_it_sends_digests_and_not_values_while_all_is_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def counted(value: Any, *, name: str) -> list[Any]:
        sent.append(value)
        return exchange(value, name=name)

    monkeypatch.setattr(replicas, "exchange", counted)

    def use() -> int:
        assert_replicas_equal(nn.Sequential(*[nn.Linear(9, 9) for _ in range(50)]).apply(ones))
        assert len(sent) == 1
        return len(repr(sent))

    assert max(run_ranks(use)) < 300


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


# ------------------------------------------------------------------------------- what goes wrong


class Broken:
    def state_dict(self) -> dict[str, Any]:
        if get_rank() == 1:
            raise OSError("disk full")
        return {}


def test_a_rank_that_cannot_tell_its_state_fails_with_its_own_error() -> None:
    def use() -> None:
        assert_replicas_equal(Broken())

    with pytest.raises(OSError, match="disk full") as caught:
        run_ranks(use)
    assert "rank 1" in str(caught.value.__cause__)


def test_a_rank_that_fails_before_is_named() -> None:
    def use() -> None:
        if get_rank() == 1:
            raise ValueError("no data")
        with pytest.raises(PeerError, match="no data"):
            assert_replicas_equal(seeded())

    with pytest.raises(ValueError, match="no data"):
        run_ranks(use, shutdown_grace=5)


def test_a_slow_rank_is_waited_for() -> None:
    def use() -> None:
        time.sleep(0.3 * get_rank())
        assert_replicas_equal(seeded())

    run_ranks(use)


def test_ranks_in_different_calls_are_told_apart() -> None:
    def use() -> None:
        if get_rank() == 1:
            barrier()
        else:
            assert_replicas_equal(seeded())

    with pytest.raises(GroupError, match=r"assert_replicas_equal \(test_replicas\.py"):
        run_ranks(use)


def test_the_model_is_not_changed() -> None:
    def use() -> None:
        model = seeded(get_rank())
        before = copy.deepcopy(model.state_dict())
        message_of(model)
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(use)
