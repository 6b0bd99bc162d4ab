import copy
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.backward import tensors_in
from ddpkit.errors import ConfigError, GroupError
from ddpkit.state_names import without_prefix, wrapper_prefix
from ddpkit.wrap import (
    _check_one_device_type,
    _resolve_options,
    choose_device_ids,
    ddp,
    difference_message,
    unwrap,
)


def test_a_world_of_one_gets_the_model_itself() -> None:
    net = nn.Linear(4, 2)
    model = ddp(net, static_graph=True, sync_batchnorm=True, bucket_cap_mb=10)
    assert model is net
    assert unwrap(model) is net


def test_unwrap_goes_through_data_parallel_but_not_into_the_model() -> None:
    net: Any = nn.Sequential(OrderedDict(module=nn.Linear(2, 2)))
    assert unwrap(nn.DataParallel(nn.DataParallel(net))) is net


@pytest.mark.parametrize("call", [ddp, unwrap])
def test_only_modules_are_models(call: Any) -> None:
    with pytest.raises(ConfigError, match="was given a type"):
        call(nn.Linear)


def test_a_second_wrapper_is_refused() -> None:
    with pytest.raises(ConfigError, match="wrapped in DataParallel already"):
        ddp(nn.DataParallel(nn.Linear(2, 2)))


def test_a_wrapper_around_a_wrapped_part_is_refused() -> None:
    part = nn.Linear(1, 1)
    part.__class__ = type("Wrapped", (DistributedDataParallel,), {})
    with pytest.raises(ConfigError, match=r"given a Sequential with parts .* already: 1. Wrap the"):
        ddp(nn.Sequential(nn.ReLU(), part))


def test_unknown_options_are_named_before_anything_else() -> None:
    with pytest.raises(ConfigError, match=r"given find_unused; .*find_unused_parameters"):
        ddp(nn.Linear(2, 2), find_unused=True)
    with pytest.raises(ConfigError, match="given module; "):
        ddp(nn.Linear(2, 2), module=nn.Linear(2, 2))


@pytest.mark.parametrize("how", ["fp8", True, 16])
def test_unknown_compression_is_refused(how: Any) -> None:
    with pytest.raises(ConfigError, match=r"compress=.*expected None or one of 'fp16', 'bf16'"):
        ddp(nn.Linear(4, 2), compress=how)
    assert ddp(nn.Linear(4, 2), compress="fp16").in_features == 4


def test_tensors_without_data_are_named() -> None:
    with pytest.raises(ConfigError, match=r"1\.weight, 1\.bias"):
        ddp(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    with pytest.raises(ConfigError, match="weight, bias"):
        ddp(nn.Linear(2, 2, device="meta"))


def test_stray_tensors_on_another_type_of_device_are_named() -> None:
    places = {"a": "cuda:0", "b": "cpu", "c": "cuda:1"}
    tensors = {name: SimpleNamespace(device=torch.device(at)) for name, at in places.items()}
    with pytest.raises(ConfigError, match="on cuda, but not: b on cpu"):
        _check_one_device_type(cast("Any", tensors))


@pytest.mark.parametrize(
    ("devices", "ids"),
    [
        (["cpu"], None),
        (["cuda:3"], [3]),
        (["cuda:0", "cuda:1"], None),
        (["xpu:1"], [1]),
        ([], None),
    ],
    ids=str,
)
def test_device_ids(devices: list[str], ids: list[int] | None) -> None:
    assert choose_device_ids({torch.device(device) for device in devices}) == ids


def test_several_ranks_without_a_group_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="ddp"):
        ddp(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"forward_sync_buffers": False}, False),
        ({"broadcast_buffers": False}, False),
        ({"broadcast_buffers": True}, True),
        ({"broadcast_buffers": None}, True),
    ],
    ids=str,
)
def test_both_spellings_say_whether_buffers_are_synchronised(
    given: dict[str, Any], wanted: bool
) -> None:
    options = _resolve_options(given, static_graph=False)
    assert options == {
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "sync_buffers": wanted,
    }


