"""Many launches: within each other, after each other, from several threads and programs at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from ddpkit import distributed, get_rank
from ddpkit.errors import WorkerError
from ddpkit.testing import run_ranks
from tests.forking import needs_fork
from tests.multiproc.test_failures import cause_of

REPOSITORY = Path(__file__).parents[2]
TAKEN_PORT = 29500  # the one that hand-written programs use


def sum_over_ranks(number: int) -> int:
    total = torch.tensor([number + get_rank()])
    dist.all_reduce(total)
    return int(total)


def summing(number: int) -> Callable[[], int]:
    """Make a function that goes by value, so that no fresh rank has to import pytest."""

    def function() -> int:
        total = torch.tensor([number + get_rank()])
        dist.all_reduce(total)
        return int(total)

    return function


def failing(number: int) -> Callable[[], None]:
    def fail_with_number() -> None:
        dist.barrier()
        if get_rank() == 1:
            raise KeyError(number)
        dist.barrier()

    return fail_with_number


def check_launch(number: int, **options: Any) -> None:
    """Launch two ranks, whose results are those of no other launch."""
    assert run_ranks(summing(number), **options) == [2 * number + 1] * 2


def check_failing_launch(number: int, **options: Any) -> None:
    with pytest.raises(KeyError) as caught:
        run_ranks(failing(number), **options)
    assert caught.value.args == (number,)
    assert cause_of(caught.value).rank == 1


# --------------------------------------------------------------------------- within each other


@distributed(device="cpu")
def innermost() -> list[int]:
    return [os.getpid(), get_rank()]


@distributed(nproc_per_node=2, device="cpu")
def inner() -> list[int]:
    return innermost()


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_launches_within_launches_run_in_the_rank_that_calls_them(method: str) -> None:
    def outer() -> tuple[list[int], list[int], list[list[int]]]:
        return [os.getpid(), get_rank()], inner(), inner.run_all()

    results = run_ranks(outer, start_method=method)
    ranks = [mine for mine, _, _ in results]
    assert [rank for _, rank in ranks] == [0, 1]
    assert [within for _, within, _ in results] == ranks
    assert [everybody for _, _, everybody in results] == [ranks, ranks]


HELPER = """
import json, sys
from ddpkit.testing import run_ranks
from tests.multiproc.test_many_launches import sum_over_ranks
json.dump(run_ranks(sum_over_ranks, 3, args=[10]), sys.stdout)
"""


@pytest.mark.drill
@pytest.mark.timeout(120)
def test_a_program_that_a_rank_starts_has_launches_of_its_own() -> None:
    def function() -> list[int]:
        finished = subprocess.run(
            [sys.executable, "-W", "error", "-c", HELPER],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            timeout=100,
            check=True,
        )
        results: list[int] = json.loads(finished.stdout)
        return results

    assert run_ranks(function) == [[33, 33, 33]] * 2


# ---------------------------------------------------------------------------- after each other


@needs_fork
def test_launches_by_different_methods_and_failures_follow_each_other() -> None:
    for number, method in enumerate(["fork", "forkserver", "auto", "forkserver"]):
        check_launch(number, start_method=method)
        check_failing_launch(number, start_method=method)


# ------------------------------------------------------------------------ from several threads


@contextlib.contextmanager
def nothing_changes() -> Iterator[None]:
    """Check what launches change for a moment, and what two at once could put back wrongly."""

    def state() -> dict[str, object]:
        return {
            "environment": dict(os.environ),
            "filters of warnings": list(warnings.filters),
            "preparation data": spawn.get_preparation_data,
            "current folder": Path.cwd(),
            "descriptors": len(os.listdir("/dev/fd")),  # noqa: PTH208
            "group": dist.is_initialized(),
        }

    before = state()
    yield
    deadline = time.monotonic() + 5
    while state() != before and time.monotonic() < deadline:
        time.sleep(0.02)  # the executor's threads, and what they hold, take a moment to go
    assert state() == before


def slow_preparation_data(name: str) -> dict[str, Any]:
    time.sleep(0.03)
    return original_preparation_data(name)


original_preparation_data = spawn.get_preparation_data


@pytest.mark.drill
def test_four_threads_launch_three_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch(0, start_method="forkserver")  # which keeps a few descriptors from now on
    # What multiprocessing asks at each start takes long enough for the threads to meet there.
    monkeypatch.setattr(spawn, "get_preparation_data", slow_preparation_data)

    def launch_three_times(thread: int) -> int:
        for number in range(10 * thread, 10 * thread + 3):
            check = check_failing_launch if number % 10 == 1 else check_launch
            check(number)
        return thread

    with nothing_changes(), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(launch_three_times, range(4), timeout=50)) == [0, 1, 2, 3]


def load_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a module from a file that no import would find, as plugins and configurations are."""
    path = folder / "train-v2.py"
    path.write_text(PLUGIN)
    spec = importlib.util.spec_from_file_location("plugin_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plugin_of_a_test", module)
    spec.loader.exec_module(module)
    return module


PLUGIN = """
import time
from ddpkit import get_rank

class Slow:
    def __reduce__(self):
        time.sleep(0.05)
        return Slow, ()

def double(number):
    return 2 * number

def train(slow, number):
    return double(number) + get_rank()
"""


@needs_fork
def test_a_function_of_a_file_that_no_import_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = load_plugin(tmp_path, monkeypatch)
    for method in ("fork", "forkserver"):
        assert run_ranks(plugin.train, args=[plugin.Slow(), 3], start_method=method) == [6, 7]


