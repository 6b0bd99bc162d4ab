"""Measure loaders of one rank: what an epoch costs at its beginning, in its middle and as a whole.

The cost of the first index against the length of the dataset, indices and samples per second, and
how long it takes to go on in the middle of an epoch. See README.md for what the columns mean.

    python benchmarks/loader.py --json loader.json --plot loader.svg | tee loader.txt
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from harness import (
    HERE,
    Target,
    describe_machine,
    median,
    print_machine,
    print_table,
    print_targets,
    tell,
    write_record,
)
from launch import show_ratio
from loader_contestants import WAYS, Setting

ROUNDS = 3
REFERENCE = "torch"
"""The contestant that all are compared with: DataLoader with a DistributedSampler."""
LONGEST = 14.0
"""Seconds; what is expected to take longer is skipped."""
LONG = 6.0
"""Seconds; what takes longer is measured in the first round alone."""
SHORT = 0.2
"""Seconds; what takes less is measured three times in each round."""
MEMORY_SHARE = 0.5
"""What is expected to need more of the memory that is free is skipped."""
NOISE = 0.9
"""What workers and collation take is the same for all, and varies by more than loaders differ."""
FIRST_TARGET = 0.010
MEMORY_TARGET = 16e6
MEMORY_FLOOR = 0.1e6
"""Bytes; the plot, whose axes are logarithmic, shows less as this much."""


# ------------------------------------------------------------------------------ what is measured


@dataclass(frozen=True)
class Plan:
    """The settings of each measurement."""

    first: Sequence[Setting]
    indices: Sequence[Setting]
    epoch: Sequence[Setting]
    resume: Setting


def make_plan(quick: bool) -> Plan:
    """Choose the lengths; the longest dataset is part of a quick run, too."""
    lengths = (10**5, 10**6, 10**9) if quick else (10**5, 10**6, 10**7, 5 * 10**7, 10**8, 10**9)
    short = 20_000 if quick else 100_000
    return Plan(
        first=[Setting(length, 8, 64) for length in lengths],
        indices=[
            Setting(length, 2, batch_size)
            for length in lengths[: 1 if quick else 3]
            for batch_size in (64, 256)
        ],
        epoch=[
            Setting(short, 2, 64, workers, dataset)
            for workers in (0, 2)
            for dataset in ("numbers", "tensors")
        ],
        resume=Setting(10**6 if quick else 10**7, 2, 64),
    )


@dataclass
class Record:
    """What was measured of one contestant in one setting."""

    samples: list[dict[str, float]] = field(default_factory=list)
    """Of each round: `seconds`, bytes of `memory`, and the `count` of samples."""
    skipped: str | None = None

    def median_of(self, quantity: str) -> float | None:
        """Compute the median of seconds or memory."""
        return median([sample[quantity] for sample in self.samples])

    @property
    def rate(self) -> float | None:
        """Samples per second."""
        return median([sample["count"] / sample["seconds"] for sample in self.samples])


Records = dict[Setting, dict[str, Record]]


# ---------------------------------------------------------------------------------- the contestants


class MeasurementFailedError(Exception):
    """A contestant has not done what it was asked for."""


class Contestant:
    """The process of one contestant."""

    def __init__(self, name: str, log: Path) -> None:
        self._log = log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "loader_contestants.py"), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
            )

    def await_ready(self) -> None:
        """Wait until it has imported what it needs."""
        self._read()

    def measure(self, measurement: str, setting: Setting, *arguments: str) -> dict[str, float]:
        """Have it measure once.

        Raises:
            MeasurementFailedError: Something was raised there, or it took too long.
        """
        request = {"measurement": measurement, "setting": setting, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in reply:
            last = self._log.read_text(errors="replace").splitlines()[-15:]
            raise MeasurementFailedError("\n".join([reply["error"], *last]))
        return reply


@contextlib.contextmanager
def open_team(names: Iterable[str], folder: Path) -> Iterator[dict[str, Contestant]]:
    """Start the contestants, all at once, and end them."""
    with contextlib.ExitStack() as stack:
        team = {name: Contestant(name, folder / f"{name}.txt") for name in names}
        for member in team.values():
            stack.callback(member.close)
        for member in team.values():
            member.await_ready()
        yield team


def find_missing(names: Iterable[str]) -> dict[str, str]:
    """Name the contestants that cannot be measured here."""
    return {name: "not installed" for name in names if WAYS[name].missing() is not None}


# ----------------------------------------------------------------------------------- the measuring


def measure(
    team: dict[str, Contestant], measurement: str, settings: Sequence[Setting], rounds: int
) -> Records:
    """Measure every setting of every contestant, in turn, shorter datasets first."""
    records: Records = {setting: {name: Record() for name in team} for setting in settings}
    for number in range(rounds):
        for setting, name in itertools.product(settings, team):
            record = records[setting][name]
            if number == 0:
                record.skipped = reason_to_skip(records, setting, name)
            if record.skipped is None:
                take(record, functools.partial(team[name].measure, measurement, setting))
        tell(f"{measurement}: {number + 1} of {rounds} rounds")
    return records


def take(record: Record, measure_once: Callable[[], dict[str, float]]) -> None:
    """Take the samples of one round: one of most, more of what is short, and of long ones none."""
    taken = record.median_of("seconds")
    if taken is not None and taken > LONG:
        return
    try:
        record.samples.append(measure_once())
        if record.samples[-1]["seconds"] < SHORT:
            record.samples += [measure_once() for _ in range(2)]
    except MeasurementFailedError as error:
        tell(str(error))
        record.skipped = "failed: " + str(error).splitlines()[0]


def reason_to_skip(records: Records, setting: Setting, name: str) -> str | None:
    """Scale what a shorter dataset took, and say why this one cannot be measured, if so."""
    needs = scale(records, setting, name)
    if needs is None:
        return None
    seconds, memory = needs
    fits = memory <= MEMORY_SHARE * psutil.virtual_memory().available
    if fits and seconds <= LONGEST:
        return None
    return f"would need about {memory / 1e9:.3g} GB and {seconds:.0f} s"


def scale(records: Records, setting: Setting, name: str) -> tuple[float, float] | None:
    """Predict seconds and bytes, in proportion to the longest dataset that was measured."""
    shorter = [
        (other, by_name[name])
        for other, by_name in records.items()
        if other._replace(length=setting.length) == setting and by_name[name].samples
    ]
    if not shorter:
        return None
    other, record = max(shorter, key=lambda pair: pair[0].length)
    factor = setting.length / other.length
    seconds, memory = record.median_of("seconds"), record.median_of("memory")
    return (seconds or 0.0) * factor, (memory or 0.0) * factor


def measure_resumes(
    team: dict[str, Contestant], setting: Setting, rounds: int, folder: Path
) -> Records:
    """Save a place once, untimed, and go on from it in new loaders, in turn."""
    records: Records = {setting: {}}
    for name, member in team.items():
        record = records[setting][name] = Record()
        if WAYS[name].resume is None:
            record.skipped = "saves no place inside an epoch"
        else:
            save(record, member, setting, str(folder / name))
            tell(f"resume: place of {name} saved")
    for _, name in itertools.product(range(rounds), team):
        record = records[setting][name]
        if record.skipped is None:
            file = str(folder / name)
            take(record, functools.partial(team[name].measure, "resume", setting, file))
    tell(f"resume: {rounds} rounds")
    return records


def save(record: Record, member: Contestant, setting: Setting, file: str) -> None:
    """Have a contestant save its place."""
    try:
        member.measure("save", setting, file)
    except MeasurementFailedError as error:
        tell(str(error))
        record.skipped = "failed: " + str(error).splitlines()[0]


# ------------------------------------------------------------------------------------ the tables


def show_seconds(seconds: float | None) -> str:
    """Write a time with two or three digits, whatever its size."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def show_memory(size: float | None) -> str:
    """Write an amount of memory."""
    if size is None:
        return "-"
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def show_rate(rate: float | None) -> str:
    """Write samples per second."""
    if rate is None:
        return "-"
    return f"{rate / 1e6:.3g} M/s" if rate >= 1e6 else f"{rate / 1e3:.0f} k/s"


