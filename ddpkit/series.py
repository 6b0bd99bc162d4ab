"""Series of checkpoints: files of one folder whose names differ only in their last digits."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Numbered", "is_whole", "numbered", "older_members", "sorted_by_number"]

_LAST_DIGITS = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


@dataclass(frozen=True)
class Numbered:
    """The name of a file taken apart at its last digits."""

    before: str
    number: int
    after: str


def numbered(name: str) -> Numbered | None:
    """Take a name apart.

    Args:
        name: The name of a file, without folders.

    Returns:
        Its parts, or None if there is no digit in it but perhaps in its extension.

    Example:
        >>> numbered("run2-step0300.pt")
        Numbered(before='run2-step', number=300, after='.pt')
    """
    extension = Path(name).suffix
    if extension[1:].isdigit():  # as in "step.300"
        extension = ""
    match = _LAST_DIGITS.fullmatch(name.removesuffix(extension))
    return None if match is None else Numbered(match[1], int(match[2]), match[3] + extension)


def older_members(path: Path, keep: int) -> list[Path]:
    """Find the members of a series that have become superfluous.

    Higher numbers than that of the new member are left alone: after going back to an earlier
    checkpoint they are of another run, and the new one must not fall victim to them.

    Args:
        path: The newest member.
        keep: How many are kept, with the newest one.

    Returns:
        All but the `keep` highest of those up to the newest one.
    """
    own = numbered(path.name)
    if own is None:
        return []
    members = [
        (other.number, file.name, file)
        for file in path.parent.iterdir()
        if (other := numbered(file.name)) is not None
        and (other.before, other.after) == (own.before, own.after)
        and other.number < own.number
        and not file.is_dir()
    ]
    return [file for _, _, file in sorted(members, reverse=True)[keep - 1 :]]


def sorted_by_number(files: list[Path]) -> list[Path]:
    """Sort files by their numbers, the highest first; those without a number come last."""

    def key(file: Path) -> tuple[int, float, str]:
        parts = numbered(file.name)
        return (-1 if parts is None else parts.number), file.stat().st_mtime, file.name

    return sorted(files, key=key, reverse=True)


def is_whole(path: Path, *, verify: bool = False) -> bool:
    """Tell whether a file is an archive of `torch.save` that lacks nothing.

    Args:
        path: The file.
        verify: Whether the checksum of every part is computed, which reads the whole file; else
            only its structure is looked at.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                archive.open(name).close()  # looks for the header of the part
            has_data = any(name.endswith("/data.pkl") for name in names)
            return has_data and (not verify or archive.testzip() is None)
    except Exception:  # noqa: BLE001  # of a damaged archive, zipfile may make anything
        return False
