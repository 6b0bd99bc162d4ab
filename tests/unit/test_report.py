import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpkit.consequence import classify
from ddpkit.errors import (
    GroupError,
    PeerError,
    RankFailure,
    WorkerError,
    WorkerTimeoutError,
)
from ddpkit.launch import report
from ddpkit.launch.report import (
    Failure,
    Stack,
    common_exit,
    count_memory_kills,
    describe,
    failure_of_end,
    failure_of_exception,
    failure_of_unsendable,
    is_about_others,
    is_consequence,
    order_by_cause,
    raise_failure,
    raise_timeout,
)


def failure(rank: int, kind: str, time: float = 0.0, **fields: object) -> Failure:
    info = RankFailure(rank, "node1", kind, f"{kind} of rank {rank}", time=time)
    return Failure(replace(info, **fields))  # type: ignore[arg-type]


def raised_in(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def fail_with(error: BaseException) -> BaseException:
    def fail() -> None:
        raise error

    return raised_in(fail)


def fail_at(error: BaseException, file: str) -> BaseException:
    """Raise an error from a line of another file."""
    names = {"error": error}
    exec(compile("def fail():\n    raise error", file, "exec"), names)
    return raised_in(names["fail"])  # type: ignore[arg-type]


# ------------------------------------------------------------------- cause or consequence


@pytest.mark.parametrize(
    ("error", "file", "kind"),
    [
        (RuntimeError("closed"), "/x/torch/distributed/distributed_c10d.py", "transport"),
        (RuntimeError("closed"), "/x/torch/nn/parallel/distributed.py", "transport"),
        (RuntimeError("closed"), "/x/torch/autograd/graph.py", "transport"),
        (RuntimeError("closed"), "C:\\x\\torch\\distributed\\distributed_c10d.py", "transport"),
        (dist.DistBackendError("closed"), "/x/torch/distributed/distributed_c10d.py", "transport"),
        (GroupError("store has gone"), "/x/ddpkit/control.py", "transport"),
        (GroupError("took different paths"), "/x/ddpkit/agree.py", "group"),
        (ValueError("bad shape"), "/x/torch/distributed/distributed_c10d.py", "exception"),
        (RuntimeError("Connection closed by peer"), "train.py", "exception"),
        (RuntimeError("shape"), "/x/torch/nn/modules/linear.py", "exception"),
        (PeerError("rank 1 failed", rank=1), "/x/ddpkit/control.py", "peer"),
        (PeerError("rank 1 failed", rank=1), "train.py", "peer"),
        (SystemExit(3), "train.py", "exit"),
        (KeyboardInterrupt(), "train.py", "exception"),
    ],
)
def test_kind_of_an_exception(error: BaseException, file: str, kind: str) -> None:
    assert classify(fail_at(error, file)) == kind


def test_a_collective_that_is_waited_for_in_any_file_is_a_consequence() -> None:
    place = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561]"
    text = f"{place} Connection closed by peer [127.0.0.1]:65249."
    assert classify(fail_at(RuntimeError(text), "my/train.py")) == "transport"
    assert classify(fail_at(ValueError(text), "my/train.py")) == "exception"
    assert classify(fail_at(RuntimeError("gloo closed"), "my/train.py")) == "exception"


def test_a_runtime_error_of_the_users_own_type_is_a_cause() -> None:
    class DiskError(RuntimeError):
        pass

    error = fail_at(DiskError("full"), "/x/torch/distributed/checkpoint.py")
    assert classify(error) == "exception"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exception", False),
        ("exit", False),
        ("signal", False),
        ("group", False),
        ("stopped", False),
        ("transport", True),
        ("peer", True),
    ],
)
def test_consequences(kind: str, expected: bool) -> None:
    assert is_consequence(failure(0, kind)) == expected


