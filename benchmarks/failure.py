"""See what becomes of a launch whose rank fails, and of the ranks when their parent gets a signal.

How long the caller waits for the exception, what it learns from it, and which processes are left.
See README.md for what the columns mean.

    python benchmarks/failure.py --json failure.json | tee failure.txt
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from contestants import WAYS
from harness import (
    START_BOUND,
    Arena,
    ContestantEndedError,
    Reply,
    StillRunningError,
    Target,
    Team,
    describe_machine,
    find_marked,
    kill_marked,
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
from task import FAILING_RANK, READY_FILE, REASON

ROUNDS = 2
BOUND = 25.0
COUNT_AFTER = 10.0
"""Seconds after a signal to the parent at which the processes that are left are counted."""
STARTING = 2
"""Launches that may start at a time while others only wait; nothing is timed then."""
EARLY = 1.0
SETTLE = 0.5
RAISE_TARGET = 0.3

_RANK = re.compile(rf"\b(?:rank|process)\W*{FAILING_RANK}\b", re.IGNORECASE)
_SIGNAL = re.compile(r"SIGKILL|signal 9\b|exit ?code\W*-9\b", re.IGNORECASE)
_USERS_LINE = "in diverge"
_VERDICT = "Root Cause"
"""Where torch's elastic agent says which of several failures came first."""


# ------------------------------------------------------------------------ the rank fails: pure part


@dataclass(frozen=True)
class Incident:
    """What came of one launch with a rank that fails."""

    seconds: float | None
    """From the failure to the exception in the caller; None when there was none in time."""
    outcome: str
    """Type of the exception, or why there is none."""
    learned: dict[str, bool] = field(default_factory=dict)
    text: str = ""
    """What the caller would see printed."""


def learn_from_raise(error: dict[str, Any]) -> dict[str, bool]:
    """Tell what a caller knows after a rank has raised."""
    text = error["text"]
    return {
        "type": error["same_type"],
        "attributes": error["same_attributes"],
        "rank": _RANK.search(text) is not None,
        "user's line": _USERS_LINE in text,
        "root cause": _names_root_cause(text),
    }


def _names_root_cause(text: str) -> bool:
    """Tell whether the failure that caused the other one is what the caller is told of.

    Text that contains both, and calls one of them the cause, is taken by its word.
    """
    _, verdict, named = text.rpartition(_VERDICT)
    return _RANK.search(named) is not None if verdict else REASON in text


def learn_from_kill(error: dict[str, Any]) -> dict[str, bool]:
    """Tell what a caller knows after a rank was killed."""
    text = error["text"]
    return {
        "killed rank": _RANK.search(text) is not None,
        "SIGKILL": _SIGNAL.search(text) is not None,
    }


def learn_from_plain_raise(error: dict[str, Any]) -> dict[str, bool]:
    """Tell whether a ValueError has arrived as one."""
    return {"ValueError": error["same_type"]}


LESSONS = {
    "diverge": learn_from_raise,
    "vanish": learn_from_kill,
    "diverge_plainly": learn_from_plain_raise,
}
ROUNDS_OF = {"diverge_plainly": 1}
"""Workloads that need not be repeated, because no time is of interest."""
_TEXT_LIMIT = 3000


def incident_of(reply: Reply) -> Incident:
    """Read off a reply what a failure has come to."""
    failed_at = reply.task.read_failure_time()
    if reply.error is None:
        return Incident(None, "returned as if nothing had happened")
    if failed_at is None:
        return Incident(None, f"failed too early: {reply.error['type']}", text=reply.error["text"])
    learned = LESSONS[reply.task.workload](reply.error)
    seconds = reply.ended - failed_at
    return Incident(seconds, reply.error["type"], learned, reply.error["text"][-_TEXT_LIMIT:])


# ------------------------------------------------------------------------ the rank fails: measuring

Incidents = dict[str, list[Incident]]


def measure_failures(team: Team, rounds: int) -> dict[str, Incidents]:
    """Let a rank of every contestant raise, and one be killed, in turn."""
    taken: dict[str, Incidents] = {
        workload: {name: [] for name in team.members} for workload in LESSONS
    }
    for number, workload in itertools.product(range(rounds), LESSONS):
        if number >= ROUNDS_OF.get(workload, rounds):
            continue
        for name, incidents in taken[workload].items():
            if all(incident.seconds is not None for incident in incidents):
                incidents.append(provoke(team, name, workload))
        tell(f"{workload}: {number + 1} of {rounds} rounds")
    return taken


