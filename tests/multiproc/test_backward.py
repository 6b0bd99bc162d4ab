"""What a backward of a wrapped model must not do in silence, on two ranks.

Each of these leaves the ranks with different gradients in plain torch, or one rank waiting.
"""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.utils.checkpoint import checkpoint

from ddpkit.accumulation import accumulate, sync_gradients
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_rank, is_rank0
from ddpkit.reduce import reduce_sum
from ddpkit.snapshot import plain_state
from ddpkit.testing import assert_replicas_equal, run_ranks
from ddpkit.wrap import ddp, unwrap

SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.0001}


class Branches(nn.Module):
    """Runs those of its layers that it is told to, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, names: str = "first second third") -> torch.Tensor:
        for name in names.split():
            x = getattr(self, name)(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Run a part of the model."""
        return self.first(x)  # type: ignore[no-any-return]

    def penalty(self) -> torch.Tensor:
        """Return the sum of the squares of a layer's weights."""
        return self.second.weight.square().sum()

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.first(x)
        yield self.second(x)

    def layers(self) -> list[nn.Module]:
        return [self.first, self.second]

    @property
    def penalties(self) -> tuple[torch.Tensor, ...]:
        return (self.penalty(),)

    def encode_batch(self) -> torch.Tensor:
        return self.encode(batch())

    def remember(self, x: torch.Tensor) -> None:
        self.remembered = self.first(x)


def batch(rank: int | None = None) -> torch.Tensor:
    seed = get_rank() if rank is None else rank
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def error_of(function: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(item) if item.grad is None else item.grad.clone()
        for name, item in unwrap(model).named_parameters()
    }


def expected_gradients(
    names_of_ranks: list[str], loss_of: Callable[[torch.Tensor], torch.Tensor] = torch.sum
) -> dict[str, torch.Tensor]:
    """Return the mean over the ranks, computed in one process."""
    model = branches()
    losses = [loss_of(model(batch(rank), names)) for rank, names in enumerate(names_of_ranks)]
    torch.stack(losses).mean().backward()
    return gradients(model)


def assert_close(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, msg=f"gradient of {name}")


# ------------------------------------------------------------------------- parameters left out

ALL = "first second third"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.drill),
        SMALL_BUCKETS,
        pytest.param({**SMALL_BUCKETS, "compress": "fp16"}, marks=pytest.mark.drill),
    ],
)
@pytest.mark.parametrize(
    ("uses", "told"),
    [
        (["first third"] * 2, "all ranks: second.weight, second.bias"),
        ([ALL, "first third"], "rank 0: none\n  rank 1: second.weight, second.bias"),
        (["first third", ALL], "rank 0: second.weight, second.bias\n  rank 1: none"),
        (
            ["first second", "second third"],
            "rank 0: third.weight, third.bias\n  rank 1: first.weight, first.bias",
        ),
    ],
    ids=["everywhere", "on rank 1", "on rank 0", "different branches"],
)
@pytest.mark.parametrize(
    "step", [1, *(pytest.param(step, marks=pytest.mark.drill) for step in (0, 3))]
)
def test_left_out_parameters_are_named_at_once_on_all_ranks_which_can_go_on(
    uses: list[str], told: str, step: int, options: dict[str, Any]
) -> None:
    def leave_out() -> tuple[str, dict[str, torch.Tensor], float]:
        model = ddp(branches(), **options)
        for _ in range(step):
            model(batch()).sum().backward()
        names = uses[get_rank()]
        text = error_of(lambda: model(batch(), names).sum().backward(), GroupError)
        for _ in range(3):  # torch orders its buckets anew at the second forward
            model.zero_grad()
            model(batch()).sum().backward()
        return text, gradients(model), reduce_sum(1.0)

    replies = run_ranks(leave_out, 2, timeout=20)
    texts = {text for text, _, _ in replies}
    assert len(texts) == 1
    assert told in texts.pop()
    for _, given, count in replies:
        assert count == 2
        if "compress" not in options:
            assert_close(given, expected_gradients([ALL, ALL]))


