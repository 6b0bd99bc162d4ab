"""The order of an epoch: a bijection, fair, repeatable and cheap."""

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch

from ddpkit.errors import ConfigError
from ddpkit.permutation import DIRECT_LIMIT, Permutation, derive_seed

LENGTHS = [
    *range(70),
    *(2**k + d for k in (7, 10, 13, 14, 15, 17) for d in (-1, 0, 1)),
    DIRECT_LIMIT + 999,
    255 * 256,
    100_003,
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def order(length: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return Permutation(length, seed=seed, epoch=epoch)(torch.arange(length))


def chi_square(counts: Iterable[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("length", LENGTHS)
def test_is_a_bijection(length: int) -> None:
    assert torch.equal(order(length).sort().values, torch.arange(length))


@pytest.mark.parametrize("length", [3, 100, DIRECT_LIMIT, DIRECT_LIMIT + 1, 50_000])
def test_positions_can_be_asked_in_any_shape_and_order(length: int) -> None:
    whole = order(length, seed=5)
    permutation = Permutation(length, seed=5, epoch=0)
    asked = torch.randint(0, length, (4, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(permutation(asked), whole[asked])
    assert permutation(torch.arange(0)).tolist() == []


@pytest.mark.parametrize("length", [20, 20_000])
def test_depends_on_seed_and_epoch_and_on_nothing_else(length: int) -> None:
    first = order(length, seed=1, epoch=2)
    torch.manual_seed(99)
    assert torch.equal(order(length, seed=1, epoch=2), first)
    for seed, epoch in ((2, 2), (1, 3), (2, 1), (3, 0), (0, 3)):
        assert not torch.equal(order(length, seed=seed, epoch=epoch), first)


def test_is_the_same_on_every_platform() -> None:
    """Written down once; a change would make every saved place in an epoch meaningless."""
    assert order(12, seed=7, epoch=3).tolist() == [9, 4, 7, 6, 3, 11, 1, 2, 10, 8, 5, 0]
    large = Permutation(1_000_000_007, seed=7, epoch=3)
    found = large(torch.tensor([0, 1, 2, 500_000_000, 1_000_000_006]))
    assert found.tolist() == [55262974, 339110973, 219094527, 18381273, 324186983]


@pytest.mark.parametrize("varied", ["seed", "epoch"])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(length: int, varied: str) -> None:
    draws = 40 * math.factorial(length)
    counts = Counter(tuple(order(length, **{varied: k}).tolist()) for k in range(draws))
    assert len(counts) == math.factorial(length)
    freedom = len(counts) - 1
    # The mean of chi-square is the freedom, its standard deviation sqrt(2 * freedom).
    assert abs(chi_square(counts.values(), 40) - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [1000, DIRECT_LIMIT + 1, 60_000])
def test_looks_random(length: int) -> None:
    """Fixed points, neighbours and distances over many seeds, against what chance gives."""
    trials = 100
    here = torch.arange(length)
    orders = [order(length, seed=seed) for seed in range(trials)]
    fixed = sum(int((o == here).sum()) for o in orders) / trials
    neighbours = sum(int(((o[1:] - o[:-1]) == 1).sum()) for o in orders) / trials
    # Both counts are close to Poisson with mean 1.
    assert abs(fixed - 1) < 4 / math.sqrt(trials)
    assert abs(neighbours - 1) < 4 / math.sqrt(trials)
    for lag in (1, 128):
        correlations = [correlation(o[lag:], o[:-lag]) for o in orders]
        assert abs(sum(correlations)) / trials < 4 / math.sqrt(trials * length)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((first, second)).double())[0, 1])


@pytest.mark.parametrize("length", [1000, 60_000])
@pytest.mark.parametrize("position", [0, 1, 999])
def test_every_position_is_uniform_over_seeds_and_epochs(length: int, position: int) -> None:
    at = torch.tensor([position])
    for pairs in ([(s, 0) for s in range(300)], [(0, e) for e in range(300)]):
        found = [int(Permutation(length, seed=s, epoch=e)(at)) for s, e in pairs]
        counts = Counter(value * 20 // length for value in found)
        assert chi_square((counts[k] for k in range(20)), 15) < 19 + 4 * math.sqrt(38)


@pytest.mark.parametrize("length", [1000, 60_000])
def test_seeds_and_epochs_are_unrelated(length: int) -> None:
    base = order(length, seed=0, epoch=0)
    for seed, epoch in ((1, 0), (0, 1), (1, 1), (0, 2)):
        other = order(length, seed=seed, epoch=epoch)
        assert abs(correlation(base, other)) < 4 / math.sqrt(length)
        assert int((base == other).sum()) < 10


def test_the_first_index_of_a_billion_needs_no_time_and_no_memory() -> None:
    start = time.monotonic()
    tracemalloc.start()
    permutation = Permutation(1_000_000_000, seed=0, epoch=0)
    first = int(permutation(torch.tensor([0])))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 <= first < 1_000_000_000
    assert time.monotonic() - start < 2
    assert peak < 2**20
    assert tensor_bytes(permutation) < 16 * 2**20


def tensor_bytes(permutation: Permutation) -> int:
    rounds = permutation._at.rounds  # type: ignore[attr-defined]
    return sum(table.untyped_storage().nbytes() for pair in rounds for table in pair)


def test_the_longest_length_stays_inside_the_range() -> None:
    length = 2**40 + 3
    found = Permutation(length, seed=0, epoch=0)(torch.arange(length - 1000, length))
    assert len(set(found.tolist())) == 1000
    assert int(found.min()) >= 0
    assert int(found.max()) < length


@pytest.mark.parametrize("length", [-1, 2**48 + 1])
def test_refuses_other_lengths(length: int) -> None:
    with pytest.raises(ConfigError, match=str(length)):
        Permutation(length, seed=0, epoch=0)


def test_derived_seeds_are_distinct_and_fit_everywhere() -> None:
    seeds = {derive_seed("word", seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("word", 11) != derive_seed("word", 1, 1)
