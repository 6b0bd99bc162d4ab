"""Which attempt of a restarted launch a rank belongs to.

torchrun's agents count the restarts that follow a failure which they have seen themselves, and none
for a node that leaves or comes. So the counts of two nodes differ, although their ranks belong to
one attempt, while the store stays from one attempt to the next, with all that was written there.
Rank 0 therefore gives its attempt a name, and answers all ranks that ask for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed import Store

_QUESTIONS = "attempt/questions"
_ANSWERS = "attempt/answers"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class AttemptNamer:
    """Rank 0's part: it names its attempt, and tells the name to whoever asks.

    A question that is as old as an earlier attempt is answered too, and nobody reads that.

    Args:
        store: What the ranks of all attempts share, of those that open their n-th group.
    """

    def __init__(self, store: Store) -> None:
        self.name: str = secrets.token_hex(8)
        self._store = store
        self._answered: set[bytes] = set()

    def answer(self) -> None:
        """Answer what has been asked since the last call; it does not wait."""
        if not self._store.check([_QUESTIONS]):
            return
        for question in set(self._store.get(_QUESTIONS).split()) - self._answered:
            self._store.set(_answer_key(question.decode(errors="replace")), self.name)
            self._answered.add(question)


def ask_for_attempt(
    store: Store, deadline: float, meanwhile: Callable[[], None] = lambda: None
) -> str | None:
    """Ask rank 0 for the name of the attempt that it and this rank belong to.

    Args:
        store: What the ranks of all attempts share, of those that open their n-th group.
        deadline: When to give up, in the time of `time.monotonic`.
        meanwhile: Called again and again while there is no answer.

    Returns:
        The name; None if rank 0 has not answered in time.
    """
    question = secrets.token_hex(8)
    store.append(_QUESTIONS, f"{question} ")  # type: ignore[attr-defined]  # missing in torch's stub
    answer = _answer_key(question)
    pause = _FIRST_PAUSE
    while not store.check([answer]):
        if time.monotonic() > deadline:
            return None
        meanwhile()
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    name = store.get(answer).decode()
    store.delete_key(answer)
    return name


def _answer_key(question: str) -> str:
    return f"{_ANSWERS}/{question}"
