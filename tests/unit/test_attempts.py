import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from ddpkit.attempts import AttemptNamer, ask_for_attempt


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def ask(
    store: HashStore, meanwhile: Callable[[], None] = lambda: None, bound: float = 10
) -> str | None:
    return ask_for_attempt(store, time.monotonic() + bound, meanwhile)


def test_a_rank_gets_the_name_that_rank_0_gave(store: HashStore) -> None:
    namer = AttemptNamer(store)
    assert ask(store, namer.answer) == namer.name


def test_many_ranks_get_the_same_name_whenever_they_ask(store: HashStore) -> None:
    namer = AttemptNamer(store)
    names: list[str | None] = []
    ranks = [threading.Thread(target=lambda: names.append(ask(store))) for _ in range(5)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks):
        namer.answer()
    assert names == [namer.name] * 5
    assert ask(store, namer.answer) == namer.name


def test_each_attempt_has_a_name_of_its_own(store: HashStore) -> None:
    first = AttemptNamer(store)
    assert ask(store, first.answer) == first.name
    second = AttemptNamer(store)
    assert ask(store, second.answer) == second.name != first.name


def test_a_rank_does_not_take_the_answer_that_one_of_an_earlier_attempt_got(
    store: HashStore,
) -> None:
    assert ask(store, bound=0.01) is None  # it has died since
    first = AttemptNamer(store)
    first.answer()
    assert ask(store, bound=0.05) is None  # the first attempt's rank 0 has gone
    second = AttemptNamer(store)
    assert ask(store, second.answer) == second.name


def test_a_rank_waits_for_an_attempt_that_is_not_over_for_it(store: HashStore) -> None:
    first, second = AttemptNamer(store), AttemptNamer(store)
    answered = 0

    def answer() -> None:
        nonlocal answered
        answered += 1
        (first if answered <= 2 else second).answer()

    deadline = time.monotonic() + 10
    assert ask_for_attempt(store, deadline, answer, {first.name}) == second.name


def test_rank_0_that_nobody_has_asked_goes_on(store: HashStore) -> None:
    AttemptNamer(store).answer()


def test_the_wait_for_a_rank_0_that_never_comes_ends(store: HashStore) -> None:
    asked = time.monotonic()
    assert ask(store, bound=0.1) is None
    assert time.monotonic() - asked < 5


def test_what_was_answered_and_read_is_not_kept(store: HashStore) -> None:
    namer = AttemptNamer(store)
    ask(store, namer.answer)
    assert store.num_keys() == 1  # the questions
