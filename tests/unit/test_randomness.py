"""Private random streams: theirs go on, the global ones stay as they are."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpkit.randomness import (
    PrivateRandomness,
    read_global_streams,
    seed_global_streams,
    write_global_streams,
)


def global_state() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), str(of_numpy), of_numpy[1].tolist()


def draw(count: int) -> list[Any]:
    """Draw from all streams, an odd number of normal deviates too, of which numpy makes two."""
    return [
        (float(torch.rand(())), random.gauss(0, 1), float(np.random.normal()), np.random.rand())
        for _ in range(count)
    ]


@pytest.fixture(params=["numpy", "numpy before 1.24"])
def _each_numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "numpy":
        monkeypatch.delattr("numpy.random.set_bit_generator")


each_numpy = pytest.mark.usefixtures("_each_numpy")


@each_numpy
@pytest.mark.parametrize("deviates", [0, 1, 2])
def test_the_global_streams_are_as_they_were(deviates: int) -> None:
    np.random.seed(1)
    np.random.normal(size=deviates)
    private = PrivateRandomness(1)
    for drawn in (0, 1, 3, 0, 2):
        outer = global_state()
        with private.borrowed():
            draw(drawn)
        assert global_state() == outer
        np.random.normal(size=drawn)


@each_numpy
@pytest.mark.parametrize("cuts", [(7,), (1, 6), (3, 0, 1, 3), (1,) * 7])
def test_where_the_blocks_end_makes_no_difference(cuts: tuple[int, ...]) -> None:
    whole, private = PrivateRandomness(5), PrivateRandomness(5)
    with whole.borrowed():
        expected = draw(7)
    found = []
    for cut in cuts:
        draw(2)
        with private.borrowed():
            found += draw(cut)
    assert found == expected


def test_the_streams_are_those_of_the_seed() -> None:
    with PrivateRandomness(9).borrowed():
        found = draw(3)
    outer = global_state()
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    assert found == draw(3)
    torch.set_rng_state(torch.tensor(outer[0], dtype=torch.uint8))
    random.setstate(outer[1])


def test_generators_of_ones_own_are_exchanged_too() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with PrivateRandomness(2, [generator]).borrowed():
        drawn = torch.rand((), generator=generator)
    assert torch.equal(generator.get_state(), before)
    assert drawn == torch.rand((), generator=torch.Generator().manual_seed(2))


def test_another_bit_generator_of_numpy_is_exchanged_and_comes_back() -> None:
    numpy_random: Any = np.random
    usual = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(1))
    try:
        np.random.normal()
        expected = numpy_random.get_state(legacy=False)
        with PrivateRandomness(1).borrowed():
            np.random.normal()
        assert numpy_random.get_state(legacy=False) == expected
    finally:
        numpy_random.set_bit_generator(usual)


def test_the_streams_come_back_after_an_error() -> None:
    outer = global_state()
    private = PrivateRandomness(1)

    def fail() -> None:
        with private.borrowed():
            draw(1)
            raise RuntimeError("drawn")

    with pytest.raises(RuntimeError, match="drawn"):
        fail()
    assert global_state() == outer


def test_global_streams_are_seeded_together() -> None:
    outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_global_streams(2**62 + 5)
    first = draw(2)
    seed_global_streams(2**62 + 5)
    assert draw(2) == first
    seed_global_streams(2**62 + 6)
    assert draw(2) != first
    random.setstate(outer[0])
    np.random.set_state(outer[1])
    torch.set_rng_state(outer[2])


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_saved_streams_go_on_whichever_bit_generator_numpy_has(kind: str, tmp_path: Path) -> None:
    numpy_random: Any = np.random
    usual = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(getattr(np.random, kind)(3))
    try:
        np.random.normal()
        torch.save(read_global_streams(), tmp_path / "streams.pt")
        expected = draw(3)
        write_global_streams(torch.load(tmp_path / "streams.pt"))
        assert draw(3) == expected
    finally:
        numpy_random.set_bit_generator(usual)


def test_numpy_is_not_needed() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import random, torch; del sys.modules['numpy']\n"
        "from ddpkit.randomness import PrivateRandomness\n"
        "assert 'numpy' not in sys.modules\n"
        "with PrivateRandomness(1).borrowed(): random.random()\n"
        "print('well')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "well\n", done.stderr
