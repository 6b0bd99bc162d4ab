"""The plan of a split: balanced, complete, and worked out without devices."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddpkit import plan_split
from ddpkit.blocks import tensors_of
from ddpkit.errors import ConfigError
from ddpkit.plan import SplitPlan, checked_plan, placement_of
from ddpkit.rehearsal import Rehearsal

CUDA = [f"cuda:{index}" for index in range(4)]
LINEAR = 4 * 4 * (3 * 3 + 3)
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def placed(plan: SplitPlan) -> dict[str, str]:
    return {name: str(device) for name, device in plan.assignment.items()}


def check_covered(model: nn.Module, plan: SplitPlan) -> None:
    """Every tensor is in one block or named itself, and all its names are on one device."""
    homes: dict[int, torch.device] = {}
    for name, tensor in tensors_of(model):
        holders = [b for b in plan.blocks if b.name == "" or name.startswith(b.name + ".")]
        assert len(holders) + (name in plan.owned) == 1, name
        device = holders[0].device if holders else plan.owned[name]
        assert homes.setdefault(id(tensor), device) == device, name
    assert sum(plan.shares) == sum(plan.loads.values())


class Tied(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.places = nn.Parameter(torch.zeros(1, 5, 8))
        self.stack = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), count
        )
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.stack(self.embed(x) + self.places))
        return y


class UNet(nn.Module):
    """Joins what comes down with what comes up, level by level."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(6 if index else 3, 3) for index in range(3))
        self.down = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for layer in self.up:
            x = layer(x)
            if skips:
                skips.pop()
            if skips:
                x = torch.cat([x, skips[-1]], dim=-1)
        return x


# -------------------------------------------------------------------------------------- balance


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_no_plan_is_better_than_the_planned_one(
    sizes: list[int], devices: int, data: st.DataObject
) -> None:
    limits = data.draw(
        st.one_of(
            st.none(),
            st.lists(st.one_of(st.none(), st.integers(0, 120)), min_size=devices, max_size=devices),
        )
    )
    model = nn.Sequential(*(nn.Identity() for _ in sizes))
    weights = {str(index): size for index, size in enumerate(sizes)}
    best = best_of_all(sizes, limits or [None] * devices)
    if best is None:
        with pytest.raises(ConfigError):
            plan_split(model, CUDA[:devices], weights=weights, limits=limits)
        return
    plan = plan_split(model, CUDA[:devices], weights=weights, limits=limits)
    assert max(plan.shares) == best
    assert [block.bytes for block in plan.blocks] == sizes
    positions = [block.position for block in plan.blocks]
    assert positions == sorted(positions)


def best_of_all(sizes: list[int], limits: Sequence[int | None]) -> int | None:
    found = []
    for cuts in itertools.combinations_with_replacement(range(len(sizes) + 1), len(limits) - 1):
        ends = itertools.pairwise([0, *cuts, len(sizes)])
        loads = [sum(sizes[a:b]) for a, b in ends]
        if all(limit is None or load <= limit for load, limit in zip(loads, limits, strict=True)):
            found.append(max(loads))
    return min(found, default=None)


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([100, 1, 1, 1], (100, 1, 1, 1)),
        ([5] * 8, (10, 10, 10, 10)),
        ([1, 100, 1], (1, 100, 1, 0)),
        ([7, 7], (7, 7, 0, 0)),
    ],
)
def test_known_plans(sizes: list[int], shares: tuple[int, ...]) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in sizes))
    weights = {str(index): size for index, size in enumerate(sizes)}
    assert plan_split(model, CUDA, weights=weights).shares == shares


def test_a_heavy_module_is_opened_and_light_ones_are_not() -> None:
    model = nn.Sequential(layers(2), layers(6), layers(2))
    plan = plan_split(model, CUDA[:2])
    assert placed(plan) == {
        "0": "cuda:0",
        "1.0": "cuda:0",
        "1.1": "cuda:0",
        "1.2": "cuda:0",
        "1.3": "cuda:1",
        "1.4": "cuda:1",
        "1.5": "cuda:1",
        "2": "cuda:1",
    }
    assert plan.opened == ("", "1")


