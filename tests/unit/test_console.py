import io

import pytest

from ddpkit.console import rank0_print


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
