"""Loaders for one rank of several, ddpkit's and others, and what is measured of them.

This file also is the program that a contestant runs in, one process for each:

    loader_contestants.py NAME

It imports what the contestant needs, and then answers each line of JSON with one of its own. Every
measurement has a fork of that process to itself, in which nothing large was ever allocated; only
the imports are not repeated. No process group is needed: each library is told rank and ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

RANK = 0
BOUND = 60
"""Seconds after which a measurement is killed."""
FEATURES = 16


class Setting(NamedTuple):
    """The loader that is asked for."""

    length: int
    ranks: int
    batch_size: int
    workers: int = 0
    dataset: str = "numbers"
    """"numbers" or "tensors"."""


ENOUGH = 2_000_000
"""Samples that the indices of several short epochs are timed for together."""
WARM_UP = Setting(length=20_000, ranks=2, batch_size=64)


# ----------------------------------------------------------------------------------- the datasets


class Numbers:
    """A dataset of any length that holds nothing: each sample is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def make_dataset(setting: Setting) -> Any:
    """Make what the loader reads."""
    if setting.dataset == "numbers":
        return Numbers(setting.length)
    import torch
    from torch.utils.data import TensorDataset

    features = torch.zeros(setting.length, FEATURES)
    return TensorDataset(features, torch.arange(setting.length))


def make_plain(setting: Setting) -> Any:
    """Make the loader for one device that some libraries turn into one for a rank."""
    from torch.utils.data import DataLoader

    return DataLoader(
        make_dataset(setting), setting.batch_size, shuffle=True, num_workers=setting.workers
    )


# ------------------------------------------------------------------------------------ the loaders


def build_ddpkit(setting: Setting) -> Any:
    """Make ddpkit's."""
    from ddpkit import sharded_loader

    return sharded_loader(
        make_dataset(setting),
        batch_size=setting.batch_size,
        shuffle=True,
        num_replicas=setting.ranks,
        rank=RANK,
        num_workers=setting.workers,
    )


def build_torch(setting: Setting) -> Any:
    """Make the one of torch's tutorials."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dataset = make_dataset(setting)
    sampler: Any = DistributedSampler(dataset, setting.ranks, RANK, shuffle=True)
    return DataLoader(dataset, setting.batch_size, sampler=sampler, num_workers=setting.workers)


def build_torchdata(setting: Setting) -> Any:
    """Make the one of torchdata that can save its place."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    dataset = make_dataset(setting)
    sampler = StatefulDistributedSampler(dataset, setting.ranks, RANK, shuffle=True)
    return StatefulDataLoader(
        dataset, setting.batch_size, sampler=sampler, num_workers=setting.workers
    )


def build_accelerate(setting: Setting) -> Any:
    """Make what `Accelerator.prepare` makes of a loader, with its default options."""
    import torch
    from accelerate.data_loader import prepare_data_loader

    torch.manual_seed(0)  # the order is drawn from it, and must be the same after a resume
    plain = make_plain(setting)
    return prepare_data_loader(
        plain, num_processes=setting.ranks, process_index=RANK, put_on_device=False
    )


def build_fabric(setting: Setting) -> Any:
    """Have Fabric set up a loader, with a strategy that only says that there are several ranks."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import SingleDeviceStrategy

    class OneOfSeveral(SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
        @property
        def distributed_sampler_kwargs(self) -> dict[str, int]:
            return {"num_replicas": setting.ranks, "rank": RANK}

    fabric = Fabric(accelerator="cpu", strategy=OneOfSeveral("cpu"))
    return fabric.setup_dataloaders(make_plain(setting), move_to_device=False)


# ----------------------------------------------------------------------------- going on in an epoch


def state_of(loader: Any, steps: int) -> Any:
    """Ask a loader that knows its place for it; to be called inside the loop."""
    del steps
    return loader.state_dict()


def go_on_from_state(loader: Any, state: Any) -> Any:
    """Go to a saved place."""
    loader.load_state_dict(state)
    return loader


def number_of(loader: Any, steps: int) -> int:
    """Save the number of batches, which is all that a loader without a state leaves to be saved."""
    del loader
    return steps


def skip_with_accelerate(loader: Any, steps: int) -> Any:
    """Make the loader that leaves out as many batches."""
    from accelerate import skip_first_batches

    return skip_first_batches(loader, steps)


@dataclass(frozen=True)
class Resume:
    """How a contestant saves its place inside an epoch, and goes on from it."""

    save: Callable[[Any, int], Any]
    """From the loader and the number of batches, inside the loop."""
    go_on: Callable[[Any, Any], Any]
    """From a new loader and what was saved, to the loader whose first batch is the next one."""


@dataclass(frozen=True)
class Way:
    """A contestant."""

    build: Callable[[Setting], Any]
    modules: tuple[str, ...] = ()
    """What it needs besides torch, imported before anything is measured."""
    resume: Resume | None = None

    def missing(self) -> str | None:
        """Name a module that is not installed here."""
        return next((name for name in self.modules if not _is_installed(name)), None)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


BY_STATE = Resume(state_of, go_on_from_state)
WAYS = {
    "ddpkit": Way(build_ddpkit, ("ddpkit.loader",), BY_STATE),
    "torch": Way(build_torch),
    "accelerate": Way(build_accelerate, ("accelerate",), Resume(number_of, skip_with_accelerate)),
    "fabric": Way(build_fabric, ("lightning_fabric",)),
    "torchdata": Way(build_torchdata, ("torchdata.stateful_dataloader",), BY_STATE),
}


# ------------------------------------------------------------------------------- the measurements


class Meter:
    """Takes the seconds of a block, and by how much memory has grown at its peak.

    Attributes:
        seconds: From the beginning of the block to its end.
        memory: Bytes of resident memory, at the peak, above what there was at the beginning.
    """

    def __enter__(self) -> Meter:
        give_memory_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        self._before = _peak_memory()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.memory = _peak_memory() - self._before

    def sample(self, count: int) -> dict[str, float]:
        """Return what was measured, for so many samples."""
        return {"seconds": self.seconds, "memory": self.memory, "count": count}


def give_memory_back() -> None:
    """Leave no free memory in the heap, where a small growth would go unseen."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a libc other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


