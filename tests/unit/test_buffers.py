"""The places of buffers in their message, and finding them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddpkit.buffers import aligned_starts, buffers_of

UNITS = st.sampled_from([1, 2, 4, 8, 16])
ARRAYS = st.lists(st.tuples(st.integers(0, 5), UNITS), max_size=8)


@given(ARRAYS)
def test_arrays_lie_aligned_side_by_side(arrays: list[tuple[int, int]]) -> None:
    sizes = [count * unit for count, unit in arrays]
    starts = aligned_starts(sizes, [unit for _, unit in arrays])
    assert all(start % unit == 0 for start, (_, unit) in zip(starts, arrays, strict=True))
    taken = [
        byte
        for start, size in zip(starts, sizes, strict=True)
        for byte in range(start, start + size)
    ]
    assert sorted(taken) == list(range(sum(sizes)))


class Nested(nn.Module):
    """Has buffers at each level, one twice, one child twice, and an empty place for each."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.BatchNorm1d(2)
        self.same_child = self.child
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
        self.missing = None
        self.register_module("no_child", None)
        self.register_buffer("own", torch.ones(()))
        self.register_buffer("own_again", self.get_buffer("own"))
        self.register_buffer("none", None)
        self.register_buffer("hidden", torch.ones(1), persistent=False)


def test_each_buffer_is_found_once() -> None:
    model = Nested()
    found = [id(buffer) for buffer in buffers_of(model)]
    assert len(found) == len(set(found)) == 8
    assert set(found) == {id(buffer) for buffer in model.buffers()}


def test_a_module_that_holds_itself_is_searched_once() -> None:
    model = nn.BatchNorm1d(2)
    model.__dict__["_modules"]["me"] = model
    assert len(buffers_of(model)) == 3
