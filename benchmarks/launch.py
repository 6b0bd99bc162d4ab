"""Time launches: to a returned all-reduce, to the first DDP step, and with more and more ranks.

Every way to start ranks has a process of its own that lives until the end, and they take turns, so
that whatever else the machine does hits them all. See README.md for what the columns mean.

    python benchmarks/launch.py --json launch.json | tee launch.txt
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contestants import WAYS
from harness import (
    REFERENCES,
    Arena,
    Contestant,
    ContestantEndedError,
    LaunchFailedError,
    Reply,
    StillRunningError,
    Target,
    Team,
    describe_machine,
    make_parser,
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
FAST_LAUNCHES = {"all_reduce": 5, "first_step": 2}
"""Launches in a round of the ways that fork; those that start interpreters launch once."""
COLD = ("bare fork", "ddpkit auto", "ddpkit forkserver")
"""Ways whose first launch is measured in several fresh processes; the others have one sample."""
GROWTH = {
    "bare fork": (2, 4, 8, 16, 32),
    "ddpkit auto": (2, 4, 8, 16, 32),
    "ddpkit forkserver": (2, 4, 8, 16, 32),
    "mp.spawn": (2, 4, 8),
}
SLOW_GROWTH_ROUNDS = 1
"""Rounds in which mp.spawn takes part: eight interpreters on two cores take half a minute."""
SIZES = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Sample:
    """Seconds from the call of one launch."""

    returned: float
    """Until the caller had the value."""
    in_rank: float
    """Until rank 0 had it; what is left are reporting and taking down."""


Samples = dict[str, list[Sample]]


# ----------------------------------------------------------------------------------- the measuring


def sample(reply: Reply) -> Sample:
    """Take the times of a launch whose value must be right."""
    result = reply.expect_result()
    value, ranks = result["value"], reply.task.ranks
    if reply.task.workload == "all_reduce" and value != ranks * (ranks + 1) / 2:
        raise RuntimeError(f"the all-reduce over {ranks} ranks returned {value}")
    if not math.isfinite(value):
        raise RuntimeError(f"the loss of the first step is {value}")
    return Sample(reply.seconds, result["done_at"] - reply.began)


def measure_cold(arena: Arena, names: Iterable[str], rounds: int) -> Samples:
    """Time the first launch of fresh processes, which have imported torch and the launcher."""
    samples: Samples = {name: [] for name in names if name in COLD}
    for number in range(rounds):
        for name, taken in samples.items():
            contestant = Contestant(arena, name)
            contestant.await_ready()
            taken.append(sample(contestant.launch("all_reduce")))
            contestant.close()
        tell(f"cold launches: {number + 1} of {rounds} rounds")
    return samples


def warm_up(team: Team, cold: Samples) -> None:
    """Have everybody launch once, which is one more sample of a first launch."""
    for name in list(team.members):
        try:
            cold.setdefault(name, []).append(sample(team.launch(name, "all_reduce")))
        except (ContestantEndedError, LaunchFailedError, StillRunningError) as error:
            tell(f"{name} cannot launch: {error}")
            team.drop(name, "cannot launch here")
            continue
        tell(f"first launch by {name}: {show_time(cold[name][-1].returned)}")
    if "bare fork" in team.members:
        team.launch("bare fork", "first_step")  # reads the compiler from the disk, for everybody


def measure_warm(team: Team, workload: str, rounds: int) -> Samples:
    """Time one workload, in turn."""
    samples: Samples = {name: [] for name in team.members}
    for number in range(rounds):
        for name, taken in samples.items():
            for _ in range(1 if WAYS[name].fresh else FAST_LAUNCHES[workload]):
                taken.append(sample(team.launch(name, workload)))
        tell(f"{workload}: {number + 1} of {rounds} rounds")
    return samples


def measure_growth(team: Team, rounds: int) -> dict[int, Samples]:
    """Time the all-reduce with more and more ranks."""
    growth: dict[int, Samples] = {}
    for number in range(rounds):
        for ranks in SIZES:
            for name in growing(team, ranks, number):
                taken = growth.setdefault(ranks, {}).setdefault(name, [])
                taken.append(sample(team.launch(name, "all_reduce", ranks=ranks)))
        tell(f"growth: {number + 1} of {rounds} rounds")
    return growth


def growing(team: Team, ranks: int, number: int) -> list[str]:
    """Name the ways that launch so many ranks in a round."""
    names = [name for name in team.members if ranks in GROWTH.get(name, ())]
    return [name for name in names if number < SLOW_GROWTH_ROUNDS or not WAYS[name].fresh]


# ------------------------------------------------------------------------------------ the tables


def median_of(samples: Sequence[Sample]) -> float | None:
    """Compute the median time until the caller had the value."""
    return median([taken.returned for taken in samples])


def times_faster(samples: Samples, name: str, reference: str) -> float | None:
    """Say how many times faster one way is than another."""
    own, other = median_of(samples.get(name, [])), median_of(samples.get(reference, []))
    return None if own is None or other is None else other / own


def show_ratio(ratio: float | None) -> str:
    """Write how many times faster something is."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def row_of(samples: Samples, name: str) -> list[str]:
    """Write what was measured of one way: median, range, time in the rank and the ratios."""
    taken = samples[name]
    return [
        show_time(median_of(taken)),
        show_range([one.returned for one in taken]),
        show_time(median([one.in_rank for one in taken])),
        *(show_ratio(times_faster(samples, name, reference)) for reference in REFERENCES),
    ]


