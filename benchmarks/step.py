"""Measure training steps on two CPU ranks, by hand, with the peers and with ddpkit.

Steps per second of the same loop, what ddp() adds to a step, and what it saves to synchronise once
in several micro-batches. See README.md for how this is measured and what the columns mean.

    python benchmarks/step.py --json step.json | tee step.txt
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import step_costs
from estimates import NARROW, Estimate, Starts, all_rounds, estimate, figure_of, pair, times_faster
from harness import (
    HERE,
    START_BOUND,
    Arena,
    ContestantEndedError,
    Target,
    describe_machine,
    kill_marked,
    median,
    open_arena,
    print_machine,
    print_table,
    print_targets,
    tell,
    write_record,
)
from step_contestants import SPAWNED, TUNED, WAYS
from step_training import MEASURED, RANKS, WORKLOADS

STARTS, ROUNDS = 8, 16
BLOCK_BOUND, END_BOUND = 120.0, 20.0
LEAST_TUNED, LEAST_SPAWNED = 1.0, 1.5
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
"""What the C library is told, in bytes."""
PEERS = ("accelerate", "fabric", "ignite")

Samples = dict[str, dict[str, Starts]]
"""Seconds of a step, by workload and contestant."""


# ---------------------------------------------------------------------------------- the contestants


class Contestant:
    """One contestant with its two ranks, each of which waits for requests at a socket.

    Attributes:
        threads: Of a rank, as torch counts them.
    """

    def __init__(self, arena: Arena, name: str, listener: socket.socket) -> None:
        self.name = name
        self.threads = 0
        self._arena = arena
        self._mark = arena.new_mark()
        self._process = start(arena, self._mark, name, listener.getsockname())
        self._streams: list[IO[str]] = []

    def await_ranks(self, listener: socket.socket) -> None:
        """Wait until both ranks have models and are ready to train.

        Raises:
            ContestantEndedError: They do not come.
        """
        deadline = time.monotonic() + START_BOUND
        while len(self._streams) < RANKS:
            with self._accept(listener, deadline) as connection:
                connection.settimeout(BLOCK_BOUND)
                stream = connection.makefile("rw")
            hello = self._read(stream)
            if hello["name"] == self.name:  # and not a late rank of one that was given up
                self._streams.append(stream)
                self.threads = hello["threads"]

    def train(self, workload: str) -> float:
        """Have it train a block of steps, and return the seconds of a step of the slower rank.

        Raises:
            ContestantEndedError: It does not come back.
        """
        for stream in self._streams:
            with contextlib.suppress(OSError):  # whatever it is, no answer comes
                stream.write(json.dumps(workload) + "\n")
                stream.flush()
        return max(float(self._read(stream)["seconds"]) for stream in self._streams)

    def close(self) -> None:
        """Let the ranks end, and end whatever does not."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        if self._streams:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_BOUND)
        kill_marked(self._mark)
        self._process.wait()

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        while time.monotonic() < deadline and self._process.poll() is None:
            if select.select([listener], [], [], 1.0)[0]:
                return listener.accept()[0]
        raise self._ended()

    def _read(self, stream: IO[str]) -> dict[str, Any]:
        try:
            line = stream.readline()
        except OSError:  # the time is up, or the connection is lost
            line = ""
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> ContestantEndedError:
        return ContestantEndedError(f"{self.name} has ended or hangs:\n{self._arena.last_output()}")


