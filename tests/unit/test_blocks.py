"""How a model is cut into blocks, without running it."""

import pytest
import torch
from torch import nn

from ddpkit.blocks import Cut, Findings, Node, close, cut, read_model
from ddpkit.errors import ConfigError

LINEAR = 4 * 4 * (3 * 3 + 3)
"""What a Linear(3, 3) weighs: itself, its gradient, two averages."""
NEVER = float("inf")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


class Nested(nn.Module):
    """Has a tensor of each kind itself, besides its children."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.ones(5))
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.pair(x))
        return y


class ByHand(nn.Module):
    """Never calls its containers, only what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ReLU()})
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])


def names(found: Cut) -> list[str]:
    return [node.name for node in found.blocks]


def opened(found: Cut) -> list[str]:
    return [node.name for node in found.opened]


def node_of(root: Node, name: str) -> Node:
    return next(node for node in root.below() if node.name == name)


# -------------------------------------------------------------------------------------- weights


def test_trained_tensors_count_four_times_and_others_once() -> None:
    model = nn.BatchNorm1d(10)
    assert read_model(model).weight == 4 * 4 * 20 + (4 * 20 + 8)
    assert read_model(model.requires_grad_(False)).weight == 4 * 20 + 4 * 20 + 8
    assert read_model(nn.Linear(3, 3).half()).weight == LINEAR // 2


def test_weights_of_all_blocks_add_up_however_fine_the_cut() -> None:
    root = read_model(Nested())
    total = 3 * LINEAR + 4 * 4 * 5 + 4 * 5
    assert [sum(cut(root, limit).weights) for limit in (NEVER, LINEAR, 0)] == [total] * 3


def test_given_weights_stand_for_whole_modules() -> None:
    found = cut(read_model(Nested(), weights={"pair": 7.0}), 0)
    assert dict(zip(names(found), found.weights, strict=True)) == {"head": LINEAR + 100, "pair": 7}


def test_a_given_weight_inside_lets_its_module_be_opened() -> None:
    found = cut(read_model(Nested(), weights={"pair": 9, "pair.first": 7}), 8)
    assert names(found) == ["head", "pair.first", "pair.second"]
    assert found.weights[1:] == (7, LINEAR)


def test_a_list_with_a_given_weight_stays_together() -> None:
    found = cut(read_model(ByHand(), weights={"layers": 5}), NEVER)
    assert names(found)[:2] == ["layers.0", "layers.1"]
    assert found.leaders[:2] == (0, 0)
    assert found.weights[:2] == (5, 0)


def test_what_is_kept_for_the_backward_is_added() -> None:
    root = read_model(Nested(), found=Findings(activations={"pair.first": 10, "": 1}))
    found = cut(root, NEVER)
    assert dict(zip(names(found), found.weights, strict=True)) == {
        "head": LINEAR + 100 + 1,
        "pair": 2 * LINEAR + 10,
    }


# -------------------------------------------------------------------------------------- opening


def test_only_what_is_heavier_is_opened() -> None:
    root = read_model(Nested())
    coarse, fine = cut(root, 2 * LINEAR), cut(root, 2 * LINEAR - 1)
    assert (names(coarse), opened(coarse)) == (["head", "pair"], [""])
    assert (names(fine), opened(fine)) == (["head", "pair.first", "pair.second"], ["", "pair"])
    assert (coarse.heaviest_openable, fine.heaviest_openable) == (2 * LINEAR, 0)


def test_tensors_of_an_opened_module_go_with_its_first_block() -> None:
    found = cut(read_model(nn.Sequential(nn.ReLU(), Nested())), 0)
    assert names(found) == ["0", "1.head", "1.pair.first", "1.pair.second"]
    assert found.owned == {"1.scale": 1, "1.shift": 1}
    assert found.weights[1] == LINEAR + 100


def test_a_model_without_children_is_one_block() -> None:
    found = cut(read_model(nn.Linear(3, 3)), 0)
    assert (names(found), opened(found), found.weights) == ([""], [], (LINEAR,))


def test_containers_that_are_never_called_are_opened() -> None:
    found = cut(read_model(ByHand()), NEVER)
    assert names(found) == ["layers.0", "layers.1", "named.a", "named.b", "extra"]
    assert opened(found) == ["", "layers", "named"]