def show_length(length: int) -> str:
    """Write a round number briefly."""
    return f"{length:.0e}".replace("e+0", "e")


Quantity = Callable[[Record], "float | None"]


def seconds_of(record: Record) -> float | None:
    """Take the time of a record."""
    return record.median_of("seconds")


def memory_of(record: Record) -> float | None:
    """Take the memory of a record."""
    return record.median_of("memory")


def rate_of(record: Record) -> float | None:
    """Take the speed of a record."""
    return record.rate


def times_better(
    by_name: dict[str, Record], name: str, other: str, quantity: Quantity
) -> float | None:
    """Say how many times faster or smaller one contestant is than another."""
    own, theirs = (quantity(by_name.get(one, Record())) for one in (name, other))
    if not own or not theirs:
        return None
    return own / theirs if quantity is rate_of else theirs / own


def show_cell(
    by_name: dict[str, Record], name: str, quantity: Quantity, show: Callable[[float | None], str]
) -> str:
    """Write what was measured, and how it compares."""
    record = by_name[name]
    if record.skipped is not None:
        return "skipped"
    ratio = times_better(by_name, name, REFERENCE, quantity)
    compared = "" if ratio is None else f" ({show_ratio(ratio)})"
    return show(quantity(record)) + compared


def print_records(
    title: str,
    records: Records,
    heads: Callable[[Setting], str],
    quantity: Quantity,
    show: Callable[[float | None], str],
    missing: dict[str, str],
) -> None:
    """Print a row for each contestant and a column for each setting."""
    names = list(next(iter(records.values())))
    rows = [
        [name, *(show_cell(by_name, name, quantity, show) for by_name in records.values())]
        for name in names
    ]
    rows += [[name, why, *[""] * (len(records) - 1)] for name, why in missing.items()]
    print_table(title, ["rank 0", *map(heads, records)], rows)


