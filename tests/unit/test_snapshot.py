"""What is saved: plain states on the CPU, in storages that hold no more than is used."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from ddpkit.snapshot import CopySpace, on_cpu


def space_if(copies: bool) -> CopySpace | None:
    return CopySpace() if copies else None


def saved_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_a_small_view_does_not_bring_its_big_storage() -> None:
    big = torch.arange(1_000_000.0)
    state = {"view": big[500:510], "strided": torch.arange(10_000.0)[5:100:7]}
    small = on_cpu(state)
    assert saved_bytes(small) < 5_000 < saved_bytes(state)
    assert torch.equal(small["view"], big[500:510])
    assert small["strided"].stride() == (7,)
    assert torch.equal(small["strided"], state["strided"])


@pytest.mark.parametrize("copies", [False, True])
def test_what_shares_memory_still_does(copies: bool) -> None:
    big = torch.zeros(1000)
    state = {"a": big[10:20], "b": [big[12:14], big[10:20]], "other": torch.ones(3)}
    new = on_cpu(state, space=space_if(copies))
    new["a"][2] = 7
    assert new["b"][0].tolist() == [7, 0]
    assert new["b"][1][2] == 7
    assert big.sum() == 0
    assert saved_bytes(new) < 2500


def test_other_types_in_one_storage_stay_what_they_are() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    state = [raw[33:35], raw.view(torch.float32)[9:11], raw.view(torch.complex64)[5:6]]
    new = on_cpu(state)
    assert all(torch.equal(a, b) for a, b in zip(new, state, strict=True))
    assert new[0].untyped_storage().nbytes() == 16
    assert len({tensor.untyped_storage().data_ptr() for tensor in new}) == 1


def test_nothing_is_copied_without_need() -> None:
    state = {"whole": torch.ones(3), "n": 1, "parameter": nn.Parameter(torch.ones(2))}
    assert on_cpu(state) is state
    views = {"a": state["whole"], "b": state["whole"][1:], "c": state["whole"].view(3, 1)}
    assert on_cpu(views) is views


def test_a_copy_does_not_change_any_more() -> None:
    class Mutable(list[int]):
        pass

    state: dict[str, Any] = {
        "tensor": torch.ones(3),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "sparse": torch.eye(2).to_sparse(),
        "deep": [{"x": torch.zeros(1)}],
        "bytes": bytearray(b"abc"),
    }
    before = copy.deepcopy(state)
    new = on_cpu(state, space=CopySpace())
    state["tensor"].add_(1)
    state["parameter"].add_(1)
    state["sparse"].mul_(2)
    state["deep"][0]["x"].add_(1)
    state["bytes"][0] = 0
    assert torch.equal(new["tensor"], before["tensor"])
    assert torch.equal(new["parameter"], before["parameter"])
    assert type(new["parameter"]) is nn.Parameter
    assert not new["parameter"].requires_grad
    assert torch.equal(new["sparse"].to_dense(), before["sparse"].to_dense())
    assert new["deep"][0]["x"] == 0
    assert new["bytes"] == before["bytes"]


def test_containers_without_tensors_are_copied_too() -> None:
    """A history that grows, and what a schedule shares with its state."""
    state: dict[str, Any] = {"losses": [0.5], "best": {"epoch": 1}, "pair": ([1], 2), "seen": {1}}
    new = on_cpu(state, space=CopySpace())
    state["losses"].append(0.4)
    state["best"]["epoch"] = 2
    state["pair"][0].append(3)
    state["seen"].add(2)
    state["later"] = 1
    assert new == {"losses": [0.5], "best": {"epoch": 1}, "pair": ([1], 2), "seen": {1}}


def test_counters_are_copied_and_not_doubled() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 60]).state_dict()
    new = on_cpu(state, space=CopySpace())
    assert new["milestones"] == {30: 1, 60: 1}
    assert new["milestones"] is not state["milestones"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(10)[4:4],
        torch.tensor(3),
        torch.arange(10)[9],
        torch.ones(4).expand(3, 4),
        torch.ones(1).expand(5),
        torch.zeros(5, 0),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, device="meta"),
    ],
)
@pytest.mark.parametrize("copies", [False, True])
def test_odd_tensors(tensor: torch.Tensor, copies: bool) -> None:
    new = on_cpu([tensor], space=space_if(copies))[0]
    assert (new.shape, new.stride(), new.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert tensor.is_meta or torch.equal(new, tensor)


def test_versions_of_modules_are_kept() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    for copies in (False, True):
        assert on_cpu(state, space=space_if(copies))._metadata == state._metadata  # type: ignore[attr-defined]


def test_the_memory_of_a_copy_is_used_again_and_copies_do_not_overlap() -> None:
    space = CopySpace()
    addresses = []
    for number in range(3):
        state = {f"x{i}": torch.full((1000 + i,), number * 10 + i) for i in range(5)}
        new = on_cpu(state, space=space)
        assert all(torch.equal(new[key], state[key]) for key in state)
        addresses.append([tensor.data_ptr() for tensor in new.values()])
        assert saved_bytes(new) < 2 * 8 * 5 * 1000
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(set(addresses[0])) == 5
    bigger = on_cpu({"x": torch.ones(100_000)}, space=space)
    assert bigger["x"].sum() == 100_000
    assert on_cpu({"n": 1}, space=space) == {"n": 1}