@pytest.mark.parametrize(
    ("failures", "order"),
    [
        ([failure(0, "exception", 2), failure(1, "exception", 1)], [1, 0]),
        ([failure(0, "transport", 1), failure(1, "exception", 2)], [1, 0]),
        ([failure(0, "peer", 1), failure(1, "signal", 2)], [1, 0]),
        ([failure(0, "transport", 1), failure(1, "exit", 9), failure(2, "peer", 0)], [1, 2, 0]),
        ([failure(0, "transport", 2), failure(1, "transport", 1)], [1, 0]),
        ([failure(0, "signal", 1), failure(1, "exception", 2)], [0, 1]),
    ],
)
def test_the_root_cause_comes_first(failures: list[Failure], order: list[int]) -> None:
    assert [each.info.rank for each in order_by_cause(failures)] == order


# ------------------------------------------------------------------------------- records


def test_a_failure_by_an_exception() -> None:
    made = failure_of_exception(3, fail_with(KeyError("x")))
    info = made.info
    assert (info.rank, info.host, info.kind) == (3, socket.gethostname(), "exception")
    assert info.summary == "KeyError: 'x'"
    assert "in fail" in info.traceback
    assert (info.exit_code, info.signal_name, made.system_exit) == (None, None, False)
    assert info.time > 0


@pytest.mark.parametrize(("code", "status"), [(3, 3), (None, 0), (0, 0), ("no data", 1), (True, 1)])
def test_a_failure_by_system_exit(code: object, status: int) -> None:
    made = failure_of_exception(0, fail_with(SystemExit(code)))
    assert (made.system_exit, made.info.exit_code, made.info.kind) == (True, status, "exit")


@pytest.mark.parametrize(
    ("exit_code", "kind", "code", "name", "text"),
    [
        (7, "exit", 7, None, "ended with exit code 7 without returning"),
        (0, "exit", 0, None, "ended with exit code 0 without returning"),
        (None, "exit", None, None, "without returning"),
        (-signal.SIGSEGV, "signal", None, "SIGSEGV", "killed by SIGSEGV"),
        (-signal.SIGKILL, "signal", None, "SIGKILL", "killed by SIGKILL.*out-of-memory killer"),
        (-250, "signal", None, "signal 250", "killed by signal 250"),
    ],
)
def test_a_failure_by_the_end_of_the_process(
    exit_code: int | None, kind: str, code: int | None, name: str | None, text: str
) -> None:
    info = failure_of_end(1, exit_code).info
    assert (info.rank, info.kind, info.exit_code, info.signal_name) == (1, kind, code, name)
    with pytest.raises(WorkerError, match=text):
        raise_failure([failure_of_end(1, exit_code)], 2, "train")


def test_only_a_kill_suggests_the_out_of_memory_killer() -> None:
    assert "out-of-memory" not in failure_of_end(1, -signal.SIGTERM).info.summary


def test_a_failure_by_a_result_that_cannot_be_sent() -> None:
    made = failure_of_unsendable(1, (n for n in range(3)), TypeError("cannot pickle"))
    assert made.info.summary.startswith("TypeError: The function returned a builtins.generator")
    assert made.record is not None
    error = made.record.rebuild()
    assert isinstance(error, TypeError)
    assert isinstance(error.__cause__, TypeError)


# ---------------------------------------------------------------------- what the caller gets


def raise_all(
    failures: list[Failure], world_size: int = 2, unfinished: dict[int, Stack | None] | None = None
) -> BaseException:
    return raised_in(lambda: raise_failure(failures, world_size, "train", unfinished))


def test_the_original_exception_with_a_worker_error_as_its_cause() -> None:
    consequence = failure_of_exception(0, fail_at(RuntimeError("x"), "torch/distributed/a.py"))
    error = raise_all([consequence, failure_of_exception(1, fail_with(KeyError("x")))])
    assert type(error) is KeyError
    cause = error.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.rank, cause.host) == (1, socket.gethostname())
    assert "in fail" in cause.traceback
    assert [each.rank for each in cause.failures] == [1, 0]


def test_the_originals_own_cause_hangs_below() -> None:
    inner = KeyError("inner")
    outer = ValueError("outer")
    outer.__cause__ = inner
    error = raise_all([failure_of_exception(0, fail_with(outer))])
    assert isinstance(error.__cause__, WorkerError)
    assert isinstance(error.__cause__.__cause__, KeyError)


