"""What is found of a difference, without any rank but this process."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.replicas import Entry, Gap, assert_replicas_equal, find_difference, gap_between
from ddpkit.testing import assert_replicas_equal as public_name


def entry(what: str = "float32 (2,)", bits: int = 0, *, is_dense: bool = True) -> Entry:
    return Entry(what, bytes([bits]), is_dense)


def test_the_first_difference_is_the_first_in_rank_0s_order() -> None:
    tables = [
        {"a": entry(), "z": entry(bits=1), "b": entry(bits=1)},
        {"a": entry(), "b": entry(bits=2), "z": entry(bits=2)},
        {"a": entry(), "z": entry(bits=1), "b": entry(bits=1)},
    ]
    found = find_difference(tables)
    assert (found.name, found.count, found.total) == ("z", 2, 3)
    assert found.others == [1]
    assert found.is_in_elements


def test_what_only_some_ranks_have_differs_too() -> None:
    found = find_difference([{"a": entry()}, {"a": entry(), "b": entry()}])
    assert found.name == "b"
    assert found.entries == (None, entry())
    assert found.others == [1]
    assert not found.is_in_elements


@pytest.mark.parametrize(
    "other", [entry("float32 (3,)"), entry("float64 (2,)"), entry("0.1", is_dense=False)]
)
def test_elements_are_compared_only_between_the_same_types_and_shapes(other: Entry) -> None:
    assert not find_difference([{"a": entry()}, {"a": other}]).is_in_elements


@pytest.mark.parametrize(
    ("expected", "found", "gap"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], Gap()),
        ([1.0, 2.0, 3.0], [1.5, 2.0, 5.0], Gap(2, 2.0, 12, ("3.0", "5.0"))),
        ([0.0, 1.0], [-0.0, 1.0], Gap(1, 0.0, 10, ("0.0", "-0.0"))),
        ([math.nan, 1.0], [math.nan, 1.5], Gap(1, 0.5, 11, ("1.0", "1.5"))),
        ([1e30, math.nan], [0.0, 1.0], Gap(2, math.inf, 11, ("nan", "1.0"))),
        ([math.inf, 1.0], [math.inf, 2.0], Gap(1, 1.0, 11, ("1.0", "2.0"))),
        ([1.0, math.inf], [9.0, -math.inf], Gap(2, math.inf, 11, ("inf", "-inf"))),
    ],
)
def test_the_largest_gap_is_among_the_elements_whose_bits_differ(
    expected: list[float], found: list[float], gap: Gap
) -> None:
    tensors = torch.tensor(expected).double(), torch.tensor(found).double()
    assert gap_between(*tensors, offset=10) == gap


DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:.*experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gap_is_found_in_every_type(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3 * dtype.itemsize, dtype=torch.uint8)
    other = zeros.clone()
    other[dtype.itemsize] = 1  # the lowest bits of the second element
    gap = gap_between(zeros.view(dtype), other.view(dtype))
    assert (gap.count, gap.at) == (1, 1)
    assert gap_between(other.view(dtype), other.view(dtype)) == Gap()


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Linear(2, 2).requires_grad_(False),
        nn.Identity(),
        Extra(),
        torch.optim.Adam(nn.Linear(2, 2).parameters()),
        {"model": nn.Linear(2, 2), "epoch": 3, "none": None},
        [nn.Linear(2, 2), {}],
    ],
)
def test_a_world_of_one_has_equal_replicas(model: Any) -> None:
    assert_replicas_equal(model, gradients=True)


@pytest.mark.parametrize("model", [3, None, nn.Linear, torch.ones(2), "model"])
def test_what_holds_nothing_to_compare_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, something with"):
        assert_replicas_equal(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_tensors_without_data_are_named() -> None:
    meta = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match=r"on rank 0: 1\.weight, 1\.bias\. Materialise"):
        assert_replicas_equal(meta)
    with pytest.raises(ConfigError, match=r"on rank 0: net\.weight, net\.bias\."):
        assert_replicas_equal({"net": nn.LazyLinear(2)})
    with pytest.raises(ConfigError, match="and 4 more"):
        assert_replicas_equal(nn.Sequential(*[nn.Linear(2, 2, device="meta") for _ in range(5)]))


def test_the_public_name_is_in_testing() -> None:
    assert public_name is assert_replicas_equal
