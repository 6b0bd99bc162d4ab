import contextlib
import io
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from ddpkit.console import RankLogger, get_logger, rank0_print, show_own_lines
from ddpkit.errors import ConfigError


class FlushCounter(io.StringIO):
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


@pytest.fixture
def set_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that a launcher started this process; no group is needed to know one's rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return monkeypatch


def test_prints_in_a_plain_process(capsys: pytest.CaptureFixture[str]) -> None:
    rank0_print("loss", 0.5, sep="=", end=".\n")
    assert capsys.readouterr().out == "loss=0.5.\n"


def test_prints_on_rank_0(set_rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_rank.setenv("RANK", "0")
    rank0_print("hello")
    assert capsys.readouterr().out == "hello\n"


def test_is_silent_on_rank_1(
    set_rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_rank.setenv("RANK", "1")
    rank0_print("hello")
    assert capsys.readouterr().out == ""


def test_flushes_unless_told_otherwise() -> None:
    file = FlushCounter()
    rank0_print("a", file=file)
    assert file.flushes == 1
    rank0_print("b", file=file, flush=False)
    assert file.flushes == 1
    assert file.getvalue() == "a\nb\n"


# ------------------------------------------------------------------------------------- get_logger


@pytest.fixture
def as_rank(set_rank: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda rank: set_rank.setenv("RANK", str(rank))


def log_everything(log: RankLogger) -> None:
    log.debug("d")
    log.info("i %d", 1)
    log.warning("w %s", "50%")
    log.error("e")


def test_a_world_of_one_logs_as_logging_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        log_everything(get_logger("train"))
    assert caplog.messages == ["d", "i 1", "w 50%", "e"]
    assert {record.name for record in caplog.records} == {"train"}
    assert {record.funcName for record in caplog.records} == {"log_everything"}


def test_rank_0_logs_all_and_others_warnings_with_the_rank_in_front(
    as_rank: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = get_logger("train")  # made before the rank is known
    with caplog.at_level("DEBUG"):
        as_rank(0)
        log_everything(log)
        as_rank(1)
        log_everything(log)
    assert caplog.messages == [
        *("[rank 0/2] d", "[rank 0/2] i 1", "[rank 0/2] w 50%", "[rank 0/2] e"),
        *("[rank 1/2] w 50%", "[rank 1/2] e"),
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)]
)
def test_a_variable_shows_the_lines_of_all_ranks(
    value: str,
    shown: bool,
    as_rank: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    as_rank(1)
    monkeypatch.setenv("DDPKIT_LOG_ALL_RANKS", value)
    with caplog.at_level("INFO"):
        get_logger("train").info("i")
    assert caplog.messages == (["[rank 1/2] i"] if shown else [])


def test_levels_between_info_and_warning_belong_to_rank_0(as_rank: Callable[[int], None]) -> None:
    log = get_logger("train.levels")
    log.setLevel(1)
    try:
        as_rank(1)
        assert [log.isEnabledFor(level) for level in (10, 20, 25, 30, 40)] == [0, 0, 0, 1, 1]
        as_rank(0)
        assert all(log.isEnabledFor(level) for level in (10, 20, 25, 30, 40))
    finally:
        log.setLevel(logging.NOTSET)


def test_levels_of_logging_count_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        log_everything(get_logger("train"))
    assert caplog.messages == ["w 50%", "e"]


def test_changes_no_logger_however_often_it_is_called() -> None:
    plain = logging.getLogger("train.shared")
    before = dict(vars(plain))
    first, second = get_logger("train.shared"), get_logger("train.shared")
    assert first.logger is second.logger is plain
    after = dict(vars(plain))
    before.pop("_cache")
    after.pop("_cache")
    assert after == before


def test_exceptions_and_extras_pass(
    as_rank: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    as_rank(1)
    try:
        raise OSError("disk full")
    except OSError:
        get_logger("train").exception("no file", extra={"step": 3})
    (record,) = caplog.records
    assert record.getMessage() == "[rank 1/2] no file"
    assert record.exc_info is not None
    assert vars(record)["step"] == 3


def test_the_default_name_is_that_of_the_module() -> None:
    assert get_logger().name == __name__


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
def test_a_pickled_logger_is_still_one_of_ranks(
    dump: Callable[[object], bytes],
    as_rank: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = pickle.loads(dump(get_logger("train")))
    as_rank(1)
    with caplog.at_level("INFO"):
        log_everything(copy)
    assert caplog.messages == ["[rank 1/2] w 50%", "[rank 1/2] e"]


def test_wrong_variables_of_a_launcher_stop_no_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")  # and nothing else
    with caplog.at_level("INFO"):
        get_logger("train").info("i")
    assert caplog.messages == ["i"]


@pytest.mark.parametrize("name", [3, ["train"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected the name of a logger"):
        get_logger(name)


# ------------------------------------------------------------------------------ ddpkit's own lines


@contextlib.contextmanager
def unconfigured_logging() -> Iterator[logging.Logger]:
    """Give ddpkit's logger, without the handlers that pytest has put on the root during a test."""
    root, own = logging.getLogger(), logging.getLogger("ddpkit")
    before = root.handlers[:], own.handlers[:], own.level
    root.handlers.clear()
    own.handlers.clear()
    own.setLevel(logging.NOTSET)
    try:
        yield own
    finally:
        root.handlers[:], own.handlers[:] = before[:2]
        own.setLevel(before[2])


def test_own_lines_are_shown_where_logging_is_not_configured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured_logging():
        show_own_lines(" Info ")
        child = logging.getLogger("ddpkit.loader")
        child.info("batch size %d", 4)
        child.debug("nothing")
    assert capsys.readouterr().err == "INFO ddpkit.loader: batch size 4\n"


def test_own_lines_are_tagged_once_and_those_of_other_ranks_left_out(
    set_rank: pytest.MonkeyPatch,
    as_rank: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured_logging() as own:
        show_own_lines("debug")
        for rank in range(2):
            as_rank(rank)
            own.info("i")
            own.warning("w")
            own.warning("[rank %d/2] told", rank)
        set_rank.setenv("DDPKIT_LOG_ALL_RANKS", "1")
        own.info("all")
    assert capsys.readouterr().err.splitlines() == [
        "INFO ddpkit: [rank 0/2] i",
        "WARNING ddpkit: [rank 0/2] w",
        "WARNING ddpkit: [rank 0/2] told",
        "WARNING ddpkit: [rank 1/2] w",
        "WARNING ddpkit: [rank 1/2] told",
        "INFO ddpkit: [rank 1/2] all",
    ]


@pytest.mark.parametrize("first", ["logging", "ddpkit"])
def test_no_line_appears_twice_when_logging_is_configured(
    first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with unconfigured_logging() as own:
        if first == "ddpkit":
            show_own_lines("info")
        logging.basicConfig(format="mine: %(message)s")
        show_own_lines("info")
        own.info("i")
        own.debug("d")
        assert len(logging.getLogger().handlers) == 1
    assert capsys.readouterr().err == "mine: i\n"


def test_own_lines_are_left_to_a_handler_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    with unconfigured_logging() as own:
        show_own_lines("info")
        own.addHandler(logging.StreamHandler(file))
        logging.getLogger("ddpkit.loader").info("i")
    assert (file.getvalue(), capsys.readouterr().err) == ("i\n", "")


def test_called_twice_it_adds_one_handler_and_keeps_a_level_of_the_users(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured_logging() as own:
        own.setLevel(logging.ERROR)
        show_own_lines("info")
        show_own_lines("debug")
        own.warning("w")
        own.error("e")
        assert len(own.handlers) == 1
    assert capsys.readouterr().err == "ERROR ddpkit: e\n"


def test_without_the_variable_nothing_is_changed() -> None:
    with unconfigured_logging() as own:
        show_own_lines("")
        assert own.handlers == []
        assert own.level == logging.NOTSET


def test_a_level_that_is_none_is_named_once(as_rank: Callable[[int], None]) -> None:
    with unconfigured_logging() as own:
        as_rank(0)
        with pytest.warns(UserWarning, match="DDPKIT_LOG='loud' was given; expected one of debug"):
            show_own_lines("loud")
        as_rank(1)
        show_own_lines("loud")
        assert own.handlers == []


def test_without_a_standard_error_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with unconfigured_logging() as own:
        show_own_lines("info")
        monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
        own.info("i")
    assert capsys.readouterr().out == ""
