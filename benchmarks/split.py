"""Measure how a model is split over devices: how even the plan is, what planning takes, and what a
split model's hooks add to a forward.

Plans are compared with the exact optimum and with those of accelerate. No devices are needed. See
README.md for what the columns mean.

    python benchmarks/split.py --json split.json | tee split.txt
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import (
    Target,
    describe_machine,
    median,
    print_machine,
    print_table,
    print_targets,
    show_time,
    tell,
    write_record,
)
from torch import nn

from ddpkit import plan_split, split_model_across_devices

ROUNDS = 5
DEVICES = (2, 3, 4, 8)
LISTS = 60
BLOCKS = (100, 1_000, 10_000)
LONGEST_FOR_ACCELERATE = 1_000
"""Its time grows with the square of the number of blocks."""
TIME_TARGET = 1.0
OPTIMUM_TARGET = 1.05
"""The heaviest device may have 5 % more than with cuts anywhere; that saves cuts inside modules."""
FORWARDS = 300
HOOKS_TARGET = 0.03
PLAIN = "plain"
WATCHED = "split, as on several devices"
PLENTY = 2**50
"""Bytes; so much that no device of accelerate's is ever full."""


# -------------------------------------------------------------------------------------- the models


class Layer(nn.Module):
    """A transformer layer of separate modules, so that a cut may fall anywhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = nn.functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        x = x + self.out(y)
        z: torch.Tensor = x + self.shrink(self.grow(self.norm2(x)).relu())
        return z


class Transformer(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.norm(self.layers(self.embed(words))))
        return x


def make_vision_model(name: str) -> nn.Module:
    """Make a model of torchvision.

    Raises:
        ImportError: It is not installed.
    """
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    return model


@dataclass(frozen=True)
class Kind:
    """A model, and the classes that users of accelerate would keep whole."""

    make: Callable[[], nn.Module]
    whole: list[str]


KINDS = {
    "ResNet-50": Kind(lambda: make_vision_model("resnet50"), ["Bottleneck"]),
    "ViT-B/16": Kind(lambda: make_vision_model("vit_b_16"), ["EncoderBlock"]),
    "transformer, 48 layers": Kind(lambda: Transformer(48, 1024, 50_000), ["Layer"]),
}


def make_list(sizes: Sequence[int]) -> nn.Module:
    """Make a model whose blocks have these sizes, in numbers of 4 bytes."""
    return nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))


def made_frozen(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model without values. Frozen tensors weigh their bytes, for ddpkit as for others."""
    with torch.device("meta"):
        return make().requires_grad_(False)


def random_sizes(generator: random.Random) -> list[int]:
    """Draw sizes that differ by up to a factor of a thousand."""
    count = generator.randint(5, 60)
    return [round(10 ** generator.uniform(0, 3)) for _ in range(count)]


# --------------------------------------------------------------------------------------- the plans


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names."""
    return itertools.chain(module.named_parameters(), module.named_buffers())


def leaf_sizes(model: nn.Module) -> list[int]:
    """Bytes of each module without children, with what those around it have themselves."""
    sizes, around = [], 0
    for module in model.modules():
        own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        around += sum(tensor.nbytes for tensor in own)
        if next(module.children(), None) is None:
            sizes.append(around)
            around = 0
    return sizes


def optimum(sizes: Sequence[int], devices: int) -> int:
    """Find the lightest heaviest device by dynamic programming, which shares no code with ddpkit.

    Args:
        sizes: Of consecutive blocks.
        devices: How many there are.
    """
    sums = [0, *itertools.accumulate(sizes)]
    best = list(sums)  # with one device, for each number of blocks
    for _ in range(devices - 1):
        best = [
            min(max(best[cut], sums[end] - sums[cut]) for cut in range(end + 1))
            for end in range(len(sums))
        ]
    return best[-1]


def plan_with_ddpkit(model: nn.Module, devices: int) -> tuple[int, bool]:
    """Plan, and return the heaviest device, and whether it is the optimum for the plan's blocks."""
    plan = plan_split(model, [f"cuda:{index}" for index in range(devices)])
    blocks = [block.bytes for block in plan.blocks]
    return max(plan.shares), max(plan.shares) == optimum(blocks, devices)


