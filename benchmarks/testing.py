"""Time twenty tests of two ranks: by ddpkit's pytest mark, by `mp.spawn`, and on torch's own bases.

Every way has a file of twenty tests that sum over two ranks, and pytest runs one after the other,
each in a fresh process. See README.md for what the columns mean.

    python benchmarks/testing.py --json testing.json | tee testing.txt
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from harness import (
    HERE,
    Arena,
    Target,
    describe_machine,
    kill_marked,
    median,
    open_arena,
    print_machine,
    print_table,
    print_targets,
    show_range,
    show_time,
    tell,
    write_record,
)

ROUNDS = 3
TESTS = 20
LIMIT = 4.0
"""Seconds that DESIGN allows for all tests by the mark."""
BOUND = 600.0
MARK, FORKSERVER, SPAWN = "ddpkit mark", "ddpkit mark, forkserver", "mp.spawn in each test"
BASE, CONTINUOUS = "torch MultiProcessTestCase", "torch MultiProcContinuousTest"


@dataclass(frozen=True)
class Way:
    """One way to write tests of several ranks."""

    file: str
    needs: tuple[str, ...] = ()
    fresh: bool = False
    """Whether every test starts interpreters, which takes seconds: one round is enough then."""

    def missing(self) -> str | None:
        """Name the first module that is not installed, None when all are."""
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


WAYS = {
    MARK: Way("twenty_by_mark.py"),
    FORKSERVER: Way("twenty_by_forkserver.py"),
    SPAWN: Way("twenty_by_spawn.py", fresh=True),
    BASE: Way("twenty_by_torch.py", ("expecttest",), fresh=True),
    CONTINUOUS: Way("twenty_by_torch_continuous.py", ("expecttest",)),
}


@dataclass(frozen=True)
class Run:
    """Seconds of one run of pytest over the twenty tests of a way."""

    tests: float
    """All tests together: their set-up, body and clearing up."""
    first: float
    """The first of them."""
    whole: float
    """From the start of the command to its end, with the imports."""


Runs = dict[str, list[Run]]


class TestsFailedError(Exception):
    """pytest did not pass the twenty tests."""


# ----------------------------------------------------------------------------------- the measuring


def run(arena: Arena, way: Way) -> Run:
    """Have pytest run the tests of a way."""
    folder = Path(arena.new_folder())
    (folder / "pytest.ini").write_text("[pytest]\n")
    mark = arena.new_mark()
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / way.file)),
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(HERE)),
        *("--basetemp", str(folder / "tmp"), "--junit-xml", str(folder / "times.xml")),
    ]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment(arena, mark), capture_output=True, text=True, timeout=BOUND
        )
    finally:
        kill_marked(mark)
    whole = time.monotonic() - began
    if done.returncode != 0:
        raise TestsFailedError(f"{way.file}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return read_times(folder / "times.xml", whole)


def environment(arena: Arena, mark: str) -> dict[str, str]:
    """Make the variables of a run; bytecode is kept, as from one run of a user's to the next."""
    variables = arena.environment(mark)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def read_times(file: Path, whole: float) -> Run:
    """Read the times of all tests, which must be as many as there should be."""
    times = [float(case.attrib["time"]) for case in ElementTree.parse(file).iter("testcase")]
    if len(times) != TESTS:
        raise TestsFailedError(f"pytest ran {len(times)} tests where there are {TESTS}")
    return Run(sum(times), times[0], whole)


def measure(arena: Arena, names: Iterable[str], rounds: int) -> Runs:
    """Run every way in turn."""
    runs: Runs = {name: [] for name in names if WAYS[name].missing() is None}
    for number in range(rounds):
        for name, taken in runs.items():
            if number == 0 or not WAYS[name].fresh:
                taken.append(run(arena, WAYS[name]))
                tell(f"{name}: {show_time(taken[-1].tests)}, {number + 1} of {rounds} rounds")
    return runs


# ------------------------------------------------------------------------------------ the tables


def median_of(runs: Sequence[Run]) -> float | None:
    """Compute the median time of the tests."""
    return median([each.tests for each in runs])


def times_longer(runs: Runs, name: str) -> float | None:
    """Say how many times longer than with the mark the tests take."""
    own, other = median_of(runs.get(MARK, [])), median_of(runs.get(name, []))
    return None if own is None or other is None else other / own


def show_ratio(ratio: float | None) -> str:
    """Write how many times longer something takes."""
    return "-" if ratio is None else f"{ratio:.1f}x"


def print_runs(runs: Runs, names: Iterable[str]) -> None:
    """Print a row for each way."""
    header = ["two ranks, gloo", "tests", "range", "vs mark", "first test", "with pytest's start"]
    rows = [
        [
            name,
            show_time(median_of(taken)),
            show_range([each.tests for each in taken]),
            show_ratio(times_longer(runs, name)),
            show_time(median([each.first for each in taken])),
            show_time(median([each.whole for each in taken])),
        ]
        for name, taken in runs.items()
    ]
    rows += [[name, "not installed", *[""] * 4] for name in names if name not in runs]
    print_table("Twenty tests, each of which sums over its ranks", header, rows)


def judge(runs: Runs) -> list[Target]:
    """Compare the tests by the mark with the target of the design."""
    taken = median_of(runs.get(MARK, []))
    return [
        Target(
            f"{TESTS} two-rank tests with the pytest mark take at most {LIMIT:g} s:",
            show_time(taken),
            None if taken is None else taken <= LIMIT,
        )
    ]


# -------------------------------------------------------------------------------------- the whole


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME",
        help=f"ways to measure, of: {', '.join(map(repr, WAYS))}",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    args = parse_arguments()
    machine = describe_machine()
    with open_arena() as arena:
        runs = measure(arena, args.only, args.rounds)
    print_machine(machine)
    print_runs(runs, args.only)
    targets = judge(runs)
    print_targets(targets)
    record = {
        "benchmark": "testing",
        "machine": machine,
        "rounds": args.rounds,
        "not_measured": [name for name in args.only if name not in runs],
        "samples": {name: [vars(each) for each in taken] for name, taken in runs.items()},
        "times_longer_than_mark": {name: times_longer(runs, name) for name in runs},
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
