"""What the counting program has noted: which samples were trained on, in which attempt."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launcher.counting_program import SAMPLES, STEPS

PROGRAM = str(Path(__file__).with_name("counting_program.py"))


@dataclass(frozen=True)
class Seen:
    """One step of one rank."""

    attempt: int
    host: str
    rank: int
    world_size: int
    first_step: int
    """The step that the checkpoint was at that its attempt began with."""
    epoch: int
    step: int
    samples: tuple[int, ...]


def read_notes(folder: Path) -> list[Seen]:
    """Read what all ranks of all attempts have noted, attempt by attempt, in the order of steps."""
    lines = [line for file in folder.glob("seen-*") for line in file.read_text().splitlines()]
    notes = []
    for line in lines:
        values = {name.replace(" ", "_"): value for name, value in json.loads(line).items()}
        notes.append(Seen(**{**values, "samples": tuple(values["samples"])}))
    return sorted(notes, key=lambda seen: (seen.attempt, seen.step, seen.rank))


def attempts_in(notes: Sequence[Seen]) -> list[list[Seen]]:
    """Split notes by attempt."""
    numbers = sorted({seen.attempt for seen in notes})
    return [[seen for seen in notes if seen.attempt == number] for number in numbers]


def what_counts(notes: Sequence[Seen]) -> list[Seen]:
    """Keep of each attempt what the next one did not repeat, for it went on from a checkpoint."""
    attempts = attempts_in(notes)
    ends = [following[0].first_step for following in attempts[1:]]
    kept = [
        seen
        for attempt, end in zip(attempts, [*ends, None], strict=True)
        for seen in attempt
        if end is None or seen.step < end
    ]
    return sorted(kept, key=lambda seen: (seen.step, seen.rank))


def check_complete(notes: Sequence[Seen], epochs: int) -> None:
    """Check that what counts is each sample of each epoch, once, and each step on every rank."""
    counted = what_counts(notes)
    for epoch in range(epochs):
        samples = Counter(one for seen in counted if seen.epoch == epoch for one in seen.samples)
        assert samples == Counter(range(SAMPLES)), f"epoch {epoch}"
    for step in range(epochs * STEPS):
        of_step = [seen for seen in counted if seen.step == step]
        assert [seen.rank for seen in of_step] == list(range(of_step[0].world_size)), of_step


def check_repeated(notes: Sequence[Seen]) -> None:
    """Check that a step that is made again sees the samples that it saw before."""
    for step in {seen.step for seen in notes}:
        by_attempt: dict[int, list[int]] = {}
        for seen in notes:
            if seen.step == step:
                by_attempt.setdefault(seen.attempt, []).extend(seen.samples)
        last = sorted(by_attempt[max(by_attempt)])
        # A rank that was ended may not have noted the last step that it took part in.
        assert all(set(samples) <= set(last) for samples in by_attempt.values()), by_attempt


def await_step(folder: Path, step: int, world_size: int, timeout: float = 100.0) -> None:
    """Wait until a rank of an attempt with so many ranks has made a step."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        # A line that is being written is not complete yet.
        lines = [line for file in folder.glob("seen-*") for line in whole_lines(file)]
        notes = [json.loads(line) for line in lines]
        if any(note["step"] >= step and note["world_size"] == world_size for note in notes):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} of a world of {world_size} was not reached in {timeout} s")


def whole_lines(file: Path) -> list[str]:
    text = file.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
