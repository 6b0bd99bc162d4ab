"""The pytest plugin: `@pytest.mark.ranks(2)` runs the body of a test on every rank.

pytest finds it wherever ddpkit is installed. Fixtures of all scopes, parameters, `monkeypatch` and
closures are those of an ordinary test: they are set up once, in the process of pytest, and every
rank that is forked from it has its own copies. What a rank changes in them stays in that rank.

    @pytest.mark.ranks(2)
    def test_the_mean_is_that_of_all_ranks():
        assert reduce_mean(get_rank()) == 0.5

The report of a failure is that of the rank that failed first. Where ranks cannot be forked (workers
of pytest-xdist have threads), fixtures have to be picklable, and a report lacks the values of an
assertion. Coverage needs `parallel = true`, as for every program of several processes. A debugger
(`--pdb`, `--trace`) gets the test as rank 0 of a world of one. torch is imported no earlier than a
marked test runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from ddpkit.errors import ConfigError, DdpkitError
from ddpkit.rank_mark import DESCRIPTION, RankMark, read_mark

if TYPE_CHECKING:
    from ddpkit.rank_body import Style

MARK = "ranks"
_PARAMETER = "_number_of_ranks"
_LAUNCHED = pytest.StashKey[bool]()
_FOR_THE_REPORT = 2.0  # seconds that are left to say where the ranks are before pytest-timeout acts


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", DESCRIPTION)


@pytest.fixture(name=_PARAMETER)
def _number_of_ranks(request: pytest.FixtureRequest) -> int:
    """Hold the number of ranks of a test that runs with several."""
    return int(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks."""
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    problem = None
    try:
        sizes = read_mark(mark.args, mark.kwargs).world_sizes
    except ConfigError as error:
        problem = f"{metafunc.definition.nodeid}: {error}"
    if problem is not None:  # outside of the handler, or the error would be shown, too
        pytest.fail(problem, pytrace=False)
    if len(sizes) > 1:
        metafunc.fixturenames.append(_PARAMETER)
        ids = [f"{size}-ranks" if size > 1 else "1-rank" for size in sizes]
        metafunc.parametrize(_PARAMETER, sizes, ids=ids, indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what cannot run on ranks."""
    if item.get_closest_marker(MARK) is None:
        return
    function = getattr(item, "function", None)
    if not isinstance(item, pytest.Function) or getattr(item.cls, "setUpClass", None) is not None:
        kind = "a method of a unittest.TestCase" if function is not None else "no test function"
        pytest.fail(f"@pytest.mark.ranks does not work here: this is {kind}.", pytrace=False)
    asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if asynchronous or inspect.isgeneratorfunction(function):
        pytest.fail(
            "@pytest.mark.ranks needs an ordinary function, but this one is async or yields.",
            pytrace=False,
        )
    shared = [name for name in ("capfd", "capfdbinary") if name in item.fixturenames]
    if shared and _world_size(item) > 1:
        pytest.fail(
            f"@pytest.mark.ranks does not work with {shared[0]}: it captures into one file, which "
            "all ranks would share. Use capsys, of which every rank has its own.",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test."""
    mark = pyfuncitem.get_closest_marker(MARK)
    if mark is None:
        return None
    from ddpkit import rank_body

    wanted = read_mark(mark.args, mark.kwargs)
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    if pyfuncitem.config.getoption("usepdb", False) or pyfuncitem.config.getoption("trace", False):
        _say(pyfuncitem, "for the debugger this test runs as rank 0 of a world of one")
        opens_group = wanted.options.get("init_group", True)
        rank_body.run_alone(pyfuncitem.obj, arguments, opens_group=opens_group)
        return True
    world_size = _world_size(pyfuncitem)
    pyfuncitem.stash[_LAUNCHED] = world_size > 1
    rank_body.run_test(
        pyfuncitem.obj,
        arguments,
        world_size=world_size,
        options=_options(pyfuncitem, wanted),
        style=_style(pyfuncitem),
    )
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Show the report of the rank that failed first in place of that of this process."""
    outcome = yield
    if call.when != "call" or call.excinfo is None or not item.stash.get(_LAUNCHED, False):
        return  # a body that ran in this process has its report already
    report = outcome.get_result()
    if report.outcome == "failed":
        _show_ranks(report, call.excinfo.value)


def _show_ranks(report: pytest.TestReport, error: BaseException) -> None:
    from ddpkit.rank_body import describe_others, report_of

    told = report_of(error)
    if told is None:
        if isinstance(error, DdpkitError):  # where it was raised, in this process, tells nothing
            report.longrepr = f"{type(error).__name__}: {error}"
        return
    report.longrepr = told.text
    others = describe_others(error, told.rank) or "nothing else failed"
    title = f"failed on rank {told.rank} of {told.world_size}"
    report.sections.insert(0, (title, f"other ranks: {others}"))


# ----------------------------------------------------------------------------------- what is asked


def _world_size(item: pytest.Function) -> int:
    chosen = getattr(item, "callspec", None)  # there is none without any parameter
    if chosen is not None and _PARAMETER in chosen.params:
        return int(chosen.params[_PARAMETER])
    mark = item.get_closest_marker(MARK)
    assert mark is not None
    return read_mark(mark.args, mark.kwargs).world_sizes[0]


def _options(item: pytest.Function, wanted: RankMark) -> dict[str, Any]:
    """Add a time limit, if pytest-timeout sets one, so that it is told where the ranks are."""
    limit = _time_limit(item)
    return {**({} if limit is None else {"time_limit": limit}), **wanted.options}


def _time_limit(item: pytest.Function) -> float | None:
    mark = item.get_closest_marker("timeout")
    given: Any = None
    if mark is not None:
        given = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    elif item.config.pluginmanager.hasplugin("timeout"):
        given = item.config.getoption("timeout", None) or item.config.getini("timeout")
    seconds = float(given or 0)
    return max(seconds / 2, seconds - _FOR_THE_REPORT) if seconds > 0 else None


def _style(item: pytest.Function) -> Style:
    from ddpkit.rank_body import Style

    code = inspect.unwrap(_plain(item.obj)).__code__
    return Style(
        traceback=item.config.getoption("tbstyle", "auto"),
        shows_locals=bool(item.config.getoption("showlocals", False)),
        file=code.co_filename,
        line=code.co_firstlineno - 1,
    )


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _say(item: pytest.Item, text: str) -> None:
    reporter = item.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"ddpkit: {text}")
