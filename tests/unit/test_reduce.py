import collections
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ddpkit.errors import ConfigError, GroupError
from ddpkit.reduce import _mismatch_message, reduce_mean, reduce_sum

UINT4: torch.dtype = vars(torch)["uint4"]  # the stubs do not have it


class Metrics(NamedTuple):
    loss: float
    correct: torch.Tensor


def test_structure_comes_back_in_a_world_of_one() -> None:
    value = {"b": [1, 2.5, (True,)], "a": Metrics(0.5, torch.tensor(3)), "c": {}}
    total = reduce_sum(value)
    assert total == {"b": [1, 2.5, (1,)], "a": Metrics(0.5, torch.tensor(3)), "c": {}}
    assert list(total) == ["b", "a", "c"]
    assert isinstance(total["a"], Metrics)


def test_types_of_mappings_stay() -> None:
    value: Any = collections.defaultdict(list, {"n": 2})
    total = reduce_sum(value)
    assert total == {"n": 2}
    assert total.default_factory is list


@pytest.mark.parametrize(
    "number", [0, -5, 2**63 - 1, -(2**63), 0.1, -1e300, math.inf, 1 - 2j], ids=str
)
def test_numbers_are_exact(number: complex) -> None:
    total = reduce_sum(number)
    assert total == number
    assert type(total) is type(number)


def test_nan_stays_nan() -> None:
    assert math.isnan(reduce_sum(math.nan))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.int64, torch.int64),
        (torch.uint16, torch.int64),
        (torch.uint32, torch.int64),
        (torch.uint64, torch.int64),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e5m2),
        (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
        (torch.float8_e5m2fnuz, torch.float8_e5m2fnuz),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (0, 2)], ids=str)
def test_tensors_keep_shape_and_get_the_type_of_torch_sum(
    dtype: torch.dtype, result: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.ones(shape).to(dtype)
    total = reduce_sum(value)
    assert total.dtype == result
    # torch compares no tensors of eight bits.
    assert torch.equal(total.to(torch.complex128), value.to(torch.complex128))


def test_strides_and_flags_do_not_matter() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(reduce_sum(matrix), matrix)
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(reduce_sum(conjugated), conjugated)
    negative = torch.tensor([1 + 2j]).conj().imag
    assert torch.equal(reduce_sum(negative), negative)


def test_the_result_shares_nothing_with_the_input() -> None:
    value = torch.ones(2, requires_grad=True)
    total = reduce_sum(value)
    assert not total.requires_grad
    total += 1
    assert torch.equal(value, torch.ones(2))


def test_mean_of_one_rank() -> None:
    assert reduce_mean(3, weight=7) == 3.0
    assert isinstance(reduce_mean(3), float)
    assert reduce_mean((1j, torch.tensor([2.0])), torch.tensor(4)) == (1j, torch.tensor([2.0]))


@pytest.mark.parametrize(("value", "weight"), [(0.1, 3), (1e308, 64), (1e-320, 0.001)])
def test_the_mean_of_one_rank_is_the_value_itself(value: float, weight: float) -> None:
    assert reduce_mean(value, weight) == value
    assert reduce_mean(torch.tensor(value, dtype=torch.float64), weight).item() == value


def test_mean_of_integer_tensors_has_the_default_floating_type() -> None:
    assert reduce_mean(torch.tensor([1, 2])).dtype == torch.get_default_dtype()


def test_mean_does_not_overflow_a_narrow_type() -> None:
    value = torch.tensor([60000.0], dtype=torch.float16)
    assert torch.equal(reduce_mean(value, weight=1000), value)


def test_nothing_at_all_has_the_mean_nan() -> None:
    number, tensor = reduce_mean((1.0, torch.ones(2)), weight=0)
    assert math.isnan(number)
    assert bool(tensor.isnan().all())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3 samples", torch.ones(2)], ids=str)
def test_a_wrong_weight_is_named(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        reduce_mean(1.0, weight=weight)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"loss": ["much"]}, r"value\['loss'\]\[0\] is a str"),
        (None, "value is a NoneType"),
        ([torch.eye(2).to_sparse()], r"value\[0\] is a tensor of layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "on meta"),
        (torch.zeros(2, dtype=torch.uint8).view(UINT4), "type torch.uint4, which torch can"),
        (np.ones(2), "value is a ndarray"),
    ],
    ids=["text", "none", "sparse", "meta", "bits", "array"],
)
@pytest.mark.parametrize("function", [reduce_sum, reduce_mean])
def test_what_cannot_be_summed_is_named(function: Any, value: object, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        function(value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that both are about to change
@pytest.mark.parametrize("function", [reduce_sum, reduce_mean])
def test_quantized_and_nested_tensors_are_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match="qint8"):
        function(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with pytest.raises(ConfigError, match="layout nested"):
        function(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((2**63,), r"value\[0\] is 9223372036854775808"),
        (-(2**63) - 1, "value is -9223372036854775809"),
        (np.uint64(2**63), "value is 9223372036854775808"),
        ([torch.tensor([1, 2**63], dtype=torch.uint64)], r"value\[0\] has entries of 2\*\*63 or m"),
    ],
    ids=["int", "negative", "numpy", "uint64"],
)
def test_integers_that_would_wrap_around_are_refused(value: object, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        reduce_sum(value)


def test_means_of_large_integers_are_floats() -> None:
    assert reduce_mean(2**70) == 2.0**70
    assert reduce_mean(torch.tensor([2**63], dtype=torch.uint64)).tolist() == [2.0**63]
    with pytest.raises(ConfigError, match="value is int and cannot be summed as a float"):
        reduce_mean(10**400)


@pytest.mark.parametrize(
    ("number", "total"),
    [
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.bool_(True), 1),
        (np.complex64(1j), 1j),
    ],
    ids=repr,
)
def test_other_kinds_of_numbers_become_pythons_own(number: Any, total: complex) -> None:
    found = reduce_sum(number)
    assert found == total
    assert type(found) is type(total)
    assert reduce_mean(number) == total


def test_nothing_is_summed_to_nothing() -> None:
    assert reduce_sum({}) == {}
    assert reduce_mean([(), {}], weight=3) == [(), {}]


def test_a_scalar_view_with_a_stride_keeps_its_value() -> None:
    strided = torch.arange(6.0)[::4]
    assert torch.equal(reduce_sum(strided), strided)
    assert reduce_sum(torch.ones(1).expand(300)).sum() == 300


def test_without_a_group_several_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="reduce_sum"):
        reduce_sum(1)


def test_a_mismatch_names_the_first_part_that_differs() -> None:
    texts = ["sum of 2\na: int\nb: float", "sum of 2\na: int\nb: float", "sum of 2\na: int\nb: int"]
    message = _mismatch_message(texts)
    assert "rank 0 has 'b: float'" in message
    assert "rank 2 has 'b: int'" in message