@pytest.mark.parametrize(
    "module",
    [
        nn.TransformerEncoderLayer(4, 2),
        nn.MultiheadAttention(4, 2),
        type("Own", (nn.TransformerEncoderLayer,), {})(4, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_uses_the_weights_of_its_parts_stays_whole(module: nn.Module) -> None:
    assert names(cut(read_model(nn.Sequential(module)), 0)) == ["0"]
    assert names(cut(read_model(module), 0)) == [""]


def test_stacks_of_layers_and_traced_models_are_opened() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    assert names(cut(read_model(stack), 0)) == ["layers.0", "layers.1"]
    traced = torch.fx.symbolic_trace(Pair())
    assert names(cut(read_model(traced), 0)) == ["first", "second"]


@pytest.mark.parametrize("no_split", [[Pair], ["Pair"], ["pair"], [nn.Linear, "pair"]])
def test_what_is_not_to_be_split_stays_whole(no_split: list[type[nn.Module] | str]) -> None:
    assert names(cut(read_model(Nested(), no_split=no_split), 0)) == ["head", "pair"]


def test_a_list_that_is_not_to_be_split_goes_to_one_device() -> None:
    found = cut(read_model(ByHand(), no_split=["layers"]), 0)
    assert found.leaders == (0, 0, 2, 3, 4)


def test_a_module_that_was_gone_around_is_opened() -> None:
    root = read_model(Nested(), found=Findings(bypassed={"pair"}))
    assert names(cut(root, NEVER)) == ["head", "pair.first", "pair.second"]


# --------------------------------------------------------------------------------------- order


def test_children_come_in_the_order_of_their_calls() -> None:
    order = {"": 0, "pair": 1, "pair.second": 2, "pair.first": 3, "head": 4}
    found = cut(read_model(Nested(), found=Findings(order=order)), 0)
    assert names(found) == ["pair.second", "pair.first", "head"]
    assert found.owned == {"scale": 0, "shift": 0}


def test_what_was_never_called_follows_the_one_before_it() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    found = cut(read_model(model, found=Findings(order={"": 0, "2": 1, "0": 2})), 0)
    assert names(found) == ["2", "3", "0", "1"]


def test_a_container_is_as_early_as_the_first_of_its_parts() -> None:
    order = {"": 0, "named.a": 1, "layers.1": 2, "layers.0": 3}
    found = cut(read_model(ByHand(), found=Findings(order=order)), 0)
    assert names(found)[:2] == ["named.a", "named.b"]
    assert names(found)[-2:] == ["layers.1", "layers.0"]


# ---------------------------------------------------------------------------------------- ties


def tied_model(decoder: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), decoder)
    head = list(decoder.modules())[-1]
    assert isinstance(head, nn.Linear)
    assert isinstance(model[0], nn.Embedding)
    head.weight = model[0].weight
    return model


def test_blocks_with_one_tensor_belong_together_and_count_it_once() -> None:
    found = cut(read_model(tied_model(nn.Linear(3, 5))), 0)
    assert found.leaders == (0, 1, 0)
    assert found.weights == (16 * 15, LINEAR, 16 * 5)


def test_a_block_is_opened_until_the_tie_is_a_block_of_its_own() -> None:
    found = cut(read_model(tied_model(nn.Sequential(Pair(), nn.Linear(3, 5)))), NEVER)
    assert names(found) == ["0", "1", "2.0", "2.1"]
    assert found.leaders == (0, 1, 2, 0)


def test_a_tie_in_what_stays_whole_keeps_all_of_it_together() -> None:
    model = tied_model(nn.Sequential(Pair(), nn.Linear(3, 5)))
    found = cut(read_model(model, no_split=["2"]), 0)
    assert names(found) == ["0", "1", "2"]
    assert found.leaders == (0, 1, 0)


def test_three_blocks_are_joined_by_two_tensors() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    layers[3].weight = layers[1].weight
    layers[3].bias = layers[2].bias
    assert cut(read_model(model), 0).leaders == (0, 1, 1, 1)


def test_a_module_at_two_places_is_one_block() -> None:
    shared = nn.Linear(3, 3)
    found = cut(read_model(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared))), 0)
    assert names(found) == ["0", "1"]
    assert sum(found.weights) == LINEAR


def test_a_part_of_an_earlier_block_is_a_block_at_its_later_place() -> None:
    pair = Pair()
    found = cut(read_model(nn.Sequential(pair, nn.Sequential(nn.Linear(3, 3), pair.first))), NEVER)
    assert names(found) == ["0", "1.0", "1.1"]
    assert found.leaders == (0, 1, 0)
    assert found.weights == (2 * LINEAR, LINEAR, 0)


def test_a_tensor_that_an_opened_module_shares_with_a_block_is_with_the_block() -> None:
    model = Nested()
    model.scale = nn.Parameter(torch.ones(3, 3))
    model.pair.second.weight = model.scale
    found = cut(read_model(model), 0)
    assert found.owned == {"scale": 2, "shift": 0}
    assert found.weights == (LINEAR + 20, LINEAR, LINEAR)


# ------------------------------------------------------------------------------------- closing


def test_modules_on_one_device_are_closed_again() -> None:
    root = read_model(nn.Sequential(Pair(), nn.Sequential(Nested(), nn.Linear(3, 3))))
    fine = cut(root, 0)
    assert names(fine)[2:] == ["1.0.head", "1.0.pair.first", "1.0.pair.second", "1.1"]
    found, positions = close(root, fine, [0, 0, 0, 1, 1, 1])
    assert names(found) == ["0", "1.0.head", "1.0.pair", "1.1"]
    assert positions == [0, 0, 1, 1]
    assert found.weights == (2 * LINEAR, LINEAR + 100, 2 * LINEAR, LINEAR)
    assert opened(found) == ["", "1", "1.0"]
    assert found.owned == {"1.0.scale": 1, "1.0.shift": 1}


def test_what_has_to_be_open_stays_open() -> None:
    root = read_model(ByHand())
    fine = cut(root, 0)
    assert names(close(root, fine, [0] * 5)[0]) == names(fine)


def test_a_module_with_a_tensor_elsewhere_stays_open() -> None:
    root = read_model(tied_model(nn.Sequential(Pair(), nn.Linear(3, 5))))
    fine = cut(root, NEVER)
    assert names(close(root, fine, [0, 0, 1, 0])[0]) == ["0", "1", "2.0", "2.1"]
    assert names(close(root, fine, [0, 1, 0, 0])[0]) == ["0", "1", "2"]


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"pai": 1}}, r"weights= names 'pai', but Nested has no module of this name"),
        ({"weights": {"pair": -1}}, r"weights=\{'pair': -1\} has to be 0 or more"),
        ({"no_split": ["Pai"]}, r"no_split= names 'Pai', but Nested has neither a module nor"),
    ],
)
def test_wrong_names_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(Nested(), **options)  # type: ignore[arg-type]


def test_a_module_that_has_no_shapes_yet_is_named() -> None:
    with pytest.raises(ConfigError, match=r"1\.weight of the model has no shape yet"):
        read_model(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))
