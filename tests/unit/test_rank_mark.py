"""What a mark asks for; what pytest makes of it is in tests/plugin."""

import pytest

from ddpkit.errors import ConfigError
from ddpkit.rank_mark import RankMark, read_mark


def test_numbers_and_options() -> None:
    assert read_mark([2, 1, 2], {"timeout": 3}) == RankMark((2, 1), {"timeout": 3})
    assert read_mark([], {}) == RankMark((2,), {})


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "2", None, [2]])
def test_what_is_no_number_of_ranks(wrong: object) -> None:
    with pytest.raises(ConfigError, match="whole and at least 1") as caught:
        read_mark([2, wrong], {})
    assert repr(wrong) in str(caught.value)


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"has no option 'nproc', 'timeot'; it has timeout,"):
        read_mark([2], {"timeot": 1, "nproc": 3})
