"""A pseudo-random bijection of `range(n)`, computed by position.

`Permutation(n, seed=..., epoch=...)` answers "which sample stands at position p" without building
the whole order, so the first index of an epoch costs the same at a thousand samples and at a
billion. Everything is integer arithmetic that cannot overflow: the same (n, seed, epoch) give the
same order on every platform and with every version of torch.

Construction
    A Feistel network with tables. A position is split into a low half of s bits, in `[0, a)` with
    `a = 2**s`, and a high half in `[0, b)` with `b = ceil(n / a)`; a is within a factor of
    two of sqrt(n).
    Rounds alternate: `high += F[low] (mod b)` and `low += G[high] (mod a)`. Subtracting the same
    table entry undoes a round, so the network is a bijection of `range(a * b)`. Where an image
    falls outside `range(n)` the network is applied again until it falls inside ("cycle walking",
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); as `a * b - n < a`, that
    happens for about one position in sqrt(n). Luby and Rackoff, "How to construct pseudorandom
    permutations from pseudorandom functions", 1988, is the source of the network's analysis.

Tables
    Each round has its own table of about sqrt(n) entries: a keyed 32-bit hash of the index of the
    entry, scaled to the range. The hash is twice the finaliser "lowbias32" of Chris Wellons
    ("Prospecting for Hash Functions", 2018, public domain), with keys before and between. What
    comes before the second key is made once for all tables, which takes almost half the time off
    the first index.
    A table is repeated as often as its index can exceed the range, so that the sums need no
    reduction between rounds, which makes a round two operations: one look-up, one addition.

Rounds
    Eight. Over 1500 keys at n = 16385, four rounds left twice as many neighbours together as chance
    does: 1.83 pairs an order, where 1.00 is expected with a standard error of 0.03. Six (1.05) and
    eight (1.02) were like chance in this, and in fixed points too (1.04 and 1.04). Small tables
    need more: at n = 6, eight rounds have a chi-square per degree of freedom of 8 over all orders,
    twelve still 1.4. Therefore up to `DIRECT_LIMIT` samples the order is instead the one that sorts
    the hashes of the positions, which has no such weakness; above, both halves have at least 128
    values.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["BLOCK", "DIRECT_LIMIT", "Permutation", "derive_seed"]

DIRECT_LIMIT = 2**14
"""Up to this length a permutation is sorted once; above, it is computed by position."""

LENGTH_LIMIT = 2**48
"""Above this length the tables alone would take gigabytes."""

BLOCK = 2**15
"""How many numbers are computed at once.

It is the most that torch does without its thread pool, which ranks and data workers would contend
for.
"""

_ROUND_PAIRS = 4
_MASK32 = 0xFFFFFFFF


def derive_seed(*parts: int | str) -> int:
    """Derive a seed of 63 bits from a few numbers and words.

    Different parts give unrelated seeds. Sums would not: with `seed + epoch`, seed 1 in epoch 0
    repeats seed 0 in epoch 1.

    Args:
        *parts: What the seed depends on, in order.

    Returns:
        An integer in `[0, 2**63)`, the same on every platform.

    Example:
        >>> derive_seed("worker", 0, 1) == derive_seed("worker", 0, 1)
        True
        >>> derive_seed("worker", 0, 1) == derive_seed("worker", 1, 0)
        False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Permutation:
    """The order of `length` samples in one epoch, asked by position.

    Memory is about `100 * sqrt(length)` bytes, and at most 128 KiB up to `DIRECT_LIMIT` samples.

    Args:
        length: How many samples there are, at least 0.
        seed: The seed of the whole run.
        epoch: The epoch; the orders of different epochs are unrelated.

    Raises:
        ConfigError: If `length` is negative or above `LENGTH_LIMIT`.

    Example:
        >>> order = Permutation(10, seed=0, epoch=0)
        >>> sorted(order(torch.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= LENGTH_LIMIT:
            raise ConfigError(
                f"a permutation of length={length} cannot be made; expected 0 to {LENGTH_LIMIT}"
            )
        self.length = length
        self._at = _choose(length, derive_seed("permutation", length, seed, epoch))

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the samples at these positions.

        Args:
            positions: int64, of any shape, each in `[0, length)`.

        Returns:
            int64 of the same shape.
        """
        return self._at(positions.reshape(-1)).view(positions.shape)