def test_given_options_win() -> None:
    assert _resolve_options({"gradient_as_bucket_view": False})["gradient_as_bucket_view"] is False


# ------------------------------------------------------------------------------- names in states


@pytest.mark.parametrize(
    ("names", "expected", "prefix"),
    [
        (["a", "b.c"], ["a", "b.c"], ""),
        (["module.a", "module.b.c"], ["a", "b.c"], "module."),
        (["module.module.a"], ["a"], "module.module."),
        (["module._orig_mod.a"], ["a"], "module._orig_mod."),
        (["_orig_mod.module.a"], ["a"], "_orig_mod.module."),
        (["_orig_mod.a"], ["_orig_mod.a"], ""),
        # A child that is called module.
        (["module.a"], ["module.a"], ""),
        (["module.module.a"], ["module.a"], "module."),
        (["module.module.a", "module.a"], ["module.a", "a"], "module."),
        (["module.module.a", "module.a"], ["module.module.a", "module.a"], ""),
        # Names that only look like it.
        (["module_a.b", "module2"], ["module_a.b", "module2"], ""),
        (["module.a", "b"], ["a", "b"], ""),
        # Of another model, where short names are easier to read.
        (["module.x"], ["a"], "module."),
        ([], ["a"], ""),
        (["module.x"], [], ""),
    ],
    ids=str,
)
def test_wrapper_prefix(names: list[str], expected: list[str], prefix: str) -> None:
    assert wrapper_prefix(names, expected) == prefix


def test_versions_follow_the_names() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    plain = net.state_dict()
    wrapped = nn.DataParallel(net).state_dict()
    before = copy.deepcopy(wrapped)
    shortened = without_prefix(wrapped, "module.")
    assert list(shortened) == list(plain)
    assert shortened._metadata == plain._metadata  # type: ignore[attr-defined]
    assert list(wrapped) == list(before)
    assert wrapped._metadata == before._metadata  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------- comparison


def test_the_message_groups_ranks_by_what_they_have() -> None:
    wide, narrow = ["parameter w: (4,)", "buffer b: (1,)"], ["parameter w: (3,)"]
    message = difference_message([wide, wide, narrow])
    assert "parameter w: (4,) on ranks 0, 1; (3,) on rank 2" in message
    assert "buffer b: (1,) on ranks 0, 1; not there on rank 2" in message


def test_the_message_is_short_for_many_differences() -> None:
    ranks = [[f"parameter {i}: {rank}" for i in range(100)] for rank in range(2)]
    message = difference_message(ranks)
    assert "and 94 more" in message
    assert len(message.splitlines()) < 12


def test_the_message_names_another_order() -> None:
    message = difference_message(
        [["parameter a: x", "parameter b: x"], ["parameter b: x", "parameter a: x"]]
    )
    assert "where rank 0 has parameter a, rank 1 has parameter b" in message


# ------------------------------------------------------------------------------- outputs


def test_tensors_are_found_in_whatever_a_model_returns() -> None:
    class Output:
        def __init__(self, *parts: torch.Tensor) -> None:
            self.parts = parts
            self.name = "text"

    @dataclass(slots=True)
    class Slotted:
        part: torch.Tensor

    tensors = [torch.tensor(float(i)) for i in range(6)]
    output = {
        "a": [tensors[0], None, Slotted],
        "b": (Output(tensors[1], tensors[2]), 3, "x"),
        1: tensors[3],
        2: deque([Slotted(tensors[4]), tensors[5]]),
    }
    assert [float(tensor) for tensor in tensors_in(output)] == [0, 1, 2, 3, 4, 5]


def test_an_output_that_holds_itself_ends() -> None:
    output: list[Any] = [torch.ones(1)]
    output.append(output)
    assert all(tensor is output[0] for tensor in tensors_in(output))
