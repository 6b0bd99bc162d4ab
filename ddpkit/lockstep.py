"""Do all ranks go through the same epoch, and do all of them have one more batch?

`PassCheck` compares passes through the side channel without waiting for anybody.
`while_all_have_one` ends the passes of ranks that have different amounts of data together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ddpkit.control import Channel
from ddpkit.errors import GroupError
from ddpkit.group import communication_device, get_channel, get_rank, get_world_size, group_is_open
from ddpkit.serialize import dump_value, load_value

__all__ = ["PassCheck", "PassFacts", "while_all_have_one"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassFacts:
    """What a rank says of the pass that it is in; all ranks must say the same."""

    number: int
    """How many passes the loader has made before."""
    epoch: int
    consumed: int
    first_item: str | None
    """A digest of the first item of an iterable dataset, where it can be compared."""
    steps_before: int = 0
    """How many batches those passes received in all."""


class PassCheck:
    """Compares what the ranks say of their passes through one loader.

    Each rank looks at the rank before it, in a circle: if they are not all alike, at least two see
    it, and the cost does not grow with the number of ranks. A rank that has not come that far yet
    is asked again later, ever more rarely.

    Args:
        channel: The side channel of the group that the loader was made in.
        equal_steps: Whether all ranks get the same number of batches.
    """

    def __init__(self, channel: Channel, *, equal_steps: bool) -> None:
        # The number of agreements so far is the same on all ranks and for no two loaders.
        self._loader = channel.calls
        self._group = channel.label
        self._equal_steps = equal_steps
        self._facts: PassFacts | None = None
        self._steps_before = 0
        self._steps = 0
        self._next_look = 0

    def publish(self, facts: PassFacts) -> None:
        """Say what pass this rank is in, when it has its first batch."""
        facts = replace(facts, steps_before=self._steps_before + self._steps)
        self._steps_before = facts.steps_before
        self._steps, self._next_look = 1, 2
        self._facts = facts
        if (channel := self._channel()) is not None:
            channel.publish(self._key(get_rank()), dump_value(facts))

    def look(self) -> None:
        """Compare, with each further batch.

        Raises:
            GroupError: The rank before this one is in another epoch or place, or iterates over
                other items.
        """
        self._steps += 1
        if self._facts is None or self._steps < self._next_look:
            return
        self._next_look = 2 * self._steps - 1
        other = (get_rank() - 1) % get_world_size()
        channel = self._channel()
        payload = None if channel is None else channel.fetch(self._key(other), lasting=True)
        if payload is None:
            return
        theirs: PassFacts = load_value(payload)
        if theirs.number == self._facts.number:
            mine, self._facts = self._facts, None
            _compare(mine, theirs, other)
        elif theirs.number > self._facts.number and self._equal_steps:
            _compare_steps(self._steps_before + self._steps, theirs, other)

    def _channel(self) -> Channel | None:
        """Return the channel, None where the loader has outlived its group."""
        channel = get_channel() if group_is_open() else None
        return channel if channel is not None and channel.label == self._group else None

    def _key(self, rank: int) -> str:
        return f"loader/{self._loader}/{rank}"


def _compare_steps(steps: int, theirs: PassFacts, other: int) -> None:
    """Compare with a rank that has begun a later pass, before which it had no fewer batches."""
    if theirs.steps_before < steps:
        raise GroupError(
            f"[rank {get_rank()}/{get_world_size()}] this loader has given {steps} batches here, "
            f"but rank {other} has begun pass {theirs.number + 1} through it (epoch "
            f"{theirs.epoch}) after {theirs.steps_before}, so the ranks are in different epochs. "
            "All ranks must end their passes together. To look at a batch on one rank use "
            "loader.peek(), which begins no pass."
        )


def _compare(mine: PassFacts, theirs: PassFacts, other: int) -> None:
    here = f"[rank {get_rank()}/{get_world_size()}]"
    if (mine.epoch, mine.consumed) != (theirs.epoch, theirs.consumed):
        raise GroupError(
            f"{here} this loader is in epoch {mine.epoch} and began it after {mine.consumed} "
            f"samples, but on rank {other} it is in epoch {theirs.epoch} and began after "
            f"{theirs.consumed}. All ranks must call set_epoch() and load_state_dict() with the "
            "same values, and end their passes together."
        )
    if None not in (mine.first_item, theirs.first_item) and mine.first_item != theirs.first_item:
        raise GroupError(
            f"{here} the iterable dataset began with another item than on rank {other}, so its "
            "items cannot be shared out by their positions. If it splits itself between ranks, "
            "pass shard=False. If it shuffles, let it do so by torch's, numpy's or random's global "
            "stream, which is the same on all ranks there, or by a seed of its own and the epoch."
        )


def while_all_have_one(items: Iterator[T]) -> Iterator[T]:
    """Yield items as long as every rank has one.

    Collective: every rank must iterate. Whether all have the item after the next is agreed by an
    all-reduce that runs while the next is used.

    Args:
        items: What this rank has.

    Yields:
        As many items on every rank as the rank with the fewest has.
    """
    ahead = next(items, None)
    vote = _Vote(ahead is not None)
    while vote.is_unanimous():
        current, ahead = ahead, next(items, None)
        vote = _Vote(ahead is not None)
        assert current is not None
        yield current
    if ahead is not None:
        _logger.info("rank %d had more data when the first rank had no more", get_rank())


class _Vote:
    """An all-reduce under way: does every rank have one more?"""

    def __init__(self, has_one: bool) -> None:
        self._flag = torch.tensor([int(has_one)], dtype=torch.int32, device=communication_device())
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MIN, async_op=True)

    def is_unanimous(self) -> bool:
        if self._work is not None:
            self._work.wait()
        return bool(self._flag.item())
