"""Gradients of several micro-batches in one step, and losses of unequal numbers of samples.

`sync_gradients()` is the primitive: whether the gradients of a forward and backward are averaged.
`accumulate()` applies it to windows of batches. `loss_weight()` makes the average that DDP takes,
which is one over ranks, a mean over samples.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_world_size, is_rank0, require_group
from ddpkit.reduce import reduce_sum
from ddpkit.windows import Window
from ddpkit.wording import name_ranks

T = TypeVar("T")
Models = nn.Module | Iterable[nn.Module]


# ---------------------------------------------------------------------------------- public calls


@contextlib.contextmanager
def sync_gradients(model: Models, when: object = True) -> Iterator[None]:
    """Average the gradients of this forward and backward over the ranks only if `when` is true.

    Both must be inside: whether gradients are averaged is settled by the forward. Averaging comes
    with what was accumulated before. Does not communicate by itself, but every rank must pass the
    same `when`. In a world of one nothing happens. Inside of another block that does not
    synchronise, nothing is synchronised.

    Args:
        model: What `ddp()` returned, also compiled, or a module with such parts; or several.
        when: Anything that has a truth value.

    Raises:
        ConfigError: There are several ranks, and no part of a model with trainable parameters is
            wrapped: nothing would ever be averaged.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> for number in range(4):
        ...     with sync_gradients(model, when=number == 3):
        ...         model(torch.ones(2, 4)).sum().backward()
    """
    with _synchronising(_wrapped_parts(model, "sync_gradients"), when=when):
        yield


class MicroBatch:
    """One batch of a window. Inside `with micro:` gradients are averaged only if it is the last.

    Attributes:
        index: Its number in the window, from 0.
        window: How many batches the window has; the last one of an epoch may be shorter.
        weight: What to multiply its loss with. Without `count=`, where losses are means:
            1 / window. With it, where losses are sums: the number of ranks / what all ranks have
            counted in the window.
    """

    def __init__(self, wrapped: Sequence[Any], index: int, window: int, weight: float) -> None:
        self.index = index
        self.window = window
        self.weight = weight
        self.was_entered: bool = False
        self._wrapped = wrapped
        self._block = contextlib.ExitStack()

    @property
    def is_last(self) -> bool:
        """Whether the window ends with it: the time to step."""
        return self.index == self.window - 1

    def __enter__(self) -> MicroBatch:
        self.was_entered = True
        self._block.enter_context(_synchronising(self._wrapped, when=self.is_last))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.close()

    def __repr__(self) -> str:
        return f"MicroBatch(index={self.index}, window={self.window}, weight={self.weight:g})"


def accumulate(
    model: Models,
    batches: Iterable[T],
    *,
    every: int,
    count: Callable[[T], float] | None = None,
) -> Iterator[tuple[T, MicroBatch]]:
    """Go through batches in windows, whose gradients are averaged over the ranks once.

    Collective: every rank must call this, with as many batches; the ranks compare `every`, and the
    number of batches where it is known. In a world of one it makes the same windows.

    The last window of an epoch may be shorter, and is averaged too. For a list, and for a
    `sharded_loader` that knows what is left of its epoch, batches are taken one by one. Otherwise,
    or with `count`, a window is read before its first batch is used. Either way the state of a
    loader, also one inside of `tqdm` or `zip`, counts the batches of complete windows only, so that
    a resumed run repeats an incomplete one.

    Args:
        model: What `ddp()` returned, also compiled, or a module with such parts; or several.
        batches: Any iterable.
        every: How many batches make a window.
        count: Tells how much a batch counts (its samples, its tokens that are no padding), where
            batches differ. Every window then costs one small collective.

    Yields:
        The batch, and its `MicroBatch`: do forward and backward inside `with micro:`, multiply the
        loss with `micro.weight`, and step if `micro.is_last`.

    Raises:
        ConfigError: `every` is no positive number, or with several ranks nothing is wrapped.
        GroupError: The ranks have different `every` or numbers of batches. Or `batches` has ended
            before its length.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [torch.ones(2, 4)] * 7
        >>> for x, micro in accumulate(model, batches, every=3):
        ...     with micro:
        ...         loss = model(x).square().mean() * micro.weight
        ...         loss.backward()
        ...     if micro.is_last:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> micro
        MicroBatch(index=0, window=1, weight=1)

        Where batches hold different numbers of tokens, the loss is a sum, and the gradient is that
        of the mean over all tokens of the window, on all ranks:

        >>> for x, micro in accumulate(model, batches, every=3, count=len):
        ...     with micro:
        ...         (model(x).square().sum() * micro.weight).backward()
    """
    _check_every(every)
    return _run(_Windows(batches, every, count), _wrapped_parts(model, "accumulate"))


def loss_weight(count: float | torch.Tensor) -> float:
    """Return what to multiply a sum of losses with for the gradient of the mean over all ranks.

    DDP averages gradients over ranks. With equal shares that is the mean over samples; with
    unequal ones (the last batch of an epoch, texts of different length) it is a mean of means.
    For the loss `sum * loss_weight(count)`, DDP's average is exactly the gradient of
    (sum of all ranks) / (count of all ranks). The weight is the number of ranks divided by the
    latter. For several batches in a step see `accumulate(count=...)`.

    Collective: every rank must call this. In a world of one it is 1 / count.

    Args:
        count: How many samples (tokens, pixels) this rank's sum has; 0 for a rank with nothing.

    Returns:
        The same number on all ranks; 0 if all counts are 0.

    Raises:
        ConfigError: The count is negative or not finite.
        GroupError: No group is open though several ranks were started.

    Example:
        >>> losses = torch.ones(8, requires_grad=True) * 3
        >>> loss = losses.sum() * loss_weight(len(losses))
        >>> loss.item()
        3.0
    """
    return _weight(reduce_sum(_checked_count(count, "loss_weight")))


def _weight(total: float) -> float:
    return get_world_size() / total if total else 0.0


def _check_every(every: object) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r} was given to accumulate(); expected an int from 1 on.")


# --------------------------------------------------------------------------------- what is wrapped


def _wrapped_parts(models: Models, caller: str) -> list[Any]:
    """Find the outermost parts that average gradients: torch's DDP, and what looks like it."""
    roots = [models] if isinstance(models, nn.Module) else list(models)
    for root in roots:
        _check_is_module(root, caller)
    found = [part for root in roots for part in _parts_below(root)]
    is_trained = any(parameter.requires_grad for root in roots for parameter in root.parameters())
    if not found and is_trained and require_group(caller):
        raise ConfigError(
            f"{caller}() was given a model that nothing averages the gradients of. Pass what ddp() "
            "returned, and not unwrap(model)."
        )
    return found


