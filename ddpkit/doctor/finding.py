"""What the doctor says about one thing that it has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "note", "problem"]

Severity = Literal["problem", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what to do about it."""

    id: str
    """Short name that stays the same, such as `port-busy`."""
    severity: Severity
    """A `problem` makes programs fail, hang or be slow. A `note` is only good to know."""
    message: str
    """What was found, and what comes of it."""
    remedy: str
    """What to do."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What it was concluded from."""


def problem(id: str, message: str, remedy: str, **evidence: Any) -> Finding:
    """Return a finding that makes the exit status 1.

    Args:
        id: Its short name.
        message: What was found.
        remedy: What to do.
        **evidence: What it was concluded from.

    Example:
        >>> problem("port-busy", "Port 80 is taken.", "Use another.", port=80).severity
        'problem'
    """
    return Finding(id, "problem", message, remedy, evidence)


def note(id: str, message: str, remedy: str, **evidence: Any) -> Finding:
    """Return a finding that is only good to know.

    Args:
        id: Its short name.
        message: What was found.
        remedy: What to do.
        **evidence: What it was concluded from.

    Example:
        >>> note("one-thread", "There is one thread.", "Use more.").severity
        'note'
    """
    return Finding(id, "note", message, remedy, evidence)
