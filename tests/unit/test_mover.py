"""What meets is brought together; devices are the CPU and `meta`, on which nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpkit.mover import pause, resume, run_own_code

CPU, META = torch.device("cpu"), torch.device("meta")


def on_both(call: Callable[[], Any]) -> Any:
    return run_own_code([CPU, META], call, (), {})


def depth() -> int:
    return torch._C._len_torch_function_stack()


HERE, THERE = torch.ones(2, 3), torch.ones(2, 3, device="meta")


@pytest.mark.parametrize(
    ("call", "device"),
    [
        pytest.param(lambda: HERE + THERE, META, id="latest"),
        pytest.param(lambda: torch.cat([THERE, HERE, HERE]), META, id="list"),
        pytest.param(lambda: torch.where(HERE > 0, HERE, THERE), META, id="three"),
        pytest.param(lambda: torch.add(HERE, other=THERE), META, id="keyword"),
        pytest.param(lambda: THERE.clone().add_(HERE), META, id="in place"),
        pytest.param(lambda: THERE.clone().__iadd__(HERE), META, id="operator in place"),
        pytest.param(lambda: torch.add(HERE, HERE, out=torch.empty_like(THERE)), META, id="out"),
        pytest.param(lambda: THERE[HERE.long()[0]], META, id="indices"),
        pytest.param(lambda: F.linear(HERE, nn.Parameter(THERE)), META, id="parameter"),
        pytest.param(lambda: F.linear(HERE, THERE, nn.Parameter(THERE[0])[:2]), META, id="bias"),
        pytest.param(lambda: HERE + torch.ones(()), CPU, id="numbers"),
        pytest.param(lambda: THERE + torch.ones(()), META, id="a number stays"),
        pytest.param(lambda: THERE.sum() + HERE.sum(), META, id="numbers on two devices"),
        pytest.param(lambda: HERE.expand_as(THERE), CPU, id="only the shape"),
        pytest.param(lambda: HERE.to(THERE), META, id="asked for"),
    ],
)
def test_an_operation_takes_place_on_one_device(
    call: Callable[[], torch.Tensor], device: torch.device
) -> None:
    assert on_both(call).device == device


def test_devices_of_others_are_left_to_torch() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_own_code([torch.device("cuda:0"), torch.device("cuda:1")], lambda: HERE @ THERE, (), {})


def test_statistics_that_are_updated_stay_where_they_are() -> None:
    mean, variance = torch.zeros(3, device="meta"), torch.ones(3, device="meta")
    output = on_both(lambda: F.batch_norm(HERE, mean, variance, training=True))
    assert output.device == META


def test_one_device_needs_no_mode() -> None:
    assert run_own_code([CPU], depth, (), {}) == 0
    assert on_both(depth) == 1
    assert on_both(lambda: on_both(depth)) == 1  # one is enough


def test_it_is_off_again_however_it_ends() -> None:
    for error in (ValueError, KeyboardInterrupt):

        def fail(error: type[BaseException] = error) -> None:
            pause("a block")  # and never resumes
            raise error

        with pytest.raises(error):
            on_both(fail)
        assert depth() == 0
        assert on_both(depth) == 1


def test_only_who_paused_resumes() -> None:
    def run() -> list[int]:
        depths = []
        steps: list[Callable[[], None]] = [
            *(lambda: resume("a"), lambda: pause("a"), lambda: pause("b"), lambda: resume("b")),
            *(lambda: pause("a"), lambda: resume("a"), lambda: resume("a"), lambda: resume("a")),
        ]
        for step in steps:
            step()
            depths.append(depth())
        return depths

    assert on_both(run) == [1, 0, 0, 0, 0, 0, 1, 1]
    assert depth() == 0


def test_code_within_a_pause_may_have_a_mode_of_its_own() -> None:
    def run() -> list[int]:
        pause("a block")
        depths = [depth(), on_both(depth), depth()]
        resume("a block")
        return [*depths, depth()]

    assert on_both(run) == [0, 1, 0, 1]


def test_modes_around_and_above_stay() -> None:
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def run() -> list[int]:
        with Other():
            pause("a block")
            depths = [depth()]
            resume("a block")
            return [*depths, depth()]

    with Other():
        assert on_both(run) == [2, 3]
        assert depth() == 1