def provoke(team: Team, name: str, workload: str) -> Incident:
    """Have one contestant launch what fails; one that hangs is replaced, and not asked again."""
    try:
        return incident_of(team.launch(name, workload, bound=BOUND))
    except StillRunningError:
        outcome = f"still running after {BOUND:.0f} s"
    except ContestantEndedError:
        outcome = "the calling process has ended"
    tell(f"{name}, {workload}: {outcome}")
    team.renew(name)
    return Incident(None, outcome)


# ------------------------------------------------------------------ the parent gets a signal


@dataclass(frozen=True)
class Scenario:
    """A signal to the parent alone, which was perhaps started with SIGINT ignored."""

    name: str
    sigint_ignored: bool = False

    def __str__(self) -> str:
        return f"{self.name}, SIGINT ignored" if self.sigint_ignored else self.name


SCENARIOS = [
    Scenario(name, ignored)
    for ignored in (False, True)
    for name in ("SIGINT", "SIGTERM", "SIGKILL")
]


HARMLESS = Scenario("SIGINT", sigint_ignored=True)
"""Here nothing is to happen: whoever started the parent has asked for that."""


@dataclass
class Aftermath:
    """What was seen after a signal to the parent; times are seconds from the signal."""

    before: int = 0
    """Processes just before the signal, the parent included."""
    parent_ended: float | None = None
    all_ended: float | None = None
    left_early: list[str] = field(default_factory=list)
    """What was left after the second that the design allows: pid, parent and command line."""
    left: list[str] = field(default_factory=list)
    """What was left when it was counted."""
    left_at_bound: list[str] = field(default_factory=list)
    problem: str | None = None

    def runs_on(self) -> bool:
        """Tell whether the signal has had no effect at all."""
        return self.parent_ended is None and len(self.left_at_bound) == self.before

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        if self.all_ended is not None and not self.left:
            return f"0 ({self.all_ended:.1f} s)"
        later = "" if self.all_ended is None else f", 0 at {self.all_ended:.0f} s"
        parent = " with parent" if (self.parent_ended or BOUND) >= COUNT_AFTER else ""
        return f"{len(self.left)}{parent}{later}"


class Trial:
    """One launch that is to be interrupted: rank 0 waits in a collective, rank 1 is asleep."""

    def __init__(self, arena: Arena, name: str, scenario: Scenario) -> None:
        self.name = name
        self.scenario = scenario
        self.mark = arena.new_mark()
        self.aftermath = Aftermath()
        self.done = False
        self._folder = arena.new_folder()
        self._started = time.monotonic()
        self._ready: float | None = None
        self._signalled: float | None = None
        self._looked = 0.0
        self._process = arena.start(
            *(self.mark, "hold", name, "stay", "2", self._folder),
            served=False,
            sigint_ignored=scenario.sigint_ignored,
        )

    @property
    def starting(self) -> bool:
        """Whether it still needs the processor."""
        return self._signalled is None

    def step(self, alive: list[psutil.Process]) -> None:
        """Go on as far as the time has come for it."""
        if self._signalled is not None:
            self._watch(alive, time.monotonic() - self._signalled)
        elif self._ready is None:
            self._await_ready()
        elif time.monotonic() > self._ready + SETTLE:
            self.aftermath.before = len(alive)
            self._process.send_signal(signal.Signals[self.scenario.name])
            self._signalled = time.monotonic()

    def close(self) -> None:
        """Kill what is left."""
        kill_marked(self.mark)
        self._process.wait()

    def _await_ready(self) -> None:
        if all((Path(self._folder) / f"{READY_FILE}{rank}").exists() for rank in (0, 1)):
            self._ready = time.monotonic()
        elif self._process.poll() is not None or time.monotonic() > self._started + START_BOUND:
            self.aftermath.problem = "did not start"
            self.done = True

    def _watch(self, alive: list[psutil.Process], seconds: float) -> None:
        ended = not alive or self._process.poll() is not None
        if ended and self.aftermath.parent_ended is None:
            self.aftermath.parent_ended = seconds
        if not alive:
            self.aftermath.all_ended = seconds
        if self._looked < EARLY <= seconds:
            self.aftermath.left_early = command_lines(alive)
        if self._looked < COUNT_AFTER <= seconds:
            self.aftermath.left = command_lines(alive)
        if seconds >= BOUND:
            self.aftermath.left_at_bound = command_lines(alive)
        self._looked = seconds
        self.done = not alive or seconds >= BOUND


