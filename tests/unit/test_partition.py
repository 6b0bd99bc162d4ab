"""The division of blocks among devices is the best that there is."""

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpkit.partition import heaviest, partition

WEIGHTS = st.one_of(
    st.lists(st.integers(0, 50), max_size=12),
    st.lists(st.sampled_from([0, 1, 2, 100]), max_size=12),
    st.lists(st.integers(0, 10**12), max_size=12),
)
LIMITS = st.lists(st.one_of(st.none(), st.integers(0, 200)), min_size=1, max_size=4)


def runs(counts: Sequence[int]) -> Iterator[slice]:
    ends = [0, *itertools.accumulate(counts)]
    return itertools.starmap(slice, itertools.pairwise(ends))


def every_division(blocks: int, devices: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations_with_replacement(range(blocks + 1), devices - 1):
        yield [b - a for a, b in itertools.pairwise([0, *cuts, blocks])]


def keeps_within(weights: list[int], limits: Sequence[int | None], counts: list[int]) -> bool:
    return all(
        limit is None or sum(weights[run]) <= limit
        for run, limit in zip(runs(counts), limits, strict=True)
    )


def best_of_all(weights: list[int], limits: Sequence[int | None]) -> int | None:
    return min(
        (
            max(sum(weights[run]) for run in runs(counts))
            for counts in every_division(len(weights), len(limits))
            if keeps_within(weights, limits, counts)
        ),
        default=None,
    )


@given(WEIGHTS, st.integers(1, 4))
def test_no_division_is_better(weights: list[int], devices: int) -> None:
    counts = partition(weights, [None] * devices)
    assert counts is not None
    assert (len(counts), sum(counts)) == (devices, len(weights))
    assert heaviest(weights, counts) == best_of_all(weights, [None] * devices)


@given(WEIGHTS, LIMITS)
def test_limits_are_kept_and_no_division_within_them_is_better(
    weights: list[int], limits: list[int | None]
) -> None:
    counts = partition(weights, limits)
    best = best_of_all(weights, limits)
    if counts is None:
        assert best is None
    else:
        assert (len(counts), sum(counts)) == (len(limits), len(weights))
        assert keeps_within(weights, limits, counts)
        assert heaviest(weights, counts) == best


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 4))
def test_no_device_goes_without_while_there_are_blocks(weights: list[int], devices: int) -> None:
    counts = partition(weights, [None] * devices)
    assert counts is not None
    best = best_of_all(weights, [None] * devices)
    could_all_have_one = any(
        min(other) > 0 and max(sum(weights[run]) for run in runs(other)) == best
        for other in every_division(len(weights), devices)
    )
    assert (min(counts) > 0) == could_all_have_one


@pytest.mark.parametrize(
    ("weights", "limits", "counts"),
    [
        ([100, 1, 1, 1], [None] * 4, [1, 1, 1, 1]),
        ([100, 1, 1, 1], [None] * 2, [1, 3]),
        ([1] * 8, [None] * 4, [2, 2, 2, 2]),
        ([3, 100, 3], [None] * 3, [1, 1, 1]),
        ([3, 100, 3], [None] * 2, [2, 1]),
        ([2, 2], [None] * 4, [1, 1, 0, 0]),
        ([7], [None], [1]),
        ([], [None, None], [0, 0]),
        ([5, 5], [4, None], [0, 2]),
        ([5, 5], [None, 4], [2, 0]),
        ([5, 5], [4, 4], None),
        ([5, 5], [0, 10, 0], [0, 2, 0]),
        ([2, 2, 2], [2, 2, 1], None),
        ([1, 1], [], None),
    ],
)
def test_known_divisions(
    weights: list[int], limits: list[int | None], counts: list[int] | None
) -> None:
    assert partition(weights, limits) == counts


def test_ten_thousand_blocks_take_no_time() -> None:
    weights = [(index * 7919) % 10_007 + 1 for index in range(10_000)]
    began = time.monotonic()
    counts = partition(weights, [None] * 64)
    assert counts is not None
    assert heaviest(weights, counts) <= 1.02 * sum(weights) / 64
    assert time.monotonic() - began < 5
