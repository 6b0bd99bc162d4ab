"""A long sleep that signals are handled in."""

import time


def sleep_long() -> None:
    """Sleep for ten minutes, in steps.

    Python handles signals between its own operations and when a sleep is interrupted. One that
    arrives after the last operation and just before the sleep is handled when the sleep is over.
    """
    for _ in range(12_000):
        time.sleep(0.05)