def test_threads_launch_functions_of_one_file_that_no_import_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = load_plugin(tmp_path, monkeypatch)
    plugin.__spec__ = None

    def launch(number: int) -> list[int]:
        return run_ranks(plugin.train, args=[plugin.Slow(), number])

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(launch, range(3), timeout=50))
    assert results == [[0, 1], [2, 3], [4, 5]]
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_an_exception_is_raised_in_the_thread_that_launched() -> None:
    caught: dict[str, BaseException] = {}

    def launch() -> None:
        try:
            run_ranks(failing(7))
        except KeyError as error:
            caught[threading.current_thread().name] = error

    thread = threading.Thread(target=launch, name="launcher")
    thread.start()
    thread.join(timeout=50)
    assert caught["launcher"].args == (7,)
    assert "in fail_with_number" in cause_of(caught["launcher"]).traceback


def test_a_killed_rank_of_one_thread_leaves_the_launch_of_another_alone() -> None:
    ready, killed = threading.Event(), threading.Event()

    def kill() -> None:
        ready.wait(timeout=30)
        with pytest.raises(WorkerError, match="exit code 9"):
            run_ranks(lambda: os._exit(9))
        killed.set()

    def launch_meanwhile() -> None:
        ready.set()
        number = 0
        while not killed.is_set() or number < 2:
            check_launch(number)
            number += 1

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(kill), pool.submit(launch_meanwhile)]:
            future.result(timeout=50)


# ------------------------------------------------------------------------------- from asyncio


async def launch_in_executor(function: Callable[[], Any]) -> Any:
    ticks = 0
    launched = asyncio.get_running_loop().run_in_executor(None, function)
    while not launched.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 1  # the loop went on meanwhile
    return await launched


def test_a_launch_in_an_executor_of_asyncio() -> None:
    asyncio.run(launch_in_executor(lambda: check_launch(1)))


def test_a_launch_in_an_executor_raises_in_the_coroutine_that_awaits_it() -> None:
    with pytest.raises(KeyError) as caught:
        asyncio.run(launch_in_executor(lambda: run_ranks(failing(8))))
    assert caught.value.args == (8,)
    assert cause_of(caught.value).rank == 1


def test_several_launches_at_once_in_one_coroutine() -> None:
    async def main() -> list[int]:
        launches = [asyncio.to_thread(run_ranks, summing(number)) for number in (10, 20, 30)]
        return [results[1] for results in await asyncio.gather(*launches)]

    assert asyncio.run(main()) == [21, 41, 61]


def test_a_launch_in_a_coroutine_itself_whose_ranks_have_loops_of_their_own() -> None:
    async def rank() -> int:
        await asyncio.sleep(0)
        return sum_over_ranks(5)

    async def main() -> list[int]:
        results = run_ranks(lambda: asyncio.run(rank()))
        await asyncio.sleep(0)
        return results

    assert asyncio.run(main()) == [11, 11]


# ------------------------------------------------------------------- from several programs


@contextlib.contextmanager
def taken_port() -> Iterator[None]:
    """Make sure that somebody listens on the usual port, and that it is no store."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", TAKEN_PORT))
            listener.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        yield


def sum_by_hand(number: int) -> int:
    """Do what a program without ddpkit does in each of its ranks."""
    hook = sys.excepthook
    dist.init_process_group("gloo")
    result = sum_over_ranks(number)
    dist.destroy_process_group()
    sys.excepthook = hook
    return result


def test_the_usual_port_may_be_taken() -> None:
    with taken_port():
        assert run_ranks(summing(1)) == [3, 3]
        assert run_ranks(sum_by_hand, args=[1], init_group=False) == [3, 3]


@needs_fork
@pytest.mark.parametrize(
    "names", [["MASTER_PORT"], ["MASTER_ADDR"], ["MASTER_ADDR", "MASTER_PORT"]]
)
def test_an_address_in_the_environment_is_not_that_of_a_launch(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(TAKEN_PORT)}
    for name in names:
        monkeypatch.setenv(name, elsewhere[name])
    with taken_port():
        assert run_ranks(summing(1)) == [3, 3]
        assert run_ranks(sum_by_hand, args=[1], init_group=False) == [3, 3]
        assert [os.environ[name] for name in names] == [elsewhere[name] for name in names]


FIVE_LAUNCHES = """
import json, sys
from ddpkit.testing import run_ranks
from tests.multiproc.test_many_launches import sum_by_hand, sum_over_ranks

first = int(sys.argv[1])
results = []
for number in range(first, first + 5):
    if number % 2:
        results += [run_ranks(sum_over_ranks, args=[number])]
    else:
        results += [run_ranks(sum_by_hand, args=[number], init_group=False)]
json.dump(results, sys.stdout)
"""


def start_program(first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FIVE_LAUNCHES, str(first)],
        cwd=REPOSITORY,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(TAKEN_PORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.drill
@pytest.mark.timeout(120)
def test_three_programs_launch_five_times_each_at_the_same_time() -> None:
    numbers = [100, 200, 300]
    with taken_port():
        programs = [start_program(first) for first in numbers]
        try:
            outputs = [program.communicate(timeout=100) for program in programs]
        finally:
            for program in programs:
                program.kill()
    assert [program.returncode for program in programs] == [0, 0, 0], outputs
    expected = [[[2 * n + 1] * 2 for n in range(first, first + 5)] for first in numbers]
    assert [json.loads(output) for output, _ in outputs] == expected
    assert [errors for _, errors in outputs] == [""] * 3
