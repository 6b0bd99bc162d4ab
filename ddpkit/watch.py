"""The end of a rank that nobody watches and that waits for a rank that is gone.

Under ddpkit's own launch the parent stops the ranks, and under torchrun its agent does. Where SLURM
or MPI started them, or the variables were set by hand, there is neither, and a collective need not
notice that a peer has died: NCCL waits for its time-out. So a thread in each rank looks whether the
others are there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import threading
import time

from ddpkit.control import Channel
from ddpkit.errors import GroupError, PeerError

_EVERY = 1.0
_GRACE = 5.0
_LOOK_EVERY = 0.05
_ENDED_STATUS = 1
_SERVER = 0  # the rank that serves the store where nobody else watches
_STDERR = 2  # the descriptor, for what stands in its place may not be a file

_came_back = threading.Event()


def _note_that_it_came_back(_: object) -> int:
    """What the interpreter runs in the main thread, as soon as that runs Python again."""
    _came_back.set()
    return 0


def end_process(text: str) -> None:
    """End this process, whose main thread cannot, with a text and the stacks on standard error."""
    try:
        os.write(_STDERR, f"{text}\n".encode())
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    finally:
        os._exit(_ENDED_STATUS)


_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_note_that_it_came_back)


def check_peers(channel: Channel, *, only_ends: bool = False) -> None:
    """Raise `PeerError` if a rank has ended that has not left in order, as far as is seen here.

    Args:
        channel: The side channel of a world whose rank 0 serves the store.
        only_ends: Whether a rank does not count that has left by an exception and whose process
            runs on.
    """
    try:
        channel.absent([_SERVER])  # reads who that is, for when its store does not answer
        channel.check_ends() if only_ends else channel.check_processes()
    except GroupError:
        # A store that is silent says nothing of the ranks, one that is gone does: of rank 0.
        channel.check_server(_SERVER)


class PeerWatch:
    """Ends this process when a peer has gone and its main thread is stuck in a blocked call.

    A main thread that runs Python is left alone: its next call meets the error by itself.

    Args:
        channel: The side channel of the world.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpkit-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; the group is about to be closed."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            try:
                check_peers(self._channel, only_ends=True)
            except PeerError as error:
                if self._is_stuck():
                    end_process(f"{error}\nThis rank is ended, for it is stuck in this call:")
            if self._stopped.wait(_EVERY):
                return

    def _is_stuck(self) -> bool:
        """Tell whether the main thread stays away from the interpreter for the whole grace."""
        deadline = time.monotonic() + _GRACE
        _came_back.clear()
        if ctypes.pythonapi.Py_AddPendingCall(_PENDING_CALL, None) != 0:
            return False  # it could not be asked
        while time.monotonic() < deadline:
            if self._stopped.wait(_LOOK_EVERY) or _came_back.is_set():
                return False
        return True