def print_skipped(records: Records) -> None:
    """Say what was not measured, and why."""
    lines = [
        f"{name}, {show_length(setting.length)} samples, skipped: {record.skipped}"
        for setting, by_name in records.items()
        for name, record in by_name.items()
        if record.skipped is not None
    ]
    if lines:
        print("", *lines, sep="\n")


def print_ranges(records: Records, heads: Callable[[Setting], str]) -> None:
    """Print the shortest and the longest time of each, for judging the medians."""
    names = list(next(iter(records.values())))
    rows = [[name, *(show_range(by_name[name]) for by_name in records.values())] for name in names]
    print_table("The same as seconds: shortest .. longest", ["rank 0", *map(heads, records)], rows)


def show_range(record: Record) -> str:
    """Write the shortest and the longest time."""
    seconds = [sample["seconds"] for sample in record.samples]
    return f"{show_seconds(min(seconds))} .. {show_seconds(max(seconds))}" if seconds else "-"


# ----------------------------------------------------------------------------------- the whole run


@dataclass
class Findings:
    """Everything that was measured."""

    first: Records
    indices: Records
    epoch: Records
    resume: Records


def measure_all(team: dict[str, Contestant], plan: Plan, rounds: int, folder: Path) -> Findings:
    """Take all measurements."""
    return Findings(
        first=measure(team, "first", plan.first, rounds),
        indices=measure(team, "indices", plan.indices, rounds),
        epoch=measure(team, "epoch", plan.epoch, 3 * rounds),  # they vary more than the others
        resume=measure_resumes(team, plan.resume, rounds, folder),
    )


