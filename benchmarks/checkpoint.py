"""Measure saving and loading a checkpoint of two ranks: time, stall of the training, and memory.

All ways take turns in the same two ranks, over the same model. See README.md for what the columns
mean.

    python benchmarks/checkpoint.py --json checkpoint.json | tee checkpoint.txt
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import (
    Target,
    describe_machine,
    median,
    print_machine,
    print_table,
    print_targets,
    show_range,
    write_record,
)
from launch import show_ratio
from loader_contestants import give_memory_back
from torch import nn

from ddpkit import barrier_load, distributed, get_rank, rank0_save

ROUNDS = 5
LAYERS, WIDTH = 64, 2048
"""Of 16.8 MB each: together 1.07 GB."""
SAVE_TARGET, STALL_TARGET, LOAD_TARGET, MEMORY_TARGET = 0.9, 0.15, 3.0, 0.5

Samples = dict[str, list[dict[str, float]]]


# ---------------------------------------------------------------------------- what a rank measures


def make_model(layers: int) -> nn.Module:
    """Make a model that is nothing but big."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    return model


class MemoryWatch:
    """Looks at the memory of both ranks, each page that they share counted once."""

    def __init__(self, pids: list[int]) -> None:
        self._files = [Path(f"/proc/{pid}/smaps_rollup") for pid in pids]

    @contextlib.contextmanager
    def peak(self, into: dict[str, float]) -> Iterator[None]:
        """Write the growth at its peak, in bytes, while the block runs."""
        before, highest, over = self._now(), 0.0, threading.Event()

        def watch() -> None:
            nonlocal highest
            while not over.wait(0.01):
                highest = max(highest, self._now())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            highest = max(highest, self._now())
            over.set()
            thread.join()
            into["memory"] = highest - before

    def _now(self) -> float:
        texts = (file.read_text() for file in self._files)
        return float(sum(1024 * int(text.split("Pss:")[1].split()[0]) for text in texts))


