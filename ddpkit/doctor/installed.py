"""What is installed, by the files and by the package metadata. Without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit.doctor.facts import Installation

_RECORDED = ("ddpkit", "torch")
_NEEDED = ("torch", "cloudpickle", "typing_extensions")


def read_installation() -> Installation:
    """Find out what is installed."""
    folder = Path(__file__).resolve().parents[1]
    return Installation(
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        ddpkit=own_version(),
        folder=str(folder),
        recorded={name: recorded_version(name) for name in _RECORDED},
        copies=find_copies(sys.path, folder),
        missing=tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None),
    )


def own_version() -> str:
    """Return the version of the ddpkit that runs, whatever is installed."""
    # The package stands on all of its modules, so that none of them imports it.
    return str(sys.modules["ddpkit"].__version__)


def recorded_version(name: str) -> str | None:
    """Return the version of a distribution by its metadata, None where there is none.

    Args:
        name: Name of the distribution.

    Example:
        >>> recorded_version("surely-not-installed") is None
        True
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_copies(search_path: Sequence[str], folder: Path) -> tuple[str, ...]:
    """List the other installations of ddpkit on the search path.

    Args:
        search_path: Folders in which modules are looked for.
        folder: The one that is imported.
    """
    found = [(Path(entry or ".") / "ddpkit").resolve() for entry in search_path]
    others = [path for path in found if path != folder and (path / "__init__.py").is_file()]
    return tuple(str(path) for path in dict.fromkeys(others))
