"""Which attempt to open a group a rank belongs to.

A store serves many attempts in a row, and what was written there for one of them stays. To count
them tells nothing: a rank that comes late, where all try again until they meet, has made fewer; and
torchrun's agents count the restarts that follow a failure which they have seen themselves, and none
for a node that leaves or comes. Rank 0 therefore gives its attempt a name, and answers all ranks
that ask for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

from torch.distributed import Store

_QUESTIONS = "attempt/questions"
_ANSWERS = "attempt/answers"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class AttemptNamer:
    """Rank 0's part: it names its attempt, and tells the name to whoever asks.

    A question that is as old as an earlier attempt is answered too, and nobody reads that.

    Args:
        store: What the ranks of all attempts share.
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
    store: Store,
    deadline: float,
    meanwhile: Callable[[], None] = lambda: None,
    past: Collection[str] = (),
) -> str | None:
    """Ask rank 0 for the name of the attempt that it and this rank belong to.

    Args:
        store: What the ranks of all attempts share.
        deadline: When to give up, in the time of `time.monotonic`.
        meanwhile: Called again and again while there is no answer.
        past: Names of attempts that are over for this rank, although rank 0 may not know it yet.

    Returns:
        The name; None if rank 0 has not answered in time.
    """
    name = _ask(store, deadline, meanwhile)
    while name in past:
        time.sleep(_LONGEST_PAUSE)
        name = _ask(store, deadline, meanwhile)
    return name


def _ask(store: Store, deadline: float, meanwhile: Callable[[], None]) -> str | None:
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
