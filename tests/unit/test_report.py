import signal
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from ddpkit.errors import GroupError, PeerError, RankFailure, WorkerError
from ddpkit.launch import report
from ddpkit.launch.report import (
    Failure,
    classify,
    common_exit,
    describe,
    failure_of_end,
    failure_of_exception,
    failure_of_unsendable,
    is_consequence,
    order_by_cause,
    raise_failure,
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
        (GroupError("took different paths"), "/x/ddpkit/agree.py", "exception"),
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
        ("unsendable", False),
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


def raise_all(failures: list[Failure], world_size: int = 2) -> BaseException:
    return raised_in(lambda: raise_failure(failures, world_size, "train"))


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


def test_what_cannot_be_rebuilt_is_a_worker_error_with_its_text() -> None:
    made = failure_of_exception(1, fail_with(KeyError("x")))
    assert made.record is not None
    error = raise_all([replace(made, record=replace(made.record, data=None))])
    assert isinstance(error, WorkerError)
    assert (error.rank, error.exit_code) == (1, None)
    assert "KeyError: 'x'" in str(error)
    assert "[rank 1]     raise error" in str(error)


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


def test_the_text_names_rank_function_host_and_every_other_failure() -> None:
    others = [failure(0, "transport", summary="RuntimeError: first line\nsecond line")]
    root = failure(1, "exception", summary="KeyError: 'x'", traceback="Traceback:\n  line\n")
    assert describe([root, *others], 2, "train").splitlines() == [
        "Rank 1 of 2 running train() on node1 failed: KeyError: 'x'",
        "  also [rank 0/2]: RuntimeError: first line",
        "",
        "[rank 1] Traceback:",
        "[rank 1]   line",
    ]


def test_the_text_of_thousands_of_failures_has_one_line_for_each() -> None:
    failures = [failure(rank, "transport") for rank in range(1000)]
    assert len(describe(failures, 1000, "train").splitlines()) == 1000


def test_a_failure_without_any_text() -> None:
    assert report._first_line("") == ""
