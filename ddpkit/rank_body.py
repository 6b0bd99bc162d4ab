"""The body of one test on every rank, and what becomes of it in the report of pytest."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpkit.errors import ConfigError, GroupError, WorkerError
from ddpkit.group import get_rank, get_world_size, process_group
from ddpkit.serialize import check_sendable
from ddpkit.testing import run_ranks

Kind = Literal["passed", "skipped", "xfailed"]

_REPORT = "_ddpkit_report"
_BEGUN = ".begun"
_PAUSE = 0.005
PATIENCE = 10.0
"""Seconds that a rank which skips gives the others, once all have begun, to do so, too."""
START_BOUND = 60.0
"""Seconds that it gives them to begin: without a group ranks may start far apart."""


@dataclass(frozen=True)
class Style:
    """How the report of a failure is to look."""

    traceback: str = "long"
    """Value of pytest's `--tb`."""
    shows_locals: bool = False
    """Whether `--showlocals` was given."""
    file: str = ""
    """File of the test, above which its own traceback begins."""
    line: int = 0
    """First line of the test, counted from 0."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank that did not fail."""

    kind: Kind
    reason: str = ""


@dataclass(frozen=True)
class RankReport:
    """What pytest would have printed on the rank that failed first."""

    rank: int
    world_size: int
    text: Any
    """A representation of pytest's own, which it can print with colours."""


class RanksDisagreeError(GroupError):
    """A test was skipped on some ranks only."""


def run_test(
    body: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    world_size: int,
    options: Mapping[str, Any],
    style: Style,
) -> None:
    """Run the body of a test on every rank of a new world.

    Args:
        body: The test function.
        arguments: Values of its fixtures and parameters, by name. Each rank has its own copies.
        world_size: Number of ranks; one of them runs in this process.
        options: Options of `run_ranks`.
        style: How the report of a failure is to look.

    Raises:
        BaseException: What the rank raised that failed first; see `report_of`.
        ConfigError: An option is wrong, or ranks are not forked and a value cannot be sent to them.
        RanksDisagreeError: Some ranks skipped the test and others did not.
    """
    if world_size == 1:
        run_ranks(lambda: body(**arguments), 1, **options)
        return
    with tempfile.TemporaryDirectory(prefix="ddpkit-test-") as folder:

        def on_rank() -> Outcome:
            return _run_on_rank(body, arguments, style, folder)

        on_rank.__qualname__ = getattr(body, "__qualname__", on_rank.__qualname__)  # in messages
        on_rank.__module__ = "<test>"  # where no rank looks for it, so that it is sent by value
        try:
            outcomes = run_ranks(on_rank, world_size, **options)
        except ConfigError as error:
            if report_of(error) is None and "cannot be sent" in str(error):  # no rank had begun
                _name_unsendable(arguments)
            raise
    _follow(outcomes)


def _name_unsendable(arguments: Mapping[str, Any]) -> None:
    """Raise in the words of a test where the value of a fixture cannot be sent to ranks."""
    try:
        check_sendable({f"fixture {name}": value for name, value in arguments.items()})
    except ConfigError as error:
        raise ConfigError(
            f"{error} The ranks of this test are not forked from pytest, for it has other threads "
            "or start_method= says so, and get the values of fixtures by pickle. Make this one in "
            "the body of the test."
        ) from None


def run_alone(body: Callable[..., Any], arguments: Mapping[str, Any], *, opens_group: bool) -> None:
    """Run the body of a test as the only rank of a world, in this process, for a debugger."""
    with process_group(device="cpu") if opens_group else contextlib.nullcontext():
        body(**arguments)


def report_of(error: BaseException) -> RankReport | None:
    """Return what the rank said that raised an exception, None where it is none of a rank's."""
    report = getattr(error, _REPORT, None)
    return report if isinstance(report, RankReport) else None