def command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    """Say what processes are."""
    lines = []
    for process in processes:
        try:
            command = " ".join(process.cmdline())
            lines.append(f"{process.pid} of {process.ppid()}: {command}")
        except psutil.Error:  # it has just ended
            continue
    return lines


Aftermaths = dict[str, dict[str, Aftermath]]
"""By contestant and scenario."""


def measure_signals(arena: Arena, names: Sequence[str]) -> Aftermaths:
    """Interrupt every contestant in every scenario. Those that only wait overlap with others."""
    waiting = [(name, scenario) for scenario in SCENARIOS for name in names]
    total = len(waiting)
    active: list[Trial] = []
    found: Aftermaths = {name: {} for name in names}
    while waiting or active:
        if waiting and sum(trial.starting for trial in active) < STARTING:
            active.append(Trial(arena, *waiting.pop(0)))
        marked = find_marked(arena.name)
        for trial in active:
            trial.step(marked.get(trial.mark, []))
        for trial in [trial for trial in active if trial.done]:
            active.remove(trial)
            trial.close()
            found[trial.name][str(trial.scenario)] = trial.aftermath
            ended = total - len(waiting) - len(active)
            shown = show_aftermath(trial.scenario, trial.aftermath)
            tell(f"{ended}/{total} {trial.name}, {trial.scenario}: {shown}")
        time.sleep(0.1)
    return found


# ------------------------------------------------------------------------------------ the tables


def print_times(taken: dict[str, Incidents], missing: dict[str, str]) -> None:
    """Print how long the caller waited."""
    rows = [
        [name, *show_wait(taken["diverge"][name]), *show_wait(taken["vanish"][name])]
        for name in taken["diverge"]
    ]
    rows += [[name, why, "", "", ""] for name, why in missing.items()]
    header = ["two ranks", "raise", "range", "kill", "range"]
    print_table("From the failure of a rank to the exception in the caller", header, rows)


def show_wait(incidents: Sequence[Incident]) -> tuple[str, str]:
    """Write median and range, or what happened instead."""
    instead = next((one.outcome for one in incidents if one.seconds is None), None)
    if instead is not None:
        return instead, ""
    seconds = [one.seconds for one in incidents if one.seconds is not None]
    return show_time(median(seconds)), show_range(seconds)


def print_lessons(taken: dict[str, Incidents]) -> None:
    """Print what the caller learns."""
    lessons = {
        "diverge": ("type", "attributes", "rank", "user's line", "root cause"),
        "vanish": ("killed rank", "SIGKILL"),
    }
    header = ["two ranks", *itertools.chain(*lessons.values()), "what arrives", "for a ValueError"]
    rows = [
        [
            name,
            *(
                show_share([one.learned.get(lesson) for one in taken[workload][name]])
                for workload, names in lessons.items()
                for lesson in names
            ),
            *(show_outcomes(taken[workload][name]) for workload in ("diverge", "diverge_plainly")),
        ]
        for name in taken["diverge"]
    ]
    title = "What the caller learns of a rank that raised, and of one that was killed"
    print_table(title, header, rows)


def show_outcomes(incidents: Sequence[Incident]) -> str:
    """Write which exceptions have arrived, without their modules."""
    outcomes = [one.outcome.rpartition(".")[2] for one in incidents]
    return ", ".join(dict.fromkeys(outcomes))


def show_share(answers: Sequence[bool | None]) -> str:
    """Write whether something is so, or how often where that varies."""
    if not answers or None in answers:
        return "-"
    yes = sum(map(bool, answers))
    return {0: "no", len(answers): "yes"}.get(yes, f"{yes} of {len(answers)}")


def show_aftermath(scenario: Scenario, aftermath: Aftermath) -> str:
    """Write what is left; where nothing was to end, say that it is so."""
    if scenario == HARMLESS and aftermath.problem is None and aftermath.runs_on():
        return "all run on"
    return str(aftermath)


