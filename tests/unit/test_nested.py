import collections
from typing import Any, NamedTuple

import torch

from ddpkit.nested import leaves, map_leaves, with_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


def test_leaves_come_with_their_path() -> None:
    value = {"b": [1, (2.5,)], "a": Pair("x", None), 3: {}}
    assert list(leaves(value, "value")) == [
        ("value['a'][0]", "x"),
        ("value['a'][1]", None),
        ("value['b'][0]", 1),
        ("value['b'][1][0]", 2.5),
    ]


def test_the_order_of_keys_does_not_matter_and_is_kept() -> None:
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert list(leaves(one, "")) == list(leaves(other, ""))
    assert list(with_leaves(other, iter([10, 20])).items()) == [("b", 20), ("a", 10)]


def test_containers_keep_their_types() -> None:
    value = [Pair(1, (2,)), collections.defaultdict(int, {"n": 3}), torch.Size([4])]
    doubled = map_leaves(lambda leaf: 2 * leaf, value)
    assert doubled == [Pair(2, (4,)), {"n": 6}, torch.Size([8])]
    assert [type(item) for item in doubled] == [Pair, collections.defaultdict, torch.Size]
    assert doubled[1].default_factory is int


class Fixed(dict[str, Any]):
    """Like the outputs of some models, which have items that may be set but no `update`."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("cannot be updated")


def test_mappings_whose_update_is_something_else() -> None:
    # That of a Counter adds.
    counter = collections.Counter(correct=3, total=4)
    assert map_leaves(lambda leaf: 2 * leaf, counter) == {"correct": 6, "total": 8}
    assert map_leaves(lambda leaf: 2 * leaf, Fixed(loss=3)) == {"loss": 6}


def test_the_value_itself_may_be_a_leaf() -> None:
    assert list(leaves(3, "value")) == [("value", 3)]
    assert with_leaves(3, iter([4])) == 4


def test_the_original_does_not_change() -> None:
    value = {"a": [1]}
    map_leaves(lambda leaf: leaf + 1, value)
    assert value == {"a": [1]}