def print_findings(found: Findings, missing: dict[str, str]) -> None:
    """Print all tables."""
    better = f"in brackets: how many times better than {REFERENCE}"
    print_first(found.first, missing, better)
    title = f"Indices per second of a whole epoch, 2 ranks; {better}"
    print_records(title, found.indices, name_indices, rate_of, show_rate, missing)
    print_ranges(found.indices, name_indices)
    print_skipped(found.indices)
    length = show_length(next(iter(found.epoch)).length)
    title = f"Samples per second of a whole epoch, {length} samples, 2 ranks; {better}"
    print_records(title, found.epoch, name_epoch, rate_of, show_rate, missing)
    print_ranges(found.epoch, name_epoch)
    print_skipped(found.epoch)
    print_resume(found.resume, missing)


def print_first(records: Records, missing: dict[str, str], better: str) -> None:
    """Print what the beginning of an epoch costs."""
    title = (
        f"From the beginning of a shuffled epoch to the first batch of indices, 8 ranks; {better}"
    )
    heads = name_length
    print_records(title, records, heads, seconds_of, show_seconds, missing)
    print_records("Its peak memory", records, heads, memory_of, show_memory, missing)
    print_skipped(records)


def print_resume(records: Records, missing: dict[str, str]) -> None:
    """Print what going on in the middle of an epoch costs."""
    ((setting, by_name),) = records.items()
    rows = [[name, *show_resume(record, by_name, name)] for name, record in by_name.items()] + [
        [name, why, "", "", ""] for name, why in missing.items()
    ]
    title = (
        f"From the saved place in the middle of an epoch, {show_length(setting.length)} samples, "
        "2 ranks, to the next batch"
    )
    print_table(title, ["rank 0", "median", "range", "peak memory", "vs torchdata"], rows)


def show_resume(record: Record, by_name: dict[str, Record], name: str) -> list[str]:
    """Write the row of one contestant."""
    if record.skipped is not None:
        return [record.skipped, "", "", ""]
    ratio = times_better(by_name, name, "torchdata", seconds_of)
    return [
        show_seconds(seconds_of(record)),
        show_range(record),
        show_memory(memory_of(record)),
        show_ratio(ratio),
    ]


def name_length(setting: Setting) -> str:
    """Head the column of a length."""
    return show_length(setting.length)


def name_indices(setting: Setting) -> str:
    """Head the column of a length and batch size."""
    return f"{show_length(setting.length)}, batch {setting.batch_size}"


def name_epoch(setting: Setting) -> str:
    """Head the column of a dataset and its workers."""
    return f"{setting.dataset}, {setting.workers} workers"


# ------------------------------------------------------------------------------------- the targets


def judge(found: Findings) -> list[Target]:
    """Compare what was measured of ddpkit with what its design promises."""
    return [
        *judge_first(found.first),
        judge_rate("indices per second over an epoch", found.indices, name_indices, least=1.0),
        judge_rate(
            "tensors per second through the DataLoader",
            {one: records for one, records in found.epoch.items() if one.dataset == "tensors"},
            name_epoch,
            least=NOISE,
        ),
        judge_resume(found.resume),
    ]


def judge_first(records: Records) -> list[Target]:
    """Judge the beginning of an epoch of the longest dataset."""
    longest = max(records, key=lambda setting: setting.length)
    record = records[longest].get("ddpkit", Record())
    seconds, memory = seconds_of(record), memory_of(record)
    what = f"the first index of {show_length(longest.length)} samples and {longest.ranks} ranks"
    return [
        Target(
            f"{what} takes at most {show_seconds(FIRST_TARGET)}:",
            show_seconds(seconds),
            None if seconds is None else seconds <= FIRST_TARGET,
        ),
        Target(
            f"{what} takes at most {MEMORY_TARGET / 1e6:.0f} MB:",
            show_memory(memory),
            None if memory is None else memory <= MEMORY_TARGET,
        ),
    ]


