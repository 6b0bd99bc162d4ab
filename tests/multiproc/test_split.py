"""Models split over pretended devices, compared with the unsplit model on the CPU."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# DDP and optimizers import it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpkit.checkpoint import barrier_load, rank0_save
from ddpkit.errors import ConfigError, GroupError
from ddpkit.group import get_device, get_rank, process_group
from ddpkit.plan import plan_split
from ddpkit.split import split_model_across_devices
from ddpkit.testing import run_ranks
from ddpkit.wrap import _with_sync_batchnorm, ddp, unwrap
from tests.multiproc import fake_device
from tests.split_models import MODELS, TiedTransformer, ToyModel, UNet, vit_b_16

pytestmark = pytest.mark.skipif(not fake_device.IS_THERE, reason=fake_device.WHY_NOT)

STEPS = 5


def on_devices(check: Callable[[list[str]], Any]) -> list[Any]:
    """Call a function in two processes: with two devices in one, with three in the other."""
    return run_ranks(lambda: check(fake_device.install(2 + get_rank())), init_group=False)


def with_two_devices(check: Callable[[list[str]], Any]) -> None:
    run_ranks(lambda: check(fake_device.install(2)) if get_rank() == 0 else None, init_group=False)


def train(model: nn.Module, draw: Callable[[], Any], optimizer: Any = None) -> list[torch.Tensor]:
    """Train and return the losses, and the gradients of the first step."""
    # Adam would make steps of rounding errors where gradients are zero, as for biases of keys.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step + 100 * get_rank())
        inputs = draw()
        optimizer.zero_grad()
        output = model(inputs)
        loss = (output * torch.linspace(0, 1, output.numel()).view_as(output).to(output)).mean()
        loss.backward()
        seen.append(loss.detach().cpu())
        if step == 0:
            seen += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return seen


def assert_same(split: nn.Module, plain: nn.Module, **near: Any) -> None:
    ours, theirs = split.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    torch.testing.assert_close({name: t.cpu() for name, t in ours.items()}, theirs, **near)


def devices_of(model: nn.Module) -> set[str]:
    return {str(tensor.device) for tensor in model.parameters()}


def no_mode_is_left() -> bool:
    return torch._C._len_torch_function_stack() == 0


# ------------------------------------------------------------------------- like the unsplit model


def named_models(*quick: str) -> list[Any]:
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.drill) for name in MODELS
    ]


@pytest.mark.parametrize("name", named_models("tutorial", "vit", "tied", "unet"))
def test_a_split_model_trains_like_the_unsplit_one(name: str) -> None:
    def check(devices: list[str]) -> None:
        make, draw = MODELS[name]
        torch.manual_seed(0)
        plain = make()
        split = split_model_across_devices(copy.deepcopy(plain), devices)
        # The tutorial's model has two layers.
        used = set(devices) if name != "tutorial" else {devices[0], devices[-1]}
        assert len(devices_of(split)) == len(used)
        torch.testing.assert_close(train(split, draw), train(plain, draw))
        assert_same(split, plain)
        split.eval(), plain.eval()
        inputs = draw()
        torch.testing.assert_close(split(inputs).cpu(), plain(inputs))
        assert no_mode_is_left()

    on_devices(check)


@pytest.mark.parametrize("name", named_models("tutorial", "tied", "unet"))
def test_a_plan_from_a_sample_is_followed(name: str) -> None:
    def check(devices: list[str]) -> None:
        make, draw = MODELS[name]
        torch.manual_seed(0)
        plain = make().eval()
        plan = plan_split(plain, devices, sample=draw())
        split = split_model_across_devices(copy.deepcopy(plain), plan=plan)
        for block in plan.blocks:
            assert devices_of(split.get_submodule(block.name)) <= {str(block.device)}
        inputs = draw()
        torch.testing.assert_close(split(inputs).cpu(), plain(inputs))

    on_devices(check)


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_the_large_vision_transformer_does_too() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        plain = vit_b_16()
        split = split_model_across_devices(copy.deepcopy(plain), devices)
        assert devices_of(split) == set(devices)
        draw = MODELS["vit"][1]
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(train(split, draw), train(plain, draw), **near)
        assert_same(split, plain, **near)

    on_devices(check)


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_the_large_vision_transformer_does_too_under_ddp() -> None:
    def use() -> None:
        fake_device.install(4)
        torch.manual_seed(get_rank())
        plain = vit_b_16()
        split = split_model_across_devices(copy.deepcopy(plain), devices_per_rank=2)
        assert len(devices_of(split)) == 2
        draw = MODELS["vit"][1]
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(train(ddp(split), draw), train(ddp(plain), draw), **near)
        assert_same(split, plain, **near)

    run_ranks(use, timeout=200.0)


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize("name", named_models("tutorial", "unet"))
def test_split_models_train_in_step_under_ddp(name: str, each: int) -> None:
    def use() -> None:
        fake_device.install(2 * each)
        make, draw = MODELS[name]
        torch.manual_seed(get_rank())  # Models start off different; rank 0's must win.
        plain = make()
        split = split_model_across_devices(copy.deepcopy(plain), devices_per_rank=each)
        before = devices_of(split)
        assert before <= {f"npx:{each * get_rank() + index}" for index in range(each)}
        assert get_device() == torch.device("cpu")  # where these ranks were told to be
        assert len(before) == (each if name != "tutorial" else 2)
        wrapped = ddp(split)
        assert devices_of(split) == before
        assert getattr(wrapped, "device_ids", "none") is None
        torch.testing.assert_close(train(wrapped, draw), train(ddp(plain), draw))
        assert_same(split, plain)
        assert list(wrapped.state_dict()) == list(plain.state_dict())
        assert devices_of(copy.deepcopy(wrapped)) == before
        assert no_mode_is_left()

    run_ranks(use)


def test_the_first_device_of_a_split_is_that_of_the_rank() -> None:
    def use() -> None:
        fake_device.install(4)
        with process_group("gloo") as world:
            assert str(world.device) == get_device().type + f":{get_rank()}" == f"npx:{get_rank()}"
            split_model_across_devices(ToyModel(), devices_per_rank=2)
            assert str(get_device()) == f"npx:{2 * get_rank()}"

    run_ranks(use, init_group=False)


def test_blocks_keep_their_hooks_where_batch_norm_is_exchanged() -> None:
    def check(devices: list[str]) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        split = split_model_across_devices(
            model, plan={"0": devices[0], "1": devices[1], "2": devices[1]}
        )
        converted = _with_sync_batchnorm(split)
        assert isinstance(converted[1], nn.SyncBatchNorm)
        converted.eval()
        assert str(converted(torch.ones(1, 2)).device) == devices[1]
        assert [len(part._forward_pre_hooks) for part in converted] == [1, 1, 1]

    with_two_devices(check)


def test_splits_that_differ_between_ranks_are_named_by_ddp() -> None:
    def use() -> None:
        devices = fake_device.install(2)
        first, last = devices if get_rank() == 0 else devices[::-1]
        model = split_model_across_devices(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)),
            plan={"0": first, "1": first if get_rank() == 0 else last, "2": last},
        )
        with pytest.raises(GroupError, match=r"1\.weight.* device 1 of 2.* device 2 of 2"):
            ddp(model)

    run_ranks(use)


def test_ddp_leaves_a_split_model_where_it_is_even_on_one_device() -> None:
    def use() -> None:
        devices = fake_device.install(2)
        model = split_model_across_devices(ToyModel(), [devices[1]])
        assert devices_of(ddp(model)) == {devices[1]}
        assert devices_of(ddp(ToyModel())) == {"cpu"}  # where such ranks are

    run_ranks(use)


@pytest.mark.parametrize("pretended", [False, True])
def test_a_split_model_saves_and_loads_like_any(tmp_path: Path, pretended: bool) -> None:
    def use() -> None:
        devices = fake_device.install(2) if pretended else ["cpu", "cpu"]
        torch.manual_seed(get_rank())
        plain, split = ddp(UNet()), ddp(split_model_across_devices(UNet(), devices))
        train(split, MODELS["unet"][1])
        state: Any = split
        if pretended:  # such a tensor is of another class, which cannot be saved
            state = {name: tensor.cpu() for name, tensor in split.state_dict().items()}
        rank0_save({"model": state}, tmp_path / "split.pt")
        barrier_load(tmp_path / "split.pt", into={"model": plain})
        assert_same(unwrap(split), unwrap(plain))
        rank0_save({"model": plain}, tmp_path / "plain.pt")
        again = split_model_across_devices(UNet(), devices)
        before = devices_of(again)
        barrier_load(tmp_path / "plain.pt", into={"model": again})
        assert_same(again, unwrap(plain))
        assert devices_of(again) == before == set(devices)

    run_ranks(use)


# -------------------------------------------------------------------------------------- placement


def test_tied_weights_stay_tied_and_an_optimizer_built_before_goes_on() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        plain = TiedTransformer()
        split = copy.deepcopy(plain)
        early = torch.optim.SGD(split.parameters(), lr=0.01, momentum=0.9)
        parameters = list(split.parameters())
        split_model_across_devices(split, devices)
        assert split.head.weight is split.embedding.weight
        assert all(a is b for a, b in zip(parameters, split.parameters(), strict=True))
        draw = MODELS["tied"][1]
        torch.testing.assert_close(train(split, draw, early), train(plain, draw))
        assert_same(split, plain)

    on_devices(check)


def test_an_optimizer_that_has_stepped_is_brought_along_and_is_not_wrong_silently() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        plain = ToyModel()
        draw = MODELS["tutorial"][1]
        optimizers = []
        models = [plain, copy.deepcopy(plain), copy.deepcopy(plain)]
        for model in models:
            optimizers.append(torch.optim.Adam(model.parameters(), lr=0.001))
            train(model, draw, optimizers[-1])
            assert model.net1.weight.grad is not None
        for model in models[1:]:
            split_model_across_devices(model, devices)
            assert model.net2.weight.grad.device == model.net2.weight.device  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="device"):
            train(models[2], draw, optimizers[2])
        optimizers[1].load_state_dict(optimizers[1].state_dict())
        torch.testing.assert_close(
            train(models[1], draw, optimizers[1]), train(plain, draw, optimizers[0])
        )

    on_devices(check)


def test_a_buffer_that_two_modules_share_stays_one() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.a.register_buffer("count", torch.zeros(1))
            self.b.register_buffer("count", self.a.get_buffer("count"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    def check(devices: list[str]) -> None:
        split = split_model_across_devices(Sharing(), plan=dict.fromkeys("ab", devices[1]))
        assert split.a.count is split.b.count
        assert str(split.a.count.device) == devices[1]

    with_two_devices(check)


def test_a_module_that_is_in_two_blocks_stays_one() -> None:
    def check(devices: list[str]) -> None:
        norm = nn.BatchNorm1d(3)
        model = Whole(
            lambda m, x: m.last(m.first(x)) + m.first(x),
            first=nn.Sequential(nn.Linear(3, 3), norm),
            last=nn.Sequential(norm, nn.Linear(3, 3)),
        )
        expected = copy.deepcopy(model)(X)
        split: Any = split_model_across_devices(
            model, plan=dict.fromkeys(("first", "last"), devices[1])
        )
        assert split.first[1] is split.last[0]
        assert {str(buffer.device) for buffer in norm.buffers()} == {devices[1]}
        torch.testing.assert_close(split(X).cpu(), expected)

    with_two_devices(check)


def test_a_module_that_keeps_its_tensors_is_named() -> None:
    class Stubborn(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return self

    def check(devices: list[str]) -> None:
        model = nn.Sequential(nn.Linear(2, 2), Stubborn(2, 2))
        with pytest.raises(ConfigError, match=r"there is still 1\.weight on cpu and not npx:1, 1"):
            split_model_across_devices(model, devices[:2])

    with_two_devices(check)


def test_copies_and_pickles_are_split_too() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        plain = TiedTransformer().eval()
        split = split_model_across_devices(copy.deepcopy(plain), devices)
        tokens = torch.randint(0, 11, (2, 6))
        expected = plain(tokens)
        for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split)), copy.copy(split)):
            assert devices_of(other) == devices_of(split)
            assert isinstance(other, TiedTransformer)
            assert other.head.weight is other.embedding.weight
            torch.testing.assert_close(other(tokens).cpu(), expected)
        moved = copy.deepcopy(split).to(devices[1])
        torch.testing.assert_close(moved(tokens).cpu(), expected)
        assert {str(moved(tokens).device)} == devices_of(moved) == {devices[1]}

    on_devices(check)


def test_a_block_may_be_exchanged_later() -> None:
    def check(devices: list[str]) -> None:
        split = split_model_across_devices(ToyModel(), devices[:2])
        x = torch.randn(3, 10)
        state = {name: tensor.cpu() for name, tensor in split.state_dict().items()}
        expected = split(x).cpu()
        split.load_state_dict(
            {name: tensor.to(devices[0]) for name, tensor in state.items()}, assign=True
        )
        assert devices_of(split) == {devices[0]}
        torch.testing.assert_close(split(x).cpu(), expected)
        split.net1 = nn.Identity()  # type: ignore[assignment]
        assert str(split(x).device) == devices[0]

    with_two_devices(check)


# ---------------------------------------------------------------------------- how blocks are called


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Record:
    value: torch.Tensor
    note: str = "kept"


class Part(nn.Module):
    """A block whose forward takes whatever a test gives it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.weight, *args, **kwargs)


