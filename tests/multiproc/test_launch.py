import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddpkit import distributed, get_device, get_rank, get_world_size, process_group
from ddpkit.agree import exchange
from ddpkit.errors import ConfigError, WorkerError
from ddpkit.launch import start, supervisor, worker
from ddpkit.launch.inherited import Inherited
from ddpkit.testing import run_ranks
from ddpkit.threads import usable_cores
from tests.forking import FORK, needs_fork

SCALE = 10
two_ranks = distributed(nproc_per_node=2, device="cpu", timeout=60)


@two_ranks
def scaled_rank(factor: int = 1) -> int:
    return SCALE * factor * (get_rank() + 1)


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run_twice(*args: Any) -> list[Any]:
        return [function(*args), function(*args)]

    return run_twice


@twice
@two_ranks
def with_a_decorator_on_top(x: int) -> int:
    return x + get_world_size()


# --------------------------------------------------------------------------------- values


def test_a_call_gives_the_value_of_rank_0() -> None:
    assert scaled_rank() == 10
    assert scaled_rank(factor=2) == 20


def test_run_all_gives_the_values_in_the_order_of_ranks() -> None:
    assert scaled_rank.run_all(3) == [30, 60]
    assert scaled_rank.with_options(nproc_per_node=3).run_all() == [10, 20, 30]


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_start_methods_mean_the_same(method: str) -> None:
    offset = 100

    def closure(add: Callable[[int], int], *, data: dict[str, Any]) -> Any:
        return add(get_rank()) + offset, data["f"](2), SCALE, __name__

    with_lambda = functools.partial(lambda x, y: x + y, 1000)
    expected = [(1100, 4, 10, __name__), (1101, 4, 10, __name__)]
    data = {"f": lambda x: x * x}
    assert run_ranks(closure, start_method=method, args=[with_lambda], kwargs={"data": data}) == (
        expected
    )
    assert scaled_rank.with_options(start_method=method).run_all() == [10, 20]


def test_another_decorator_on_top() -> None:
    assert with_a_decorator_on_top(3) == [5, 5]


def test_another_decorator_on_top_under_forkserver() -> None:
    inner = with_a_decorator_on_top.__wrapped__  # type: ignore[attr-defined]
    assert inner.with_options(start_method="forkserver")(3) == 5


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_a_function_of_a_library_that_knows_nothing_of_ddpkit(method: str) -> None:
    assert run_ranks(dist.get_rank, start_method=method) == [0, 1]
    assert run_ranks(os.path.join, start_method=method, args=["a", "b"]) == ["a/b"] * 2


@pytest.mark.drill
def test_spawn() -> None:
    step = 3
    assert run_ranks(lambda: get_rank() + step, start_method="spawn") == [3, 4]


def test_a_method_takes_its_object_along() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.epochs = 4

        @two_ranks
        def fit(self, x: int) -> tuple[int, int]:
            self.epochs += x
            return self.epochs, get_rank()

    trainer = Trainer()
    assert trainer.fit.run_all(1) == [(5, 0), (5, 1)]
    assert trainer.epochs == 4  # the ranks work on copies


@needs_fork
def test_a_class_that_is_local_comes_back_as_the_same_class() -> None:
    class Result:
        def __init__(self, value: int) -> None:
            self.value = value

    results = run_ranks(lambda: Result(get_rank()), start_method="fork")
    assert [type(result) is Result for result in results] == [True, True]
    assert [result.value for result in results] == [0, 1]


def test_a_model_arrives_unwrapped() -> None:
    def train() -> torch.nn.Module:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        return model

    for model in run_ranks(train):
        assert type(model) is torch.nn.Linear


def test_tensors_stay_valid_after_the_ranks_have_gone() -> None:
    first, second = run_ranks(lambda: torch.full((1000,), get_rank()))
    assert int(first.sum()) == 0
    assert int(second.add_(1).sum()) == 2000


