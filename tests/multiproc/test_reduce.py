"""Sums and means over two ranks and three."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit.errors import GroupError
from ddpkit.group import get_rank
from ddpkit.reduce import reduce_mean, reduce_sum
from ddpkit.testing import run_ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 2), (400, 2)]


def contribution(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (*shape, 2), generator=generator).to(dtype)[..., rank % 2]


def test_equals_the_sum_of_a_stack_for_every_type_and_shape() -> None:
    def sums() -> list[tuple[torch.Tensor, bool]]:
        found = []
        for dtype in DTYPES:
            for shape in SHAPES:
                value = contribution(get_rank(), dtype, shape)
                total = reduce_sum(value)
                unchanged = torch.equal(value, contribution(get_rank(), dtype, shape))
                found.append((total, unchanged))
        return found

    results = run_ranks(sums, 3)
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for index, (dtype, shape) in enumerate(cases):
        expected = torch.stack([contribution(rank, dtype, shape) for rank in range(3)]).sum(0)
        for result in results:
            total, unchanged = result[index]
            assert unchanged
            torch.testing.assert_close(total, expected)


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
    ],
    ids=["small", "large", "type", "number", "key", "length"],
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