def describe_others(error: BaseException, rank: int) -> str:
    """List what happened on the ranks other than the one that failed first; "" for nothing."""
    cause = error.__cause__
    failures = cause.failures if isinstance(cause, WorkerError) else ()
    return "\n".join(
        f"rank {each.rank}: {each.summary.splitlines()[0] if each.summary else each.kind}"
        for each in failures
        if each.rank != rank
    )


# ------------------------------------------------------------------------------------ on a rank


def _run_on_rank(
    body: Callable[..., Any], arguments: Mapping[str, Any], style: Style, folder: str
) -> Outcome:
    (Path(folder) / f"{get_rank()}{_BEGUN}").touch()
    try:
        with _measured():
            outcome = _outcome_of(body, arguments)
    except BaseException as error:
        _attach_report(error, style)
        raise
    _agree(outcome, Path(folder))
    return outcome


def _outcome_of(body: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    try:
        body(**arguments)
    except pytest.skip.Exception as skipped:
        return Outcome("skipped", skipped.msg or "")
    except pytest.xfail.Exception as failed:
        return Outcome("xfailed", failed.msg or "")
    return Outcome("passed")


def _attach_report(error: BaseException, style: Style) -> None:
    report = RankReport(get_rank(), get_world_size(), _represent(error, style))
    with contextlib.suppress(AttributeError, TypeError):  # a class without a place for it
        setattr(error, _REPORT, report)


def _represent(error: BaseException, style: Style) -> Any:
    info = pytest.ExceptionInfo.from_exception(error)
    own = info.traceback.cut(path=style.file, firstlineno=style.line)
    info.traceback = own.filter(info) or info.traceback
    looks: Any = "long" if style.traceback == "auto" else style.traceback
    return info.getrepr(style=looks, showlocals=style.shows_locals, funcargs=False)


def _agree(outcome: Outcome, folder: Path) -> None:
    """Wait for the other ranks to skip the test, too, where this one does.

    Files tell it, for one that goes on may wait in a collective until its time-out.
    """
    rank, world_size = get_rank(), get_world_size()
    _write(folder / str(rank), outcome.kind)
    if outcome.kind == "passed":
        return
    _wait_until_all_have_begun(folder, world_size)
    deadline = time.monotonic() + PATIENCE
    while True:
        kinds = {other: _read(folder / str(other)) for other in range(world_size)}
        if set(kinds.values()) == {outcome.kind}:
            return
        different = [other for other, kind in kinds.items() if kind not in (None, outcome.kind)]
        if different or time.monotonic() > deadline:
            raise RanksDisagreeError(_describe_difference(rank, outcome, kinds))
        time.sleep(_PAUSE)


def _wait_until_all_have_begun(folder: Path, world_size: int) -> None:
    deadline = time.monotonic() + START_BOUND
    while len(list(folder.glob(f"*{_BEGUN}"))) < world_size and time.monotonic() < deadline:
        time.sleep(_PAUSE)


def _describe_difference(rank: int, outcome: Outcome, kinds: Mapping[int, str | None]) -> str:
    others = ", ".join(
        f"rank {other} {kind or 'goes on'}" for other, kind in kinds.items() if other != rank
    )
    return (
        f"Rank {rank} {outcome.kind} the test ({outcome.reason!r}), but {others}. A test is "
        "skipped, or expected to fail, on all ranks or on none: decide by what all of them see."
    )


def _write(file: Path, kind: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(kind)
    partial.rename(file)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _measured() -> Iterator[None]:
    """Save what coverage has measured in this rank, which ends without the usual exit."""
    coverage = sys.modules.get("coverage")
    measured = None if coverage is None else coverage.Coverage.current()
    try:
        yield
    finally:
        if measured is not None:
            measured.stop()
            measured.save()


# ------------------------------------------------------------------------- in the process of pytest


def _follow(outcomes: list[Outcome]) -> None:
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"skipped"}:
        raise pytest.skip.Exception(outcomes[0].reason, _use_item_location=True)
    if kinds == {"xfailed"}:
        pytest.xfail(outcomes[0].reason)
