"""Code blocks of the documentation, and what tests do with each of them.

A comment in front of a block, which readers do not see, says how it is tested:

    <!-- test: file train.py -->          it is saved as this file, and later blocks use it
    <!-- test: patch train.py -->         a diff, which is applied to this file
    <!-- test: same train.py -->          it is what this file holds now
    <!-- test: run -->                    commands, one a line, which must succeed
    <!-- test: run fails -->              which must fail; `slow` leaves them to the drills, as it
                                          is with torchrun in any case
    <!-- test: prints -->                 what the last command has printed; digits may differ, and
                                          `...` stands for anything
    <!-- test: prints mixed -->           the same; lines of different ranks come in any order
    <!-- test: ranks NAME -->             run on two ranks, with the names of this context
    <!-- test: by FILE::TEST -->          run, or checked, by another test
    <!-- test: not run, because ... -->   why not

The first five are what a person does who reads a page from its beginning, in one folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MADE = "docs/reference.md"  # from docstrings, whose examples are run where they stand
WRITTEN = tuple(page for page in PAGES if page != MADE)

PLAYED = ("file", "patch", "same", "run", "prints")
VERBS = (*PLAYED, "ranks", "by", "not")

_FENCE = re.compile(r"(\s*)(```+|~~~+)\s*(\w*)\s*")
_TREATMENT = re.compile(r"<!-- test: (\w+) ?(.*) -->")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Block:
    """One block of code."""

    page: str
    line: int
    language: str
    text: str
    verb: str
    """How it is tested; "" if nothing says so."""
    argument: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def find_blocks(text: str, page: str = "") -> list[Block]:
    """Find the blocks of a page."""
    return list(_blocks(text, page))


def _blocks(text: str, page: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        if fence is None:
            number += 1
            continue
        treatment = _TREATMENT.fullmatch(lines[number - 1].strip()) if number else None
        verb, argument = treatment.groups() if treatment else ("", "")
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[2])
        code = "".join(f"{line.removeprefix(fence[1])}\n" for line in lines[number + 1 : end])
        yield Block(page, number + 1, fence[3], code, verb, argument)
        number = end + 1


def without_blocks(text: str) -> str:
    """Return the prose of a page."""
    return re.sub(r"^\s*(```+|~~~+).*?^\s*\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def apply_patch(text: str, diff: str) -> str:
    """Change a text as a diff says; lines that begin with @@ part places that are far apart."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = [line if line.strip() else " \n" for line in hunk.splitlines(keepends=True)]
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        if text.count(before) != 1 and before:
            raise AssertionError(f"this is not once in the file:\n{before}")
        text = text.replace(before, after) if before else text
    return text


def shows(expected: str, printed: str, *, mixed: bool = False) -> bool:
    """Tell whether a program has printed what a page shows, whatever the numbers."""
    wanted, got = _normalised(expected), _normalised(printed)
    if mixed:
        wanted, got = sorted(wanted), sorted(got)
    parts = [re.escape(part) for part in "\n".join(wanted).split("...")]
    return re.fullmatch(".*?".join(parts), "\n".join(got), re.DOTALL) is not None


def _normalised(text: str) -> list[str]:
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in text.strip().splitlines()]
    return [_NUMBER.sub("0", line) for line in lines]
