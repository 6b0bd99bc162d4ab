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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout=0, but timeout is a positive number of seconds"),
        ({"timeout": None}, "timeout=None, but timeout is a positive number of seconds"),
        ({"time_limit": "5"}, "time_limit='5', but time_limit is a positive number of seconds"),
        ({"time_limit": True}, "time_limit=True, but time_limit is a positive number of seconds"),
        ({"start_method": "thread"}, "start_method='thread', but start_method is one of auto, "),
        ({"init_group": 1}, "init_group=1, but init_group is True or False"),
    ],
)
def test_an_option_with_a_wrong_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_mark([2], options)
    assert message in str(caught.value)


def test_a_time_limit_may_be_none() -> None:
    options = {"time_limit": None, "start_method": "fork", "init_group": False, "timeout": 2.5}
    assert read_mark([2], options).options == options
