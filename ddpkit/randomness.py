"""The global random streams: seeded, saved, and others in their place while they are borrowed."""

from __future__ import annotations

import ctypes
import random
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

__all__ = [
    "PrivateRandomness",
    "SeededRandomness",
    "read_global_streams",
    "seed_global_streams",
    "write_global_streams",
]


class PrivateRandomness:
    """Random streams that code which draws from the global ones can be given instead.

    Args:
        seed: Where torch's, `random`'s and (if it is loaded) numpy's global stream start.
        generators: Generators that are treated likewise.

    Example:
        >>> private = PrivateRandomness(seed=0)
        >>> with private.borrowed():
        ...     first = torch.rand(())
        >>> with PrivateRandomness(seed=0).borrowed():
        ...     bool(first == torch.rand(()))
        True
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        self._states = [
            torch.Generator(generator.device).manual_seed(seed).get_state()
            for generator in self._generators
        ]
        self._random = random.Random(seed).getstate()
        self._numpy = _numpy_stream(seed % 2**32)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Go on with the private streams inside the block and with the global ones after it."""
        outer_states, outer_random = self._exchange(self._states, self._random)
        with self._numpy.borrowed():
            try:
                yield
            finally:
                exchanged = self._exchange(outer_states, outer_random)
                self._states, self._random = exchanged

    def _exchange(self, states: list[Tensor], of_random: Any) -> tuple[list[Tensor], Any]:
        before = [generator.get_state() for generator in self._generators], random.getstate()
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        random.setstate(of_random)
        return before


class SeededRandomness:
    """Random streams that begin anew in each block; cheaper than those that go on.

    Example:
        >>> seeded = SeededRandomness()
        >>> with seeded.borrowed(3):
        ...     first = torch.rand(())
        >>> with seeded.borrowed(3):
        ...     bool(first == torch.rand(()))
        True
    """

    def __init__(self) -> None:
        self._numpy = _numpy_stream(0)

    @contextmanager
    def borrowed(self, seed: int) -> Iterator[None]:
        """Begin with the streams of a seed inside the block; go on with the global ones after it.

        Args:
            seed: In `[0, 2**63)`.
        """
        outer_torch, outer_random = torch.default_generator.get_state(), random.getstate()
        with self._numpy.exchanged():
            seed_global_streams(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(outer_torch)
                random.setstate(outer_random)


def seed_global_streams(seed: int) -> None:
    """Start torch's, `random`'s and (if it is loaded) numpy's global stream of this process anew.

    The streams of accelerators are left alone.

    Args:
        seed: In `[0, 2**63)`.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def read_global_streams() -> dict[str, Any]:
    """Return the state of the global streams of this process, in types that a safe load takes.

    Returns:
        The states of torch's (and of its current CUDA device, if that was used), `random`'s and
        numpy's (if it is loaded) stream.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": [version, list(words), gauss],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _numpy_state(numpy.random.get_state(legacy=False))
    return states


def _numpy_state(state: dict[str, Any]) -> Any:
    if state["bit_generator"] != "MT19937":
        return _with_lists(state)
    key, position = state["state"]["key"], state["state"]["pos"]
    return ["MT19937", key.tolist(), *map(float, (position, state["has_gauss"], state["gauss"]))]


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def write_global_streams(states: Mapping[str, Any]) -> None:
    """Go on with streams whose state was read before.

    Args:
        states: What `read_global_streams` returned. Streams that are not there now are left out.
    """
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_as_numpy_takes_it(states["numpy"]))


def _as_numpy_takes_it(state: Any) -> Any:
    if isinstance(state, dict):
        return state
    kind, keys, position, has_gauss, cached = state
    return kind, keys, int(position), int(has_gauss), cached


def _numpy_stream(seed: int) -> _NumpyStream | _OldNumpyStream | _NoNumpy:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _NoNumpy()
    own = numpy.random.RandomState(seed).get_state(legacy=False)
    kind = _NumpyStream if hasattr(numpy.random, "set_bit_generator") else _OldNumpyStream
    return kind(numpy.random, own)


class _NoNumpy:
    def borrowed(self) -> AbstractContextManager[None]:
        return nullcontext()

    exchanged = borrowed


class _OldNumpyStream:
    """A stream in the place of numpy's global one, for numpy before 1.24."""

    def __init__(self, numpy_random: Any, own: dict[str, Any]) -> None:
        self._numpy = numpy_random
        self._own = own

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        outer = self._numpy.get_state(legacy=False)
        try:
            yield
        finally:
            self._numpy.set_state(outer)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        with self.exchanged():
            self._numpy.set_state(self._own)
            try:
                yield
            finally:
                self._own = self._numpy.get_state(legacy=False)


class _NumpyStream:
    """A stream in the place of numpy's global one.

    Reading and writing numpy's state takes 80 microseconds each, exchanging its bit generator one.
    But the exchange forgets the second of two normal deviates that were made together, so states
    are still read and written where there may be such a one: in a bit generator that has been used.
    """

    def __init__(self, numpy_random: Any, own: dict[str, Any]) -> None:
        self._numpy = numpy_random
        self._generator = numpy_random.MT19937()
        self._generator.state = own
        self._pending: dict[str, Any] | None = None  # the own state, if a deviate waits in it
        self._clean = b""  # what the global bit generator holds when none waits there

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Leave the global stream out of the block, which begins anywhere."""
        outer = self._numpy.get_bit_generator()
        outer_pending = self._pending_in(outer)
        self._numpy.set_bit_generator(self._generator)
        try:
            yield
        finally:
            self._numpy.set_bit_generator(outer)
            if outer_pending is not None:
                self._numpy.set_state(outer_pending)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Go on with the own stream in the block."""
        with self.exchanged():
            if self._pending is not None:
                self._numpy.set_state(self._pending)
            before = _content(self._generator)
            try:
                yield
            finally:
                if self._pending is not None or _content(self._generator) != before:
                    self._pending = self._state_if_pending()

    def _pending_in(self, outer: Any) -> dict[str, Any] | None:
        content = _content(outer)
        if content is not None and content == self._clean:
            return None
        pending = self._state_if_pending()
        self._clean = b"" if pending is not None or content is None else content
        return pending

    def _state_if_pending(self) -> dict[str, Any] | None:
        state: dict[str, Any] = self._numpy.get_state(legacy=False)
        return state if state["has_gauss"] else None


def _content(generator: Any) -> bytes | None:
    """Read a Mersenne twister where it lies: 624 words and a position. None for other kinds."""
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