def start(arena: Arena, mark: str, name: str, address: str) -> subprocess.Popen[bytes]:
    """Start the program of a contestant, the way its users do."""
    way = WAYS[name]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with (arena.folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [
                *(sys.executable, *(torchrun if way.launcher == "torchrun" else [])),
                *(str(HERE / "step_contestants.py"), name, address),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(arena, mark, tuned=way.threads == "tuned"),
            start_new_session=True,
        )


def environment(arena: Arena, mark: str, *, tuned: bool) -> dict[str, str]:
    """Set the number of threads, or leave it to the launcher; let the C library keep its memory.

    Else it gives memory back to the system and fetches it again in every step, from nothing to a
    thousand pages of it (8 % of a step of the CNN), as chance has laid out a process.
    """
    variables = arena.environment(mark) | KEEP_MEMORY
    del variables["OMP_NUM_THREADS"]
    if tuned:
        variables["OMP_NUM_THREADS"] = str(tuned_threads())
    return variables


def tuned_threads() -> int:
    """Divide the cores among the ranks."""
    return max(1, len(os.sched_getaffinity(0)) // RANKS)


@dataclass
class Findings:
    """What was measured of the contestants, and of which not, and why."""

    samples: Samples
    threads: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str) -> None:
        """Go on without a contestant that has failed."""
        self.missing[name] = "failed"
        for by_name in self.samples.values():
            by_name.pop(name, None)


# ------------------------------------------------------------------------------------ the measuring


def measure(arena: Arena, names: Sequence[str], args: argparse.Namespace) -> Findings:
    """Start all contestants several times, and have them take turns in between."""
    found = Findings(
        samples={workload: {} for workload in args.workloads},
        missing={name: "not installed" for name in names if WAYS[name].missing()},
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(arena.folder / "socket"))
        listener.listen()
        for number in range(args.starts if names else 0):
            present = [name for name in names if name not in found.missing]
            with open_team(arena, present, listener, found) as team:
                tell(f"start {number + 1} of {args.starts}: all are ready")
                take_turns(team, args.rounds, random.Random(number), found)
    return found


@contextlib.contextmanager
def open_team(
    arena: Arena, names: Iterable[str], listener: socket.socket, found: Findings
) -> Iterator[dict[str, Contestant]]:
    """Start contestants one by one, and end all of them."""
    team: dict[str, Contestant] = {}
    try:
        for name in names:
            member = team[name] = Contestant(arena, name, listener)
            try:
                member.await_ranks(listener)
                found.threads[name] = member.threads
            except ContestantEndedError as error:
                leave_out(team, name, error, found)
        yield team
    finally:
        for member in team.values():
            member.close()


def leave_out(
    team: dict[str, Contestant], name: str, error: ContestantEndedError, found: Findings
) -> None:
    """Go on without one that has failed."""
    tell(str(error))
    team.pop(name).close()
    found.drop(name)


def take_turns(
    team: dict[str, Contestant], rounds: int, draw: random.Random, found: Findings
) -> None:
    """Time a block of everybody in each round, in an order of its own; the first does not count."""
    taken: dict[str, dict[str, list[float]]] = {workload: {} for workload in found.samples}
    for _ in range(rounds + 1):
        for workload, name in draw.sample(turns := turns_of(team, found), k=len(turns)):
            if name in team:
                try:
                    taken[workload].setdefault(name, []).append(team[name].train(workload))
                except ContestantEndedError as error:
                    leave_out(team, name, error, found)
    for workload, name in turns_of(team, found):
        found.samples[workload].setdefault(name, []).append(taken[workload][name][1:])


def turns_of(team: Iterable[str], found: Findings) -> list[tuple[str, str]]:
    """Pair every workload with every contestant."""
    return [(workload, name) for name in team for workload in found.samples]


# --------------------------------------------------------------------------------------- the tables


def print_findings(found: Findings) -> None:
    """Print a table for each model."""
    header = ["two ranks", "threads", "steps/s", "a step", "range", "ddpkit is", "95 % of it"]
    for workload, by_name in found.samples.items() if found.threads or found.missing else ():
        rows = [row_of(by_name, name, found.threads[name]) for name in by_name]
        rows += [[name, why, "", "", "", "", ""] for name, why in found.missing.items()]
        print_table(f"Training steps of the {workload}", header, rows)


def row_of(by_name: dict[str, Starts], name: str, threads: int) -> list[str]:
    """Write what was measured of one contestant."""
    seconds = all_rounds(by_name[name])
    middle = median(seconds)
    assert middle is not None
    return [
        *(name, str(threads), f"{1 / middle:.1f}", f"{1000 * middle:.2f} ms"),
        f"{1000 * min(seconds):.1f} .. {1000 * max(seconds):.1f} ms",
        *show_estimate(compare(by_name, name)),
    ]


def compare(by_name: dict[str, Starts], name: str) -> Estimate | None:
    """Say how many times faster ddpkit is."""
    if name == "ddpkit" or not {name, "ddpkit"} <= by_name.keys():
        return None
    return times_faster(by_name["ddpkit"], by_name[name])


def show_estimate(ratio: Estimate | None) -> list[str]:
    """Write a ratio and its interval."""
    if ratio is None:
        return ["-", ""]
    return [f"{ratio.value:.3f}x", f"{ratio.low:.3f} .. {ratio.high:.3f}"]


def print_costs(workload: str, samples: dict[str, Starts]) -> None:
    """Print what ddp() adds to a step."""
    rows = [[name, *cost_of(samples, name)] for name in samples]
    title = f"What wrapping adds to a step of the {workload}, in the same ranks"
    header = ["way", "a step", f"more than {step_costs.PLAIN}", "95 % of it", "share of the step"]
    print_table(title, header, rows)


def cost_of(samples: dict[str, Starts], name: str) -> list[str]:
    """Write the microseconds that one way takes more than plain DDP."""
    plain = samples[step_costs.PLAIN]
    shown = [f"{1000 * figure_of(samples[name]):.3f} ms"]
    if name == step_costs.PLAIN:
        return [*shown, "", "", ""]
    added = estimate(pair(lambda own, least: 1e6 * (own - least), samples[name], plain))
    share = added.value / 1e4 / figure_of(plain)
    return [
        *(*shown, f"{added.value:.0f} us", f"{added.low:.0f} .. {added.high:.0f}"),
        f"{share:.1f} %",
    ]


def print_accumulation(workload: str, samples: dict[str, Starts]) -> None:
    """Print what it saves to synchronise once in a window."""
    rows = [
        [
            *(name, f"{1000 * figure_of(starts):.2f} ms"),
            *show_estimate(
                None if name == step_costs.EACH else times_faster(starts, samples[step_costs.EACH])
            ),
        ]
        for name, starts in samples.items()
    ]
    title = f"Windows of {step_costs.EVERY} micro-batches of the {workload}"
    print_table(title, ["synchronised", "a window", "times faster", "95 % of it"], rows)


# -------------------------------------------------------------------------------------- the targets


def judge(samples: Samples) -> list[Target]:
    """Compare with what the design promises."""
    return [
        judge_one(samples, TUNED, LEAST_TUNED),
        judge_one(samples, SPAWNED, LEAST_SPAWNED),
        *(judge_one(samples, peer, LEAST_TUNED) for peer in PEERS),
    ]


def judge_one(samples: Samples, name: str, least: float) -> Target:
    """Judge a comparison by the model for which it is worst."""
    ratios = {workload: compare(by_name, name) for workload, by_name in samples.items()}
    known = {workload: ratio for workload, ratio in ratios.items() if ratio is not None}
    verdicts = [ratio.is_at_least(least) for ratio in known.values()]
    holds = None if not verdicts or None in verdicts else all(verdicts)
    if False in verdicts:
        holds = False
    return Target(
        f"a training step is at least {least:.1f}x as fast as {name}:",
        ", ".join(f"{workload} {ratio}" for workload, ratio in known.items()) or "-",
        holds,
    )


# ------------------------------------------------------------------------------------ the whole run


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=STARTS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="two starts of two rounds, for a try")
    parser.add_argument(
        "--only", nargs="*", choices=list(WAYS), default=list(WAYS), metavar="NAME",
        help=f"contestants to measure, of: {', '.join(WAYS)}; none: only the costs within a step",
    )  # fmt: skip
    parser.add_argument(
        "--workloads", nargs="+", choices=MEASURED, default=list(MEASURED), metavar="NAME",
        help=f"models to compare the contestants with, of: {', '.join(MEASURED)}",
    )  # fmt: skip
    parser.add_argument("--no-costs", action="store_true", help="leave out the costs within a step")
    args = parser.parse_args()
    if args.quick:
        args.starts = args.rounds = 2
    return args