def judge_rate(
    what: str, records: Records, heads: Callable[[Setting], str], *, least: float
) -> Target:
    """Judge the speed where it compares worst."""
    promise = f"{what} are at least {least:.2g} times those of {REFERENCE}:"
    ratios = {
        heads(setting): ratio
        for setting, by_name in records.items()
        if (ratio := times_better(by_name, "ddpkit", REFERENCE, rate_of)) is not None
    }
    if not ratios:
        return Target(promise, "-", None)
    worst = min(ratios, key=lambda head: ratios[head])
    shown = f"{show_ratio(ratios[worst])} or more; least at {worst}"
    return Target(promise, shown, ratios[worst] >= least)


def judge_resume(records: Records) -> Target:
    """Judge the time to go on."""
    (by_name,) = records.values()
    ratio = times_better(by_name, "ddpkit", "torchdata", seconds_of)
    promise = "going on in the middle of an epoch is faster than torchdata's:"
    return Target(promise, show_ratio(ratio), None if ratio is None else ratio > 1)


# ---------------------------------------------------------------------------------------- the plot


def plot(path: Path, records: Records) -> None:
    """Draw time and memory against length, both axes logarithmic."""
    if importlib.util.find_spec("matplotlib") is None:
        print("\nmatplotlib is not installed: no plot")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    axes[0].set_ylabel("seconds to the first batch of indices")
    axes[1].set_ylabel(f"peak memory, MB (at least {MEMORY_FLOOR / 1e6} shown)")
    for name, marker in zip(next(iter(records.values())), "osv^D", strict=False):
        looks = {"marker": marker, "fillstyle": "none", "label": name}
        seconds = points_of(records, name, seconds_of)
        memory = points_of(records, name, memory_of)
        axes[0].plot(*seconds, **looks)
        axes[1].plot(memory[0], [max(MEMORY_FLOOR, size) / 1e6 for size in memory[1]], **looks)
    for one in axes:
        one.set(xscale="log", yscale="log", xlabel="samples in the dataset")
        one.grid(alpha=0.3)
        one.legend()
    figure.suptitle("The beginning of a shuffled epoch, rank 0 of 8")
    figure.savefig(path)


def points_of(records: Records, name: str, quantity: Quantity) -> tuple[list[int], list[float]]:
    """Collect the lengths at which something was measured of a contestant, and what."""
    points = [
        (setting.length, value)
        for setting, by_name in records.items()
        if (value := quantity(by_name[name])) is not None
    ]
    return [length for length, _ in points], [value for _, value in points]


# ------------------------------------------------------------------------------------- the program


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the cost by length")
    parser.add_argument("--quick", action="store_true", help="shorter datasets, to try the script")
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME",
        help=f"contestants to measure, of: {', '.join(WAYS)}",
    )  # fmt: skip
    return parser.parse_args()


def as_record(records: Records) -> list[dict[str, Any]]:
    """Turn records into what JSON can hold."""
    return [
        {"setting": setting._asdict(), "contestant": name, **dataclasses.asdict(record)}
        for setting, by_name in records.items()
        for name, record in by_name.items()
    ]


def main() -> None:
    """Measure, print, and write the files that were asked for."""
    args = parse_arguments()
    machine = describe_machine()
    missing = find_missing(args.only)
    names = [name for name in args.only if name not in missing]
    with tempfile.TemporaryDirectory() as folder, open_team(names, Path(folder)) as team:
        found = measure_all(team, make_plan(args.quick), args.rounds, Path(folder))
    print_machine(machine)
    print(f"torchdata {machine['packages'].get('torchdata', 'not installed')}")
    print_findings(found, missing)
    targets = judge(found)
    print_targets(targets)
    record = {
        "benchmark": "loader",
        "machine": machine,
        "rounds": args.rounds,
        "quick": args.quick,
        "not_measured": missing,
        **{one.name: as_record(getattr(found, one.name)) for one in dataclasses.fields(found)},
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)
    if args.plot is not None:
        plot(args.plot, found.first)


if __name__ == "__main__":
    main()
