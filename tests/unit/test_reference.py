"""The reference is what its script makes, and has everything that is public."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ddpkit
from docs import build_reference

PACKAGE = Path(ddpkit.__file__).parent
PRIVATE = {"DDPKIT_RANK_PID"}  # written by a launch for its own ranks
FAMILIES = (
    *("DDPKIT", "RANK", "WORLD", "LOCAL", "MASTER", "GROUP", "NODE", "TORCHELASTIC", "PET"),
    *("SLURM", "OMPI", "PMI", "PMIX", "MPI", "I_MPI", "OMP", "GLOO", "NCCL", "PYTORCH", "TORCH"),
)


def test_the_reference_is_up_to_date() -> None:
    text = build_reference.TARGET.read_text(encoding="utf-8")
    assert text == build_reference.build(), "run: python docs/build_reference.py"


def test_it_has_every_public_name() -> None:
    names = [name for names in build_reference.GROUPS.values() for name in names.split()]
    assert sorted(names) == ddpkit.__all__


def variables_in(text: str) -> Iterator[str]:
    for name in re.findall(r"[\"']([A-Z][A-Za-z0-9_]*[A-Za-z0-9])[\"']", text):
        if name == "RANK" or name.startswith(tuple(f"{each}_" for each in FAMILIES)):
            yield name


def test_it_has_every_variable_that_is_read() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if "doctor" not in path.parts]
    found = {name for path in sources for name in variables_in(path.read_text())}
    listed = {name for names in build_reference.VARIABLES for name in names.split()}
    assert found - PRIVATE == listed


# ----------------------------------------------------------------------------------- how it is made


def simple(value: int) -> int:
    """Do nothing."""
    return value


def options(first: str, /, *values: int, wanted: bool = False, **others: str) -> None:
    """Do nothing."""


def only_named(*, wanted: list[int] | None = None, end: str = "\n") -> Iterator[int]:
    """Do nothing."""
    yield from wanted or []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (simple, "f(value: int) -> int"),
        (
            options,
            "f(first: str, /, *values: int, wanted: bool = False, **others: str) -> None",
        ),
        (only_named, "f(*, wanted: list[int] | None = None, end: str = '\\n') -> Iterator[int]"),
    ],
)
def test_signatures(function: Callable[..., object], expected: str) -> None:
    assert build_reference._signature("f", function) == expected


def test_annotations_are_those_of_the_source() -> None:
    # What they evaluate to is written differently by different versions of Python.
    def evaluated(value: object) -> None:
        """Do nothing."""

    evaluated.__annotations__["value"] = object
    with pytest.raises(TypeError, match="lacks"):
        build_reference._signature("f", evaluated)


DOCSTRING = """Do it.

More of it.

Args:
    first: What comes
        first.
    **others: Options:

        - one: The first.
          Still.

Returns:
    It.

Example:
    >>> 1
    1

    With two:

    >>> print("a\\n")
    a
    <BLANKLINE>
"""

RENDERED = """Do it.

More of it.
**Arguments**
- `first`: What comes
  first.
- `**others`: Options:

  - one: The first.
    Still.
**Returns**
It.
**Example**
```pycon
>>> 1
1
```
With two:
```pycon
>>> print("a\\n")
a
<BLANKLINE>
```"""


def test_docstrings() -> None:
    text = "\n".join(build_reference._docstring(DOCSTRING))
    assert "\n".join(line.rstrip() for line in text.splitlines()) == RENDERED