def test_a_result_of_100_mb() -> None:
    def function() -> torch.Tensor | None:
        return torch.arange(25_000_000, dtype=torch.int32) if get_rank() == 0 else None

    value, nothing = run_ranks(function)
    assert nothing is None
    assert value is not None
    assert value.shape == (25_000_000,)
    assert int(value[-1]) == 24_999_999


def test_collectives_and_agreement_work() -> None:
    def function() -> tuple[int, list[int]]:
        value = torch.tensor([get_rank() + 1])
        dist.all_reduce(value)
        return int(value), exchange(get_rank(), name="gather")

    assert run_ranks(function, 3) == [(6, [0, 1, 2])] * 3


# ------------------------------------------------------------------------------ environment

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_each_rank_has_the_variables_of_torchrun(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "changed since the forkserver started")

    def function() -> Any:
        mine = os.environ["DDPKIT_RANK_PID"] == str(os.getpid())
        values = [os.environ[name] for name in VARIABLES]
        return values, mine, os.environ["MY_SETTING"], int(os.environ["MASTER_PORT"]) > 0

    for rank, found in enumerate(run_ranks(function, start_method=method)):
        values = [str(rank), "2", str(rank), "2", "0", "127.0.0.1"]
        assert found == (values, True, "changed since the forkserver started", True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_variables_that_another_launcher_has_left_over_do_not_reach_the_ranks(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_over = {
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "GROUP_RANK": "1",
        "DDPKIT_LAUNCHER": "none",
    }
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)

    def function() -> Any:
        with process_group(device="cpu") as world:
            return world.node_rank, world.num_nodes, sorted(left_over.keys() & os.environ.keys())

    found = run_ranks(function, world_size, init_group=False)
    assert found == [(0, 1, ["DDPKIT_LAUNCHER", "GROUP_RANK"])] * world_size
    assert left_over.items() <= os.environ.items()


@needs_fork
def test_a_helper_of_a_rank_is_not_a_rank() -> None:
    def function() -> int:
        read_end, write_end = os.pipe()
        helper = os.fork()
        if helper == 0:
            os.write(write_end, bytes([get_world_size()]))
            os._exit(0)
        os.waitpid(helper, 0)
        return os.read(read_end, 1)[0]

    assert run_ranks(function, start_method="fork", init_group=False) == [1, 1]


def test_launches_of_different_sizes_leave_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    for world_size in (2, 1, 3):
        assert run_ranks(get_rank, world_size) == list(range(world_size))
        assert dict(os.environ) == before


def test_the_number_of_ranks_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_NPROC_PER_NODE", "3")
    default = distributed(get_world_size, device="cpu")
    assert default() == 3
    assert default.with_options(nproc_per_node=2)() == 2


def test_the_cores_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, usable_cores() // 2)
    before = torch.get_num_threads()

    def function() -> tuple[int, str]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run_ranks(function) == [(share, str(share))] * 2
    assert torch.get_num_threads() == before


def test_the_users_number_of_threads_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks(torch.get_num_threads) == [3, 3]


@pytest.mark.parametrize("method", [FORK, "forkserver"])
def test_the_ranks_draw_from_the_state_of_the_caller(method: str) -> None:
    torch.manual_seed(5)
    random.seed(5)

    np.random.seed(5)

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), np.random.random()

    states = torch.get_rng_state(), random.getstate()
    results = run_ranks(draw, start_method=method)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert results == [draw()] * 2


@pytest.fixture
def _other_settings_of_torch() -> Iterator[None]:
    inherited = Inherited.capture()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    yield
    torch.set_default_device(None)
    inherited.restore()


