"""Numbers in variables, and sets of them."""

import pytest

from ddpkit.errors import ConfigError
from ddpkit.variables import first_set, integer, require, shown


@pytest.mark.parametrize(("text", "number"), [("0", 0), (" 12 ", 12), ("-1", -1), ("007", 7)])
def test_a_whole_number(text: str, number: int) -> None:
    assert integer({"RANK": text}, "RANK") == number


@pytest.mark.parametrize("text", ["", " ", "two", "1.0", "1e3", "0x1", "1_0", "٣", "9" * 5000])
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^RANK=.* was given, but it must be a whole number"):
        integer({"RANK": text}, "RANK", 0)


def test_a_default_is_for_what_is_not_set() -> None:
    assert integer({}, "RANK", 5) == 5
    with pytest.raises(ConfigError, match="RANK=None was given"):
        integer({}, "RANK")


def test_names_that_are_not_set_are_not_shown() -> None:
    assert shown({"A": "1", "B": ""}, ("B", "C", "A")) == "B='', A='1'"
    assert shown({}, ("A",)) == "none"


def test_the_first_name_wins() -> None:
    assert first_set({"A": "1", "B": "2"}, "C", "B", "A") == "B"
    assert first_set({}, "A") is None


def test_an_incomplete_set_lists_what_is_set_and_what_is_missing() -> None:
    require({"A": "1"}, ["A"], "x")
    expected = r"of x are incomplete: set are A='1', D='4'; missing are B, C\. .*LAUNCHER=none"
    with pytest.raises(ConfigError, match=expected):
        require({"A": "1", "D": "4"}, ["A", "B", "C"], "x", also_shown=["D", "E"])