@dataclass
class Bench:
    """The model of a rank, and where it is saved."""

    model: nn.Module
    folder: Path

    def torch_save(self) -> None:
        """Save by hand: rank 0 writes in place, the others wait."""
        if get_rank() == 0:
            with (self.folder / "torch.pt").open("wb") as file:
                torch.save({"model": self.model.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def ddpkit_save(self) -> None:
        """Save with rank0_save."""
        rank0_save({"model": self.model}, self.folder / "ddpkit.pt")

    def dcp_save(self) -> None:
        """Save with torch.distributed.checkpoint."""
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=str(self.folder / "dcp"))

    def ddpkit_background(self) -> Callable[[], object]:
        """Begin a save in the background."""
        return rank0_save(
            {"model": self.model}, self.folder / "background.pt", background=True
        ).wait

    def dcp_background(self) -> Callable[[], object]:
        """Begin one with torch.distributed.checkpoint."""
        state = {"model": self.model.state_dict()}
        future: Any = dcp.async_save(state, checkpoint_id=str(self.folder / "dcp-background"))
        return lambda: (future.result(), dist.barrier())

    def torch_load(self) -> None:
        """Load by hand on each rank."""
        state = torch.load(self.folder / "ddpkit.pt", map_location="cpu")
        self.model.load_state_dict(state["model"])

    def ddpkit_load(self) -> None:
        """Load with barrier_load."""
        barrier_load(self.folder / "ddpkit.pt", into={"model": self.model})

    def dcp_load(self) -> None:
        """Load with torch.distributed.checkpoint, which loads in place."""
        state = {"model": self.model.state_dict()}
        dcp.load(state, checkpoint_id=str(self.folder / "dcp"))
        self.model.load_state_dict(state["model"])


@distributed(nproc_per_node=2, device="cpu", timeout=600)
def measure(folder: Path, layers: int, rounds: int) -> Samples:
    """Take turns; the values of rank 0 count, which is the one that writes."""
    warnings.simplefilter("ignore")  # what torch says of its own functions
    torch.set_num_threads(1)
    bench = Bench(make_model(layers), folder)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    watch = MemoryWatch(pids)
    samples: Samples = {}
    for _ in range(rounds + 1):
        for name, action in blocking_ways(bench).items():
            samples.setdefault(name, []).append(measure_one(action, watch))
        for name, begin in background_ways(bench).items():
            samples.setdefault(name, []).append(measure_stall(begin))
    return {name: rows[1:] for name, rows in samples.items()}  # the first makes files and memory


def blocking_ways(bench: Bench) -> dict[str, Callable[[], None]]:
    """Name what returns when it is done."""
    return {
        "save: torch.save + fsync": bench.torch_save,
        "save: ddpkit": bench.ddpkit_save,
        "save: DCP": bench.dcp_save,
        "load: torch.load": bench.torch_load,
        "load: ddpkit": bench.ddpkit_load,
        "load: DCP": bench.dcp_load,
    }


def background_ways(bench: Bench) -> dict[str, Callable[[], Callable[[], object]]]:
    """Name what returns before."""
    return {
        "background: ddpkit": bench.ddpkit_background,
        "background: DCP": bench.dcp_background,
    }


def measure_one(action: Callable[[], None], watch: MemoryWatch) -> dict[str, float]:
    """Measure from the moment when both ranks are ready until this one has finished."""
    found: dict[str, float] = {}
    give_memory_back()  # what an earlier way has left in the heap would hide what this one needs
    dist.barrier()
    with watch.peak(found) if get_rank() == 0 else contextlib.nullcontext():
        began = time.perf_counter()
        action()
        found["seconds"] = time.perf_counter() - began
        dist.barrier()
    return found


def measure_stall(begin: Callable[[], Callable[[], object]]) -> dict[str, float]:
    """Measure how long the loop stands still, and how long the save goes on after that."""
    dist.barrier()
    began = time.perf_counter()
    wait = begin()
    stalled = time.perf_counter() - began
    wait()
    return {"seconds": stalled, "until_written": time.perf_counter() - began}


# ---------------------------------------------------------------------------------- what is printed


def median_of(samples: Samples, name: str, quantity: str = "seconds") -> float:
    """Compute a median over the rounds."""
    value = median([row[quantity] for row in samples[name]])
    assert value is not None
    return value


def print_kind(samples: Samples, kind: str, reference: str) -> None:
    """Print the ways of one kind, compared with one of them."""
    quantity, title = ("until_written", "until written") if kind == "background" else ("memory", "")
    rows = [
        [
            name.partition(": ")[2],
            f"{median_of(samples, name):.3f} s",
            show_range([row["seconds"] for row in found]),
            show_ratio(median_of(samples, reference) / median_of(samples, name)),
            show_quantity(median_of(samples, name, quantity), quantity),
        ]
        for name, found in samples.items()
        if name.startswith(kind)
    ]
    beside = f"vs {reference.partition(': ')[2]}"
    print_table(kind, ["way", "median", "range", beside, title or "memory"], rows)


def show_quantity(value: float, quantity: str) -> str:
    """Write seconds, or bytes."""
    return f"{value / 1e6:,.0f} MB" if quantity == "memory" else f"{value:.2f} s"


def judge(samples: Samples) -> list[Target]:
    """Compare with what the design promises."""
    by_hand = median_of(samples, "save: torch.save + fsync")
    speed = by_hand / median_of(samples, "save: ddpkit")
    stall = median_of(samples, "background: ddpkit") / by_hand
    load = median_of(samples, "load: torch.load") / median_of(samples, "load: ddpkit")
    memory = median_of(samples, "load: ddpkit", "memory") / median_of(
        samples, "load: torch.load", "memory"
    )
    return [
        Target(
            f"rank0_save is at least {SAVE_TARGET} times as fast as torch.save and fsync",
            show_ratio(speed),
            speed >= SAVE_TARGET,
        ),
        Target(
            f"a save in the background stalls for at most {STALL_TARGET:.0%} of that",
            f"{stall:.0%}",
            stall <= STALL_TARGET,
        ),
        Target(
            f"barrier_load is at least {LOAD_TARGET:.0f} times as fast as torch.load on each rank",
            show_ratio(load),
            load >= LOAD_TARGET,
        ),
        Target(
            f"and takes at most {MEMORY_TARGET:.0%} of its memory",
            f"{memory:.0%}",
            memory <= MEMORY_TARGET,
        ),
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="a small model, to try the script")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    args = parse_arguments()
    machine = describe_machine()
    layers = LAYERS // 16 if args.quick else LAYERS
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        samples = measure(Path(folder), layers, args.rounds)
    print_machine(machine)
    print(f"a state of {4e-9 * layers * WIDTH**2:.2f} GB, 2 ranks")
    print_kind(samples, "save", "save: torch.save + fsync")
    print_kind(samples, "background", "save: torch.save + fsync")
    print_kind(samples, "load", "load: torch.load")
    targets = judge(samples)
    print()
    print_targets(targets)
    record = {
        "benchmark": "checkpoint",
        "machine": machine,
        "rounds": args.rounds,
        "quick": args.quick,
        "samples": samples,
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