def plan_with_accelerate(model: nn.Module, devices: int, whole: Sequence[str] = ()) -> int:
    """Plan as its `device_map="balanced"` does, and return the heaviest device.

    Raises:
        ImportError: It is not installed.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    kept = list(whole) or None
    memory = get_balanced_memory(
        model, max_memory=dict.fromkeys(range(devices), PLENTY), no_split_module_classes=kept
    )
    places = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=kept)
    loads = [0] * devices
    for name, tensor in tensors_of(model):
        prefixes = itertools.accumulate(name.split("."), "{}.{}".format)
        loads[next(places[prefix] for prefix in ("", *prefixes) if prefix in places)] += (
            tensor.nbytes
        )
    return max(loads)


# ----------------------------------------------------------------------------------- the measuring


@dataclass(frozen=True)
class Row:
    """The heaviest device, in bytes, of each way to plan; None where one is not installed."""

    model: str
    devices: int
    total: int
    optimum: int
    ddpkit: int
    is_exact: bool
    accelerate: int | None
    accelerate_whole: int | None


def measure_plans(devices: Sequence[int]) -> tuple[list[Row], dict[str, str]]:
    """Plan every model for every number of devices."""
    rows, missing = [], {}
    for name, kind in KINDS.items():
        try:
            model = made_frozen(kind.make)
        except ImportError as error:
            missing[name] = f"{error.name} is not installed"
            continue
        rows += [measure_plan(name, model, number, kind.whole) for number in devices]
        tell(f"plans: {name}")
    return rows, missing


def measure_plan(name: str, model: nn.Module, devices: int, whole: Sequence[str]) -> Row:
    """Plan one model in all ways."""
    sizes = leaf_sizes(model)
    heaviest, is_exact = plan_with_ddpkit(model, devices)
    return Row(
        name,
        devices,
        sum(sizes),
        optimum(sizes, devices),
        heaviest,
        is_exact,
        if_installed(lambda: plan_with_accelerate(model, devices)),
        if_installed(lambda: plan_with_accelerate(model, devices, whole)),
    )


def if_installed(plan: Callable[[], int]) -> int | None:
    """Return nothing where a peer is missing."""
    with contextlib.suppress(ImportError):
        return plan()
    return None


def measure_lists(count: int) -> list[Row]:
    """Plan random lists of sizes."""
    generator = random.Random(0)
    rows = []
    for _ in range(count):
        sizes, devices = random_sizes(generator), generator.randint(2, 8)
        model = made_frozen(lambda sizes=sizes: make_list(sizes))  # type: ignore[misc]
        rows.append(measure_plan("random sizes", model, devices, ()))
    tell(f"plans: {count} random lists")
    return rows


def measure_planning(rounds: int) -> dict[int, dict[str, list[float]]]:
    """Time the plans of models of more and more blocks, in turn."""
    samples: dict[int, dict[str, list[float]]] = {}
    for blocks in BLOCKS:
        generator = random.Random(0)
        sizes = [generator.randint(1, 1000) for _ in range(blocks)]
        model = made_frozen(lambda sizes=sizes: make_list(sizes))  # type: ignore[misc]
        samples[blocks] = time_plans(model, rounds, with_peer=blocks <= LONGEST_FOR_ACCELERATE)
        tell(f"planning: {blocks} blocks")
    return samples


def time_plans(model: nn.Module, rounds: int, *, with_peer: bool) -> dict[str, list[float]]:
    """Time the plans of one model; the slower way once."""
    ways: dict[str, Callable[[], object]] = {
        "ddpkit": lambda: plan_split(model, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        "accelerate": lambda: plan_with_accelerate(model, 4),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number, (name, way) in itertools.product(range(rounds), ways.items()):
        if name == "accelerate" and (number or not with_peer):
            continue
        began = time.perf_counter()
        with contextlib.suppress(ImportError):
            way()
            samples[name].append(time.perf_counter() - began)
    return samples


# --------------------------------------------------------------------------------- a forward pass


def measure_forwards(rounds: int) -> dict[str, list[float]]:
    """Time forwards of a transformer, split and whole, in an order that changes."""
    torch.manual_seed(0)
    plain = Transformer(12, 256, 1_000)
    split = split_model_across_devices(copy.deepcopy(plain), ["cpu"] * 4)
    words = torch.randint(0, 1_000, (2, 64))
    ways: dict[str, nn.Module] = {
        PLAIN: plain,
        "the same again": plain,
        "split, all on one device": split,
        WATCHED: split,
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    generator = random.Random(0)
    for number in range(rounds):
        for name in generator.sample(list(ways), len(ways)):
            with as_on_several() if name == WATCHED else contextlib.nullcontext():
                began = time.perf_counter()
                ways[name](words)
                seconds = time.perf_counter() - began
            if number:  # the first round warms up
                samples[name].append(seconds)
    tell(f"forwards: {rounds} of each")
    return samples


def as_on_several() -> contextlib.AbstractContextManager[object]:
    """Run models on the CPU with what watches operations between blocks on several devices."""
    devices = [torch.device("cpu"), torch.device("meta")]

    def both(module: nn.Module) -> list[torch.device]:
        return devices

    return mock.patch("ddpkit.entrance.devices_in_order", both)


def print_forwards(samples: dict[str, list[float]]) -> None:
    """Print what a forward takes, and how much longer than the plain model's."""
    lines = [
        [
            name,
            show_time(min(times)),
            show_time(median(times)),
            f"{overhead(samples, name):+.1%}",
        ]
        for name, times in samples.items()
    ]
    title = "A forward of a transformer of 12 layers on one CPU core"
    print_table(title, ["model", "fastest", "median", "against the plain model"], lines)


