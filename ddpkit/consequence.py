"""Is an exception a cause, or likely a consequence of the end of another rank."""

from __future__ import annotations

import re
import traceback

from ddpkit.errors import GroupError, PeerError

CONSEQUENCES = frozenset({"transport", "peer"})
"""Kinds of exception that likely have their cause in another rank."""

UNEVEN = (
    "Look for a break, return or continue that not every rank takes, and for loops of different "
    "lengths."
)
"""What to do where a collective has lost a rank that ended in order."""

# Where an error of a collective surfaces: in torch.distributed, in DDP, or in the backward pass
# that DDP reduces in. Most texts are no evidence, for gloo has many.
_TRANSPORT_PLACES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/autograd/graph.py",
    "ddpkit/control.py",
)

# But an asynchronous collective surfaces where somebody waits for it, in any file. gloo begins its
# texts with the place in its own sources.
_SOURCES_OF_GLOO = re.compile(r"\bgloo/[\w/]+\.(cc|h):\d+\]")


def classify(error: BaseException) -> str:
    """Tell a cause from what is likely a consequence of another rank's end."""
    if isinstance(error, PeerError):
        return "peer"
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, RuntimeError) and _is_transport(error):
        return "transport"
    return "group" if isinstance(error, GroupError) else "exception"


def _is_transport(error: RuntimeError) -> bool:
    if isinstance(error, GroupError):
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        return any(
            frame.filename.replace("\\", "/").endswith("ddpkit/control.py") for frame in frames
        )
    if type(error).__module__ not in ("builtins", "torch", "torch.distributed", "torch._C"):
        return False
    if _SOURCES_OF_GLOO.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        place in frame.filename.replace("\\", "/")
        for frame in frames
        for place in _TRANSPORT_PLACES
    )


def is_likely_consequence(error: BaseException) -> bool:
    """Tell whether an exception of this rank likely has its cause in another rank."""
    return classify(error) in CONSEQUENCES
