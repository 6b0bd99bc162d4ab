"""Digests: equal for equal data, different for different data, None for what is not known."""

import dataclasses
import io
import pathlib
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from ddpkit.digest import digest_of_item, digests_of_order

NUMBERS: Any = range(1000)
Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


ITEMS: list[Any] = [
    *(0, 1, 1.5, True, None, "a", b"a", "1", "", 1j, (), [], {}),
    *([0], (0,), [0, 1], [[0], 1], {"a": 1}, {"a": 2}, {"b": 1}, Pair(0, 1)),
    *(torch.zeros(2), torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)),
    *(torch.ones(2), torch.tensor(1), torch.tensor([1.0, 2.0])[::2], torch.zeros(2) * 1j),
    *(np.zeros(2), np.ones(2), np.zeros(2, dtype=np.int8), np.float32(2.5)),
    *(Record(torch.zeros(1), "a"), Record(torch.ones(1), "a"), Record(torch.zeros(1), "b")),
    *(Image.new("L", (2, 2)), Image.new("L", (2, 3)), Image.new("L", (2, 2), 5)),
]


def test_different_items_have_different_digests() -> None:
    digests = [digest_of_item(item) for item in ITEMS]
    assert None not in digests
    assert len(set(digests)) == len(ITEMS)


def test_equal_items_have_equal_digests() -> None:
    assert digest_of_item(torch.arange(6)[::2]) == digest_of_item(torch.tensor([0, 2, 4]))
    big = torch.arange(10**6)
    assert digest_of_item({"x": [big, "a"]}) == digest_of_item({"x": [big.clone(), "a"]})
    assert digest_of_item(torch.zeros(2).requires_grad_()) == digest_of_item(torch.zeros(2))


@pytest.mark.parametrize(
    "item",
    [
        object(),
        io.BytesIO(),
        [1, object()],
        {"a": {1, 2}},
        np.array([object()]),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        Record,
    ],
)
def test_what_is_not_known_has_none(item: Any) -> None:
    assert digest_of_item(item) is None


class Files:
    """A dataset with a list of files, as most have."""

    def __init__(self, files: list[Any]) -> None:
        self.files = files
        self.root = "/data"
        self.classes = ["cat", "dog"]
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return self.files[index]


@pytest.mark.parametrize(
    "make",
    [
        lambda order: Files([f"/data/{i}.png" for i in order]),
        lambda order: Files([(f"/data/{i}.png", 0) for i in order]),
        lambda order: Files([pathlib.Path(f"/data/{i}.png") for i in order]),
        lambda order: Files(torch.tensor(order)),  # type: ignore[arg-type]
        lambda order: Files(np.array(order)),  # type: ignore[arg-type]
        lambda order: Subset(NUMBERS, order),
        lambda order: Subset(Subset(NUMBERS, order), range(50)),
        lambda order: TensorDataset(torch.zeros(100), torch.tensor(order)),
        list,
    ],
)
def test_another_order_is_another_digest(make: Any) -> None:
    orders = [random.Random(seed).sample(range(100), 100) for seed in (0, 1)]
    first, second, again = (make(order) for order in (*orders, orders[0]))
    digests = [digests_of_order(dataset, len(dataset)) for dataset in (first, second, again)]
    assert digests[0] == digests[2]
    assert digests[0] != digests[1]
    assert digests[0].keys() == digests[1].keys()


def test_nothing_is_loaded_and_only_lists_of_samples_are_looked_at() -> None:
    files = Files([f"/data/{i}.png" for i in range(9)])
    assert list(digests_of_order(Subset(files, range(9)), 9)) == ["Subset.indices", "Files.files"]  # type: ignore[arg-type]
    assert files.loaded == 0
    assert digests_of_order(Files([]), 0) == {}
    assert digests_of_order(object(), 5) == {}


class Lazy(list[int]):
    """A list that loads what it is asked for."""

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("loaded")


def test_odd_attributes_do_no_harm() -> None:
    files = Files(["a", "b"])
    circle: list[Any] = [0]
    circle.append(circle)
    vars(files).update(circle=circle, lazy=Lazy([1, 2]), dataset=object())
    # The two classes, "cat" and "dog", are as many as there are files.
    assert list(digests_of_order(files, 2)) == ["Files.files", "Files.classes"]


def test_the_folder_does_not_count() -> None:
    here, there = (Files([f"/{node}/{i}.png" for i in range(9)]) for node in ("a", "b"))
    assert digests_of_order(here, 9) == digests_of_order(there, 9)
