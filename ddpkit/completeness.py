"""Has every parameter got its averaged gradient, on every rank?

torch finds out at the *next* forward that a backward has left parameters out, and a rank that left
out more than another keeps that one waiting in a collective. Here every rank looks at the end of
each averaging backward. A rank that lacks something says so through the side channel, then takes
part in the collectives that the others may be waiting in, with NaN for values. The others find the
NaN, look into the channel, and all ranks raise the same error together, with the group intact.
Where values cannot be looked at for free (on accelerators), the rank raises alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.agree import exchange
from ddpkit.errors import GroupError
from ddpkit.group import get_channel, get_rank
from ddpkit.wording import name_ranks, shortened

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+:([ \d]*)(\.*)")
_NAMES = re.compile(r"Parameters which did not receive grad for rank \d+: (.*)")
_BUCKETINGS = 2  # torch orders its buckets anew once, after the first averaging backward


class CompletenessCheck:
    """Looks after each averaging backward whether all parameters took part, on all ranks.

    Args:
        wrapper: The wrapper, whose reducer is asked.
        parameters: The parameters that are averaged, by name, in the order of the model.
        number: What tells this model from others, the same on all ranks; None where only a part of
            the ranks shares the model.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        parameters: dict[str, nn.Parameter],
        number: int | None,
    ) -> None:
        # Not all releases have them; without them torch's own error comes at the next forward.
        needed = ("_check_reducer_finalized", "_reset_state")
        self._can_look = all(hasattr(wrapper.reducer, name) for name in needed)
        self._reducer: Any = wrapper.reducer
        self._comm_hooks = wrapper._comm_hooks  # noqa: SLF001  # with their states
        self._module = wrapper.module
        self._parameters = parameters
        self._number = number
        self._together = number is not None and _can_be_looked_at(wrapper.module)
        self._count = 0
        self._bucketings = 0
        self._probe: nn.Parameter | None = None

    def run(self) -> None:
        """Raise if a parameter was left out. Called at the end of a backward that averages.

        Raises:
            GroupError: Parameters were left out, on this rank or on another; they are named.
        """
        if not self._can_look:
            return
        self._count += 1
        left_out = self._left_out()
        if not self._together:
            if left_out:
                self._reducer._reset_state()  # noqa: SLF001
                raise GroupError(left_out_message({get_rank(): self._described(left_out)}))
        elif left_out or self._another_rank_failed():
            self._fail_together(left_out)

    def _left_out(self) -> list[str]:
        """Name what has no averaged gradient on this rank."""
        try:
            self._reducer._check_reducer_finalized()  # noqa: SLF001
        except RuntimeError as error:
            names = left_out_names(str(error), list(self._parameters))
            if not names:
                raise
            return names
        return []

    def _described(self, names: list[str]) -> list[str]:
        """Say why these have no gradient, where that can be seen."""
        current = dict(self._module.named_parameters(remove_duplicate=False))
        reasons = []
        for name in names:
            is_same = current.get(name) is self._parameters[name]
            frozen = "" if self._parameters[name].requires_grad else " (frozen after ddp())"
            reasons.append(f"{name}{frozen if is_same else ' (replaced after ddp())'}")
        return reasons

    # A failure that all ranks see.

    @property
    def _key(self) -> str:
        return f"left-out/{self._number}/{self._count}"

    def _another_rank_failed(self) -> bool:
        return self._probe_is_nan() and get_channel().fetch(self._key) is not None

    def _probe_is_nan(self) -> bool:
        """Look at one averaged number of the bucket that is reduced last."""
        if self._bucketings < _BUCKETINGS:
            self._bucketings += 1
            buckets = self._reducer._get_zeros_like_grad_buckets()  # noqa: SLF001
            last = buckets[-1].parameters() if buckets else []
            self._probe = next((item for item in last if item.numel()), None)
        gradient = None if self._probe is None else self._probe.grad
        if gradient is None:
            return False
        value = gradient[(0,) * gradient.dim()].item()
        return bool(value != value)

    def _fail_together(self, left_out: list[str]) -> None:
        if left_out:
            get_channel().publish(self._key, b"")
            self._release_others(left_out)
        everyones = exchange(self._described(left_out), name="ddp")
        self._reducer._reset_state()  # noqa: SLF001
        self._bucketings = 0
        self._forget_nan()
        raise GroupError(left_out_message(dict(enumerate(everyones))))

    def _release_others(self, left_out: list[str]) -> None:
        """Run the collectives of the buckets that this rank has not come to."""
        missing = {id(self._parameters[name]) for name in left_out}
        buckets = self._reducer._get_zeros_like_grad_buckets()  # noqa: SLF001
        incomplete = [any(id(item) in missing for item in b.parameters()) for b in buckets]
        works = []
        # In their order, of which the first incomplete one holds up the rest.
        for bucket in buckets[incomplete.index(True) :]:
            bucket.buffer().fill_(torch.nan)
            works.append(self._reducer._run_comm_hook(bucket))  # noqa: SLF001
        for work in works:
            work.wait()

    def _forget_nan(self) -> None:
        """Drop what torch's PowerSGD has kept of the values that have released the others."""
        for _, state in self._comm_hooks:
            for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(state, name, {}).clear()


def _can_be_looked_at(model: nn.Module) -> bool:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    is_sparse = any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for module in model.modules()
    )
    return on_cpu and not is_sparse


def left_out_names(text: str, names: Sequence[str]) -> list[str]:
    """Read from torch's error which parameters a backward has left out.

    Args:
        text: The message of the reducer, which knows it exactly; nothing else tells.
        names: Names of the averaged parameters.

    Returns:
        Names; none if the message is another one.
    """
    found = _INDICES.search(text)
    if found is None:
        return []
    left_out = {names[int(index)] for index in found.group(1).split()}
    if found.group(2):  # The indices end after about a hundred, the names do not.
        line = _NAMES.search(text)
        told = set(line.group(1).split(", ") if line else ())
        # torch joins the module's name and the parameter's, also where the former is empty.
        left_out.update(name for name in names if (name if "." in name else f".{name}") in told)
    return [name for name in names if name in left_out]


def left_out_message(left_out: Mapping[int, Sequence[str]]) -> str:
    """Say which ranks have left out which parameters.

    Args:
        left_out: Names by rank, of those ranks that are known; empty for a rank that used all.

    Returns:
        The text of the error, the same for the same findings.
    """
    by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in left_out.items():
        by_names.setdefault(tuple(names), []).append(rank)
    everywhere = len(by_names) == 1 and len(left_out) > 1
    lines = [
        f"  {'all ranks' if everywhere else name_ranks(ranks)}: {shortened(names) or 'none'}"
        for names, ranks in by_names.items()
    ]
    return "\n".join(
        [
            "A backward has not reached all parameters of the model that ddp() wrapped, so their "
            "gradients were not averaged. Left out on",
            *lines,
            "Let every step use them in its loss on every rank. If steps may leave parameters out, "
            "pass ddp(model, find_unused_parameters=True). What is not trained at all needs "
            "requires_grad=False before ddp().",
        ]
    )