def test_lighter_modules_are_opened_where_that_makes_the_heaviest_device_lighter() -> None:
    plan = plan_split(nn.Sequential(layers(3), layers(3), layers(3)), CUDA[:2])
    assert plan.shares == (5 * LINEAR, 4 * LINEAR) or plan.shares == (4 * LINEAR, 5 * LINEAR)
    assert plan.opened == ("", "1")


def test_nothing_more_is_opened_for_a_few_percent() -> None:
    # 10.5 on each device would be possible by opening both.
    weights = {"0.0": 10, "0.1": 1, "1.0": 1, "1.1": 9.5e0}
    model = nn.Sequential(layers(2), layers(2))
    plan = plan_split(model, CUDA[:2], weights={k: 100 * v for k, v in weights.items()})
    assert plan.shares == (1100, 1050)
    assert plan.opened == ("",)


def test_a_residual_model_is_balanced_better_than_its_stages_are() -> None:
    plan = plan_split(nn.Sequential(layers(1), layers(2), layers(9), layers(20)), CUDA)
    assert max(plan.shares) == 8 * LINEAR


def test_modules_are_opened_to_keep_within_limits() -> None:
    plan = plan_split(layers(4).append(layers(4)), CUDA[:3], limits=[2 * LINEAR, None, None])
    assert plan.shares[0] <= 2 * LINEAR
    plan = plan_split(nn.Sequential(layers(4)), CUDA[:2], limits={"cuda:1": LINEAR})
    assert plan.shares == (3 * LINEAR, LINEAR)


def test_more_devices_than_blocks_leave_some_empty() -> None:
    plan = plan_split(layers(2), CUDA)
    assert plan.loads == dict(zip(map(torch.device, CUDA), (LINEAR, LINEAR, 0, 0), strict=True))


def test_one_device_twice_has_the_sum_of_both_loads() -> None:
    plan = plan_split(layers(4), ["cpu", "cpu"])
    assert plan.loads == {torch.device("cpu"): 4 * LINEAR}
    assert plan.shares == (2 * LINEAR, 2 * LINEAR)
    assert [block.position for block in plan.blocks] == [0, 0, 1, 1]


def test_no_split_and_weights_are_heeded() -> None:
    model = nn.Sequential(layers(3), layers(1))
    assert placed(plan_split(model, CUDA[:2], no_split=["0"])) == {"0": "cuda:0", "1": "cuda:1"}
    weights = {"0.0": 5, "0.1": 1, "0.2": 1, "1": 3}
    assert plan_split(model, CUDA[:2], weights=weights).shares == (5, 5)


