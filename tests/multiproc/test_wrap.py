"""Wrapped models on two ranks, compared with one process that sees the whole batch."""

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.agree import barrier, on_rank0
from ddpkit.errors import GroupError
from ddpkit.group import get_rank, get_world_size, is_rank0
from ddpkit.testing import run_ranks
from ddpkit.wrap import ddp, unwrap

GLOBAL_BATCH = 64


def plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Tricky(nn.Module):
    """Has a child called `module`, a name that DDP uses too, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.norm(self.module(x))  # type: ignore[no-any-return]

    def doubled(self, x: float) -> float:
        return 2 * x


def wrapped_quietly(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ddp(model, **options)


def train(rank: int, world: int, steps: int, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Train on this rank's slice of batches that are the same for every world size."""
    torch.manual_seed(rank)  # Models start off different; rank 0's must win.
    model = wrap(plain_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    share = GLOBAL_BATCH // world
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(GLOBAL_BATCH, 8, generator=generator)
        y = torch.randint(0, 4, (GLOBAL_BATCH,), generator=generator)
        own = slice(rank * share, (rank + 1) * share)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
    return [
        item.detach().clone()
        for parameter in model.parameters()
        for item in (parameter, parameter.grad)
    ]


def test_twenty_steps_end_with_the_gradients_and_parameters_of_one_process() -> None:
    def use() -> list[torch.Tensor]:
        result = train(get_rank(), get_world_size(), 20, ddp)
        alone = train(0, 1, 20, lambda model: model)
        torch.testing.assert_close(result, alone, atol=1e-5, rtol=1e-4)
        return result

    first, second = run_ranks(use)
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def test_it_is_a_real_ddp_that_reads_like_the_model() -> None:
    def use() -> None:
        net: Any = Tricky()
        model = wrapped_quietly(net)
        assert DistributedDataParallel in type(model).__mro__
        assert unwrap(model) is net
        assert model.doubled(2) == 4
        assert model.norm is net.norm
        model.steps = 5
        model(torch.ones(2, 3)).sum().backward()
        assert (net.steps, model.steps) == (6, 6)
        model.norm = nn.BatchNorm1d(4, momentum=0.5)
        assert unwrap(model).norm.momentum == 0.5
        del model.steps
        assert not hasattr(net, "steps")
        model.extra = 1
        assert not hasattr(net, "extra")
        with pytest.raises(AttributeError, match="'Tricky' object has no attribute 'missing'"):
            model.missing  # noqa: B018
        assert next(model.named_parameters())[0] == "module.module.weight"

    run_ranks(use)


def test_containers_can_be_indexed_and_iterated_like_the_model() -> None:
    def use() -> None:
        net = norm_net()
        model = ddp(net)
        assert model[1] is net[1]
        assert len(model) == len(net)
        assert [*model] == [*net]
        with pytest.raises(TypeError):
            len(ddp(nn.Linear(2, 2)))  # type: ignore[arg-type]

    run_ranks(use)


def test_hidden_names_are_told_once() -> None:
    class Net(Tricky):
        dim = 3

        def join(self) -> None: ...

    def wrap() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(Net())
        return [str(item.message) for item in caught]

    first, second = run_ranks(wrap)
    assert len(first) == 1
    assert "named dim, join, module, which hide those of Net" in first[0]
    assert second == []


def test_states_have_the_names_of_the_model_and_both_styles_load() -> None:
    def use() -> None:
        net = Tricky()
        expected: Any = net.state_dict()
        model = wrapped_quietly(net)
        state = model.state_dict()
        assert list(state) == list(expected)
        assert state._metadata == expected._metadata
        long = {f"module.{name}": value + 1 for name, value in state.items()}
        model.load_state_dict(long)
        assert torch.equal(net.norm.weight, torch.full((4,), 2.0))
        shorter = {name: torch.zeros_like(value) for name, value in state.items()}
        model.load_state_dict(shorter)
        assert torch.equal(net.module.weight, torch.zeros(4, 3))
        model.load_state_dict({f"_orig_mod.module.{name}": value for name, value in long.items()})
        model.load_state_dict(model.state_dict())

    run_ranks(use)


def test_missing_and_unexpected_names_are_those_of_the_model() -> None:
    def use() -> None:
        model = wrapped_quietly(Tricky())
        state = model.state_dict()
        state["other.weight"] = state.pop("module.weight")
        found = model.load_state_dict(state, strict=False)
        assert found.missing_keys == ["module.weight"]
        assert found.unexpected_keys == ["other.weight"]

    run_ranks(use)


def test_versions_reach_the_modules_that_migrate_old_states() -> None:
    class Versioned(nn.Linear):
        _version = 3
        seen: int | None = None

        def _load_from_state_dict(
            self, state_dict: Any, prefix: str, metadata: Any, *rest: Any
        ) -> None:
            self.seen = metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def use() -> None:
        net: Any = nn.Sequential(Versioned(2, 2))
        model = ddp(net)
        state: Any
        for state in (model.state_dict(), nn.DataParallel(net).state_dict()):
            before = dict(state._metadata)
            net[0].seen = None
            model.load_state_dict(state)
            assert net[0].seen == 3
            assert dict(state._metadata) == before

    run_ranks(use)


def test_it_composes_with_averaging_compiling_copying_and_pickling() -> None:
    def use() -> None:
        net = norm_net()
        names = list(net.state_dict())
        model = ddp(net)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        assert list(averaged.state_dict()) == ["n_averaged", *(f"module.{name}" for name in names)]
        assert type(copy.deepcopy(model)) is nn.Sequential
        compiled: Any = torch.compile(model, backend="eager")
        assert unwrap(compiled) is net
        assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in names]
        compiled(torch.randn(4, 3)).sum().backward()
        inside: Any = torch.compile(norm_net(), backend="eager")
        compiled_inside = ddp(inside)
        assert type(unwrap(compiled_inside)) is nn.Sequential
        assert not hasattr(unwrap(compiled_inside), "_orig_mod")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is nn.Sequential

    run_ranks(use)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda net: net.append(nn.Linear(2, 2)),
            r"parameter 3\.weight: not there on rank 0; \(2, 2\)",
        ),
        (lambda net: net[0].requires_grad_(False), "trainable on rank 0; .* frozen on rank 1"),
        (lambda net: net.double(), "float32 .*on rank 0; .*float64"),
        (lambda net: net[1].register_buffer("extra", torch.ones(1)), "buffer 1.extra: not there"),
    ],
    ids=["count", "frozen", "type", "buffer"],
)
def test_differing_models_raise_on_every_rank(change: Callable[[Any], object], told: str) -> None:
    def use() -> str:
        net = norm_net()
        if get_rank() == 1:
            change(net)
        with pytest.raises(GroupError, match=told) as caught:
            ddp(net)
        barrier()
        return str(caught.value)

    first, second = run_ranks(use)
    assert first == second


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("find_unused_parameters", [False, True], "False on rank 0; True on rank 1"),
        ("bucket_cap_mb", [1, 25], "1 on rank 0; 25 on rank 1"),
        ("bucket_cap_mb", [None, 0.5], "None on rank 0; 0.5 on rank 1"),
    ],
)
def test_differing_options_are_named(name: str, values: list[Any], told: str) -> None:
    def use() -> None:
        options: dict[str, Any] = {name: values[get_rank()]}
        with pytest.raises(GroupError, match=f"option {name}: {told}"):
            ddp(norm_net(), **options)

    run_ranks(use)