def test_the_originals_own_context_hangs_below() -> None:
    outer = ValueError("outer")
    outer.__context__ = KeyError("inner")
    error = raise_all([failure_of_exception(0, fail_with(outer))])
    assert isinstance(error.__cause__, WorkerError)
    assert isinstance(error.__cause__.__cause__, KeyError)


def test_a_context_that_was_suppressed_stays_so() -> None:
    outer = ValueError("outer")
    outer.__context__ = KeyError("inner")
    outer.__suppress_context__ = True  # raise ... from None
    error = raise_all([failure_of_exception(0, fail_with(outer))])
    assert isinstance(error.__cause__, WorkerError)
    assert error.__cause__.__cause__ is None


def test_what_cannot_be_rebuilt_is_a_worker_error_with_its_text() -> None:
    made = failure_of_exception(1, fail_with(KeyError("x")))
    assert made.record is not None
    error = raise_all([replace(made, record=replace(made.record, data=None))])
    assert isinstance(error, WorkerError)
    assert (error.rank, error.exit_code) == (1, None)
    assert "KeyError: 'x'" in str(error)
    assert "[rank 1/2]     raise error" in str(error)


def test_a_killed_rank_is_a_worker_error() -> None:
    error = raise_all([failure_of_end(1, -9)])
    assert isinstance(error, WorkerError)
    assert (error.rank, error.signal_name, error.exit_code) == (1, "SIGKILL", None)


# --------------------------------------------------------------------------------- SystemExit


def exit_of(rank: int, code: object) -> Failure:
    return failure_of_exception(rank, fail_with(SystemExit(code)))


@pytest.mark.parametrize("code", [0, 3, None, "no data"])
def test_an_exit_of_every_rank_is_an_exit_of_the_caller(code: object) -> None:
    error = raise_all([exit_of(0, code), exit_of(1, code)])
    assert type(error) is SystemExit
    assert error.code == code


@pytest.mark.parametrize(
    "failures",
    [
        [exit_of(0, 3)],  # the other rank returned, or was stopped
        [exit_of(0, 0)],
        [exit_of(0, 3), exit_of(1, 4)],
        [exit_of(0, 0), exit_of(1, None), failure(2, "exception", time=1e9)],
    ],
)
def test_an_exit_of_some_ranks_is_a_failure(failures: list[Failure]) -> None:
    assert common_exit(failures, max(2, len(failures))) is None
    error = raise_all(failures, max(2, len(failures)))
    assert isinstance(error, WorkerError)
    assert error.exit_code == failures[0].info.exit_code


def test_of_exits_with_different_texts_the_caller_gets_that_of_rank_0() -> None:
    error = raise_all([exit_of(0, "rank 0: no data"), exit_of(1, "rank 1: no data")])
    assert type(error) is SystemExit
    assert error.code == "rank 0: no data"


# --------------------------------------------------------------------------------- the text


def infos(*failures: Failure) -> list[RankFailure]:
    return [each.info for each in failures]


def test_the_text_has_the_root_cause_last_and_once_and_every_rank_tagged() -> None:
    root = failure(1, "exception", summary="KeyError: 'x'", traceback="Traceback:\n  KeyError: 'x'")
    other = failure(0, "transport", summary="RuntimeError: first line\nsecond line")
    assert describe(infos(root, other), 2, "train").splitlines() == [
        "[rank 1/2] failed on node1 while it ran train().",
        "  rank 0: RuntimeError: first line (a consequence)",
        "[rank 1/2] Traceback:",
        "[rank 1/2]   KeyError: 'x'",
    ]


def test_a_consequence_is_shown_with_the_line_that_it_came_from() -> None:
    root = failure(1, "exception", summary="KeyError: 'x'")
    text = (
        'Traceback (most recent call last):\n  File "/home/a/train.py", line 41, in main\n'
        f'    loss.backward()\n  File "{torch.__file__}", line 7, in backward\n    ...\n'
    )
    other = failure(0, "transport", summary="RuntimeError: closed", traceback=text)
    lines = describe(infos(root, other), 2, "train").splitlines()
    assert lines[1] == "  rank 0: RuntimeError: closed at train.py:41 (a consequence)"