@pytest.mark.parametrize("key", ["layer", "my layer", "a (b)"])
def test_hundreds_of_left_out_parameters_of_any_name_are_told_on_all_ranks(key: str) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = [f"{key} {number}" for number in range(150)]
            self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

        def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
            for layer in list(self.layers.values())[:count]:
                x = layer(x)
            return x

    def leave_out() -> str:
        model = ddp(Deep(), **SMALL_BUCKETS)
        for _ in range(2):
            model(batch(), 150).sum().backward()
        count = 10 if is_rank0() else 150
        text = error_of(lambda: model(batch(), count).sum().backward(), GroupError)
        model(batch(), 150).sum().backward()
        return text

    texts = set(run_ranks(leave_out, 2, timeout=20))
    assert len(texts) == 1
    assert f"rank 0: layers.{key} 10.weight, layers.{key} 10.bias, " in texts.copy().pop()
    assert "and 274 more\n  rank 1: none" in texts.pop()


def test_a_flag_lets_steps_leave_parameters_out() -> None:
    uses = ["first second", "second third"]

    def train() -> dict[str, torch.Tensor]:
        model = ddp(branches(), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            model(batch(), uses[get_rank()]).sum().backward()
        return gradients(model)

    for given in run_ranks(train, 2):
        assert_close(given, expected_gradients(uses))


def test_gradients_that_really_are_nan_are_nobodys_failure() -> None:
    def train() -> bool:
        model = ddp(branches(), **SMALL_BUCKETS)
        for _ in range(3):
            (model(batch()).sum() * (torch.nan if get_rank() == 1 else 1.0)).backward()
        return bool(gradients(model)["first.weight"].isnan().all())

    assert run_ranks(train, 2, timeout=20) == [True, True]


def test_it_is_said_why_a_parameter_has_no_gradient() -> None:
    def train(change: Callable[[Branches], object]) -> str:
        model = ddp(branches())
        model(batch()).sum().backward()
        change(unwrap(model))
        return error_of(lambda: model(batch()).sum().backward(), GroupError)

    def freeze(model: Branches) -> None:
        model.third.requires_grad_(False)

    def replace(model: Branches) -> None:
        model.third = model.second

    for text in run_ranks(train, 2, args=(freeze,)):
        assert "third.weight (frozen after ddp())" in text
    for text in run_ranks(train, 2, args=(replace,)):
        assert "third.weight (replaced after ddp())" in text


def test_models_with_sparse_gradients_train_and_name_what_is_left_out() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)
            self.other = nn.Linear(4, 4)

        def forward(self, at: torch.Tensor, uses_other: bool = True) -> torch.Tensor:
            x = self.table(at)
            return self.other(x) if uses_other else x  # type: ignore[no-any-return]

    def train() -> tuple[torch.Tensor, str]:
        torch.manual_seed(0)
        model = ddp(Sparse())
        at = torch.tensor([get_rank()])
        model(at).sum().backward()
        given = gradients(model)["table.weight"].to_dense()
        text = error_of(lambda: model(at, uses_other=False).sum().backward(), GroupError)
        return given, text

    (one, text), (other, _) = run_ranks(train, 2)
    assert torch.equal(one, other)
    assert one[0].any()
    assert one[1].any()
    assert "rank 0: other.weight, other.bias" in text


@pytest.mark.drill  # the compiler takes seconds in each rank
@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_models_are_averaged_and_checked(order: str) -> None:
    def train() -> tuple[dict[str, torch.Tensor], str]:
        plain = branches()
        model: Any
        if order == "before":
            model = ddp(cast("nn.Module", torch.compile(plain, backend="eager")))
        else:
            model = torch.compile(ddp(plain), backend="eager")
        for _ in range(2):
            model.zero_grad()
            model(batch()).sum().backward()
        given = gradients(model)
        text = error_of(lambda: model(batch(), "first second").sum().backward(), GroupError)
        return given, text

    for given, text in run_ranks(train, 2):
        assert_close(given, expected_gradients([ALL, ALL]))
        assert "third.weight, " in text


