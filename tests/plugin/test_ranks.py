"""The pytest plugin, by pytest runs of small files within this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A run of pytest within this process takes away what it was the first to import, and torch cannot
# be imported twice.
from ddpkit import rank_body
from tests.forking import needs_fork

HEAD = """
import os
import time
import unittest

import pytest
import torch
import torch.distributed as dist

from ddpkit import get_rank, get_world_size, reduce_sum
from ddpkit.errors import ConfigError
"""


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


# ----------------------------------------------------------------------------------- what works


def test_fixtures_parameters_and_closures_are_those_of_ordinary_tests(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
made = []
COUNT = 7

@pytest.fixture(scope="session")
def shared():
    made.append("shared")
    yield {"value": 1}
    assert made == ["shared"], "set up once"

@pytest.fixture
def mine(shared, tmp_path):
    shared["value"] += 1
    yield tmp_path
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]

@pytest.mark.ranks(2)
def test_fixtures(shared, mine, monkeypatch):
    monkeypatch.setenv("SEEN", "1")
    (mine / str(get_rank())).touch()
    assert reduce_sum(shared["value"]) == 4
    shared["value"] = 100  # of this rank alone

@pytest.mark.ranks(2)
def test_what_a_rank_changes_stays_there(shared):
    assert shared["value"] == 2
    assert "SEEN" not in os.environ

@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("factor", [3, 5])
def test_sizes(factor):
    assert reduce_sum(factor * COUNT) == factor * COUNT * get_world_size()

class TestMethods:
    @pytest.mark.ranks(2, timeout=30, init_group=False)
    def test_method(self):
        assert not dist.is_initialized()

@pytest.mark.ranks(2)
def test_each_rank_has_its_own_output(capsys):
    print("rank", get_rank())
    assert capsys.readouterr().out == f"rank {get_rank()}\\n"

@pytest.mark.ranks
def test_two_is_the_default():
    assert get_world_size() == 2

@pytest.mark.usefixtures("mine_too")
@pytest.mark.ranks(2)
def test_used_fixture():
    assert os.environ["TOO"] == "1"

@pytest.fixture
def mine_too(monkeypatch):
    monkeypatch.setenv("TOO", "1")

def test_without_the_mark():
    assert get_world_size() == 1
""",
        "-v",
        "--strict-markers",
    )
    result.assert_outcomes(passed=11)
    result.stdout.fnmatch_lines(["*test_sizes[[]1-rank-3[]] PASSED*"])
    result.stdout.fnmatch_lines(["*test_sizes[[]2-ranks-5[]] PASSED*"])


def test_skips_and_expected_failures_agree_across_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_body, "PATIENCE", 2.0)
    result = run(
        pytester,
        """
@pytest.mark.ranks(2)
def test_skipped():
    time.sleep(0.2 * get_rank())
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_import():
    pytest.importorskip("no_such_module")

@pytest.mark.ranks(2)
def test_expected():
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_marked():
    if get_rank() == 1:
        1 / 0
    dist.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
@pytest.mark.skip(reason="never runs")
def test_never():
    assert False

@pytest.mark.ranks(1)
def test_skipped_alone():
    pytest.skip("alone")

@pytest.mark.ranks(2)
def test_skipped_by_one():
    if get_rank() == 1:
        pytest.skip("only here")
    dist.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_skipped_by_one_when_the_other_has_passed():
    if get_rank() == 0:
        pytest.skip("only here")
""",
        "-rs",
    )
    result.assert_outcomes(skipped=4, xfailed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*Rank 1 skipped the test ('only here'), but rank 0 goes on.*",
            "*Rank 0 skipped the test ('only here'), but rank 1 passed.*",
        ]
    )
    result.stdout.fnmatch_lines(["SKIPPED*not today"])
    result.stdout.no_fnmatch_line("*rank_body.py*")


# -------------------------------------------------------------------------------------- failures


@needs_fork  # for the values of assertions, and for a start within a second
def test_the_report_is_that_of_the_rank_that_failed_first(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(2)
def test_values():
    found = {"rank": get_rank()}
    print("printed by", get_rank())
    if get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    assert found == {"rank": 0}, "which is wrong"

@pytest.mark.ranks(2)
def test_told():
    with pytest.raises(KeyError):
        {}["x"]
    pytest.fail("told so")

@pytest.mark.ranks(2)
def test_killed():
    if get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))

@pytest.mark.ranks(1)
def test_alone():
    assert get_world_size() == 2

@pytest.mark.ranks(1)
def test_wrong_use():
    raise ConfigError("by the test")
