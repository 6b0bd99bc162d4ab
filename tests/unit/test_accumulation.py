"""Windows of micro-batches in a world of one: their sizes, weights, and a loader's place."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddpkit.accumulation import MicroBatch, accumulate, loss_weight, sync_gradients
from ddpkit.errors import ConfigError, GroupError
from ddpkit.loader import ShardedLoader, sharded_loader


def sizes(batches: Any, every: int) -> list[tuple[int, int, bool]]:
    return [
        (micro.index, micro.window, micro.is_last)
        for _, micro in accumulate(nn.Linear(1, 1), batches, every=every)
    ]


TWO_WINDOWS = [(0, 3, False), (1, 3, False), (2, 3, True), (0, 2, False), (1, 2, True)]


@pytest.mark.parametrize(
    "batches", [[*range(5)], range(5), iter(range(5)), DataLoader(cast("Any", [*range(5)]))]
)
def test_windows_of_known_and_unknown_length(batches: Any) -> None:
    assert sizes(batches, 3) == TWO_WINDOWS


@pytest.mark.parametrize(
    ("length", "every", "windows"), [(0, 3, []), (2, 5, [2]), (4, 2, [2, 2]), (3, 1, [1, 1, 1])]
)
@pytest.mark.parametrize("kind", [list, iter])
def test_sizes_of_windows(kind: Any, length: int, every: int, windows: list[int]) -> None:
    found = sizes(kind(range(length)), every)
    assert [window for _, window, is_last in found if is_last] == windows
    assert len(found) == length


def test_the_batches_come_in_their_order() -> None:
    batches = [batch for batch, _ in accumulate(nn.Linear(1, 1), iter("abcdefg"), every=3)]
    assert "".join(batches) == "abcdefg"


def test_of_a_known_length_nothing_is_read_ahead() -> None:
    class Noting(list[int]):
        def __init__(self) -> None:
            super().__init__(range(5))
            self.taken = 0

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                self.taken += 1
                yield item

    batches = Noting()
    for number, _ in accumulate(nn.Linear(1, 1), batches, every=3):
        assert batches.taken == number + 1


def test_of_an_unknown_length_one_window_is_read_ahead() -> None:
    taken = []

    def batches() -> Iterator[int]:
        for number in range(7):
            taken.append(number)
            yield number

    seen = [len(taken) for _ in accumulate(nn.Linear(1, 1), batches(), every=3)]
    assert seen == [3, 3, 3, 6, 6, 6, 7]


def test_a_length_that_is_not_true_is_an_error() -> None:
    class Short(list[int]):
        def __len__(self) -> int:
            return 5

    with pytest.raises(GroupError, match="ended 1 before the length"):
        sizes(Short(range(4)), 3)


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "4"])
def test_a_window_has_at_least_one_batch(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"every=.*expected an int from 1 on"):
        accumulate(nn.Linear(1, 1), [1], every=every)


@pytest.mark.parametrize("models", [[nn.Linear(1, 1), 3], "model"])
def test_only_modules_are_models(models: Any) -> None:
    with pytest.raises(ConfigError, match="expected a model or several"):
        accumulate(models, [1], every=1)
    with pytest.raises(ConfigError, match="expected a model or several"), sync_gradients(models):
        pass


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "3", torch.ones(2), None])
def test_counts_are_numbers(count: Any) -> None:
    with pytest.raises(ConfigError, match="expected a finite number of at least 0"):
        loss_weight(count)
    with pytest.raises(ConfigError, match="expected a finite number of at least 0"):
        next(accumulate(nn.Linear(1, 1), [1], every=1, count=lambda _: count))


def test_weights_of_one_process() -> None:
    assert loss_weight(8) == 1 / 8
    assert loss_weight(torch.tensor(4)) == 1 / 4
    assert loss_weight(0) == 0.0
    weights = [
        micro.weight for _, micro in accumulate(nn.Linear(1, 1), ["ab", "abc"], every=2, count=len)
    ]
    assert weights == [1 / 5, 1 / 5]
    assert [micro.weight for _, micro in accumulate(nn.Linear(1, 1), [1, 2, 3], every=2)] == [
        0.5,
        0.5,
        1,
    ]


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_one_process_gets_the_gradient_of_the_whole_window(every: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    batches = list(torch.randn(7, 3, 4))
    window: list[torch.Tensor] = []
    for x, micro in accumulate(model, batches, every=every):
        window.append(x)
        with micro:
            (model(x).square().mean() * micro.weight).backward()
        if micro.is_last:
            expected = torch.autograd.grad(
                model(torch.cat(window)).square().mean(), [model.weight, model.bias]
            )
            torch.testing.assert_close((model.weight.grad, model.bias.grad), expected)
            model.zero_grad()
            window.clear()


# ------------------------------------------------------------------------------- a loader's place


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def numbers(kind: str) -> ShardedLoader[Any]:
    source = Numbers() if kind == "stream" else TensorDataset(torch.arange(10))
    return sharded_loader(source, batch_size=1, num_replicas=1, rank=0)


def consumed(loader: ShardedLoader[Any]) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["consumed"]


def zipped(loader: ShardedLoader[Any]) -> Any:
    return zip(loader, range(100), strict=False)


@pytest.mark.parametrize("hide", [lambda loader: loader, enumerate, zipped])
@pytest.mark.parametrize("kind", ["stream", "keys"])
def test_a_state_counts_complete_windows_only(kind: str, hide: Any) -> None:
    loader = numbers(kind)
    batches = hide(loader)
    places, epochs = [], []
    for _, _micro in accumulate(nn.Linear(1, 1), batches, every=4):
        places.append(consumed(loader))
        epochs.append(loader.epoch)
    in_epoch = [0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert places[:9] == [(0, place) for place in in_epoch]
    assert places[9] in [(0, 10), (1, 0)]  # the end of the epoch is the beginning of the next
    assert epochs[:9] == [0] * 9
    assert consumed(loader) == (1, 0)


@pytest.mark.parametrize("kind", ["stream", "keys"])
def test_a_resumed_run_repeats_the_window_that_was_not_complete(kind: str) -> None:
    loader = numbers(kind)
    states = [loader.state_dict() for _ in islice(accumulate(nn.Linear(1, 1), loader, every=4), 6)]
    resumed = numbers(kind)
    resumed.load_state_dict(states[-1])
    found = [
        (int(batch[0] if isinstance(batch, list) else batch), micro.window)
        for batch, micro in accumulate(nn.Linear(1, 1), resumed, every=4)
    ]
    assert found == [(4, 4), (5, 4), (6, 4), (7, 4), (8, 2), (9, 2)]


def test_a_loop_that_is_left_ends_the_window() -> None:
    loader = numbers("keys")
    for _ in accumulate(nn.Linear(1, 1), loader, every=4):
        break
    assert consumed(loader) == (1, 0)
    loader.set_epoch(0)
    assert [int(batch[0]) for batch in loader] == list(range(10))


def test_a_place_that_is_set_inside_a_window_wins() -> None:
    loader = numbers("keys")
    steps = accumulate(nn.Linear(1, 1), loader, every=4)
    next(steps)
    loader.set_epoch(7)
    assert consumed(loader) == (7, 0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "consumed": 5})
    assert consumed(loader) == (3, 5)
    next(steps)
    assert consumed(loader) == (3, 5)


def test_steps_left_are_those_of_the_next_pass() -> None:
    loader = numbers("keys")
    assert loader.steps_left() == 10
    loader.load_state_dict({**loader.state_dict(), "consumed": 7})
    assert loader.steps_left() == 3
    assert len(loader) == 10
    assert len(list(loader)) == 3
    assert loader.steps_left() == 10
    assert numbers("stream").steps_left() is None


def test_it_shows_what_it_is() -> None:
    assert repr(MicroBatch([], 1, 4, 0.25)) == "MicroBatch(index=1, window=4, weight=0.25)"