def test_a_model_without_trainable_parameters_gets_rank_0s_values() -> None:
    def use() -> list[torch.Tensor]:
        torch.manual_seed(get_rank())
        teacher = norm_net().requires_grad_(False)
        teacher.register_buffer("phase", torch.complex(torch.randn(2), torch.randn(2)))
        assert ddp(teacher) is teacher
        return list(teacher.state_dict().values())

    first, second = run_ranks(use)
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def validate(model: nn.Module) -> float:
    return model(torch.randn(4, 3)).sum().item()  # type: ignore[no-any-return]


def validate_in_every_mode(model: nn.Module) -> None:
    validate(model)  # with gradients, by mistake
    with torch.no_grad():
        validate(model)
    with torch.inference_mode():
        validate(model)


def under_a_condition(model: nn.Module) -> None:
    if is_rank0():
        validate_in_every_mode(model)


def by_on_rank0(model: nn.Module) -> None:
    on_rank0(validate_in_every_mode, model)


@pytest.mark.parametrize("spelling", [under_a_condition, by_on_rank0])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "steps", [1, *(pytest.param(steps, marks=pytest.mark.drill) for steps in (0, 3))]
)
def test_validation_on_rank_0_alone_cannot_hang(
    steps: int, training: bool, spelling: Callable[[nn.Module], None]
) -> None:
    def use() -> list[Any]:
        torch.manual_seed(0)
        model = ddp(norm_net())
        for _ in range(steps):
            model(torch.randn(4, 3)).sum().backward()
        model.train(training)
        spelling(model)
        model.train()
        model.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        return [*model.buffers(), *(parameter.grad for parameter in model.parameters())]

    first, second = run_ranks(use, timeout=20.0)
    torch.testing.assert_close(first, second, atol=0, rtol=0)


