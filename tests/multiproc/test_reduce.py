"""Sums and means over two ranks and three."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from ddpkit import sharded_loader
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_rank
from ddpkit.reduce import reduce_mean, reduce_sum
from ddpkit.testing import run_ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
]
NARROW_DTYPES = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.complex32,
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 2), (400, 2)]


def contribution(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (*shape, 2), generator=generator).to(dtype)[..., rank % 2]


def test_equals_the_sum_of_a_stack_for_every_type_and_shape() -> None:
    def sums() -> list[tuple[torch.Tensor, bool]]:
        found = []
        for dtype in DTYPES:
            *small, large = (contribution(get_rank(), dtype, shape) for shape in SHAPES)
            totals = [*reduce_sum(small), reduce_sum(large)]
            for shape, value, total in zip(SHAPES, [*small, large], totals, strict=True):
                unchanged = torch.equal(value, contribution(get_rank(), dtype, shape))
                found.append((total, unchanged))
        return found

    results = run_ranks(sums, 3)
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for index, (dtype, shape) in enumerate(cases):
        wide = torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else dtype
        parts = [contribution(rank, dtype, shape).to(wide) for rank in range(3)]
        expected = torch.stack(parts).sum(0)
        for result in results:
            total, unchanged = result[index]
            assert unchanged
            torch.testing.assert_close(total, expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_types_that_torch_cannot_add_itself_are_added_in_wider_ones() -> None:
    def totals() -> list[Any]:
        found = []
        for dtype in NARROW_DTYPES:
            for shape in SHAPES:
                value = contribution(get_rank(), dtype, shape)
                total, mean = reduce_sum(value), reduce_mean(value, weight=2.0)
                assert total.dtype == mean.dtype == dtype
                assert total.shape == mean.shape == torch.Size(shape)
                found.append((total.to(torch.complex64), mean.to(torch.complex64)))
        return found

    results = run_ranks(totals)
    cases = [(dtype, shape) for dtype in NARROW_DTYPES for shape in SHAPES]
    for index, (dtype, shape) in enumerate(cases):
        parts = [contribution(rank, dtype, shape).to(torch.complex64) for rank in range(2)]
        expected = parts[0] + parts[1]
        for result in results:
            total, mean = result[index]
            assert torch.equal(total, expected)
            assert torch.equal(mean, expected / 2)


@pytest.mark.parametrize("size", [2, 5000])
def test_nan_and_infinity_go_through(size: int) -> None:
    def totals() -> list[list[float]]:
        rank = get_rank()
        value = torch.zeros(size)
        value[0], value[1] = (math.nan, 1.0) if rank else (1.0, math.inf)
        opposite = -math.inf if rank else math.inf
        return [reduce_sum(value)[:2].tolist(), reduce_sum([opposite, 1.0 + rank])]

    for (first, second), (nothing, three) in run_ranks(totals):
        assert math.isnan(first)
        assert second == math.inf
        assert math.isnan(nothing)
        assert three == 3.0


def test_large_values_of_several_types_come_together() -> None:
    def totals() -> list[Any]:
        rank = get_rank()
        value: Any = {
            "half": torch.full((3000,), 0.5, dtype=torch.float16),
            "count": torch.full((40, 50), rank + 1),
            "wide": [torch.full((700,), 1e300 * rank, dtype=torch.float64), 2**62, 0.25],
            "none": torch.ones(0, 3),
            "complex": torch.full((2, 2), complex(rank, 1)),
        }
        total = reduce_sum(value)
        wide = total["wide"]
        return [
            *(total["half"].unique().tolist(), total["count"].unique().tolist()),
            *(wide[0].unique().tolist(), wide[1:], tuple(total["none"].shape)),
            total["complex"].flatten().tolist(),
        ]

    expected = [[1.0], [3], [1e300], [2**63, 0.5], (0, 3), [1 + 2j] * 4]
    assert run_ranks(totals) == [expected] * 2


def test_nothing_is_reduced_to_nothing() -> None:
    def totals() -> list[Any]:
        return [reduce_sum({}), reduce_mean([()], weight=get_rank()), reduce_sum(get_rank())]

    assert run_ranks(totals) == [[{}, [()], 1]] * 2


def test_numbers_are_exact_and_the_same_bits_everywhere() -> None:
    def sums() -> list[Any]:
        rank = get_rank()
        small = reduce_sum([2**62, 0.1 + rank, True, complex(rank, 1)])
        torch.manual_seed(rank)
        large = reduce_sum(torch.randn(3000))
        mixed = reduce_sum({"a" if key else "b": key for key in ((1, 0) if rank else (0, 1))})
        return [small, large.view(torch.int32).tolist(), mixed]

    first, *others = run_ranks(sums, 3)
    assert first[0] == [3 * 2**62, 0.1 + 1.1 + 2.1, 3, 3 + 3j]
    assert first[2] == {"a": 3, "b": 0}
    assert all(other == first for other in others)


def test_metrics_take_one_collective() -> None:
    def count() -> int:
        names: list[str] = []
        for name in ("all_reduce", "all_gather", "broadcast"):
            original = getattr(dist, name)

            def counted(*args: Any, _name: str = name, _original: Any = original) -> Any:
                names.append(_name)
                return _original(*args)

            setattr(dist, name, counted)
        assert reduce_sum({"n": 3, "loss": torch.ones(4), "c": [1j, 0.5]})["n"] == 6
        return len(names)

    assert run_ranks(count) == [1, 1]


def test_mean_weighs_by_samples_and_ignores_empty_ranks() -> None:
    def means() -> list[Any]:
        rank = get_rank()
        pooled = reduce_mean([1.0, 4.0, math.nan][rank], weight=[5, 2, 0][rank])
        nothing = reduce_mean(1.0, weight=0)
        tensor = reduce_mean(torch.tensor([rank, math.inf if rank == 2 else 0.5]), 2 - rank)
        return [pooled, math.isnan(nothing), tensor.tolist()]

    for pooled, nothing_is_nan, tensor in run_ranks(means, 3):
        assert pooled == pytest.approx((5 * 1.0 + 2 * 4.0) / 7)
        assert nothing_is_nan
        assert tensor == pytest.approx([1 / 3, 0.5])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((torch.ones(2), torch.ones(3)), r"\(2,\).*\(3,\)"),
        ((torch.ones(2000), torch.ones(3)), r"\(2000,\).*\(3,\)"),
        ((torch.ones(2), torch.ones(2).double()), "float32.*float64"),
        ((1, 1.0), "int.*float"),
        (({"a": 1}, {"b": 1}), r"\['a'\].*\['b'\]"),
        (([1, 2], [1]), "2 parts.*1 parts"),
        (([0] * 300, [0] * 299 + [0.0]), r"\[299\]: int.*\[299\]: float"),
    ],
    ids=["small", "large", "type", "number", "key", "length", "late"],
)
def test_a_mismatch_raises_on_every_rank_and_leaves_the_group_usable(
    values: tuple[Any, Any], told: str
) -> None:
    def mismatched() -> tuple[str, int]:
        with pytest.raises(GroupError, match=told) as caught:
            reduce_sum(values[get_rank()])
        return str(caught.value), reduce_sum(1)

    first, second = run_ranks(mismatched)
    assert first == second
    assert first[1] == 2


def test_different_functions_are_a_mismatch() -> None:
    def mismatched() -> None:
        with pytest.raises(GroupError, match=r"reduce_sum.*reduce_mean"):
            reduce_mean(1.0) if get_rank() else reduce_sum((1.0, 1.0))

    run_ranks(mismatched)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: reduce_sum([1, "text" if get_rank() == 1 else 2]), r"value\[1\] is a str"),
        (lambda: reduce_sum(2**63 if get_rank() == 1 else 1), "value is 9223372036854775808"),
        (lambda: reduce_mean(1.0, weight=math.nan if get_rank() == 1 else 1), "weight=nan"),
    ],
    ids=["text", "large", "weight"],
)
def test_what_cannot_be_reduced_on_one_rank_is_an_error_on_all(
    call: Callable[[], object], told: str
) -> None:
    def refused() -> tuple[str, int]:
        with pytest.raises(ConfigError, match=told) as caught:
            call()
        return str(caught.value), reduce_sum(1)

    first, *others = run_ranks(refused, 3)
    assert first[0].startswith("[rank 1/3] ")
    assert first[1] == 3
    assert others == [first] * 2


def test_what_no_rank_can_reduce_is_an_error_on_all() -> None:
    def refused() -> int:
        with pytest.raises(ConfigError, match="value is a str"):
            reduce_sum("text")
        return reduce_sum(1)

    assert run_ranks(refused) == [2, 2]


# --------------------------------------------------------------------- against one process


SHARES = [slice(0, 5), slice(5, 7), slice(7, 7)]


def test_metrics_equal_the_pooled_value() -> None:
    losses = torch.linspace(0.1, 9.7, 7, dtype=torch.float64)
    hits = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)

    def metrics() -> list[float]:
        share = SHARES[get_rank()]
        mine, right = losses[share], hits[share]
        mean = reduce_mean(mine.mean(), weight=len(mine))  # of no samples it is NaN
        correct, count, total = reduce_sum((right.sum(), len(mine), mine.sum()))
        return [mean.item(), correct.item() / count, total.item() / count]

    mean, accuracy = losses.mean().item(), hits.double().mean().item()
    for found in run_ranks(metrics, 3):
        assert found == pytest.approx([mean, accuracy, mean], rel=1e-12)


class Confusion:
    """A metric as libraries write them: tensors that are added to, and computed from at the end."""

    def __init__(self, classes: int) -> None:
        self.state = {
            "matrix": torch.zeros(classes, classes, dtype=torch.int64),
            "loss": torch.zeros((), dtype=torch.float64),
        }

    def update(self, predicted: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        ones = torch.ones_like(labels)
        self.state["matrix"].index_put_((labels, predicted), ones, accumulate=True)
        self.state["loss"] += loss.double().sum()

    def compute(self) -> dict[str, Any]:
        state = reduce_sum(self.state)  # a copy: the own share goes on counting
        matrix = state["matrix"]
        count = matrix.sum()
        recall = (matrix.diagonal() / matrix.sum(1)).tolist()
        return {"matrix": matrix.tolist(), "recall": recall, "loss": (state["loss"] / count).item()}


@pytest.mark.parametrize("size", [50, 2])  # the latter leaves a rank without a sample
def test_a_metric_that_accumulates_equals_that_of_one_process(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (size,), generator=generator)
    scores = torch.randn(size, 3, generator=generator)
    data = TensorDataset(scores, labels)

    def evaluate() -> dict[str, Any]:
        metric = Confusion(3)
        for inputs, targets in sharded_loader(data, batch_size=4, uneven="exact"):
            loss = torch.nn.functional.cross_entropy(inputs, targets, reduction="none")
            metric.update(inputs.argmax(1), targets, loss)
        first = metric.compute()
        assert first["matrix"] == metric.compute()["matrix"]  # reduced once more, not doubled
        return first

    alone = evaluate()
    assert sum(map(sum, alone["matrix"])) == size
    for found in run_ranks(evaluate, 3):
        assert found["matrix"] == alone["matrix"]
        assert found["recall"] == pytest.approx(alone["recall"], nan_ok=True)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-9)