def measure_first(way: Way, setting: Setting) -> dict[str, float]:
    """Begin an epoch, as far as the indices of the first batch."""
    loader = way.build(setting)
    with Meter() as meter:
        batch = next(iter(loader.batch_sampler))
    return meter.sample(len(batch))


def measure_indices(way: Way, setting: Setting) -> dict[str, float]:
    """Go through the indices of an epoch, without loading anything; of several if it is short."""
    loader = way.build(setting)
    epochs = max(1, ENOUGH // setting.length)
    count = 0
    with Meter() as meter:
        for epoch in range(epochs):
            _set_epoch(loader, epoch)
            for batch in loader.batch_sampler:
                count += len(batch)
    meter.seconds /= epochs
    _check_share(count // epochs, setting)
    return meter.sample(count // epochs)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Have the samplers that need to be told of an epoch shuffle anew."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def measure_epoch(way: Way, setting: Setting) -> dict[str, float]:
    """Load all batches of an epoch; workers are started for it."""
    loader = way.build(setting)
    count = 0
    with Meter() as meter:
        for batch in loader:
            count += len(batch if setting.dataset == "numbers" else batch[1])
    _check_share(count, setting)
    return meter.sample(count)


def _check_share(count: int, setting: Setting) -> None:
    share = setting.length // setting.ranks
    # Some complete the last batch of every rank.
    if not share <= count <= share + setting.batch_size:
        raise RuntimeError(f"{count} samples came instead of {share}")


def save_place(way: Way, setting: Setting, file: str) -> dict[str, float]:
    """Save the place in the middle of an epoch, and the batch that has to come next."""
    loader = way.build(setting)
    steps = len(loader) // 2
    assert way.resume is not None
    with Meter() as meter:
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        state = way.resume.save(loader, steps)
        expected = next(batches)
    Path(file).write_bytes(pickle.dumps((state, expected)))
    return meter.sample(steps * setting.batch_size)


def measure_resume(way: Way, setting: Setting, file: str) -> dict[str, float]:
    """Go on from the saved place, until the first batch is there."""
    state, expected = pickle.loads(Path(file).read_bytes())
    loader = way.build(setting)
    assert way.resume is not None
    with Meter() as meter:
        batch = next(iter(way.resume.go_on(loader, state)))
    if not batch.equal(expected):
        raise RuntimeError("the first batch after resuming is not the one that was next")
    return meter.sample(len(batch))


MEASUREMENTS: dict[str, Callable[..., dict[str, float]]] = {
    "first": measure_first,
    "indices": measure_indices,
    "epoch": measure_epoch,
    "save": save_place,
    "resume": measure_resume,
}


# ------------------------------------------------------------------------------------ the program


def serve(name: str) -> None:
    """Measure on request until there are no more requests."""
    replies = _keep_replies_apart()
    way = WAYS[name]
    _prepare(way)
    _send(replies, {"ready": True})
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _answer(way, line, replies)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            _send(replies, {"error": f"killed by {signal.Signals(-code).name}"})


def _keep_replies_apart() -> TextIO:
    """Give whatever libraries print to standard error, and keep standard output for replies."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _prepare(way: Way) -> None:
    import torch

    torch.set_num_threads(1)  # before the forks, which must not inherit a pool without its threads
    for module in ("torch.utils.data.distributed", *way.modules):
        importlib.import_module(module)


def _answer(way: Way, line: str, replies: TextIO) -> None:
    """Answer one request in a process that ends with it."""
    signal.alarm(BOUND)
    request = json.loads(line)
    reply: dict[str, Any]
    try:
        _warm_up(way)
        setting = Setting(*request["setting"])
        reply = MEASUREMENTS[request["measurement"]](way, setting, *request["arguments"])
    except Exception as error:  # noqa: BLE001 - all of them go to whoever has asked
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    _send(replies, reply)
    os._exit(0)


def _warm_up(way: Way) -> None:
    """Shuffle and load a little.

    A fork maps the libraries anew, so the first call would look as if it needed megabytes.
    """
    next(iter(way.build(WARM_UP)))


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