class Hiding(Branches):
    """Returns its output where nobody looks for it, and keeps a loss."""

    def forward(self, x: torch.Tensor, names: str = ALL) -> Any:
        output = super().forward(x, names)
        self.kept = output.square().sum()
        return (part for part in [output])


def through_a_generator(model: Any, names: str) -> torch.Tensor:
    (output,) = model(batch(), names)
    return output  # type: ignore[no-any-return]


def through_what_forward_kept(model: Any, names: str) -> torch.Tensor:
    model(batch(), names)
    return model.kept  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [through_a_generator, through_what_forward_kept])
def test_averaging_is_checked_where_no_output_is_found(
    way: Callable[[Any, str], torch.Tensor],
) -> None:
    def train() -> tuple[str, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = ddp(Hiding())
        way(model, ALL).sum().backward()
        given = gradients(model)
        text = error_of(lambda: way(model, "first second").sum().backward(), GroupError)
        return text, given

    (text, one), (_, other) = run_ranks(train, 2)
    assert "all ranks: third.weight, third.bias" in text
    assert_close(one, other)


# ---------------------------------------------------------------------------- one backward too many


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_second_backward_after_one_forward_raises(options: dict[str, Any]) -> None:
    def train(loop: Callable[[Any], None]) -> str:
        model = ddp(branches(), **options)
        model(batch()).sum().backward()
        return error_of(lambda: loop(model), GroupError)

    def two_forwards(model: Any) -> None:
        one, other = model(batch()).sum(), model(batch()).square().sum()
        one.backward()
        other.backward()

    def kept_graph(model: Any) -> None:
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for loop in (two_forwards, kept_graph):
        for text in run_ranks(train, 2, args=(loop,)):
            assert "second backward since the last forward of the Branches" in text


def test_what_looks_like_a_second_backward_but_is_none_works() -> None:
    def train() -> dict[str, torch.Tensor]:
        model: Any = ddp(branches())
        model(batch())  # is never followed by a backward
        output = model(batch())
        torch.autograd.grad(output.sum(), list(model.parameters()), retain_graph=True)
        output.sum().backward()
        model.zero_grad()
        one, other = model(batch()), model(batch())
        (one.sum() + other.sum()).backward()
        model.zero_grad()
        with model.no_sync():
            loss = model(batch()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        model.zero_grad()
        model(batch()).sum().backward()
        return gradients(model)

    for given in run_ranks(train, 2):
        assert_close(given, expected_gradients([ALL, ALL]))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_local_backward_before_that_of_an_earlier_forward_raises(is_kept: bool) -> None:
    def train() -> tuple[list[str], dict[str, torch.Tensor]]:
        model: Any = ddp(branches())
        pending = model(batch()).sum()
        if not is_kept:
            pending = None

        def local() -> None:
            with sync_gradients(model, when=False):
                model(10 * batch()).sum().backward()

        texts = [error_of(local, GroupError), error_of(local, GroupError)]
        (model(batch()).sum() if pending is None else pending).backward()
        return texts, gradients(model)

    for texts, given in run_ranks(train, 2, timeout=20):
        assert all("This backward is not to be averaged" in text for text in texts)
        assert all("an earlier forward of the Branches" in text for text in texts)
        assert_close(given, expected_gradients([ALL, ALL]))


def test_a_probe_on_one_rank_before_a_window_raises_there() -> None:
    def train() -> None:
        model = ddp(branches())
        if is_rank0():
            model(batch())
        for x, micro in accumulate(model, [batch()] * 2, every=2):
            with micro:
                model(x).sum().backward()

    with pytest.raises(GroupError, match=r"no backward has followed that one"):
        run_ranks(train, 2, timeout=20)


def gap_to_mean(value: torch.Tensor) -> float:
    """Return how far a rank's value is from the mean over the ranks, at most."""
    return float((reduce_sum(value) / 2 - value).abs().max())


def penalised(model: Any) -> torch.Tensor:
    x = batch().requires_grad_()
    output = model(x).square().sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    return slope.square().sum()


def test_local_backwards_after_averaged_ones_of_every_kind_stay_local() -> None:
    def both(model: Any, *, local_first: bool) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for when in (not local_first, local_first):
            with sync_gradients(model, when=when):
                outputs.append(model(batch()))
        return torch.stack(outputs).sum()

    def around_forward(model: Any) -> torch.Tensor:
        output: torch.Tensor = checkpoint(model, batch(), use_reentrant=False)
        return output.sum()

    def train() -> list[bool]:
        model: Any = ddp(branches())
        replies = []
        for loss_of in (
            penalised,
            around_forward,
            lambda model: both(model, local_first=True),
            lambda model: both(model, local_first=False),
        ):
            model.zero_grad()
            loss_of(model).backward()
            replies.append(gradients(model))
            model.zero_grad()
            with sync_gradients(model, when=False):
                model(batch()).sum().backward()
            replies.append(gradients(model))
        return [all(gap_to_mean(value) < 1e-6 for value in reply.values()) for reply in replies]

    for alike in run_ranks(train, 2, timeout=20):
        assert alike == [True, False] * 4


def test_an_error_between_forward_and_backward_leaves_no_trace() -> None:
    def train() -> dict[str, torch.Tensor]:
        model = ddp(branches())
        output = model(batch())
        with pytest.raises(ZeroDivisionError):
            output / (1 // 0)
        model(batch()).sum().backward()
        return gradients(model)

    for given in run_ranks(train, 2):
        assert_close(given, expected_gradients([ALL, ALL]))


def test_an_error_inside_a_backward_leaves_no_trace() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    def train() -> dict[str, torch.Tensor]:
        model = ddp(branches(), **SMALL_BUCKETS)
        output: torch.Tensor = model(batch())
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        model.zero_grad()
        model(batch()).sum().backward()
        return gradients(model)

    for given in run_ranks(train, 2):
        assert_close(given, expected_gradients([ALL, ALL]))


def test_a_parameter_that_is_returned_keeps_no_hooks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.scale

    def train() -> tuple[int, float]:
        model = ddp(Scaled())
        for _ in range(3):
            model.zero_grad()
            output, scale = model(batch())
            (output.sum() * scale * (1 + get_rank())).backward()
        hooks = unwrap(model).scale._backward_hooks
        return len(hooks or ()), gradients(model)["scale"].item()

    one, other = run_ranks(train, 2)
    assert one == other
    assert one[0] == 0


# ------------------------------------------------------------------------------ around forward


def through_a_method(model: Any) -> torch.Tensor:
    return model.encode(batch())  # type: ignore[no-any-return]


def through_a_child(model: Any) -> torch.Tensor:
    return model.first(batch())  # type: ignore[no-any-return]


def through_a_parameter(model: Any) -> torch.Tensor:
    return nn.functional.linear(batch(), model.first.weight)


def through_a_generator_method(model: Any) -> torch.Tensor:
    return next(model.parts(batch()))  # type: ignore[no-any-return]


def through_a_property(model: Any) -> torch.Tensor:
    return model.penalties[0]  # type: ignore[no-any-return]


def through_a_list_of_layers(model: Any) -> torch.Tensor:
    return model.layers()[0](batch())  # type: ignore[no-any-return]


def through_a_partial(model: Any) -> torch.Tensor:
    unwrap(model).partial = partial(unwrap(model).encode)
    return model.partial(batch())  # type: ignore[no-any-return]


def through_a_method_made_of_another(model: Any) -> torch.Tensor:
    return model.encode_batch()  # type: ignore[no-any-return]


def through_a_function(model: Any) -> torch.Tensor:
    plain: Any = unwrap(model)
    plain.function = lambda x: plain.first(x)
    return model.function(batch())  # type: ignore[no-any-return]


def through_a_layer_that_was_read_without_gradients(model: Any) -> torch.Tensor:
    with torch.no_grad():
        layer = model.first
    return layer(batch())  # type: ignore[no-any-return]


def through_what_a_method_kept(model: Any) -> torch.Tensor:
    model.remember(batch())
    return model.remembered  # type: ignore[no-any-return]


WAYS_AROUND = [
    through_a_method,
    through_a_child,
    through_a_parameter,
    through_a_generator_method,
    through_a_property,
    through_a_list_of_layers,
    through_a_partial,
    through_a_method_made_of_another,
    through_a_function,
    through_a_layer_that_was_read_without_gradients,
    through_what_a_method_kept,
]


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_a_backward_around_forward_raises(way: Callable[[Any], torch.Tensor]) -> None:
    def train() -> tuple[str, dict[str, torch.Tensor]]:
        model: Any = ddp(branches())
        text = error_of(lambda: way(model).sum().backward(), GroupError)
        model.zero_grad()
        with model.no_sync():
            way(model).sum().backward()
        with torch.no_grad():
            way(model)
        model.zero_grad()
        model(batch()).sum().backward()
        return text, gradients(model)

    for text, given in run_ranks(train, 2):
        assert "of the Branches that ddp() wrapped was used around forward" in text
        assert_close(given, expected_gradients([ALL, ALL]))


def test_a_loss_function_that_the_model_keeps_may_be_used() -> None:
    def train() -> tuple[bool, dict[str, torch.Tensor]]:
        plain: Any = branches()
        plain.loss_fn = nn.functional.mse_loss
        model: Any = ddp(plain)
        same = pickle.loads(pickle.dumps(model.loss_fn)) is nn.functional.mse_loss
        model.loss_fn(model(batch()), torch.zeros(3, 4)).backward()
        return same and model.loss_fn == nn.functional.mse_loss, gradients(model)

    expected = expected_gradients([ALL, ALL], lambda output: output.square().mean())
    for same, given in run_ranks(train, 2):
        assert same
        assert_close(given, expected)


def test_generators_of_the_model_take_and_give_values_as_before() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.told: list[object] = []

        def talk(self) -> Iterator[int]:
            try:
                self.told.append((yield 1))
                yield 2
            except KeyError:
                yield 3
            finally:
                self.told.append("closed")

    def use() -> list[object]:
        model: Any = ddp(Talking())
        talk = model.talk()
        found = [next(talk), talk.send("hello"), talk.throw(KeyError())]
        talk.close()
        return [*found, *model.told, list(model.talk())]

    assert run_ranks(use, 2) == [[1, 2, 3, "hello", "closed", [1, 2]]] * 2


def test_items_of_containers_are_watched_too() -> None:
    def train() -> list[str]:
        model: Any = ddp(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

        def by_index() -> None:
            model[0](batch()).sum().backward()

        def by_iteration() -> None:
            x = batch()
            for layer in model:
                x = layer(x)
            x.sum().backward()

        return [error_of(by_index, GroupError), error_of(by_iteration, GroupError)]

    for texts in run_ranks(train, 2):
        assert all("of the Sequential that ddp() wrapped was used around" in text for text in texts)


def test_the_plain_model_is_the_way_out() -> None:
    def train() -> bool:
        model = ddp(branches())
        through_a_method(unwrap(model)).sum().backward()
        through_a_child(unwrap(model)).sum().backward()
        return unwrap(model).first.weight.grad is not None

    assert run_ranks(train, 2) == [True, True]


def test_the_plain_model_is_the_way_out_after_an_optimizer_got_parts() -> None:
    def train() -> dict[str, torch.Tensor]:
        model: Any = ddp(branches())
        torch.optim.SGD([{"params": model.first.parameters()}, {"params": [model.second.weight]}])
        model(batch()).sum().backward()
        through_a_child(unwrap(model)).sum().backward()
        text = error_of(lambda: through_a_child(model).sum().backward(), GroupError)
        assert "first of the Branches" in text
        model = ddp(unwrap(model))
        model.zero_grad()
        model(batch()).sum().backward()
        return gradients(model)

    for given in run_ranks(train, 2):
        assert_close(given, expected_gradients([ALL, ALL]))


def test_looking_at_the_state_lets_nothing_go_around_forward() -> None:
    def train() -> str:
        model: Any = ddp(branches())
        layer = model.first
        assert_replicas_equal(model)
        plain_state({"model": model})
        return error_of(lambda: layer(batch()).sum().backward(), GroupError)

    for text in run_ranks(train, 2):
        assert "first of the Branches" in text


def test_a_penalty_beside_forward_is_averaged_with_it() -> None:
    def loss_of(model: Any, rank: int | None = None) -> torch.Tensor:
        penalty = model.penalty() + model.second.bias.square().sum()
        return model(batch(rank)).sum() + penalty  # type: ignore[no-any-return]

    def train() -> dict[str, torch.Tensor]:
        model = ddp(branches())
        loss_of(model).backward()
        return gradients(model)

    single = branches()
    ((loss_of(single, 0) + loss_of(single, 1)) / 2).backward()
    for given in run_ranks(train, 2):
        assert_close(given, gradients(single))


def test_methods_read_through_the_wrapper_are_like_the_models() -> None:
    def use() -> list[object]:
        model: Any = ddp(branches())
        method = model.encode
        same = pickle.loads(pickle.dumps(method))
        return [
            method.__name__,
            method.__doc__,
            method.__self__ is unwrap(model),
            method == model.encode,
            method == unwrap(model).encode,
            method in {unwrap(model).encode},
            torch.equal(same(batch(0)), method(batch(0))),
        ]

    for reply in run_ranks(use, 2):
        assert reply == ["encode", "Run a part of the model.", *[True] * 5]


def test_parameters_that_would_not_be_averaged_are_refused() -> None:
    def train() -> list[str]:
        model: Any = branches()
        model.first.requires_grad_(False)
        model = ddp(model)
        model(batch()).sum().backward()
        unwrap(model).first.requires_grad_(True)
        unfrozen = error_of(lambda: model(batch()), GroupError)
        model = ddp(unwrap(model))  # as it was told to
        model(batch()).sum().backward()
        parts = [
            lambda: setattr(model, "head", nn.Linear(4, 2)),
            lambda: model.add_module("head", nn.Linear(4, 2)),
            lambda: model.register_parameter("head", nn.Parameter(torch.ones(1))),
        ]
        model.note = "plain values are welcome"
        return [unfrozen, *(error_of(add, ConfigError) for add in parts)]

    for unfrozen, *added in run_ranks(train, 2):
        assert "trainable now: first.weight, first.bias" in unfrozen
        assert "ddp(unwrap(model))" in unfrozen
        assert all("head was added to a Branches" in text for text in added)


class Adapted(nn.Module):
    """Adds a small layer to a large one, as a low-rank adapter does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)  # type: ignore[no-any-return]


def test_parameters_that_were_added_after_wrapping_are_named_at_the_next_forward() -> None:
    def scale(model: Branches) -> None:
        model.second.register_parameter("scale", nn.Parameter(torch.ones(1)))

    def adapt(model: Branches) -> None:
        model.first = cast("Any", Adapted(model.first))

    def train(add: Callable[[Branches], None]) -> tuple[list[str], dict[str, torch.Tensor]]:
        model = ddp(branches())
        model(batch()).sum().backward()
        add(unwrap(model))
        with torch.no_grad():
            model(batch())
        texts = [error_of(lambda: model(batch()), GroupError) for _ in range(2)]
        model = ddp(unwrap(model), find_unused_parameters=True)
        model.zero_grad()
        model(batch()).sum().backward()
        return texts, gradients(model)

    for add, told in ((scale, "second.scale"), (adapt, "first.extra.weight, first.extra.bias")):
        (texts, one), (_, other) = run_ranks(train, 2, args=(add,))
        assert all(f"were added later: {told}. Their" in text for text in texts)
        assert_close(one, other)


def test_frozen_parameters_may_be_added_and_are_watched_from_then_on() -> None:
    def train() -> str:
        model: Any = ddp(branches())
        unwrap(model).note = nn.Parameter(torch.ones(1), requires_grad=False)
        model(batch()).sum().backward()
        unwrap(model).note.requires_grad_(True)
        return error_of(lambda: model(batch()), GroupError)

    for text in run_ranks(train, 2):
        assert "trainable now: note" in text


# ----------------------------------------------------------------------- re-entrant checkpointing


class Checkpointed(nn.Module):
    """Uses one layer in several checkpointed parts."""

    def __init__(self, *, reentrant: bool, times: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return x


def checkpointed(*, reentrant: bool, times: int) -> Checkpointed:
    torch.manual_seed(0)
    return Checkpointed(reentrant=reentrant, times=times)


@pytest.mark.parametrize(
    ("times", "options", "told"),
    [
        (2, {}, " gets a gradient more than once in one backward"),
        (1, {"find_unused_parameters": True}, "hides parameters from the search: shared.weight"),
    ],
)
def test_reentrant_checkpointing_that_fails_names_the_choices(
    times: int, options: dict[str, Any], told: str
) -> None:
    def train() -> str:
        model = ddp(checkpointed(reentrant=True, times=times), **options)
        return error_of(lambda: model(batch()).sum().backward(), ConfigError)

    for text in run_ranks(train, 2):
        assert told in text
        assert "shared." in text
        assert "use_reentrant=False" in text
        assert "static_graph=True" in text


@pytest.mark.parametrize(
    ("reentrant", "times", "options"),
    [
        (True, 1, {}),
        (True, 2, {"static_graph": True}),
        (False, 2, {}),
        (False, 2, {"find_unused_parameters": True}),
    ],
)
def test_checkpointing_that_works_gives_the_gradients_of_one_process(
    reentrant: bool, times: int, options: dict[str, Any]
) -> None:
    def train() -> dict[str, torch.Tensor]:
        model = ddp(checkpointed(reentrant=reentrant, times=times), **options)
        for _ in range(2):
            model.zero_grad()
            model(batch()).sum().backward()
        return gradients(model)

    single = checkpointed(reentrant=False, times=times)
    ((single(batch(0)).sum() + single(batch(1)).sum()) / 2).backward()
    for given in run_ranks(train, 2):
        assert_close(given, gradients(single))


# ------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("how", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_are_those_of_one_process_but_for_rounding(how: Any) -> None:
    def train() -> dict[str, torch.Tensor]:
        model = ddp(branches(), compress=how)
        for _ in range(2):
            model.zero_grad()
            model(batch()).sum().backward()
        return gradients(model)

    expected = expected_gradients([ALL, ALL])
    one, other = run_ranks(train, 2)
    for name, value in expected.items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], value, rtol=0.02, atol=0.02)
    if how != "powersgd":  # which begins at its 1000th step
        assert any(not torch.equal(one[name], value) for name, value in expected.items())


def test_a_left_out_parameter_leaves_nothing_in_the_memory_of_power_sgd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wide(Branches):
        """Has matrices that are worth compressing."""

        def __init__(self) -> None:
            super().__init__()
            for name in ALL.split():
                setattr(self, name, nn.Linear(32, 32))

    def at_once(group: Any) -> Any:
        return PowerSGDState(group, start_powerSGD_iter=2)

    def train() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = ddp(Wide(), compress="powersgd")
        x = torch.randn(4, 32)
        for _ in range(4):
            model(x).sum().backward()
        names = "first second" if is_rank0() else ALL
        error_of(lambda: model(x, names).sum().backward(), GroupError)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        return gradients(model)

    monkeypatch.setattr(powerSGD_hook, "PowerSGDState", at_once)
    one, other = run_ranks(train, 2, timeout=20)
    assert_close(one, other)
    assert all(value.isfinite().all() for value in one.values())


def test_ranks_that_compress_differently_are_told() -> None:
    def wrap() -> str:
        return error_of(
            lambda: ddp(branches(), compress="fp16" if is_rank0() else None), GroupError
        )

    for text in run_ranks(wrap, 2):
        assert "option compress: fp16 on rank 0; None on rank 1" in text