def measure_costs(kind: str, workloads: Sequence[str], args: argparse.Namespace) -> Samples:
    """Measure within one pair of ranks, where half as many starts say as much."""
    samples = {}
    for workload in workloads:
        starts = (args.starts + 1) // 2
        samples[workload] = step_costs.measure(kind, workload, starts, args.rounds)
        tell(f"{kind}: {workload} measured")
    return samples


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    args = parse_arguments()
    machine = describe_machine()
    with open_arena() as arena:
        found = measure(arena, args.only, args)
    costs = measure_costs("wrap", () if args.no_costs else list(WORKLOADS), args)
    accumulation = measure_costs("accumulate", () if args.no_costs else MEASURED, args)
    print_machine(machine)
    print_findings(found)
    for workload, samples in costs.items():
        print_costs(workload, samples)
    for workload, samples in accumulation.items():
        print_accumulation(workload, samples)
    targets = judge(found.samples)
    print_targets(targets)
    print(
        f"A target holds if the interval lies above it, or reaches it and is within {NARROW:.0%}."
    )
    record = {
        "benchmark": "step",
        "machine": machine,
        "starts": args.starts,
        "rounds": args.rounds,
        "quick": args.quick,
        "not_measured": found.missing,
        "threads": found.threads,
        "seconds_per_step": found.samples,
        "seconds_per_step_by_wrapper": costs,
        "seconds_per_window": accumulation,
        "targets": [asdict(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