class Whole(nn.Module):
    """Two blocks, and a forward that a test gives."""

    def __init__(
        self, run: Callable[..., Any], first: nn.Module | None = None, last: Any = None
    ) -> None:
        super().__init__()
        self.first = first or nn.Linear(3, 3)
        self.last = last or nn.Linear(3, 3)
        self.own = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def compare(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Run and differentiate a model, whole and split in two."""

    def check(devices: list[str]) -> None:
        names = {"first": devices[0], "last": devices[1]}
        split = split_model_across_devices(copy.deepcopy(model), plan=names)
        outputs = []
        for one in (model, split):
            output = one(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            output.sum().backward()
            outputs.append(output.detach().cpu())
        torch.testing.assert_close(*outputs)
        for (name, a), b in zip(model.named_parameters(), split.parameters(), strict=True):
            torch.testing.assert_close(b.grad if b.grad is None else b.grad.cpu(), a.grad, msg=name)
        assert_same(split, model)
        assert no_mode_is_left()

    with_two_devices(check)


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda m, x: m.last(m.first(x)) + x, id="input skips all"),
        pytest.param(lambda m, x: m.first(x) + m.last(m.first(x)), id="output skips a block"),
        pytest.param(lambda m, x: torch.cat([m.first(x), m.last(x), x]), id="concatenated"),
        pytest.param(lambda m, x: torch.stack((m.first(x), m.last(x))), id="stacked"),
        pytest.param(lambda m, x: m.first(m.last(m.first(m.last(x)))), id="called several times"),
        pytest.param(lambda m, x: m.last(input=m.first(input=x)), id="keywords"),
        pytest.param(lambda m, x: F.linear(m.last(x), m.first.weight), id="weight used directly"),
        pytest.param(
            lambda m, x: m.last(x) * m.own + (m.first(x) @ m.own).sum(), id="own parameter"
        ),
        pytest.param(lambda m, x: F.mse_loss(m.last(x), m.first(x)), id="loss inside"),
        pytest.param(lambda m, x: m.last(x).sum() * m.first(x).mean(), id="two numbers"),
        pytest.param(lambda m, x: m.first(x) * m.last(x).sum(), id="number with a tensor"),
        pytest.param(lambda m, x: 2 * m.last(m.first(x)) + torch.tensor(3.0), id="scalars"),
        pytest.param(
            lambda m, x: m.first(x)[m.last(x).argmax(1) % 2] + m.last(x)[x.long()[:, 0] % 2],
            id="indices",
        ),
        pytest.param(
            lambda m, x: torch.where(m.first(x) > 0, m.last(x), torch.zeros(())), id="where"
        ),
        pytest.param(lambda m, x: torch.einsum("ab,ab->a", m.first(x), m.last(x)), id="einsum"),
        pytest.param(lambda m, x: m.first(x).add_(m.last(x)), id="in place, first"),
        pytest.param(lambda m, x: m.last(x).add_(m.first(x)).mul_(x), id="in place, last"),
        pytest.param(
            lambda m, x: F.batch_norm(m.last(x), m.mean, m.variance, training=True), id="statistics"
        ),
        pytest.param(
            lambda m, x: (
                checkpoint(m.last, checkpoint(m.first, x, use_reentrant=False), use_reentrant=False)
                + x
            ),
            id="activation checkpoints",
        ),
        pytest.param(
            lambda m, x: sum(
                gradient.square().sum()
                for gradient in torch.autograd.grad(
                    m.last(m.first(x).tanh()).square().sum(),
                    (m.first.weight, m.last.weight),
                    create_graph=True,
                )
            ),
            id="gradients inside",
        ),
    ],
)
def test_whatever_the_models_own_code_does(run: Callable[..., Any]) -> None:
    compare(Whole(run), X)


def test_writes_into_a_tensor_go_to_that_tensor() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(model.first(x).detach())
        out[0] = model.last(x)[0].detach()
        out += model.last(x).detach()
        torch.add(out, model.last(x).detach(), out=out)
        out.view_as(model.last(x))[1] = 7.0
        model.mean.copy_(out.mean(0))
        return model.last(out) + model.first(x)  # type: ignore[no-any-return]

    compare(Whole(run), X)


def test_devices_may_be_asked_and_given_by_hand() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.first(x)
        z = model.last(y.to(model.last.weight.device))
        assert z.device == model.last.weight.device
        mask = torch.ones(3, device=z.device)
        return z * mask + y.to(z) + y.type_as(z)  # type: ignore[no-any-return]

    compare(Whole(run), X)


def test_a_part_of_a_block_may_be_called_by_the_model() -> None:
    last = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    compare(Whole(lambda m, x: m.last[2](m.last[1](m.last[0](m.first(x)))) + x, last=last), X)


def test_nested_inputs_are_moved_and_other_things_are_left() -> None:
    sent: dict[str, Any] = {"pairs": [Pair(X, (X, None)), Pair(X, 2)], "record": Record(X)}

    def last(weight: torch.Tensor, pairs: Any, record: Record, *, scale: float, flag: bool) -> Any:
        assert isinstance(pairs[0], Pair)
        assert (record.note, flag, pairs[0].right[1]) == ("kept", True, None)
        return weight * scale * (pairs[0].left + pairs[0].right[0] * pairs[1].right + record.value)

    def run(model: Any, things: dict[str, Any]) -> Any:
        before = [id(things["pairs"]), id(things["pairs"][0]), id(things["record"].value)]
        result = model.last(things["pairs"], record=things["record"], scale=2.0, flag=True)
        after = [id(things["pairs"]), id(things["pairs"][0]), id(things["record"].value)]
        assert after == before  # the caller's own are not changed
        return result + model.first(X)

    compare(Whole(run, last=Part(last)), sent)


def test_what_a_block_adds_to_a_list_or_a_dict_is_there() -> None:
    def last(weight: torch.Tensor, found: list[Any], named: dict[str, Any]) -> Any:
        found.append(found[0] * weight)
        named["new"] = named.pop("old") * weight
        return named["kept"] * weight

    def run(model: Any, x: torch.Tensor) -> Any:
        found, named = [model.first(x)], {"old": model.first(x), "kept": x}
        kept = found[0]
        result = model.last(found, named)
        assert len(found) == 2
        assert found[0] is kept
        assert named.keys() == {"new", "kept"}
        assert named["kept"] is x
        return result + found[1] + named["new"]

    compare(Whole(run, last=Part(last)), X)


def test_what_a_block_does_to_its_input_in_place_is_done() -> None:
    last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    compare(Whole(lambda m, x: (y := m.first(x)) + 0 * x + m.last(y) + 2 * y, last=last), X)
    compare(Whole(lambda m, x: m.last(y := m.first(x) - 1) + 2 * y, last=last), X)


def test_one_tensor_in_several_places_stays_one() -> None:
    def last(weight: torch.Tensor, x: torch.Tensor, more: list[torch.Tensor], key: Any) -> Any:
        assert x is more[0]
        assert x is key
        return weight * x

    def run(model: Any, x: torch.Tensor) -> Any:
        y = model.first(x)
        return model.last(y, [y], key=y) + y

    compare(Whole(run, last=Part(last)), X)


def test_packed_sequences_and_states_reach_a_recurrent_layer() -> None:
    def run(model: Any, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        embedded = model.first(x)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths)
        output, state = model.last(packed, embedded.new_zeros(1, 2, 3))
        again, _ = model.last(embedded, state)
        with torch.no_grad():  # as a model does that has the weights of its own
            weights = model.last.all_weights[0]
            torch._VF.rnn_tanh(*packed[:2], state.to(embedded), weights, True, 1, 0.0, True, False)
        return nn.utils.rnn.pad_packed_sequence(output)[0].sum() + again.sum() + embedded.sum()

    model = Whole(run, last=nn.RNN(3, 3))  # an LSTM needs kernels of a device
    compare(model, torch.randn(4, 2, 3), torch.tensor([4, 2]))


def test_a_part_that_is_divided_itself_may_be_called_alone() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        inner = Whole(lambda m, x: m.first(x) + m.last(m.first(x)))
        outer = nn.ModuleDict({"inner": inner, "more": nn.Linear(3, 3)})
        expected = inner(X).detach()
        plan = {"inner.first": devices[0], "inner.last": devices[1], "more": devices[1]}
        split = split_model_across_devices(outer, plan=plan)
        torch.testing.assert_close(split["inner"](X).cpu(), expected)

    with_two_devices(check)


def test_models_may_run_in_several_threads() -> None:
    def check(devices: list[str]) -> None:
        torch.manual_seed(0)
        model = Whole(lambda m, x: m.first(x) + m.last(m.first(x)))
        expected = model(X).detach()
        split = split_model_across_devices(model, plan={"first": devices[0], "last": devices[1]})
        good: list[bool] = []

        @torch.no_grad()
        def work() -> None:
            outputs = [split(X).cpu() for _ in range(20)]
            good.append(all(torch.allclose(output, expected) for output in outputs))
            good.append(no_mode_is_left())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert good == [True] * 4

    with_two_devices(check)


# ------------------------------------------------------------------------------------- exceptions


class Fault(BaseException):
    """Like KeyboardInterrupt, something that `except Exception` does not catch."""


def raises_once(kind: type[BaseException]) -> Iterator[BaseException | None]:
    yield kind("on purpose")
    while True:
        yield None


@pytest.mark.parametrize("kind", [ValueError, Fault])
@pytest.mark.parametrize("where", ["block", "own code", "hook before", "hook after"])
def test_an_exception_leaves_nothing_behind(kind: type[BaseException], where: str) -> None:
    def check(devices: list[str]) -> None:
        faults = {where: raises_once(kind)}

        def point(name: str) -> None:
            error = next(faults.get(name, iter([None])))
            if error is not None:
                raise error

        def last(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            point("block")
            return weight * x

        def run(model: Any, x: torch.Tensor) -> torch.Tensor:
            y = model.first(x)
            point("own code")
            return y + model.last(y)  # type: ignore[no-any-return]

        model = Whole(run, last=Part(last))
        split = split_model_across_devices(model, plan={"first": devices[0], "last": devices[1]})
        split.last.register_forward_pre_hook(lambda *_: point("hook before"), prepend=True)
        split.last.register_forward_hook(lambda *_: point("hook after"), prepend=True)
        with pytest.raises(kind, match="on purpose"), torch.device("cpu"):
            split(X)
        assert no_mode_is_left()
        assert split(X).shape == X.shape
        assert no_mode_is_left()

    with_two_devices(check)


def test_a_model_may_catch_what_its_block_raises_and_go_on() -> None:
    def last(weight: torch.Tensor, x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise ValueError
        return weight * x

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ValueError), torch.device("cpu"):
            model.last(x, True)
        return model.first(x) + model.last(x, False)  # type: ignore[no-any-return]

    compare(Whole(run, last=Part(last)), X)


def test_a_block_may_call_itself() -> None:
    def last(weight: torch.Tensor, x: torch.Tensor, call: Any, depth: int) -> torch.Tensor:
        return weight * (call(x, call, depth - 1) if depth else x)

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.first(x) + model.last(x, model.last, 3)  # type: ignore[no-any-return]

    compare(Whole(run, last=Part(last)), X)


def test_other_modes_stay_in_their_order() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        with Counting() as inside:
            y = model.last(model.first(x)) + x
            assert torch.overrides._get_current_function_mode() is inside
        assert inside.calls >= 3
        z = y + model.first(x)
        with torch.device("cpu"):
            return z + model.first(y)  # type: ignore[no-any-return]

    compare(Whole(run), X)


def test_two_devices_inside_a_block_name_the_block() -> None:
    def check(devices: list[str]) -> None:
        stray = torch.ones(3, device=devices[0])
        model = Whole(lambda m, x: m.last(m.first(x)), last=Part(lambda w, x: w * x + stray))
        split = split_model_across_devices(model, plan={"first": devices[0], "last": devices[1]})
        with pytest.raises(RuntimeError, match=r"at least two devices.*block 'last', a Part on "):
            split(X)
        assert no_mode_is_left()

    with_two_devices(check)