def _check_is_module(root: object, caller: str) -> None:
    if not isinstance(root, nn.Module):
        raise ConfigError(
            f"{caller}() was given a {type(root).__qualname__}; expected a model or several."
        )


def _parts_below(module: nn.Module) -> Iterator[Any]:
    if callable(getattr(type(module), "no_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _parts_below(child)


@contextlib.contextmanager
def _synchronising(wrapped: Sequence[Any], *, when: object) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not when:
            for part in wrapped:
                stack.enter_context(part.no_sync())
        yield


# ------------------------------------------------------------------------------------- the windows


class _Windows(Generic[T]):
    """Takes windows of batches out of an iterable.

    Args:
        batches: The batches.
        every: How many make a window.
        count: How much a batch counts.
    """

    def __init__(
        self, batches: Iterable[T], every: int, count: Callable[[T], float] | None
    ) -> None:
        self.every = every
        self.count = count
        self.left = _known_length(batches)
        self.window = Window()
        self._batches = batches
        self._iterator: Iterator[T] | None = None

    def next_window(self) -> tuple[int, float, Iterator[T]]:
        """Return the size of the next window, the weight of its losses, and its batches."""
        if self.left is not None and self.count is None:
            size = min(self.every, self.left)
            self.left -= size
            return size, 1 / max(1, size), self._one_by_one(size)
        batches = list(self._taken(self.every))
        weight = self._weight_of(batches)
        return len(batches), weight, iter(batches)

    def _one_by_one(self, size: int) -> Iterator[T]:
        taken = 0
        for batch in self._taken(size):
            taken += 1
            yield batch
        if taken < size:
            raise GroupError(
                f"The batches have ended {size - taken} before the length that they told, so the "
                "gradients of the last window were not averaged. Correct the length, or pass an "
                "iterator, which is read ahead."
            )

    def _taken(self, size: int) -> Iterator[T]:
        with self.window.reading():
            if self._iterator is None:
                self._iterator = iter(self._batches)
        end = object()
        for _ in range(size):
            with self.window.reading():
                batch = next(self._iterator, end)
            if batch is end:
                return
            yield batch  # type: ignore[misc]  # the sentinel has been sorted out

    def _weight_of(self, batches: Sequence[T]) -> float:
        if self.count is None:
            return 1 / max(1, len(batches))
        counts = [_checked_count(self.count(batch), "count") for batch in batches]
        total, ended = reduce_sum((math.fsum(counts), int(not batches)))
        if 0 < ended < get_world_size():
            raise GroupError(
                f"accumulate(): {ended} of {get_world_size()} ranks have no more batches, the "
                "others have. All ranks need as many; a sharded_loader with "
                'uneven="pad" or "drop" sees to that.'
            )
        return _weight(total)


def _known_length(batches: Iterable[Any]) -> int | None:
    """Return how many batches there are, if that is certain."""
    if isinstance(batches, Sequence):
        return len(batches)
    steps_left = getattr(batches, "steps_left", None)
    return steps_left() if callable(steps_left) else None


def _checked_count(count: Any, name: str) -> float:
    number = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count
    if not isinstance(number, numbers.Real) or not math.isfinite(number) or number < 0:
        raise ConfigError(
            f"{name} of a batch is {count!r}; expected a finite number of at least 0, such as how "
            "many samples a sum of losses has."
        )
    return float(number)


def _run(windows: _Windows[T], wrapped: list[Any]) -> Iterator[tuple[T, MicroBatch]]:
    _compare_ranks(windows, wrapped)
    were_entered = not wrapped
    try:
        while True:
            size, weight, batches = windows.next_window()
            if not size:
                return
            for index, batch in enumerate(batches):
                micro = MicroBatch(wrapped, index, size, weight)
                if micro.is_last:
                    windows.window.complete()
                yield batch, micro
                were_entered = were_entered or micro.was_entered
            if size > 1 and not were_entered:
                _warn_of_unused_blocks()
                were_entered = True
    finally:
        windows.window.complete()


def _compare_ranks(windows: _Windows[Any], wrapped: list[Any]) -> None:
    """See to it that the ranks average at the same batches, where all of them take part."""
    world = get_world_size()
    if not wrapped or any(_size_of_group(part) != world for part in wrapped):
        return
    facts = exchange((windows.every, windows.left, windows.count is None), name="accumulate")
    for position, name in enumerate(("every", "number of batches", "count is None")):
        values = [fact[position] for fact in facts]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise GroupError(
                f"accumulate(): {name} is {values[0]} on rank 0, but {values[others[0]]} on "
                f"{name_ranks(others)}. Every rank must make the same windows; a sharded_loader "
                'with uneven="pad" or "drop" has as many batches on all of them.'
            )


def _size_of_group(part: Any) -> int:
    group = getattr(part, "process_group", None)
    return dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else 1


def _warn_of_unused_blocks() -> None:
    if is_rank0():
        warnings.warn(
            "accumulate() yields micro-batches, but none was entered, so each of them is "
            "synchronised. Do forward and backward inside `with micro:`.",
            stacklevel=3,
        )
