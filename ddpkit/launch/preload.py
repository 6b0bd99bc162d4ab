"""What a forkserver imports once, so that its ranks need not; nothing else imports this."""

import atexit
import os

# DistributedDataParallel imports the compiler, 1.2 s in every rank otherwise.
import torch._dynamo
import torch.distributed
import torch.nn.parallel  # noqa: F401

import ddpkit.launch.worker

for _name in ddpkit.__all__:
    getattr(ddpkit, _name)  # which imports it


def _end_at_once(forkserver: int) -> None:
    """Skip the interpreter's own end, which takes seconds after these imports.

    The program has gone when a forkserver ends, and nothing in it is left to be saved.
    """
    if os.getpid() == forkserver:
        os._exit(0)


atexit.register(_end_at_once, os.getpid())
