"""Where operands meet, as a table."""

from __future__ import annotations

import pytest
import torch

from ddpkit.meeting import Operand, is_left_alone, meeting_device

FIRST, SECOND, THIRD = ORDER = tuple(torch.device("cuda", index) for index in range(3))
CPU = torch.device("cpu")

IN_FIRST, IN_SECOND, IN_THIRD = map(Operand, ORDER)
PARAMETER = Operand(FIRST, is_parameter=True)
NUMBER = Operand(THIRD, is_number=True)


@pytest.mark.parametrize(
    ("name", "operands", "device"),
    [
        pytest.param("add", [IN_FIRST, IN_THIRD, IN_SECOND], THIRD, id="the latest"),
        pytest.param("linear", [IN_SECOND, PARAMETER], FIRST, id="parameters come first"),
        pytest.param("linear", [IN_THIRD, Operand(SECOND, True), PARAMETER], SECOND, id="first of"),
        pytest.param("add_", [IN_FIRST, IN_SECOND], FIRST, id="in place"),
        pytest.param("__iadd__", [IN_FIRST, IN_SECOND], FIRST, id="operator in place"),
        pytest.param("__setitem__", [IN_FIRST, IN_SECOND], FIRST, id="a part"),
        pytest.param("__add__", [IN_FIRST, IN_SECOND], SECOND, id="another operator"),
        pytest.param("__invert__", [IN_FIRST, IN_SECOND], SECOND, id="not in place"),
        pytest.param("__getitem__", [IN_FIRST, IN_SECOND], FIRST, id="indices"),
        pytest.param("batch_norm", [IN_SECOND, IN_FIRST, IN_FIRST], FIRST, id="statistics"),
        pytest.param("batch_norm", [IN_SECOND, IN_FIRST, PARAMETER], FIRST, id="and weights"),
        pytest.param("add", [IN_FIRST, NUMBER], FIRST, id="numbers follow"),
        pytest.param("add", [Operand(FIRST, is_number=True), NUMBER], THIRD, id="numbers alone"),
        pytest.param("add", [Operand(CPU), IN_FIRST], FIRST, id="from elsewhere"),
        pytest.param("add", [Operand(CPU), Operand(CPU)], None, id="nothing of the model's"),
    ],
)
def test_operands_meet(name: str, operands: list[Operand], device: torch.device | None) -> None:
    assert meeting_device(name, operands, ORDER) == device


def test_they_meet_where_the_result_was_asked_for() -> None:
    assert meeting_device("add", [IN_FIRST, IN_SECOND], ORDER, THIRD) == THIRD
    assert meeting_device("add", [Operand(CPU)], ORDER, THIRD) is None


@pytest.mark.parametrize(
    ("name", "alone"),
    [("to", True), ("copy_", True), ("_foreach_add_", True), ("add", False), ("add_", False)],
)
def test_some_operations_see_to_it_themselves(name: str, alone: bool) -> None:
    assert is_left_alone(name) == alone
