"""Seeds of ranks, without any rank but this process."""

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ddpkit.errors import ConfigError
from ddpkit.randomness import read_global_streams, write_global_streams
from ddpkit.seeding import seed_everything, seed_of_rank


@pytest.fixture(autouse=True)
def _streams_put_back() -> Iterator[None]:
    before = read_global_streams()
    yield
    write_global_streams(before)


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_world_of_one_gets_the_streams_of_the_seed_itself(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    expected = draw()
    seed_everything(seed)
    assert draw() == expected


def test_the_largest_seed_is_numpys_modulo_32_bits() -> None:
    np.random.seed((2**63 - 1) % 2**32)
    expected = np.random.rand(3).tolist()
    seed_everything(2**63 - 1)
    assert draw()[2] == expected
    assert torch.initial_seed() == 2**63 - 1


def test_seeds_accelerators_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeds.append)
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: False)
    seed_everything(3)
    assert seeds == [3]


def test_seeds_of_ranks_differ_and_depend_on_seed_and_rank_alone() -> None:
    seeds = {seed_of_rank(seed, rank) for seed in range(20) for rank in range(200)}
    assert len(seeds) == 20 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) > 20 * 200 - 3  # what numpy gets
    assert seed_of_rank(5, 0) == 5
    assert seed_of_rank(5, 3) == seed_of_rank(5, 3)


def test_numpys_integers_are_integers() -> None:
    seed_everything(np.int64(4))  # type: ignore[arg-type]
    first = draw()
    seed_everything(4)
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.0, "7", None, float("nan")])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed: Any) -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(ConfigError, match="at least 0 and below 2\\*\\*63"):
        seed_everything(seed)
    assert draw() == expected


WITHOUT_NUMPY = """
import random, sys
sys.modules["numpy"] = None
import torch, ddpkit
ddpkit.seed_everything(7)
print(float(torch.rand(())), random.random(), sys.modules["numpy"])
del sys.modules["numpy"]
ddpkit.seed_everything(7)
import numpy
print(numpy.random.rand())
"""


def test_works_without_numpy_and_seeds_it_before_it_is_used() -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    seed_everything(7)
    expected = [float(torch.rand(())), random.random(), None, np.random.rand()]
    assert result.stdout.split() == [str(value) for value in expected]
