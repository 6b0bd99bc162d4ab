import pytest

from ddpkit.wording import name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([1, 2], "ranks 1, 2"),
        (list(range(8)), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (list(range(10_000)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9992 more"),
    ],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
