"""Ranks that take their variables for set by hand: no parent and no agent of theirs is known."""

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from ddpkit.group import set_secret

T = TypeVar("T")


def with_hand_set_variables(function: Callable[[], T]) -> Callable[[], T]:
    """Make a function for `run_ranks` whose ranks have variables as set by hand.

    Rank 0 then serves the store itself, and its process is not known as a rank of ddpkit's.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def rank() -> T:
        set_secret(b"")
        for name in ("DDPKIT_RANK_PID", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"):
            del os.environ[name]
        os.environ["MASTER_PORT"] = str(port)
        return function()

    return rank