""",
        "--showlocals",
    )
    result.assert_outcomes(failed=5)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            '>*assert found == {"rank": 0}, "which is wrong"',
            "E*AssertionError: which is wrong",
            "E*assert {'rank': 1} == {'rank': 0}",
            "found*= {'rank': 1}",
            "*failed on rank 1 of 2*",
            "other ranks: rank 0: *",
        ]
    )
    assert "printed by 0" in text
    assert "printed by 1" in text
    result.stdout.fnmatch_lines(["E*Failed: told so", "*rank 1*SIGKILL*", "E*assert 1 == 2"])
    result.stdout.fnmatch_lines(['>*raise ConfigError("by the test")'])  # with its place
    result.stdout.fnmatch_lines(["FAILED*test_told - *"])  # the message, where there is room for it
    assert "supervisor.py" not in text


@needs_fork  # for the values of assertions, and for a start within a second
def test_a_time_limit_says_where_the_ranks_are(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(2, time_limit=1.0)
def test_own_limit():
    if get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(0.05)

@pytest.mark.ranks(2)
@pytest.mark.timeout(2)
def test_limit_of_pytest_timeout():
    dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(0.05)
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "WorkerTimeoutError: test_own_limit() did not end within its time_limit of 1 s: *",
            "*rank 0* line * in test_own_limit",
            "*rank 1* line * in test_own_limit",
            "WorkerTimeoutError: test_limit_of_pytest_timeout() did not end * of 1 s: *",
        ]
    )


def test_what_cannot_run_on_ranks_is_refused(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
class TestOld(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        pass

@pytest.mark.ranks(2)
async def test_async():
    pass

@pytest.mark.ranks(1, 2)
def test_one_file_for_all(capfd):
    pass
""",
        "-p",
        "no:asyncio",
    )
    assert result.parseoutcomes() == {"errors": 3, "passed": 1}
    result.stdout.fnmatch_lines(["*does not work with capfd: it captures into one file*"])
    result.stdout.fnmatch_lines(["*this is a method of a unittest.TestCase.*"])
    result.stdout.fnmatch_lines(["*this one is async or yields.*"])


def test_a_fixture_that_cannot_be_sent_is_named(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import threading

@pytest.fixture
def lock():
    return {"one": threading.Lock()}

@pytest.mark.ranks(2, start_method="forkserver")
def test_it(lock):
    pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*fixture lock[[]'one'[]]*_thread.lock*are not forked from pytest*"]
    )


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("ranks(0)", "*numbers of ranks are whole and at least 1*"),
        pytest.param("ranks('2')", "*numbers of ranks are whole*", marks=pytest.mark.drill),
        ("ranks(2, timeot=3)", "*has no option 'timeot'; it has timeout, time_limit,*"),
    ],
)
def test_a_wrong_mark_is_an_error_at_collection(
    pytester: pytest.Pytester, mark: str, message: str
) -> None:
    result = run(pytester, f"@pytest.mark.{mark}\ndef test_it():\n    pass\n", "--collect-only")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


# ----------------------------------------------------------------------------- with other options

TWO = """
@pytest.mark.ranks(2)
def test_first():
    assert get_world_size() == 1

@pytest.mark.ranks(2)
def test_second():
    assert reduce_sum(1) == get_world_size()
"""


def test_it_stops_at_the_first_failure_and_is_listed(pytester: pytest.Pytester) -> None:
    run(pytester, TWO, "-x").assert_outcomes(failed=1)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.ranks(*world_sizes, timeout=60*"])


def test_for_a_debugger_it_is_one_rank_in_this_process(pytester: pytest.Pytester) -> None:
    body = f"""
@pytest.mark.ranks(2)
def test_here():
    assert os.getpid() == {os.getpid()}
    assert (get_rank(), get_world_size()) == (0, 1)
    assert dist.is_initialized()
"""
    result = run(pytester, body, "--pdb")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*this test runs as rank 0 of a world of one*"])


@pytest.mark.drill
def test_on_several_workers_of_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(HEAD + TWO + TWO.replace("def test_", "def test_again_"))
    result = pytester.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=2, failed=2)
    # The threads of xdist forbid forks, and what a rank imports anew is not rewritten by pytest.
    result.stdout.fnmatch_lines([">*assert get_world_size() == 1", "*failed on rank ? of 2*"])


@pytest.mark.drill
def test_coverage_measures_what_ranks_run(pytester: pytest.Pytester) -> None:
    pytest.importorskip("coverage")
    module = pytester.makepyfile(
        measured="""
def on_first():
    return 1

def on_second():
    return 2
"""
    )
    pytester.makepyfile(
        HEAD
        + """
from measured import on_first, on_second

@pytest.mark.ranks(2)
def test_it():
    assert (on_first() if get_rank() == 0 else on_second()) > 0
"""
    )
    coverage = [sys.executable, "-m", "coverage"]
    environment = {**os.environ, "PYTHONPATH": str(pytester.path)}
    for command in (
        ["run", "--parallel-mode", "--source", ".", "-m", "pytest", "-q"],
        ["combine"],
        ["report", "--include", module.name, "--fail-under", "100"],
    ):
        done = subprocess.run(
            [*coverage, *command],
            cwd=pytester.path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.drill
def test_loading_the_plugin_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'ddpkit.pytest_plugin' in sys.modules\n"
        "    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
