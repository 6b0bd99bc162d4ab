"""A forward that is run without the devices, and without touching the model."""

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpkit.blocks import Findings
from ddpkit.errors import ConfigError
from ddpkit.rehearsal import Placement, Rehearsal

FIRST, SECOND, THIRD = DEVICES = tuple(torch.device("cuda", index) for index in range(3))


def record(model: nn.Module, sample: Any) -> Findings:
    return Rehearsal(model, sample, DEVICES).record()


def crossings(
    model: nn.Module,
    sample: Any,
    blocks: Mapping[str, torch.device],
    owned: Mapping[str, torch.device] | None = None,
) -> list[str]:
    placement = Placement(DEVICES, blocks, owned or {})
    return list(Rehearsal(model, sample, DEVICES).crossings(placement))


class Steps(nn.Module):
    """Two layers, a parameter of its own, and a forward that is given to it."""

    def __init__(self, code: Callable[["Steps", torch.Tensor], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.own = nn.Parameter(torch.ones(3))
        self.code = code

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self, x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.after = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(self.inner(x))
        return y


def run(code: Callable[[Steps, torch.Tensor], Any]) -> list[str]:
    """Run code around two blocks on two devices; own is on the first."""
    blocks = {"a": FIRST, "b": SECOND}
    return crossings(Steps(code), torch.ones(2, 3), blocks, {"own": FIRST})


# --------------------------------------------------------------------------------- what is recorded


def test_the_order_of_first_calls_is_recorded() -> None:
    found = record(Outer(Steps(lambda m, x: m.a(m.b(m.a(m.b(x)))))), torch.ones(2, 3))
    assert list(found.order) == ["", "inner", "inner.b", "inner.a", "after"]
    assert sorted(found.order.values()) == list(range(5))


def test_a_module_whose_part_is_called_without_it_is_noticed() -> None:
    class Around(Outer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner.a(super().forward(x))  # type: ignore[operator]
            return y

    found = record(Around(Steps(lambda m, x: m.b(x))), torch.ones(2, 3))
    assert set(found.bypassed) == {"inner"}


def test_a_module_that_two_others_hold_is_not_called_around_them() -> None:
    first, second = Steps(lambda m, x: m.a(x)), Steps(lambda m, x: m.a(x))
    second.a = first.a
    assert not record(nn.Sequential(first, second), torch.ones(2, 3)).bypassed


def test_bytes_kept_for_the_backward_are_counted_where_they_are_made() -> None:
    def code(model: Steps, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.b(model.a(x).relu()) + model.own
        return y.exp()

    found = record(Steps(code), torch.ones(2, 3))
    # The input, what relu makes of the output of a, and what exp makes of that of b.
    assert found.activations == {"a": 24 + 24, "b": 24}


def test_nothing_is_kept_without_gradients_or_of_parameters() -> None:
    model = Steps(lambda m, x: m.b(m.a(x)))
    with torch.no_grad():
        assert record(model, torch.ones(2, 3)).activations == {}
    model.requires_grad_(False)
    assert record(model, torch.ones(2, 3)).activations == {}


def test_a_storage_is_counted_once() -> None:
    found = record(Steps(lambda m, x: m.a(x) * m.b(x)), torch.ones(2, 3))
    assert sum(found.activations.values()) == 3 * 24


@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3),),
        {"x": torch.ones(2, 3)},
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_forms_of_a_sample(sample: Any) -> None:
    assert "a" in record(Steps(lambda m, x: m.a(x)), sample).order


def test_recurrent_modules_run_without_values() -> None:
    found = record(nn.Sequential(nn.LSTM(3, 4)), torch.ones(5, 2, 3))
    assert list(found.order) == ["", "0"]


def test_modules_with_computed_weights_can_be_copied() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.warns(FutureWarning, match="weight_norm"):
        model.append(nn.utils.weight_norm(nn.Linear(3, 3)))
    model(torch.ones(2, 3))
    assert "1" in record(model, torch.ones(2, 3)).order


# ------------------------------------------------------------------------------ nothing is touched


class Busy(nn.Module):
    """Changes everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0
        self.last: torch.Tensor | None = None
        self.plain = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.plain += 1
        noise = torch.rand(3).to(x.device) + random.random()
        self.last = F.dropout(self.norm(x + noise))
        x.add_(1)
        return self.last


@pytest.mark.parametrize("needs_values", [False, True])
def test_the_model_and_the_random_streams_are_left_alone(needs_values: bool) -> None:
    def decide(model: Steps, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.a(x)
        return y * 2 if needs_values and y.sum() > -1000 else y

    busy, sample = Busy(), torch.ones(2, 3)
    model = nn.Sequential(busy, Steps(decide))
    model[1].a.weight.grad = torch.full((3, 3), 7.0)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate()
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    rehearsal = Rehearsal(model, sample, DEVICES)
    rehearsal.record()
    rehearsal.crossings(Placement(DEVICES, {"0": FIRST, "1": FIRST}))

    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert (busy.calls, busy.last) == (0, None)
    assert torch.equal(busy.plain, torch.zeros(3))
    assert torch.equal(sample, torch.ones(2, 3))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {"1.a.weight"}
    assert torch.equal(gradients["1.a.weight"], torch.full((3, 3), 7.0))
    assert keys == {name: set(vars(module)) for name, module in model.named_modules()}
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_a_model_on_meta_is_recorded() -> None:
    model = Steps(lambda m, x: m.b(m.a(x))).to("meta")
    assert "b" in record(model, torch.ones(2, 3)).order


# ---------------------------------------------------------------------- operations on two devices


def test_arguments_of_blocks_are_moved() -> None:
    assert run(lambda m, x: m.b(m.a(x))) == []
    assert run(lambda m, x: m.a(m.b(m.a(x)))) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (lambda m, x: m.b(x) + x, "add in the model itself (Steps): meets cuda:1 and cuda:0"),
        (
            lambda m, x: torch.cat([m.a(x), m.b(x)]),
            "cat in the model itself (Steps): meets cuda:0 and cuda:1",
        ),
        (lambda m, x: m.b(x).mul_(m.own), "mul_ in the model itself (Steps): meets cuda:1 and"),
        (lambda m, x: F.linear(m.b(x), m.a.weight), "linear in the model itself (Steps): meets"),
        (lambda m, x: F.mse_loss(m.b(x), target=x), "mse_loss in the model itself (Steps): meets"),
        (lambda m, x: m.b(x).sum() + m.a(x).sum(), "add in the model itself (Steps): meets"),
        (lambda m, x: m.a(x) + torch.zeros(3), "meets cuda:0 and cpu"),
        (lambda m, x: torch.broadcast_tensors(m.a(x), m.b(x))[1] + x, "meets cuda:1 and cuda:0"),
        (lambda m, x: m.b(x) + x.to("cuda:2"), "meets cuda:1 and cuda:2"),
        (lambda m, x: m.b(x) + torch.zeros(3, device=x.device), "meets cuda:1 and cuda:0"),
        (lambda m, x: m.b(x) + torch.zeros_like(x), "meets cuda:1 and cuda:0"),
        (lambda m, x: m.b(x) + x.new_zeros(3), "meets cuda:1 and cuda:0"),
    ],
    ids=lambda value: None if callable(value) else value[:12],
)
def test_what_meets_two_devices_outside_of_blocks_is_listed(
    code: Callable[[Steps, torch.Tensor], Any], line: str
) -> None:
    found = run(code)
    assert len(found) == 1
    assert line in found[0]


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: m.b(x) + x.to("cuda:1"),
        lambda m, x: m.b(x) + x.cuda(1),
        lambda m, x: m.b(x) + x.to(device=m.b.weight.device),
        lambda m, x: m.b(x) + x.to(m.b.weight),
        lambda m, x: m.b(x) + x.type_as(m.b.weight),
        lambda m, x: m.b(x) + m.a(x).to(torch.float64).to("cuda:1"),
        lambda m, x: m.b(x) + torch.tensor(2.0),
        lambda m, x: m.b(x) + torch.zeros(3, device=m.b.weight.device),
        lambda m, x: m.b(x)[torch.arange(2)],
        lambda m, x: m.b(x).new_zeros(2, 3).copy_(x),
        lambda m, x: m.b(x).detach() * m.b(x).max(dim=0).values,
        lambda m, x: (m.b(x), m.a(x)),
        lambda m, x: m.a(x) + x.to("cuda"),
        lambda m, x: m.a(x) + m.b(x).view_as(x).to(x.device),
        lambda m, x: m.a(x) + torch.autograd.grad(m.b(m.a(x)).sum(), m.a.weight)[0][:2],
        lambda m, x: (m.a(x).cpu() + torch.zeros(3)).sum(),
    ],
)
def test_what_stays_on_one_device_is_not_listed(code: Callable[[Steps, torch.Tensor], Any]) -> None:
    assert run(code) == []


def test_the_line_names_the_module_whose_code_it_is() -> None:
    model = Outer(Steps(lambda m, x: m.b(m.a(x)) + m.own))
    blocks = {"inner.a": FIRST, "inner.b": SECOND, "after": SECOND}
    found = crossings(model, torch.ones(2, 3), blocks, {"inner.own": FIRST})
    assert found == ["add in inner (Steps): meets cuda:1 and cuda:0"]


def test_the_result_of_a_crossing_is_where_a_split_model_brings_it() -> None:
    # To that of a parameter, of statistics or of what is given; in place to the first; else to the
    # later one.
    to_parameter = lambda m, x: m.a(x) + F.linear(m.b(x), m.a.weight)  # noqa: E731
    in_place = lambda m, x: m.a(x) + m.a(x).add_(m.b(x))  # noqa: E731
    to_later = lambda m, x: m.b(x) + (m.a(x) + m.b(x))  # noqa: E731
    statistics = lambda m, x: m.a(x) + F.batch_norm(m.b(x), *m.a(x).detach().abs())  # noqa: E731
    given = lambda m, x: (  # noqa: E731
        m.a(x) + torch.add(m.a(x).detach(), m.b(x).detach(), out=torch.empty_like(x))
    )
    ways = (to_parameter, in_place, to_later, statistics, given)
    assert [len(run(code)) for code in ways] == [1] * 5


class Keeper(nn.Module):
    """Takes a tensor from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.kept[-1]
        return y


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.keeper = Keeper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keeper.kept.append(self.a(x))
        y: torch.Tensor = self.keeper(x)
        return y


def test_a_tensor_that_comes_into_a_block_by_another_way_is_an_error() -> None:
    assert crossings(Giver(), torch.ones(2, 3), {"a": FIRST, "keeper": FIRST}) == []
    with pytest.raises(
        ConfigError,
        match=r"add in keeper \(Keeper\): meets cuda:1 and cuda:0, inside the block 'keeper'. A "
        r"tensor has come into it by another way",
    ):
        crossings(Giver(), torch.ones(2, 3), {"a": FIRST, "keeper": SECOND})


def test_a_tensor_that_a_block_makes_on_the_cpu_is_an_error() -> None:
    model = Outer(Steps(lambda m, x: m.a(x) + torch.zeros(3)))
    with pytest.raises(
        ConfigError,
        match=r"add in inner \(Steps\): meets cuda:0 and cpu, inside the block 'inner'. cpu is no "
        r"device of the plan.*device=x\.device",
    ):
        crossings(model, torch.ones(2, 3), {"inner": FIRST, "after": SECOND})


def test_plain_tensors_of_a_module_are_on_the_cpu() -> None:
    model = Steps(lambda m, x: m.a(x) * m.mask)
    vars(model)["mask"] = torch.ones(3)
    with pytest.raises(
        ConfigError, match=r"mul in the model itself \(Steps\): meets cuda:0 and cpu"
    ):
        crossings(model, torch.ones(2, 3), {"": FIRST})


def test_one_device_twice_meets_nothing() -> None:
    cpu = torch.device("cpu")
    model = Steps(lambda m, x: m.b(x) + x)
    placement = Placement((cpu, cpu), {"a": cpu, "b": cpu}, {"own": cpu})
    assert Rehearsal(model, torch.ones(2, 3), (cpu, cpu)).crossings(placement) == ()


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    rest: dict[str, Any]


def test_arguments_in_containers_are_moved() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, batch: Batch, more: list[Any], *, y: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.layer(batch.x) + batch.rest["x"] + more[0][0] + y
            return total

    model = Steps(lambda m, x: m.b(Batch(x, {"x": x, "n": 3}), [(x, None), "a"], y=x))
    model.b = Inner()  # type: ignore[assignment]
    assert crossings(model, torch.ones(2, 3), {"a": FIRST, "b": SECOND}, {"own": FIRST}) == []
    sample = Batch(torch.ones(2, 3), {"x": torch.ones(3)}), [(torch.ones(3),)]
    kwargs = dict(zip(("batch", "more"), sample, strict=True)) | {"y": torch.ones(3)}
    assert crossings(Inner(), kwargs, {"": SECOND}) == []


def test_one_tensor_given_twice_is_moved_once() -> None:
    class Same(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert x is y
            return super().forward(x)

    model = Steps(lambda m, x: m.b(x, y=x))
    model.b = Same(3, 3)
    assert crossings(model, torch.ones(2, 3), {"a": FIRST, "b": SECOND}, {"own": FIRST}) == []


def test_packed_sequences_keep_their_lengths_on_the_cpu() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.a(x), lengths.cpu(), batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return out

    sample = torch.ones(2, 5, 3), torch.tensor([5, 3])
    assert crossings(Packed(), sample, {"a": FIRST, "rnn": SECOND}) == []


# ------------------------------------------------------------------------------ values are needed


def data_dependent(model: Steps, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.a(x)
    return model.b(y) + x if y.sum().item() > -1e9 else y


def test_a_forward_that_depends_on_values_runs_with_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "ddpkit")
    assert run(data_dependent) == ["add in the model itself (Steps): meets cuda:1 and cuda:0"]
    assert "Steps runs with values, because without" in caplog.text
    assert list(record(Steps(data_dependent), torch.ones(2, 3)).order) == ["", "a", "b"]


def test_without_values_it_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"Values are missing: the model is on meta"):
        record(Steps(data_dependent).to("meta"), torch.ones(2, 3))


# --------------------------------------------------------------------------------------- failures


def test_a_failure_names_the_module() -> None:
    model = Outer(Steps(lambda m, x: m.b(m.a(x)[:, :2])))
    with pytest.raises(
        ConfigError,
        match=r"forward of Outer with sample= raised RuntimeError in inner\.b \(Linear\)",
    ) as caught:
        record(model, torch.ones(2, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_sample_that_does_not_fit_the_signature_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"raised TypeError in the model itself \(Steps\)"):
        record(Steps(lambda m, x: m.a(x)), {"wrong": torch.ones(2, 3)})


def test_a_failure_that_the_model_handles_is_none() -> None:
    def code(model: Steps, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            model.a(x[:, :2])
        y: torch.Tensor = model.b(x)
        return y

    assert list(record(Steps(code), torch.ones(2, 3)).order) == ["", "a", "b"]


def test_the_module_is_that_of_the_error_that_came_through() -> None:
    def code(model: Steps, x: torch.Tensor) -> torch.Tensor:
        try:
            return model.a(x[:, :2])  # type: ignore[no-any-return]
        except RuntimeError:
            model.b(x)
            raise

    with pytest.raises(ConfigError, match=r"in inner\.a \(Linear\)"):
        record(Outer(Steps(code)), torch.ones(2, 3))


def test_it_works_while_an_error_is_handled() -> None:
    try:
        raise ValueError("of the caller")
    except ValueError:
        with pytest.raises(ConfigError, match=r"in b \(Linear\)"):
            record(Steps(lambda m, x: m.b(m.a(x)[:, :2])), torch.ones(2, 3))


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = Steps(lambda m, x: m.a(x))
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(ConfigError, match=r"Steps cannot be copied .*Leave sample= out"):
        record(model, torch.ones(2, 3))
