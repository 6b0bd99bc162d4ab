from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ddpkit.entrance import is_split
from ddpkit.errors import ConfigError
from ddpkit.group import choose_bound_device, place_of_this_rank
from ddpkit.plan import Block, SplitPlan, plan_split
from ddpkit.split import choose_devices, split_model_across_devices
from ddpkit.wrap import ddp
from tests.split_models import MODELS, TiedTransformer, ToyModel

CPUS = ["cpu", "cpu"]


# ------------------------------------------------------------------------------------- the result


@pytest.mark.parametrize("name", ["tutorial", "tied", "unet"])
def test_a_split_without_devices_changes_nothing(name: str) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    plain = make().eval()
    names = list(plain.state_dict())
    model = copy.deepcopy(plain)
    assert split_model_across_devices(model, ["cpu"] * 3) is model
    assert is_split(model)
    assert not is_split(plain)
    assert list(model.state_dict()) == names
    assert isinstance(model, type(plain))
    inputs = draw()
    torch.testing.assert_close(model(inputs), plain(inputs), atol=0, rtol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_split_too(copied: Any) -> None:
    model = split_model_across_devices(ToyModel(), CPUS)
    other = copied(model)
    assert type(other) is type(model)
    assert is_split(other)
    x = torch.randn(2, 10)
    assert torch.equal(other(x), model(x))


def test_a_split_model_can_be_dropped_without_a_collection() -> None:
    import weakref

    model = split_model_across_devices(ToyModel(), CPUS)
    seen = weakref.ref(model)
    del model
    assert seen() is None


def test_a_model_without_parts_is_one_block() -> None:
    model = split_model_across_devices(nn.Linear(2, 2), CPUS)
    assert type(model) is nn.Linear
    assert is_split(model)
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_classes_and_hooks_are_where_they_have_to_be() -> None:
    model = split_model_across_devices(TiedTransformer(), CPUS)
    assert type(model.embedding) is nn.Embedding
    assert type(model.layers) is nn.ModuleList
    assert [len(layer._forward_pre_hooks) for layer in model.layers] == [1] * len(model.layers)
    assert type(model).__name__ == "TiedTransformer"


def test_ddp_takes_a_split_model() -> None:
    model = split_model_across_devices(ToyModel(), CPUS)
    assert ddp(model) is model


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ddpkit"):
        split_model_across_devices(ToyModel(), ["cpu"])
    assert "ToyModel is split over cpu (100%)" in caplog.text


@pytest.mark.drill
@pytest.mark.timeout(120)
def test_a_split_model_can_be_compiled() -> None:
    torch.manual_seed(0)
    model = split_model_across_devices(TiedTransformer(2).eval(), CPUS)
    tokens = torch.randint(0, 11, (2, 4))
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    with pytest.raises(ConfigError, match=r"that torch\.compile has wrapped already"):
        split_model_across_devices(torch.compile(ToyModel()), CPUS)  # type: ignore[type-var]


# ----------------------------------------------------------------------------------------- errors


def refusal(model: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        split_model_across_devices(model, *args, **kwargs)
    return str(caught.value)


def test_only_plain_modules_are_split() -> None:
    assert "given a type; expected a torch.nn.Module" in refusal(ToyModel, CPUS)
    message = refusal(DataParallel(ToyModel()), CPUS)
    assert "wrapped in DataParallel already. Split the plain model first" in message


def test_a_second_split_is_refused() -> None:
    model = split_model_across_devices(ToyModel(), CPUS)
    assert "split already, or has a part that is" in refusal(model, CPUS)
    assert "split already" in refusal(nn.Sequential(model), CPUS)


def test_tensors_without_data_are_named() -> None:
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    assert "no data yet: 1.weight, 1.bias" in refusal(lazy, CPUS)
    assert "no data yet: weight, bias" in refusal(nn.Linear(2, 2, device="meta"), CPUS)


def test_one_way_of_naming_devices_is_enough() -> None:
    assert "devices and devices_per_rank" in refusal(ToyModel(), CPUS, devices_per_rank=2)
    assert "devices and plan, which say" in refusal(ToyModel(), CPUS, plan={"net1": "cpu"})


@pytest.mark.parametrize("devices", ["cuda:0", torch.device("cpu")])
def test_a_single_device_is_no_list(devices: Any) -> None:
    assert "needs a list of devices, such as" in refusal(ToyModel(), devices)


def test_devices_have_to_be_devices() -> None:
    assert "devices=[] was given" in refusal(ToyModel(), [])
    assert "'gpu9' was given as a device; expected one such as 'cuda:0'" in refusal(
        ToyModel(), ["gpu9"]
    )


def test_a_plan_has_to_be_one() -> None:
    assert "plan was given as a list; expected what plan_split()" in refusal(
        ToyModel(), plan=["cpu"]
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to see so many CUDA devices."""

    def pretend(count: int) -> None:
        monkeypatch.setattr("ddpkit.split.accelerator_type", lambda: "cuda" if count else None)
        monkeypatch.setattr("torch.accelerator.device_count", lambda: count)

    return pretend


def test_devices_that_do_not_exist_are_named_with_those_that_do(machine: Any) -> None:
    machine(0)
    message = refusal(ToyModel(), ["cuda:0", "cuda:1"])
    assert "split over cuda:0, cuda:1, but this process sees only the CPU" in message
    machine(2)
    message = refusal(ToyModel(), plan={"net1": "cuda:1", "net2": "cuda:2"})
    assert "split over cuda:2, but this process sees 2 x cuda" in message
    assert "split over xpu:0" in refusal(ToyModel(), ["xpu:0"])
    assert "split over meta" in refusal(ToyModel(), ["meta"])


def test_a_machine_without_accelerators_says_how_to_try(machine: Any) -> None:
    machine(0)
    for kwargs in ({}, {"devices_per_rank": 2}):
        message = refusal(ToyModel(), **kwargs)
        assert 'To try the split without, pass devices=["cpu", "cpu"].' in message


def test_names_that_the_plan_and_the_model_do_not_share_are_named() -> None:
    assert "net3" in refusal(ToyModel(), plan={"net1": "cpu", "net3": "cpu"})
    assert "net2" in refusal(ToyModel(), plan={"net1": "cpu"})
    other = plan_split(TiedTransformer(), CPUS)
    assert "made for another model" in refusal(ToyModel(), plan=other)
    smaller = plan_split(nn.Sequential(nn.Linear(2, 2)), ["cpu"])
    larger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "says nothing of 1.weight, 1.bias" in refusal(larger, plan=smaller)


def test_a_tensor_cannot_be_on_two_devices(machine: Any) -> None:
    machine(2)
    first, last = torch.device("cuda:0"), torch.device("cuda:1")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    plan = SplitPlan((first, last), (Block("0", first, 0, 1), Block("1", last, 1, 1)), ("",))
    message = refusal(model, plan=plan)
    assert "0.weight and 1.weight are one tensor, but the plan puts them on cuda:0 and" in message
    # Given by name, it is the plan's own check.
    assert "weight" in refusal(model, plan={"0": "cuda:0", "1": "cuda:1"})


def test_nothing_has_moved_where_an_error_was_raised() -> None:
    model = ToyModel()
    refusal(model, plan={"net1": "cpu"})
    assert not is_split(model)
    assert type(model) is ToyModel


# ------------------------------------------------------------------------------- pure decisions


@pytest.mark.parametrize(
    ("count", "local_rank", "ranks", "each", "expected"),
    [
        (4, 0, 2, None, [0, 1]),
        (4, 1, 2, None, [2, 3]),
        (5, 1, 2, None, [2, 3]),
        (8, 3, 4, 2, [6, 7]),
        (8, 1, 2, 3, [3, 4, 5]),
        (4, 0, 1, None, [0, 1, 2, 3]),
        (2, 1, 2, None, [1]),
        (1, 0, 1, 1, [0]),
    ],
    ids=str,
)
def test_each_rank_gets_its_own_group(
    count: int, local_rank: int, ranks: int, each: int | None, expected: list[int]
) -> None:
    devices = choose_devices("cuda", count, local_rank, ranks, each)
    assert devices == [torch.device("cuda", index) for index in expected]


@pytest.mark.parametrize(
    ("count", "ranks", "each", "arithmetic"),
    [
        (6, 2, 4, "2 ranks x 4 devices = 8, but this machine has 6 cuda devices"),
        (1, 2, None, "2 ranks x 1 devices = 2, but this machine has 1 cuda devices"),
    ],
    ids=str,
)
def test_too_few_devices_are_told_with_the_arithmetic(
    count: int, ranks: int, each: int | None, arithmetic: str
) -> None:
    for rank in range(ranks):  # on all ranks alike
        with pytest.raises(ConfigError, match=arithmetic):
            choose_devices("cuda", count, rank, ranks, each)


@pytest.mark.parametrize("each", [0, -1, 1.5, "2", True])
def test_devices_per_rank_is_a_number(each: Any) -> None:
    with pytest.raises(ConfigError, match=r"devices_per_rank=.* expected a whole number"):
        choose_devices("cuda", 4, 0, 1, each)


@pytest.mark.parametrize(
    ("device", "count", "ranks", "bound"),
    [
        ("cpu", 0, 2, False),
        ("cuda:1", 2, 2, True),
        ("cuda:0", 1, 1, True),
        ("cuda:0", 1, 4, True),  # one visible device for each rank
        ("cuda:1", 4, 2, False),
        ("cuda:0", 2, 1, False),
        ("cuda:1", 3, 2, False),
    ],
)
def test_a_group_is_bound_only_where_no_rank_can_have_two_devices(
    device: str, count: int, ranks: int, bound: bool
) -> None:
    wanted = torch.device(device)
    assert choose_bound_device(wanted, count, ranks) == (wanted if bound else None)


def test_a_plain_process_has_the_machine_to_itself() -> None:
    place = place_of_this_rank()
    assert (place.local_rank, place.local_world_size) == (0, 1)
