"""Reading and telling which parameters a backward has left out."""

import pytest

from ddpkit.completeness import left_out_message, left_out_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Parameter indices which did not receive grad for rank 1: 2 3\n In addition, ...", "cd"),
        (
            "... for rank 0: fc.weight\n"
            "Parameter indices which did not receive grad for rank 12: 4",
            "e",
        ),
        (
            "Parameters which did not receive grad for rank 0: .e, .d, .b\n"
            "Parameter indices which did not receive grad for rank 0: 1 3 ...",
            "bde",
        ),
        ("Parameters which did not receive grad for rank 1: a.weight", ""),
        ("Connection closed by peer", ""),
    ],
)
def test_names_are_read_from_torchs_message(text: str, expected: str) -> None:
    assert left_out_names(text, "abcde") == list(expected)


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
