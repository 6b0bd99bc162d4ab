"""What `gather` and `gather_cat` decide without another rank."""

import pickle
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ddpkit import collect, gather, gather_cat
from ddpkit.collect import _check_alike, _direct_type, _Facts, _Offer, _way
from ddpkit.errors import ConfigError, GroupError

UINT4: torch.dtype = vars(torch)["uint4"]  # the stubs do not have it


class Outputs(NamedTuple):
    label: torch.Tensor
    score: torch.Tensor


# ---------------------------------------------------------------------------- a world of one


def test_gather_in_a_world_of_one_is_a_list_of_the_object_itself() -> None:
    lock = threading.Lock()  # nothing is pickled
    found = gather(lock)
    assert found is not None
    assert found[0] is lock
    assert len(gather(lock, to_all=True)) == 1


@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("to_all", [False, True])
def test_gather_cat_in_a_world_of_one_is_a_copy(shape: tuple[int, ...], to_all: bool) -> None:
    tensor = torch.ones(shape, requires_grad=True)
    found = gather_cat(tensor, to_all=to_all)
    assert found is not None
    assert torch.equal(found, tensor)
    assert not found.requires_grad
    found += 1
    assert torch.equal(tensor, torch.ones(shape))


def test_a_tensor_without_dimensions_becomes_one_row() -> None:
    assert torch.equal(gather_cat(torch.tensor(3), to_all=True), torch.tensor([3]))


def test_the_structure_comes_back() -> None:
    value = {"b": [torch.ones(2)], "a": Outputs(torch.zeros(1), torch.ones(1, 3))}
    found = gather_cat(value, to_all=True)
    assert list(found) == ["b", "a"]
    assert isinstance(found["a"], Outputs)
    assert found["a"].score.shape == (1, 3)
    assert gather_cat({"nothing": []}, to_all=True) == {"nothing": []}


def test_strides_and_flags_do_not_matter() -> None:
    for tensor in (
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(16.0).reshape(1, 2, 4, 2).to(memory_format=torch.channels_last),
        torch.ones(1).expand(4),
    ):
        found = gather_cat(tensor, to_all=True)
        assert torch.equal(found, tensor)
        assert found.is_contiguous()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3, r"value is a int; .* gather\."),
        ({"n": [torch.ones(1), "x"]}, r"value\['n'\]\[1\] is a str"),
        ([torch.eye(2).to_sparse()], r"value\[0\] is a tensor of layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "on meta"),
        (torch.zeros(2, 4, dtype=torch.uint8).view(UINT4).t(), "torch.uint4 that torch can"),
    ],
    ids=["number", "text", "sparse", "meta", "bits"],
)
def test_what_cannot_be_concatenated_is_named(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        gather_cat(value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that both are about to change
def test_quantized_and_nested_tensors_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(ConfigError, match="qint8"):
        gather_cat(quantized)
    with pytest.raises(ConfigError, match="layout nested"):
        gather_cat(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_without_a_group_several_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="gather"):
        gather(1)
    with pytest.raises(GroupError, match="gather_cat"):
        gather_cat(torch.ones(1))


# ---------------------------------------------------------------------------- comparing offers


def offer(*parts: tuple[str, torch.dtype, tuple[int, ...]]) -> _Offer:
    return _Offer(tuple(_Facts(*part) for part in parts))


def test_the_first_dimension_may_differ() -> None:
    _check_alike([offer(("value", torch.float32, (rows, 3))) for rows in (1, 4, 0)])


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (offer(("value", torch.float32, (5, 4))), r"rank 1: value torch.float32 \(5, 4\)"),
        (offer(("value", torch.float64, (5, 3))), r"rank 1: value torch.float64 \(5, 3\)"),
        (offer(("value", torch.float32, ())), r"rank 1: value torch.float32 \(\)"),
        (offer(("value", torch.float32, (5,))), r"rank 1: value torch.float32 \(5,\)"),
        (offer(("value['a']", torch.float32, (5, 3))), r"rank 1: value\['a'\] torch"),
        (offer(), "rank 1: nothing"),
    ],
    ids=["trailing", "type", "0-d", "1-d", "structure", "empty"],
)
def test_other_differences_are_told_with_the_shapes_of_all_ranks(second: _Offer, told: str) -> None:
    first = offer(("value", torch.float32, (5, 3)))
    with pytest.raises(GroupError, match=told) as caught:
        _check_alike([first, second, first])
    assert "ranks 0, 2: value torch.float32 (5, 3)" in str(caught.value)


def test_offers_are_small() -> None:
    small = pickle.dumps(offer(("value", torch.float32, (5, 3))))
    assert len(small) < 400  # every rank reads those of all ranks


# ---------------------------------------------------------------------------- choosing the way

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("devices", "backends", "kind"),
    [
        ({CUDA}, "cpu:gloo,cuda:nccl", "cuda"),
        ({CUDA}, "cuda:nccl", "cuda"),
        ({CUDA}, "cpu:gloo,cuda:gloo", ""),
        ({CUDA}, "cpu:gloo", ""),
        ({torch.device("cpu")}, "cpu:gloo,cuda:nccl", ""),
        ({CUDA, torch.device("cpu")}, "cpu:gloo,cuda:nccl", ""),
        ({torch.device("cuda", 1)}, "cpu:gloo,cuda:nccl", ""),
    ],
    ids=str,
)
def test_tensors_are_sent_from_their_device_where_its_backend_can(
    monkeypatch: pytest.MonkeyPatch, devices: set[torch.device], backends: str, kind: str
) -> None:
    types = [item.partition(":")[0] for item in backends.split(",")]
    monkeypatch.setattr(collect, "get_device", lambda: CUDA)
    monkeypatch.setattr(collect, "group_is_open", lambda: True)
    monkeypatch.setattr(collect, "backend_device_types", lambda: types)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert _direct_type(devices) == kind


def test_all_ranks_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(collect, "get_device", lambda: CUDA)
    monkeypatch.setattr(collect, "communication_device", lambda: cpu)
    assert _way([_Offer(device="cuda"), _Offer(device="cuda")]) == CUDA
    assert _way([_Offer(device="cuda"), _Offer(device="")]) == cpu