def _choose(length: int, key: int) -> Callable[[Tensor], Tensor]:
    return _sorted_order(length, key) if length <= DIRECT_LIMIT else _Network(length, key)


def _sorted_order(length: int, key: int) -> Callable[[Tensor], Tensor]:
    words = _keyed_words(length, derive_seed(key, "words"))
    high = _hash(words, derive_seed(key, "high"))
    low = _hash(words, derive_seed(key, "low"))
    order = torch.sort((high << 31) | (low >> 1), stable=True).indices
    return lambda positions: order.index_select(0, positions)


class _Network:
    """The Feistel network of the module's description, with cycle walking."""

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self.low_bits = (length - 1).bit_length() // 2
        self.low_size = 1 << self.low_bits
        self.high_size = -(-length // self.low_size)
        words = _keyed_words(max(self.low_size, self.high_size), derive_seed(key, "words"))
        self.rounds = [self._round_pair(words, key, pair) for pair in range(_ROUND_PAIRS)]

    def _round_pair(self, words: Tensor, key: int, pair: int) -> tuple[Tensor, Tensor]:
        # Before pair p the sums have grown to less than p + 1 times their range.
        low, high = self.low_size, self.high_size
        to_high = _table(words[:low], high, derive_seed(key, "to high", pair), copies=pair + 1)
        to_low = _table(words[:high], low, derive_seed(key, "to low", pair), copies=pair + 2)
        return to_high, to_low

    def __call__(self, positions: Tensor) -> Tensor:
        images = self._apply(positions)
        outside = (images >= self.length).nonzero().squeeze(1)
        while outside.numel():
            again = self._apply(images.index_select(0, outside))
            images[outside] = again
            outside = outside[again >= self.length]
        return images

    def _apply(self, positions: Tensor) -> Tensor:
        low = (positions & (self.low_size - 1)).to(torch.int32)
        high = (positions >> self.low_bits).to(torch.int32)
        for to_high, to_low in self.rounds:
            high += to_high.index_select(0, low)
            low += to_low.index_select(0, high)
        high = high.remainder_(self.high_size).to(torch.int64)
        return (high << self.low_bits) | (low & (self.low_size - 1))


def _table(words: Tensor, size: int, key: int, *, copies: int) -> Tensor:
    """Make a number in `[0, size)` of each word, several times over.

    Scaling a 32-bit hash to the range biases it by less than `size / 2**32`.
    """
    table = torch.empty(copies, len(words), dtype=torch.int32)
    for first in range(0, len(words), BLOCK):
        block = slice(first, first + BLOCK)
        table[0, block] = _hash(words[block], key).mul_(size).bitwise_right_shift_(32)
    table[1:] = table[0]
    return table.view(-1)


def _keyed_words(count: int, key: int) -> Tensor:
    """Make different 32-bit words, held in int64, of the numbers from 0 on."""
    words = torch.arange(count, dtype=torch.int64).bitwise_xor_(key & _MASK32)
    for first in range(0, count, BLOCK):
        _mix(words[first : first + BLOCK])
    return words


def _hash(words: Tensor, key: int) -> Tensor:
    """Hash keyed words to 32 bits, held in int64."""
    return _mix((words + (key & _MASK32)).bitwise_and_(_MASK32))


def _mix(words: Tensor) -> Tensor:
    """Apply the finaliser in place."""
    # The second factor is 0x846CA68B less 2**32: the same modulo 2**32, and with it the
    # product of a 32-bit word stays inside int64.
    words.bitwise_xor_(words >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    words.bitwise_xor_(words >> 15).mul_(0x846CA68B - 2**32).bitwise_and_(_MASK32)
    return words.bitwise_xor_(words >> 16)