def print_aftermaths(found: Aftermaths) -> None:
    """Print how many processes were left."""
    if not found:
        return
    header = ["two ranks", *map(str, SCENARIOS)]
    rows = [
        [name, *(show_aftermath(one, cells[str(one)]) for one in SCENARIOS)]
        for name, cells in found.items()
    ]
    title = f"Processes left {COUNT_AFTER:.0f} s after a signal to the parent alone"
    print_table(title, header, rows)


# ----------------------------------------------------------------------------------- the targets


def judge(taken: dict[str, Incidents], found: Aftermaths) -> list[Target]:
    """Compare what was measured of ddpkit with what its design promises."""
    targets = []
    for name in (name for name in WAYS if name.startswith("ddpkit")):
        targets += [
            judge_wait(name, taken["diverge"].get(name, [])),
            judge_lessons(name, [one for each in taken.values() for one in each.get(name, [])]),
            judge_aftermath(name, found.get(name, {})),
        ]
    return targets


def judge_wait(name: str, incidents: Sequence[Incident]) -> Target:
    """Judge the time from a raise to the exception."""
    promise = f"{name}: a rank's exception is in the caller after at most {RAISE_TARGET} s:"
    shown = show_wait(incidents)[0]
    if not incidents:
        return Target(promise, shown, None)
    waited = median([BOUND if one.seconds is None else one.seconds for one in incidents])
    return Target(promise, shown, waited is not None and waited <= RAISE_TARGET)


def judge_lessons(name: str, incidents: Sequence[Incident]) -> Target:
    """Judge what the caller learns: everything that this script looks for, every time."""
    lost = {lesson for one in incidents for lesson, known in one.learned.items() if not known}
    lost |= {one.outcome for one in incidents if one.seconds is None}
    promise = f"{name}: the caller learns what failed, where and how:"
    if not incidents:
        return Target(promise, "-", None)
    return Target(promise, f"lost: {', '.join(sorted(lost)) or 'nothing'}", not lost)


def judge_aftermath(name: str, cells: dict[str, Aftermath]) -> Target:
    """Judge what signals to the parent leave; a signal that is ignored is to have no effect."""
    bad = [
        f"{scenario}: {aftermath}"
        for scenario, aftermath in cells.items()
        if not is_clean(scenario, aftermath)
    ]
    promise = f"{name}: no process is left {COUNT_AFTER:.0f} s after any signal to the parent:"
    if not cells:
        return Target(promise, "-", None)
    slowest = max(one.all_ended or 0.0 for one in cells.values())
    return Target(promise, "; ".join(bad) or f"all ended within {slowest:.1f} s", not bad)


def is_clean(scenario: str, aftermath: Aftermath) -> bool:
    """Tell whether a scenario has ended as it should."""
    if scenario == str(HARMLESS):
        return aftermath.runs_on() and aftermath.problem is None
    return aftermath.all_ended is not None and not aftermath.left


# -------------------------------------------------------------------------------------- the whole


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    parser = make_parser(__doc__, ROUNDS)
    parser.add_argument("--no-signals", action="store_true", help="leave the signals out")
    args = parser.parse_args()
    machine = describe_machine()
    with open_arena() as arena:
        team = Team(arena, args.only)
        taken = measure_failures(team, args.rounds)
        team.close()
        found = {} if args.no_signals else measure_signals(arena, list(team.members))
    print_machine(machine)
    print(*team.notes(), sep="\n", end="")
    print_times(taken, team.missing)
    print_lessons(taken)
    print_aftermaths(found)
    targets = judge(taken, found)
    print_targets(targets)
    record = {
        "benchmark": "failure",
        "machine": machine,
        "rounds": args.rounds,
        "notes": team.notes(),
        "not_measured": team.missing,
        "raise": as_record(taken["diverge"]),
        "kill": as_record(taken["vanish"]),
        "raise_value_error": as_record(taken["diverge_plainly"]),
        "signals": {
            name: {scenario: asdict(one) for scenario, one in cells.items()}
            for name, cells in found.items()
        },
        "targets": [vars(target) for target in targets],
    }
    write_record(args.json, record)


def as_record(incidents: Incidents) -> dict[str, list[dict[str, Any]]]:
    """Turn incidents into what JSON can hold."""
    return {name: [asdict(one) for one in taken] for name, taken in incidents.items()}


if __name__ == "__main__":
    main()