@pytest.mark.usefixtures("_other_settings_of_torch")
@pytest.mark.parametrize("method", [FORK, "forkserver"])
def test_the_ranks_have_the_settings_of_torch_of_the_caller(method: str) -> None:
    def settings() -> Any:
        cudnn = torch.backends.cudnn
        return (
            *(torch.ones(1).dtype, torch.ones(1).device.type, torch.is_grad_enabled()),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            *(cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        )

    expected = (torch.float64, "meta", False, True, True, "high", True, True, False)
    found = run_ranks(settings, start_method=method, init_group=False)
    assert found == [expected] * 2


@pytest.mark.parametrize("method", [FORK, "forkserver"])
def test_what_a_rank_prints_goes_where_the_caller_prints(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        print(f"hello from {get_rank()}")  # noqa: T201
        print(f"trouble on {get_rank()}", file=sys.stderr)  # noqa: T201

    run_ranks(function, start_method=method)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["hello from 0", "hello from 1"]
    assert "trouble on 0" in captured.err
    assert "trouble on 1" in captured.err


@pytest.mark.parametrize("method", [FORK, "forkserver"])
def test_what_a_rank_prints_is_not_lost_where_the_caller_prints_into_memory(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        print(f"hello from {get_rank()}")  # noqa: T201
        print(f"trouble on {get_rank()}", file=sys.stderr)  # noqa: T201

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_ranks(function, start_method=method)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["hello from 0", "hello from 1"]
    assert "trouble on 0" in captured.err
    assert "trouble on 1" in captured.err


def test_a_group_is_open_in_a_rank_and_none_in_the_caller() -> None:
    assert run_ranks(lambda: (dist.is_initialized(), str(get_device()))) == [(True, "cpu")] * 2
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------ inside a rank


def test_a_decorated_call_inside_a_rank_runs_there() -> None:
    @distributed(device="cpu")
    def inner() -> tuple[int, int]:
        return os.getpid(), get_rank()

    def outer() -> bool:
        return inner() == (os.getpid(), get_rank()) and inner.run_all() == exchange(
            (os.getpid(), get_rank()), name="gather"
        )

    assert run_ranks(outer) == [True, True]


def test_the_same_number_of_ranks_inside_a_rank_is_fine() -> None:
    assert run_ranks(lambda: scaled_rank.run_all()) == [[10, 20], [10, 20]]


def test_another_number_of_ranks_inside_a_rank_is_refused() -> None:
    inner = distributed(get_rank, nproc_per_node=4)
    with pytest.raises(ConfigError, match=r"nproc_per_node=4 was given.* a world of 2"):
        run_ranks(lambda: inner())


@pytest.mark.parametrize("method", ["auto", "forkserver"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_legacy_function_opens_the_group_itself(method: str, world_size: int) -> None:
    def legacy() -> tuple[int, int]:
        assert not dist.is_initialized()
        hook = sys.excepthook
        dist.init_process_group("gloo")
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value)
        rank = dist.get_rank()
        dist.destroy_process_group()
        sys.excepthook = hook
        return rank, int(value)

    results = run_ranks(legacy, world_size, start_method=method, init_group=False)
    assert results == [(rank, sum(range(world_size + 1))) for rank in range(world_size)]


# --------------------------------------------------------------------------- before any process


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(supervisor.Supervisor, "_start_process", refuse)


@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="what is local cannot be pickled anyway"
)
@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_helpers_of_a_rank_start_as_those_of_the_caller_would(method: str) -> None:
    class Local(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    def function() -> tuple[str, int]:
        # What has to be pickled for its worker cannot be a class of a function.
        items = list(DataLoader(Local(), batch_size=2, num_workers=1))
        return multiprocessing.get_start_method(), sum(int(each.sum()) for each in items)

    here = multiprocessing.get_start_method()
    assert run_ranks(function, start_method=method) == [(here, 6), (here, 6)]


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_an_argument_that_cannot_be_sent_is_refused_under_every_start_method(method: str) -> None:
    with (
        socket.socket() as connection,
        pytest.raises(ConfigError, match=r"^argument 'x'\['db'\] is a socket\.socket"),
    ):
        run_ranks(lambda x: x, start_method=method, args=[{"db": connection}])


@pytest.mark.usefixtures("_nothing_starts")
def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start_method='thread'.*one of auto, fork"):
        run_ranks(get_rank, start_method="thread")


@pytest.mark.usefixtures("_nothing_starts")
def test_a_fork_that_is_not_safe_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddpkit.launch.forksafe.prepare_fork", lambda: "two threads are running")
    with pytest.raises(ConfigError, match=r"cannot be forked safely: two threads are running"):
        run_ranks(get_rank, start_method="fork")


def test_where_a_fork_is_not_safe_the_forkserver_starts_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddpkit.launch.forksafe.prepare_fork", lambda: "two threads are running")
    parents = run_ranks(os.getppid)
    assert os.getpid() not in parents


def test_the_longest_times_can_be_waited_for() -> None:
    assert run_ranks(get_rank, timeout=1e9, time_limit=1e9) == [0, 1]


def test_a_model_among_the_arguments_is_warned_of() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="argument 'model' holds a model") as caught:
        run_ranks(lambda model: None, args=[model])
    assert len(caught) == 1


# --------------------------------------------------------- what ranks import first, and at length


@needs_fork
def test_what_ranks_of_one_launch_have_imported_the_next_one_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "colorsys"  # in place of torch's compiler, which may be loaded here already
    for module in (start, worker):
        monkeypatch.setattr(module, "COMPILER", name)
    monkeypatch.setattr(start._Experience, "ranks_use_compiler", False)
    monkeypatch.delitem(sys.modules, name, raising=False)

    def use() -> bool:
        found = name in sys.modules
        importlib.import_module(name)
        return found

    assert run_ranks(use) == [False, False]
    assert name not in sys.modules  # nobody has to wait for it at the end of a launch
    assert run_ranks(use) == [True, True]
    assert name in sys.modules


def test_a_launch_that_does_not_need_the_compiler_imports_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (start, worker):
        monkeypatch.setattr(module, "COMPILER", "colorsys")
    monkeypatch.setattr(start._Experience, "ranks_use_compiler", False)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    for _ in range(2):
        run_ranks(get_rank)
    assert "colorsys" not in sys.modules


@pytest.mark.drill
def test_a_forkserver_skips_the_end_of_the_interpreter() -> None:
    program = "import atexit; atexit.register(print, 'late'); import ddpkit.launch.preload"
    command = [sys.executable, "-W", "ignore", "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=55, check=True)
    assert finished.stdout == ""


# --------------------------------------------------------------------------------- the check-in


@pytest.fixture
def _forks_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_prove_usable", lambda spec: time.sleep(60))
    bounds = {**supervisor._CHECK_IN_BOUND, "fork": 0.5}
    monkeypatch.setattr(supervisor, "_CHECK_IN_BOUND", bounds)


@needs_fork
@pytest.mark.usefixtures("_forks_hang")
def test_a_fork_that_hangs_is_replaced_with_one_warning() -> None:
    with pytest.warns(RuntimeWarning, match="start_method='forkserver'") as caught:
        assert run_ranks(os.getppid) != [os.getpid()] * 2
    assert len(caught) == 1
    assert "did not check in" in str(caught[0].message)


@needs_fork
@pytest.mark.usefixtures("_forks_hang")
def test_a_requested_fork_that_hangs_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"by 'fork'.*did not check in.*Nothing of the function"):
        run_ranks(get_rank, start_method="fork")


@needs_fork
def test_a_fork_that_ends_before_it_checks_in_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_prove_usable", lambda spec: os._exit(5))
    with pytest.warns(RuntimeWarning, match=r"ended with 5"):
        assert run_ranks(get_rank) == [0, 1]


@needs_fork
def test_no_warning_of_forks_with_threads() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ones(1 << 22).add_(1)
        parents = run_ranks(os.getppid)
    assert parents == [os.getpid()] * 2


@pytest.mark.parametrize("method", ["auto", "forkserver"])
def test_a_partial_is_a_function(method: str) -> None:
    assert run_ranks(functools.partial(pow, 2, 3), start_method=method) == [8, 8]
