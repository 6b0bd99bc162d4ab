"""What tests need that fork: with torch 2.6 a process that has computed can no longer be forked."""

import pytest
import torch
from torch.torch_version import TorchVersion

from ddpkit.launch import forksafe

# Its own OpenMP has no way to end its threads for a moment, so forkserver starts the ranks.
_CAN_FORK = TorchVersion(torch.__version__) >= "2.7"
_REASON = "the OpenMP of torch 2.6 cannot be paused, so its ranks are no forks"

needs_fork = pytest.mark.skipif(not _CAN_FORK, reason=_REASON)
"""For tests that ask for forks, or patch what the ranks take over by them."""

FORK = pytest.param("fork", marks=needs_fork)
"""Start method, as a parameter of tests."""


def prepare_fork() -> None:
    """Make this process ready to be forked, which has to succeed, or skip the test."""
    reason = forksafe.prepare_fork()
    if reason is not None and not _CAN_FORK:
        pytest.skip(_REASON)
    assert reason is None