def test_a_rank_that_had_returned_explains_a_collective_that_lost_it() -> None:
    lost = RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer")
    victim = failure_of_exception(0, fail_with(lost))
    error = raise_all([victim], 3, {2: None})
    expected = "rank 1 had returned from train() by then, while rank 0 was in"
    assert expected in str(error.__cause__).splitlines()[-1]
    if sys.version_info >= (3, 11):
        assert expected in error.__notes__[0]
    # Not where somebody has failed, nor where nobody has returned.
    cases: list[tuple[list[Failure], dict[int, Stack | None]]] = [
        ([victim, failure_of_exception(1, fail_with(KeyError("x")))], {2: None}),
        ([victim], {1: None, 2: None}),
    ]
    for failures, unfinished in cases:
        assert "had returned" not in str(raise_all(failures, 3, unfinished).__cause__)


def test_the_text_of_a_rank_without_a_traceback_says_how_it_ended() -> None:
    text = describe([failure_of_end(1, -11).info], 2, "train")
    assert text.splitlines()[-1] == "[rank 1/2] killed by SIGSEGV"


def test_consequences_are_folded_however_their_texts_differ() -> None:
    root = failure(3, "exception", summary="KeyError")
    victims = [
        failure(rank, "transport", summary=f"RuntimeError: closed by 10.0.0.{rank}")
        for rank in range(1000)
    ]
    lines = describe(infos(root, *victims), 1001, "train").splitlines()
    assert len(lines) == 3
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more: RuntimeError: closed by 10.0.0.0" in lines[1]


def test_the_text_of_thousands_of_different_failures_is_short() -> None:
    failures = [failure(rank, "exception", summary=f"Error{rank}") for rank in range(1000)]
    lines = describe(infos(*failures), 1000, "train").splitlines()
    assert len(lines) < 20
    assert "and 983 more, in .failures" in lines[-2]


def test_the_text_says_where_the_ranks_were_that_somebody_waited_for() -> None:
    root = failure(0, "group", summary="GroupError: rank 1 did not come")
    where = {1: Stack("load at data.py:7", "main thread:\n  ..."), 2: None}
    error = raise_all([root], 3, where)
    assert isinstance(error, WorkerError)
    assert "  rank 1 was here: load at data.py:7" in str(error).splitlines()
    assert "  rank 2: stopped after rank 0 had failed" in str(error).splitlines()
    assert [(each.rank, each.kind) for each in error.failures] == [
        (0, "group"),
        (1, "stopped"),
        (2, "stopped"),
    ]
    assert error.failures[1].traceback == "main thread:\n  ..."


def test_a_launch_that_took_too_long_tells_where_each_rank_was() -> None:
    where = {0: Stack("barrier at a.py:1", "main thread:\n  x"), 1: Stack("no answer (state T)")}
    error = raised_in(lambda: raise_timeout([], where, "train", 2.5))
    assert isinstance(error, WorkerTimeoutError)
    assert str(error).splitlines() == [
        "train() did not end within its time_limit of 2.5 s: "
        "rank 0: barrier at a.py:1; rank 1: no answer (state T)",
        "[rank 0] main thread:",
        "[rank 0]   x",
    ]
    assert error.stacks == {0: "main thread:\n  x", 1: ""}
    assert {each.kind for each in error.failures} == {"stopped"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("group", True), ("transport", True), ("peer", True), ("exception", False), ("exit", False)],
)
def test_failures_that_speak_of_other_ranks(kind: str, expected: bool) -> None:
    assert is_about_others(failure(0, kind)) == expected


def test_a_kill_while_memory_ran_out_is_told_apart() -> None:
    assert "memory ran out" in failure_of_end(1, -9, out_of_memory=True).info.summary
    assert "memory" not in failure_of_end(1, -15, out_of_memory=True).info.summary


def test_kills_for_want_of_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = "pgfault 9\noom_kill 7\noom_kill_other 5\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **options: statistics)
    assert count_memory_kills() == 7


def test_a_failure_without_any_text() -> None:
    assert report._first_line("") == ""
