"""Ratios and differences of things that took turns, and how far they can be trusted.

Two programs that do the same differ in speed by a percent or so, for as long as they live: memory
lies elsewhere. So whatever is compared is started several times, and takes turns several times in
between. A figure is the mean, over the starts, of the medians over the rounds; its interval holds
the middle 95 % of the figures that one gets by drawing starts, and rounds of each, again and again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DRAWS = 2000
NARROW = 0.02
"""A figure whose interval is not within this much of it decides nothing about a close target."""

Starts = list[list[float]]
"""What was measured in each round of each start."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that it is uncertain by."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """How far the interval goes from the value, at most."""
        return max(self.high - self.value, self.value - self.low)

    def is_at_least(self, least: float) -> bool | None:
        """Tell whether the figure reaches a target within its interval; None if that is wide."""
        if self.low >= least:
            return True
        if self.high < least:
            return False
        return True if self.width <= NARROW * self.value else None

    def __str__(self) -> str:
        return f"{self.value:.3f}x ({self.low:.3f} .. {self.high:.3f})"


def pair(combine: Callable[[float, float], float], first: Starts, second: Starts) -> Starts:
    """Combine what two measured in the same rounds."""
    return [
        [combine(one, other) for one, other in zip(*rounds, strict=True)]
        for rounds in zip(first, second, strict=True)
    ]


def estimate(starts: Starts) -> Estimate:
    """Find the figure and its interval."""
    draw = random.Random(0)  # the same interval for the same measurements
    drawn = sorted(figure_of(_draw_again(starts, draw)) for _ in range(DRAWS))
    edge = DRAWS // 40
    return Estimate(figure_of(starts), drawn[edge], drawn[-1 - edge])


def figure_of(starts: Starts) -> float:
    """Take the mean of the medians."""
    return statistics.fmean(statistics.median(rounds) for rounds in starts)


def _draw_again(starts: Starts, draw: random.Random) -> Starts:
    return [draw.choices(rounds, k=len(rounds)) for rounds in draw.choices(starts, k=len(starts))]


def times_faster(own: Starts, others: Starts) -> Estimate:
    """Say how many times faster one is than another."""
    return estimate(pair(lambda mine, theirs: theirs / mine, own, others))


def all_rounds(starts: Starts) -> Sequence[float]:
    """Join what was measured in all starts."""
    return [seconds for rounds in starts for seconds in rounds]