@dataclass
class Output:
    loss: torch.Tensor


class Returning(nn.Module):
    """Returns its result inside something else."""

    def __init__(self, shape: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net = norm_net()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(self.net(x).sum())


@pytest.mark.parametrize(
    ("wrap", "unpack"),
    [
        (lambda loss: loss, lambda output: output),
        (lambda loss: {"parts": [None, (loss,)]}, lambda output: output["parts"][1][0]),
        (Output, lambda output: output.loss),
    ],
    ids=["tensor", "containers", "dataclass"],
)
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_buffers_are_rank_0s_after_backward_and_its_own_before(
    wrap: Any, unpack: Any, options: dict[str, Any]
) -> None:
    def use() -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(get_rank())
        net: Any = Returning(wrap)
        model = ddp(net, **options)
        pairs = []
        for _ in range(3):
            loss = unpack(model(torch.randn(4, 3)))
            between = net.net[1].running_mean.clone()
            loss.backward()
            pairs.append((between, net.net[1].running_mean.clone()))
        return pairs

    for (before_0, after_0), (before_1, after_1) in zip(*run_ranks(use), strict=True):
        assert torch.equal(after_0, before_0)
        assert torch.equal(after_1, after_0)
        assert not torch.equal(before_1, before_0)


def test_only_a_backward_that_averages_synchronises_buffers() -> None:
    def use() -> list[int]:
        model: Any = ddp(norm_net())
        calls = [0]
        original = model.synchronise_buffers

        def counted() -> None:
            calls[0] += 1
            original()

        model.synchronise_buffers = counted
        x = torch.randn(4, 3, requires_grad=True)
        counts = []
        with model.no_sync():
            model(x).sum().backward()
        counts.append(calls[0])
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), unwrap(model)[0].weight)
        counts.append(calls[0])
        (model(x).sum() + model(x).sum()).backward()  # Two forwards, one backward.
        counts.append(calls[0])
        loss = model(x).sum()
        handle = unwrap(model)[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        counts.append(calls[0])
        return counts

    assert run_ranks(use) == [[0, 0, 1, 1]] * 2


def test_synchronised_buffers_may_be_in_a_graph_that_is_kept() -> None:
    def use() -> None:
        model = ddp(norm_net())
        model.eval()  # The backward of batch norm then reads the buffers.
        x = torch.randn(4, 3, requires_grad=True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.sum() + slope.square().sum()).backward()
        assert x.grad is not None

    run_ranks(use)


class EveryType(nn.Module):
    """Has buffers of sizes that do not align by themselves, and of any layout."""

    def __init__(self) -> None:
        super().__init__()
        rank = get_rank()
        self.line = nn.Linear(3, 1)
        self.register_buffer("truth", torch.tensor([rank == 0] * 3))
        self.register_buffer("count", torch.tensor(2**60 + rank))
        self.register_buffer("halves", torch.full((3,), rank + 0.5, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.full((2,), complex(rank, -rank)))
        self.register_buffer("doubles", torch.full((2, 3), rank / 3, dtype=torch.float64).t())
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("octets", torch.tensor([rank, 7], dtype=torch.uint8))
        self.register_buffer("odd", torch.full((1,), float("nan") if rank else float("inf")))

    def forward(self, x: torch.Tensor) -> Any:
        return self.line(x).sum()


@pytest.mark.parametrize("larger", [0, 300_000], ids=["one message", "in buckets"])
def test_buffers_of_every_type_and_layout_are_rank_0s(larger: int) -> None:
    def use() -> list[tuple[str, str]]:
        net = EveryType()
        net.register_buffer("larger", torch.full((larger,), float(get_rank())))
        model = ddp(net)
        for step in range(2):
            for number, buffer in enumerate(net.buffers()):
                buffer.fill_(3 * step + number + get_rank())
            model(torch.randn(4, 3)).backward()
        net.register_buffer("late", torch.full((2,), get_rank() + 0.25))  # on all ranks
        model(torch.randn(4, 3)).backward()
        return [(str(b.dtype), str(b.flatten()[:6].tolist())) for b in net.buffers()]

    first, second = run_ranks(use)
    assert first == second
    assert first[-1] == ("torch.float32", "[0.25, 0.25]")
    assert first[1] == ("torch.int64", "[4]")


class Caching(nn.Module):
    """Has a buffer as long as its input, and one of its own size."""

    cache: torch.Tensor

    def __init__(self, other: int) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("cache", torch.zeros(2))
        self.register_buffer("other", torch.full((other,), 7.0 + get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != len(self.cache):
            self.cache = torch.arange(float(len(x))) + get_rank()
        return self.line(x).sum()  # type: ignore[no-any-return]


SIZES = pytest.mark.parametrize("other", [3, 300_000], ids=["one message", "in buckets"])


@SIZES
def test_buffers_that_all_ranks_resize_stay_rank_0s(other: int) -> None:
    def use() -> list[list[float]]:
        model: Any = ddp(Caching(other))
        found = []
        for length in (2, 4, 4, 1):
            model(torch.ones(length, 1)).backward()
            found.append([*model.cache.tolist(), *model.other[-3:].tolist()])
        return found

    for found in run_ranks(use, 2, timeout=20):
        assert found[1:] == [[0, 1, 2, 3, 7, 7, 7]] * 2 + [[0, 7, 7, 7]]


@SIZES
@pytest.mark.parametrize("lengths", [(4, 2, 4), (4, 2, 2), (1, 4, 2)], ids=str)
def test_buffers_that_rank_0_resizes_unlike_others_are_named(
    lengths: tuple[int, ...], other: int
) -> None:
    def use() -> str:
        model = ddp(Caching(other))
        model(torch.ones(2, 1)).backward()
        with pytest.raises(GroupError) as caught:
            model(torch.ones(lengths[get_rank()], 1)).backward()
        return str(caught.value)

    texts = set(run_ranks(use, 3, timeout=20))
    assert len(texts) == 1
    assert f"cache: ({lengths[0]},) torch.float32 on rank" in texts.copy().pop()
    assert "plain attribute" in texts.pop()


@SIZES
def test_a_rank_that_alone_resizes_a_buffer_is_told(other: int) -> None:
    def use() -> list[float]:
        model: Any = ddp(Caching(other))
        if get_rank() == 1:
            with pytest.raises(GroupError, match=r"\(2,\) .* on rank 0; \(5,\) .* on rank 1"):
                model(torch.ones(5, 1)).backward()
        else:
            model(torch.ones(2, 1)).backward()
        return model.other[-3:].tolist()  # type: ignore[no-any-return]

    assert run_ranks(use, 3, timeout=20)[::2] == [[7, 7, 7]] * 2


def test_buffers_may_be_left_to_each_rank() -> None:
    def use() -> Any:
        torch.manual_seed(get_rank())
        net = norm_net()
        ddp(net, forward_sync_buffers=False)(torch.randn(4, 3)).sum().backward()
        return net[1].running_mean

    first, second = run_ranks(use)
    assert not torch.equal(first, second)


def test_wrapping_leaves_the_debug_level_as_it_was() -> None:
    def use() -> bool:
        level = dist.get_debug_level()
        ddp(plain_net())
        return dist.get_debug_level() == level

    assert run_ranks(use) == [True, True]


def test_synchronised_batch_norm_on_the_cpu_is_skipped_with_one_warning() -> None:
    def use() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = ddp(norm_net(), sync_batchnorm=True)
        assert isinstance(unwrap(model)[1], nn.BatchNorm1d)
        return [str(item.message) for item in caught]

    first, second = run_ranks(use)
    assert len(first) == 1
    assert "sync_batchnorm=True has no effect" in first[0]
    assert second == []


def test_the_debug_level_detail_does_not_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def use() -> list[Any]:
        torch.manual_seed(get_rank())
        dist.set_debug_level_from_env()
        model = wrapped_quietly(norm_net())
        model(torch.randn(4, 3)).sum().backward()
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        return [parameter.grad for parameter in model.parameters()]

    first, second = run_ranks(use)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
