"""What a step costs within one pair of ranks: ddp()'s additions, and synchronising too often.

All ways take turns in the same two ranks, with a model each; the ranks are started several times.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from estimates import Starts
from step_training import RANKS, WORKLOADS, Batch, Library, Training, prepare, seconds_per_step
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddpkit import accumulate, ddp, distributed, get_rank

EVERY = 4
"""Micro-batches of a window."""
PLAIN, OWN, OWN_ALONE = "DDP, no buffers", "ddp()", "ddp(), no buffers"
EACH, BY_HAND, ACCUMULATED = "every micro-batch", "no_sync() by hand", "accumulate()"

Blocks = dict[str, Callable[[int], object]]
"""What trains so many steps, by the name of the way."""


# -------------------------------------------------------------------------------- the cost of ddp()


def wrap_plain(model: nn.Module) -> Any:
    """Wrap with the options that ddp() chooses, and leave the buffers to each rank."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    PLAIN: wrap_plain,
    "DDP, default options": DistributedDataParallel,
    OWN: ddp,
    OWN_ALONE: lambda model: ddp(model, forward_sync_buffers=False),
}


def wrapped_in_each_way(workload: str) -> Blocks:
    """Make the same model once for each way to wrap it."""
    return {name: make_training(workload, wrap).train for name, wrap in WRAPPERS.items()}


def make_training(workload: str, wrap: Callable[[nn.Module], Any]) -> Training:
    """Wrap a model and make what it is trained with."""
    library = Library(lambda model, optimizer: (wrap(model), optimizer))
    return prepare(workload, library, get_rank())


# ----------------------------------------------------------------------- synchronising more or less


def accumulated_in_each_way(workload: str) -> Blocks:
    """Make the same model once for each way to train windows of several micro-batches."""
    ways = {EACH: synchronise_each, BY_HAND: synchronise_last, ACCUMULATED: use_accumulate}
    return {name: _with(train, make_training(workload, ddp)) for name, train in ways.items()}


def _with(
    train: Callable[[Training, Iterator[Batch]], None], training: Training
) -> Callable[[int], None]:
    def train_windows(windows: int) -> None:
        train(training, itertools.islice(itertools.cycle(training.batches), EVERY * windows))

    return train_windows


def synchronise_each(training: Training, batches: Iterator[Batch]) -> None:
    """Let every backward average the gradients."""
    for number, (inputs, expected) in enumerate(batches, 1):
        loss = F.cross_entropy(training.model(inputs), expected) / EVERY
        loss.backward()
        if number % EVERY == 0:
            take_step(training)


def synchronise_last(training: Training, batches: Iterator[Batch]) -> None:
    """Use no_sync() for all but the last micro-batch of a window."""
    for number, (inputs, expected) in enumerate(batches, 1):
        is_last = number % EVERY == 0
        with contextlib.nullcontext() if is_last else training.model.no_sync():
            loss = F.cross_entropy(training.model(inputs), expected) / EVERY
            loss.backward()
        if is_last:
            take_step(training)


def use_accumulate(training: Training, batches: Iterator[Batch]) -> None:
    """Use ddpkit's."""
    for (inputs, expected), micro in accumulate(training.model, batches, every=EVERY):
        with micro:
            loss = F.cross_entropy(training.model(inputs), expected) / micro.window
            loss.backward()
        if micro.is_last:
            take_step(training)


def take_step(training: Training) -> None:
    """End a window."""
    training.optimizer.step()
    training.optimizer.zero_grad()


# ------------------------------------------------------------------------------------ the measuring

KINDS: dict[str, Callable[[str], Blocks]] = {
    "wrap": wrapped_in_each_way,
    "accumulate": accumulated_in_each_way,
}


def measure(kind: str, workload: str, starts: int, rounds: int) -> dict[str, Starts]:
    """Start ranks several times, and have all ways take turns in each."""
    steps = WORKLOADS[workload].steps // (EVERY if kind == "accumulate" else 1)
    taken = [measure_once(kind, workload, steps, rounds, seed) for seed in range(starts)]
    return {name: [one[name] for one in taken] for name in taken[0]}


@distributed(nproc_per_node=RANKS, device="cpu")
def measure_once(
    kind: str, workload: str, steps: int, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Take turns; rank 0's times count, and a first round does not."""
    warnings.simplefilter("ignore")  # what torch says of its own functions
    blocks = KINDS[kind](workload)
    draw = random.Random(seed)  # the same order on both ranks
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds + 1):
        for name in draw.sample(list(blocks), k=len(blocks)):
            samples[name].append(seconds_per_step(blocks[name], steps))
    return {name: seconds[1:] for name, seconds in samples.items()}