def print_launches(warm: Samples, cold: Samples, team: Team) -> None:
    """Print the launches to a returned all-reduce."""
    header = ["two ranks", "median", "range", "in rank", *(f"vs {name}" for name in REFERENCES)]
    header += ["first launch", "imports"]
    rows = [
        [
            *(name, *row_of(warm, name)),
            *(show_time(median_of(cold[name])), show_imports(team, name)),
        ]
        for name in warm
    ]
    rows += absent_rows(team, len(header))
    print_table(
        "From the call to the returned all-reduce (vs: how many times faster than)", header, rows
    )


def show_imports(team: Team, name: str) -> str:
    """Write how long the imports of the launching program took, where it has any."""
    return show_time(team.members[name].imports) if WAYS[name].modules else "-"


def absent_rows(team: Team, width: int) -> list[list[str]]:
    """Write a row for each way that cannot be measured here."""
    return [[name, why, *[""] * (width - 2)] for name, why in team.missing.items()]


def print_steps(samples: Samples, team: Team) -> None:
    """Print the launches to the first step of DDP; a launcher may have learned from the first."""
    header = ["two ranks", "median", "range", "in rank", *(f"vs {name}" for name in REFERENCES)]
    header += ["first launch"]
    later = {name: taken[1:] or taken for name, taken in samples.items()}
    rows = [[name, *row_of(later, name), show_time(samples[name][0].returned)] for name in samples]
    rows += absent_rows(team, len(header))
    print_table(
        "From the call to the returned loss of the first DDP step (vs: times faster than)",
        header,
        rows,
    )


def print_growth(growth: dict[int, Samples]) -> None:
    """Print the launches with more and more ranks."""
    names = [name for name in GROWTH if any(name in samples for samples in growth.values())]
    rows = [
        [str(ranks), *(show_growth(samples.get(name, [])) for name in names)]
        for ranks, samples in growth.items()
    ]
    print_table("From the call to the returned all-reduce of more ranks", ["ranks", *names], rows)


def show_growth(samples: Sequence[Sample]) -> str:
    """Write median and range."""
    if not samples:
        return "-"
    return f"{show_time(median_of(samples))} ({show_range([one.returned for one in samples])})"


def judge(warm: Samples) -> list[Target]:
    """Compare a warm launch with the targets of the design."""
    fork = times_faster(warm, "bare fork", "ddpkit auto")
    targets = [
        Target(
            "a warm launch takes at most twice a bare fork's time:",
            f"{show_ratio(fork)} its time",
            None if fork is None else fork <= 2,
        )
    ]
    for reference in ("mp.spawn", "torchrun"):
        ratio = times_faster(warm, "ddpkit auto", reference)
        targets.append(
            Target(
                f"a warm launch is at least 20x faster than {reference}:",
                show_ratio(ratio),
                None if ratio is None else ratio >= 20,
            )
        )
    return targets


# -------------------------------------------------------------------------------------- the whole


def as_record(samples: Samples) -> dict[str, list[dict[str, float]]]:
    """Turn samples into what JSON can hold."""
    return {name: [vars(one) for one in taken] for name, taken in samples.items()}


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    args = make_parser(__doc__, ROUNDS).parse_args()
    machine = describe_machine()
    with open_arena() as arena:
        cold = measure_cold(arena, args.only, args.rounds - 1)  # warming up is one more
        team = Team(arena, args.only)
        warm_up(team, cold)
        warm = measure_warm(team, "all_reduce", args.rounds)
        steps = measure_warm(team, "first_step", args.rounds)
        growth = measure_growth(team, args.rounds)
    print_machine(machine)
    print(*team.notes(), sep="\n", end="")
    print_launches(warm, cold, team)
    print_steps(steps, team)
    print_growth(growth)
    targets = judge(warm)
    print_targets(targets)
    record = {
        "benchmark": "launch",
        "machine": machine,
        "rounds": args.rounds,
        "notes": team.notes(),
        "not_measured": team.missing,
        "imports": {name: member.imports for name, member in team.members.items()},
        "cold": as_record(cold),
        "warm": as_record(warm),
        "first_step": as_record(steps),
        "growth": {str(ranks): as_record(samples) for ranks, samples in growth.items()},
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