# ---------------------------------------------------------------------------------- completeness


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "model",
    [
        Tied(),
        UNet(),
        nn.Linear(3, 3),
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        nn.Sequential(nn.LSTM(3, 4), nn.BatchNorm1d(4)),
        nn.ParameterList([torch.zeros(3)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_has_one_place(model: nn.Module, devices: int) -> None:
    check_covered(model, plan_split(model, CUDA[:devices]))


def test_a_model_that_cannot_be_divided_is_told(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert placed(plan_split(layer, CUDA[:2])) == {"": "cuda:0"}
    assert "TransformerEncoderLayer cannot be divided" in caplog.text
    caplog.clear()
    plan_split(layer, CUDA[:1])
    assert caplog.text == ""


def test_tied_tensors_are_on_one_device_and_count_once() -> None:
    model = Tied()
    plan = plan_split(model, CUDA[:2])
    assert plan.assignment["head"] == plan.assignment["embed"] == FIRST
    assert plan.assignment["stack.layers.3"] == SECOND
    assert plan.owned == {"places": FIRST}
    assert sum(plan.shares) == sum(16 * p.numel() for p in model.parameters())


def test_a_model_on_meta_is_planned_and_left_there() -> None:
    model = Tied().to("meta")
    model.head.weight = model.embed.weight
    assert placed(plan_split(model, CUDA[:2])) == placed(plan_split(Tied(), CUDA[:2]))
    assert {p.device.type for p in model.parameters()} == {"meta"}


# ------------------------------------------------------------------------------------- the sample


class Backwards(nn.Module):
    """Registered in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.body = nn.Linear(3, 3)
        self.stem = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(self.stem(x)))
        return y


def test_the_order_of_calls_decides_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpkit")
    plan = plan_split(Backwards(), CUDA[:3], sample=torch.ones(2, 3))
    assert placed(plan) == {"stem": "cuda:0", "body": "cuda:1", "head": "cuda:2"}
    assert "'stem' runs before 'head'" in caplog.text
    assert list(placed(plan_split(Backwards(), CUDA[:3]))) == ["head", "body", "stem"]


def test_an_order_as_registered_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpkit")
    plan_split(layers(3), CUDA[:2], sample=torch.ones(2, 3))
    assert caplog.text == ""


def test_what_is_kept_for_the_backward_counts() -> None:
    plan = plan_split(layers(4), CUDA[:2], sample=torch.ones(100, 3))
    assert [block.bytes for block in plan.blocks] == [LINEAR + 1200] * 4


def test_skips_across_the_cut_are_found() -> None:
    plan = plan_split(UNet(), CUDA[:2], sample=torch.ones(2, 3))
    assert next(iter(plan.assignment)) == "down.0"
    assert plan.crossings
    assert set(plan.crossings) == {"cat in the model itself (UNet): meets cuda:1 and cuda:0"}
    assert plan_split(UNet(), CUDA[:1], sample=torch.ones(2, 3)).crossings == ()


def test_a_tied_model_meets_nothing_between_its_blocks() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    plan = plan_split(Tied(), CUDA[:3], sample=tokens)
    assert plan.crossings == ()
    check_covered(Tied(), plan)


def test_parts_that_are_called_around_their_module_are_blocks() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = layers(2)
            self.rest = layers(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.rest(self.pair[1](self.pair[0](x)))
            return y

    assert list(placed(plan_split(Around(), CUDA[:2]))) == ["pair", "rest"]
    plan = plan_split(Around(), CUDA[:2], sample=torch.ones(2, 3))
    assert list(placed(plan)) == ["pair.0", "pair.1", "rest"]


def test_keyword_arguments_and_losses_inside_the_model() -> None:
    class WithLoss(Backwards):
        def forward(self, *, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return {"loss": nn.functional.mse_loss(out, labels), "out": out}

    sample = {"x": torch.ones(2, 3), "labels": torch.ones(2, 3)}
    plan = plan_split(WithLoss(), CUDA[:2], sample=sample)
    assert len(plan.crossings) == 1
    assert plan.crossings[0].startswith("mse_loss in the model itself (WithLoss): meets cuda:")


def test_an_operation_inside_a_block_names_block_operation_and_devices() -> None:
    class Inner(nn.Module):
        def __init__(self, outer: list[torch.Tensor]) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.memory = outer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            self.memory.append(y)
            return y + self.memory[0]

    shared: list[torch.Tensor] = []
    model = nn.Sequential(Inner(shared), Inner(shared))
    with pytest.raises(ConfigError, match=r"add in 1 \(Inner\): meets cuda:1 and cuda:0, inside"):
        plan_split(model, CUDA[:2], sample=torch.ones(2, 3))
    assert shared == []


def test_a_failing_forward_is_named() -> None:
    with pytest.raises(ConfigError, match=r"raised RuntimeError in 0 \(Linear\)"):
        plan_split(layers(2), CUDA[:2], sample=torch.ones(2, 4))


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ([], {}, r"devices=\[\] has to be a list of devices"),
        ("cuda:0", {}, r"devices='cuda:0' has to be a list of devices, such as"),
        (["gpu:0"], {}, r"'gpu:0' is no device; expected one such as 'cuda:0'"),
        (["cuda"], {}, r"'cuda' does not say which device of its kind; write 'cuda:0'"),
        (CUDA[:2], {"limits": [1]}, r"limits= has 1 entries for 2 devices; give one for each"),
        (CUDA[:2], {"limits": [1, -1]}, r"limits= has -1; expected bytes, or None"),
        (
            CUDA[:2],
            {"limits": {"cuda:7": 1}},
            r"limits= names cuda:7, which is 0 times in devices=",
        ),
        (["cpu"] * 2, {"limits": {"cpu": 1}}, r"limits= names cpu, which is 2 times in devices="),
        (
            CUDA[:2],
            {"limits": [100, 50]},
            r"'0' weighs 192 bytes, and no device takes more than 100\. Raise limits=",
        ),
        (
            CUDA[:2],
            {"limits": [200, 200]},
            r"The model weighs 576 bytes, and the devices take 400\.",
        ),
        (
            CUDA[:3],
            {"limits": [300, 300, 100]},
            r"No cut of 3 blocks into consecutive parts keeps within the limits",
        ),
        (CUDA[:2], {"weights": {"x": 1}}, r"weights= names 'x', but Sequential has no module"),
        (CUDA[:2], {"no_split": ["x"]}, r"no_split= names 'x', but Sequential has neither"),
    ],
)
def test_wrong_arguments(devices: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_split(layers(3), devices, **options)


def test_tied_blocks_that_fit_nowhere_are_all_named() -> None:
    model = layers(3)
    for layer in model:
        assert isinstance(layer, nn.Linear)
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"'0', '2', which belong together, weigh 240 bytes"):
        plan_split(model, CUDA[:2], limits=[200, 200])


# ------------------------------------------------------------------------------------- the table


def test_the_table() -> None:
    model = nn.Sequential(layers(1), Tied(1))
    plan = plan_split(model, CUDA[:2], weights={"0": 1_000, "1.embed": 2_000, "1.stack": 3_000})
    assert str(plan).splitlines() == [
        "block     device  bytes  share",
        "0         cuda:0  1,000    13%",
        "1.embed   cuda:0  2,640    35%",
        "1.stack   cuda:1  3,000    40%",
        "1.head    cuda:0    800    11%",
        "with the first block of their module:",
        "1.places  cuda:0",
        "",
        "total     cuda:0  4,440    60%",
        "total     cuda:1  3,000    40%",
    ]


def test_the_table_numbers_a_device_that_is_given_twice() -> None:
    lines = str(plan_split(layers(2), ["cpu", "cpu"])).splitlines()
    assert lines[1:3] == ["0      cpu #0    192    50%", "1      cpu #1    192    50%"]
    assert lines[-1] == "total  cpu #1    192    50%"


def test_the_table_lists_what_is_moved_between_blocks() -> None:
    text = str(plan_split(UNet(), CUDA[:2], sample=torch.ones(2, 3)))
    assert text.endswith(
        "\n\nmoved between devices outside of blocks:\n"
        "cat in the model itself (UNet): meets cuda:1 and cuda:0"
    )


def test_a_model_without_weights_and_one_without_parts() -> None:
    assert "0%" in str(plan_split(nn.Sequential(nn.ReLU()), CUDA[:2]))
    assert str(plan_split(nn.Linear(3, 3), CUDA[:1])).splitlines()[1].startswith("(model)  cuda:0")


# ------------------------------------------------------------------------------- a plan by hand


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"": "cuda:0"}, {"": "cuda:0"}),
        (
            {"embed": "cuda:0", "stack": "cuda:1", "head": "cuda:0"},
            {"embed": "cuda:0", "stack": "cuda:1", "head": "cuda:0", "places": "cuda:0"},
        ),
        (
            {"": "cuda:1", "stack": "cuda:0"},
            {"embed": "cuda:1", "stack": "cuda:0", "head": "cuda:1", "places": "cuda:1"},
        ),
        (
            {"": "cuda:1", "stack": "cuda:0", "places": "cuda:0"},
            {"embed": "cuda:1", "stack": "cuda:0", "head": "cuda:1", "places": "cuda:0"},
        ),
        (
            {"": "cuda:0", "stack.layers.1": "cuda:1"},
            {
                "embed": "cuda:0",
                "stack.layers.0": "cuda:0",
                "stack.layers.1": "cuda:1",
                "head": "cuda:0",
                "places": "cuda:0",
            },
        ),
    ],
)
def test_a_mapping_is_completed(mapping: Mapping[str, str], expected: dict[str, str]) -> None:
    model = Tied(2)
    plan = checked_plan(model, mapping)
    assert placed(plan) == expected
    check_covered(model, plan)
    assert sum(plan.shares) == sum(16 * p.numel() for p in model.parameters())
    assert set(plan.devices) == {torch.device(device) for device in mapping.values()}


def test_the_assignment_of_a_plan_makes_the_same_plan() -> None:
    model = Tied(4)
    plan = plan_split(model, CUDA[:2])
    again = checked_plan(model, plan.assignment)
    assert (again.assignment, again.loads) == (plan.assignment, plan.loads)
    assert again.opened == plan.opened


def test_names_in_lists_go_to_what_is_in_them() -> None:
    model = UNet()
    plan = checked_plan(model, {"down": "cuda:0", "up": "cuda:1"})
    assert placed(plan) == {
        f"{way}.{i}": d for way, d in (("up", "cuda:1"), ("down", "cuda:0")) for i in range(3)
    }


def test_what_has_no_tensors_needs_no_device() -> None:
    plan = checked_plan(nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.ReLU()), {"1": "cuda:1"})
    assert placed(plan) == dict.fromkeys("012", "cuda:1")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, r"The plan is empty; give names of modules"),
        (
            {"net1": "cuda:0"},
            r"names 'net1', but Tied has no such module .* 'embed', 'stack', 'head'",
        ),
        ({"embed": "cuda:0", "head": "cuda:0"}, r"leaves 'stack' without a device"),
        (
            {"embed": "cuda:0", "stack": "cuda:0", "head": "cuda:1"},
            r"'embed\.weight' and 'head\.weight' are one tensor, .* both cuda:0 and cuda:1",
        ),
        (
            {"": "cuda:0", "stack.layers.0.linear1": "cuda:1"},
            r"'stack\.layers\.0\.linear1' inside of stack\.layers\.0, a TransformerEncoderLayer",
        ),
        ({"": "cuda:0", "head.bias": "cuda:1"}, r"'head\.bias', which is only a part .* 'head'"),
        ({"": "cuda:0", "places": "cuda:1"}, r"gives 'places' to cuda:1, where no module goes"),
        ({"": "gpu"}, r"'gpu' is no device"),
    ],
)
def test_wrong_mappings(mapping: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_plan(Tied(1), mapping)


def test_a_module_with_two_names_has_one_device() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared)
    assert list(placed(plan_split(model, CUDA[:2]))) == ["0", "1"]
    plan = checked_plan(model, {"0": "cuda:0", "1": "cuda:1", "2": "cuda:0"})
    assert placed(plan) == {"0": "cuda:0", "1": "cuda:1"}
    with pytest.raises(ConfigError, match=r"'0' and '2' are one module, .* cuda:0 and cuda:1"):
        checked_plan(model, {"0": "cuda:0", "1": "cuda:1", "2": "cuda:1"})
    with pytest.raises(ConfigError, match=r"'0' and '2' are one module"):
        checked_plan(model, {"1": "cuda:1", "2": "cuda:1"})


def test_a_plan_by_hand_can_be_rehearsed() -> None:
    model = UNet()
    plan = checked_plan(model, {"down": "cuda:0", "up": "cuda:1"})
    rehearsal = Rehearsal(model, torch.ones(2, 3), plan.devices)
    assert len(rehearsal.crossings(placement_of(model, plan))) == 1
