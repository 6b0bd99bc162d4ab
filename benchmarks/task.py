"""What the processes of a benchmark know of each other; torch is not imported here.

The harness and torchrun's own caller need no torch, and one that imports it takes seconds to start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RESULT_FILE = "result.json"
FAILED_FILE = "failed"
"""Holds the monotonic time of a failure that was made on purpose."""
READY_FILE = "ready-"
"""With the rank after it: the rank is where it is to be when its parent gets a signal."""
FAILING_RANK = 1


class Task(NamedTuple):
    """What one launch does; not a dataclass, because Fabric refuses frozen ones as arguments."""

    workload: str
    ranks: int
    folder: str
    """An empty folder for the files of this launch."""

    def read_result(self) -> dict[str, float]:
        """Read what rank 0 has written, in the launching process."""
        result: dict[str, float] = json.loads((Path(self.folder) / RESULT_FILE).read_text())
        return result

    def read_failure_time(self) -> float | None:
        """Read when the failure was made, None when it did not come to that."""
        path = Path(self.folder) / FAILED_FILE
        return float(path.read_text()) if path.exists() else None


class TrainingError(Exception):
    """An exception as users write them: it has attributes, and pickle alone cannot rebuild it.

    Pickle calls the class with `args`, the one message, and the constructor takes two arguments.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step = step
        self.reason = reason


# The arguments of the exceptions that are raised on purpose.
STEP, REASON = 17, "the loss is not finite"