def overhead(samples: dict[str, list[float]], name: str) -> float:
    """Compare the fast half of the forwards, which other programs have held up least."""
    fast = {way: sorted(times)[: len(times) // 2] for way, times in samples.items()}
    return statistics.fmean(fast[name]) / statistics.fmean(fast[PLAIN]) - 1


def run_hooks(args: argparse.Namespace) -> Part:
    """Measure and print what the hooks of a split model add to a forward."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other programs run
    samples = measure_forwards(20 if args.quick else FORWARDS)
    torch.set_num_threads(threads)
    print_forwards(samples)
    added = overhead(samples, WATCHED)
    words = f"a forward takes at most {HOOKS_TARGET:.0%} longer with the hooks of a split model"
    return Part(samples, [Target(words, f"{added:+.1%}", added <= HOOKS_TARGET)])


# ---------------------------------------------------------------------------------- what is printed


def show_share(heaviest: int | None, row: Row) -> str:
    """Write a heaviest device as a share of the model, and beside the optimum."""
    if heaviest is None:
        return "not installed"
    return f"{heaviest / row.total:.1%} ({heaviest / row.optimum:.3f})"


def print_plans(rows: Sequence[Row], missing: dict[str, str]) -> None:
    """Print a line for each model and number of devices."""
    lines = [
        [
            row.model,
            str(row.devices),
            f"{1 / row.devices:.1%}",
            f"{row.optimum / row.total:.1%}",
            show_share(row.ddpkit, row),
            show_share(row.accelerate, row),
            show_share(row.accelerate_whole, row),
        ]
        for row in rows
    ]
    lines += [[name, why, *[""] * 5] for name, why in missing.items()]
    header = [
        "model",
        "devices",
        "even",
        "optimum",
        "ddpkit",
        "accelerate",
        "with no-split classes",
    ]
    title = "Share of the heaviest device; in brackets: times the optimum over cuts anywhere"
    print_table(title, header, lines)


def print_lists(rows: Sequence[Row]) -> None:
    """Print how far the plans of random lists are from the optimum."""
    ways: dict[str, list[float]] = {
        "ddpkit": [row.ddpkit / row.optimum for row in rows],
        "accelerate": [row.accelerate / row.optimum for row in rows if row.accelerate is not None],
    }
    lines = [
        [name, "not installed", "", "", ""]
        if not ratios
        else [
            name,
            f"{sum(ratio == 1 for ratio in ratios)} of {len(ratios)}",
            f"{statistics.geometric_mean(ratios):.3f}",
            f"{statistics.median(ratios):.3f}",
            f"{max(ratios):.3f}",
        ]
        for name, ratios in ways.items()
    ]
    title = f"{len(rows)} random lists of 5 to 60 sizes, 2 to 8 devices: times the optimum"
    print_table(title, ["way", "optimal", "mean", "median", "worst"], lines)


def print_planning(samples: dict[int, dict[str, list[float]]]) -> None:
    """Print what planning takes."""
    names = next(iter(samples.values()))
    lines = [
        [name, *(show_time(median(samples[blocks][name])) for blocks in samples)] for name in names
    ]
    header = ["way", *(f"{blocks:,} blocks" for blocks in samples)]
    print_table("Planning for 4 devices", header, lines)


def judge_plans(rows: Sequence[Row], lists: Sequence[Row], planning: list[float]) -> list[Target]:
    """Compare with what the design promises."""
    everything = [*rows, *lists]
    exact = sum(row.is_exact for row in everything)
    worst = max(row.ddpkit / row.optimum for row in everything)
    beside = [
        row.ddpkit / min(row.accelerate, row.accelerate_whole)
        for row in everything
        if row.accelerate is not None and row.accelerate_whole is not None
    ]
    seconds = median(planning) or math.inf
    return [
        Target(
            "the heaviest device is the lightest possible for the blocks of the plan",
            f"{exact} of {len(everything)} plans",
            exact == len(everything),
        ),
        Target(
            f"it is at most {OPTIMUM_TARGET - 1:.0%} above the optimum over cuts anywhere",
            f"at most {worst - 1:.1%}",
            worst <= OPTIMUM_TARGET,
        ),
        Target(
            "it is never heavier than accelerate's",
            f"{min(beside):.2f} to {max(beside):.2f} times" if beside else "not installed",
            max(beside) <= 1 if beside else None,
        ),
        Target(
            f"planning {BLOCKS[-1]:,} blocks takes at most {TIME_TARGET:.0f} s",
            show_time(seconds),
            seconds <= TIME_TARGET,
        ),
    ]


# ----------------------------------------------------------------------------------- the whole run


@dataclass
class Part:
    """What one part of the benchmark has measured."""

    figures: dict[str, Any]
    targets: list[Target]


def run_planner(args: argparse.Namespace) -> Part:
    """Measure and print the plans."""
    rows, missing = measure_plans(DEVICES[:2] if args.quick else DEVICES)
    lists = measure_lists(LISTS // 10 if args.quick else LISTS)
    planning = measure_planning(args.rounds)
    print_plans(rows, missing)
    print_lists(lists)
    print_planning(planning)
    figures = {
        "plans": [vars(row) for row in rows],
        "missing": missing,
        "lists": [vars(row) for row in lists],
        "planning": planning,
    }
    return Part(figures, judge_plans(rows, lists, planning[BLOCKS[-1]]["ddpkit"]))


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "planner": run_planner,
    "hooks": run_hooks,
}
"""Each measures something of its own, prints its tables, and judges its targets."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer plans, to try the script")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
        help=f"parts to measure, of: {', '.join(PARTS)}",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    args = parse_arguments()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it looks for devices, in vain
    machine = describe_machine()
    print_machine(machine)
    parts = {name: PARTS[name](args) for name in args.only}
    targets = [target for part in parts.values() for target in part.targets]
    print_targets(targets)
    record = {
        "benchmark": "split",
        "machine": machine,
        "rounds": args.rounds,
        "quick": args.quick,
        **{name: part.figures for name, part in parts.items()},
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
