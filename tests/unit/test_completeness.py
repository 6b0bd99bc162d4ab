"""Reading and telling which parameters a backward has left out."""

import pytest

from ddpkit.completeness import left_out_indices, left_out_message


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("Parameter indices which did not receive grad for rank 1: 2 3\n In addition, ...", [2, 3]),
        (
            "... for rank 0: fc.weight\n"
            "Parameter indices which did not receive grad for rank 12: 107",
            [107],
        ),
        ("Parameters which did not receive grad for rank 1: a.weight", []),
        ("Connection closed by peer", []),
    ],
)
def test_indices_are_read_from_torchs_message(text: str, indices: list[int]) -> None:
    assert left_out_indices(text) == indices


@pytest.mark.parametrize(
    ("left_out", "lines"),
    [
        ({0: ["a"], 1: ["a"]}, ["  all ranks: a"]),
        ({0: [], 1: ["a", "b"], 2: []}, ["  ranks 0, 2: none", "  rank 1: a, b"]),
        ({3: ["a"]}, ["  rank 3: a"]),
        ({0: [*"abcdefgh"]}, ["  rank 0: a, b, c, d, e, f and 2 more"]),
    ],
)
def test_ranks_are_grouped_by_what_they_have_left_out(
    left_out: dict[int, list[str]], lines: list[str]
) -> None:
    text = left_out_message(left_out)
    assert text.splitlines()[1:-1] == lines
    assert "find_unused_parameters=True" in text
